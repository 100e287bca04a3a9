"""The memory plan of a rollout, made from the model's config alone before anything runs.

Weights, cache, scratch, trace and recorded tokens are exact. The working set (logits, prefill activations, eviction
copies) is an upper estimate, and 5 % of the memory is left to the allocator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from ..cache import CacheShape
from ..cache.formats import PLAIN
from ..cache.slots import chunk_bytes
from ..cache.trace import trace_dtype
from ..compressors import Compressor
from ..compressors.budgets import check_layers
from ..compressors.rkv import BLOCK_ELEMENTS
from ..errors import SparseRLError
from ..models import ModelShape
from ..models.routing import Routing

_CHUNK = 256  # tokens that chunked scans weigh against each other, at most
ALLOCATOR_SHARE = 0.05  # of the memory, left free


@dataclass(frozen=True)
class Plan:
    """The memory of a rollout: the bytes of each part, per row, slot or token, and their sums."""

    compressor: str
    rule: str  # what a row holds, in words
    evicts: bool  # whether full rows are evicted down to the budget
    folds: bool  # whether chunks are folded into beacons
    budget: int  # slots right after an eviction; if chunks are folded, slots of the prompt and the beacons
    beside_budget: int  # the other slots of a row: the interval, the chunk, or the new tokens if responses stay whole
    capacity: int  # of the smallest layer, if layers differ
    rows: int
    prompt_tokens: int  # the longest prompt
    new_tokens: int
    weight_bytes: int
    row_bytes: int  # one row of the cache: keys, values, feed indices, and what the compressor records
    kv_bytes_per_token: int  # keys and values alone, in any cache
    state_bytes: int  # the share of row_bytes that recurrent layers keep, in any cache
    slot_bytes: int  # the share of row_bytes that one slot takes
    extra: tuple[int, ...]  # by layer: slots beyond `capacity`, which the smallest has; (): none has more
    scratch_capacity: int  # slots of a scratch row, in its smallest layer
    scratch_most: int | None  # tokens that a scratch row is fed at most, if its layers differ
    prompt_piece: int  # tokens of one prompt that are fed at a time, at most
    most_prefill_rows: int  # prompts prefilled together, if there are as many rows
    prefill_chunk: int  # prompt tokens fed at a time
    scratch_row_bytes: int  # the row in which a prompt is read, before it is forked
    trace_row_bytes: int  # 0 if chunks are folded: the positions of the beacons are the whole trace
    chunk_row_bytes: int  # the positions of a row's beacons, and the state of its open chunk
    token_row_bytes: int  # sampled tokens, their log-probs, and which tokens could be drawn where that is recorded
    routes_row_bytes: int  # experts of all tokens, if they are recorded
    sampling_row_bytes: int  # estimate: logits, a layer's states; on a CPU softmax, sums; with beacons one entry
    prefill_token_bytes: int  # estimate: activations
    eviction_slot_bytes: int  # estimate: one layer gathered, compacted and scored
    eviction_bytes: int  # estimate: the most that is copied at a time
    prompt_logits_bytes: int  # the logits of a prompt that waits in the scratch
    attention_token_bytes: int  # estimate: a prompt token's attention weights, if the compressor needs them
    scoring_bytes: int  # estimate: scores of an eviction, whatever the number of rows
    read_slot_bytes: int  # a layer's slot in the model's dtype, where its codes are read into a copy; else 0
    first_row_bytes: int  # estimate: sampling a first token in torch, for at most 64 rows at a time
    slots: str  # how keys and values are stored, in words; "model": in its dtype
    most_fed_rows: int = 0  # rows of an open engine that are fed together, if there are as many
    fed_row_bytes: int = 0  # estimate: what attention makes for one of them
    most_fed_bytes: int = 0  # estimate: and for all, if one does not take more

    @property
    def cache_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def mean_capacity(self) -> float:
        """Slots of a row, mean over layers."""
        return self.capacity + (sum(self.extra) / len(self.extra) if self.extra else 0)

    @property
    def dense_row_bytes(self) -> int:
        """Keys and values of a whole sequence in a dense cache, and the states of recurrent layers."""
        return (self.prompt_tokens + self.new_tokens) * self.kv_bytes_per_token + self.state_bytes

    @property
    def prefill_rows(self) -> int:
        return min(self.rows, self.most_prefill_rows)

    @property
    def scratch_bytes(self) -> int:
        return self.prefill_rows * self.scratch_row_bytes

    @property
    def record_bytes(self) -> int:
        """Trace or chunks, tokens, log-probs and routes of all rows."""
        a_row = self.trace_row_bytes + self.chunk_row_bytes + self.token_row_bytes + self.routes_row_bytes
        return self.rows * a_row

    @property
    def working_bytes(self) -> int:
        """An upper estimate: prefill, sampling and eviction as if they happened at the same time."""
        tokens = min(self.prefill_chunk, self.prefill_rows * self.prompt_piece)
        more = max(self.extra, default=0)  # slots of the largest layer
        a_prompt = self.prompt_logits_bytes + (self.scratch_capacity + more) * self.read_slot_bytes
        prefill = tokens * (self.prefill_token_bytes + self.attention_token_bytes) + self.prefill_rows * a_prompt
        if self.most_fed_rows:
            prefill = max(prefill, self._feed_bytes)
        largest = self.capacity + more
        together = min(3 * self.rows * largest * self.kv_bytes_per_token, self.eviction_bytes)
        a_row = self.sampling_row_bytes + largest * self.eviction_slot_bytes
        first = min(self.rows, 64) * self.first_row_bytes
        return prefill + first + self.scoring_bytes + together + self.rows * a_row

    @property
    def _feed_bytes(self) -> int:
        """Of feeding tokens to rows."""
        rows = min(self.rows, self.most_fed_rows)
        tokens = min(self.prefill_chunk, rows * self.capacity)
        attention = min(rows * self.fed_row_bytes, max(self.fed_row_bytes, self.most_fed_bytes))
        return tokens * self.prefill_token_bytes + rows * self.prompt_logits_bytes + attention

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.scratch_bytes + self.record_bytes + self.working_bytes

    def with_rows(self, rows: int) -> Plan:
        return replace(self, rows=rows)

    def with_capacity(self, capacity: int) -> Plan:
        return replace(self, capacity=capacity, row_bytes=self.row_bytes + (capacity - self.capacity) * self.slot_bytes)

    def rows_that_fit(self, memory: int) -> int:
        return _largest(lambda rows: self.with_rows(rows).total_bytes, memory)

    def dense_rows_that_fit(self, memory: int) -> int:
        """Rows that fit if every row holds the keys and values of a whole sequence and nothing is evicted."""
        records = ("trace_row_bytes", "chunk_row_bytes")
        evicting = ("eviction_slot_bytes", "eviction_bytes", "scoring_bytes", "attention_token_bytes")
        others = (*records, *evicting, "read_slot_bytes")
        dense = replace(self, row_bytes=self.dense_row_bytes, **dict.fromkeys(others, 0))
        return dense.rows_that_fit(memory)

    def largest_that_fits(self, memory: int) -> str:
        """A sentence that names the largest setting that fits."""
        rows = self.rows_that_fit(memory)
        if rows >= 1:
            return f"At this capacity use rows={rows}."
        capacity = _largest(lambda slots: self.with_rows(1).with_capacity(slots).total_bytes, memory)
        if self.evicts and capacity > self.beside_budget:
            budget = int(self.with_capacity(capacity).mean_capacity) - self.beside_budget
            return f"Not even one row fits: with rows=1, use budget={budget}."
        if self.folds and capacity > self.prompt_tokens:
            return (
                f"Not even one row fits: with rows=1 there is room for {capacity} of {self.capacity} slots; "
                "generate less, or fold more tokens into a beacon."
            )
        if not self.evicts and capacity > self.prompt_tokens:
            return (
                f"Not even one row fits: with rows=1 there is room for {capacity} tokens; "
                "generate less, or use a compressor."
            )
        return f"The weights and the working set leave nothing of {size(memory)}: use a smaller model, dtype or prompt."

    def lines(self, memory: int | None = None) -> list[tuple[str, str]]:
        """(label, bytes) of every part; with the device's `memory`, also how many rows fit."""
        saved = 1 - self.row_bytes / self.dense_row_bytes
        against = f"{saved:.0%} less" if saved >= 0 else f"{-saved:.0%} more"
        lines = [
            ("weights", size(self.weight_bytes)),
            (f"KV per row, dense ({self.prompt_tokens} + {self.new_tokens} tokens)", size(self.dense_row_bytes)),
            (
                f"KV per row, {self.compressor} ({self.rule} = {self.mean_capacity:g} slots"
                + ("" if self.slots == PLAIN else f" of {self.slots}")
                + ")",
                f"{size(self.row_bytes)} ({against})",
            ),
            *([("of it states of recurrent layers", size(self.state_bytes))] if self.state_bytes else []),
            (f"cache, {self.rows} rows", size(self.cache_bytes)),
            (
                f"prefill scratch, {self.prefill_rows} prompts"
                + (f" of {self.scratch_capacity} slots" if self.scratch_capacity < self.prompt_tokens else ""),
                size(self.scratch_bytes),
            ),
            *self._record_lines(),
            ("working set (estimate)", size(self.working_bytes)),
            ("total", size(self.total_bytes)),
        ]
        if memory is not None:
            lines.append(("memory", size(memory)))
            lines.append((f"rows that fit, {self.compressor}", str(self.rows_that_fit(memory))))
            lines.append(("rows that fit, dense", str(self.dense_rows_that_fit(memory))))
        return lines

    def _record_lines(self) -> list[tuple[str, str]]:
        name, a_row = ("places of beacons", self.chunk_row_bytes) if self.folds else ("trace", self.trace_row_bytes)
        routes = [(f"routes, {self.rows} rows", size(self.rows * self.routes_row_bytes))]
        return [
            (f"{name} per row", size(a_row)),
            (f"{name}, {self.rows} rows", size(self.rows * a_row)),
            *(routes if self.routes_row_bytes else []),
        ]

    def text(self, memory: int | None = None) -> str:
        """The plan as a table for people."""
        return aligned(self.lines(memory))


def make_plan(
    shape: ModelShape,
    compressor: Compressor,
    *,
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    weight_bytes: int,
    capacity: int | None = None,
    prefill_chunk: int | None = None,
    prefill_rows: int | None = None,
    on_gpu: bool = True,
    adapters: bool = False,
    routing: Routing | None = None,
    room: int | None = None,
) -> Plan:
    """The plan of a rollout.

    `capacity`: of rows that are already allocated. `prefill_chunk`, `prefill_rows`: the engine's; by default what it
    chooses on that kind of device. `adapters`: the model has some, which work in fp32. `routing`: of a mixture of
    experts whose routes are recorded. `room`: ids of tokens that could be drawn, recorded beside each token; None:
    nothing of them is.
    """
    if rows < 1 or prompt_tokens < 1 or new_tokens < 1:
        raise SparseRLError(
            f"rows {rows}, prompt tokens {prompt_tokens} and new tokens {new_tokens} must all be at least 1."
        )
    cache = cache_shape(shape, compressor)
    capacity = capacity or compressor.capacity(prompt_tokens, new_tokens)
    tokens, scratch = prompt_tokens + new_tokens, compressor.scratch_capacity(prompt_tokens)
    prefill_chunk = prefill_chunk or default_prefill_chunk(on_gpu)
    prefill_rows = prefill_rows or default_prefill_rows(prefill_chunk, prompt_tokens, on_gpu)
    if not all(state.continues for state in shape.states):
        prefill_chunk = max(prefill_chunk, prefill_rows * prompt_tokens)  # such prompts are fed whole
    copied = 2 * max((state.row_bytes(shape.dtype) for state in shape.states), default=0)  # of a layer at work
    logits = shape.vocabulary * 4  # in fp32, whatever the dtype of the weights
    sampled = shape.vocabulary * (4 + 4 + 8 + 8)  # fp32 logits, softmax and cumulative sum of a row
    activations = 6 * shape.hidden + 3 * shape.intermediate + 2 * shape.query_heads * shape.head_dim
    evicts, folds = compressor.has_budget, compressor.folds
    layer_slot = max(map(cache.layer_kv_bytes, range(cache.layers)))  # of the largest layer, in the model's dtype
    read = 0 if cache.slots is None else layer_slot  # codes of a layer are read into a copy
    beside = compressor.interval if compressor.evicts_response or folds else new_tokens
    return Plan(
        compressor=compressor.name,
        rule=compressor.rule(),
        evicts=evicts,
        folds=folds,
        budget=max(0, capacity - beside) if folds else compressor.budget,
        beside_budget=beside,
        capacity=capacity,
        rows=rows,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        weight_bytes=weight_bytes,
        row_bytes=cache.row_bytes(capacity),
        extra=cache.extra,
        kv_bytes_per_token=cache.kv_bytes_per_token,
        state_bytes=cache.state_bytes,
        slot_bytes=cache.slot_bytes,
        scratch_capacity=scratch,
        scratch_most=prompt_tokens if cache.extra else None,
        prompt_piece=min(prompt_tokens, compressor.prompt_chunk) if scratch < prompt_tokens else prompt_tokens,
        most_prefill_rows=prefill_rows,
        prefill_chunk=prefill_chunk,
        scratch_row_bytes=cache.row_bytes(scratch, prompt_tokens),
        trace_row_bytes=0 if folds else shape.slot_layers * shape.heads * tokens * trace_dtype(tokens).itemsize,
        chunk_row_bytes=new_tokens * (5 if compressor.chooses else 1) + 8 + 8 + 4 + 4 if folds else 0,
        token_row_bytes=new_tokens * (8 + 4 + (0 if room is None else 4 + 4 + 4 * room)),
        routes_row_bytes=tokens * routing.token_bytes if routing else 0,
        sampling_row_bytes=logits + copied + (0 if on_gpu else sampled) + (cache.kv_bytes_per_token if folds else 0),
        prefill_token_bytes=max(
            activations * shape.dtype.itemsize + (8 * shape.intermediate if adapters else 0),
            scan_token_bytes(shape),
        ),
        eviction_slot_bytes=((2 if on_gpu else 3) * layer_slot if evicts else 0) + read,
        eviction_bytes=int((compressor.copies + bool(read)) * chunk_bytes("cuda" if on_gpu else "cpu"))
        if evicts
        else 0,
        prompt_logits_bytes=logits if on_gpu else 0,
        attention_token_bytes=8 * shape.query_heads * scratch if compressor.uses_mass else 0,
        scoring_bytes=3 * 4 * BLOCK_ELEMENTS if evicts else 0,
        read_slot_bytes=read,
        first_row_bytes=sampled if on_gpu else 0,
        slots=PLAIN if cache.slots is None else str(cache.slots),
    )


def scan_token_bytes(shape: ModelShape) -> int:
    """Estimate: what a recurrent layer holds of a token while many are fed, in fp32 and by plain torch operations: some
    copies of its inputs, and for every head the weights of the tokens of a chunk.
    """
    state = next(iter(shape.states), None)
    if state is None:
        return 0
    heads = state.recurrent[0] if state.recurrent and len(state.recurrent) == 3 else 0
    inner = math.prod(state.recurrent) if state.recurrent and not heads else 0  # Mamba 1 scans whole states
    return 4 * (12 * state.conv[0] + 4 * heads * _CHUNK + 4 * inner)


def _largest(total_bytes: Callable[[int], int], memory: int) -> int:
    """The largest number whose plan fits, with the allocator's share left free; 0 if none fits."""
    limit = memory * (1 - ALLOCATOR_SHARE)
    low, high = 0, 1
    while total_bytes(high) <= limit:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if total_bytes(middle) <= limit else (low, middle)
    return low


def default_prefill_chunk(on_gpu: bool) -> int:
    """Prompt tokens fed at a time."""
    return 16384 if on_gpu else 512


def default_prefill_rows(chunk: int, prompt_tokens: int, on_gpu: bool) -> int:
    """Prompts prefilled together at most; on a CPU one, so that rounding does not depend on the other prompts."""
    return max(1, chunk // prompt_tokens) if on_gpu else 1


def default_fed_rows(rows: int, together: bool) -> int:
    """Rows to which given tokens are fed together at most; on a CPU one, as for prompts."""
    return rows if together else 1


def most_fed(shape: CacheShape, capacity: int, longest: int, together: int, device: torch.device) -> int:
    """Rows to which chunks of up to `longest` tokens are fed together at most: `together` tokens, and what attention
    makes for them fits into the memory for copies.
    """
    a_row = fed_row_bytes(shape, capacity, longest)
    return max(1, min(together // longest, chunk_bytes(device) // a_row))


def fed_row_bytes(shape: CacheShape, capacity: int, tokens: int) -> int:
    """Estimate: what attention makes for a row that so many tokens are fed to: a copy of a layer's slots, and masks or
    weights.
    """
    slots = capacity + max(shape.extra, default=0)
    weights = shape.query_heads * 8  # as where attention is written out, for masses, soft-caps and sinks
    return slots * (max(map(shape.layer_kv_bytes, range(shape.layers))) + tokens * weights)


def cache_shape(shape: ModelShape, compressor: Compressor) -> CacheShape:
    """The shape of a model's cache, with what the compressor needs to be recorded."""
    plain = shape.cache_shape()
    slots = None if compressor.slots is None else compressor.slots.for_layers(plain.layers)
    if slots is not None and plain.latent:
        raise SparseRLError(
            f"slots are {slots}, but those of {shape.architecture} hold latents, of which the learner makes the keys "
            "and values of all heads: their rounding cannot be replayed; leave slots out."
        )
    check_layers(compressor.layer_budgets, plain.layers, shape.architecture)
    queries, extra = compressor.most_queries, compressor.extra_slots
    return replace(plain, num_queries=queries, mass=compressor.uses_mass, slots=slots, extra=extra)


def aligned(lines: Sequence[tuple[str, str]]) -> str:
    """Labels and values in two columns."""
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"  {label:<{width}}  {value}" for label, value in lines)


def size(number: float) -> str:
    """Bytes for people: 1.50 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.2f} {unit}"
        number /= 1024
    return f"{number:,.2f} GiB"


def available_memory(device: torch.device) -> int:
    """Bytes that a new allocation may take on the device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return psutil.virtual_memory().available


def is_out_of_memory(error: Exception) -> bool:
    """Whether an error of torch says that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
