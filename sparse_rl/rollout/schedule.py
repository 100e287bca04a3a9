"""The loop of a rollout: continuous batching over the rows of an evicting cache.

    while sequences are waiting or running:
        admit    fork a prefilled prompt into every free row
        decode   one token for every running row
        evict    rows whose slots are full keep `budget` of them
        finish   collect rows that stopped

A sequence's tokens, log-probs and evictions depend on its own prefix and random stream alone, never on the rows beside it.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..attention import Feed
from ..errors import NonFiniteLogits, uninterrupted
from ..models import check_sliding_windows
from ..records import Trajectory
from ..streams import stream_key
from .decode import RowState, decode_step, forward
from .evict import evict
from .progress import ProgressBar
from .sampling import Sampling, sample

if TYPE_CHECKING:
    from .engine import Engine

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


class Rollout:
    """One call of `Engine.generate`: what is waiting, what runs in which row."""

    def __init__(self, engine: Engine, prompts: list[list[int]], group_size: int, sampling: Sampling, seed: int, longest: int):
        self.engine, self.sampling = engine, sampling
        self.model, self.cache, self.scratch, self.compressor = engine.model, engine.cache, engine.scratch, engine.compressor
        self.device = self.cache.keys.device
        self.state = RowState.empty(self.cache, longest + sampling.max_new_tokens, sampling.max_new_tokens)
        self.stop_ids = torch.tensor(_stop_ids(self.model, sampling), dtype=torch.int64, device=self.device)
        self.row_counts = row_counts(engine.rows)
        self.waiting = _queue(prompts, group_size, seed)
        self.prefilled: Prefilled | None = None
        self.running: dict[int, Row] = {}
        self.num_tokens = 0  # sampled so far

    def run(self, deliver: Callable[[Trajectory], None], bar: ProgressBar) -> None:
        """Hand every trajectory to `deliver` the moment it is finished."""
        start = time.perf_counter()
        while self.waiting or self.running:
            self.admit()
            self.finish(deliver)
            if self.running:
                self.decode()
                self.evict()
                self.finish(deliver)
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
            self.num_tokens += 1
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
            logits = forward(self.model, prompt[:, part], feed)[0]
        check_sliding_windows(self.model.config, scratch.sliding_window)
        trace = self.state.trace.new_full((scratch.shape.layers, scratch.shape.heads, fed), self.state.never)
        if not self.compressor.evicts or fed < self.cache.capacity:
            return Prefilled(waiting, logits, fed, trace)
        one = torch.zeros(1, dtype=torch.int64, device=self.device)
        evicted = evict(scratch, self.compressor, one, fed, one + fed, one + waiting.prompt_stream, one + fed)
        trace.scatter_(2, evicted[:, 0].long(), torch.full_like(evicted[:, 0], fed).to(trace.dtype))
        return Prefilled(waiting, logits, self.compressor.budget, trace)

    def decode(self) -> None:
        width = next(w for w in reversed(self.row_counts) if w > max(self.running))
        decode_step(self.model, self.cache, self.state, width, self.span(), self.sampling, self.stop_ids)
        self.num_tokens += len(self.running)
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

    def finish(self, deliver: Callable[[Trajectory], None]) -> None:
        """Collect the rows that are done; move the others together when the batch drains."""
        done, count = self.state.done.tolist(), self.state.count.tolist()
        self.check_finite(count)
        for row in [row for row in self.running if done[row]]:
            with uninterrupted():  # a trajectory is either still running or delivered, never in between
                deliver(self.collect(row, count[row]))
        self.draw_together()

    def check_finite(self, count: list[int]) -> None:
        last = (self.state.count - 1).clamp(min=0)[:, None]
        finite = self.state.logprobs.gather(1, last)[:, 0].isfinite().tolist()
        for row, sequence in self.running.items():
            if not finite[row]:
                who = f"row {row} (prompt {sequence.waiting.prompt_index}, sample {sequence.sample_index})"
                raise NonFiniteLogits(
                    f"the logits of {who} are not finite at step {count[row] - 1} (token {sequence.fed}); "
                    "look for NaN or infinite weights, or use bfloat16 or float32 instead of float16."
                )

    def collect(self, row: int, count: int) -> Trajectory:
        sequence = self.running.pop(row)
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
        width = next(w for w in reversed(self.row_counts) if w >= len(self.running))
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


def row_counts(rows: int) -> list[int]:
    """Row counts a decode step may run at: halved down to four, in multiples of four (see `forward`)."""
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
