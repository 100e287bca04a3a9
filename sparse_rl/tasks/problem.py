"""What a task hands out and gets back: a problem, and the grade of a completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNGRADED = ("timeout", "error", "bad gold")  # verdicts of completions that could not be graded; they count as wrong
Message = dict[str, Any]  # of a chat: `role`, `content`, and of an assistant's perhaps `tool_calls`


@dataclass(frozen=True)
class Prompt:
    """One problem of a task."""

    text: str | list[dict]  # what the model sees: a string, or chat messages
    answer: Any  # what the task needs to grade a completion: plain data
    index: int = 0  # its place in the task
    task: str = ""  # of a mixture: the label of the task that it belongs to


@dataclass(frozen=True)
class Grade:
    """A completion's reward and verdict: right, partly, wrong, no answer, timeout, error or bad gold."""

    reward: float
    verdict: str
    parts: Mapping[str, float] = field(default_factory=dict)  # the named rewards that it is made of, before weights

    @property
    def right(self) -> bool:
        return self.verdict == "right"
