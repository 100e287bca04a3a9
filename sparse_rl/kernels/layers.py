"""Triton kernels of known layers, forward and backward: norm with residual, gate, rotation (see twins_learner.py).

Results are rounded where the Hugging Face modules round, so in bf16 they differ only by the order of sums. Gradients
are computed in fp32 and rounded once. Backward passes read inputs, never results, and overwrite nothing, so backward
can run twice.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import device
from .jit import jit, product

# ---------------------------------------------------------------------------------------------------- add, then norm


@jit(do_not_specialize=["rows"])  # it varies between micro-batches
def _add_norm_forward(
    new, residual, weight, total, normed, rows, size, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of whole rows. [rows, size]"""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    i = tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (i < size)[None, :]
    place = r[:, None] * size + i[None, :]
    x = tl.load(residual + place, mask=inside, other=0.0)
    if ADD:
        added = tl.load(new + place, mask=inside, other=0.0)
        x = (x.to(tl.float32) + added.to(tl.float32)).to(x.dtype)
        tl.store(total + place, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / size + eps)
    unit = (wide * scale[:, None]).to(x.dtype)
    w = tl.load(weight + i, mask=i < size, other=0.0)
    tl.store(normed + place, (w.to(tl.float32)[None, :] * unit.to(tl.float32)).to(x.dtype), mask=inside)


@jit(do_not_specialize=["rows", "share"])
def _add_norm_backward(
    total, weight, from_total, from_normed, to_x, to_weight, rows, share, size, eps,
    ADD: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`share` rows, tile by tile; the gradient of the weight is summed over them. to_weight: fp32 [programs, size]"""
    program = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    w = tl.load(weight + i, mask=i < size, other=0.0).to(tl.float32)[None, :]
    weight_sum = tl.zeros([BLOCK], tl.float32)
    stop = tl.minimum((program + 1) * share, rows)
    for begin in range(program * share, stop, ROWS):
        r = begin + tl.arange(0, ROWS)
        inside = (r < stop)[:, None] & (i < size)[None, :]
        place = r[:, None] * size + i[None, :]
        x = tl.load(total + place, mask=inside, other=0.0)
        up = tl.load(from_normed + place, mask=inside, other=0.0).to(tl.float32)
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / size + eps)[:, None]
        unit = wide * scale
        if WEIGHT:
            weight_sum += tl.sum(up * unit.to(x.dtype).to(tl.float32), 0)
        slope = up * w
        gradient = scale * (slope - unit * (tl.sum(slope * unit, 1) / size)[:, None])
        if ADD:
            gradient += tl.load(from_total + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(to_x + place, gradient.to(x.dtype), mask=inside)
    if WEIGHT:
        tl.store(to_weight + program * size + i, weight_sum, mask=i < size)


def _norm_tile(size: int) -> dict[str, int]:
    """Rows in a tile, its padded width, and its warps; narrow rows (the heads of a query) go together."""
    block = triton.next_power_of_2(size)
    rows = max(1, min(16, 2048 // block))
    return dict(ROWS=rows, BLOCK=block, num_warps=4 if block <= 2048 else 8 if block <= 8192 else 16)


def _add_and_norm(new: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size = residual.shape[-1]
    rows, tile = residual.numel() // size, _norm_tile(size)
    normed = torch.empty_like(residual)
    total = residual if new is None else torch.empty_like(residual)
    if rows:
        _add_norm_forward[(triton.cdiv(rows, tile["ROWS"]),)](
            residual if new is None else new, residual, weight, total, normed, rows, size, eps,
            ADD=new is not None, **tile,
        )  # fmt: skip
    return total, normed


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, new: Tensor | None, residual: Tensor, weight: Tensor, eps: float):
        total, normed = _add_and_norm(new, residual, weight, eps)
        ctx.save_for_backward(total, weight)
        ctx.eps, ctx.adds = eps, new is not None
        ctx.set_materialize_grads(False)
        return total, normed

    @staticmethod
    @once_differentiable
    def backward(ctx, from_total: Tensor | None, from_normed: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        total, weight = ctx.saved_tensors
        if from_normed is None:
            return from_total if ctx.adds else None, from_total, None, None
        from_normed = from_normed.contiguous()
        from_total = None if from_total is None else from_total.contiguous()
        size = total.shape[-1]
        rows, tile = total.numel() // size, _norm_tile(size)
        programs = max(1, min(4 * device.processors(total.device), triton.cdiv(rows, tile["ROWS"])))
        share = triton.cdiv(triton.cdiv(rows, programs), tile["ROWS"]) * tile["ROWS"]
        to_x, wants_weight = torch.empty_like(total), ctx.needs_input_grad[2]
        to_weight = torch.empty(programs if wants_weight else 1, size, dtype=torch.float32, device=total.device)
        _add_norm_backward[(programs,)](
            total, weight, from_normed if from_total is None else from_total, from_normed, to_x, to_weight,
            rows, share, size, ctx.eps, ADD=from_total is not None, WEIGHT=wants_weight, **tile,
        )  # fmt: skip
        return to_x if ctx.adds else None, to_x, to_weight.sum(0).to(weight.dtype) if wants_weight else None, None


def add_and_norm(new: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    compute = _AddNorm.apply if torch.is_grad_enabled() else _add_and_norm
    return compute(None if new is None else new.contiguous(), residual.contiguous(), weight, eps)


# --------------------------------------------------------------------------------------------------------------- gate

_GATE = dict(BLOCK=2048, num_warps=8)


@jit
def _gate_forward(gate, up, out, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + i, mask=i < count, other=0.0)
    u = tl.load(up + i, mask=i < count, other=0.0)
    wide = g.to(tl.float32)
    opened = (wide / (1.0 + tl.exp(-wide))).to(g.dtype)
    tl.store(out + i, (opened.to(tl.float32) * u.to(tl.float32)).to(g.dtype), mask=i < count)


@jit
def _gate_backward(gate, up, upstream, to_gate, to_up, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + i, mask=i < count, other=0.0)
    u = tl.load(up + i, mask=i < count, other=0.0).to(tl.float32)
    d = tl.load(upstream + i, mask=i < count, other=0.0).to(tl.float32)
    wide = g.to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-wide))
    opened = (wide * share).to(g.dtype).to(tl.float32)
    tl.store(to_up + i, (d * opened).to(g.dtype), mask=i < count)
    tl.store(to_gate + i, (d * u * share * (1.0 + wide * (1.0 - share))).to(g.dtype), mask=i < count)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    out, count = torch.empty_like(gate), gate.numel()
    if count:
        _gate_forward[(triton.cdiv(count, _GATE["BLOCK"]),)](gate, up, out, count, **_GATE)
    return out


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        to_gate, to_up, count = torch.empty_like(gate), torch.empty_like(up), gate.numel()
        if count:
            grid = (triton.cdiv(count, _GATE["BLOCK"]),)
            _gate_backward[grid](gate, up, upstream.contiguous(), to_gate, to_up, count, **_GATE)
        return to_gate, to_up


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    compute = _Gate.apply if torch.is_grad_enabled() else _gated
    return compute(gate.contiguous(), up.contiguous())


# ----------------------------------------------------------------------------------------------------------- rotation


@jit
def _turned(x, y, cos_x, cos_y, sin_x, sin_y, BACKWARD: tl.constexpr):
    """The two halves of some heads, rotated, or their gradients."""
    wide_x, wide_y = x.to(tl.float32), y.to(tl.float32)
    if BACKWARD:  # in fp32, rounded when it is stored
        first, second = wide_x * cos_x + wide_y * sin_y, wide_y * cos_y - wide_x * sin_x
    else:
        first = product(wide_x, cos_x).to(x.dtype).to(tl.float32) + product(-wide_y, sin_x).to(x.dtype).to(tl.float32)
        second = product(wide_y, cos_y).to(x.dtype).to(tl.float32) + product(wide_x, sin_y).to(x.dtype).to(tl.float32)
    return first, second


@jit
def _rotate_heads(
    x, out, t, b, tokens, x_b, x_h, x_t, cos_x, cos_y, sin_x, sin_y,
    HEADS: tl.constexpr, HEAD_BLOCK: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
    BACKWARD: tl.constexpr,
):  # fmt: skip
    """One token's heads. x [B, H, T, D], any strides; out [B, T, H, D]"""
    h, d = tl.arange(0, HEAD_BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    inside = (h < HEADS) & (d < HALF)
    source = x + b * x_b + t * x_t + h * x_h + d
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    first, second = _turned(first, second, cos_x, cos_y, sin_x, sin_y, BACKWARD)
    place = out + ((b * tokens + t) * HEADS + h) * 2 * HALF + d
    tl.store(place, first.to(out.dtype.element_ty), mask=inside)
    tl.store(place + HALF, second.to(out.dtype.element_ty), mask=inside)


@jit(do_not_specialize=["tokens"])
def _rotate(
    query, key, query_out, key_out, cos, sin, tokens, query_b, query_h, query_t, key_b, key_h, key_t, angle_b,
    QUERIES: tl.constexpr, QUERY_BLOCK: tl.constexpr, KEYS: tl.constexpr, KEY_BLOCK: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    """All heads of one token: pairs of dimension d and d + HALF."""
    t, b = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, HALF_BLOCK)[None, :]
    angle = b * angle_b + t * 2 * HALF + d
    cos_x = tl.load(cos + angle, mask=d < HALF, other=0.0).to(tl.float32)
    cos_y = tl.load(cos + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)
    sin_x = tl.load(sin + angle, mask=d < HALF, other=0.0).to(tl.float32)
    sin_y = tl.load(sin + angle + HALF, mask=d < HALF, other=0.0).to(tl.float32)
    _rotate_heads(
        query, query_out, t, b, tokens, query_b, query_h, query_t, cos_x, cos_y, sin_x, sin_y,
        QUERIES, QUERY_BLOCK, HALF, HALF_BLOCK, BACKWARD,
    )  # fmt: skip
    _rotate_heads(
        key, key_out, t, b, tokens, key_b, key_h, key_t, cos_x, cos_y, sin_x, sin_y,
        KEYS, KEY_BLOCK, HALF, HALF_BLOCK, BACKWARD,
    )  # fmt: skip


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, backward: bool) -> tuple[Tensor, Tensor]:
    """query, key [B, H, T, D] -> the same shapes; heads lie inside tokens in memory"""
    query, key = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key))
    (batch, queries, tokens, dim), keys = query.shape, key.shape[1]
    outs = [torch.empty(batch, tokens, n, dim, dtype=query.dtype, device=query.device) for n in (queries, keys)]
    if batch * tokens:
        _rotate[(tokens, batch)](
            query, key, *outs, cos, sin, tokens, *query.stride()[:3], *key.stride()[:3],
            cos.stride(0) if len(cos) > 1 else 0, QUERIES=queries, QUERY_BLOCK=triton.next_power_of_2(queries),
            KEYS=keys, KEY_BLOCK=triton.next_power_of_2(keys), HALF=dim // 2,
            HALF_BLOCK=triton.next_power_of_2(dim // 2), BACKWARD=backward, num_warps=4 if queries * dim > 1024 else 2,
        )  # fmt: skip
    return outs[0].transpose(1, 2), outs[1].transpose(1, 2)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(query, key, cos, sin, False)

    @staticmethod
    @once_differentiable
    def backward(ctx, from_query: Tensor, from_key: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        return *_rotated(from_query, from_key, cos, sin, True), None, None


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.contiguous(), sin.contiguous()
    return _Rotation.apply(query, key, cos, sin) if torch.is_grad_enabled() else _rotated(query, key, cos, sin, False)
