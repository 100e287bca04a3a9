"""Ties: which way the sampler rounded the numbers that rounding alone decides (formats.py).

A cache of 8-bit slots in fp32 on a CPU notes them while tokens are stored (`TieLog`). A row's notes go where its slots
go, but evictions do not touch them. In a trace they are rows of four whole numbers:

    token, layer, KV head, number        number = 4 * (channel + 1) + 2 * (1 if it is a value, not a key) + way

way is 1 for the code further away from zero. Channel -1 stands for the exponent of the whole vector, and way is then 1
for the larger one.

On a GPU nothing is noted: a list whose length depends on the data has no place in a captured graph. In bf16 and float16
sampler and learner differ by more than the margin, so noting would not make them equal. If they differ by more than the
margin in fp32, too, such numbers may round differently, as without notes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import SparseRLError
from .formats import SlotFormat, Ties, common_format, ties_of

if TYPE_CHECKING:
    from .trace import Trace

COLUMNS = 4
# What is fed waits, because finding the ties of much takes hardly longer than of little: at most so many tokens of a
# layer, and about so many numbers, whose search takes some ten times the memory of these.
_MOST, _MOST_NUMBERS = 64, 2**20


@dataclass(frozen=True)
class _Fed:
    """Tokens that one layer stored in B rows, from `first` on."""

    layer: int
    kind: str
    first: int
    both: Tensor  # [2, B, H, T, D] keys and values
    index: Tensor  # [B, T] feed indices
    real: Tensor  # bool [B, T]: whether they were stored to stay

    @property
    def form(self) -> tuple:
        return self.kind, self.both.shape


class TieLog:
    """The ties of a cache's rows."""

    def __init__(self, rows: list[list[Tensor]], fed: list[_Fed] | None = None, first: int = 0):
        self.rows = rows  # int64 [n, 4] each
        self.fed: list[_Fed] = [] if fed is None else fed  # whose ties have not been looked for
        self.first = first  # this log's first row

    def part(self, rows: slice) -> TieLog:
        """The rows from the slice's first on, which stay those of this log."""
        return TieLog(self.rows, self.fed, self.first + (rows.start or 0))

    def begin(self, rows: int) -> None:
        """The first rows are empty again."""
        self._find()
        for row in self.rows[self.first : self.first + rows]:
            row.clear()

    def note(self, layer: int, kind: str, key: Tensor, value: Tensor, index: Tensor, real: Tensor | None) -> None:
        """Note what the tokens being fed to the first B rows have.

        key, value [B, H, T, D]; index [B, T]: feed indices; real bool [B, T]: which tokens are stored. None: all
        """
        width = max(key.shape[-1], value.shape[-1])
        both = torch.stack([F.pad(x, (0, width - x.shape[-1])) for x in (key, value)])  # zeros are no ties
        real = torch.ones_like(index, dtype=torch.bool) if real is None else real.clone()
        self.fed.append(_Fed(layer, kind, self.first, both, index.clone(), real))
        if index.shape[1] > 1 or len(self.fed) >= min(_MOST, _MOST_NUMBERS // both.numel()):
            self._find()

    def _find(self) -> None:
        """Look for the ties of what was fed, and give them to the rows."""
        for form in {fed.form: None for fed in self.fed}:
            alike = [fed for fed in self.fed if fed.form == form]
            ties = ties_of(torch.stack([fed.both for fed in alike]), form[0])
            index, real = (torch.stack(parts) for parts in zip(*((fed.index, fed.real) for fed in alike), strict=True))
            layer, first = torch.tensor([(fed.layer, fed.first) for fed in alike]).T
            for (n, part, row, head, token, *channel), way in ((ties.numbers, ties.away), (ties.vectors, ties.larger)):
                number = 2 * part + way + (4 * (channel[0] + 1) if channel else 0)
                found = torch.stack([first[n] + row, index[n, row, token], layer[n], head, number], 1)
                self._give(found[real[n, row, token]])
        self.fed.clear()

    def _give(self, found: Tensor) -> None:
        """Give ties to their rows. int64 [N, 5], the row first"""
        found = found[found[:, 0].argsort(stable=True)]
        rows, counts = found[:, 0].unique_consecutive(return_counts=True)
        for row, ties in zip(rows.tolist(), found[:, 1:].split(counts.tolist()), strict=True):
            self.rows[row].append(ties)

    def fork(self, source: TieLog, rows: Tensor, to: Tensor) -> None:
        """Copy the notes of some rows of `source` to rows `to`. rows, to [N]"""
        self._find()
        source._find()
        for row, other in zip(rows.tolist(), to.tolist(), strict=True):
            self.rows[self.first + other][:] = source.rows[source.first + row]

    def of_row(self, row: int) -> Tensor:
        """The ties of a row, in the order of tokens, layers, heads and numbers. int64 [N, 4]"""
        self._find()
        noted = torch.cat([torch.empty(0, COLUMNS, dtype=torch.int64), *self.rows[self.first + row]])
        return noted[np.lexsort(noted.numpy().T[::-1])]

    def put(self, row: int, ties: Tensor) -> None:
        """Replace a row's notes. [N, 4]"""
        self._find()
        self.rows[self.first + row][:] = [ties.to(torch.int64)]


@dataclass(frozen=True)
class KnownTies:
    """The ties of the rows of tokens that go through a model, for quantising them again. int64 [N] each"""

    row: Tensor
    token: Tensor  # the place in the row
    layer: Tensor
    head: Tensor
    number: Tensor

    @classmethod
    def of(cls, ties: Sequence[Tensor | None], device: torch.device | str = "cpu") -> KnownTies | None:
        """Those of a batch of traces; None if no trace has any. [N, 4] each"""
        parts = [(row, part) for row, part in enumerate(ties) if part is not None and len(part)]
        if not parts:
            return None
        every = torch.cat([part.to(torch.int64) for _, part in parts])
        row = torch.cat([torch.full((len(part),), row) for row, part in parts])
        return cls(*(column.to(device) for column in (row, *every.unbind(1))))

    def moved(self, row: Tensor, token: Tensor, there: Tensor) -> KnownTies:
        """With their rows and places among other tokens; those that are not `there` are left out. [N] each"""
        return KnownTies(row[there], token[there], self.layer[there], self.head[there], self.number[there])

    def between(self, start: int, stop: int) -> KnownTies:
        """Those of the tokens start .. stop - 1, counted from `start`."""
        return self.moved(self.row, self.token - start, (self.token >= start) & (self.token < stop))

    def of_layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Ties, Ties]:
        """The ties of a layer's keys, and of its values. key, value [B, H, T, D]"""
        here, is_value = self.layer == layer, self.number & 2 != 0
        return self._of(here & ~is_value, key.shape[-1]), self._of(here & is_value, value.shape[-1])

    def _of(self, some: Tensor, width: int) -> Ties:
        where, number = (self.row[some], self.head[some], self.token[some]), self.number[some]
        way, channel = number & 1 != 0, (number >> 2) - 1
        if len(channel) and (highest := int(channel.max())) >= width:
            raise SparseRLError(
                f"the trace says how number {highest} of a key or value was rounded, but those of this model have "
                f"{width} numbers, from 0 on; the trace belongs to another model."
            )
        single = channel >= 0
        numbers = (*(x[single] for x in where), channel[single])
        return Ties(numbers, way[single], tuple(x[~single] for x in where), way[~single])


def slots_and_ties(traces: Sequence[Trace], device: torch.device | str) -> tuple[SlotFormat | None, KnownTies | None]:
    """How the slots of all these trajectories were stored, and their ties."""
    return common_format(trace.slots for trace in traces), KnownTies.of([trace.ties for trace in traces], device)
