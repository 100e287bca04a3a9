"""Translate between messages and tokens, without ever encoding sampled tokens again.

    heard      sampled tokens -> the model's message, with its tool calls
    given      a reply's messages -> the tokens that are fed after what was sampled

The tokens of a reply come from the template: the conversation is rendered with the reply and without it, and the
difference is encoded. A template that rewrites earlier turns once a message follows them is refused, because the model
would read other tokens than it sampled.

Prompts of plain text need no template. A call is then the last line of a turn, `name(arguments)`; a reply is its
content and a new line; a turn ends with the model's end token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Protocol

from ..errors import SparseRLError
from ..models import encode
from ..tasks import Message, Prompt, Task

_CALL = re.compile(r"([A-Za-z_]\w{0,60})\((.*)\)")
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_NO_CALL = {"type": "function", "function": {"name": None, "arguments": None}}  # one that cannot be read


class Chat(Protocol):
    """The interface that writes one task's conversations for one tokenizer."""

    def start(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt."""
        ...

    def heard(self, tokens: Sequence[int]) -> Message:
        """What the policy said in a turn."""
        ...

    def given(self, messages: list[Message], reply: list[Message]) -> list[int]:
        """The tokens of a reply to messages, the last of which the policy said."""
        ...

    def said(self, messages: list[Message], message: Message) -> list[int]:
        """The tokens, end included, with which the policy would say this after these messages; for warm-up."""
        ...


class Chats:
    """The chats of a task, or of the tasks of a mixture; each is made and checked when its first prompt comes."""

    def __init__(self, tokenizer, task: Task, end: int):
        """end: the token that ends a turn"""
        self.tokenizer, self.task, self.end = tokenizer, task, end
        self.made: dict[tuple[int, bool], Chat] = {}

    def of(self, prompt: Prompt) -> Chat:
        member, plain = self.task.of(prompt), isinstance(prompt.text, str)
        key = (id(member), plain)
        if key not in self.made:
            self.made[key] = (PlainChat if plain else TemplateChat)(self.tokenizer, member, self.end)
        return self.made[key]


def first_messages(prompt: Prompt) -> list[Message]:
    """A prompt as messages."""
    return [{"role": "user", "content": prompt.text}] if isinstance(prompt.text, str) else list(prompt.text)


class PlainChat:
    def __init__(self, tokenizer, task: Task, end: int):
        self.tokenizer, self.task, self.end = tokenizer, task, end

    def start(self, prompt: Prompt) -> list[int]:
        return encode(self.tokenizer, prompt.text)

    def heard(self, tokens: Sequence[int]) -> Message:
        text = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        message: Message = {"role": "assistant", "content": text}
        call = _CALL.fullmatch(text.rstrip().rpartition("\n")[2]) if self.task.tools else None
        if call is not None:
            message["tool_calls"] = [{"type": "function", "function": {"name": call[1], "arguments": call[2]}}]
        return message

    def given(self, messages: list[Message], reply: list[Message]) -> list[int]:
        return self._encoded("".join(message["content"] + "\n" for message in reply))

    def said(self, messages: list[Message], message: Message) -> list[int]:
        calls = [call["function"] for call in message.get("tool_calls", ())]
        written = [f"{call['name']}({_plain(call['arguments'])})" for call in calls]
        return [*self._encoded("\n".join([message["content"]] * bool(message["content"]) + written)), self.end]

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def _plain(arguments: dict[str, Any]) -> str:
    """Arguments in the plain notation: a text as it is, several as JSON."""
    values = list(arguments.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return ", ".join(json.dumps(value, ensure_ascii=False) for value in values)


class TemplateChat:
    def __init__(self, tokenizer, task: Task, end: int):
        self.tokenizer, self.task, self.end = tokenizer, task, end
        self.tools = list(task.tools) or None
        self.ending = tokenizer.convert_ids_to_tokens(end)
        self._check()

    def start(self, prompt: Prompt) -> list[int]:
        if self.tools is None:
            return encode(self.tokenizer, prompt.text)
        encode(self.tokenizer, prompt.text)  # refuses what is no text
        return self._encoded(self._rendered(first_messages(prompt), True))

    def heard(self, tokens: Sequence[int]) -> Message:
        tokens = list(tokens)
        text = self.tokenizer.decode(tokens, skip_special_tokens=True)
        message: Message = {"role": "assistant", "content": text}
        if self.tools is not None and (calls := self._calls(tokens)):
            message["tool_calls"] = calls
        return message

    def given(self, messages: list[Message], reply: list[Message]) -> list[int]:
        before, after = self._rendered(messages, False), self._rendered([*messages, *reply], True)
        return self._encoded(appended(before, after, self.ending))

    def said(self, messages: list[Message], message: Message) -> list[int]:
        before, after = self._rendered(messages, True), self._rendered([*messages, message], False)
        text, found, _ = after[len(before) :].rpartition(self.ending)
        if not after.startswith(before) or not found:
            raise SparseRLError(
                "the chat template writes an assistant's turn differently from the way it asks for one, so worked "
                "solutions cannot be taught; use another template, or prompts of plain text."
            )
        return [*self._encoded(text), self.end]

    def _calls(self, tokens: list[int]) -> list[Any]:
        assert self.tools is not None
        return calls_in(self.tokenizer, self.tokenizer.decode(tokens), self.tools, self.opening)

    def _check(self) -> None:
        """Refuse, before anything is sampled, a template that cannot hold the conversations of this task."""
        if self.tools is not None and getattr(self.tokenizer, "response_template", None) is None:
            template = self.tokenizer.chat_template
            if template is not None and "<tool_call>" not in str(template):
                raise SparseRLError(
                    f"the task {self.task.name} has tools, but this tokenizer does not say how the model calls them: "
                    "it has no response_template, and its chat template no <tool_call>; set "
                    "tokenizer.response_template, or use prompts of plain text."
                )
        role = "tool" if self.tools is not None else "user"
        asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        self.given(asked, [{"role": role, "name": "c", "content": "d"}])
        before, after = (self._rendered(asked, ask) for ask in (False, True))
        self.opening = after[len(before) :]  # with which the model is asked

    def _rendered(self, messages: list[Message], ask: bool) -> str:
        """ask: with what makes the model speak"""
        if self.tokenizer.chat_template is None:
            raise SparseRLError(
                "the prompts are chat messages, but this tokenizer has no chat template; use prompts of plain text."
            )
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=self.tools, add_generation_prompt=ask, tokenize=False
            )
        except Exception as error:  # of the template, or of the description of a tool
            raise SparseRLError(
                f"the chat template cannot write this conversation ({type(error).__name__}: {error}); its tools need "
                "types and a docstring with `Args:`, and its roles must be known to the template."
            ) from error

    def _encoded(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


def appended(before: str, after: str, ending: str) -> str:
    """What a template writes after the end of the model's last turn.

    before: all messages up to that turn, rendered; after: with what follows; ending: the text of a turn's end token
    """
    if not after.startswith(before):
        raise SparseRLError(
            "the chat template rewrites earlier turns once a message follows them (many templates drop the "
            "reasoning of earlier turns), so the model would read other tokens than it sampled; use a template "
            "that only appends, or a model without a chat template."
        )
    _, found, rest = before.rpartition(ending)
    if not found:
        raise SparseRLError(f"the chat template does not end a turn with {ending!r}; use one that does.")
    return rest + after[len(before) :]


def calls_in(tokenizer, text: str, tools: list[Any], prefix: str) -> list[Any]:
    """The calls of a turn, as the model's own format has them. One that cannot be read has no name.

    text: of the turn, with its special tokens; prefix: what stood before, as far as the format needs it
    """
    if getattr(tokenizer, "response_template", None) is not None:
        try:
            return tokenizer.parse_response(text, prefix=prefix, tools=tools).get("tool_calls") or []
        except Exception:  # whatever a parser says of a turn that it cannot read
            return [_NO_CALL]
    return [_tagged(found) for found in _TAGGED.findall(text)]


def _tagged(text: str) -> dict[str, Any]:
    """A call between tags, as JSON with a name and arguments."""
    try:
        found = json.loads(text)
        return {"type": "function", "function": {"name": found["name"], "arguments": found.get("arguments", {})}}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return _NO_CALL
