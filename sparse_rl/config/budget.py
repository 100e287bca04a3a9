"""A budget that moves: between two steps a controller turns the one dial so that a tail statistic of the mismatch stays at its target.

    rollout: {budget: {min: 32, max: 64, target: {alpha_5: 0.9}}}          # any method and view
    rollout: {budget: {min: 32, max: 64, target: {rejection: 0.1}}}        # a method that rejects, in the dense view

Settings, the controller's record, and one pure function from a record and a measurement to the next record. Memory is that of `max`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import SparseRLError, whole
from .keys import key

SMOOTHING = 0.3  # what a new measurement counts against all before it: about the last five steps speak
STEP = 0.05  # the budget moves by at most 5 % a step
METRICS = {"alpha_5": "gap/alpha/p05", "rejection": "reject/trajectories/frac"}


@dataclass(frozen=True)
class Target:
    """One of these, the other None."""

    alpha_5: float | None = key("5th percentile of the overlap of the dense and the sampler's distribution, held from below", None)
    rejection: float | None = key("share of trajectories rejected, held from above", None)

    def __post_init__(self):
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise SparseRLError(f"rollout.budget.target must name one of {' or '.join(METRICS)}, not {found}; such as {{alpha_5: 0.9}}.")
        if not 0 < self.value < 1:
            raise SparseRLError(f"rollout.budget.target.{self.statistic} is {self.value}; it must be between 0 and 1, such as 0.9 or 0.1.")

    @property
    def statistic(self) -> str:
        return "rejection" if self.alpha_5 is None else "alpha_5"

    @property
    def value(self) -> float:
        return self.rejection if self.alpha_5 is None else self.alpha_5

    def harm(self, measured: float) -> float:
        """What compression does, as a share: more of it asks for more slots."""
        return measured if self.statistic == "rejection" else 1 - measured


@dataclass(frozen=True)
class Adaptive:
    min: int = key("the smallest budget")
    max: int = key("the largest, where it starts; rows are made for it")
    target: Target = key("{alpha_5: 0.9} or {rejection: 0.1}")

    def __post_init__(self):
        whole(**{"rollout.budget.min": self.min, "rollout.budget.max": self.max})
        if self.min >= self.max:
            raise SparseRLError(f"rollout.budget.min is {self.min} and max {self.max}; min must be below max (a fixed budget is a number).")

    def check(self, method: str, view: str, rejects: bool, diagnose: int) -> None:
        """Refuse a target that nothing in the run measures."""
        if self.target.statistic == "alpha_5":
            if diagnose == 0:
                raise SparseRLError("rollout.budget follows alpha_5, but run.diagnose is 0, so nothing measures it; set it to 4 or more.")
        elif view == "shadow":
            raise SparseRLError("rollout.budget follows rejection, but in the shadow view the gap is 0, so nothing is; use alpha_5.")
        elif not rejects:
            raise SparseRLError(f"rollout.budget follows rejection, but {method} rejects no trajectories; use alpha_5, or sparse-rl.")


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
