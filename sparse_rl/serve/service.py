"""The state of a server: a model, its tokenizer, the engines behind its names, and the command line's settings."""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from ..models import end_token, stop_ids
from ..records import Trajectory
from ..rollout import Sampling
from .conversations import Conversations
from .desk import Desk
from .protocol import Asked, ChatRequest, CompletionRequest, Refusal

_TRACES = 256 * 2**20  # bytes of traces that are kept
_TRACE_SECONDS = 600
_GREEDY = 1e-5  # temperatures below this one are 0: logits that are divided by them may overflow
_HELD_SECONDS = 600  # that a conversation is kept after its last answer


@dataclass(frozen=True)
class Settings:
    prompt_tokens: int  # of the longest prompt
    max_tokens: int  # of prompt and answer
    api_keys: tuple[str, ...] = ()
    admin_key: str | None = None
    weights_root: Path | None = None
    loopback: bool = True  # whether the server listens on loopback only
    most_bytes: int = 8 * 2**20  # of a request
    patience: float = 30.0  # seconds that the body of a request may take to arrive


class Traces:
    """Keeps traces that clients may fetch: those of the last ten minutes, as many as fit."""

    def __init__(self, most: int = _TRACES, seconds: float = _TRACE_SECONDS):
        self.most, self.seconds, self.size = most, seconds, 0
        self._kept: OrderedDict[str, tuple[bytes, float, str]] = OrderedDict()
        self._lock = threading.Lock()

    def put(self, trajectory: Trajectory, owner: str) -> str:
        content, identity = trajectory.trace.to_bytes(), secrets.token_urlsafe(18)
        with self._lock:
            self._kept[identity] = content, time.monotonic() + self.seconds, owner
            self.size += len(content)
            self._forget()
        return identity

    def get(self, identity: str, owner: str | None) -> bytes | None:
        """owner: None: anybody's"""
        with self._lock:
            self._forget()
            content, _, whose = self._kept.get(identity, (None, 0.0, ""))
        return content if owner is None or whose == owner else None

    def _forget(self) -> None:
        now = time.monotonic()
        while self._kept:
            identity, (content, end, _) = next(iter(self._kept.items()))
            if self.size <= self.most and end > now:
                return
            del self._kept[identity]
            self.size -= len(content)


@dataclass
class Service:
    model: nn.Module
    tokenizer: Any
    desk: Desk
    settings: Settings
    template: str | None = None  # of training, for models without a chat template
    since: float = field(default_factory=time.time)
    traces: Traces = field(default_factory=Traces)

    def __post_init__(self):
        self.stop_ids = stop_ids(self.model, self.tokenizer)
        self.end = end_token(self.model, self.tokenizer)  # of a turn
        rows = next(iter(self.desk.places.values())).engine.rows
        self.conversations = Conversations(self.desk, 4 * rows, _HELD_SECONDS)
        config = getattr(self.model, "generation_config", None)
        sampled = config if config is not None and getattr(config, "do_sample", False) else None
        self.defaults = {
            "temperature": float(getattr(sampled, "temperature", None) or 1.0),
            "top_p": float(getattr(sampled, "top_p", None) or 1.0),
            "top_k": int(getattr(sampled, "top_k", None) or 0),
        }

    def check_answers(self, name: str, answers: int) -> None:
        """More answers than may wait could never be accepted, however often they were asked for again."""
        if (most := self.desk.most_waiting(name)) is not None and answers > most:
            raise Refusal(400, f"{answers} answers are asked for at once, but at most {most} may wait.", param="n")

    @property
    def vocabulary(self) -> int:
        return next(iter(self.desk.places.values())).engine.shape.vocabulary

    @property
    def version(self) -> int:
        """Optimizer steps behind the weights."""
        return next(iter(self.desk.places.values())).engine.version

    def name_of(self, wanted: str | None) -> str:
        """The engine that a request asks for."""
        if not wanted:
            return next(iter(self.desk.places))
        if wanted not in self.desk.places:
            known = ", ".join(self.desk.places)
            message = f"there is no model {wanted[:100]!r} here; there is: {known}."
            raise Refusal(404, message, param="model", code="model_not_found")
        return wanted

    def about(self, name: str) -> dict[str, Any]:
        """An entry of /v1/models."""
        engine = self.desk.places[name].engine
        compressor = engine.compressor
        cache: dict[str, Any] = {"compressor": compressor.name, "rows": engine.rows, "version": engine.version}
        if compressor.has_budget:
            cache |= {"budget": compressor.budget, "interval": compressor.interval}
        return {
            "id": name,
            "object": "model",
            "created": int(self.since),
            "owned_by": "sparse-rl",
            "max_model_len": self.settings.max_tokens,
            "sparse_rl": cache,
        }

    def sampling(self, asked: Asked, prompt: int, goes_on: bool = False) -> Sampling:
        """How an answer to a prompt of so many tokens is drawn: as asked, else as the model's config says.

        goes_on: the prompt is a conversation that goes on in its row
        """
        room = self.settings.max_tokens - prompt
        if prompt < 1 or room < 1 or not (goes_on or prompt <= self.settings.prompt_tokens):
            most = self.settings.max_tokens - 1 if goes_on else self.settings.prompt_tokens
            raise Refusal(  # clients look for "context length"
                400,
                f"the prompt has {prompt} tokens, but the context length allows 1 to {most} "
                f"({self.settings.max_tokens} with the answer).",
                code="context_length_exceeded",
            )
        assert isinstance(asked, ChatRequest | CompletionRequest)
        wanted = asked.limit
        chosen = {name: value for name in self.defaults if (value := getattr(asked, name)) is not None}
        chosen = self.defaults | chosen
        stops = () if asked.ignore_eos else self.stop_ids
        sampling = Sampling(
            max_new_tokens=room if wanted is None else min(wanted, room),
            temperature=chosen["temperature"] if chosen["temperature"] >= _GREEDY else 0.0,
            top_k=min(max(0, chosen["top_k"]), self.vocabulary),
            top_p=chosen["top_p"],
        )
        return replace(sampling, stop_ids=tuple(sorted({*stops, *asked.stop_token_ids})))
