"""Keeps track of a run's best evaluation, by held-out accuracy on the cache that it trains for, and notices falls.

    checkpoints/best -> step-000040    a link that moves when an evaluation is better than all before

A checkpoint is written after every new best evaluation, so a resumed run, which forgets what came after its newest
checkpoint, never forgets the best one. Which one is best follows from metrics.jsonl.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist

from ..errors import SparseRLError, shown

_LEVEL = 0.99  # confidence level beyond which a run counts as fallen


@dataclass(frozen=True)
class Measured:
    """An evaluation on the run's own cache."""

    step: int
    accuracy: float
    reward: float

    def better_than(self, other: Measured | None) -> bool:
        """Whether it has more right answers or, with equally many, more reward."""
        return other is None or (self.accuracy, self.reward) > (other.accuracy, other.reward)


def measured(line: Mapping[str, float | None]) -> Measured | None:
    """The evaluation in a line of metrics.jsonl; None if it holds none."""
    cache = "sparse" if "eval/sparse/accuracy" in line else "dense"  # without evictions it trains for the dense cache
    step, accuracy, reward = (line.get(key) for key in ("step", f"eval/{cache}/accuracy", f"eval/{cache}/reward"))
    if step is None or accuracy is None or reward is None:
        return None
    if not 0 <= accuracy <= 1:
        raise SparseRLError(
            f"metrics.jsonl has eval/{cache}/accuracy {shown(accuracy)} at step {step}, but it must be from 0 to 1; "
            "remove the line, then continue."
        )
    return Measured(int(step), accuracy, reward)


def best_of(lines: Iterable[Mapping[str, float | None]]) -> Measured | None:
    """The best evaluation; of equal ones the first."""
    best = None
    for found in filter(None, map(measured, lines)):
        best = found if found.better_than(best) else best
    return best


def has_fallen(now: Measured, best: Measured, prompts: int) -> bool:
    """Whether accuracy is so far below its best that chance does not explain it.

    The normal interval of the difference of two shares, each with one right and one wrong answer added (Agresti and
    Caffo), which keeps it honest near 0 and 1. The prompts are the trials; they and their random numbers are the same
    each time, which would only narrow it.
    """
    shares = [(found.accuracy * prompts + 1) / (prompts + 2) for found in (now, best)]
    spread = math.sqrt(sum(share * (1 - share) for share in shares) / (prompts + 2))
    return shares[1] - shares[0] > NormalDist().inv_cdf((1 + _LEVEL) / 2) * spread
