"""Triton kernels of an eviction: redundancy of keys, logits of the last queries, and compaction in place.

redundancy: the S x S similarities are linear except for each slot's newest copy. To find it, a kernel streams over key
tiles in tensor cores and keeps one number per slot. The column sums follow from the sum U of all unit keys,
u_s . (U - u_s), less the exempted cosines. observed_logits: every key tile is read once for all query heads of its
group. compact: a program owns all slots of one layer, row and head, and moves them in ascending blocks; since a slot
only moves down, no block overwrites what a later one reads.

Nothing here depends on values that the host would have to read. There are no atomics, so the same input gives the same
bits. Shapes: B rows, H KV heads, G query heads per KV head, S slots in use, D head dim, W queries; L layers, R rows
and C slots of the cache, N rows that are compacted, K slots kept, T tokens of the trace.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import device
from .jit import jit

_BLOCK = 64  # slots at a time, unless a kernel has its own number
# Two programs run on a processor: one loads while the other multiplies.
_TENSOR_CORES = dict(BLOCK=128, OTHERS=64, num_warps=8, maxnreg=128)
_PLAIN = dict(BLOCK=32, OTHERS=32, num_warps=4)  # fp32: the operands of a dot live in registers


@jit
def _tile(x, row, valid, d, DIM: tl.constexpr):
    """Rows of a matrix [.., DIM], zero where not valid. row, valid [N]; d [D_BLOCK] -> [N, D_BLOCK]"""
    return tl.load(x + row[:, None] * DIM + d[None, :], mask=valid[:, None] & (d < DIM)[None, :], other=0.0)


@jit
def _sum_units(keys, inverse, units, used, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """Inverse norms of one row and head's keys, and the sum of its unit keys."""
    head = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, DIM_BLOCK)
    total = tl.zeros([BLOCK, DIM_BLOCK], tl.float32)
    for start in range(0, used, BLOCK):
        s = start + tl.arange(0, BLOCK)
        key = _tile(keys + head * used * DIM, s, s < used, d, DIM).to(tl.float32)  # [S, D]
        scale = 1.0 / tl.maximum(tl.sqrt(tl.sum(key * key, 1)), 1e-12)
        tl.store(inverse + head * used + s, scale, mask=s < used)
        total += key * scale[:, None]
    tl.store(units + head * DIM + d, tl.sum(total, 0), mask=d < DIM)


@jit
def _newest_copy(
    keys, inverse, newest, cosine, used, threshold,
    DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
):  # fmt: skip
    """For a block of slots i the newest j with cos(i, j) > threshold, or -1; and the cosine. cos(i, i) counts as 0."""
    blocks = tl.cdiv(used, BLOCK)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    keys += head * used * DIM
    inverse += head * used
    d = tl.arange(0, DIM_BLOCK)
    i = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    key = _tile(keys, i, i < used, d, DIM)  # [I, D]
    scale = tl.load(inverse + i, mask=i < used, other=0.0)
    found = tl.where(i < used, -1, 0)
    missing = tl.min(found, 0)
    start = (tl.cdiv(used, OTHERS) - 1) * OTHERS
    # from the newest on, until every i has its copy
    while (start >= 0) & (missing < 0):  # pyright: ignore[reportOperatorIssue]
        j = start + tl.arange(0, OTHERS)
        other = _tile(keys, j, j < used, d, DIM)  # [J, D]
        similar = tl.dot(key, tl.trans(other), input_precision="ieee")  # [I, J]
        similar = similar * scale[:, None] * tl.load(inverse + j, mask=j < used, other=0.0)[None, :]
        similar = tl.where(i[:, None] == j[None, :], 0.0, similar)
        copies = (similar > threshold) & (j < used)[None, :]
        found = tl.where(found < 0, tl.max(tl.where(copies, j[None, :], -1), 1), found)
        missing = tl.min(found, 0)
        start -= OTHERS
    has = (i < used) & (found >= 0) & (found != i)
    other = _tile(keys, found, has, d, DIM).to(tl.float32)
    there = tl.sum(_tile(keys, i, has, d, DIM).to(tl.float32) * other, 1)
    there = there * scale * tl.load(inverse + found, mask=has, other=0.0)
    tl.store(newest + head * used + i, found, mask=i < used)
    tl.store(cosine + head * used + i, there, mask=i < used)


@jit
def _column_sums(
    keys, inverse, units, newest, cosine, total, used, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """total[s] = u_s . (U - u_s) - sum of cosine[i] over the i whose newest copy is s, for a block of slots s."""
    blocks = tl.cdiv(used, BLOCK)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    d = tl.arange(0, DIM_BLOCK)
    s = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    key = _tile(keys + head * used * DIM, s, s < used, d, DIM).to(tl.float32)
    unit = key * tl.load(inverse + head * used + s, mask=s < used, other=0.0)[:, None]  # [S, D]
    everything = tl.load(units + head * DIM + d, mask=d < DIM, other=0.0)
    result = tl.sum(unit * (everything[None, :] - unit), 1)
    for start in range(0, used, BLOCK):
        i = start + tl.arange(0, BLOCK)
        copy = tl.load(newest + head * used + i, mask=i < used, other=-1)
        exempt = tl.load(cosine + head * used + i, mask=i < used, other=0.0)
        exempted = tl.sum(tl.where(copy[:, None] == s[None, :], exempt[:, None], 0.0), 0)
        result -= exempted  # pyright: ignore[reportOperatorIssue]
    tl.store(total + head * used + s, result, mask=s < used)


def redundancy(keys: Tensor, threshold: float) -> Tensor:
    """keys [B, H, S, D] -> fp32 [B, H, S]"""
    rows, heads, used, dim = keys.shape
    keys, n = keys.contiguous(), rows * heads
    inverse, cosine, total = (torch.empty(rows, heads, used, dtype=torch.float32, device=keys.device) for _ in range(3))
    units = torch.empty(rows, heads, dim, dtype=torch.float32, device=keys.device)
    newest = torch.empty(rows, heads, used, dtype=torch.int32, device=keys.device)
    dims = dict(DIM=dim, DIM_BLOCK=_padded(dim))
    _sum_units[(n,)](keys, inverse, units, used, **dims, BLOCK=_BLOCK, num_warps=4)
    tile = _PLAIN if keys.dtype == torch.float32 else _TENSOR_CORES
    _newest_copy[(n * triton.cdiv(used, tile["BLOCK"]),)](
        keys, inverse, newest, cosine, used, float(threshold), **dims, **tile
    )
    _column_sums[(n * triton.cdiv(used, _BLOCK),)](
        keys, inverse, units, newest, cosine, total, used, **dims, BLOCK=_BLOCK, num_warps=4
    )
    return total.div_(used).softmax(-1)


@jit
def _observed_logits(
    queries, keys, out, used, scaling, group,
    COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of slots of one row and KV head, for all its query heads and queries."""
    blocks = tl.cdiv(used, BLOCK)
    head = (tl.program_id(0) // blocks).to(tl.int64)
    d, w = tl.arange(0, DIM_BLOCK), tl.arange(0, COUNT_BLOCK)
    s = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    key = _tile(keys + head * used * DIM, s, s < used, d, DIM)  # [S, D]
    best = tl.full([BLOCK, COUNT_BLOCK], -float("inf"), tl.float32)
    for g in range(group):
        query = _tile(queries + (head * group + g) * COUNT * DIM, w, w < COUNT, d, DIM)  # [W, D]
        best = tl.maximum(best, tl.dot(key, tl.trans(query), input_precision="ieee") * scaling)  # [S, W]
    place = (head * COUNT + w)[None, :] * used + s[:, None]
    tl.store(out + place, best, mask=(s < used)[:, None] & (w < COUNT)[None, :])


def observed_logits(
    queries: Tensor, keys: Tensor, scaling: float, softcap: float | None = None, unreachable: None = None
) -> Tensor:
    """queries [B, H * G, W, D], keys [B, H, S, D] -> fp32 [B, H, W, S]. All slots must be reachable."""
    (rows, query_heads, count, dim), (heads, used) = queries.shape, keys.shape[1:3]
    out = torch.empty(rows, heads, count, used, dtype=torch.float32, device=keys.device)
    tiles = observed_tiles(count, dim, keys.dtype, device.shared_memory(keys.device))
    _observed_logits[(rows * heads * triton.cdiv(used, tiles["BLOCK"]),)](
        queries.contiguous(), keys.contiguous(), out, used, float(scaling), query_heads // heads,
        COUNT=count, COUNT_BLOCK=_padded(count), DIM=dim, DIM_BLOCK=_padded(dim), **tiles, num_warps=4,
    )  # fmt: skip
    if softcap is not None:  # increasing, so it may come after the maximum
        out.div_(softcap).tanh_().mul_(softcap)
    return out


def observed_tiles(count: int, dim: int, dtype: torch.dtype, shared: int) -> dict[str, int]:
    """Slots at a time, and stages: as many slots as shared memory holds beside two tiles of queries, one being read
    while the other is multiplied; if not even the smallest number fits, beside one tile.
    """
    blocks = (32, 16) if dtype == torch.float32 else (128, 64, 32, 16)  # fp32: the operands live in registers
    width = _padded(dim) * dtype.itemsize
    choices = [(block, tiles) for tiles in (2, 1) for block in blocks]
    fitting = ((block, tiles) for block, tiles in choices if (block + tiles * _padded(count)) * width <= shared)
    block, tiles = next(fitting, (16, 0))
    return {"BLOCK": block, "num_stages": tiles + 1}


@jit
def _move(x, kept, count, stride, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """x[k] = x[kept[k]] for all k < count, in place. x [C, D], its slots `stride` apart; kept [K], ascending"""
    d = tl.arange(0, DIM_BLOCK)
    for start in range(0, count, BLOCK):
        k = start + tl.arange(0, BLOCK)
        source = tl.load(kept + k, mask=k < count, other=0)
        inside = (k < count)[:, None] & (d < DIM)[None, :]
        moved = tl.load(x + source[:, None] * stride + d[None, :], mask=inside)
        tl.debug_barrier()  # all have read before any writes; later blocks read only beyond this one
        tl.store(x + k[:, None] * stride + d[None, :], moved, mask=inside)


@jit(do_not_specialize=["used", "n"])  # the number of full rows varies
def _compact(
    keys, values, feed, mass, exponents, trace, rows, kept, fed, live, never, used, count, n, heads,
    key_layer, key_row, key_head, key_slot, value_layer, value_row, value_head, value_slot,
    feed_layer, feed_row, feed_head, mass_layer, mass_row, mass_head, exp_layer, exp_row, exp_head,
    trace_layer, trace_row, trace_head,
    KEY_DIM: tl.constexpr, KEY_BLOCK: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_BLOCK: tl.constexpr,
    MASS: tl.constexpr, EXPONENTS: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """All slots of one layer, row and head: the trace first, while `feed` still says what was where."""
    program = tl.program_id(0).to(tl.int64)
    layer, i, head = program // (heads * n), program // heads % n, program % heads
    if tl.load(live + i) == 0:
        return
    row = tl.load(rows + i)
    kept += program * count
    feed += layer * feed_layer + row * feed_row + head * feed_head
    trace += layer * trace_layer + row * trace_row + head * trace_head
    now = tl.load(fed + i).to(trace.dtype.element_ty)
    for start in range(0, used, SLOTS):  # every slot is gone ...
        s = start + tl.arange(0, SLOTS)
        tl.store(trace + tl.load(feed + s, mask=s < used, other=0), now, mask=s < used)
    tl.debug_barrier()
    for start in range(0, count, SLOTS):  # ... but those kept
        k = start + tl.arange(0, SLOTS)
        slot = tl.load(kept + k, mask=k < count, other=0)
        tl.store(trace + tl.load(feed + slot, mask=k < count, other=0), never, mask=k < count)
    _move(feed, kept, count, 1, 1, 1, SLOTS)
    if MASS:
        _move(mass + layer * mass_layer + row * mass_row + head * mass_head, kept, count, 1, 1, 1, SLOTS)
    if EXPONENTS:
        _move(exponents + layer * exp_layer + row * exp_row + head * exp_head, kept, count, 2, 2, 2, SLOTS)
    _move(keys + layer * key_layer + row * key_row + head * key_head, kept, count, key_slot, KEY_DIM, KEY_BLOCK, BLOCK)
    values += layer * value_layer + row * value_row + head * value_head
    _move(values, kept, count, value_slot, VALUE_DIM, VALUE_BLOCK, BLOCK)


def compact(
    keys: Tensor,
    values: Tensor,
    feed: Tensor,
    mass: Tensor | None,
    trace: Tensor,
    layers: slice,
    rows: Tensor,
    used: int,
    kept: Tensor,
    fed: Tensor,
    live: Tensor,
    never: int,
    exponents: Tensor | None = None,
) -> None:
    """keys, values [L, R, H, C, D]; feed, mass [L, R, H, C]; exponents [L, R, H, C, 2]; trace [R, L, H, T]; kept
    [l, N, H, K]; others [N]
    """
    keys, values, feed, trace = keys[layers], values[layers], feed[layers], trace[:, layers].transpose(0, 1)
    mass = None if mass is None else mass[layers]
    exponents = None if exponents is None else exponents[layers]
    assert exponents is None or exponents.stride()[3:] == (2, 1)
    assert all(x.stride(-1) == 1 for x in (keys, values, feed, trace, feed if mass is None else mass))
    num_layers, n, heads, count = kept.shape
    _compact[(num_layers * n * heads,)](
        keys, values, feed, mass, exponents, trace, rows.contiguous(), kept.contiguous(), fed.contiguous(),
        live.contiguous().view(torch.int8), never, used, count, n, heads,
        *keys.stride()[:4], *values.stride()[:4], *feed.stride()[:3], *(feed if mass is None else mass).stride()[:3],
        *(feed if exponents is None else exponents).stride()[:3], *trace.stride()[:3],
        KEY_DIM=keys.shape[-1], KEY_BLOCK=triton.next_power_of_2(keys.shape[-1]),
        VALUE_DIM=values.shape[-1], VALUE_BLOCK=triton.next_power_of_2(values.shape[-1]),
        MASS=mass is not None, EXPONENTS=exponents is not None, BLOCK=_BLOCK, SLOTS=512, num_warps=4, num_stages=1,
    )  # fmt: skip


def _padded(size: int) -> int:
    """A power of two that tl.dot takes."""
    return max(16, triton.next_power_of_2(size))
