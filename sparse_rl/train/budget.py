"""A budget that moves: between two steps a controller turns the one dial so that a tail statistic of the mismatch stays at its target.

The controller's record (`Dial`), one pure function from a record and a measurement to the next record (`move`), and the dial of a run's
engine (`BudgetControl`). The settings are in config/budget.py. Memory is that of the largest budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ..compressors import Compressor, make
from ..config import METRICS, Adaptive, RolloutSettings
from ..errors import SparseRLError
from ..rollout import Engine

SMOOTHING = 0.3  # what a new measurement counts against all before it: about the last five steps speak


STEP = 0.05  # the budget moves by at most 5 % a step


@dataclass(frozen=True)
class Dial:
    """The controller's record: all it remembers."""

    budget: float  # as exact as it has been moved; `slots` is what the engine is set to
    smoothed: float | None = None  # the statistic over the last steps; None before the first

    @property
    def slots(self) -> int:
        return round(self.budget)


def start(how: Adaptive, saved: Mapping | None = None) -> Dial:
    """At the largest budget, the safe side; or where a run left off, inside the bounds it has now."""
    if saved is None:
        return Dial(float(how.max))
    smoothed = saved["smoothed"] if saved["statistic"] == how.target.statistic else None
    return Dial(_clamp(saved["budget"], how.min, how.max), smoothed)


def move(dial: Dial, measured: float | None, how: Adaptive) -> Dial:
    """One step of an integral controller in the logarithm of the budget.

    The error is the smoothed harm relative to what the target allows: -1 where there is none, 0 on target, at most 1. Integrating finds
    the budget without a model of how harm depends on it; smoothing and small steps bear the noise of a tail; the logarithm makes a step
    mean the same at 32 slots and at 2,048; what is integrated is the clamped budget itself, so nothing winds up at the bounds.
    """
    if measured is None or not math.isfinite(measured):
        return dial  # nothing was learned in this step
    smoothed = measured if dial.smoothed is None else dial.smoothed + SMOOTHING * (measured - dial.smoothed)
    error = how.target.harm(smoothed) / how.target.harm(how.target.value) - 1
    return Dial(_clamp(dial.budget * math.exp(STEP * _clamp(error, -1, 1)), how.min, how.max), smoothed)


def _clamp(value: float, low: float, high: float) -> float:
    return float(min(max(value, low), high))


def compressor_of(settings: RolloutSettings) -> Compressor:
    """Set to the recipe's budget; of one that moves to the largest, after making sure that the smallest will do."""
    compressor = make(settings.compressor, **settings.compressor_options)
    if isinstance(settings.budget, Adaptive):
        if not compressor.has_budget:
            raise SparseRLError(
                f"rollout.budget is to move, but {compressor.name} has none; give a number, or another compressor."
            )
        compressor.bind(settings.budget.min, settings.interval)
    return compressor.bind(settings.max_budget, settings.interval)


class BudgetControl:
    """Turns an engine's dial between steps. With a plain number as budget there is nothing to turn, to log or to save."""

    def __init__(self, budget: int | Adaptive, engine: Engine):
        self.how = budget if isinstance(budget, Adaptive) else None
        self.engine = engine
        self.dial = start(self.how) if self.how else None

    def logged(self, name: str) -> dict[str, float]:
        """The budget in force, under the name of a metric."""
        return {name: float(self.engine.compressor.budget)} if self.how else {}

    def check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that the smallest budget could not protect: now, and not when the budget gets there."""
        if self.how:
            smallest = self.engine.compressor.bind(self.how.min, self.engine.compressor.interval)
            smallest.check_prompt(max(map(len, prompts)))

    def after_step(self, metrics: Mapping[str, float | None]) -> None:
        """What a step measured chooses the budget of the next."""
        if self.how:
            self.dial = move(self.dial, metrics.get(METRICS[self.how.target.statistic]), self.how)
            self.engine.set_budget(self.dial.slots)

    def state_dict(self) -> dict | None:
        return asdict(self.dial) | {"statistic": self.how.target.statistic} if self.how else None

    def load_state_dict(self, saved: Mapping | None) -> None:
        """Go on where a run left off; it may have been resumed with another budget."""
        if self.how:
            self.dial = start(self.how, saved)
            self.engine.set_budget(self.dial.slots)
