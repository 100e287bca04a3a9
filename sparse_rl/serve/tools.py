"""Find the tool calls in an answer and write them in OpenAI's format."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

from ..chat import calls_in
from .answer import Answer

_CALL = re.compile(r"<tool_call>.*?(?:</tool_call>|\Z)", re.DOTALL)


def called(tokenizer, answer: Answer, tools: list[dict[str, Any]]) -> tuple[str | None, list[dict[str, Any]]]:
    """(what is said beside calls, the calls) of an answer. Where a call cannot be read, all of it stays text."""
    found = calls_in(tokenizer, spoken(tokenizer, answer), tools, tokenizer.decode(answer.prompt))
    functions = [call.get("function", call) for call in found]
    if not found or not all(isinstance(function.get("name"), str) for function in functions):
        return answer.text, []
    return _CALL.sub("", answer.text).strip() or None, [
        {
            "id": f"call_{secrets.token_hex(8)}",
            "type": "function",
            "function": {"name": function["name"], "arguments": _as_json(function.get("arguments", {}))},
        }
        for function in functions
    ]


def spoken(tokenizer, answer: Answer) -> str:
    """All that the model said, special tokens included."""
    return tokenizer.decode(answer.tokens)


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)
