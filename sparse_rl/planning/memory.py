"""The memory plan: what a rollout will take, known before it runs, from the model's config alone.

Weights, cache, scratch, trace and recorded tokens are exact. The working set (logits, prefill activations, eviction copies) is an
estimate from above, and 5 % of the memory is left to the allocator.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..cache import CacheShape
from ..cache.slots import chunk_bytes
from ..cache.trace import trace_dtype
from ..compressors import Compressor
from ..compressors.rkv import BLOCK_ELEMENTS
from ..distributed.world import BUCKET
from ..errors import SparseRLError
from ..models import ModelShape, head_chunk

_ALLOCATOR_SHARE = 0.05


@dataclass(frozen=True)
class Plan:
    compressor: str
    rule: str  # what a row holds, in words
    evicts: bool  # down to the budget
    folds: bool  # into beacons
    budget: int  # slots right after an eviction; prompt and beacons where chunks are folded
    beside_budget: (
        int  # slots of a row beyond these: the interval, the new tokens where responses stay whole, or the chunk
    )
    capacity: int
    rows: int
    prompt_tokens: int  # the longest prompt
    new_tokens: int
    weight_bytes: int
    row_bytes: int  # one row of the cache: keys, values, feed indices, and what the compressor records
    kv_bytes_per_token: int  # keys and values alone, in any cache
    slot_bytes: int  # the part of it that every slot takes
    most_prefill_rows: int  # prompts prefilled together, where there are as many rows
    prefill_chunk: int  # prompt tokens fed at a time
    scratch_row_bytes: int  # where a prompt is before it is forked
    trace_row_bytes: int  # nothing where chunks are folded: where beacons stand says it all
    chunk_row_bytes: int  # where they stand, and what a row knows of its open chunk
    token_row_bytes: int  # sampled tokens and their log-probs
    sampling_row_bytes: int  # estimate: logits, on a CPU their softmax and sum, and an entry that moves
    prefill_token_bytes: int  # estimate: activations
    eviction_slot_bytes: int  # estimate: one layer gathered, compacted, scored
    eviction_bytes: int  # estimate: at most that much is copied at a time
    prompt_logits_bytes: int  # after a prompt that waits in the scratch
    attention_token_bytes: int  # estimate: attention of a prompt's token that is written out
    scoring_bytes: int  # estimate: scores of an eviction, whatever the rows
    first_row_bytes: int  # estimate: a first token, sampled in torch; at most 64 rows at a time

    @property
    def cache_bytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def dense_row_bytes(self) -> int:
        """Keys and values of a whole sequence, as a dense cache would hold them."""
        return (self.prompt_tokens + self.new_tokens) * self.kv_bytes_per_token

    @property
    def prefill_rows(self) -> int:
        return min(self.rows, self.most_prefill_rows)

    @property
    def scratch_bytes(self) -> int:
        return self.prefill_rows * self.scratch_row_bytes

    @property
    def record_bytes(self) -> int:
        """Trace or chunks, tokens and log-probs of all rows."""
        return self.rows * (self.trace_row_bytes + self.chunk_row_bytes + self.token_row_bytes)

    @property
    def working_bytes(self) -> int:
        """An estimate from above: prefill, sampling and eviction as if at the same time."""
        tokens = min(self.prefill_chunk, self.prefill_rows * self.prompt_tokens)
        prefill = (
            tokens * (self.prefill_token_bytes + self.attention_token_bytes)
            + self.prefill_rows * self.prompt_logits_bytes
        )
        together = min(3 * self.rows * self.capacity * self.kv_bytes_per_token, self.eviction_bytes)
        a_row = self.sampling_row_bytes + self.capacity * self.eviction_slot_bytes
        first = min(self.rows, 64) * self.first_row_bytes
        return prefill + first + self.scoring_bytes + together + self.rows * a_row

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
        """As many, had every row the keys and values of a whole sequence, and nothing to evict."""
        records = ("trace_row_bytes", "chunk_row_bytes")
        evicting = ("eviction_slot_bytes", "eviction_bytes", "scoring_bytes", "attention_token_bytes")
        dense = replace(self, row_bytes=self.dense_row_bytes, **dict.fromkeys(records + evicting, 0))
        return dense.rows_that_fit(memory)

    def largest_that_fits(self, memory: int) -> str:
        """A sentence naming the largest setting that fits."""
        rows = self.rows_that_fit(memory)
        if rows >= 1:
            return f"At this capacity use rows={rows}."
        capacity = _largest(lambda slots: self.with_rows(1).with_capacity(slots).total_bytes, memory)
        if self.evicts and capacity > self.beside_budget:
            return f"Not even one row fits: with rows=1, use budget={capacity - self.beside_budget}."
        if self.folds and capacity > self.prompt_tokens:
            return (
                f"Not even one row fits: with rows=1 there is room for {capacity} of {self.capacity} slots; "
                "generate less, or fold more tokens into a beacon."
            )
        if not self.evicts and capacity > self.prompt_tokens:
            return f"Not even one row fits: with rows=1 there is room for {capacity} tokens; generate less, or use a compressor."
        return f"The weights and the working set leave nothing of {size(memory)}: use a smaller model, dtype or prompt."

    def lines(self, memory: int | None = None) -> list[tuple[str, str]]:
        saved = 1 - self.row_bytes / self.dense_row_bytes
        against = f"{saved:.0%} less" if saved >= 0 else f"{-saved:.0%} more"
        lines = [
            ("weights", size(self.weight_bytes)),
            (f"KV per row, dense ({self.prompt_tokens} + {self.new_tokens} tokens)", size(self.dense_row_bytes)),
            (
                f"KV per row, {self.compressor} ({self.rule} = {self.capacity} slots)",
                f"{size(self.row_bytes)} ({against})",
            ),
            (f"cache, {self.rows} rows", size(self.cache_bytes)),
            (f"prefill scratch, {self.prefill_rows} prompts", size(self.scratch_bytes)),
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
        return [(f"{name} per row", size(a_row)), (f"{name}, {self.rows} rows", size(self.rows * a_row))]

    def text(self, memory: int | None = None) -> str:
        lines = self.lines(memory)
        width = max(len(label) for label, _ in lines)
        return "\n".join(f"  {label:<{width}}  {value}" for label, value in lines)


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
) -> Plan:
    """`capacity` of rows that are there already; the other three are the engine's, by default what it chooses on a GPU."""
    if rows < 1 or prompt_tokens < 1 or new_tokens < 1:
        raise SparseRLError(
            f"rows {rows}, prompt tokens {prompt_tokens} and new tokens {new_tokens} must all be at least 1."
        )
    cache = cache_shape(shape, compressor)
    capacity = capacity or compressor.capacity(prompt_tokens, new_tokens)
    tokens = prompt_tokens + new_tokens
    prefill_chunk = prefill_chunk or default_prefill_chunk(on_gpu)
    prefill_rows = prefill_rows or default_prefill_rows(prefill_chunk, prompt_tokens, on_gpu)
    sampled = shape.vocabulary * (4 + 4 + 8 + 8)  # a row's logits in fp32, softmax, sum
    evicts, folds = compressor.has_budget, compressor.folds
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
        kv_bytes_per_token=cache.kv_bytes_per_token,
        slot_bytes=cache.slot_bytes,
        most_prefill_rows=prefill_rows,
        prefill_chunk=prefill_chunk,
        scratch_row_bytes=cache.row_bytes(prompt_tokens),
        trace_row_bytes=0 if folds else shape.layers * shape.heads * tokens * trace_dtype(tokens).itemsize,
        chunk_row_bytes=new_tokens + 8 + 8 + 4 if folds else 0,
        token_row_bytes=new_tokens * (8 + 4),
        sampling_row_bytes=shape.vocabulary * shape.dtype.itemsize
        + (0 if on_gpu else sampled)
        + (cache.kv_bytes_per_token if folds else 0),
        prefill_token_bytes=(6 * shape.hidden + 3 * shape.intermediate + 2 * shape.query_heads * shape.head_dim)
        * shape.dtype.itemsize,
        eviction_slot_bytes=(2 if on_gpu else 3) * cache.kv_bytes_per_token // cache.layers if evicts else 0,
        eviction_bytes=int(compressor.copies * chunk_bytes("cuda" if on_gpu else "cpu")) if evicts else 0,
        prompt_logits_bytes=shape.vocabulary * shape.dtype.itemsize if on_gpu else 0,
        attention_token_bytes=8 * shape.query_heads * prompt_tokens if compressor.uses_mass else 0,
        scoring_bytes=3 * 4 * BLOCK_ELEMENTS if evicts else 0,
        first_row_bytes=sampled if on_gpu else 0,
    )


def _largest(total_bytes: Callable[[int], int], memory: int) -> int:
    """The largest number whose plan fits, with some left to the allocator; 0 if none does."""
    limit = memory * (1 - _ALLOCATOR_SHARE)
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
    """Prompts they belong to, at most. On a CPU these go one at a time, so that what they round to does not depend on their company."""
    return max(1, chunk // prompt_tokens) if on_gpu else 1


@dataclass(frozen=True)
class TrainingPlan:
    """What a training step takes on every process: rollout and update take turns, so of their working sets the larger counts.

    Rollouts that run ahead are beside the update: both count.
    """

    rollout: Plan
    optimizer_bytes: int  # fp32 masters (unless the weights are fp32), two moments, gradients; this process's part where they are divided
    reference_bytes: int
    update_bytes: int  # estimate: activations of a micro-batch, and the head's chunk
    eval_bytes: int  # the dense cache of held-out evaluations
    student_bytes: int = 0  # weights of all students, and their optimizers'
    learner_bytes: int = (
        0  # the learner's own weights, where the sampler has a whole copy for itself and shards do not hold them
    )
    divided_by: int = 1  # processes among which the learner's weights, gradients and moments are divided
    ahead: bool = False

    @property
    def total_bytes(self) -> int:
        plan = self.rollout
        held = plan.total_bytes - plan.working_bytes + self.student_bytes + self.learner_bytes
        working = plan.working_bytes + self.update_bytes if self.ahead else max(plan.working_bytes, self.update_bytes)
        return held + self.optimizer_bytes + self.reference_bytes + max(working, self.eval_bytes)

    def fits(self, memory: int) -> bool:
        """With some left to the allocator."""
        return self.total_bytes <= memory * (1 - _ALLOCATOR_SHARE)

    def text(self, memory: int | None = None) -> str:
        plan = self.rollout
        part = f", one of {self.divided_by} parts" if self.divided_by > 1 else ""
        turns = (
            "evaluation takes turns with rollout and update"
            if self.ahead
            else "rollout, update and evaluation take turns"
        )
        lines = [
            *plan.lines()[:-1],
            (f"optimizer: fp32 masters, moments, gradients{part}", size(self.optimizer_bytes)),
            *([("the learner's own weights", size(self.learner_bytes))] if self.learner_bytes else []),
            ("reference model", size(self.reference_bytes)),
            *([("students: weights and optimizers", size(self.student_bytes))] if self.student_bytes else []),
            ("update: activations of a micro-batch (estimate)", size(self.update_bytes)),
            ("held-out evaluation: dense cache", size(self.eval_bytes)),
            (f"total ({turns})", size(self.total_bytes)),
        ]
        if memory is not None:
            lines.append(("memory", f"{size(memory)}: {'fits' if self.fits(memory) else 'does not fit'}"))
        width = max(len(label) for label, _ in lines)
        return "\n".join(f"  {label:<{width}}  {value}" for label, value in lines)


def make_training_plan(
    rollout: Plan,
    shape: ModelShape,
    *,
    trained: int,
    micro_batch_tokens: int,
    checkpointing: bool,
    reference: bool,
    evaluates: bool,
    shadow: bool = False,
    distills: bool = False,
    students: int = 0,
    student_trained: int = 0,
    processes: int = 1,
    shard: bool = False,
    ahead: bool = False,
) -> TrainingPlan:
    """`trained`: parameters that are trained; `micro_batch_tokens` may be less than one trajectory, which then goes alone.

    `shadow`: attention under a trace, by segments; `distills`: the other view goes through the model too. `students` are copies of the
    model of which `student_trained` parameters are trained each; they learn one after the other, in micro-batches of the same size.

    `shard`: the learner is divided among the processes, in fp32, and every one of them also has whole weights to sample with; a layer is
    whole while it runs, with what is around the layers. Otherwise gradients are summed in buckets. `ahead`: sampler and learner each have
    weights, and work at the same time.
    """
    divided = shard and processes > 1
    item = shape.dtype.itemsize
    tokens = max(micro_batch_tokens, rollout.prompt_tokens + rollout.new_tokens)
    layer = tokens * (10 * shape.hidden + 5 * shape.intermediate + 4 * shape.query_heads * shape.head_dim) * item
    kept = tokens * shape.hidden * item
    lists = (
        4 * (2 + rollout.budget // rollout.beside_budget) + 3 * 8
    )  # per token and head: the trace and what segments keep; finding them
    traces = (
        tokens * shape.heads * (shape.layers * lists + 2 * 4 * shape.head_dim) if shadow else 0
    )  # and fp32 gradients of a layer's K, V
    activations = shape.layers * kept + 2 * layer if checkpointing else shape.layers * layer
    activations = (2 if distills else 1) * activations + traces
    head = (
        head_chunk(shape.vocabulary) * shape.vocabulary * (item + 4 * 4)
        + 2 * shape.vocabulary * shape.hidden * item
        + 3 * kept
    )
    dense_rows = max(1, rollout.cache_bytes // rollout.dense_row_bytes)
    per_parameter = 12 if shape.dtype == torch.float32 else 16
    around = shape.vocabulary * shape.hidden
    parameters = rollout.weight_bytes // item
    frozen = 0 if trained == parameters else parameters  # under adapters
    gathered = (2 * around + 2 * (parameters - around) // shape.layers) * (item + 4)  # and their gradients
    summed = 4 * max(BUCKET, around)  # the largest bucket
    beside = 0 if processes == 1 else gathered if divided else summed
    return TrainingPlan(
        rollout=rollout,
        optimizer_bytes=(16 * trained + 4 * frozen) // processes if divided else trained * per_parameter,
        learner_bytes=rollout.weight_bytes if ahead and not divided else 0,
        divided_by=processes if divided else 1,
        ahead=ahead,
        student_bytes=students * (rollout.weight_bytes + student_trained * per_parameter),
        reference_bytes=rollout.weight_bytes if reference else 0,
        update_bytes=activations + head + beside if divided else max(activations + head, beside),
        eval_bytes=min(dense_rows, rollout.rows) * rollout.dense_row_bytes if evaluates else 0,
    )


def cache_shape(shape: ModelShape, compressor: Compressor) -> CacheShape:
    """A model's cache with what the compressor asks to be recorded."""
    return replace(shape.cache_shape(), num_queries=compressor.num_queries, mass=compressor.uses_mass)


def size(number: float) -> str:
    """Bytes for people: 1.50 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.2f} {unit}"
        number /= 1024
    return f"{number:,.2f} GiB"


def available_memory(device: torch.device) -> int:
    """Bytes a new allocation may take there now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return psutil.virtual_memory().available


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
