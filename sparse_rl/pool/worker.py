"""A member's side of the pool: it computes its work in a thread and answers polls meanwhile.

The thread is the same for all handouts, because libraries keep by thread what they prepare: torch, for one, cuDNN's
plans of attention, one for every shape.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from ..errors import SparseRLError
from .pieces import Piece, Place
from .weights import Part

Work = Sequence[tuple[Place, Piece]]
Fetch = Callable[[int | None], Iterable[Part]]  # version that the member has -> parts of the one that pieces ask for
Deliver = Callable[[Place, bytes], None]


class Hands(Protocol):
    """The interface of what computes pieces in a member."""

    rows: int

    def complete(self, work: Work, fetch: Fetch, deliver: Deliver) -> None:
        """Deliver every piece. After `stop` the rest may be left out."""
        ...

    def begin(self) -> None:
        """Work comes, and `stop` is meant for it from here on."""
        ...

    def stop(self) -> None: ...

    def beats(self) -> int:
        """A number that changes as long as the work goes on."""
        ...

    def tokens(self) -> int:
        """Tokens sampled so far."""
        ...

    def cache_bytes(self) -> int: ...

    def fetched_bytes(self) -> int:
        """Bytes of weights that came so far."""
        ...

    def spent(self) -> Mapping[str, float]:
        """Seconds so far, by what they were spent on."""
        ...


@dataclass(frozen=True)
class About:
    """The identity of a member: its node, host and device."""

    rows: int
    host: str
    pid: int
    node: str = ""  # its id in the cluster

    @property
    def place(self) -> str:
        """The node for people: several may be on one host."""
        return f"{self.host} {self.node[:6]}".strip()


@dataclass
class Answer:
    """A member's answer to a poll."""

    finished: list[tuple[Place, bytes]] = field(default_factory=list)
    busy: bool = False
    beats: int = 0
    seconds: float = 0.0  # that it has worked so far
    cache_bytes: int = 0
    tokens: int = 0  # that it has sampled so far
    fetched_bytes: int = 0  # of weights so far
    spent: Mapping[str, float] = field(default_factory=dict)  # seconds so far, by what they were spent on
    error: tuple[str, str] | None = None  # (class, message) of what ended its work


class Worker:
    def __init__(self, hands: Hands):
        self.hands = hands
        self.changed = threading.Condition()
        self.finished: list[tuple[Place, bytes]] = []
        self.error: tuple[str, str] | None = None
        self.busy, self.seconds, self.since = False, 0.0, 0.0  # seconds: of handouts that ended; since: of this one
        self.handout: Place | None = None  # the first place of what it was handed last
        self.orders: SimpleQueue[tuple[Work, Fetch] | None] = SimpleQueue()  # None: the last
        threading.Thread(target=self._serve, daemon=True, name="sampler").start()

    def start(self, work: Work, fetch: Fetch) -> None:
        with self.changed:
            assert not self.busy, "a member is handed work when it has ended what it had"
            self.busy, self.handout, self.since = True, work[0][0], time.perf_counter()
            self.hands.begin()
        self.orders.put((work, fetch))

    def poll(self, seconds: float) -> Answer:
        """What was finished since the last poll; waits until something is, or the work ends, or time is up."""
        with self.changed:
            self.changed.wait_for(lambda: self.finished or not self.busy, seconds)
            hands, now = self.hands, time.perf_counter()
            worked = self.seconds + (now - self.since if self.busy else 0.0)
            answer = Answer(self.finished, self.busy, hands.beats(), worked, hands.cache_bytes(), hands.tokens())
            answer.fetched_bytes, answer.spent = hands.fetched_bytes(), dict(hands.spent())
            answer.error, self.error, self.finished = self.error, None, []
            return answer

    def stop(self, handout: Place) -> None:
        """End a handout early, named by its first place. It may be late, and then does not mean what came after it."""
        with self.changed:
            if self.busy and self.handout == handout:
                self.hands.stop()

    def close(self) -> None:
        """End the thread, after what it does now."""
        self.orders.put(None)

    def _serve(self) -> None:
        while (order := self.orders.get()) is not None:
            self._run(*order)
            del order  # it names weights, which a store keeps as long as somebody names them

    def _run(self, work: Work, fetch: Fetch) -> None:
        error = None
        try:
            self.hands.complete(work, fetch, self._deliver)
        except BaseException as found:  # whatever it is, the pool decides
            kind = type(found).__name__ if isinstance(found, SparseRLError) else "Exception"
            error = (kind, f"{type(found).__name__}: {found}" if kind == "Exception" else str(found))
        with self.changed:
            self.busy, self.error = False, error
            self.seconds += time.perf_counter() - self.since
            self.changed.notify_all()

    def _deliver(self, place: Place, payload: bytes) -> None:
        with self.changed:
            self.finished.append((place, payload))
            self.changed.notify_all()
