"""The recipe's task: its name, its own options, and the rewards that a run adds to its (train/rewards.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import SparseRLError, require_int
from ..keys import key


@dataclass(frozen=True)
class TaskSettings:
    name: str = key("a name from `sparse-rl list tasks`, `gym:NAME`, `file.py` or `file.py:Class`")
    options: dict = key("the task's own options; in a recipe they stand beside `name`", {})
    overlong: float = key(
        "the last share of rollout.max_new_tokens over which a reward `overlong` falls from 0 to -1, such as 0.2 "
        "(DAPO's soft punishment); 0: none",
        0.0,
    )
    entry_price: float = key(
        "what a cache entry costs: a reward `entries`, the entries beside the prompt that a response held on average, "
        "counts minus this much each, such as 0.01; 0: nothing",
        0.0,
    )
    reward_model: str | None = key(
        "a hub id or folder of a sequence classifier with one label: its score of prompt and response is a reward "
        "`reward_model`; null: none",
        None,
    )
    reward_model_weight: float = key("the factor of the reward model's score in the reward", 1.0)
    reward_model_tokens: int = key("tokens of a forward pass of the reward model, padding included", 16384)

    def __post_init__(self):
        if not 0 <= self.overlong <= 1:
            raise SparseRLError(f"task.overlong is {self.overlong}; it is a share of max_new_tokens, from 0 to 1.")
        if not 0 <= self.entry_price < math.inf:
            raise SparseRLError(f"task.entry_price is {self.entry_price}; it must be 0 or a positive number.")
        require_int(**{"task.reward_model_tokens": self.reward_model_tokens})
        if not math.isfinite(self.reward_model_weight):
            raise SparseRLError(f"task.reward_model_weight is {self.reward_model_weight}; it must be a finite number.")
