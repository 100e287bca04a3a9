"""The budget of a run: set once, or moved after every step by the controller of adapt.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from .adapt import METRICS, Adaptive, move, start
from .compressors import Compressor, make
from .config import RolloutSettings
from .errors import SparseRLError
from .rollout import Engine


def compressor_of(settings: RolloutSettings) -> Compressor:
    """Set to the recipe's budget; of one that moves to the largest, after making sure that the smallest will do."""
    compressor = make(settings.compressor, **settings.compressor_options)
    if isinstance(settings.budget, Adaptive):
        if not compressor.evicts or compressor.folds:
            raise SparseRLError(f"rollout.budget is to move, but {compressor.name} has none; give a number, or another compressor.")
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
