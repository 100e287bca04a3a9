"""The settings of a budget that moves between steps.

rollout: {budget: {min: 32, max: 64, target: {alpha_5: 0.9}}}          # any method and view
rollout: {budget: {min: 32, max: 64, target: {rejection: 0.1}}}        # a method that rejects, in the dense view
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SparseRLError, require_int
from ..keys import key

METRICS = {"alpha_5": "gap/alpha/p05", "rejection": "reject/trajectories/frac"}


@dataclass(frozen=True)
class Target:
    """One of these, the other None."""

    alpha_5: float | None = key(
        "5th percentile of the overlap of the dense and the sampler's distribution, held from below", None
    )
    rejection: float | None = key("share of trajectories rejected, held from above", None)

    def __post_init__(self):
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise SparseRLError(
                f"rollout.budget.target must name one of {' or '.join(METRICS)}, not {found}; such as {{alpha_5: 0.9}}."
            )
        if not 0 < self.value < 1:
            raise SparseRLError(
                f"rollout.budget.target.{self.statistic} is {self.value}; it must be between 0 and 1, such as 0.9 or 0.1."
            )

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
        require_int(**{"rollout.budget.min": self.min, "rollout.budget.max": self.max})
        if self.min >= self.max:
            raise SparseRLError(
                f"rollout.budget.min is {self.min} and max {self.max}; min must be below max (a fixed budget is a number)."
            )

    def check(self, method: str, view: str, rejects: bool, diagnose: int) -> None:
        """Refuse a target that nothing in the run measures."""
        if self.target.statistic == "alpha_5":
            if diagnose == 0:
                raise SparseRLError(
                    "rollout.budget follows alpha_5, but run.diagnose is 0, so nothing measures it; set it to 4 or more."
                )
        elif view == "shadow":
            raise SparseRLError(
                "rollout.budget follows rejection, but in the shadow view the gap is 0, so nothing is; use alpha_5."
            )
        elif not rejects:
            raise SparseRLError(
                f"rollout.budget follows rejection, but {method} rejects no trajectories; use alpha_5, or sparse-rl."
            )
