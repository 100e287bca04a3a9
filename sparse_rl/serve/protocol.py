"""Requests in OpenAI's protocol, and how they are refused.

Fields that vLLM has and OpenAI lacks (top_k, return_token_ids, stop_token_ids, ...) have vLLM's names. An unsupported
field that would change the answer is refused; others are ignored, because clients send many.
"""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MOST_STOPS = 16
MOST_TOP = 20  # top_logprobs


def _printable(text: str) -> str:
    """Text that a request may have brought, with half surrogates replaced: UTF-8 cannot write them."""
    return text.encode("utf-8", "replace").decode()


class Refusal(Exception):
    """An error response in OpenAI's format."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        message = _printable(message)
        param = param and _printable(param)
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


class StreamOptions(BaseModel):
    include_usage: bool = False


class Asked(BaseModel):
    """The fields that chats and completions have in common."""

    model_config = ConfigDict(allow_inf_nan=False)

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=100)  # below 1e-5: greedy, as vLLM has it
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=64)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = Field(default_factory=list, max_length=MOST_STOPS)
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    trace: bool = False  # ours: keep the trace, which /v1/traces/ID then returns
    map: bool = False  # ours: what every head still sees, while it streams
    # What would change the answer, and is not supported: any other value is refused.
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    min_p: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    def check(self) -> None:
        neutral = {"repetition_penalty": 1}
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "logit_bias"):
            value = getattr(self, name)
            if value and value != neutral.get(name):
                raise Refusal(400, f"{name} is not supported; leave it out.", param=name)
        if self.response_format and self.response_format.get("type", "text") != "text":
            raise Refusal(400, "response_format is not supported but for text; leave it out.", param="response_format")
        if len(self.stops) > MOST_STOPS or not all(self.stops):
            raise Refusal(400, f"stop holds up to {MOST_STOPS} texts, none of them empty.", param="stop")
        if odd := [i for i in self.stop_token_ids if not 0 <= i < 2**31]:
            raise Refusal(400, f"stop_token_ids holds {str(odd[0])[:30]}, which is no token.", param="stop_token_ids")
        if self.map and not self.stream:
            raise Refusal(400, "map needs stream: true; it is sent while the answer grows.", param="map")


class ChatRequest(Asked):
    messages: list[dict[str, Any]] = Field(min_length=1, max_length=4096)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    tools: list[dict[str, Any]] | None = Field(None, max_length=256)
    tool_choice: Literal["none", "auto"] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_generation_prompt: bool = True
    conversation: str | None = Field(None, min_length=1, max_length=200)  # ours: go on with it in its row
    renew: bool = False  # ours: do not go on in its row, but read all messages anew

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int:
        return self.top_logprobs or 0

    def check(self) -> None:
        super().check()
        if self.top and not self.logprobs:
            raise Refusal(400, "top_logprobs needs logprobs: true.", param="top_logprobs")
        if self.conversation is not None and (self.n > 1 or not self.add_generation_prompt):
            raise Refusal(400, "a conversation has one answer (n: 1), which is asked for.", param="conversation")
        if self.renew and self.conversation is None:
            raise Refusal(400, "renew needs a conversation, which it begins anew; name one.", param="renew")
        _check_top(self.top, self.stream, "top_logprobs")


class CompletionRequest(Asked):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MOST_TOP)
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    @property
    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def top(self) -> int:
        return self.logprobs or 0

    @property
    def prompts(self) -> list[str | list[int]]:
        """One prompt, or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and all(isinstance(token, int) for token in self.prompt):
            return [self.prompt]  # pyright: ignore[reportReturnType]
        return list(self.prompt)  # pyright: ignore[reportReturnType]

    def check(self) -> None:
        super().check()
        if self.suffix:
            raise Refusal(400, "suffix is not supported; leave it out.", param="suffix")
        if self.best_of not in (None, self.n):
            raise Refusal(400, f"best_of is {self.best_of}, but only n ({self.n}) is supported.", param="best_of")
        self.check_prompts()
        if len(self.prompts) * self.n > 256:
            raise Refusal(400, f"{len(self.prompts)} prompts x n {self.n} are more than 256 answers.", param="prompt")
        _check_top(self.top, self.stream, "logprobs")
        if self.echo and self.stream:
            raise Refusal(400, "echo cannot be streamed; leave out one of the two.", param="echo")

    def check_prompts(self) -> None:
        if not self.prompts:
            raise Refusal(400, "prompt is empty; give a text or a list of token ids.", param="prompt")


class GenerateRequest(BaseModel):
    """vLLM's /inference/v1/generate: token ids in, token ids out."""

    model_config = ConfigDict(allow_inf_nan=False)

    token_ids: list[int] = Field(min_length=1)
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    request_id: str | None = Field(None, min_length=1, max_length=200)
    stream: bool = False
    trace: bool = False

    def asked(self) -> CompletionRequest:
        """The same as a completion. Log-probs are always those of the distribution that was sampled from.

        As in vLLM, the model's own config cuts nothing off that distribution here: a trainer knows what it asked for.
        Clients that want those of sampled tokens alone write 0 or 1; other tokens would cost a pass of their own.
        """
        known = {name: value for name, value in self.sampling_params.items() if value is not None}
        known["logprobs"] = 0 if known.get("logprobs", 0) in (0, 1) else known["logprobs"]
        known = {"max_tokens": None, "temperature": 1.0, "top_p": 1.0, "top_k": 0, **known}
        return parsed(CompletionRequest, {**known, "prompt": self.token_ids, "model": self.model, "trace": self.trace})


def _check_top(top: int, stream: bool, param: str) -> None:
    if top and stream:
        message = "the most likely other tokens are found when an answer is complete, so they cannot be streamed."
        raise Refusal(400, f"{message} Leave out stream or {param}.", param=param)


Model = TypeVar("Model", bound=BaseModel)


def parsed(kind: type[Model], data: Any) -> Model:
    """A request, or a refusal that names the first thing that is wrong with it."""
    if not isinstance(data, dict):
        raise Refusal(400, f"the body is {type(data).__name__}, not an object.")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"][:4])[:100]
        raise Refusal(400, f"{where}: {first['msg']}"[:500], param=where or None) from None
    except RecursionError:
        raise Refusal(400, "the body is nested too deeply.") from None


def parse_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise Refusal(400, f"the body is not JSON ({str(error)[:100]}).") from None
