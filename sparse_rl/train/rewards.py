"""Rewards that a run adds to those of its task, as named parts of every grade.

    overlong    task.overlong: 0, then falling to -1 over the last tokens that a response may have (DAPO)

What is right, and so accuracy, stays for the task to say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..config import Recipe
from ..errors import SparseRLError
from ..records import Trajectory
from ..tasks import UNGRADED, Grade, Prompt, Task


class AddedRewards:
    def __init__(self, recipe: Recipe):
        self.longest = recipe.rollout.max_new_tokens
        self.buffer = max(1, round(recipe.task.overlong * self.longest)) if recipe.task.overlong else 0

    def grade(
        self, task: Task, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], texts: Sequence[str]
    ) -> list[Grade]:
        """What the task says of completions, and what is added to it."""
        grades = task.grade(prompts, texts)
        if self.buffer:
            values = [overlong(len(t.response_tokens), self.longest, self.buffer) for t in trajectories]
            grades = [with_part(grade, "overlong", value) for grade, value in zip(grades, values, strict=True)]
        return grades


def overlong(tokens: int, longest: int, buffer: int) -> float:
    """DAPO's soft punishment: 0 up to longest - buffer tokens, then falling to -1 at longest."""
    return -max(0, tokens - (longest - buffer)) / buffer


def with_part(grade: Grade, name: str, value: float, weight: float = 1.0) -> Grade:
    """A grade with one more named reward, which a run adds to its task's; what is right stays for the task to say."""
    own = dict(grade.parts) if grade.parts or grade.verdict in UNGRADED else {"task": grade.reward}
    if name in own:
        raise SparseRLError(
            f"the task has a reward called {name!r}, which the run adds, too; give the task's another name."
        )
    return replace(grade, reward=grade.reward + weight * value, parts={**own, name: value})
