"""The settings of an adaptive budget, which is adjusted between steps to hold a measured value at a target.

    rollout: {budget: {min: 32, max: 64, target: {alpha_5: 0.9}}}          # any method and view
    rollout: {budget: {min: 32, max: 64, target: {rejection: 0.1}}}        # a method that rejects, in the dense view

train/budget.py holds the controller.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import SparseRLError, require_int
from ..keys import key

METRICS = {"alpha_5": "gap/alpha/p05", "rejection": "reject/trajectories/frac"}  # target: the metric that measures it


@dataclass(frozen=True)
class Target:
    """The target to hold; exactly one of the two fields is given."""

    alpha_5: float | None = key(
        "5th percentile of the overlap of the dense and the sampler's distribution; kept at or above this", None
    )
    rejection: float | None = key("share of trajectories that are rejected; kept at or below this", None)

    def __post_init__(self):
        given = {name: value for name, value in vars(self).items() if value is not None}
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise SparseRLError(
                f"rollout.budget.target must name one of {' or '.join(METRICS)}, not {found}; write {{alpha_5: 0.9}}."
            )
        if not 0 < self.value < 1:
            key_of_target = f"rollout.budget.target.{self.statistic}"
            raise SparseRLError(f"{key_of_target} is {self.value}; it must be between 0 and 1, such as 0.9 or 0.1.")

    @property
    def statistic(self) -> str:
        return "rejection" if self.alpha_5 is None else "alpha_5"

    @property
    def value(self) -> float:
        value = self.rejection if self.alpha_5 is None else self.alpha_5
        assert value is not None
        return value

    def harm(self, measured: float) -> float:
        """The harm that compression does, as a share; more harm calls for more slots."""
        return measured if self.statistic == "rejection" else 1 - measured


@dataclass(frozen=True)
class Adaptive:
    min: int = key("the smallest budget")
    max: int = key("the largest budget; a run starts with it, and rows are made for it")
    target: Target = key("{alpha_5: 0.9} or {rejection: 0.1}")

    def __post_init__(self):
        require_int(**{"rollout.budget.min": self.min, "rollout.budget.max": self.max})
        if self.min >= self.max:
            raise SparseRLError(
                f"rollout.budget.min is {self.min} and max {self.max}; min must be below max "
                "(write a fixed budget as one number)."
            )

    def check(self, method: str, view: str, rejects: bool, diagnose: int) -> None:
        """Refuse a target that the run does not measure."""
        if self.target.statistic == "alpha_5":
            if diagnose == 0:
                raise SparseRLError(
                    "rollout.budget follows alpha_5, but run.diagnose is 0, so nothing measures alpha_5; "
                    "set run.diagnose to 4 or more."
                )
        elif view == "shadow":
            raise SparseRLError(
                "rollout.budget follows rejection, but in the shadow view the gap is 0, so nothing is rejected; "
                "use alpha_5."
            )
        elif not rejects:
            raise SparseRLError(
                f"rollout.budget follows rejection, but {method} rejects no trajectories; "
                "use alpha_5, or learn.method: sparse-rl."
            )


def check_layer_budgets(budgets: list[int], budget: int | Adaptive) -> None:
    """Refuse budgets by layer whose mean is not the budget, or that come with an adaptive budget."""
    if not budgets:
        return
    require_int(**{f"rollout.layer_budgets[{i}]": number for i, number in enumerate(budgets)})
    if isinstance(budget, Adaptive):
        raise SparseRLError(
            f"rollout.layer_budgets are fixed, but rollout.budget moves between {budget.min} and {budget.max}; "
            "give a number for the budget, or leave layer_budgets out."
        )
    if sum(budgets) != budget * len(budgets):
        raise SparseRLError(
            f"rollout.layer_budgets keep {sum(budgets) / len(budgets):g} slots on average, but rollout.budget is "
            f"{budget}; their sum must be {len(budgets)} x {budget} = {len(budgets) * budget}, not {sum(budgets)}."
        )
