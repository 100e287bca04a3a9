"""The segments of a micro-batch in the form that the kernels of attention under a trace need (segments.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache.segments import Packing, Replay, Segments, key_tiles, of_heads, pack_segments, query_tiles, typical_length
from .jit import jit


@jit(do_not_specialize=["rows_heads", "tokens", "num_segments", "most"])
def _list_kept(evicted_at, begins, kept, rows_heads, tokens, num_segments, most, BLOCK: tl.constexpr):
    """The tokens one head keeps at one segment's begin, ascending."""
    program, segment = (tl.program_id(0) // num_segments).to(tl.int64), tl.program_id(0) % num_segments
    begin = tl.load(begins + program // rows_heads * num_segments + segment)
    evicted_at += program * tokens
    kept += (program * num_segments + segment) * most
    found = 0
    for start in range(0, begin, BLOCK):
        k = start + tl.arange(0, BLOCK)
        stays = (tl.load(evicted_at + k, mask=k < begin, other=0) > begin).to(tl.int32)
        place = found + tl.cumsum(stays, 0) - 1
        # A row's missing segments begin at its end, and may see more tokens than fit.
        tl.store(kept + place, k, mask=(stays != 0) & (place < most))
        found += tl.sum(stays, 0)  # pyright: ignore[reportOperatorIssue]


@dataclass(frozen=True)
class Tiles:
    """How many queries and keys a program takes at a time, and how it runs."""

    queries: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Layout:
    """A micro-batch's segments in the form that the kernels need, made once for all layers."""

    kept: Tensor  # int32 [B, L, H, S, K]; L = H = 1 where all layers and heads share them
    counts: Tensor  # int32 [B, L, H, S]
    forward: Tensor  # int32 [B, N, 4]: tiles of queries
    d_queries: Tensor  # int32 [B, N, 4]
    d_keys: Tensor  # int32 [B, N, 4]: tiles of what segments see
    tiles: tuple[Tiles, Tiles, Tiles]  # forward, dQ, dK and dV

    def lists(self, layer: int, heads: int) -> tuple[Tensor, Tensor]:
        """What one layer keeps, and how many. -> [B, H, S, K], [B, H, S]"""
        mine = layer if self.kept.shape[1] > 1 else 0
        kept, counts = (of_heads(x[:, mine], heads) for x in (self.kept, self.counts))
        return kept.expand(-1, heads, -1, -1), counts.expand(-1, heads, -1)


def tiles_for(queries: int, dim: int, dtype: torch.dtype) -> tuple[Tiles, Tiles, Tiles]:
    """The tile sizes of forward, dQ, and dK and dV; `queries`: how many a typical segment has"""
    if dtype == torch.float32 or dim > 128:  # the operands of a dot live in registers, or are twice as wide
        small = Tiles(16, 32, 4, 2)
        return small, small, small
    queries = max(16, triton.next_power_of_2(queries))
    return Tiles(min(queries, 128), 32, 4, 4), Tiles(min(queries, 64), 32, 4, 3), Tiles(min(queries, 64), 64, 4, 2)


def make_layout(
    segments: Segments, evicted_at: Tensor, dim: int, dtype: torch.dtype, packing: Packing | None = None
) -> Layout:
    """evicted_at int32 [B, L, H, T], in which the segments were found; L = H = 1 where all layers and heads share it

    With a packing the layout is that of its one row.
    """
    rows, layers, heads, tokens = evicted_at.shape
    num_segments, device = segments.begins.shape[1], evicted_at.device
    kept = torch.zeros(rows, layers, heads, num_segments, max(segments.most_kept, 1), dtype=torch.int32, device=device)
    _list_kept[(rows * layers * heads * num_segments,)](
        evicted_at.contiguous(), segments.begins.contiguous(), kept, layers * heads, tokens, num_segments,
        kept.shape[-1], BLOCK=1024,
    )  # fmt: skip
    if packing is not None:
        segments, own = pack_segments(segments, packing)
        kept = packing.place.gather(1, kept.flatten(1).long()).view(kept.shape).to(torch.int32)
        kept = kept.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, own][None].contiguous()  # [1, L, H, M, K]
    forward, d_queries, d_keys = tiles_for(typical_length(segments), dim, dtype)
    return Layout(
        kept=kept,
        counts=segments.counts.contiguous(),
        forward=query_tiles(segments, forward.queries).to(device),
        d_queries=query_tiles(segments, d_queries.queries).to(device),
        d_keys=key_tiles(segments, d_keys.keys).to(device),
        tiles=(forward, d_queries, d_keys),
    )


def layout_of(replay: Replay, dim: int, dtype: torch.dtype) -> Layout:
    """The layout of a micro-batch, made once for all layers."""
    if (dim, dtype) not in replay.layouts:
        replay.layouts[dim, dtype] = make_layout(replay.segments, replay.evicted_at, dim, dtype, replay.packing)
    return replay.layouts[dim, dtype]
