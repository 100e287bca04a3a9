"""The rollout engine: continuous batching over rows of a fixed-capacity, evicting cache.

    while sequences are waiting or running:
        admit    fork a prefilled prompt into every free row
        decode   one token for every running row
        evict    rows whose slots are full keep `budget` of them
        finish   collect rows that stopped

A sequence's tokens, log-probs and evictions depend on its own prefix and random stream alone, never on the rows beside it.
The model is any Hugging Face causal LM; its weights are used in place, so after an update the next rollout needs no copy.

    engine = Engine(model, compressor="rkv", budget=512, interval=128, rows=64)
    trajectories = engine.generate(prompts, group_size=8, sampling=Sampling(max_new_tokens=4096), seed=0)
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attention import Feed, use_attention
from ..cache import SlotCache
from ..cache.trace import never, trace_dtype
from ..compressors import Compressor, make
from ..errors import NonFiniteLogits, OutOfMemory, RolloutInterrupted, SparseRLError
from ..models import ModelShape
from ..plan import Plan, cache_shape, make_plan, size
from ..records import Trajectory
from ..streams import stream_key
from .decode import RowState, decode_step
from .evict import evict
from .sampling import Sampling, sample

_DENSE_SPAN = 64  # a dense cache is read in multiples of this many slots


@dataclass(frozen=True)
class Waiting:
    """A prompt with the members of its group that have no row yet."""

    prompt_index: int
    prompt: list[int]
    prompt_stream: int
    streams: deque[tuple[int, int]]  # (sample index, random stream)


@dataclass(frozen=True)
class Prefilled:
    """A prompt in the scratch row, ready to be forked."""

    waiting: Waiting
    logits: Tensor  # [V] after its last token
    used: int  # slots left after compression
    trace: Tensor  # [L, H, P]


@dataclass
class Row:
    """A running sequence, as the host knows it without asking the device."""

    waiting: Waiting
    sample_index: int
    used: int  # slots in use
    fed: int  # tokens fed


class Engine:
    def __init__(
        self,
        model: nn.Module,
        compressor: str | Compressor = "rkv",
        budget: int = 512,
        interval: int = 128,
        rows: int = 8,
        max_tokens: int | None = None,
        prefill_chunk: int = 512,
    ):
        """`max_tokens` (prompt + new) sizes the rows of `dense`, which otherwise takes them from its first call."""
        if rows < 1 or prefill_chunk < 1:
            raise SparseRLError(f"rows {rows} and prefill_chunk {prefill_chunk} must both be at least 1.")
        self.model = model
        self.shape = ModelShape.of(model.config, next(model.parameters()).dtype)
        self.compressor = make(compressor).bind(budget, interval)
        self.rows, self.max_tokens, self.prefill_chunk = rows, max_tokens, prefill_chunk
        self.version = 0  # optimizer steps behind the weights; stamped on trajectories
        self.cache: SlotCache | None = None
        self.scratch: SlotCache | None = None
        self.widths = _widths(rows)
        if self.compressor.evicts or max_tokens:
            self._allocate(prompt_tokens=1, new_tokens=max(1, (max_tokens or 2) - 1))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def plan(self, prompt_tokens: int, new_tokens: int) -> Plan:
        """What a call with prompts of up to `prompt_tokens` takes."""
        return make_plan(
            self.shape,
            self.compressor,
            rows=self.rows,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            weight_bytes=sum(p.nbytes for p in self.model.parameters()),
            capacity=self.cache.capacity if self.cache else None,
            prefill_chunk=self.prefill_chunk,
        )

    def kv_bytes_saved(self, trajectories: Sequence[Trajectory]) -> float:
        """1 - allocated bytes of the cache / bytes that dense rows of the longest trajectory would take."""
        longest = max(len(t.tokens) for t in trajectories)
        allocated = self.cache.nbytes + self.scratch.nbytes
        return 1 - allocated / (self.rows * longest * self.cache.shape.kv_bytes_per_token)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int = 1,
        sampling: Sampling | None = None,
        seed: int = 0,
        progress: bool = False,
        on_finish: Callable[[Trajectory], None] | None = None,
    ) -> list[Trajectory]:
        """`group_size` completions of every prompt (lists of token ids), prompt by prompt.

        `on_finish` is called with each trajectory the moment it is complete; it must not run the model. On Ctrl-C, what was finished
        is in the `RolloutInterrupted` that is raised.
        """
        sampling = sampling or Sampling()
        prompts = [_token_list(p) for p in prompts]
        self._check(prompts, group_size, sampling)
        if not prompts:
            return []
        longest = max(map(len, prompts))
        finished: list[Trajectory] = []
        try:
            self._allocate(longest, sampling.max_new_tokens)
            with self._rollout_mode(), _progress_bar(progress, len(prompts) * group_size, self.cache) as bar:
                call = _Call(self, prompts, group_size, sampling, seed, longest)
                for trajectory in call.run(bar):
                    finished.append(trajectory)
                    if on_finish is not None:
                        on_finish(trajectory)
        except KeyboardInterrupt:
            raise RolloutInterrupted(_in_order(finished)) from None
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            raise self._out_of_memory(self.plan(longest, sampling.max_new_tokens), str(error)) from error
        return _in_order(finished)

    def _check(self, prompts: list[list[int]], group_size: int, sampling: Sampling) -> None:
        if group_size < 1:
            raise SparseRLError(f"group_size is {group_size}; it must be at least 1.")
        vocabulary, new = self.shape.vocabulary, sampling.max_new_tokens
        for i, prompt in enumerate(prompts):
            if not prompt:
                raise SparseRLError(f"prompt {i} is empty; give at least one token, such as the beginning-of-sequence token.")
            if min(prompt) < 0 or max(prompt) >= vocabulary:
                raise SparseRLError(
                    f"prompt {i} holds token id {min(prompt) if min(prompt) < 0 else max(prompt)}, outside the vocabulary of {vocabulary}; "
                    "was it made with another tokenizer?"
                )
            if len(prompt) > self.shape.context:
                raise SparseRLError(
                    f"prompt {i} has {len(prompt)} tokens, beyond the model's context of {self.shape.context}; "
                    f"shorten it by {len(prompt) - self.shape.context}."
                )
            limit = self.shape.hard_context
            if limit is not None and len(prompt) + new > limit:
                raise SparseRLError(
                    f"prompt {i} has {len(prompt)} tokens and {new} new ones may follow, but this model's RoPE rescales beyond {limit} "
                    f"positions, which would falsify keys already cached; set max_new_tokens to at most {limit - len(prompt)}."
                )
            self.compressor.check_prompt(len(prompt))

    def _allocate(self, prompt_tokens: int, new_tokens: int) -> None:
        """Rows once; the scratch row anew when a longer prompt comes."""
        needed = self.compressor.capacity(prompt_tokens, new_tokens)
        if self.cache is not None and needed > self.cache.capacity:
            raise SparseRLError(
                f"rows of this {self.compressor.name} engine hold {self.cache.capacity} tokens, but the call needs {needed} "
                f"({prompt_tokens} prompt + {new_tokens} new); make the engine with Engine(..., max_tokens={needed})."
            )
        shape, grow = cache_shape(self.shape, self.compressor), self.scratch is None or self.scratch.capacity < prompt_tokens
        plan = self.plan(prompt_tokens, new_tokens)
        new_bytes = (0 if self.cache else plan.cache_bytes) + (plan.scratch_bytes if grow else 0)
        if new_bytes > _available_memory(self.device):
            raise self._out_of_memory(plan, f"{size(new_bytes)} are needed, {size(_available_memory(self.device))} are free")
        if self.cache is None:
            self.cache = SlotCache(shape, self.rows, needed, self.device)
        if grow:
            self.scratch = SlotCache(shape, 1, prompt_tokens, self.device)

    def _out_of_memory(self, plan: Plan, why: str) -> OutOfMemory:
        held = sum(p.nbytes for p in self.model.parameters()) + sum(c.nbytes for c in (self.cache, self.scratch) if c)
        memory = _available_memory(self.device) + held
        return OutOfMemory(f"out of memory ({why.splitlines()[0]}).\n{plan.text(memory)}\n{plan.largest_that_fits(memory)}")

    @contextmanager
    def _rollout_mode(self) -> Iterator[None]:
        """Eval mode and the slots attention, given back afterwards module by module."""
        training = [module for module in self.model.modules() if module.training]
        try:
            for module in training:
                module.training = False
            with torch.no_grad(), use_attention(self.model, "slots"):
                yield
        finally:
            for module in training:
                module.training = True


class _Call:
    """One `generate`: what is waiting, what runs in which row."""

    def __init__(self, engine: Engine, prompts: list[list[int]], group_size: int, sampling: Sampling, seed: int, longest: int):
        self.engine, self.sampling = engine, sampling
        self.model, self.cache, self.scratch, self.compressor = engine.model, engine.cache, engine.scratch, engine.compressor
        self.device = self.cache.keys.device
        self.state = RowState.empty(self.cache, longest + sampling.max_new_tokens, sampling.max_new_tokens)
        self.stop_ids = torch.tensor(_stop_ids(self.model, sampling), dtype=torch.int64, device=self.device)
        self.waiting = _queue(prompts, group_size, seed)
        self.prefilled: Prefilled | None = None
        self.running: dict[int, Row] = {}
        self.num_tokens = 0  # sampled so far

    def run(self, bar) -> Iterator[Trajectory]:
        start = time.perf_counter()
        while self.waiting or self.running:
            self.admit()
            yield from self.finish(bar)
            if self.running:
                self.decode()
                self.evict()
                yield from self.finish(bar)
            bar.show(len(self.running), self.num_tokens, time.perf_counter() - start)

    def admit(self) -> None:
        """Fork the prefilled prompt into free rows; prefill the next one when its group is complete."""
        free = (row for row in range(self.engine.rows) if row not in self.running)
        while self.waiting and (row := next(free, None)) is not None:
            if self.prefilled is None:
                self.prefilled = self.prefill(self.waiting[0])
            ready, waiting = self.prefilled, self.waiting[0]
            sample_index, stream = waiting.streams.popleft()
            fed = len(waiting.prompt)
            self.cache.fork(self.scratch, 0, row, ready.used)
            self.state.start(row, ready.used, fed, stream, ready.trace)
            self.running[row] = Row(waiting, sample_index, ready.used, fed)
            here = slice(row, row + 1)
            token, logprob = sample(ready.logits[None], self.state.stream[here], self.state.count[here], self.sampling)
            self.state.record(here, token, logprob, self.stop_ids)
            if not waiting.streams:
                self.waiting.popleft()
                self.prefilled = None

    def prefill(self, waiting: Waiting) -> Prefilled:
        """Feed a prompt densely, in chunks; compress it once if it fills a row."""
        prompt = torch.tensor(waiting.prompt, device=self.device)[None]  # [1, P]
        fed, scratch = prompt.shape[1], self.scratch
        index = torch.arange(fed, device=self.device)[None]
        for start in range(0, fed, self.engine.prefill_chunk):
            part = slice(start, min(start + self.engine.prefill_chunk, fed))
            feed = Feed(scratch, index[:, part], index[:, part], span=part.stop, first=start == 0)
            logits = self.model(
                input_ids=prompt[:, part], position_ids=index[:, part], use_cache=False, logits_to_keep=1, slots_feed=feed
            ).logits[0, -1]
            missed = set(range(scratch.shape.layers)) - feed.layers_seen
            if missed:
                raise SparseRLError(
                    f"{type(self.model).__name__}: layers {sorted(missed)} did not use the replaced attention: not supported."
                )
        state_dtype = self.state.trace.dtype
        trace = torch.full((scratch.shape.layers, scratch.shape.heads, fed), _never(state_dtype), dtype=state_dtype, device=self.device)
        if not self.compressor.evicts or fed < self.cache.capacity:
            return Prefilled(waiting, logits, fed, trace)
        one = torch.zeros(1, dtype=torch.int64, device=self.device)
        evicted = evict(scratch, self.compressor, one, fed, one + fed, one + waiting.prompt_stream, one + fed)
        trace.scatter_(2, evicted[:, 0].long(), torch.full_like(evicted[:, 0], fed).to(state_dtype))
        return Prefilled(waiting, logits, self.compressor.budget, trace)

    def decode(self) -> None:
        width = next(w for w in reversed(self.engine.widths) if w > max(self.running))
        decode_step(self.model, self.cache, self.state, width, self.span(), self.sampling, self.stop_ids)
        for row in self.running.values():
            row.used += 1
            row.fed += 1

    def span(self) -> int:
        """Slots to read. All of a fixed row, so that the arithmetic is the same whoever runs beside; of a dense row what is in use."""
        if self.compressor.evicts:
            return self.cache.capacity
        longest = max(row.used for row in self.running.values()) + 1
        return min(self.cache.capacity, -(-longest // _DENSE_SPAN) * _DENSE_SPAN)

    def evict(self) -> None:
        """Every row whose slots are full keeps `budget` of them."""
        if not self.compressor.evicts:
            return
        full = [i for i, row in self.running.items() if row.used == self.cache.capacity]
        if not full:
            return
        rows = torch.tensor(full, device=self.device)
        fed = torch.tensor([self.running[i].fed for i in full], device=self.device)
        prompts = torch.tensor([len(self.running[i].waiting.prompt) for i in full], device=self.device)
        evicted = evict(self.cache, self.compressor, rows, self.cache.capacity, fed, self.state.stream[rows], prompts)
        self.state.record_evictions(rows, fed, evicted)
        self.state.used[rows] = self.compressor.budget
        for i in full:
            self.running[i].used = self.compressor.budget

    def finish(self, bar) -> Iterator[Trajectory]:
        """Collect the rows that are done; move the others together when the batch drains."""
        done, count = self.state.done.tolist(), self.state.count.tolist()
        self.check_finite(count)
        for row in [row for row in self.running if done[row]]:
            yield self.collect(row, count[row])
            bar.update()
        self.draw_together()

    def check_finite(self, count: list[int]) -> None:
        last = (self.state.count - 1).clamp(min=0)[:, None]
        finite = self.state.logprobs.gather(1, last)[:, 0].isfinite().tolist()
        for row, sequence in self.running.items():
            if not finite[row]:
                raise NonFiniteLogits(
                    f"the logits of row {row} (prompt {sequence.waiting.prompt_index}, sample {sequence.sample_index}) are not finite at step "
                    f"{count[row] - 1} (token {sequence.fed}); look for NaN or infinite weights, or use bfloat16 or float32 instead of float16."
                )

    def collect(self, row: int, count: int) -> Trajectory:
        sequence = self.running.pop(row)
        self.num_tokens += count
        prompt = torch.tensor(sequence.waiting.prompt)
        response = self.state.tokens[row, :count].cpu()
        logprobs = self.state.logprobs[row, :count].cpu()
        stopped = bool(torch.isin(response[-1], self.stop_ids.cpu()))
        return Trajectory(
            tokens=torch.cat([prompt, response]),
            num_prompt_tokens=len(prompt),
            sampler_logprobs=torch.cat([torch.zeros(len(prompt)), logprobs]),
            trace=self.state.trace_of(row, len(prompt) + count),
            finish_reason="stop" if stopped else "length",
            prompt_index=sequence.waiting.prompt_index,
            sample_index=sequence.sample_index,
            version=self.engine.version,
        )

    def draw_together(self) -> None:
        """With nothing left to admit, fill low rows from high ones, so that the tail runs narrow."""
        if self.waiting or not self.running:
            return
        width = next(w for w in reversed(self.engine.widths) if w >= len(self.running))
        free = (row for row in range(width) if row not in self.running)
        for row in sorted(row for row in self.running if row >= width):
            to = next(free)
            self.cache.fork(self.cache, row, to, self.running[row].used)
            self.state.move(row, to)
            self.running[to] = self.running.pop(row)


def _queue(prompts: list[list[int]], group_size: int, seed: int) -> deque[Waiting]:
    """Random streams are keyed by (seed, prompt, how often it has occurred, sample number): repeated prompts differ."""
    occurred: Counter[tuple[int, ...]] = Counter()
    queue = deque()
    for i, prompt in enumerate(prompts):
        occurrence = occurred[tuple(prompt)]
        occurred[tuple(prompt)] += 1
        streams = deque((sample, stream_key(seed, prompt, occurrence, sample)) for sample in range(group_size))
        queue.append(Waiting(i, prompt, stream_key(seed, prompt), streams))
    return queue


def _widths(rows: int) -> list[int]:
    """Row counts a decode step may run at: halved down to 4, in multiples of 4.

    From four rows on, matrix products on the CPU round every row the same way whatever the number of rows.
    """
    widths = [rows]
    while (half := -(-widths[-1] // 8) * 4) < widths[-1]:
        widths.append(half)
    return widths


def _stop_ids(model: nn.Module, sampling: Sampling) -> list[int]:
    if sampling.stop_ids is not None:
        return list(sampling.stop_ids)
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def _never(dtype: torch.dtype) -> int:
    return -1 if dtype == torch.int16 else never(dtype)  # int16 carries uint16's bits


def _token_list(prompt) -> list[int]:
    return prompt.tolist() if isinstance(prompt, Tensor) else [int(token) for token in prompt]


def _in_order(trajectories: list[Trajectory]) -> list[Trajectory]:
    return sorted(trajectories, key=lambda t: (t.prompt_index, t.sample_index))


def _available_memory(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    import psutil

    return psutil.virtual_memory().available


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


class _progress_bar:
    """tqdm with tokens/s, busy rows and the cache's bytes; silent when off."""

    def __init__(self, on: bool, total: int, cache: SlotCache):
        self.on, self.total, self.cache, self.bar, self.shown = on, total, cache, None, 0.0

    def __enter__(self):
        if self.on:
            from tqdm import tqdm

            self.bar = tqdm(total=self.total, desc="rollout", unit="traj")
        return self

    def __exit__(self, *exception):
        if self.bar is not None:
            self.bar.close()

    def update(self) -> None:
        if self.bar is not None:
            self.bar.update()

    def show(self, busy: int, tokens: int, seconds: float) -> None:
        if self.bar is not None and (seconds - self.shown > 0.2 or not busy):
            self.shown = seconds
            self.bar.set_postfix_str(f"{tokens / seconds:,.0f} tok/s, {busy}/{self.cache.rows} rows, KV {size(self.cache.nbytes)}")
