"""A Triton kernel for a mixture of experts: multiplies each token with the weights of its experts (see twins.py).

The pairs (token, expert) of an expert lie side by side in `order`, and its tiles behind those of the expert before it.
Only the device knows how many tiles each expert has. To avoid a sync with the host, as many programs start as there
can be tiles; each finds out which expert's tile is its own, and those beyond the last tile end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .jit import jit


@jit(do_not_specialize=["pairs_per_row"])
def _expert_product(
    x, weight, bias, out, order, starts, size_in, size_out, pairs_per_row, x_r, weight_e, weight_i, weight_o,
    EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr, BIAS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of some pairs of one expert and some columns of its result. out [S, size_out]"""
    tile = tl.program_id(0)
    e = tl.arange(0, EXPERT_BLOCK)
    first = tl.load(starts + e, mask=e < EXPERTS, other=0)
    last = tl.load(starts + e + 1, mask=e < EXPERTS, other=0)
    ends = tl.cumsum((last - first + ROWS - 1) // ROWS, 0)  # of each expert's tiles
    expert = tl.sum((ends <= tile).to(tl.int32), 0)
    if expert < EXPERTS:
        before = tl.max(tl.where(e < expert, ends, 0), 0)
        begin, stop = tl.load(starts + expert), tl.load(starts + expert + 1)
        r = begin + (tile - before) * ROWS + tl.arange(0, ROWS)
        pair = tl.load(order + r, mask=r < stop, other=0).to(tl.int64)
        i = tl.arange(0, INNER)
        o = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        own = weight + expert.to(tl.int64) * weight_e
        result = tl.zeros([ROWS, COLUMNS], tl.float32)
        for at in range(0, size_in, INNER):
            rows = tl.load(
                x + (pair // pairs_per_row)[:, None] * x_r + (at + i)[None, :],
                mask=(r < stop)[:, None] & (at + i < size_in)[None, :],
                other=0.0,
            )
            part = tl.load(
                own + (at + i)[:, None] * weight_i + o[None, :] * weight_o,
                mask=(at + i < size_in)[:, None] & (o < size_out)[None, :],
                other=0.0,
            )
            result += tl.dot(rows, part, input_precision="ieee")
        rounded = result.to(out.dtype.element_ty)
        if BIAS:
            added = tl.load(bias + expert.to(tl.int64) * size_out + o, mask=o < size_out, other=0.0)
            rounded = (rounded.to(tl.float32) + added.to(tl.float32)[None, :]).to(out.dtype.element_ty)
        tl.store(
            out + pair[:, None] * size_out + o[None, :], rounded, mask=(r < stop)[:, None] & (o < size_out)[None, :]
        )


def expert_product(x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    pairs, (experts, size_in, size_out) = len(order), weight.shape
    out = torch.zeros(pairs, size_out, dtype=x.dtype, device=x.device)
    if pairs == 0:
        return out
    tile = _tile(pairs, experts, x.dtype)
    tiles = min(pairs, (pairs + (tile["ROWS"] - 1) * min(experts, pairs)) // tile["ROWS"])
    _expert_product[(tiles, triton.cdiv(size_out, tile["COLUMNS"]))](
        x, weight, None if bias is None else bias.contiguous(), out, order, starts, size_in, size_out,
        pairs // len(x), x.stride(0), *weight.stride(), EXPERTS=experts,
        EXPERT_BLOCK=triton.next_power_of_2(experts), BIAS=bias is not None, **tile,
    )  # fmt: skip
    return out


def _tile(pairs: int, experts: int, dtype: torch.dtype) -> dict[str, int]:
    """The size of a tile: about as many rows as an expert has pairs, and at least the 16 that tl.dot needs."""
    rows = max(16, min(64, triton.next_power_of_2(triton.cdiv(pairs, experts))))
    return dict(ROWS=rows, COLUMNS=64, INNER=32 if dtype == torch.float32 else 64, num_warps=4, num_stages=3)
