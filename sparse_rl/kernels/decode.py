"""Triton kernels of the decode step: norm, rotate and store, attend over slots, gate. Shapes: see twins.py.

They round where the Hugging Face modules round, so in bf16 the sampler differs from the learner only by the order of
sums. A kernel reads everything about a row (how many slots it uses, whether it runs) from device memory; nothing here
depends on the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache import LayerSlots
from ..cache.formats import KINDS
from . import device
from .jit import jit, product

_CODES = {None: 0, "fp8": 1, "int8": 2}


@jit
def _add_rms_norm(new, residual, weight, out, size, all_of_it, eps, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < size
    x = tl.load(residual + row * size + i, mask=inside, other=0.0)
    if PARTS > 0:
        added = tl.load(new + row * size + i, mask=inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):  # pyright: ignore[reportGeneralTypeIssues]
            added += tl.load(new + part * all_of_it + row * size + i, mask=inside, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + added.to(x.dtype).to(tl.float32)).to(x.dtype)
        tl.store(residual + row * size + i, x, mask=inside)
    wide = x.to(tl.float32)
    normed = (wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)).to(x.dtype)
    w = tl.load(weight + i, mask=inside, other=0.0)
    tl.store(out + row * size + i, (w.to(tl.float32) * normed.to(tl.float32)).to(x.dtype), mask=inside)


def add_rms_norm(new: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, size = residual.shape
    out = torch.empty_like(residual)
    block, parts = triton.next_power_of_2(size), 0 if new is None else new.shape[0] if new.dim() == 3 else 1
    _add_rms_norm[(rows,)](
        residual if new is None else new, residual, weight, out, size, rows * size, eps, PARTS=parts, BLOCK=block,
        num_warps=4 if block <= 2048 else 8,
    )  # fmt: skip
    return out


@jit
def _silu_mul(gate_up, out, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    gate = tl.load(gate_up + row * 2 * size + i, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * size + size + i, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    gated = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(out + row * size + i, (gated.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, size)
    _silu_mul[(rows, triton.cdiv(size, 1024))](gate_up, out, size, BLOCK=1024, num_warps=4)
    return out


@jit
def _partner(d, DIM: tl.constexpr):
    """The dimension with which each dimension is rotated."""
    return tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)


@jit
def _norm_and_rotate(x, there, d, weight, cos, sin, eps, DIM: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr):
    """Queries or keys of some heads. x, there [N, D]: values, and those of each dimension's partner; cos, sin [D]"""
    result = x
    if NORM:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        w = tl.load(weight + d, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        result = (w * (wide * scale).to(x.dtype).to(tl.float32)).to(x.dtype)
    if ROPE:
        if NORM:
            w = tl.load(weight + _partner(d, DIM), mask=d < DIM, other=0.0).to(tl.float32)[None, :]
            there = there.to(tl.float32) * scale  # pyright: ignore[reportPossiblyUnboundVariable]
            there = (w * there.to(x.dtype).to(tl.float32)).to(x.dtype)
        turned = tl.where((d < DIM // 2)[None, :], -there.to(tl.float32), there.to(tl.float32))
        a = product(result.to(tl.float32), cos.to(tl.float32)[None, :]).to(x.dtype)
        b = product(turned, sin.to(tl.float32)[None, :]).to(x.dtype)
        result = (a.to(tl.float32) + b.to(tl.float32)).to(x.dtype)
    return result


@jit
def _power(exponent):
    """2^exponent in fp32; NaN for -128, which stands for a vector that is not finite."""
    bits = tl.where(exponent == -128, 2143289344, (exponent.to(tl.int32) + 127) << 23)
    return bits.to(tl.float32, bitcast=True)


@jit
def _read(codes, CODES: tl.constexpr, TYPE: tl.constexpr):
    """Codes as numbers: 1: e4m3, 2: int8."""
    if CODES == 1:
        return codes.to(tl.float8e4nv, bitcast=True).to(TYPE)
    return codes.to(TYPE)


@jit
def _write(x, CODES: tl.constexpr):
    """The codes of a vector [1, D], int32, its exponent [1], and the vector that they stand for (cache/formats.py).

    Numbers are rounded with integers, so that every GPU and the interpreter round the same way.
    """
    wide = x.to(tl.float32)
    largest: tl.tensor = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # [1] # pyright: ignore
    if CODES == 1:
        exponent = (largest >> 23) - 135 + ((largest & 0x7FFFFF) > 0x600000).to(tl.int32)
    else:
        exponent = (largest >> 23) - 133 + ((largest & 0x7FFFFF) > 0x7E0000).to(tl.int32)
    exponent = tl.maximum(exponent, -100)
    scaled = wide * _power(-exponent)[:, None]
    if CODES == 1:
        bits = scaled.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960  # ties to even; 120 less in the exponent
        size = magnitude.to(tl.float32, bitcast=True)
        small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xF  # steps of 2^-9, ties to even
        code = tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)  # normal from 2^-6 on
        # what the code stands for: rounded magnitudes have 3 bits of mantissa
        kept = ((normal + 960) << 20).to(tl.float32, bitcast=True)
        number = tl.where(magnitude < 0x3C800000, small.to(tl.float32) * 0.001953125, kept)
        number = tl.where(bits < 0, -number, number)
    else:
        number = (scaled + 12582912.0) - 12582912.0  # to a whole number, ties to even
        code = number.to(tl.int32)
    exponent = tl.where(largest < 0x7F800000, exponent, -128)
    return code, exponent, (number * _power(exponent)[:, None]).to(x.dtype)


@jit
def _store_and_attend(
    query, key, value, keys, values, exponents, feed, ring, used, index, live, cos, sin, query_weight, key_weight,
    sinks, out, partial, query_row, query_head, key_row, key_head, value_row, value_head, eps, scale, softcap, window,
    CAPACITY,
    HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, RING: tl.constexpr,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, SOFTCAP: tl.constexpr, SLIDES: tl.constexpr, SINKS: tl.constexpr,
    PRECISION: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """The query heads of one KV head over one part of a row's slots. Softmax to base 2, with a running maximum.

    One part also sees the new token, from registers, and stores it. CODES: 0, or the kind of codes of keys and values;
    then logits and probabilities are multiplied by their scales, which is exact, because these are powers of two. e4m3
    becomes fp16 in one instruction and bf16 in three, so queries in bf16 are scaled and become fp16 as well, without
    loss.
    """
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    g, d = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    runs = tl.load(live + row).to(tl.int32)
    fed, taken = tl.load(index + row), tl.load(used + row)
    heads = head * GROUP + g  # query heads
    real = (g < GROUP)[:, None] & (d < DIM)[None, :]
    place = query + row * query_row + heads[:, None] * query_head
    other = _partner(d, DIM)
    here = (d < DIM)[None, :]
    # [1, D]; loaded while the slots are read
    new_key = tl.load(key + row * key_row + head * key_head + d[None, :], mask=here, other=0.0)
    new_value = tl.load(value + row * value_row + head * value_head + d, mask=d < DIM, other=0.0)
    q = tl.load(place + d[None, :], mask=real, other=0.0)
    if ROPE:
        c = tl.load(cos + row * DIM + d, mask=d < DIM, other=0.0)
        s = tl.load(sin + row * DIM + d, mask=d < DIM, other=0.0)
        key_there = tl.load(key + row * key_row + head * key_head + other[None, :], mask=here, other=0.0)
        q = _norm_and_rotate(
            q, tl.load(place + other[None, :], mask=real, other=0.0), d, query_weight, c, s, eps, DIM, NORM, ROPE
        )  # [G, D]
    else:
        c, s, key_there = new_value, new_value, new_key  # not read
        q = _norm_and_rotate(q, q, d, query_weight, c, s, eps, DIM, NORM, ROPE)
    DOT: tl.constexpr = tl.float16 if CODES == 1 and q.dtype == tl.bfloat16 else q.dtype  # pyright: ignore
    asked, row_scale = q, scale
    if CODES > 0:
        largest: tl.tensor = tl.max(tl.abs(q.to(tl.float32)), 1)  # [G] # pyright: ignore
        size = tl.maximum((largest.to(tl.int32, bitcast=True) >> 23) - 127, -100)
        if q.dtype != DOT:
            asked = (q.to(tl.float32) * _power(-size)[:, None]).to(DOT)
            row_scale = scale * _power(size)[:, None]
    first = (row * HEADS + head) * CAPACITY  # slot 0 of this row and head
    top = tl.full([GROUP_BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([GROUP_BLOCK], tl.float32)
    acc = tl.zeros([GROUP_BLOCK, DIM_BLOCK], tl.float32)
    length = taken.to(tl.int32) * runs
    part = tl.cdiv(tl.cdiv(length, SPLITS), BLOCK) * BLOCK
    start, stop = split * part, tl.minimum((split + 1) * part, length)
    for begin in range(start, stop, BLOCK):
        slot = begin + tl.arange(0, BLOCK)
        tile = (first + slot)[:, None] * DIM + d[None, :]
        inside = (slot < stop)[:, None] & (d < DIM)[None, :]
        k = tl.load(keys + tile, mask=inside, other=0.0)  # [S, D]
        v = tl.load(values + tile, mask=inside, other=0.0)
        if CODES > 0:
            both = exponents + (first + slot) * 2
            key_scale = _power(tl.load(both, mask=slot < stop, other=0))  # [S]
            exponent = tl.load(both + 1, mask=slot < stop, other=-100).to(tl.int32)
            most = tl.max(exponent, 0)  # so that no scaled probability exceeds 1, nor vanishes beside others
            least = tl.where(exponent == -128, -128, tl.maximum(exponent - most, -126))
            k, v = _read(k, CODES, DOT), _read(v, CODES, DOT)
        logits = tl.dot(asked, tl.trans(k), input_precision=PRECISION) * row_scale  # [G, S]
        if CODES > 0:
            logits = logits * key_scale[None, :]  # pyright: ignore[reportPossiblyUnboundVariable]
        if SOFTCAP:
            logits = (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0) * softcap
        logits = logits * 1.4426950408889634
        visible = slot < stop
        if SLIDES:
            visible = visible & (fed - tl.load(feed + first + slot, mask=visible, other=0) < window)
        logits = tl.where(visible[None, :], logits, -float("inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        safe = tl.where(higher == -float("inf"), 0.0, higher)  # nothing visible yet
        shrink = tl.exp2(top - safe)
        probs = tl.exp2(logits - safe[:, None])
        total = total * shrink + tl.sum(probs, 1)
        if CODES > 0:
            probs = probs * _power(least)[None, :]  # pyright: ignore[reportPossiblyUnboundVariable]
            read = tl.dot(probs.to(v.dtype), v, input_precision=PRECISION) * _power(most)  # pyright: ignore
        else:
            read = tl.dot(probs.to(v.dtype), v, input_precision=PRECISION)
        acc = acc * shrink[:, None] + read
        top = higher
    if split == 0:  # last, so that the loads of the slots begin as early as possible
        new_key = _norm_and_rotate(new_key, key_there, d, key_weight, c, s, eps, DIM, NORM, ROPE)
        if CODES > 0:
            key_code, key_exponent, new_key = _write(new_key, CODES)
            value_code, value_exponent, read = _write(new_value[None, :], CODES)
            new_value = tl.reshape(read, [DIM_BLOCK])
        else:
            key_code, value_code, key_exponent, value_exponent = new_key, new_value[None, :], 0, 0
        new_logits = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), 1) * scale
        if SOFTCAP:
            new_logits = (2.0 * tl.sigmoid(2.0 * new_logits / softcap) - 1.0) * softcap
        new_logits = new_logits * 1.4426950408889634
        new_top = tl.maximum(top, new_logits)
        old_share, new_prob = tl.exp2(top - new_top), tl.exp2(new_logits - new_top)
        total = total * old_share + new_prob
        acc = acc * old_share[:, None] + new_prob[:, None] * new_value.to(tl.float32)[None, :]
        top = new_top
        if SINKS:  # as one more token, whose value is zero
            sink = tl.load(sinks + heads, mask=g < GROUP, other=0.0).to(tl.float32) * 1.4426950408889634
            new_top = tl.maximum(top, sink)
            old_share = tl.exp2(top - new_top)
            total = total * old_share + tl.exp2(sink - new_top)
            acc = acc * old_share[:, None]
            top = new_top
        if runs > 0:
            there = (first + taken) * DIM
            tl.store(keys + there + d[None, :], key_code.to(keys.dtype.element_ty), mask=here)
            tl.store(values + there + d[None, :], value_code.to(values.dtype.element_ty), mask=here)
            if CODES > 0:
                both = exponents + (first + taken) * 2 + tl.arange(0, 1)
                tl.store(both, key_exponent.to(tl.int8))  # pyright: ignore[reportAttributeAccessIssue]
                tl.store(both + 1, value_exponent.to(tl.int8))  # pyright: ignore[reportAttributeAccessIssue]
            tl.store(feed + first + taken, fed.to(tl.int32))
            if RING > 0:
                recent = (row * HEADS * GROUP + heads[:, None]) * RING + fed % RING
                tl.store(ring + recent * DIM + d[None, :], q, mask=real)
    mine = row * HEADS * GROUP + heads
    if SPLITS == 1:
        tl.store(out + mine[:, None] * DIM + d[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
    else:
        at = (mine * SPLITS + split) * (DIM + 2)  # [D] unnormalised, then maximum and total
        tl.store(partial + at[:, None] + d[None, :], acc, mask=real)
        tl.store(partial + at + DIM, top, mask=g < GROUP)
        tl.store(partial + at + DIM + 1, total, mask=g < GROUP)


@jit
def _combine(partial, out, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    i, d = tl.arange(0, SPLIT_BLOCK), tl.arange(0, DIM_BLOCK)
    place = (head * SPLITS + i) * (DIM + 2)
    there = i < SPLITS
    top = tl.load(partial + place + DIM, mask=there, other=-float("inf"))
    total = tl.load(partial + place + DIM + 1, mask=there, other=0.0)
    share = tl.exp2(top - tl.max(top, 0))
    acc = tl.load(partial + place[:, None] + d[None, :], mask=there[:, None] & (d < DIM)[None, :], other=0.0)
    result = tl.sum(acc * share[:, None], 0) / tl.sum(total * share, 0)  # pyright: ignore[reportOperatorIssue]
    tl.store(out + head * DIM + d, result.to(out.dtype.element_ty), mask=d < DIM)


def splits_for(programs: int, capacity: int, processors: int) -> int:
    """Into how many parts of at least 128 slots to cut a row, so that few rows still fill the chip."""
    return max(1, min(triton.cdiv(2 * processors, programs), capacity // 128, 32))


def stages_for(block: int, queries: int, width: int, shared: int) -> int:
    """How many tiles of keys and values to read ahead, so that they fit into shared memory beside the queries.

    width: bytes of a key; measurements showed that wide ones should not be read ahead
    """
    if width > 1024:
        return 1
    return next((n for n in (3, 2) if (2 * (n - 1) * block + queries) * width + 4096 <= shared), 1)


def store_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: LayerSlots,
    used: Tensor,
    index: Tensor,
    live: Tensor,
    scaling: float,
    rope: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    splits: int | None = None,
    block: int = 32,
    num_warps: int = 2,
    num_stages: int | None = None,
) -> Tensor:
    keys, values, feed, ring, exponents = slots
    (rows, query_heads, dim), (heads, capacity) = query.shape, keys.shape[1:3]
    assert all(x.stride(-1) == 1 for x in (query, key, value)) and values.shape == keys.shape
    assert all(x.is_contiguous() for x in (keys, values, feed, ring, exponents) if x is not None)
    kind = None if exponents is None else KINDS[keys.dtype]
    splits = splits or splits_for(rows * heads, capacity, device.processors(query.device))
    out = torch.empty(rows, query_heads * dim, dtype=query.dtype, device=query.device)
    partial = out  # an address that is not read
    if splits > 1:
        partial = torch.empty(rows * query_heads * splits * (dim + 2), dtype=torch.float32, device=query.device)
    cos, sin = (query, query) if rope is None else rope  # likewise
    query_weight, key_weight, eps = (query, query, 0.0) if norms is None else norms
    group, dim_block = query_heads // heads, max(16, triton.next_power_of_2(dim))
    group_block = max(16, triton.next_power_of_2(group))
    shared = device.shared_memory(query.device)
    num_stages = num_stages or stages_for(block, group_block, dim_block * query.element_size(), shared)
    _store_and_attend[(rows, heads, splits)](
        query, key, value, keys, values, out if exponents is None else exponents, feed, out if ring is None else ring,
        used, index, live.view(torch.int8),
        cos, sin, query_weight, key_weight, query if sinks is None else sinks, out, partial,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        eps, scaling, softcap or 1.0, sliding_window or 0, capacity,
        HEADS=heads, GROUP=group, GROUP_BLOCK=group_block,
        RING=0 if ring is None else ring.shape[2], DIM=dim, DIM_BLOCK=dim_block, SPLITS=splits, BLOCK=block,
        NORM=norms is not None, ROPE=rope is not None, SOFTCAP=softcap is not None, SLIDES=sliding_window is not None,
        SINKS=sinks is not None, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        CODES=_CODES[kind],
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    if splits > 1:
        split_block = triton.next_power_of_2(splits)
        _combine[(rows * query_heads,)](
            partial, out, SPLITS=splits, SPLIT_BLOCK=split_block, DIM=dim, DIM_BLOCK=dim_block, num_warps=1
        )
    return out
