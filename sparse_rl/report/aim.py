"""What a run is for, from its recipe: the cache that its method trains, and the problems that judge it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SMALL = ("shadow", "smd")  # methods that learn on what the sampler's cache held, so for the small cache


@dataclass(frozen=True)
class Aim:
    method: str = "unknown"  # `dense`: rollouts on a dense cache, whatever the method
    small: bool = False  # trains the model for the small cache; otherwise for the dense one
    problems: int | None = None  # held-out ones; None: unknown

    def use(self, *methods: str) -> str:
        """ ", or use learn.method: tis or shadow", without what the run does already. Empty: nothing is left."""
        others = [name for name in methods if name != self.method and not (self.small and name in SMALL)]
        return f", or use learn.method: {' or '.join(others)}" if others else ""

    def chance(self, shares: Sequence[float]) -> float:
        """How far sums and differences of these shares of right problems may be off: two standard errors.

        Two evaluations ask the same problems, which the standard error of independent ones exceeds. One right and one
        wrong problem are added, so that shares of 0 and 1 have an error, too. Without a number of problems: 0.
        """
        if self.problems is None:
            return 0.0
        known = [(share * self.problems + 1) / (self.problems + 2) for share in shares]
        return 2 * math.sqrt(sum(share * (1 - share) for share in known) / self.problems)


UNKNOWN = Aim()


def aim_of(recipe: Mapping[str, Mapping[str, Any]]) -> Aim:
    """Of a recipe in whatever state: what it does not say is unknown."""
    learn, task, evaluation = (recipe.get(section, {}) for section in ("learn", "task", "eval"))
    asked, kept = evaluation.get("prompts"), None if evaluation.get("options") else task.get("holdout")
    counts = [count for count in (asked, kept) if type(count) is int and count > 0]
    problems = min(counts) if asked in counts else None
    if recipe.get("rollout", {}).get("compressor") == "dense":
        return Aim("dense", problems=problems)
    method, view = str(learn.get("method", "unknown")), learn.get("view")
    return Aim(method, view == "shadow" or (view is None and method in SMALL), problems)
