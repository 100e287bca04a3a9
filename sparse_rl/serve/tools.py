"""Calls of tools in an answer's text."""

from __future__ import annotations

import json
import re
import secrets
from typing import Any

_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)


def calls_in(tokenizer, text: str) -> tuple[str | None, list[dict[str, Any]]]:
    """(what is said beside calls, the calls) of an answer.

    Read as the tokenizer's response schema says, or where it has none, as JSON between <tool_call> and </tool_call>,
    which most open models write. What cannot be read stays text.
    """
    found = _by_schema(tokenizer, text) if getattr(tokenizer, "response_schema", None) else _between_marks(text)
    if not found:
        return text, []
    rest = _CALL.sub("", text).strip()
    return rest or None, [
        {
            "id": f"call_{secrets.token_hex(8)}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for name, arguments in found
    ]


def _between_marks(text: str) -> list[tuple[str, Any]]:
    found = []
    for inside in _CALL.findall(text):
        try:
            call = json.loads(inside)
        except (ValueError, RecursionError):
            return []
        if not (isinstance(call, dict) and isinstance(call.get("name"), str)):
            return []
        found.append((call["name"], call.get("arguments", call.get("parameters", {}))))
    return found


def _by_schema(tokenizer, text: str) -> list[tuple[str, Any]]:
    try:
        said = tokenizer.parse_response(text)
    except (ValueError, KeyError, TypeError):
        return []
    calls = said.get("tool_calls") if isinstance(said, dict) else None
    functions = [call.get("function", call) for call in calls or [] if isinstance(call, dict)]
    return [(f["name"], f.get("arguments", {})) for f in functions if isinstance(f.get("name"), str)]
