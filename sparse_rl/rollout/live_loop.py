"""The loop of an open engine: a row whose sequence stopped is held, is fed what its conversation is given, and samples
further.

A row is free, running, feeding or held. If another conversation needs a held row, it is parked in host memory and
restored later with the same bits. If too many are parked, the oldest keeps only its tokens and its trace, from which
its row is rebuilt, equal up to rounding.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..cache import Trace
from ..errors import SparseRLError
from ..kernels import ops
from ..kernels.twins_sample import room_of
from .conversation import Conversation, Parked
from .decode import as_trace
from .feed import Chunk, Feeder
from .queue import Row, Waiting
from .sampling import sample
from .schedule import Loop
from .sent import sent

if TYPE_CHECKING:
    from .engine import Engine


_COPIED = 6e9  # bytes that a GPU and pageable host memory exchange in a second


class LiveLoop(Loop):
    def __init__(
        self,
        engine: Engine,
        max_tokens: int,
        hold: int,
        hold_seconds: float | None,
        park: int,
        patience: float | None = 0.0,
    ):
        """hold: the most rows that are held; hold_seconds: for how long; park: the most rows in host memory; patience:
        seconds for which a held row is not given to another conversation; None: until holding it has cost as much as
        moving it to host memory and back, which stops all rows, while holding it stops one
        """
        super().__init__(engine, None)
        if patience is None:
            moving = 0.0 if self.device.type == "cpu" else 2 * self.cache.nbytes / engine.rows / _COPIED
            patience = moving * engine.rows
        if not isinstance(patience, int | float) or not 0 <= patience < math.inf:
            raise SparseRLError(f"patience is {patience!r:.60}; it must be a number of seconds of at least 0, or None.")
        self.patience = patience
        self.max_tokens, self.hold, self.hold_seconds, self.park_at_most = max_tokens, hold, hold_seconds, park
        self.queue: deque[Conversation] = deque()  # conversations that need a row
        self.alive: dict[int, Conversation] = {}  # by number
        self.feeding: dict[int, Row] = {}
        self.held: dict[int, Row] = {}  # the longest held first
        self.parked: dict[int, Conversation] = {}  # by number, the longest parked first
        self.news: dict[int, Conversation] = {}  # by number: conversations with news in this round
        self.matched: list[int] = []  # rows in which a stop string was found
        self.beginning: list[Conversation] = []  # those that go on, whose rows do not have the turn's settings yet
        self.meanwhile: Callable[[], None] = lambda: None  # what the host does while a GPU works
        together, most = engine.prefill_chunk, engine.storage.fed_rows
        self.feeder = Feeder(self.model, self.cache, self.scratch, together, most, engine.recorder, self.known)
        self.state.begin(max_tokens, self.capacity)

    @property
    def idle(self) -> bool:
        if self.running or self.feeding:
            return False
        return not (self.queue and (self.free_rows() or self.yielding()))

    def of(self, row: Row) -> Conversation:
        return self.alive[row.sample_index]

    def replies(self, rows: list[Row]) -> Tensor | None:
        """By token, the number of the reply it was given in; tokens that the host has not seen yet were sampled."""
        table = torch.zeros(len(rows), max(row.fed for row in rows), dtype=torch.int64)
        for line, row in zip(table, rows, strict=True):
            conversation = self.of(row)
            given = torch.tensor(conversation.given)[: len(line)]
            given[: len(conversation.prompt)] = False
            starts = given & ~given.roll(1)  # the first token is of the prompt
            line[: len(given)] = starts.long().cumsum(0) * given
        return table.to(self.device) if table.any() else None

    def round(self) -> None:
        self.news = {}
        self.phases.parts.clear()  # nobody asks an open engine where its time went
        if self.hold_seconds is not None:
            before = time.monotonic() - self.hold_seconds
            self.park([row for row, sequence in self.held.items() if self.of(sequence).since <= before])
        if not ops.rules(self.device).on_gpu:
            self.meanwhile()  # the device would not work meanwhile
        super().round()

    def before_waiting(self) -> None:
        self.meanwhile()

    # ---------------------------------------------------------------------------------------------------------- admit

    def free_rows(self) -> list[int]:
        taken = self.running.keys() | self.feeding.keys() | self.held.keys()
        return [row for row in range(self.engine.rows) if row not in taken]

    def yielding(self) -> list[int]:
        """Held rows that may be given to others, the longest held first."""
        before = time.monotonic() - self.kept_for
        return [row for row, sequence in self.held.items() if self.of(sequence).since <= before]

    @property
    def kept_for(self) -> float:
        """Seconds for which a held row is not given to another conversation."""
        return self.patience if self.hold_seconds is None else min(self.patience, self.hold_seconds)

    def until_yield(self) -> float:
        """Seconds until a waiting conversation may take a held row; infinite if none waits or no row is held."""
        if not self.queue or not self.held:
            return math.inf
        oldest = min(self.of(sequence).since for sequence in self.held.values())
        return max(0.0, oldest + self.kept_for - time.monotonic())

    def admit(self) -> bool:
        """Give rows to the conversations that need one, in their order; held rows make room."""
        missing = len(self.queue) - len(self.free_rows())
        self.park(self.yielding()[: max(0, missing)])
        free = self.free_rows()
        chosen = [self.queue.popleft() for _ in range(min(len(free), len(self.queue)))]
        back = [conversation for conversation in chosen if conversation.sequence is not None]
        for conversation, row in zip(back, free):
            self.bring_back(conversation, row)
        self.begin_extended()
        alike: dict[tuple, Waiting] = {}
        for conversation in chosen:
            if conversation.sequence is None:
                key = (conversation.prompt_stream, tuple(conversation.prompt))
                new = Waiting(conversation.number, conversation.prompt, conversation.prompt_stream, deque())
                alike.setdefault(key, new).streams.append((conversation.number, conversation.stream))
        self.waiting = deque(alike.values())
        return super().admit()

    def begin_rows(self, rows: list[int]) -> None:
        for row in rows:
            conversation = self.of(self.running[row])
            conversation.row, conversation.sequence = row, self.running[row]
            conversation.status, conversation.version = "running", self.engine.version
            if (routes := self.running[row].prompt_routes) is not None:
                conversation.routes.append(routes.cpu())
        self.begin_turns([self.of(self.running[row]) for row in rows])

    def begin_turns(self, conversations: list[Conversation]) -> None:
        """Put the settings of conversations into their rows."""
        if not conversations:
            return
        settings = self.state.settings
        assert settings is not None
        which = sent([conversation.row for conversation in conversations], self.device)
        for conversation in conversations:
            assert conversation.sequence is not None
            most = min(conversation.sampling.max_new_tokens, self.max_tokens - len(conversation.tokens))
            conversation.sequence.limit = conversation.count + most
        ways = [conversation.sampling for conversation in conversations]
        stops = settings.stop_ids.shape[1]
        columns: list[tuple[Tensor, list]] = [
            (self.state.limit, [c.sequence.limit for c in conversations if c.sequence is not None]),
            (settings.temperature, [way.temperature for way in ways]),
            (settings.top_k, [way.top_k for way in ways]),
            (settings.top_p, [way.top_p for way in ways]),
            (settings.records, [way.records is not None for way in ways]),
            (settings.stop_ids, [c.stop_ids + [-1] * (stops - len(c.stop_ids)) for c in conversations]),
        ]
        for tensor, values in columns:
            tensor[which] = sent(values, self.device, tensor.dtype)

    def begin_extended(self) -> None:
        """Let conversations that go on begin their turns, all of them together."""
        going = [conversation for conversation in self.beginning if conversation.row is not None]  # others were dropped
        self.beginning = []
        self.begin_turns(going)
        if rows := [conversation.row for conversation in going if not conversation.ahead]:
            self.state.done[sent(rows, self.device)] = False

    def draw(self, rows: list[int], which: Tensor, logits: Tensor) -> None:
        """Sample the first tokens of turns, those with the same settings together."""
        settings = self.state.settings
        assert settings is not None
        by_way: dict[tuple, list[int]] = {}
        for i, row in enumerate(rows):
            way = self.of(self.running[row]).sampling
            by_way.setdefault((way.temperature, way.top_k, way.top_p, way.records), []).append(i)
        for places in by_way.values():
            way = self.of(self.running[rows[places[0]]]).sampling
            part = sent(places, self.device)
            some = which[part]
            room = room_of(self.state, way.records is not None) or 0
            drawn = sample(logits[part], self.state.stream[some], self.state.count[some], way, room)
            tokens, logprobs, kept = drawn
            live = torch.ones_like(some, dtype=torch.bool)
            self.state.record(some, tokens, logprobs, settings.stop_ids[some], live, kept)

    # ----------------------------------------------------------------------------------------------------------- feed

    def extend(self, conversation: Conversation, tokens: list[int]) -> None:
        """Continue a conversation that stopped, after feeding it `tokens`."""
        conversation.ahead = [conversation.tokens[-1], *tokens] if tokens else []
        conversation.give(tokens)
        conversation.finish_reason, conversation.matched, conversation.way = None, None, "extended"
        if conversation.row is None:
            self.queue.append(conversation)
        else:
            self.go_on(conversation, self.held.pop(conversation.row))

    def go_on(self, conversation: Conversation, sequence: Row) -> None:
        """Continue a row that was held or brought back: feed it what was given, or sample further."""
        row, conversation.status = conversation.row, "running"
        assert row is not None
        self.beginning.append(conversation)
        (self.feeding if conversation.ahead else self.running)[row] = sequence

    def feed(self) -> None:
        """Feed a chunk to every row that has given tokens, until the row is full or the turn is fed and its first token
        is drawn.
        """
        if not self.feeding:
            return
        with self.phases("prefill"):
            chunks = []
            for row, sequence in self.feeding.items():
                ahead = self.of(sequence).ahead
                chunks.append(Chunk(row, ahead[: self.capacity - sequence.used], sequence.used, sequence.fed))
            for group in self.feeder.groups(chunks):
                self.feed_chunks(group)

    def feed_chunks(self, chunks: list[Chunk]) -> None:
        fed = self.feeder.feed(chunks)
        ended = []
        for i, chunk in enumerate(chunks):
            sequence = self.feeding[chunk.row]
            conversation = self.of(sequence)
            sequence.used, sequence.fed = chunk.used + len(chunk.tokens), chunk.fed + len(chunk.tokens)
            conversation.ahead = conversation.ahead[len(chunk.tokens) :]
            if fed.routes is not None:
                conversation.routes.append(fed.routes[i].cpu())
            conversation.routed = conversation.count  # the token that was sampled last was fed first
            if not conversation.ahead:
                ended.append(i)
                self.running[chunk.row] = self.feeding.pop(chunk.row)
        self.state.used[fed.rows], self.state.index[fed.rows] = fed.used, fed.index
        if ended:
            rows, logits = fed.rows, fed.logits
            if len(ended) < len(chunks):
                part = sent(ended, self.device)
                rows, logits = rows[part], logits[part]
            self.state.done[rows] = False
            self.draw([chunks[i].row for i in ended], rows, logits)

    def evictable(self) -> dict[int, Row]:
        return {**self.running, **self.feeding}

    # --------------------------------------------------------------------------------------------------------- finish

    def span(self) -> int:
        """Read all slots, whatever rows use, so that a growing row rounds the same way beside any others."""
        return self.capacity

    def steps_this_round(self) -> int:
        """One step if there are stop strings, so that no row is fed what follows one."""
        if any(self.of(sequence).stop_strings for sequence in self.running.values()):
            return 1
        return super().steps_this_round()

    def tell(self, row: int, sequence: Row, tokens: list[int], logprobs: list[float]) -> None:
        conversation = self.of(sequence)
        conversation.receive(tokens, logprobs)
        self.news[conversation.number] = conversation
        if conversation.text is not None and conversation.text.add(tokens):
            conversation.matched = conversation.text.matched
            self.matched.append(row)

    def end(self, rows: list[int], count: list[int]) -> None:
        if early := [row for row in self.matched if row in self.running and row not in rows]:
            self.state.done[sent(early, self.device)] = True
        self.matched = []
        for row in [*rows, *early]:
            sequence = self.running.pop(row)
            conversation = self.of(sequence)
            sequence.used, sequence.fed = self.used[row], len(conversation.tokens) - 1
            by_stop = conversation.matched is not None or conversation.tokens[-1] in conversation.stop_ids
            conversation.finish_reason = "stop" if by_stop else "length"
            self.write_down(conversation, row, conversation.count, count[row])
            conversation.count, conversation.since = count[row], time.monotonic()
            conversation.status = "stopped"
            self.news[conversation.number] = conversation
            self.held[row] = sequence
        self.park(list(self.held)[: max(0, len(self.held) - self.hold)])

    def write_down(self, conversation: Conversation, row: int, first: int, stop: int) -> None:
        """Copy what was recorded beside the tokens of a turn: support and routes. Others may get the row."""
        if conversation.sampling.records is not None:
            assert self.state.kept is not None
            recorded = (tensor[row, first:stop] for tensor in self.state.kept.tensors)
            counts, margins, ids = (tensor.to("cpu", copy=True) for tensor in recorded)
            listed = ids[torch.arange(ids.shape[1]) < counts[:, None]] if ids.shape[1] else None
            conversation.supports.append((counts, margins, listed))
        if self.state.routes is not None:
            routes = self.state.routes[row, conversation.routed : stop - 1]
            conversation.routes.append(routes.to("cpu", copy=True))
            conversation.routed = stop - 1

    def moved(self, row: int, to: int) -> None:
        self.of(self.running[to]).row = to

    # ------------------------------------------------------------------------------------------------- rows come and go

    def trace_of(self, conversation: Conversation) -> Trace:
        """The trace of a conversation that stopped, wherever it is."""
        length = len(conversation.tokens)
        if conversation.row is not None:
            trace = self.state.traces_of([conversation.row], [length])[0]
        elif (parked := conversation.parked) is not None:
            trace = as_trace(parked.trace[..., :length], self.state.slots, parked.ties)
        else:
            assert conversation.trace is not None
            trace = conversation.trace
        if not conversation.routes:
            return trace
        routes = torch.cat([*conversation.routes, conversation.routes[0][:1]])
        routes[-1] = torch.arange(routes.shape[-1])  # the last token was never fed
        return replace(trace, routes=routes.view(torch.uint16) if routes.dtype == torch.int16 else routes)

    def park(self, rows: Iterable[int]) -> None:
        """Move held rows to host memory; the longest parked conversations keep only their traces."""
        for row in rows:
            sequence = self.held.pop(row)
            conversation = self.of(sequence)
            slots = self.cache.take(row, sequence.used, sequence.fed)
            trace = self.state.trace[row, ..., : len(conversation.tokens)]
            parked = Parked(slots, trace.to("cpu", copy=True), self.state.ties_of([row])[0])
            conversation.parked, conversation.row = parked, None
            self.parked[conversation.number] = conversation
        while len(self.parked) > self.park_at_most:
            conversation = self.parked.pop(next(iter(self.parked)))
            conversation.trace = self.trace_of(conversation)
            conversation.parked = None

    def bring_back(self, conversation: Conversation, row: int) -> None:
        """Restore a conversation into a free row, from its copy in host memory or from its tokens and its trace."""
        sequence = conversation.sequence
        assert sequence is not None
        fed = sequence.fed
        if conversation.parked is not None:
            del self.parked[conversation.number]
            self.cache.put(row, conversation.parked.slots)
            trace, ties = conversation.parked.trace.to(self.device), conversation.parked.ties
        else:
            assert conversation.trace is not None
            evicted_at = conversation.trace.evicted_at.to(torch.int64)
            trace = torch.where(evicted_at > fed, self.state.never, evicted_at).to(self.device, self.state.trace.dtype)
            ties, conversation.way = conversation.trace.ties, "restored"
            with self.phases("prefill"):
                known = evicted_at.to(self.device)
                sequence.used = self.feeder.recall(row, conversation.tokens[:fed], known, ties)
        if self.state.ties is not None and ties is not None:
            self.state.ties.put(row, ties)
        self.state.trace[row] = self.state.never
        self.state.trace[row, ..., : trace.shape[-1]] = trace
        fields = (self.state.stream, self.state.count, self.state.used, self.state.index, self.state.token)
        values = (conversation.stream, conversation.count, sequence.used, fed, conversation.tokens[fed])
        for tensor, value in zip(fields, values, strict=True):
            tensor[row] = value
        conversation.parked = conversation.trace = None
        conversation.row = row
        self.go_on(conversation, sequence)

    def drop(self, conversation: Conversation) -> None:
        """Free a conversation's row and drop its copies."""
        row = conversation.row
        if row is not None:
            for rows in (self.running, self.feeding, self.held):
                rows.pop(row, None)
            self.state.done[row] = True
        elif conversation in self.queue:
            self.queue.remove(conversation)
        self.parked.pop(conversation.number, None)
        conversation.row = conversation.sequence = conversation.parked = conversation.trace = None
        del self.alive[conversation.number]
