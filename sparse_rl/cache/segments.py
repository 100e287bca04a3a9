"""Divide traces into segments: runs of queries between two evictions, in which what is visible does not change.

A query of a segment that begins at e sees the tokens kept there, {k < e: evicted_at[k] > e}, and the segment's own
tokens up to itself. So work and memory follow the budget, not the square of the length. Any trace is allowed: if heads
evict at different moments, there are only more segments.

Trajectories may be packed into one row, one behind the other without padding, and those of a group may share the tokens
with which all of them begin (`Packing`). A packed row consists of segments as well; only their lists of kept tokens
point to several places.

Shapes: B rows, L layers, H KV heads, T tokens, S segments (most of any row), K kept tokens (most of any segment).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .formats import SlotFormat
from .ties import KnownTies

# Kept tokens listed per token: the lists of a head take 256 bytes a token, as much as keys and values of 64 numbers.
_MOST_KEPT = 64
WIDEST_HEAD = 256  # widest key or value for which kernels go by segments; wider ones use a mask
_SHARED = 16  # times as many if all layers and heads share one list


@dataclass(frozen=True)
class Segments:
    begins: Tensor  # int32 [B, S]: the first query of each; the row's length if it has fewer
    counts: Tensor  # int32 [B, L, H, S]: tokens kept there
    lengths: Tensor  # int64 [B]
    most_kept: int  # K
    are_few: bool  # whether lists of what each keeps take memory in proportion to the tokens


@dataclass(frozen=True)
class Packing:
    """Where B trajectories lie in one row of tokens. The tokens that a trajectory brings itself lie side by side, in
    the order of trajectories; its tokens before `first` are those of an earlier trajectory with the same beginning.
    """

    place: Tensor  # int64 [B, T]: where every token of a trajectory lies; 0 beyond its end
    first: Tensor  # int64 [B]: the first token that it brings itself
    size: int  # tokens in the row


@dataclass(frozen=True)
class Observed:
    """The queries, keys and values with which one layer attends."""

    layer: int  # the number of the slots that it reads
    queries: Tensor  # [B, H * G, T, D] after RoPE
    keys: Tensor  # [B, H, T, D] after RoPE
    values: Tensor  # [B, H, T, Dv]
    scaling: float
    sliding_window: int | None
    softcap: float | None
    sinks: Tensor | None  # [H * G]: logits that take a share of every query's attention
    bias: Tensor | None = None  # [B, H * G, T, T]: added to the logits


@dataclass
class Replay:
    """The traces of a micro-batch, on the model's device.

    With a packing the model is fed the one packed row; traces and lengths stay those of the B trajectories.
    """

    evicted_at: Tensor  # int32 [B, L, H, T]; "never" on padding; L = H = 1 if all layers and heads share it
    lengths: Tensor  # int64 [B]: tokens without padding
    packing: Packing | None = None
    slots: SlotFormat | None = None  # how the sampler stored keys and values
    ties: KnownTies | None = None  # which way its slots of 8 bits rounded ties
    layouts: dict[Any, Any] = field(default_factory=dict)  # caches of kernels, by what they depend on
    observe: Callable[[Observed], None] | None = None  # called with what each layer attends with

    @cached_property
    def segments(self) -> Segments:
        return find_segments(self.evicted_at, self.lengths, None if self.packing is None else self.packing.first)

    def of_layer(self, layer: int, heads: int) -> Tensor:
        """`evicted_at` of a layer with so many KV heads. int32 [B, H, T]; H = 1 if all heads share it"""
        return of_heads(self.evicted_at[:, layer if self.evicted_at.shape[1] > 1 else 0], heads)


def of_heads(found: Tensor, heads: int) -> Tensor:
    """What a trace says of the KV heads of a layer, which may have fewer than the trace: then each of its heads is
    repeated there. found [B, H, ...] -> [B, heads, ...], or [B, 1, ...] if all heads share it
    """
    return found[:, :: max(1, found.shape[1] // heads)]


def find_segments(evicted_at: Tensor, lengths: Tensor, cuts: Tensor | None = None) -> Segments:
    """Find the segments of traces. evicted_at int32 [B, L, H, T] (L = H = 1 if all share it); lengths int64 [B]

    cuts int64 [B]: where a segment must begin although nothing is evicted
    """
    rows, layers, heads, tokens = evicted_at.shape
    gone = evicted_at.clamp(max=tokens).flatten(1).long()  # [B, L * H * T]
    index = torch.arange(tokens + 1, device=evicted_at.device)
    moments = torch.zeros(rows, tokens + 1, dtype=torch.bool, device=evicted_at.device).scatter_(1, gone, True)
    moments[:, 0] = True
    if cuts is not None:
        moments.scatter_(1, cuts[:, None], True)
    moments &= index < lengths[:, None]
    most = int(moments.sum(1).max())
    begins = torch.where(moments, index, lengths[:, None]).sort(1).values[:, :most]  # [B, S]

    # [B, T + 1]: the segment that begins at each moment; S if none does
    number = torch.where(moments, moments.cumsum(1) - 1, most)
    segment = number.gather(1, gone).view(rows, layers * heads, tokens)
    left = torch.zeros(rows, layers * heads, most + 1, dtype=torch.int32, device=evicted_at.device)
    left.scatter_add_(2, segment, torch.ones(1, 1, 1, dtype=torch.int32, device=evicted_at.device).expand_as(segment))
    counts = begins[:, None] - left[..., :most].cumsum(2)  # all tokens before it, less those gone by then
    counts = torch.where(begins[:, None] < lengths[:, None, None], counts, 0).to(torch.int32)
    most_kept = int(counts.max())
    few = most * most_kept <= _MOST_KEPT * (_SHARED if layers * heads == 1 else 1) * int(lengths.max())
    return Segments(begins.to(torch.int32), counts.view(rows, layers, heads, most), lengths, most_kept, few)


def pack_segments(segments: Segments, packing: Packing) -> tuple[Segments, Tensor]:
    """The segments of a packed row, and the indices of the trajectories' segments that they are (int64 [M], in B * S).

    A trajectory's segments before its `first` are those of the trajectory that brings these tokens.
    """
    begins, lengths = segments.begins.long(), segments.lengths[:, None]
    own = ((begins >= packing.first[:, None]) & (begins < lengths)).flatten().nonzero()[:, 0]
    placed = packing.place.gather(1, begins.clamp(max=packing.place.shape[1] - 1)).flatten()[own]
    counts = segments.counts.permute(1, 2, 0, 3).flatten(2)[..., own][None]  # [1, L, H, M]
    size = torch.tensor([packing.size], device=begins.device)
    row = Segments(placed[None].to(torch.int32), counts, size, segments.most_kept, segments.are_few)
    return row, own


def query_tiles(segments: Segments, size: int) -> Tensor:
    """Divide every segment's queries into tiles. -> int32 [B, N, 4]: (first, segment's end, segment's begin, segment)

    A row with fewer tiles is filled up with -1.
    """
    begins, ends = _spans(segments)
    return _tiles(begins, ends, ends - begins, size, first=begins)


def key_tiles(segments: Segments, size: int) -> Tensor:
    """Divide what every segment sees, its kept tokens and then its own, into tiles. -> int32 [B, N, 4]

    An entry is (place in that list, segment's end, segment's begin, segment); a row with fewer tiles is filled up with
    -1. If a head keeps fewer tokens than another, its last tiles are empty.
    """
    begins, ends = _spans(segments)
    kept = segments.counts.amax((1, 2)).cpu().long()
    seen = torch.where(ends > begins, ends - begins + kept, 0)
    return _tiles(begins, ends, seen, size, first=torch.zeros_like(begins))


def typical_length(segments: Segments) -> int:
    """The median number of queries in a segment."""
    begins, ends = _spans(segments)
    return int((ends - begins)[ends > begins].median())  # the lower of two in the middle


def _spans(segments: Segments) -> tuple[Tensor, Tensor]:
    """Begin and end of every segment, on the CPU; equal for segments that a row lacks. int64 [B, S]"""
    begins, lengths = segments.begins.cpu().long(), segments.lengths.cpu()
    return begins, torch.cat([begins[:, 1:], lengths[:, None]], 1)


def _tiles(begins: Tensor, ends: Tensor, counts: Tensor, size: int, first: Tensor) -> Tensor:
    """Cut `counts` entries of each segment into tiles of `size`; its first tile begins at `first`. All int64 [B, S]"""
    tiles = -(-counts // size)
    until = tiles.cumsum(1)  # tiles of all segments up to this one
    number = torch.arange(int(until[:, -1].max())).expand(len(tiles), -1).contiguous()  # [B, N]
    segment = torch.searchsorted(until, number, right=True)
    there = segment < tiles.shape[1]
    segment = segment.clamp(max=tiles.shape[1] - 1)
    place = first.gather(1, segment) + size * (number - (until - tiles).gather(1, segment))
    table = torch.stack([place, ends.gather(1, segment), begins.gather(1, segment), segment], -1)
    return torch.where(there[..., None], table, -1).to(torch.int32)
