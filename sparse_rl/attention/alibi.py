"""ALiBi (Bloom, MPT, some Falcons): a bias that lowers logits with the distance of a key, at a rate per query head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Alibi:
    """Rounded as its model rounds, because in bf16 a bias may be off by more than any other term."""

    slopes: Tensor  # [Hq]
    rounds_to: torch.dtype | None = None  # what slope * position of a key is rounded to; None: distances, not rounded
    factor: float = 1.0  # of the rounded biases

    def bias(self, query: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        """What is added to the logits: of positions query [B, 1, T, 1] and key [B, 1 or H, 1, S]. -> [B, Hq, T, S]"""
        groups = len(self.slopes) // key.shape[1]
        slopes = self.slopes.view(-1, 1, 1)
        if self.rounds_to is None:
            return (slopes * (key.repeat_interleave(groups, 1) - query)).to(dtype)
        biases = (slopes * key.repeat_interleave(groups, 1)).to(self.rounds_to).to(dtype) * self.factor
        return biases.expand(-1, -1, query.shape[2], -1)
