"""Turn messages and texts into token ids."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from ..chat import appended
from ..errors import SparseRLError
from ..models import encode
from ..tasks.templates import dress
from .protocol import ChatRequest, Refusal

Result = TypeVar("Result")
_READING = ThreadPoolExecutor(1, "prompts")  # one thread: tokenizers are not made for several


async def reading(job: Callable[[], Result]) -> Result:
    """Read a prompt in a thread of its own: megabytes of text take seconds, in which other streams go on."""
    return await asyncio.get_running_loop().run_in_executor(_READING, job)


def chat_prompt(tokenizer, template: str | None, asked: ChatRequest) -> list[int]:
    """A chat through the tokenizer's template; without one, a single question in the template that training used."""
    messages = [_message(message, i) for i, message in enumerate(asked.messages)]
    if getattr(tokenizer, "chat_template", None) is None:
        return _question(tokenizer, template, messages, asked)
    text = _rendered(tokenizer, asked, messages, asked.add_generation_prompt)
    return _encoded(tokenizer, text)


def _encoded(tokenizer, text: str) -> list[int]:
    """The tokens of a rendered chat."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refusal(400, "a message holds half of a surrogate pair, which is not text.", param="messages") from None
    return tokenizer.encode(text, add_special_tokens=False)


def _rendered(tokenizer, asked: ChatRequest, messages: list[dict[str, Any]], ask: bool) -> str:
    """ask: with what makes the model speak"""
    tools = _tools(asked)
    more = asked.chat_template_kwargs  # values for the template; nothing that changes how it is rendered, nor which
    if odd := [name for name in more if name in inspect.signature(tokenizer.apply_chat_template).parameters]:
        message = f"chat_template_kwargs may not hold {odd[0]}; it holds values for the model's template."
        raise Refusal(400, message, param="chat_template_kwargs")
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=ask, tokenize=False, **more)
    except Exception as error:  # the template is the model's own program: whatever it raises is about the messages
        raise Refusal(400, f"the model's chat template refuses these messages ({str(error)[:200]}).") from error


def continuation(tokenizer, end: int, asked: ChatRequest, known: int) -> list[int]:
    """The tokens that follow a conversation in its row: all of the template's text after the end of the last turn.

    known: how many messages it has, the model's last one included; end: the token that ends a turn
    """
    messages = [_message(message, i) for i, message in enumerate(asked.messages)]
    before, after = (
        _rendered(tokenizer, asked, part, ask) for part, ask in ((messages[:known], False), (messages, True))
    )
    try:
        text = appended(before, after, tokenizer.convert_ids_to_tokens(end))
    except SparseRLError as error:
        raise Refusal(400, f"{error} Or leave out `conversation`.", param="conversation") from error
    return _encoded(tokenizer, text)


def _tools(asked: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools that the template tells the model of."""
    return asked.tools if asked.tools and asked.tool_choice != "none" else None


def past(asked: ChatRequest, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a conversation was made of: what the template was told beside the messages, then these. One that goes on
    must begin with it; other tools, say, are told before the first message, so all of it must be read anew.
    """
    return [{"tools": _tools(asked), "more": asked.chat_template_kwargs}, *map(essence, messages)]


def essence(message: dict[str, Any]) -> dict[str, Any]:
    """What of a message the model reads, however a client wrote it down."""
    calls = message.get("tool_calls") or []
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    called = [(f.get("name"), _as_text(f.get("arguments"))) for f in functions if isinstance(f, dict)]
    names = {key: message[key] for key in ("name", "tool_call_id") if message.get("role") == "tool" and key in message}
    return {"role": message.get("role"), "content": message.get("content") or "", "calls": called, **names}


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def text_prompt(tokenizer, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return list(prompt)
    try:
        return encode(tokenizer, prompt)
    except SparseRLError as error:
        raise Refusal(400, str(error), param="prompt") from error


def _message(message: dict[str, Any], place: int) -> dict[str, Any]:
    """A message with its content as text; calls of tools with their arguments as objects, as templates want them."""
    where = f"messages.{place}"
    if not isinstance(message.get("role"), str):
        raise Refusal(400, f"{where} has no role.", param=where)
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise Refusal(400, f"{where} holds something other than text, which this model cannot read.", param=where)
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str | None):
        raise Refusal(400, f"{where}: its content is {type(content).__name__}, not text.", param=where)
    try:
        (content or "").encode()
    except UnicodeEncodeError:
        raise Refusal(400, f"{where} holds half of a surrogate pair, which is not text.", param=where) from None
    said = {**message, "content": content or ""}
    if calls := message.get("tool_calls"):
        said["tool_calls"] = [_call(call, where) for call in calls] if isinstance(calls, list) else _refuse(where)
    return said


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(where)
    assert isinstance(function, dict)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # a template may show it as the text that it is
            arguments = json.loads(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def _refuse(where: str) -> Any:
    raise Refusal(400, f"{where}: tool_calls is not a list of calls of functions.", param=where)


def _question(tokenizer, template: str | None, messages: list[dict[str, Any]], asked: ChatRequest) -> list[int]:
    if len(messages) > 1 or messages[0]["role"] != "user" or asked.tools:
        raise Refusal(400, "this model has no chat template: it takes one user message, or /v1/completions.")
    text = messages[0]["content"]
    return encode(tokenizer, text if template is None else dress(text, template))
