"""Adaptive budget: between steps a controller changes it so that a tail statistic of the mismatch stays on target.

`Dial` is the controller's record, `move` a pure function from a record and a measurement to the next record, and
`BudgetControl` sets the budget of a run's engine. The settings are in config/budget.py. Memory is reserved for the
largest budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from ..compressors import Compressor, make
from ..config import METRICS, Adaptive, RolloutSettings
from ..errors import SparseRLError
from ..rollout import Engine

SMOOTHING = 0.3  # weight of a new measurement in the moving average: about the last five steps count
STEP = 0.05  # the budget changes by at most 5 % a step


@dataclass(frozen=True)
class Dial:
    """Everything that the controller remembers."""

    budget: float  # exact, not rounded; the engine is set to `slots`
    smoothed: float | None = None  # the statistic over the last steps; None before the first

    @property
    def slots(self) -> int:
        return round(self.budget)


def start(settings: Adaptive, saved: Mapping | None = None) -> Dial:
    """Start at the largest budget, which is the safe side, or where a run left off, within its present bounds."""
    if saved is None:
        return Dial(float(settings.max))
    smoothed = saved["smoothed"] if saved["statistic"] == settings.target.statistic else None
    return Dial(_clamp(saved["budget"], settings.min, settings.max), smoothed)


def move(dial: Dial, measured: float | None, settings: Adaptive) -> Dial:
    """One step of an integral controller in the logarithm of the budget.

    The error is the smoothed harm relative to the harm that the target allows: -1 without harm, 0 on target, at most 1.
    Integrating finds the budget without a model of how harm depends on it. Smoothing and small steps absorb the noise
    of a tail statistic. In the logarithm a step means the same at 32 slots and at 2,048. The integral is the clamped
    budget itself, so nothing winds up at the bounds.
    """
    if measured is None or not math.isfinite(measured):
        return dial  # nothing was measured in this step
    smoothed = measured if dial.smoothed is None else dial.smoothed + SMOOTHING * (measured - dial.smoothed)
    target = settings.target
    error = target.harm(smoothed) / target.harm(target.value) - 1
    return Dial(_clamp(dial.budget * math.exp(STEP * _clamp(error, -1, 1)), settings.min, settings.max), smoothed)


def _clamp(value: float, low: float, high: float) -> float:
    return float(min(max(value, low), high))


def compressor_of(settings: RolloutSettings) -> Compressor:
    """The recipe's compressor, bound to its budget; an adaptive one is checked at its least, bound at its largest."""
    compressor = make(settings.compressor, **settings.cache_options)
    if isinstance(settings.budget, Adaptive):
        if not compressor.has_budget:
            raise SparseRLError(
                f"rollout.budget is adaptive, but {compressor.name} has no budget; "
                "give a number, or another compressor."
            )
        compressor.bind(settings.budget.min, settings.interval)
    return compressor.bind(settings.max_budget, settings.interval)


class BudgetControl:
    """Sets an engine's budget between steps. With a fixed budget it sets, logs and saves nothing."""

    def __init__(self, budget: int | Adaptive, engine: Engine):
        self.settings = budget if isinstance(budget, Adaptive) else None
        self.engine = engine
        self.dial = start(self.settings) if self.settings else None

    def logged(self, name: str) -> dict[str, float]:
        """The present budget, as a metric of this name."""
        return {name: float(self.engine.compressor.budget)} if self.settings else {}

    def check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Refuse prompts that the smallest budget could not protect, before the budget gets there."""
        if self.settings:
            smallest = self.engine.compressor.bind(self.settings.min, self.engine.compressor.interval)
            smallest.check_prompt(max(map(len, prompts)))

    def after_step(self, metrics: Mapping[str, float | None]) -> None:
        """Choose the budget of the next step from what this step measured."""
        if self.settings and self.dial:
            self.dial = move(self.dial, metrics.get(METRICS[self.settings.target.statistic]), self.settings)
            self.engine.set_budget(self.dial.slots)

    def state_dict(self) -> dict | None:
        if not (self.settings and self.dial):
            return None
        return asdict(self.dial) | {"statistic": self.settings.target.statistic}

    def load_state_dict(self, saved: Mapping | None) -> None:
        """Continue where a run left off; it may have been resumed with another budget."""
        if self.settings:
            self.dial = start(self.settings, saved)
            self.engine.set_budget(self.dial.slots)
