"""The section `task` of a recipe: the task's name and options, and rewards that the run adds (train/rewards.py)."""

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
        "adds a reward `overlong` that falls from 0 to -1 over this last share of rollout.max_new_tokens, such as 0.2 "
        "(DAPO's soft punishment); 0: none",
        0.0,
    )
    entry_price: float = key(
        "what a response pays for each cache entry, beside the prompt's, that it held on average, such as 0.01 (logged "
        "as the reward `entries`); 0: nothing",
        0.0,
    )
    reward_model: str | None = key(
        "a hub id or folder of a sequence classifier with one label, whose score of prompt and response is added as "
        "the reward `reward_model`; null: none",
        None,
    )
    reward_model_weight: float = key("factor by which the reward model's score enters the reward", 1.0)
    reward_model_tokens: int = key("tokens in a forward pass of the reward model, padding included", 16384)

    def __post_init__(self):
        if not 0 <= self.overlong <= 1:
            raise SparseRLError(f"task.overlong is {self.overlong}; it must be a share of max_new_tokens, from 0 to 1.")
        if not 0 <= self.entry_price < math.inf:
            raise SparseRLError(f"task.entry_price is {self.entry_price}; it must be 0 or a positive number.")
        require_int(**{"task.reward_model_tokens": self.reward_model_tokens})
        if not math.isfinite(self.reward_model_weight):
            raise SparseRLError(f"task.reward_model_weight is {self.reward_model_weight}; it must be a finite number.")
