"""Beacons while decoding: a row whose chunk is complete feeds the beacon instead of its next token, and keeps the beacon's entry alone.

A step is the same for all rows, tensors only: what is fed (`begin`), the model's forward pass, sampling for those that fed a token,
and for those that fed a beacon the move of its entry to where the chunk began (`fold`). The token sampled before the beacon waits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..beacon import BeaconEmbedding, beacon_of
from ..cache import SlotCache
from ..compressors import Compressor
from ..compressors.beacon import Beacon
from ..errors import SparseRLError


@dataclass
class Chunks:
    """What every row's response has been folded into so far. R rows, N new tokens at most."""

    open: Tensor  # [R] tokens fed since the last beacon
    folded: Tensor  # [R] beacons fed
    surprise: Tensor  # [R] fp32: minus the log-probs of the open tokens
    ends: Tensor  # bool [R, N]: the response tokens after which a beacon was fed

    @classmethod
    def empty(cls, rows: int, new: int, device: torch.device) -> Chunks:
        counts = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2)]
        return cls(*counts, torch.zeros(rows, device=device), torch.zeros(rows, new, dtype=torch.bool, device=device))

    @property
    def tensors(self) -> list[Tensor]:
        return [self.open, self.folded, self.surprise, self.ends]

    def start(self, rows: Tensor | slice) -> None:
        for tensor in self.tensors:
            tensor[rows] = 0


@dataclass(frozen=True)
class Turn:
    """What each of the first B rows feeds in this step. All [B]"""

    token: Tensor
    position: Tensor
    folding: Tensor  # bool: it is the beacon


def check_beacon(model: nn.Module, compressor: Beacon) -> None:
    """Refuse a model that has no beacon, and chunks that its beacon was not trained for."""
    beacon = beacon_of(model)
    if beacon is None:
        raise SparseRLError(
            "this model has no beacon to fold its response into; load a student that `sparse-rl train` made, folder and all, "
            "or use another compressor."
        )
    unknown = [size for size in compressor.sizes if beacon.chunks and size not in beacon.chunks]
    if unknown:
        trained, why = (
            " or ".join(map(str, beacon.chunks)),
            "" if compressor.threshold is None else " (a threshold ends chunks early)",
        )
        raise SparseRLError(
            f"a beacon after {unknown[0]} tokens was asked for{why}, but this student was trained with one after {trained}; use that."
        )


def beacon_positions(model: nn.Module, compressor: Compressor, new: int) -> int:
    """Positions that beacons may take up among `new` tokens: none, unless they have their own."""
    own = compressor.folds and beacon_of(model).position == "own"
    return max(0, new - 2) // min(compressor.sizes) if own else 0


def begin(state, width: int, live: Tensor, beacon: BeaconEmbedding, compressor: Beacon) -> Turn:
    """state: RowState; live bool [B]"""
    chunks, index = state.chunks, state.index[:width]
    tokens, folded, surprise = chunks.open[:width], chunks.folded[:width], chunks.surprise[:width]
    folding = compressor.closes(tokens, surprise) & live
    feeding = live & ~folding
    last = (state.count[:width] - 1).clamp(min=0)[:, None]
    surprise -= state.logprobs[:width].gather(1, last)[:, 0] * feeding
    tokens += feeding
    folded += folding
    position = index if beacon.position == "own" else index - folded
    return Turn(torch.where(folding, beacon.id, state.token[:width]), position, folding)


def fold(cache: SlotCache, state, turn: Turn) -> None:
    """Rows that have fed a beacon keep its entry where their chunk began; the chunk is gone."""
    chunks, folding = state.chunks, turn.folding
    width = len(folding)
    rows = torch.arange(width, device=folding.device)
    used = state.used[:width]
    at = used.clamp(max=cache.capacity - 1)
    to = torch.where(folding, at - chunks.open[:width], at)
    for tensor in (cache.keys, cache.values, cache.feed):
        tensor[:, rows, :, to] = tensor[:, rows, :, at]
    ended = (state.count[:width] - 2).clamp(min=0)  # the last token fed; the one sampled after it waits
    chunks.ends[rows, ended] |= folding
    used.copy_(torch.where(folding, to + 1, used))
    state.index[:width] += folding
    chunks.open[:width] *= ~folding
    chunks.surprise[:width] *= ~folding
