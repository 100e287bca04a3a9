"""A task's side of a conversation: tools are called, replies are checked, and what fails costs one conversation.

A tool is a typed Python function. A call that cannot be made (no such tool, other arguments, an error inside) is
answered by a message that says so, which the model reads: it is no fault. A fault is a reply that raises, or that is no
list of messages; the conversation ends there, and so it does when a reply hangs or its process dies (replies.py).

Messages have a role and a content, as in chat templates. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

from .judging import problem_of
from .problem import Message, Prompt

if TYPE_CHECKING:
    from .base import Task

MOST_CHARACTERS = 100_000  # of a message; what is longer is cut before it is sent to the rollout
MOST_MESSAGES = 64  # of a reply
MOST_CALLS = 16  # of a turn
ROLES = ("tool", "user", "system")
CUT = "\n[cut]"
_PLAIN = {int: (int,), float: (int, float), str: (str,), bool: (bool,), list: (list,), dict: (dict,)}


@dataclass(frozen=True)
class Reply:
    """What came of asking a task."""

    messages: list[Message] | None = None  # what the model reads next; None: the conversation ends
    fault: str | None = None  # why there is no reply: `timeout` or `error`
    problem: str | None = None  # what went wrong, in a sentence
    tool_errors: int = 0  # calls that could not be made
    cut: int = 0  # messages that were cut
    graded: str | None = None  # at the end: what is graded, if an environment says so instead of `Task.transcript`


def said(content: str) -> Message:
    """A message of the model, as worked solutions have them."""
    return {"role": "assistant", "content": content}


def called(name: str, **arguments: Any) -> Message:
    """A message of the model that calls a tool."""
    return {"role": "assistant", "content": "", "tool_calls": [_call(name, arguments)]}


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def answered(task: Task, prompt: Prompt, messages: list[Message]) -> Reply:
    """A task's reply, whatever it does, short of never returning."""
    try:
        found = task.reply(prompt, messages)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
        return checked(found)
    except (Exception, SystemExit) as error:
        return Reply(fault="error", problem=problem_of(error, prompt))


async def _awaited(coroutine: Any) -> Any:
    return await coroutine


def checked(found: Any) -> Reply:
    """What `reply` returned, as plain messages."""
    if found is None:
        return Reply()
    if not isinstance(found, (list, tuple)) or not found:
        raise TypeError(f"reply returned {found!r:.80}; it must return a list of messages, or None to end")
    if len(found) > MOST_MESSAGES:
        raise ValueError(f"reply returned {len(found)} messages; at most {MOST_MESSAGES} are read")
    messages = [_message(message) for message in found]
    errors = sum(bool(message.get("error")) for message in found)
    return Reply([message for message, _ in messages], tool_errors=errors, cut=sum(cut for _, cut in messages))


def _message(given: Any) -> tuple[Message, bool]:
    """A message with the keys that templates know, and whether it was cut."""
    if not isinstance(given, Mapping) or given.get("role") not in ROLES or not isinstance(given.get("content"), str):
        raise TypeError(
            f"reply returned {given!r:.80}; a message has a role ({', '.join(ROLES)}) and a content of text"
        )
    content = given["content"].encode("utf-8", "replace").decode("utf-8")  # halves of surrogate pairs are no text
    cut = len(content) > MOST_CHARACTERS
    content = content[:MOST_CHARACTERS] + CUT if cut else content
    more = {key: given[key] for key in ("name", "tool_call_id") if isinstance(given.get(key), str)}
    return {"role": given["role"], "content": content, **more}, cut


def call_tools(tools: Sequence[Callable[..., Any]], messages: list[Message]) -> list[Message] | None:
    """The results of the last message's calls, as messages; None if it calls nothing."""
    calls = messages[-1].get("tool_calls") or []
    if not calls:
        return None
    known = {tool.__name__: tool for tool in tools}
    answers = [_answer(known, call) for call in calls[:MOST_CALLS]]
    if len(calls) > MOST_CALLS:
        answers[-1] = _error(f"{len(calls)} calls in one turn, but at most {MOST_CALLS} are made")
    return answers


def _answer(tools: Mapping[str, Callable[..., Any]], call: Any) -> Message:
    """One call's message. Whatever is wrong with it is told to the model."""
    found = call.get("function", call) if isinstance(call, Mapping) else None
    function = found if isinstance(found, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        return _error("this is no call of a tool")
    if name not in tools:
        return _error(f"there is no tool {name[:40]}; there is {', '.join(tools) or 'none'}", name)
    try:
        named = arguments_for(tools[name], arguments)
        found = tools[name](**named)
        if inspect.isawaitable(found):
            found = asyncio.run(_awaited(found))
    except (Exception, SystemExit) as error:
        return _error(str(error) or type(error).__name__, name)
    content = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
    return {"role": "tool", "name": name, "content": content}


def _error(why: str, name: str = "") -> Message:
    return {"role": "tool", **({"name": name[:40]} if name else {}), "content": f"error: {why[:200]}", "error": True}


def arguments_for(tool: Callable[..., Any], given: Any) -> dict[str, Any]:
    """The arguments of a call by name, of the types that the function says. Raises what the model should read.

    given: a mapping, JSON of one, or of the plain notation (`name(...)`) the text between the brackets.
    """
    parameters, hints = inspect.signature(tool).parameters, get_type_hints(tool)
    if isinstance(given, str):
        given = _from_text(given, parameters, hints)
    if not isinstance(given, Mapping):
        raise TypeError(f"arguments of {tool.__name__} are missing")
    for name in given:
        if name not in parameters:
            raise TypeError(f"{tool.__name__} takes {', '.join(parameters) or 'nothing'}, not {str(name)[:40]}")
    for name, parameter in parameters.items():
        if name not in given and parameter.default is inspect.Parameter.empty:
            raise TypeError(f"{tool.__name__} needs {name}")
    return {name: _typed(tool.__name__, name, value, hints.get(name)) for name, value in given.items()}


def _from_text(text: str, parameters: Mapping[str, inspect.Parameter], hints: Mapping[str, Any]) -> Any:
    only = next(iter(parameters)) if len(parameters) == 1 else None
    if only is not None and hints.get(only, str) is str and not text.lstrip().startswith("{"):
        return {only: text}
    try:
        found = json.loads(text if text.lstrip().startswith("{") else f"[{text}]")
    except ValueError:
        raise ValueError("the arguments cannot be read") from None
    if isinstance(found, list):
        if len(found) > len(parameters):
            raise TypeError(f"{len(found)} arguments, but there are {len(parameters)}")
        return dict(zip(parameters, found))
    return found


def _typed(tool: str, name: str, value: Any, hint: Any) -> Any:
    """The value, if it is of a plain type that the function names; numbers may come as text."""
    wanted = _PLAIN.get(hint)
    if wanted is None or (isinstance(value, wanted) and (hint is bool or not isinstance(value, bool))):
        return value
    if hint in (int, float) and isinstance(value, str):
        try:
            return hint(value)
        except ValueError:
            pass
    raise TypeError(f"{name} of {tool} is {value!r:.40}, not of type {hint.__name__}")
