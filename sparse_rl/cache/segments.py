"""Segments of a micro-batch of traces: the runs of queries between two evictions, in which what is visible does not change.

A query of a segment that begins at e sees the tokens kept there, {k < e: evicted_at[k] > e}, and the segment's own tokens up to itself:
work and memory follow the budget, not the square of the length. Nothing is assumed of the traces: where heads evict at different
moments there are only more segments.

Shapes: B rows, L layers, H KV heads, T tokens, S segments (of the row that has most), K tokens kept (where most are).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST_KEPT = 64  # kept tokens listed per token: the lists of a head take 256 bytes a token, as much as its keys and values of 64 numbers


@dataclass(frozen=True)
class Segments:
    begins: Tensor  # int32 [B, S]: the first query of each; the row's length where it has fewer
    counts: Tensor  # int32 [B, L, H, S]: tokens kept there
    lengths: Tensor  # int64 [B]
    most_kept: int  # K
    are_few: bool  # whether listing what each keeps takes memory in proportion to the tokens


def find_segments(evicted_at: Tensor, lengths: Tensor) -> Segments:
    """evicted_at int32 [B, L, H, T], lengths int64 [B]: without padding; on one device"""
    rows, layers, heads, tokens = evicted_at.shape
    gone = evicted_at.clamp(max=tokens).flatten(1).long()  # [B, L * H * T]
    index = torch.arange(tokens + 1, device=evicted_at.device)
    moments = torch.zeros(rows, tokens + 1, dtype=torch.bool, device=evicted_at.device).scatter_(1, gone, True)
    moments[:, 0] = True
    moments &= index < lengths[:, None]
    most = int(moments.sum(1).max())
    begins = torch.where(moments, index, lengths[:, None]).sort(1).values[:, :most]  # [B, S]

    number = torch.where(moments, moments.cumsum(1) - 1, most)  # [B, T + 1]: the segment that begins at a moment; S: none does
    segment = number.gather(1, gone).view(rows, layers * heads, tokens)
    left = torch.zeros(rows, layers * heads, most + 1, dtype=torch.int32, device=evicted_at.device)
    left.scatter_add_(2, segment, torch.ones(1, 1, 1, dtype=torch.int32, device=evicted_at.device).expand_as(segment))
    counts = begins[:, None] - left[..., :most].cumsum(2)  # all before it, less those gone by then
    counts = torch.where(begins[:, None] < lengths[:, None, None], counts, 0).to(torch.int32)
    most_kept = int(counts.max())
    few = most * most_kept <= _MOST_KEPT * int(lengths.max())
    return Segments(begins.to(torch.int32), counts.view(rows, layers, heads, most), lengths, most_kept, few)


def query_tiles(segments: Segments, size: int) -> Tensor:
    """Every segment's queries in tiles: int32 [B, N, 4] of (first, segment's end, segment's begin, segment), -1 where a row has fewer."""
    return _table([[(q, end, begin, s) for s, begin, end in row for q in range(begin, end, size)] for row in _spans(segments)])


def key_tiles(segments: Segments, size: int) -> Tensor:
    """What every segment sees, kept tokens and then its own, in tiles: int32 [B, N, 4] of (place in that list, segment's end, begin,
    segment), -1 where a row has fewer. Where a head keeps fewer than another its last tiles are empty."""
    seen = [[(s, begin, end, end - begin + (segments.most_kept if s else 0)) for s, begin, end in row] for row in _spans(segments)]
    return _table([[(n, end, begin, s) for s, begin, end, count in row for n in range(0, count, size)] for row in seen])


def typical_length(segments: Segments) -> int:
    """The median of all segments' queries."""
    return int(statistics.median_low(end - begin for row in _spans(segments) for _, begin, end in row))


def _spans(segments: Segments) -> list[list[tuple[int, int, int]]]:
    """(segment, begin, end) of every row."""
    rows = []
    for begins, length in zip(segments.begins.tolist(), segments.lengths.tolist(), strict=True):
        ends = [*begins[1:], length]
        rows.append([(s, begin, end) for s, (begin, end) in enumerate(zip(begins, ends, strict=True)) if begin < end])
    return rows


def _table(rows: list[list[tuple[int, int, int, int]]]) -> Tensor:
    most = max(map(len, rows))
    return torch.tensor([row + [(-1, -1, -1, -1)] * (most - len(row)) for row in rows], dtype=torch.int32)
