"""Triton kernels that sample: two kernels read the logits once, and one chunk of them a second time.

Inverting the cumulative distribution needs no sorting: the first kernel writes every chunk's maximum and sum. The
second one finds the chunk in which the drawn number falls, then the token in it, records the token and advances the
row's counters.

Top-k and top-p need no sorting either, only the lowest logit that they keep, which another kernel finds first. It maps
floats to integers of the same order and determines 4 bits of the bound at a time, the highest first, from the mass
above 15 candidates. If the tokens that could be drawn are recorded, at most MOST may be, and one more kernel writes
them.

Settings are either the same for all rows, as numbers known when a step is captured, or BY_ROW, as tensors that a
captured step reads. In the second case kernels decide for every row what they otherwise decide at compile time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cache.support import MOST
from .jit import jit
from .twins_sample import Rows, room_of

_CHUNK = 4096
_BLOCK = 1024  # logits that the search for the least kept one reads at a time


@jit
def _place(x, BITS: tl.constexpr):
    """Map floats to integers of the same order. fp32 -> int32, or the 16 bits that bfloat16 has"""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> (32 - BITS)


@jit
def _least(
    logits, size, floor, bound, highest, inverse_temperature,
    COUNT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The lowest place from `floor` on that has less than `bound` above it, in tokens (COUNT) or in probability mass.

    logits: of one row. Tokens below `floor` do not count. A place is the integer of a logit (`_place`).
    """
    # Above `low` there is too much; above low + 16 * step there is not.
    low = tl.full((), -(1 << (BITS - 1)) - 1, tl.int64)  # pyright: ignore[reportOperatorIssue]
    candidate = tl.arange(0, 16)
    step = tl.full((), 1 << (BITS - 4), tl.int64)  # pyright: ignore[reportOperatorIssue]
    for _ in range(BITS // 4):
        pivot = (low + candidate * step).to(tl.int32)  # the first one is known, and may lie below all integers
        above = tl.zeros([16, BLOCK], dtype=tl.float32)
        for start in range(0, size, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(logits + i, mask=i < size, other=-float("inf")).to(tl.float32)
            place = _place(x, BITS)
            inside = (i < size) & (place >= floor)
            weight = tl.where(inside, 1.0 if COUNT else tl.exp((x - highest) * inverse_temperature), 0.0)
            above += tl.where(place[None, :] > pivot[:, None], weight[None, :], 0.0)
        too_much = (tl.sum(above, 1) >= bound) & (candidate > 0)
        low += tl.sum(too_much.to(tl.int64), 0) * step
        step = step // 16
    return tl.maximum((low + 1).to(tl.int32), floor)


@jit
def _inverse(temperature, row, BY_ROW: tl.constexpr):
    """1 / temperature, fp32. temperature: the inverse itself; BY_ROW: fp64 of all rows, 0: greedy"""
    if BY_ROW:
        own = tl.load(temperature + row)
        inverse = (1.0 / tl.where(own == 0.0, 1.0, own)).to(tl.float32)  # pyright: ignore[reportOperatorIssue]
    else:
        inverse = temperature
    return inverse


@jit
def _limit_by_row(
    logits, least, size, temperature, top_k, top_p, records,
    MOST: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`_limit` with settings for every row. MOST > 0: the cap for those rows whose tokens are recorded"""
    row = tl.program_id(0).to(tl.int64)
    own, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    inverse = _inverse(temperature, row, True)
    logits += row * size
    lowest = tl.full((), -(1 << (BITS - 1)), tl.int32)  # pyright: ignore[reportOperatorIssue]
    tl.store(least + row, lowest)
    if own > 0.0:
        capped = (tl.load(records + row) != 0) & (MOST > 0)
        if (k > 0) & (k < size) | (p < 1.0) | capped:
            _find_least(
                logits, least + row, size, inverse, k.to(tl.float32), tl.maximum(p, 1e-30).to(tl.float32),
                (k > 0) & (k < size), p < 1.0, capped, MOST, BITS, BLOCK,
            )  # fmt: skip


@jit
def _find_least(
    logits, least, size, inverse_temperature, top_k, top_p, by_count, by_mass, capped,
    MOST: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What `_limit` finds, for one row."""
    high = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
    for start in range(0, size, BLOCK):
        i = start + tl.arange(0, BLOCK)
        high = tl.maximum(high, tl.load(logits + i, mask=i < size, other=-float("inf")).to(tl.float32))
    highest = tl.max(high, 0)
    kept = tl.full((), -(1 << (BITS - 1)), tl.int32)  # pyright: ignore[reportOperatorIssue]
    if MOST > 0:  # noqa: SIM102 (one is known when the kernel is compiled, the other is not)
        if capped:
            too_many = _least(logits, size, kept, MOST + 1.0, 0.0, 0.0, COUNT=True, BITS=BITS, BLOCK=BLOCK)
            kept = tl.minimum(too_many + 1, _place(highest, BITS))
    if by_count:
        kept = _least(logits, size, kept, top_k, 0.0, 0.0, COUNT=True, BITS=BITS, BLOCK=BLOCK)
    if by_mass:
        mass = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, size, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(logits + i, mask=i < size, other=-float("inf")).to(tl.float32)
            mass += tl.where(_place(x, BITS) >= kept, tl.exp((x - highest) * inverse_temperature), 0.0)
        bound = top_p * tl.sum(mass, 0)
        kept = _least(logits, size, kept, bound, highest, inverse_temperature, COUNT=False, BITS=BITS, BLOCK=BLOCK)
    tl.store(least, kept)


@jit
def _limit(
    logits, least, size, inverse_temperature, top_k, top_p,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MOST: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The place of the lowest logit that each row keeps. MOST > 0: keep at most this many, as `truncate` does"""
    row = tl.program_id(0).to(tl.int64)
    logits += row * size
    kept = tl.full((), -(1 << (BITS - 1)), tl.int32)  # pyright: ignore[reportOperatorIssue]
    highest = tl.full((), -float("inf"), tl.float32)
    if TOP_P or MOST > 0:
        high = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
        for start in range(0, size, BLOCK):
            i = start + tl.arange(0, BLOCK)
            high = tl.maximum(high, tl.load(logits + i, mask=i < size, other=-float("inf")).to(tl.float32))
        highest = tl.max(high, 0)
    if MOST > 0:
        too_many = _least(logits, size, kept, MOST + 1.0, 0.0, 0.0, COUNT=True, BITS=BITS, BLOCK=BLOCK)
        kept = tl.minimum(too_many + 1, _place(highest, BITS))
    if TOP_K:
        kept = _least(logits, size, kept, top_k, 0.0, 0.0, COUNT=True, BITS=BITS, BLOCK=BLOCK)
    if TOP_P:
        mass = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, size, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(logits + i, mask=i < size, other=-float("inf")).to(tl.float32)
            mass += tl.where(_place(x, BITS) >= kept, tl.exp((x - highest) * inverse_temperature), 0.0)
        bound = top_p * tl.sum(mass, 0)
        kept = _least(logits, size, kept, bound, highest, inverse_temperature, COUNT=False, BITS=BITS, BLOCK=BLOCK)
    tl.store(least + row, kept)


@jit
def _note(
    logits, least, size, count, used, done, capacity, counts, margins, ids, room,
    IDS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Record the tokens that running rows can draw: how many, the margin, and with IDS > 0 which."""
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(done + row) == 0) & (tl.load(used + row) < tl.load(capacity)):
        logits += row * size
        threshold = tl.load(least + row)
        at = row * room + tl.load(count + row)
        total = tl.zeros((), tl.int32)
        high = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
        low = tl.full([BLOCK], float("inf"), dtype=tl.float32)
        beyond = tl.full([BLOCK], -float("inf"), dtype=tl.float32)
        for start in range(0, size, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = tl.load(logits + i, mask=i < size, other=-float("inf")).to(tl.float32)
            kept = (i < size) & (_place(x, BITS) >= threshold) & (x > -float("inf"))
            high = tl.maximum(high, x)
            low = tl.minimum(low, tl.where(kept, x, float("inf")))
            beyond = tl.maximum(beyond, tl.where(kept, -float("inf"), x))
            if IDS > 0:
                place = total + tl.cumsum(kept.to(tl.int32), 0) - 1
                tl.store(ids + at * IDS + place, i.to(tl.int32), mask=kept & (place < IDS))
            total += tl.sum(kept.to(tl.int32), 0)
        if IDS > 0:
            for start in range(0, IDS, BLOCK):
                i = start + tl.arange(0, BLOCK)
                tl.store(ids + at * IDS + i, tl.full([BLOCK], -1, tl.int32), mask=(i >= total) & (i < IDS))
        tl.store(counts + at, total)
        halfway = tl.min(low, 0) / 2 + tl.max(beyond, 0) / 2  # pyright: ignore[reportOperatorIssue]
        tl.store(margins + at, tl.max(high, 0) - halfway)


@jit
def _scaled(logits, i, size, least, inverse_temperature, LIMITED: tl.constexpr, BITS: tl.constexpr):
    """Logits over the temperature; -inf if they are not kept, and beyond the last. logits, least: of one row"""
    x = tl.load(logits + i, mask=i < size, other=-float("inf")).to(tl.float32)
    if LIMITED:
        # NaN stays, so that it is noticed
        x = tl.where((_place(x, BITS) < tl.load(least)) & (x == x), -float("inf"), x)
    return x * inverse_temperature


@jit
def _summarise(
    logits, least, tops, sums, bests, size, temperature,
    CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GREEDY: tl.constexpr, LIMITED: tl.constexpr, BITS: tl.constexpr,
    BY_ROW: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    inverse_temperature = _inverse(temperature, row, BY_ROW)
    x = _scaled(
        logits + row * size, chunk * CHUNK + tl.arange(0, CHUNK), size, least + row, inverse_temperature, LIMITED, BITS
    )
    top = tl.max(x, 0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    tl.store(tops + row * CHUNKS + chunk, top)
    tl.store(sums + row * CHUNKS + chunk, tl.sum(tl.exp(x - safe), 0))
    if GREEDY or BY_ROW:
        tl.store(bests + row * CHUNKS + chunk, chunk * CHUNK + tl.argmax(x, 0))


@jit
def _uniform(stream, counter):
    """streams.uniform: splitmix64's finaliser, 52 bits, strictly inside (0, 1)."""
    x = stream.to(tl.uint64, bitcast=True) + (counter + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return ((x >> 12).to(tl.int64, bitcast=True).to(tl.float64) + 0.5) * 2.220446049250313e-16


@jit
def _pick(
    logits, least, tops, sums, bests, size, temperature, capacity,
    token, index, used, stream, count, done, limit, stop_ids, tokens, logprobs, room,
    CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, CHUNK: tl.constexpr,
    STOPS: tl.constexpr, STOPS_BLOCK: tl.constexpr, GREEDY: tl.constexpr, LIMITED: tl.constexpr, BITS: tl.constexpr,
    BY_ROW: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    inverse_temperature = _inverse(temperature, row, BY_ROW)
    c = tl.arange(0, CHUNKS_BLOCK)
    top = tl.load(tops + row * CHUNKS + c, mask=c < CHUNKS, other=-float("inf"))
    highest = tl.max(top, 0)
    weight = tl.load(sums + row * CHUNKS + c, mask=c < CHUNKS, other=0.0) * tl.exp(
        tl.where(top == -float("inf"), -float("inf"), top - highest)
    )
    weight = tl.where(c < CHUNKS, weight, 0.0).to(tl.float64)
    total = tl.sum(weight, 0)
    drawn = tl.load(count + row)
    chosen = tl.zeros((), tl.int32)
    if GREEDY or BY_ROW:
        best = tl.load(bests + row * CHUNKS + tl.minimum(tl.argmax(top, 0), CHUNKS - 1)).to(tl.int32)
        chosen = tl.maximum(tl.minimum(best, size - 1), 0)  # NaN may have led anywhere
    if not GREEDY:
        point = _uniform(tl.load(stream + row), drawn) * total
        below = tl.cumsum(weight, 0) <= point
        last = tl.max(tl.where(weight > 0, c, 0), 0)  # rounding must not lead beyond the last chunk that has mass
        chunk = tl.minimum(tl.sum(below.to(tl.int32), 0), last)
        before = tl.sum(tl.where(c < chunk, weight, 0.0), 0)
        i = tl.arange(0, CHUNK)
        x = _scaled(logits + row * size, chunk * CHUNK + i, size, least + row, inverse_temperature, LIMITED, BITS)
        mass = tl.exp(x - highest)
        passed = before + tl.cumsum(mass.to(tl.float64), 0) <= point
        last = tl.max(tl.where(mass > 0, i, 0), 0)
        drawn_one = chunk * CHUNK + tl.minimum(tl.sum(passed.to(tl.int32), 0), last)
        chosen = tl.where(tl.load(temperature + row) == 0.0, chosen, drawn_one) if BY_ROW else drawn_one
    at = tl.load(logits + row * size + chosen).to(tl.float32) * inverse_temperature
    logprob = at - highest - tl.log(total).to(tl.float32)

    taken = tl.load(used + row)
    if (tl.load(done + row) == 0) & (taken < tl.load(capacity)):
        tl.store(tokens + row * room + drawn, chosen.to(tl.int64))
        tl.store(logprobs + row * room + drawn, logprob)
        tl.store(token + row, chosen.to(tl.int64))
        tl.store(index + row, tl.load(index + row) + 1)
        tl.store(used + row, taken + 1)
        tl.store(count + row, drawn + 1)
        ended = drawn + 1 >= tl.load(limit + row)
        if STOPS > 0:
            s = tl.arange(0, STOPS_BLOCK)
            stops = tl.load(stop_ids + (row * STOPS if BY_ROW else 0) + s, mask=s < STOPS, other=-1)
            ended = ended | (tl.max((stops == chosen).to(tl.int32), 0) > 0)  # pyright: ignore[reportOperatorIssue]
        finite = (logprob - logprob) == 0.0
        tl.store(done + row, (ended | (finite == 0)).to(tl.int8))


def sample_and_record(
    logits: Tensor,
    state: Rows,
    temperature: float,
    stop_ids: Tensor,
    top_k: int = 0,
    top_p: float = 1.0,
    records: bool = False,
) -> None:
    """logits [B, V]; temperature 0: greedy"""
    rows, size = logits.shape
    greedy = temperature == 0
    inverse = 1.0 if greedy else 1.0 / temperature
    room = room_of(state, records and not greedy)
    by_count, by_mass = not greedy and 0 < top_k < size, not greedy and top_p < 1
    limited, bits = by_count or by_mass or room is not None, _bits(logits)
    least = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if limited:
        _limit[(rows,)](
            logits, least, size, inverse, float(top_k), max(top_p, 1e-30),
            TOP_K=by_count, TOP_P=by_mass, MOST=_most(room, size), BITS=bits, BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    options = {"GREEDY": greedy, "LIMITED": limited, "BITS": bits, "BY_ROW": False}
    _draw(logits, state, least, room, inverse, stop_ids, len(stop_ids), options)


def sample_by_row(logits: Tensor, state: Rows) -> None:
    """logits [B, V]; settings are those of the state"""
    rows, size = logits.shape
    own = state.settings
    assert own is not None
    room, bits = room_of(state, state.kept is not None), _bits(logits)
    least = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _limit_by_row[(rows,)](
        logits, least, size, own.temperature, own.top_k, own.top_p, own.records.view(torch.int8),
        MOST=_most(room, size), BITS=bits, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip
    options = {"GREEDY": False, "LIMITED": True, "BITS": bits, "BY_ROW": True}
    _draw(logits, state, least, room, own.temperature, own.stop_ids, own.stop_ids.shape[1], options)


def _bits(logits: Tensor) -> int:
    return 16 if logits.dtype == torch.bfloat16 else 32


def _most(room: int | None, size: int) -> int:
    """The most tokens that can be drawn; 0: all."""
    return MOST if room is not None and size > MOST else 0


def _draw(
    logits: Tensor,
    state: Rows,
    least: Tensor,
    room: int | None,
    temperature: float | Tensor,
    stop_ids: Tensor,
    stops: int,
    options: dict,
) -> None:
    """Draw from the tokens that are kept, and record. least int32 [B]; temperature: see `_inverse`;
    stops: ids per row
    """
    rows, size = logits.shape
    assert logits.is_contiguous()
    chunks = triton.cdiv(size, _CHUNK)
    done = state.done.view(torch.int8)
    tops, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    bests = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    if room is not None and state.kept is not None:
        _note[(rows,)](
            logits, least, size, state.count, state.used, done, state.capacity,
            state.kept.count, state.kept.margin, state.kept.ids, state.tokens.shape[1],
            IDS=room, BITS=options["BITS"], BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip
    _summarise[(rows, chunks)](
        logits, least, tops, sums, bests, size, temperature, CHUNKS=chunks, CHUNK=_CHUNK, **options, num_warps=4
    )
    _pick[(rows,)](
        logits, least, tops, sums, bests, size, temperature, state.capacity,
        state.token, state.index, state.used, state.stream, state.count, done, state.limit,
        stop_ids, state.tokens, state.logprobs, state.tokens.shape[1],
        CHUNKS=chunks, CHUNKS_BLOCK=triton.next_power_of_2(chunks), CHUNK=_CHUNK,
        STOPS=stops, STOPS_BLOCK=triton.next_power_of_2(max(1, stops)), **options, num_warps=8,
    )  # fmt: skip
