"""From what a task's `reward` returns to a grade; a reward that fails costs the completion, not the run."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .problem import Grade, Prompt

if TYPE_CHECKING:
    from .base import Task

_OWN = [str(Path(__file__).with_name(f"{name}.py")) for name in ("base", "conversing", "judging")]  # not a user's


def graded(task: Task, given: float | Mapping[str, float]) -> Grade:
    """The grade of what a task's `reward` returned."""
    if not isinstance(given, Mapping):
        if task.reward_weights:
            raise TypeError(f"the reward is {given!r}; reward_weights are for named ones, such as {{'correct': 1.0}}")
        reward, parts = finite("the reward", given), {}
    else:
        parts = named_rewards(given)
        if unknown := [name for name in task.reward_weights if name not in parts]:
            raise ValueError(f"reward_weights has {unknown[0]!r}, but the reward has {', '.join(map(repr, parts))}")
        reward = math.fsum(task.reward_weights.get(name, 1.0) * value for name, value in parts.items())
    return Grade(reward, "right" if task.right(reward, parts) else "partly" if reward > 0 else "wrong", parts)


def named_rewards(given: Mapping[str, float]) -> dict[str, float]:
    if not given:
        raise ValueError("the reward is {}; it must name at least one")
    for name in given:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name):
            raise ValueError(f"a reward is called {name!r:.80}; use letters, digits, - and _, at most 40 of them")
    return {name: finite(f"the reward {name!r}", value) for name, value in given.items()}


def finite(what: str, value: Any) -> float:
    if not hasattr(value, "__float__"):
        raise TypeError(f"{what} is {value!r:.80}; it must be a number")
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{what} is {number}; it must be finite")
    return number


def judged(task: Task, prompt: Prompt, text: str) -> tuple[Grade, str | None]:
    """The grade, and the error if the reward raised one: it costs the completion, not the run."""
    try:
        grade = task.judge(prompt, text)
        if not isinstance(grade, Grade):
            raise TypeError(f"judge returned {grade!r}; it must be a Grade")
        parts = named_rewards(grade.parts) if grade.parts else {}
        return Grade(finite("the reward", grade.reward), grade.verdict, parts), None
    except (Exception, SystemExit) as error:
        return Grade(0.0, "error"), problem_of(error, prompt)


def problem_of(error: BaseException, prompt: Prompt) -> str:
    """What went wrong, for which prompt, and where."""
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in _OWN]
    place = f", {places[-1].filename}, line {places[-1].lineno}" if places else ""
    return f"{type(error).__name__}: {error} (prompt {prompt.index}{place})"
