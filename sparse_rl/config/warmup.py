"""The recipe's warm-up: supervised steps on worked solutions (train/warmup.py)."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import check_count, require_int
from ..keys import key


@dataclass(frozen=True)
class WarmupSettings:
    steps: int = key("optimizer steps on worked solutions", 300)
    batch: int = key("solutions per step", 64)
    lr: float = key("learning rate, constant after 20 steps", 2e-3)
    workers: int = key("processes that prepare batches; 0: batches are prepared between steps", 0)
    eval_every: int = key("steps between evaluations on held-out problems: loss and accuracy; 0: only at the end", 100)
    checkpoint_every: int = key("steps between checkpoints; 0: only when it is stopped", 100)

    def __post_init__(self):
        require_int(**{"warmup.steps": self.steps, "warmup.batch": self.batch})
        check_count("solutions per step", self.batch)
        counts = ("workers", "eval_every", "checkpoint_every")
        require_int(at_least=0, **{f"warmup.{name}": getattr(self, name) for name in counts})
