"""Sampling in two kernels that read the logits once, and one chunk of them a second time.

Inverting the cumulative distribution needs no order but the vocabulary's: the first kernel leaves every chunk's maximum and sum, the second
finds the chunk in which the drawn number falls, then the token in it, writes the token down and moves the row's counters.
Twin: rollout/sampling.sample and RowState.record.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096


@triton.jit
def _summarise(logits, tops, sums, bests, size, inverse_temperature, CHUNKS: tl.constexpr, CHUNK: tl.constexpr, GREEDY: tl.constexpr):
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * size + i, mask=i < size, other=-float("inf")).to(tl.float32) * inverse_temperature
    top = tl.max(x, 0)
    safe = tl.where(top == -float("inf"), 0.0, top)
    tl.store(tops + row * CHUNKS + chunk, top)
    tl.store(sums + row * CHUNKS + chunk, tl.sum(tl.exp(x - safe), 0))
    if GREEDY:
        tl.store(bests + row * CHUNKS + chunk, chunk * CHUNK + tl.argmax(x, 0))


@triton.jit
def _uniform(stream, counter):
    """streams.uniform: splitmix64's finaliser, 52 bits, strictly inside (0, 1)."""
    x = stream.to(tl.uint64, bitcast=True) + (counter + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return ((x >> 12).to(tl.int64, bitcast=True).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _pick(
    logits, tops, sums, bests, size, inverse_temperature, capacity,
    token, index, used, stream, count, done, limit, stop_ids, tokens, logprobs, room,
    CHUNKS: tl.constexpr, CHUNKS_BLOCK: tl.constexpr, CHUNK: tl.constexpr, STOPS: tl.constexpr, STOPS_BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, CHUNKS_BLOCK)
    top = tl.load(tops + row * CHUNKS + c, mask=c < CHUNKS, other=-float("inf"))
    highest = tl.max(top, 0)
    weight = tl.load(sums + row * CHUNKS + c, mask=c < CHUNKS, other=0.0) * tl.exp(
        tl.where(top == -float("inf"), -float("inf"), top - highest)
    )
    weight = tl.where(c < CHUNKS, weight, 0.0).to(tl.float64)
    total = tl.sum(weight, 0)
    drawn = tl.load(count + row)
    if GREEDY:
        best = tl.load(bests + row * CHUNKS + tl.minimum(tl.argmax(top, 0), CHUNKS - 1)).to(tl.int32)
        chosen = tl.maximum(tl.minimum(best, size - 1), 0)  # NaN may have led anywhere
    else:
        point = _uniform(tl.load(stream + row), drawn) * total
        below = tl.cumsum(weight, 0) <= point
        last = tl.max(tl.where(weight > 0, c, 0), 0)  # rounding must not lead beyond the last chunk that has mass
        chunk = tl.minimum(tl.sum(below.to(tl.int32), 0), last)
        before = tl.sum(tl.where(c < chunk, weight, 0.0), 0)
        i = tl.arange(0, CHUNK)
        place = chunk * CHUNK + i
        x = tl.load(logits + row * size + place, mask=place < size, other=-float("inf")).to(tl.float32) * inverse_temperature
        mass = tl.exp(x - highest)
        passed = before + tl.cumsum(mass.to(tl.float64), 0) <= point
        last = tl.max(tl.where(mass > 0, i, 0), 0)
        chosen = chunk * CHUNK + tl.minimum(tl.sum(passed.to(tl.int32), 0), last)
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
        ended = drawn + 1 >= tl.load(limit)
        if STOPS > 0:
            s = tl.arange(0, STOPS_BLOCK)
            stops = tl.load(stop_ids + s, mask=s < STOPS, other=-1)
            ended = ended | (tl.max((stops == chosen).to(tl.int32), 0) > 0)
        finite = (logprob - logprob) == 0.0
        tl.store(done + row, (ended | (finite == 0)).to(tl.int8))


def sample_and_record(logits: Tensor, state, temperature: float, stop_ids: Tensor) -> None:
    """Draw one token for each of the first B rows that runs, and write it down. logits [B, V]; state: RowState; temperature 0: greedy."""
    rows, size = logits.shape
    assert logits.is_contiguous()
    chunks = triton.cdiv(size, _CHUNK)
    tops, sums = torch.empty(2, rows, chunks, dtype=torch.float32, device=logits.device)
    bests = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    inverse = 1.0 / temperature if temperature > 0 else 1.0
    _summarise[(rows, chunks)](logits, tops, sums, bests, size, inverse, CHUNKS=chunks, CHUNK=_CHUNK, GREEDY=temperature == 0, num_warps=4)
    _pick[(rows,)](
        logits, tops, sums, bests, size, inverse, state.capacity,
        state.token, state.index, state.used, state.stream, state.count, state.done.view(torch.int8), state.limit, stop_ids,
        state.tokens, state.logprobs, state.tokens.shape[1],
        CHUNKS=chunks, CHUNKS_BLOCK=triton.next_power_of_2(chunks), CHUNK=_CHUNK,
        STOPS=len(stop_ids), STOPS_BLOCK=triton.next_power_of_2(max(1, len(stop_ids))), GREEDY=temperature == 0, num_warps=8,
    )  # fmt: skip
