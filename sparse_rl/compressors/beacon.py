"""beacon: after every chunk of the response the model reads a learned beacon, whose entry takes the chunk's place.

The idea is that of arXiv 2510.13797. `beacon:16` feeds a beacon after every 16 tokens. The prompt stays. The model must
have a beacon, such as a student that `sparse-rl train` made.

`beacon:2-16` lets the policy choose: after every token of a chunk it continues or folds, with 2 to 16 tokens per
beacon. The choice is part of the trajectory, has its own log-prob, and is learned by reinforcement (beacon/choice.py).

With a threshold, surprise decides: a chunk of 2, 4, 8, 16, ... tokens ends as soon as its tokens have surprised the
model by that many nats in total, and at `chunk` tokens at the latest. So many tokens are folded into one entry where
the model is certain, and few where it is not. Budget and interval have no meaning here.
"""

from __future__ import annotations

import copy
import functools
import math
from typing import Self

import torch
from torch import Tensor, nn

from ..beacon import BeaconEmbedding, add_choice, beacon_of, check_choice, check_chunk
from ..errors import SparseRLError
from .base import Compressor, register


@register
class Beacon(Compressor):
    name = "beacon"
    usage = "beacon:N"
    has_budget = False
    evicts_response = False
    folds = True

    def __init__(self, *, chunk: int = 16, least: int | None = None, threshold: float | None = None):
        """`least`: the policy chooses to fold, from so many tokens on and at `chunk` tokens at the latest."""
        super().__init__()
        check_chunk(chunk)
        if least is not None:
            check_choice(least, chunk)
            if threshold is not None:
                raise SparseRLError(
                    f"beacon: least is {least} and threshold {threshold}, but chunks end either where the policy "
                    "chooses or where the surprise is high; give one of them."
                )
        if threshold is not None and not (isinstance(threshold, (int, float)) and 0 < threshold < math.inf):
            raise SparseRLError(
                f"beacon: the threshold is {threshold!r}; it must be a positive number of nats, "
                "or None for chunks of equal length."
            )
        self.chunk, self.least, self.threshold = chunk, least, threshold
        self.chooses = least is not None
        self.interval = chunk

    @classmethod
    def parse(cls, argument: str | None, /, **options) -> Beacon:
        """The argument is the number of tokens per beacon, or the least and the most of which the policy chooses."""
        if not argument:
            return cls.from_options(cls.name, options)
        written = f"{cls.name}:{argument}"
        numbers = argument.split("-")
        if len(numbers) > 2 or not all(number.isascii() and number.isdecimal() for number in numbers):
            raise SparseRLError(
                f"{written!r} does not name a number of tokens; write beacon:16 for a beacon after every 16 tokens, or "
                "beacon:2-16 to let the model choose."
            )
        named = dict(zip(("least", "chunk")[-len(numbers) :], map(int, numbers)))
        for name in named.keys() & options.keys():
            raise SparseRLError(
                f"{written} sets {name} already, but {name}={options[name]} was given too; give it once."
            )
        return cls.from_options(written, options | named)

    def check_model(self, model: nn.Module) -> None:
        """Refuse a model that has no beacon, and chunks that its beacon was not trained for."""
        beacon = beacon_of(model)
        if beacon is None:
            raise SparseRLError(
                "this model has no beacon to fold its response into; load a student that `sparse-rl train` made, "
                "with all files of its folder, or use another compressor."
            )
        if self.least is not None:
            return self._check_choice(beacon, self.least)
        unknown = [size for size in self.sizes if beacon.chunks and size not in beacon.chunks]
        if unknown:
            trained = " or ".join(map(str, beacon.chunks))
            why = "" if self.threshold is None else " (a threshold ends chunks early)"
            raise SparseRLError(
                f"a beacon after every {unknown[0]} tokens was requested{why}, but this student was trained with one "
                f"after every {trained}; use that."
            )

    def _check_choice(self, beacon: BeaconEmbedding, least: int) -> None:
        if beacon.choice is None:
            raise SparseRLError(
                f"this model has not learned to choose its folds, so it cannot use {self.name}:{least}-{self.chunk}; "
                "train it with that as rollout.compressor, or use beacon:N."
            )
        if beacon.chunks and not min(beacon.chunks) <= least < self.chunk <= max(beacon.chunks):
            raise SparseRLError(
                f"chunks of {least} to {self.chunk} tokens were requested, but this student was trained with "
                f"{min(beacon.chunks)} to {max(beacon.chunks)}; stay within these."
            )

    def extra_positions(self, model: nn.Module, new: int) -> int:
        beacon = beacon_of(model)
        assert beacon is not None  # check_model has been called
        return max(0, new - 2) // self.shortest if beacon.position == "own" else 0

    @property
    def shortest(self) -> int:
        """The fewest tokens that a chunk may have."""
        return min(self.sizes) if self.least is None else self.least

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many tokens a chunk may have, where the policy does not choose."""
        if self.threshold is None:
            return (self.chunk,)
        return (*(size for size in (2**i for i in range(1, 32)) if size < self.chunk), self.chunk)

    def closes(self, tokens: Tensor, surprise: Tensor) -> Tensor:
        """Whether chunks of that many tokens, which surprised the model by that many nats, must end. -> bool [B]"""
        full = tokens >= self.chunk
        if self.threshold is None:
            return full
        may_end = functools.reduce(torch.logical_or, (tokens == size for size in self.sizes))
        return full | (may_end & (surprise >= self.threshold))

    def capacity(self, prompt: int, new: int) -> int:
        """The prompt, all beacons and one chunk. The last new token is never fed."""
        return prompt + (new - 1) // self.shortest + min(self.chunk, new)

    def bind(self, budget: int, interval: int) -> Self:
        return copy.copy(self)

    def rule(self) -> str:
        often = f"{self.chunk}" if self.shortest == self.chunk else f"{self.shortest} to {self.chunk}"
        return f"prompt + a beacon per {often} tokens + a chunk"


def let_choose(model: nn.Module, compressor: Compressor, mean: float = 0.0) -> None:
    """A model with a beacon begins to choose its folds, if the compressor asks for it and it does not choose yet.

    mean: of the tokens of a chunk, at first; 0: halfway between the least and the most
    """
    beacon = beacon_of(model)
    if isinstance(compressor, Beacon) and compressor.least is not None and beacon is not None and not beacon.choice:
        least, most = compressor.least, compressor.chunk
        add_choice(model, least, most, mean or (least + most) / 2)


def default_compressor(model: nn.Module) -> str:
    """The compressor that a model's beacon was made for; `rkv` for a model that has none."""
    beacon = beacon_of(model)
    if beacon is None:
        return "rkv"
    if beacon.choice is not None:
        return "beacon:{}-{}".format(*beacon.choice)
    if len(beacon.chunks) == 1:
        return f"beacon:{beacon.chunks[0]}"
    chunks = " or ".join(map(str, beacon.chunks)) or "any number of"
    raise SparseRLError(
        f"this model's beacon was trained for chunks of {chunks} tokens, so no compressor follows from it; name one, "
        "such as compressor='beacon:16' or 'rkv'."
    )
