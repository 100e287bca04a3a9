"""The thread that owns the model: it steps the open engines and hands tokens to the requests that wait for them.

Web handlers run in an event loop. They submit requests and await events; the model never runs there. Between two
rounds the thread also does other work that needs the model, such as scoring a prompt or loading weights (`Desk.work`).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..errors import SparseRLError
from ..records import Trajectory
from ..rollout import Engine, Sampling
from ..rollout.conversation import Conversation
from ..rollout.live import LiveEngine, QueueFull
from .protocol import Refusal
from .seen import Seen, seen_at_end, seen_by

Result = TypeVar("Result")
_NEWS = 2000  # events a second at most, of all answers together: each is a line to write, in the model's process
_LOOK = 0.2  # seconds between two looks at what an answer still sees


@dataclass(frozen=True)
class Event:
    """An update about one answer: new tokens, or its end."""

    tokens: list[int]  # sampled since the last event
    logprobs: list[float]  # of them
    finish_reason: str | None = None  # stop or length: this is the last event
    matched: str | None = None  # the stop string that ended it
    trajectory: Trajectory | None = None  # of an answer that ended
    version: int = 0  # optimizer steps behind the weights
    seen: Seen | None = None  # what every head still sees, of an answer that is watched
    error: Refusal | None = None


@dataclass
class Place:
    """One of the engines, with its settings and its open conversations."""

    engine: Engine
    open: Callable[[Engine], LiveEngine]
    live: LiveEngine | None = None


@dataclass(eq=False)
class Ticket:
    """A running answer that a request waits for."""

    place: str
    conversation: Conversation
    events: asyncio.Queue[Event]
    loop: asyncio.AbstractEventLoop
    told: int  # tokens of the conversation that its events have had
    watch: bool  # whether events say what is seen
    keep: bool = False  # whether the conversation may go on when the answer has ended
    looked: float = 0.0  # when they last said it
    heard: float = 0.0  # when the last event was


def _put(told: list[tuple[Ticket, Event]]) -> None:
    """In the event loop of these tickets"""
    for ticket, event in told:
        ticket.events.put_nowait(event)


def _alike(tokens: list[int], others: list[int]) -> int:
    """With how many equal tokens two lists begin."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (one, other) in pairs if one != other), min(len(tokens), len(others)))


@contextmanager
def _refusing() -> Iterator[None]:
    """Tell a client what an open engine refuses."""
    try:
        yield
    except QueueFull as error:
        raise Refusal(429, str(error), "rate_limit_error", code="queue_full", retry_after=1) from error
    except SparseRLError as error:
        raise Refusal(400, str(error)) from error


@dataclass
class Counts:
    """The counts that /metrics reports."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cancelled: int = 0
    failed: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # by reason
    turns: dict[str, int] = field(default_factory=dict)  # of named conversations, by the way in which they began


class Desk:
    def __init__(self, places: dict[str, Place]):
        """places: by the name of the model that requests ask for; the first one serves requests that name none."""
        self.places = places
        self.counts = Counts()
        self._tickets: dict[tuple[str, int], Ticket] = {}
        self._jobs: list[tuple[Callable[[], Any], concurrent.futures.Future]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self.paused = False
        self._left = False  # somebody was given up since the last look
        self._told: list[tuple[Ticket, Event]] = []  # events that were not handed over yet, the oldest first
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._ready: concurrent.futures.Future = concurrent.futures.Future()

    def start(self) -> None:
        """Open the engines; raises what they raise."""
        self._thread.start()
        self._ready.result()

    def end(self) -> None:
        """End all answers, and the thread, soon."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def stop(self) -> None:
        """The same, now."""
        self.end()
        self._thread.join()

    def most_waiting(self, place: str) -> int | None:
        """How many answers may wait; None: the engine is not open"""
        live = self.places[place].live
        return None if live is None else live.most_waiting

    @property
    def stopping(self) -> bool:
        return self._stopping

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        return sum(ticket.conversation.status == "running" for ticket in list(self._tickets.values()))

    @property
    def waiting(self) -> int:
        return sum(ticket.conversation.status == "waiting" for ticket in list(self._tickets.values()))

    @property
    def rows_in_use(self) -> int:
        return sum(place.live.rows_in_use for place in self.places.values() if place.live is not None)

    @property
    def open(self) -> int:
        return sum(place.live.num_open for place in self.places.values() if place.live is not None)

    # ------------------------------------------------------------------------------------------ from the event loop

    def submit(
        self,
        place: str,
        prompt: list[int],
        sampling: Sampling,
        seed: int,
        sample: int,
        stop_strings: list[str],
        watch: bool = False,
        keep: bool = False,
    ) -> Ticket:
        """Ask for an answer; `events` has its news. keep: `extend` may follow"""
        live = self._open_at(place)
        with self._wake, _refusing():
            conversation = live.submit(prompt, sampling, seed, sample=sample, stop_strings=stop_strings)
            return self._ticket(place, conversation, len(prompt), watch, keep)

    def extend(
        self, old: Ticket, given: list[int], sampling: Sampling, stop_strings: list[str], watch: bool = False
    ) -> Ticket:
        """Go on with a conversation that was kept, in its row, or in one that is made from its trace."""
        live, conversation = self._open_at(old.place), old.conversation
        with self._wake, _refusing():
            live.extend(conversation, given, sampling, stop_strings=stop_strings)
            return self._ticket(old.place, conversation, len(given), watch, True)

    def renew(
        self,
        old: Ticket,
        prompt: list[int],
        sampling: Sampling,
        seed: int,
        stop_strings: list[str],
        watch: bool = False,
    ) -> Ticket:
        """Begin a conversation that was kept anew: `prompt` is all that is read, under a new trace."""
        live, conversation = self._open_at(old.place), old.conversation
        keep = _alike(conversation.tokens, prompt)
        with self._wake, _refusing():
            new = live.renew(conversation, prompt[keep:], sampling, keep=keep, seed=seed, stop_strings=stop_strings)
            return self._ticket(old.place, new, len(prompt), watch, True)

    def _open_at(self, place: str) -> LiveEngine:
        live = self.places[place].live
        if live is None or live.closed or self._stopping:
            raise Refusal(503, "the server is stopping or starting; try again.", "server_error", retry_after=5)
        return live

    def _ticket(self, place: str, conversation: Conversation, read: int, watch: bool, keep: bool) -> Ticket:
        """read: tokens that are fed before the answer"""
        queue, loop = asyncio.Queue(), asyncio.get_running_loop()
        ticket = Ticket(place, conversation, queue, loop, len(conversation.tokens), watch, keep)
        self._tickets[place, conversation.number] = ticket
        self.counts.requests += 1
        self.counts.prompt_tokens += read
        self._wake.notify()
        return ticket

    def forget(self, ticket: Ticket) -> None:
        """End a conversation that was kept."""
        with self._wake:
            self._give_up(ticket)

    def _give_up(self, ticket: Ticket) -> None:
        live = self.places[ticket.place].live
        if live is not None and ticket.conversation.status != "ended":
            with suppress(SparseRLError):  # an engine that was closed meanwhile has given up all of them
                live.cancel(ticket.conversation)
        self._left = True
        self._wake.notify()

    async def events(self, ticket: Ticket) -> AsyncIterator[Event]:
        """The news of an answer until it ends; whoever stops reading cancels it."""
        ended = False
        try:
            while not ended:
                event = await ticket.events.get()
                if event.error is not None:
                    raise event.error
                ended = event.finish_reason is not None
                yield event
        finally:
            if not ended:
                self.cancel(ticket)

    def cancel(self, ticket: Ticket) -> None:
        with self._wake:
            if self._tickets.pop((ticket.place, ticket.conversation.number), None) is None:
                return
            self.counts.cancelled += 1
            self._give_up(ticket)

    async def work(self, job: Callable[[], Result]) -> Result:
        """Run a job in the thread of the model, between two rounds."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._wake:
            if self._stopping:
                raise Refusal(503, "the server is stopping.", "server_error")
            self._jobs.append((job, future))
            self._wake.notify()
        return await asyncio.wrap_future(future)

    # ------------------------------------------------------------------------------------------- the thread's own

    def _run(self) -> None:
        try:
            for place in self.places.values():
                place.live = place.open(place.engine)
        except BaseException as error:
            self._close()
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            while self._work_there_is():
                self._do_jobs()
                for name, place in self.places.items():
                    if place.live is not None and not place.live.idle:
                        self._round(name, place)
        finally:
            self._close()

    def _work_there_is(self) -> bool:
        """Wait for something to do. -> False: stop"""
        with self._wake:
            while not self._stopping and not self._jobs and not self._left and (self.paused or self._idle()):
                self._hand_over()
                self._wake.wait()
            self._left = False
            return not self._stopping

    def _idle(self) -> bool:
        return all(place.live is None or place.live.idle for place in self.places.values())

    def _do_jobs(self) -> None:
        with self._wake:
            jobs, self._jobs = self._jobs, []
        if jobs:
            self._hand_over()  # they may take long
        for job, future in jobs:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)

    def _round(self, name: str, place: Place) -> None:
        live = place.live
        assert live is not None
        try:
            news = live.step(not self.paused, meanwhile=self._hand_over)
        except Exception as error:
            self._fail(name, place, error)
            return
        for conversation in news:
            ticket = self._tickets.get((name, conversation.number))
            if ticket is None:  # cancelled meanwhile
                continue
            self._tell(live, ticket)

    def _tell(self, live: LiveEngine, ticket: Ticket) -> None:
        """The first token and the last one are told at once; where many answers run, others are told together."""
        conversation, first, now = ticket.conversation, ticket.told, time.monotonic()
        if conversation.status != "stopped" and now - ticket.heard < len(self._tickets) / _NEWS:
            return
        first += sum(conversation.given[first:])  # what was given lies before what was sampled
        tokens, logprobs = conversation.tokens[first:], conversation.logprobs[first:]
        ticket.heard, ticket.told = now, len(conversation.tokens)
        self.counts.generated_tokens += len(tokens)
        version = live.engine.version
        if conversation.status != "stopped":
            self._told.append((ticket, Event(tokens, logprobs, version=version, seen=self._look(live, ticket))))
            return
        reason = conversation.finish_reason or "stop"
        trajectory = live.trajectory(conversation) if ticket.keep else live.release(conversation)
        with self._wake:
            self._tickets.pop((ticket.place, conversation.number), None)
            self.counts.finished[reason] = self.counts.finished.get(reason, 0) + 1
            if ticket.keep:
                self.counts.turns[conversation.way] = self.counts.turns.get(conversation.way, 0) + 1
        seen = seen_at_end(trajectory) if ticket.watch and trajectory.beacon_id is None else None
        event = Event(tokens, logprobs, reason, conversation.matched, trajectory, trajectory.version, seen)
        self._told.append((ticket, event))

    def _hand_over(self) -> None:
        """Hand events over to the event loops of their tickets, in one call for each loop.

        A call wakes the loop's thread, which then needs the interpreter for what it does with the events. So it is made
        while this thread waits: for a GPU that works on a round, or for something to do.
        """
        told, self._told = self._told, []
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Event]]] = {}
        for ticket, event in told:
            by_loop.setdefault(ticket.loop, []).append((ticket, event))
        for loop, events in by_loop.items():
            with suppress(RuntimeError):  # the loop has ended, and with it whoever waited
                loop.call_soon_threadsafe(_put, events)

    def _look(self, live: LiveEngine, ticket: Ticket) -> Seen | None:
        """What the answer still sees, for somebody who watches, a few times a second."""
        now = time.monotonic()
        if not ticket.watch or now - ticket.looked < _LOOK:
            return None
        ticket.looked = now
        return seen_by(live, ticket.conversation)

    def _fail(self, name: str, place: Place, error: Exception) -> None:
        """An engine that failed has lost its conversations; it is opened again."""
        message = f"the engine failed ({str(error).splitlines()[0][:200] if str(error) else type(error).__name__})."
        with self._wake:
            if place.live is not None:
                place.live.close()  # before anybody is told: who asks again must not be let into what has failed
            lost = [key for key in self._tickets if key[0] == name]
            tickets = [self._tickets.pop(key) for key in lost]
            self.counts.failed += len(tickets)
        self._told += [(ticket, Event([], [], error=Refusal(500, message, "server_error"))) for ticket in tickets]
        self._hand_over()
        place.live = place.open(place.engine)

    def _close(self) -> None:
        with self._wake:
            self._stopping = True
            jobs, self._jobs = self._jobs, []
            tickets, self._tickets = list(self._tickets.values()), {}
        gone = Refusal(503, "the server has stopped.", "server_error")
        for _, future in jobs:
            future.set_exception(gone)
        self._told += [(ticket, Event([], [], error=gone)) for ticket in tickets]
        self._hand_over()
        for place in self.places.values():
            if place.live is not None:
                place.live.close()
                place.live = None
