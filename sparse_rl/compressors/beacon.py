"""beacon: after every chunk of the response the model reads a learned beacon, whose entry takes the chunk's place (arXiv 2510.13797).

`beacon:16` feeds one after every 16 tokens. The prompt stays. It needs a model with a beacon: a student that `sparse-rl train` made.

With a threshold the model chooses: a chunk of 2, 4, 8, 16 tokens ends as soon as its tokens have surprised the model by that many nats
in all, and at `chunk` tokens at the latest. Where it is sure of itself it folds much into one entry, where it is not, little.
Budget and interval have no meaning here.
"""

from __future__ import annotations

import copy
import functools
import math

import torch
from torch import Tensor

from ..beacon import check_chunk
from ..errors import SparseRLError
from .base import Compressor


class Beacon(Compressor):
    name = "beacon"
    folds = True
    evicts_response = False

    def __init__(self, *, chunk: int = 16, threshold: float | None = None):
        super().__init__()
        check_chunk(chunk)
        if threshold is not None and not (isinstance(threshold, (int, float)) and 0 < threshold < math.inf):
            raise SparseRLError(
                f"beacon: the threshold is {threshold!r}; it must be a positive number of nats, or none for equal chunks."
            )
        self.chunk, self.threshold = chunk, threshold
        self.interval = chunk

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many tokens a chunk may have."""
        if self.threshold is None:
            return (self.chunk,)
        return (*(size for size in (2**i for i in range(1, 32)) if size < self.chunk), self.chunk)

    def closes(self, tokens: Tensor, surprise: Tensor) -> Tensor:
        """Whether chunks of that many tokens, which surprised the model by that many nats, are complete. [B] -> bool [B]"""
        full = tokens >= self.chunk
        if self.threshold is None:
            return full
        may_end = functools.reduce(torch.logical_or, (tokens == size for size in self.sizes))
        return full | (may_end & (surprise >= self.threshold))

    def capacity(self, prompt: int, new: int) -> int:
        """The prompt, all beacons, a chunk. The last new token is never fed."""
        return prompt + (new - 1) // min(self.sizes) + min(self.chunk, new)

    def bind(self, budget: int, interval: int) -> Compressor:
        return copy.copy(self)

    def evicts_prompt(self, tokens: int) -> bool:
        return False

    def rule(self) -> str:
        often = f"{self.chunk}" if self.threshold is None else f"{min(self.sizes)} to {self.chunk}"
        return f"prompt + a beacon per {often} tokens + a chunk"
