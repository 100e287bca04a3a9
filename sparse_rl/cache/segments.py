"""Segments of a micro-batch of traces: the runs of queries between two evictions, in which what is visible does not change.

A query of a segment that begins at e sees the tokens kept there, {k < e: evicted_at[k] > e}, and the segment's own tokens up to itself:
work and memory follow the budget, not the square of the length. Nothing is assumed of the traces: where heads evict at different
moments there are only more segments.

Shapes: B rows, L layers, H KV heads, T tokens, S segments (of the row that has most), K tokens kept (where most are).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_SHARED = 16  # times as many where all layers and heads share one list
_MOST_KEPT = 64  # kept tokens listed per token: the lists of a head take 256 bytes a token, as much as its keys and values of 64 numbers


@dataclass(frozen=True)
class Segments:
    begins: Tensor  # int32 [B, S]: the first query of each; the row's length where it has fewer
    counts: Tensor  # int32 [B, L, H, S]: tokens kept there
    lengths: Tensor  # int64 [B]
    most_kept: int  # K
    are_few: bool  # whether listing what each keeps takes memory in proportion to the tokens


def find_segments(evicted_at: Tensor, lengths: Tensor) -> Segments:
    """evicted_at int32 [B, L, H, T] (L = H = 1 where it is the same for all), lengths int64 [B]: without padding; on one device"""
    rows, layers, heads, tokens = evicted_at.shape
    gone = evicted_at.clamp(max=tokens).flatten(1).long()  # [B, L * H * T]
    index = torch.arange(tokens + 1, device=evicted_at.device)
    moments = torch.zeros(rows, tokens + 1, dtype=torch.bool, device=evicted_at.device).scatter_(1, gone, True)
    moments[:, 0] = True
    moments &= index < lengths[:, None]
    most = int(moments.sum(1).max())
    begins = torch.where(moments, index, lengths[:, None]).sort(1).values[:, :most]  # [B, S]

    number = torch.where(
        moments, moments.cumsum(1) - 1, most
    )  # [B, T + 1]: the segment that begins at a moment; S: none does
    segment = number.gather(1, gone).view(rows, layers * heads, tokens)
    left = torch.zeros(rows, layers * heads, most + 1, dtype=torch.int32, device=evicted_at.device)
    left.scatter_add_(2, segment, torch.ones(1, 1, 1, dtype=torch.int32, device=evicted_at.device).expand_as(segment))
    counts = begins[:, None] - left[..., :most].cumsum(2)  # all before it, less those gone by then
    counts = torch.where(begins[:, None] < lengths[:, None, None], counts, 0).to(torch.int32)
    most_kept = int(counts.max())
    few = most * most_kept <= _MOST_KEPT * (_SHARED if layers * heads == 1 else 1) * int(lengths.max())
    return Segments(begins.to(torch.int32), counts.view(rows, layers, heads, most), lengths, most_kept, few)


def query_tiles(segments: Segments, size: int) -> Tensor:
    """Every segment's queries in tiles: int32 [B, N, 4] of (first, segment's end, segment's begin, segment), -1 where a row has fewer."""
    begins, ends = _spans(segments)
    return _tiles(begins, ends, ends - begins, size, first=begins)


def key_tiles(segments: Segments, size: int) -> Tensor:
    """What every segment sees, kept tokens and then its own, in tiles: int32 [B, N, 4] of (place in that list, segment's end, begin,
    segment), -1 where a row has fewer. Where a head keeps fewer than another its last tiles are empty."""
    begins, ends = _spans(segments)
    kept = torch.full_like(begins, segments.most_kept)
    kept[:, 0] = 0
    return _tiles(
        begins, ends, torch.where(ends > begins, ends - begins + kept, 0), size, first=torch.zeros_like(begins)
    )


def typical_length(segments: Segments) -> int:
    """The median of all segments' queries."""
    begins, ends = _spans(segments)
    return int((ends - begins)[ends > begins].median())  # of two in the middle the lower


def _spans(segments: Segments) -> tuple[Tensor, Tensor]:
    """Begin and end of every segment, on the CPU; equal where a row has fewer. int64 [B, S]"""
    begins, lengths = segments.begins.cpu().long(), segments.lengths.cpu()
    return begins, torch.cat([begins[:, 1:], lengths[:, None]], 1)


def _tiles(begins: Tensor, ends: Tensor, counts: Tensor, size: int, first: Tensor) -> Tensor:
    """Cut what each segment counts into tiles of `size`; a segment's first tile begins at `first`. All int64 [B, S]"""
    tiles = -(-counts // size)
    until = tiles.cumsum(1)  # tiles up to and with a segment
    number = torch.arange(int(until[:, -1].max())).expand(len(tiles), -1).contiguous()  # [B, N]
    segment = torch.searchsorted(until, number, right=True)
    there = segment < tiles.shape[1]
    segment = segment.clamp(max=tiles.shape[1] - 1)
    place = first.gather(1, segment) + size * (number - (until - tiles).gather(1, segment))
    table = torch.stack([place, ends.gather(1, segment), begins.gather(1, segment), segment], -1)
    return torch.where(there[..., None], table, -1).to(torch.int32)
