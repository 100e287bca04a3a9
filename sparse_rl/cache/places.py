"""Where the tokens of a feed go: their slots, and the places of the last queries in the rings that record these."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


def place_in(extra: int, slot: Tensor, index: Tensor) -> Tensor:
    """Where tokens go in a layer with so many more slots. slot: in the smallest layer; index: feed indices"""
    return torch.minimum(index, slot + extra) if extra else slot


@dataclass(frozen=True)
class Places:
    """Where the tokens of a feed go, in layers with equally many slots. B rows of T tokens, M of which are stored."""

    rows: Tensor  # [B, 1]; or [M]
    slots: Tensor  # [B, T]; or [M]
    stored: Tensor | None = None  # [M] the places of these among the B * T tokens; None: all are stored

    @classmethod
    def of(cls, rows: Tensor, slots: Tensor, stored: Tensor | None = None) -> Places:
        """rows [B, 1], slots [B, T]"""
        if stored is None:
            return cls(rows, slots)
        return cls(rows.expand_as(slots).flatten()[stored], slots.flatten()[stored], stored)

    def choose(self, x: Tensor) -> Tensor:
        """What is stored, of something about all tokens. [B, T, ...] -> the same, or [M, ...]"""
        return x if self.stored is None else x.flatten(0, 1)[self.stored]


class Recent(NamedTuple):
    """The queries of a feed that are recorded, and where they go in the ring of a layer. W' of each row"""

    rows: Tensor  # [B, 1]
    place: Tensor  # [B, W']
    token: tuple[Tensor, Tensor] | None = None  # [B, 1], [B, W'] which of the B x T tokens; None: the last W'
    real: Tensor | None = None  # bool [B, W', 1, 1] whether the row has such a token; None: all have

    @classmethod
    def of(cls, rows: Tensor, index: Tensor, most: int, ends: Tensor | None = None) -> Recent:
        """Where layers record the last `most` queries.

        rows [B, 1]; index [B, T], consecutive; ends [B]: where each prompt ends, None where nothing is padding
        """
        last = min(most, index.shape[1])
        if ends is None:
            return cls(rows, index[:, -last:] % most)
        first, stop = index[:, :1], torch.minimum(index[:, -1] + 1, ends)[:, None]
        here = stop - last + torch.arange(last, device=index.device)  # [B, W'] feed indices
        real = here >= first  # a row whose prompt ended in an earlier chunk has no queries here
        own = torch.arange(len(index), device=index.device)[:, None]
        return cls(rows, here % most, (own, (here - first).clamp(min=0)), real[:, :, None, None])
