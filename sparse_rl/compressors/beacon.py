"""beacon: after every chunk of the response the model reads a learned beacon, whose entry takes the chunk's place.

The idea is that of arXiv 2510.13797. `beacon:16` feeds a beacon after every 16 tokens. The prompt stays. The model must
have a beacon: it is a student that `sparse-rl train` made.

With a threshold the model chooses: a chunk of 2, 4, 8, 16, ... tokens ends as soon as its tokens have surprised the
model by that many nats in all, and at `chunk` tokens at the latest. It folds many tokens into one entry
where it is sure of itself, and few tokens where it is unsure. Budget and interval have no meaning here.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Self

import torch
from torch import Tensor, nn

from ..beacon import beacon_of, check_chunk
from ..errors import SparseRLError
from .base import Compressor, register


@register
class Beacon(Compressor):
    name = "beacon"
    usage = "beacon:N"
    has_budget = False
    evicts_response = False
    folds = True

    def __init__(self, *, chunk: int = 16, threshold: float | None = None):
        super().__init__()
        check_chunk(chunk)
        if threshold is not None and not (isinstance(threshold, (int, float)) and 0 < threshold < math.inf):
            raise SparseRLError(
                f"beacon: the threshold is {threshold!r}; it must be a positive number of nats, "
                "or None for chunks of equal length."
            )
        self.chunk, self.threshold = chunk, threshold
        self.interval = chunk

    @classmethod
    def parse(cls, argument: str | None, /, **options) -> Beacon:
        """The argument is the number of tokens per beacon."""
        if not argument:
            return cls.from_options(cls.name, options)
        written = f"{cls.name}:{argument}"
        if not (argument.isascii() and argument.isdecimal()):
            raise SparseRLError(
                f"{written!r} does not name a number of tokens; write beacon:16 for a beacon after every 16 tokens."
            )
        if "chunk" in options:
            raise SparseRLError(f"{written} names its chunk, but chunk={options['chunk']} was given too; give it once.")
        return cls.from_options(written, options | {"chunk": int(argument)})

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that has no beacon, and chunks that its beacon was not trained for."""
        beacon = beacon_of(model)
        if beacon is None:
            raise SparseRLError(
                "this model has no beacon to fold its response into; load a student that `sparse-rl train` made, "
                "with all files of its folder, or use another compressor."
            )
        unknown = [size for size in self.sizes if beacon.chunks and size not in beacon.chunks]
        if unknown:
            trained = " or ".join(map(str, beacon.chunks))
            why = "" if self.threshold is None else " (a threshold ends chunks early)"
            raise SparseRLError(
                f"a beacon after {unknown[0]} tokens was asked for{why}, but this student was trained with one after "
                f"{trained}; use that."
            )

    def extra_positions(self, model: nn.Module, new: int) -> int:
        beacon = beacon_of(model)
        assert beacon is not None  # check_model has been called
        return max(0, new - 2) // min(self.sizes) if beacon.position == "own" else 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many tokens a chunk may have."""
        if self.threshold is None:
            return (self.chunk,)
        return (*(size for size in (2**i for i in range(1, 32)) if size < self.chunk), self.chunk)

    def closes(self, tokens: Tensor, surprise: Tensor) -> Tensor:
        """Whether chunks of that many tokens, which surprised the model by that many nats, are complete. -> bool [B]"""
        full = tokens >= self.chunk
        if self.threshold is None:
            return full
        may_end = functools.reduce(torch.logical_or, (tokens == size for size in self.sizes))
        return full | (may_end & (surprise >= self.threshold))

    def capacity(self, prompt: int, new: int) -> int:
        """The prompt, all beacons and one chunk. The last new token is never fed."""
        return prompt + (new - 1) // min(self.sizes) + min(self.chunk, new)

    def bind(self, budget: int, interval: int) -> Self:
        return copy.copy(self)

    def rule(self) -> str:
        often = f"{self.chunk}" if self.threshold is None else f"{min(self.sizes)} to {self.chunk}"
        return f"prompt + a beacon per {often} tokens + a chunk"


def default_compressor(model: nn.Module) -> str:
    """The compressor that a model's beacon was made for; `rkv` for a model that has none."""
    beacon = beacon_of(model)
    if beacon is None:
        return "rkv"
    if len(beacon.chunks) == 1:
        return f"beacon:{beacon.chunks[0]}"
    chunks = " or ".join(map(str, beacon.chunks)) or "any number of"
    raise SparseRLError(
        f"this model's beacon was made for {chunks} tokens; "
        "name the compressor, such as compressor='beacon:16' or 'rkv'."
    )
