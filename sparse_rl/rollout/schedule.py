"""The loop of a rollout: continuous batching over the rows of an evicting cache.

    while sequences are waiting or running:
        admit    prefill prompts together, fork them into every free row
        decode   sample some tokens in every running row
        feed     feed given tokens to rows that continue after a pause (only in live_loop.py)
        evict    rows whose slots are full keep `budget` of them
        finish   sync with the device and collect rows that stopped

The host syncs once a round: after every step on a CPU, after 8 to 16 steps on a GPU. Between syncs it knows how many
slots each row uses, and a row that fills up within a round waits for the end of the round. A sequence's tokens,
log-probs and evictions depend only on its own prefix and random stream, never on the rows beside it: to the bit on a
CPU, and on a GPU as far as matrix products round the same way at every row count.

All rollouts share `Loop`. `GenerateCall` frees a row when it stops; the loop of an open engine (live_loop.py) holds it,
because its conversation may continue.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..errors import NonFiniteLogits
from ..kernels import ops
from ..kernels.modules import known_modules
from ..kernels.twins_sample import room_of
from ..models import check_sliding_windows, own_stop_ids
from ..records import Trajectory
from ..signals import uninterrupted
from .collect import collect
from .evict import alike, check_fine, evict
from .phases import Phases
from .prefill import Reader
from .progress import ProgressBar
from .queue import Prefilled, Row, Waiting, make_queue
from .sampling import Sampling, sample
from .sent import sent
from .sync import Synced, sync

if TYPE_CHECKING:
    from .engine import Engine

OnTokens = Callable[[int, int, list[int]], None]  # (prompt index, sample index, tokens just sampled)

_DENSE_SPAN = 64  # rows that are not evicted are read in multiples of this many slots
_TOGETHER = 64  # rows whose first tokens are sampled, or whose records are copied to the host, at a time


class Loop:
    """The loop that all rollouts share: it knows what waits and what runs in which row."""

    def __init__(self, engine: Engine, sampling: Sampling | None):
        """sampling: settings of all rows; None: every row has its own (`RowState.settings`)"""
        self.engine, self.model, self.compressor = engine, engine.model, engine.compressor
        self.cache, self.scratch, self.state = engine.cache, engine.scratch, engine.state
        self.capacity = engine.capacity  # slots at which a row is full
        self.device = self.cache.device
        self.decoder = engine.decoder(sampling)
        self.known = known_modules(self.model) if ops.rules(self.device).fuses_prompts else []
        self.phases = Phases(self.device)
        self.row_counts = row_counts(engine.rows)
        self.waiting: deque[Waiting] = deque()
        self.ready: deque[Prefilled] = deque()
        self.ready_logits: Tensor  # [N, V] after the last token of the prompts in the scratch cache
        self.ready_trace: Tensor | None  # [N, L, H, P] of prompts, if some of them were compressed
        self.running: dict[int, Row] = {}
        self.fine = torch.ones((), dtype=torch.bool, device=self.device)  # evictions since the last sync
        self.used: list[int] = []  # slots in use at the last sync, of all rows
        self.num_tokens = self.num_steps = 0  # tokens sampled; decode steps run
        self.synced = 0  # of the steps, those until the last sync
        self.tells = True  # whether the host looks at tokens before their sequence has ended
        self.num_waits = 0  # steps in which a row was full, summed over rows

    def round(self) -> None:
        self.engine.rounds += 1
        if self.engine.stopped:
            raise KeyboardInterrupt
        if self.admit():
            self.finish()  # some sequences end with their first token
        if self.running:
            self.decode()
        self.feed()
        if evictable := self.evictable():
            self.evict(evictable)
            self.finish()

    # The following methods differ between calls and open engines.

    def free_rows(self) -> list[int]:
        return [row for row in range(self.engine.rows) if row not in self.running]

    def feed(self) -> None:
        """Feed given tokens to rows that have some."""

    def replies(self, rows: list[Row]) -> Tensor | None:
        """The number of the reply that each token was given in, from 1; 0: none. int64 [N, T]; None without
        conversations
        """
        return None

    def evictable(self) -> dict[int, Row]:
        """The rows that may have to be evicted."""
        return self.running

    def begin_rows(self, rows: list[int]) -> None:
        """Called with rows that were just started, before their first tokens are drawn."""

    def moved(self, row: int, to: int) -> None:
        """Called when a running row was moved."""

    def draw(self, rows: list[int], which: Tensor, logits: Tensor) -> None:
        """Sample the first tokens of sequences or turns. which: `rows` as a tensor [n]; logits [n, V]"""
        raise NotImplementedError

    def before_waiting(self) -> None:
        """Called when a GPU has been given work and the host is about to wait for it."""

    def tell(self, row: int, sequence: Row, tokens: list[int], logprobs: list[float]) -> None:
        """Report what a row has sampled since the last sync."""

    def end(self, rows: list[int], count: list[int]) -> None:
        """Called with rows that have ended. count: tokens sampled, by row"""
        raise NotImplementedError

    # ---------------------------------------------------------------------------------------------------------- admit

    def admit(self) -> bool:
        """Fork prefilled prompts into free rows; prefill the next ones when their groups are complete.

        -> whether any was admitted
        """
        free = deque(self.free_rows())
        busy = len(self.running)
        while free and (self.waiting or self.ready):
            if not self.ready:
                with self.phases("prefill"):
                    together = min(self.scratch.rows, len(self.waiting))
                    self.ready = self.prefill([self.waiting.popleft() for _ in range(together)])
            admitted = []
            while free and self.ready:
                waiting = self.ready[0].waiting
                admitted.append((self.ready[0], *waiting.streams.popleft(), free.popleft()))
                if not waiting.streams:
                    self.ready.popleft()
            with self.phases("prefill"):
                self.start(admitted)
        return len(self.running) > busy

    def prefill(self, prompts: list[Waiting]) -> deque[Prefilled]:
        """Feed prompts to the scratch cache, and compress those that are too long."""
        if self.scratch.states is not None:
            prompts = sorted(prompts, key=lambda w: len(w.prompt))  # only those of one length are fed together
        engine = self.engine
        reader = Reader(
            self.model, self.compressor, engine.prefill_chunk, self.state.trace, engine.recorder, self.known
        )
        read = reader.read(self.scratch, prompts)
        check_sliding_windows(self.model.config, self.scratch.sliding_window)
        self.ready_logits, self.ready_trace = read.logits, read.trace
        self.fine &= read.fine
        return deque(Prefilled(w, i, read.used[i], read.routes_of(i, len(w.prompt))) for i, w in enumerate(prompts))

    def start(self, admitted: list[tuple[Prefilled, int, int, int]]) -> None:
        """Start new sequences, given as (prompt, sample index, stream, row): fork prompts and sample the
        first tokens.
        """
        columns = [
            (ready.row, row, ready.used, len(ready.waiting.prompt), stream) for ready, _, stream, row in admitted
        ]
        source, to, used, fed, stream = sent(columns, self.device).T.contiguous()
        self.cache.fork(self.scratch, source, to, max(ready.used for ready, *_ in admitted))
        self.state.start(to, used, fed, stream)
        if self.ready_trace is not None:
            self.state.trace[to, :, :, : self.ready_trace.shape[3]] = self.ready_trace[source]
        for ready, sample_index, own_stream, row in admitted:
            self.running[row] = Row(
                ready.waiting,
                sample_index,
                ready.used,
                len(ready.waiting.prompt),
                prompt_routes=ready.routes,
                stream=own_stream,
            )
        rows = [row for *_, row in admitted]
        self.begin_rows(rows)
        for i in range(0, len(rows), _TOGETHER):
            part = slice(i, i + _TOGETHER)
            self.draw(rows[part], to[part], self.ready_logits[source[part]])

    # --------------------------------------------------------------------------------------------------------- decode

    def decode(self) -> None:
        """Sample some tokens in every running row."""
        width = next(w for w in reversed(self.row_counts) if w > max(self.running))
        steps = self.steps_this_round()
        with self.phases("decode"):
            self.decoder.run(width, steps, self.span())
        self.num_steps += steps
        for row in self.running.values():
            advanced = min(steps, self.capacity - row.used)
            row.used += advanced
            row.fed += advanced
            self.num_waits += 0 if self.compressor.folds else steps - advanced

    def steps_this_round(self) -> int:
        """Steps until the next sync: until the first row is full, within bounds, and no more than any row will run."""
        least, most = self.engine.poll
        least = min(least, max(1, self.compressor.interval // 16))  # a full row waits half a round on average
        until_full = most if self.compressor.folds else self.capacity - max(row.used for row in self.running.values())
        until_end = max(row.limit - row.count for row in self.running.values())
        return max(1, min(most, max(least, until_full), until_end))

    def span(self) -> int:
        """How many slots to read: the whole capacity of fixed rows, or the used part of growing rows.

        So the arithmetic of a fixed row does not depend on other rows.
        """
        if self.compressor.evicts_response or self.compressor.folds:
            return self.capacity
        longest = max(row.used for row in self.running.values()) + self.engine.poll[1]
        return min(self.capacity, -(-longest // _DENSE_SPAN) * _DENSE_SPAN)

    # ---------------------------------------------------------------------------------------------------------- evict

    def evict(self, rows_of: dict[int, Row]) -> None:
        """Evict every row whose slots are full down to the budget."""
        full = [i for i, row in rows_of.items() if row.used == self.capacity]
        if not full or not self.compressor.evicts_response:
            return
        extra = max(self.cache.shape.extra, default=0)
        for group in alike([rows_of[i].fed for i in full], self.capacity, extra):
            self.evict_alike(rows_of, [full[place] for place in group])

    def evict_alike(self, rows_of: dict[int, Row], full: list[int]) -> None:
        """Evict full rows whose layers use equally many slots."""
        with self.phases("evict"):
            columns = [(i, rows_of[i].fed, len(rows_of[i].waiting.prompt)) for i in full]
            rows, fed, prompts = sent(columns, self.device).T.contiguous()
            stream = self.state.stream[rows]
            live = self.state.used[rows] == self.capacity  # the other rows ended before they were full
            replies = self.replies([rows_of[i] for i in full]) if self.compressor.uses_given else None
            self.fine &= evict(
                self.cache, self.compressor, rows, self.capacity, fed, stream, prompts, self.state.trace, live, replies,
                tokens=rows_of[full[0]].fed,
            )  # fmt: skip
            self.state.used[rows] = torch.where(live, self.compressor.least_budget, self.state.used[rows])
        for i in full:
            rows_of[i].used = self.compressor.least_budget

    # --------------------------------------------------------------------------------------------------------- finish

    def finish(self) -> None:
        """Sync with the device once a round, collect finished rows, and near the end move the others together."""
        now = self.sync()
        for row, sequence in self.running.items():
            if (new := now.count[row] - sequence.count) > 0 and self.tells:
                assert new <= len(now.tokens[row])
                self.tell(row, sequence, now.tokens[row][:new], now.logprobs[row][:new])
            self.num_tokens += new
            sequence.count = now.count[row]
        self.end([row for row in self.running if now.done[row]], now.count)
        self.compact_rows()

    def sync(self) -> Synced:
        """Wait for the device, and take in what it did; raises if a row or an eviction went wrong."""
        first = [self.running[row].count if row in self.running else 0 for row in range(self.engine.rows)]
        most = 1 + self.num_steps - self.synced if self.tells else 0  # a first token, and one a step
        now = sync(self.state, self.fine, first, most, self.before_waiting)
        self.synced, self.used = self.num_steps, now.used
        check_fine(all(now.fine), self.capacity, self.compressor)
        if self.compressor.folds:
            message = f"a row of {self.capacity} slots is full, though its chunks are folded"
            assert not self.state.live_and_full().any(), message
        for row, sequence in self.running.items():
            if not now.finite[row]:
                who = f"row {row} (prompt {sequence.waiting.prompt_index}, sample {sequence.sample_index})"
                step, token = now.count[row] - 1, len(sequence.waiting.prompt) + now.count[row] - 1
                raise NonFiniteLogits(
                    f"the logits of {who} are not finite at step {step} (token {token}); "
                    "look for NaN or infinite weights, or use bfloat16 or float32 instead of float16."
                )
        return now

    def compact_rows(self) -> None:
        """When nothing is left to admit, move high rows into free low ones, so that steps get narrower."""
        if self.waiting or self.ready or not self.running:
            return
        free = self.free_rows()
        may_run = sorted([*self.running, *free])
        width = next(w for w in reversed(self.row_counts) if w > may_run[len(self.running) - 1])
        high = sorted(row for row in self.running if row >= width)
        if not high:
            return
        free = free[: len(high)]
        source, to = sent([high, free], self.device)
        self.cache.fork(self.cache, source, to, max(self.running[row].used for row in high))
        self.state.move(source, to)
        for row, low in zip(high, free, strict=True):
            self.running[low] = self.running.pop(row)
            self.moved(row, low)


class GenerateCall(Loop):
    """One call of `Engine.generate`: every row is freed when its sequence ends."""

    def __init__(
        self,
        engine: Engine,
        prompts: list[list[int]],
        wanted: list[list[int]],
        sampling: Sampling,
        seed: int,
        on_tokens: OnTokens | None = None,
    ):
        """`wanted`: for every prompt, the numbers of the samples to draw"""
        super().__init__(engine, sampling)
        self.sampling, self.on_tokens, self.stop_ids = sampling, on_tokens, self.decoder.stop_ids
        self.waiting, self.tells = make_queue(prompts, wanted, seed), on_tokens is not None
        self.deliver: Callable[[Trajectory], None]

    def run(self, deliver: Callable[[Trajectory], None], bar: ProgressBar) -> None:
        start = time.perf_counter()
        for _ in self.rounds(deliver):
            bar.show(len(self.running), self.num_tokens, time.perf_counter() - start)

    def rounds(self, deliver: Callable[[Trajectory], None]) -> Iterator[None]:
        """Do rounds, pausing after each, and hand every trajectory to `deliver` as soon as it is known
        to be finished.
        """
        self.deliver = deliver
        self.state.begin(self.sampling.max_new_tokens, self.capacity)
        while self.waiting or self.ready or self.running:
            self.round()
            yield

    def begin_rows(self, rows: list[int]) -> None:
        for row in rows:
            self.running[row].limit = self.sampling.max_new_tokens

    def draw(self, rows: list[int], which: Tensor, logits: Tensor) -> None:
        stream, step = self.state.stream[which], self.state.count[which]
        room = room_of(self.state, self.sampling.records is not None) or 0
        tokens, logprobs, kept = sample(logits, stream, step, self.sampling, room)
        self.state.record(which, tokens, logprobs, self.stop_ids, torch.ones_like(which, dtype=torch.bool), kept)

    def tell(self, row: int, sequence: Row, tokens: list[int], logprobs: list[float]) -> None:
        if self.on_tokens is not None:
            self.on_tokens(sequence.waiting.prompt_index, sequence.sample_index, tokens)

    def end(self, rows: list[int], count: list[int]) -> None:
        for part in [rows[i : i + _TOGETHER] for i in range(0, len(rows), _TOGETHER)]:
            collected = self.collect(part, [count[row] for row in part])
            for row, trajectory in zip(part, collected, strict=True):
                with uninterrupted():  # a trajectory is either still running or delivered, never in between
                    del self.running[row]
                    self.deliver(trajectory)

    def collect(self, rows: list[int], counts: list[int]) -> list[Trajectory]:
        """The trajectories of finished rows."""
        sequences, version = [self.running[row] for row in rows], self.engine.version
        folding = self.decoder.folding
        supports = self.sampling.records
        return collect(rows, sequences, counts, self.state, self.stop_ids, folding, supports, version, self.phases)


def row_counts(rows: int) -> list[int]:
    """The row counts at which a decode step may run: halved down to four, in multiples of four (see `forward`)."""
    widths = [rows]
    while (half := -(-widths[-1] // 8) * 4) < widths[-1]:
        widths.append(half)
    return widths


def stop_ids_of(model: nn.Module, sampling: Sampling) -> Tensor:
    """Token ids that end a response, on the model's device."""
    return torch.tensor(stop_list(model, sampling), dtype=torch.int64, device=next(model.parameters()).device)


def stop_list(model: nn.Module, sampling: Sampling) -> list[int]:
    return list(own_stop_ids(model) if sampling.stop_ids is None else sampling.stop_ids)
