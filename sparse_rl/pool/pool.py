"""A pool of samplers, any of which may be lost at any time; another one then does its work.

Whoever waits for a request drives the pool, so nothing runs between steps. Several threads may wait for different
requests. Members are reached through a `Transport`: Ray (cluster.py), or threads in tests.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .. import errors
from ..errors import SparseRLError
from .ledger import Brought, Ledger
from .pieces import Piece, Place
from .standing import Standing, Standings
from .worker import About, Answer

MOST_LOSSES = 20  # of one piece: after that it is the piece's fault
MOST_STARTS = 3  # times in a row that members failed before they had joined
JOINING = 600.0  # seconds that may pass until a member has joined: its model is loaded meanwhile
ALONE = 60.0  # seconds without any member after which people are told
LONGEST_PAUSE = 60.0  # seconds before another member is started, after many that failed: 1, 2, 4, ... up to this
TURN = 0.5  # seconds that the driver waits for news
WATCH = 0.5  # seconds between two views of the members
_ROOM_EVERY = 5.0  # seconds between two looks at how many members the cluster has room for


@dataclass(frozen=True)
class Joined:
    member: int
    about: About


@dataclass(frozen=True)
class Answered:
    member: int
    answer: Answer


@dataclass(frozen=True)
class Lost:
    member: int
    why: str


Event = Joined | Answered | Lost


class Transport(Protocol):
    """The interface through which the pool reaches members. Only `events` waits."""

    def room(self) -> int:
        """How many members there can be now."""
        ...

    def start(self, member: int) -> None:
        """Begin a member; `Joined` or `Lost` tells what became of it."""
        ...

    def hand(self, member: int, work: Sequence[tuple[Place, Piece]]) -> None:
        """Give work to a member that is idle; `Answered` events follow until one says that it is not busy."""
        ...

    def stop(self, member: int, handout: Place) -> None:
        """Ask a member to end a handout, named by its first place, early."""
        ...

    def kill(self, member: int) -> None:
        """Give a member up, and end it if it lives."""
        ...

    def events(self, seconds: float) -> list[Event]:
        """What has happened; waits so long if nothing has."""
        ...

    def publish(self, version: int, parts: Iterable[dict[str, np.ndarray]], oldest: int) -> int:
        """Make weights available, and forget those before `oldest`. Returns their bytes."""
        ...

    def close(self) -> None: ...


@dataclass
class Sampler:
    """What the pool knows about a member."""

    about: About | None = None  # None: it has not joined yet
    moved: float = 0.0  # when it last got on with its work, or was given some
    beats: int = -1
    pieces: int = 0  # first results that it brought
    tokens: int = 0  # that it has sampled
    seconds: float = 0.0  # that it has worked
    cache_bytes: int = 0
    fetched_bytes: int = 0  # of weights
    spent: Mapping[str, float] = field(default_factory=dict)  # seconds, by what they were spent on
    handout: Place | None = None  # the first place of what it was handed last
    stopping: bool = False  # it was asked to end that early


@dataclass
class Counts:
    """Counts since the pool was started."""

    lost: int = 0
    joined: int = 0
    duplicates: int = 0
    different: int = 0
    late: int = 0
    messages: int = 0
    bytes_in: int = 0
    bytes_out: int = 0  # whole weights, once per version
    bytes_fetched: int = 0  # weights that samplers fetched, whole or as changes
    spent: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds, as above, of all


class Pool:
    def __init__(
        self,
        transport: Transport,
        wanted: int = 0,
        patience: float = 600.0,
        over_ask: float = 0.0,
        keep: int = 2,
        say: Callable[[str], None] = lambda text: None,
        watch: Callable[[Standings], None] = lambda standings: None,
    ):
        """`wanted`: members; 0: as many as there is room for. `patience`: seconds in which a member must get on.
        `keep`: versions of the weights that may be asked for. `watch` is shown the members now and then.
        """
        self.watch, self.watched, self.seen = watch, 0.0, Standings([], {}, 0, 0)
        self.transport, self.wanted, self.patience, self.keep, self.say = transport, wanted, patience, keep, say
        self.ledger = Ledger(wanted, over_ask)
        self.samplers: dict[int, Sampler] = {}
        self.counts = Counts()
        self.lost_on: Counter[str] = Counter()  # members that were lost, by node
        self.versions: list[int] = []
        self.started = 0  # members so far
        self.failed_starts = 0  # in a row
        self.start_after = 0.0  # no member is started before
        self.alone_since: float | None = None  # since when no member is there
        self.told_alone = False
        self.listened = time.monotonic()  # when the last turn ended
        self.looked = -_ROOM_EVERY
        self.room = wanted
        self.waiting: dict[int, deque[tuple[int, bytes]]] = {}  # results of each request that came: piece, result
        self.why = ""  # why the last member was lost
        self.error: BaseException | None = None
        self.closed = False
        self.driving = threading.Lock()

    def publish(self, version: int, weights: Callable[[], Iterable[dict[str, np.ndarray]]]) -> None:
        """Make the weights of a version available, if they are not yet and the pool is open; part after part."""
        if version in self.versions or self.closed:
            return
        versions = [*self.versions, version][-self.keep :]
        self.counts.bytes_out += self.transport.publish(version, weights(), versions[0])
        self.versions = versions

    def complete(self, pieces: Sequence[Piece]) -> list[bytes]:
        """The results of pieces, in their order."""
        with closing(self.results(pieces)) as results:
            return [result for _, result in sorted(results)]

    def results(self, pieces: Sequence[Piece]) -> Generator[tuple[int, bytes], None, None]:
        """Every piece's number and result, as they come. The pool is driven meanwhile; closing it gives up the rest."""
        if not pieces:
            return
        with self.driving:
            self._check()
            if not self.waiting:
                self._leave_out_pause()
            request = self.ledger.ask(pieces)
            came = self.waiting[request] = deque()
        try:
            for _ in pieces:
                while not came:
                    if self.driving.acquire(timeout=0.05):
                        try:
                            self._check()
                            if not came:
                                self.turn()
                        finally:
                            self.driving.release()
                yield came.popleft()
        finally:
            with self.driving:  # others may be driving
                self.ledger.forget(request)
                del self.waiting[request]

    def turn(self) -> None:
        """One round: start members, hand out work, hear what happened."""
        try:
            self._grow()
            for member, work in self.ledger.assign().items():
                known = self.samplers[member]
                known.stopping, known.handout, known.moved = False, work[0][0], time.monotonic()
                self.counts.messages += 1
                self.transport.hand(member, work)
            for event in self.transport.events(TURN):
                self._hear(event)
            self._give_up_on_silent()
            for member in self.ledger.useless():
                known = self.samplers[member]
                if not known.stopping and known.handout is not None:
                    known.stopping = True
                    self.transport.stop(member, known.handout)
            worst = self.ledger.most_lost()
            if worst is not None and worst[0] >= MOST_LOSSES:
                raise SparseRLError(
                    f"{worst[0]} samplers were lost one after the other while they sampled prompt "
                    f"{worst[1].prompt_index} of a step ({len(worst[1].prompt)} tokens); the last: {self.why}"
                )
            if time.monotonic() - self.watched >= WATCH:
                self.watched, self.seen = time.monotonic(), self._standings()
                self.watch(self.seen)
        except SparseRLError as error:
            self.error = error
            raise
        finally:
            self.listened = time.monotonic()

    def close(self) -> None:
        """End all members, once. Requests under way are interrupted."""
        if self.closed:
            return
        self.closed = True
        with self.driving:
            self.transport.close()

    @property
    def live(self) -> int:
        return len(self.ledger.members)

    def standings(self) -> Standings:
        """As of now; while others drive the pool, as of a moment ago: nobody waits for this."""
        if self.driving.acquire(blocking=False):
            try:
                self.seen = self._standings()
            finally:
                self.driving.release()
        return self.seen

    def _standings(self) -> Standings:
        joined = [(number, s, s.about) for number, s in self.samplers.items() if s.about is not None]
        held = {number: len(member.holding) for number, member in self.ledger.members.items()}
        members = [Standing(i, about.place, s.pieces, held[i], s.tokens, s.seconds) for i, s, about in joined]
        open_ = self.ledger.requests.values()
        done, asked = sum(len(request.digests) for request in open_), sum(len(request.pieces) for request in open_)
        return Standings(members, dict(self.lost_on), done, asked)

    # ------------------------------------------------------------------------------------------------------ members

    def _check(self) -> None:
        if self.closed:
            raise KeyboardInterrupt
        if self.error is not None:
            raise self.error

    def _leave_out_pause(self) -> None:
        """Nobody listened between requests: that time is not counted as a member's silence."""
        pause = time.monotonic() - self.listened
        for sampler in self.samplers.values():
            sampler.moved += pause
        if self.alone_since is not None:
            self.alone_since += pause

    def _grow(self) -> None:
        """Start as many members as are wanted."""
        now = time.monotonic()
        if not self.wanted and now - self.looked > _ROOM_EVERY:
            self.looked, self.room = now, self.transport.room()
        target = self.wanted or max(1, self.room)
        self.ledger.wanted = target
        while len(self.samplers) < target and now >= self.start_after:
            self.samplers[self.started] = Sampler(moved=now)
            self.transport.start(self.started)
            self.started += 1

    def _hear(self, event: Event) -> None:
        self.counts.messages += 1
        known = self.samplers.get(event.member)
        if isinstance(event, Answered):
            self._take(event.member, event.answer, known)
        elif known is None:
            return
        elif isinstance(event, Joined):
            known.about, known.moved, self.failed_starts = event.about, time.monotonic(), 0
            self.counts.joined += 1
            self.ledger.join(event.member, event.about.rows)
        else:
            self._lose(event.member, event.why)

    def _take(self, member: int, answer: Answer, known: Sampler | None) -> None:
        """`known`: None of a member that was given up; its results count all the same."""
        for place, payload in answer.finished:
            self._bring(member, place, payload, known)
        if known is None:
            return
        known.seconds, known.cache_bytes, known.tokens = answer.seconds, answer.cache_bytes, answer.tokens
        self.counts.bytes_fetched += answer.fetched_bytes - known.fetched_bytes
        for name, seconds in answer.spent.items():
            self.counts.spent[name] += seconds - known.spent.get(name, 0.0)
        known.fetched_bytes, known.spent = answer.fetched_bytes, answer.spent
        if answer.beats != known.beats or answer.finished or not answer.busy:
            known.beats, known.moved = answer.beats, time.monotonic()
        if answer.busy:
            return
        if answer.error is None or known.stopping:
            self.ledger.end(member)
        else:
            self._fail(member, *answer.error)

    def _bring(self, member: int, place: Place, payload: bytes, known: Sampler | None) -> None:
        number, piece = place
        brought = self.ledger.finish(member, place, hashlib.blake2b(payload).digest())
        self.counts.bytes_in += len(payload)
        if brought is Brought.FIRST:
            if number in self.waiting:
                self.waiting[number].append((piece, payload))
            if known is not None:
                known.pieces += 1
            return
        self.counts.late += brought is Brought.UNKNOWN
        self.counts.duplicates += brought is not Brought.UNKNOWN
        self.counts.different += brought is Brought.DIFFERENT
        if brought is Brought.DIFFERENT and self.counts.different == 1:
            self.say(
                "sparse-rl: two samplers gave different results for one piece, of which the first counts; this happens "
                "where their processors round differently."
            )

    def _fail(self, member: int, kind: str, message: str) -> None:
        """A member's work ended in an error: what would end it anywhere ends the run, anything else is its own."""
        if kind not in ("Exception", "OutOfMemory"):
            raise getattr(errors, kind, SparseRLError)(message)
        self.transport.kill(member)
        self._lose(member, message)

    def _lose(self, member: int, why: str) -> None:
        lost, self.why = self.samplers.pop(member), why
        told = why.splitlines()[0] if why else "it is gone"
        if lost.about is None:
            return self._note_failed_start(told)
        self.counts.lost += 1
        self.lost_on[lost.about.place] += 1
        self.ledger.lose(member)
        self.say(f"sparse-rl: a sampler was lost ({told}); what it held is sampled elsewhere.")

    def _note_failed_start(self, why: str) -> None:
        """Others are tried, at growing intervals; where nobody is there, a few failures in a row end the run. Those
        that fail together count as one: they may have been on a node that was lost.
        """
        if time.monotonic() < self.start_after:
            return
        self.failed_starts += 1
        if self.failed_starts >= MOST_STARTS and not self.live:
            raise SparseRLError(f"samplers could not be started, {self.failed_starts} times in a row; the last: {why}")
        if self.failed_starts == 1:
            self.say(f"sparse-rl: a sampler could not be started ({why}); others will be tried.")
        self.start_after = time.monotonic() + min(LONGEST_PAUSE, 2.0 ** (self.failed_starts - 1))

    def _give_up_on_silent(self) -> None:
        now = time.monotonic()
        for member, sampler in list(self.samplers.items()):
            joining = sampler.about is None
            patience = JOINING if joining else self.patience
            if now - sampler.moved < patience or (not joining and self.ledger.members[member].idle):
                continue
            if joining and not self.live:
                continue  # the sentence below says more
            self.transport.kill(member)
            self._lose(member, f"it did not {'join within' if joining else 'get on for'} {patience:g} s")
        if self.live:
            self.alone_since, self.told_alone = None, False
        elif self.alone_since is None:
            self.alone_since = now
        elif now - self.alone_since > JOINING:
            raise SparseRLError(
                f"no sampler has been there for {JOINING:g} s; {self._asked_for()}; start more nodes, or set "
                "rollout.samplers lower."
            )
        elif now - self.alone_since > ALONE and not self.told_alone:
            self.told_alone = True
            self.say(
                f"sparse-rl: no sampler has been there for {ALONE:g} s; {self._asked_for()}. They may be loading the "
                f"model, or other work has the cluster; after {JOINING:g} s the run stops."
            )

    def _asked_for(self) -> str:
        return f"{len(self.samplers)} are asked for, and the cluster has room for {self.transport.room()}"
