"""Triton kernels of attention under a trace, forward and backward, by segments (cache/segments.py).

The keys of a segment are one list: the tokens kept at its beginning, read in place through their indices, then its own
tokens. Programs of the forward pass and of dQ own a tile of queries and go through the list. Programs of dK and dV own
a tile of the list, go through the segment's queries of all query heads of the group, and add to fp32 gradients (a kept
token belongs to many segments, so the order of a sum is not fixed). Scores exist one tile at a time.

Shapes: B rows, H KV heads, G query heads per KV head, T tokens, S segments, K kept.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..cache.segments import Replay
from .jit import jit
from .layout import Layout, layout_of

_LOG2E = tl.constexpr(1.4426950408889634)
# These vary between micro-batches, and must not compile a kernel for each value.
_SIZES = ["num_tiles", "most", "tokens", "kept_b", "kept_h", "count_b", "count_h"]


@jit
def _tile_of(tiles, b, num_tiles):
    """This program's entry in the table: first query or place (-1: none), end and begin of its segment, segment."""
    tiles += (b * num_tiles + tl.program_id(0)) * 4
    return tl.load(tiles), tl.load(tiles + 1), tl.load(tiles + 2), tl.load(tiles + 3)


@jit
def _list_of(kept, counts, b, head, segment, most, kept_b, kept_h, count_b, count_h):
    """How many tokens a segment keeps, and where they are listed. If heads share lists, the strides are 0."""
    return tl.load(counts + b * count_b + head * count_h + segment), kept + b * kept_b + head * kept_h + segment * most


@jit
def _listed(n, count, begin, total, kept):
    """The tokens at places n of a segment's list; beyond its end, a token that no query sees. [N]"""
    token = tl.load(kept + n, mask=n < count, other=0)
    token = tl.where(n < count, token, begin + n - count)
    return tl.where(n < total, token, 2147483647)


@jit
def _rows_of(x, row, valid, d, stride, DIM: tl.constexpr):
    """[N, D_BLOCK]: rows of a matrix, zero where not valid. row, valid [N]"""
    return tl.load(
        x + row.to(tl.int64)[:, None] * stride + d[None, :], mask=valid[:, None] & (d < DIM)[None, :], other=0.0
    )


@jit
def _logits(product, scaling, SOFTCAP: tl.constexpr):
    """Logits to base 2, and soft-capped ones to base e, which the slope of the cap needs."""
    logits = product * scaling
    if SOFTCAP > 0:
        logits = SOFTCAP * (2 * tl.sigmoid(2 * logits / SOFTCAP) - 1)
    return logits * _LOG2E, logits


@jit
def _visible(q, token, WINDOW: tl.constexpr):
    """Whether a query sees a token of its segment's list: it is not later, and within the layer's own window.

    q [M, 1] or [1, M], token the other way -> [M, N]
    """
    seen = token <= q
    if WINDOW > 0:
        seen &= q - token < WINDOW
    return seen


@jit(do_not_specialize=_SIZES)
def _forward(
    query, key, value, sinks, out, lse, kept, counts, tiles, scaling, num_tiles, most, tokens,
    query_b, query_h, query_t, key_b, key_h, key_t, value_b, value_h, value_t, out_b, out_t, out_h,
    kept_b, kept_h, count_b, count_h,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one query head."""
    b, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    first, end, begin, segment = _tile_of(tiles, b, num_tiles)
    if first < 0:
        return
    count, kept = _list_of(kept, counts, b, head // GROUP, segment, most, kept_b, kept_h, count_b, count_h)
    key += b * key_b + (head // GROUP) * key_h
    value += b * value_b + (head // GROUP) * value_h
    d, q = tl.arange(0, DIM_BLOCK), first + tl.arange(0, QUERIES)
    query_tile = _rows_of(query + b * query_b + head * query_h, q, q < end, d, query_t, DIM)  # [M, D]
    top = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    if SINKS:  # as a token that every query sees and whose value is zero
        top = total + tl.load(sinks + head).to(tl.float32) * _LOG2E
        total += 1.0
    result = tl.zeros([QUERIES, DIM_BLOCK], tl.float32)
    last = count + tl.minimum(first + QUERIES, end) - begin
    for start in range(0, last, KEYS):
        n = start + tl.arange(0, KEYS)
        token = _listed(n, count, begin, last, kept)
        key_tile = _rows_of(key, token, n < last, d, key_t, DIM)  # [N, D]
        logits, _ = _logits(tl.dot(query_tile, tl.trans(key_tile), input_precision="ieee"), scaling, SOFTCAP)  # [M, N]
        logits = tl.where(_visible(q[:, None], token[None, :], WINDOW), logits, -float("inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weights, 1)
        value_tile = _rows_of(value, token, n < last, d, value_t, DIM)
        result = result * shrink[:, None] + tl.dot(weights.to(value_tile.dtype), value_tile, input_precision="ieee")
        top = higher
    place = out + b * out_b + q.to(tl.int64)[:, None] * out_t + head * out_h + d[None, :]
    tl.store(place, (result / total[:, None]).to(out.dtype.element_ty), mask=(q < end)[:, None] & (d < DIM)[None, :])
    tl.store(lse + (b * tl.num_programs(1) + head) * tokens + q, top + tl.log2(total), mask=q < end)


@jit(do_not_specialize=_SIZES)
def _backward_queries(
    query, key, value, out, upstream, lse, delta, d_query, kept, counts, tiles, scaling, num_tiles, most, tokens,
    query_b, query_h, query_t, key_b, key_h, key_t, value_b, value_h, value_t, out_b, out_t, out_h, up_b, up_t, up_h,
    d_query_b, d_query_h, d_query_t, kept_b, kept_h, count_b, count_h,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """dQ of one tile of queries of one query head, and delta = sum(out * upstream), which dK needs too."""
    b, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    first, end, begin, segment = _tile_of(tiles, b, num_tiles)
    if first < 0:
        return
    count, kept = _list_of(kept, counts, b, head // GROUP, segment, most, kept_b, kept_h, count_b, count_h)
    key += b * key_b + (head // GROUP) * key_h
    value += b * value_b + (head // GROUP) * value_h
    d, q = tl.arange(0, DIM_BLOCK), first + tl.arange(0, QUERIES)
    query_tile = _rows_of(query + b * query_b + head * query_h, q, q < end, d, query_t, DIM)  # [M, D]
    up_tile = _rows_of(upstream + b * up_b + head * up_h, q, q < end, d, up_t, DIM)
    out_tile = _rows_of(out + b * out_b + head * out_h, q, q < end, d, out_t, DIM)
    place = (b * tl.num_programs(1) + head) * tokens + q
    mean = tl.sum(out_tile.to(tl.float32) * up_tile.to(tl.float32), 1)  # [M]
    tl.store(delta + place, mean, mask=q < end)
    norm = tl.load(lse + place, mask=q < end, other=0.0)
    result = tl.zeros([QUERIES, DIM_BLOCK], tl.float32)
    last = count + tl.minimum(first + QUERIES, end) - begin
    for start in range(0, last, KEYS):
        n = start + tl.arange(0, KEYS)
        token = _listed(n, count, begin, last, kept)
        key_tile = _rows_of(key, token, n < last, d, key_t, DIM)  # [N, D]
        value_tile = _rows_of(value, token, n < last, d, value_t, DIM)
        product = tl.dot(query_tile, tl.trans(key_tile), input_precision="ieee")  # [M, N]
        logits, capped = _logits(product, scaling, SOFTCAP)
        weights = tl.where(_visible(q[:, None], token[None, :], WINDOW), tl.exp2(logits - norm[:, None]), 0.0)
        product = tl.dot(up_tile, tl.trans(value_tile), input_precision="ieee")
        slope = weights * (product - mean[:, None])  # pyright: ignore[reportArgumentType]
        if SOFTCAP > 0:
            slope *= 1 - (capped / SOFTCAP) * (capped / SOFTCAP)
        result += tl.dot(slope.to(key_tile.dtype), key_tile, input_precision="ieee")
    place = d_query + b * d_query_b + head * d_query_h + q.to(tl.int64)[:, None] * d_query_t + d[None, :]
    tl.store(place, (result * scaling).to(d_query.dtype.element_ty), mask=(q < end)[:, None] & (d < DIM)[None, :])


@jit(do_not_specialize=_SIZES)
def _backward_keys(
    query, key, value, upstream, lse, delta, d_key, d_value, kept, counts, tiles, scaling, num_tiles, most, tokens,
    query_b, query_h, query_t, key_b, key_h, key_t, value_b, value_h, value_t, up_b, up_t, up_h,
    kept_b, kept_h, count_b, count_h,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """What one segment's queries add to dK and dV of one tile of its list."""
    b, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1)
    start, end, begin, segment = _tile_of(tiles, b, num_tiles)
    if start < 0:
        return
    count, kept = _list_of(kept, counts, b, head, segment, most, kept_b, kept_h, count_b, count_h)
    last = count + end - begin
    if start >= last:
        return
    d, n = tl.arange(0, DIM_BLOCK), start + tl.arange(0, KEYS)
    token = _listed(n, count, begin, last, kept)
    key_tile = _rows_of(key + b * key_b + head * key_h, token, n < last, d, key_t, DIM)  # [N, D]
    value_tile = _rows_of(value + b * value_b + head * value_h, token, n < last, d, value_t, DIM)
    key_sum = tl.zeros([KEYS, DIM_BLOCK], tl.float32)
    value_sum = tl.zeros([KEYS, DIM_BLOCK], tl.float32)
    first = begin + tl.maximum(start - count, 0)  # own tokens are not seen before they are fed
    steps = tl.cdiv(end - first, QUERIES)
    query += b * query_b + head * GROUP * query_h
    upstream += b * up_b + head * GROUP * up_h
    for step in range(0, GROUP * steps):
        member = (step // steps).to(tl.int64)  # which query head of the group
        q = first + (step % steps) * QUERIES + tl.arange(0, QUERIES)
        query_tile = _rows_of(query + member * query_h, q, q < end, d, query_t, DIM)  # [M, D]
        up_tile = _rows_of(upstream + member * up_h, q, q < end, d, up_t, DIM)
        place = ((b * heads + head) * GROUP + member) * tokens + q
        norm = tl.load(lse + place, mask=q < end, other=0.0)
        mean = tl.load(delta + place, mask=q < end, other=0.0)
        product = tl.dot(key_tile, tl.trans(query_tile), input_precision="ieee")  # [N, M]
        logits, capped = _logits(product, scaling, SOFTCAP)
        seen = _visible(q[None, :], token[:, None], WINDOW) & (q < end)[None, :]
        weights = tl.where(seen, tl.exp2(logits - norm[None, :]), 0.0)
        value_sum += tl.dot(weights.to(up_tile.dtype), up_tile, input_precision="ieee")
        slope = weights * (tl.dot(value_tile, tl.trans(up_tile), input_precision="ieee") - mean[None, :])
        if SOFTCAP > 0:
            slope *= 1 - (capped / SOFTCAP) * (capped / SOFTCAP)
        key_sum += tl.dot(slope.to(query_tile.dtype), query_tile, input_precision="ieee")
    place = ((b * heads + head) * tokens + tl.where(n < last, token, 0))[:, None] * DIM + d[None, :]
    inside = (n < last)[:, None] & (d < DIM)[None, :]
    tl.atomic_add(d_key + place, key_sum * scaling, mask=inside, sem="relaxed")
    tl.atomic_add(d_value + place, value_sum, mask=inside, sem="relaxed")


def trace_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    replay: Replay,
    layer: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    dropout: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """As `segment_attention`, with the layout of the micro-batch. Without dropout."""
    assert dropout == 0
    layout = layout_of(replay, query.shape[-1], query.dtype)
    return segment_attention(query, key, value, layout, layer, scaling, sliding_window, softcap, sinks)


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: Layout,
    layer: int,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [B, H * G, T, D]; key, value [B, H, T, D] -> [B, T, H * G, D]; zeros on padding. Differentiable.

    sinks [H * G]: see twins.attend.
    """
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    return _SegmentAttention.apply(query, key, value, sinks, layout, layer, float(scaling), window or 0, softcap or 0.0)


# An operation of torch's, so that selective checkpointing (learn/selective.py) sees it and keeps its outputs.
@torch.library.custom_op(
    "sparse_rl::segment_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor kept, Tensor counts, Tensor tiles, "
    "int[] tile, float scaling, int window, float softcap) -> (Tensor, Tensor)",
)
def _attend(query, key, value, sinks, kept, counts, tiles, tile, scaling, window, softcap):
    """tile: the numbers of a `Tiles`. -> the output [B, T, H * G, D], and log-sum-exps to base 2 [B, H * G, T]"""
    out, lse = _empty_outputs(query)
    queries, keys, warps, stages = tile
    _forward[(tiles.shape[1], query.shape[1], query.shape[0])](
        query, key, value, query if sinks is None else sinks, out.zero_(), lse.zero_(), kept, counts, tiles, scaling,
        tiles.shape[1], kept.shape[-1], query.shape[2],
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
        *kept.stride()[:2], *counts.stride()[:2],
        **_meta(query, key, window, softcap), SINKS=sinks is not None, QUERIES=queries, KEYS=keys,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out, lse


@torch.library.register_fake("sparse_rl::segment_attention")
def _empty_outputs(query, *_):
    rows, query_heads, tokens, dim = query.shape
    lse = torch.empty(rows, query_heads, tokens, dtype=torch.float32, device=query.device)
    return torch.empty(rows, tokens, query_heads, dim, dtype=query.dtype, device=query.device), lse


def _meta(query: Tensor, key: Tensor, window: int, softcap: float) -> dict[str, Any]:
    """What kernels are compiled for, besides tiles."""
    dim = query.shape[-1]
    group = query.shape[1] // key.shape[1]
    return dict(GROUP=group, DIM=dim, DIM_BLOCK=_padded(dim), WINDOW=window, SOFTCAP=softcap)


class _SegmentAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, layout, layer, scaling, window, softcap):
        kept, counts = layout.lists(layer, key.shape[1])
        tile = astuple(layout.tiles[0])
        out, lse = _attend(query, key, value, sinks, kept, counts, layout.forward, tile, scaling, window, softcap)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.layout, ctx.layer, ctx.scaling, ctx.meta = layout, layer, scaling, _meta(query, key, window, softcap)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, sinks, out, lse = ctx.saved_tensors
        layout, scaling, meta = ctx.layout, ctx.scaling, ctx.meta
        kept, counts = layout.lists(ctx.layer, key.shape[1])
        rows, query_heads, tokens, _ = query.shape
        upstream = upstream if upstream.stride(-1) == 1 else upstream.contiguous()
        d_query, delta = torch.zeros_like(query), torch.zeros_like(lse)
        strides = *query.stride()[:3], *key.stride()[:3], *value.stride()[:3]
        tile, table = layout.tiles[1], layout.d_queries
        _backward_queries[(table.shape[1], query_heads, rows)](
            query, key, value, out, upstream, lse, delta, d_query, kept, counts, table, scaling,
            table.shape[1], kept.shape[-1], tokens,
            *strides, *out.stride()[:3], *upstream.stride()[:3], *d_query.stride()[:3],
            *kept.stride()[:2], *counts.stride()[:2],
            **meta, QUERIES=tile.queries, KEYS=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        d_key, d_value = (torch.zeros(key.shape, dtype=torch.float32, device=key.device) for _ in range(2))
        tile, table = layout.tiles[2], layout.d_keys
        _backward_keys[(table.shape[1], key.shape[1], rows)](
            query, key, value, upstream, lse, delta, d_key, d_value, kept, counts, table, scaling,
            table.shape[1], kept.shape[-1], tokens,
            *strides, *upstream.stride()[:3], *kept.stride()[:2], *counts.stride()[:2],
            **meta, QUERIES=tile.queries, KEYS=tile.keys, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        d_sinks = None
        if sinks is not None and ctx.needs_input_grad[3]:  # its share of the softmax, times what it takes from the rest
            share = torch.exp2(sinks.float()[:, None] * _LOG2E.value - lse)  # [B, H * G, T]
            d_sinks = -(share * delta).sum((0, 2)).to(sinks.dtype)
        return d_query, d_key.to(key.dtype), d_value.to(value.dtype), d_sinks, None, None, None, None, None


def _padded(size: int) -> int:
    """A power of two that tl.dot takes."""
    return max(16, triton.next_power_of_2(size))
