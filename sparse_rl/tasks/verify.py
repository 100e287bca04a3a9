"""Grade in child processes: a reward that hangs, crashes, prints or eats memory costs one completion, not the run.

    parent                               child (worker.py)
    name, options, limits       ->       makes its own copy of the task; "ready"            once
    prompt, text, CPU seconds   ->       reward, verdict, named rewards, message            for every completion

One loop serves all children. A child that misses the deadline is killed, and its completion is graded "timeout"; if a
child dies, its completion is graded "error"; both are replaced.

A task that keeps a spare process (`Task.keeps_spare`) also limits CPU time, and replaces a child within milliseconds.
All completions of a call get QUICK seconds first. Then those that took longer get another try: with the whole deadline
if they are few, else the AGAIN that look lightest (`Task.effort`) with a tenth of it. So a thousand answers that never
end cost minutes and not hours, and no verdict depends on what was graded before.

Children ignore Ctrl-C, and end when their stdin closes or when they overstay, so nothing remains even if the parent is
killed.

This guards against accidents, not malice: a reward may still read files, use the network, or manipulate its process.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import selectors
import signal
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import SparseRLError, require_int

START = 120.0  # seconds that a child may take to import and make its task
GRACE = 2.0  # seconds after its deadline when a child ends itself, in case the parent is gone
QUICK = 0.2  # CPU seconds of a first try; most completions need a tenth of it
AGAIN = 60  # completions of a call that may have another try; together they may take a tenth as many deadlines
FAILED_STARTS = 3  # after so many children that died before they were ready, no more are started
HEADER = struct.Struct(">Q")  # the length of the message that follows
_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from sparse_rl.tasks.worker import main; main()"
_LATE, _DEAD = object(), object()
OUT_OF_TIME = "out of time"  # the reply for a completion that took all the CPU time it may take
_POOLS: weakref.WeakValueDictionary[bytes, Pool] = weakref.WeakValueDictionary()

Outcome = tuple[float, str, dict[str, float], "str | None"]  # reward, verdict, named rewards, message of an error
TIMEOUT: Outcome = (0.0, "timeout", {}, None)


@dataclass(frozen=True)
class Limits:
    """The time, processes and memory that grading may use."""

    deadline: float = 10.0  # seconds for one completion
    workers: int | None = None  # child processes; None: one per core, at most 4
    memory: float | None = None  # GiB of address space for each child; None: no limit

    def __post_init__(self):
        for name, value in {"deadline": self.deadline, "memory": 1 if self.memory is None else self.memory}.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
                raise SparseRLError(f"{name} is {value!r}; it must be a number above 0.")
        if self.workers is not None:
            require_int(workers=self.workers)


def frame(message: bytes) -> bytes:
    return HEADER.pack(len(message)) + message


class Child:
    """One grading process: the bytes still to be sent, the bytes received, and the time when a reply is due."""

    def __init__(self, hello: bytes):
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *sys.path],  # the child can import what the parent can
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C reaches only the parent; killing the session kills what a reward started
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        self.writes, self.reads = self.stdin.fileno(), self.stdout.fileno()
        os.set_blocking(self.writes, False)
        os.set_blocking(self.reads, False)
        self.ready = False
        self.item: int | None = None  # the completion it is grading
        self.send(hello, START)

    def send(self, message: bytes, seconds: float) -> None:
        self.outbox, self.inbox = memoryview(frame(message)), b""
        self.until = time.monotonic() + seconds

    def push(self) -> None:
        """Send what the pipe takes now. What it does not take, and that the process is gone, `exchange` will find."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            if self.outbox:
                self.outbox = self.outbox[os.write(self.writes, self.outbox) :]

    @property
    def busy(self) -> bool:
        return not self.ready or self.item is not None

    def exchange(self, key: selectors.SelectorKey) -> Any:
        """Move the bytes that can be moved. The reply once it is complete, else None; _DEAD if the process is gone."""
        try:
            if key.fd == self.writes:
                self.outbox = self.outbox[os.write(self.writes, self.outbox) :]
                return None
            received = os.read(self.reads, 1 << 16)
        except BrokenPipeError:
            return _DEAD
        self.inbox += received
        header, message = self.inbox[: HEADER.size], self.inbox[HEADER.size :]
        if len(header) == HEADER.size and len(message) == HEADER.unpack(header)[0]:
            return pickle.loads(message)
        return None if received else _DEAD

    def end(self, patience: float = 0.0) -> str:
        """Kill the process and all that it started, after waiting `patience` seconds; say how it ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone already
            os.killpg(self.process.pid, signal.SIGKILL)
        code = self.process.wait()
        self.stdin.close()
        self.stdout.close()
        return how_ended(code)


def how_ended(code: int) -> str:
    """The end of a process in words; a negative code is that of a signal."""
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}" if code < 0 else f"ended with exit code {code}"


class Pool:
    """Child processes that grade for one task. They begin with `start` or a first completion, and end with `close`."""

    def __init__(self, name: str, limits: Limits, hello: bytes):
        self.name, self.limits = name, limits
        self.workers = limits.workers or min(4, os.cpu_count() or 1)
        self.hello = hello
        self._children: list[Child] = []
        self._failed_starts: list[str] = []  # how they ended
        self._lock = threading.Lock()
        weakref.finalize(self, end_all, self._children)  # when the pool is collected, or the program ends

    def grade(self, items: Sequence[tuple[Any, str]], effort: Callable[[str], float] = len) -> list[Outcome]:
        """The outcome of every (prompt, text), in the order given, whichever child graded it."""
        with self._lock:
            try:
                return self._grade(items, effort)
            except BaseException:  # such as an interrupt: a reply may be half read, so the next call uses new children
                end_all(self._children)
                raise

    def start(self, items: int) -> None:
        """Start the children that so many completions will need. Nobody waits for them: `grade` reads their reports."""
        with self._lock:
            self._failed_starts = []
            self._hire(items)
            for child in self._children:
                child.push()

    def close(self) -> None:
        end_all(self._children)

    def lend(self) -> list[Child]:
        """The children that do nothing, for replies; none while something is graded."""
        if not self._lock.acquire(blocking=False):
            return []
        try:
            self._bury()
            lent = [child for child in self._children if child.item is None]
            for child in lent:
                self._children.remove(child)
            return lent
        finally:
            self._lock.release()

    def take_back(self, children: list[Child]) -> None:
        """Children that do nothing, to grade with. Those that are too many end."""
        if self._lock.acquire(blocking=False):
            try:
                while children and len(self._children) < self.workers:
                    self._children.append(children.pop())
            finally:
                self._lock.release()
        end_all(children)

    def _grade(self, items: Sequence[tuple[Any, str]], effort: Callable[[str], float]) -> list[Outcome]:
        deadline = self.limits.deadline
        waiting, found, slow = deque(range(len(items))), {}, []
        patience, last = min(QUICK, deadline), deadline <= QUICK
        self._failed_starts = []
        for child in self._children:
            if not child.ready:
                child.until = time.monotonic() + START  # between calls nobody reads its report
        while len(found) < len(items):
            if slow and len(found) + len(slow) == len(items):  # all had their first try
                slow.sort(key=lambda i: (effort(items[i][1]), items[i][1], items[i][0].index))
                found.update(dict.fromkeys(slow[AGAIN:], TIMEOUT))
                patience, last = deadline * max(0.1, min(1.0, AGAIN / 10 / len(slow))), True
                waiting, slow = deque(slow[:AGAIN]), []
            self._hire(len(items) - len(found))
            for child in self._children:
                if waiting and not child.busy:
                    child.item = waiting.popleft()
                    prompt, text = items[child.item]
                    message = packed((prompt, text, patience), f"the answer of prompt {prompt.index}")
                    child.send(message, deadline)
            for child, reply in self._replies():
                if reply is _LATE or reply is _DEAD:
                    late = time.monotonic() >= child.until  # or it ended itself because it was late
                    self._children.remove(child)
                    ending = child.end(patience=0.0 if late else 1.0)
                    if not child.ready:
                        self._failed_starts.append(f"was not ready after {START:g} s" if late else ending)
                    else:
                        error = (0.0, "error", {}, f"the grading process {ending}")
                        found[child.item] = TIMEOUT if late else error
                elif not child.ready:
                    child.ready = reply == "ready"
                    if not child.ready:
                        raise SparseRLError(f"completions of the task {self.name} cannot be graded: {reply}")
                else:
                    if reply != OUT_OF_TIME:
                        found[child.item] = reply
                    elif last:
                        found[child.item] = TIMEOUT
                    else:
                        slow.append(child.item)
                    child.item = None
        return [found[i] for i in range(len(items))]

    def _hire(self, needed: int) -> None:
        """Start as many children as are needed and allowed, and replace those that died idle."""
        self._bury()
        while len(self._children) < min(self.workers, needed) and len(self._failed_starts) < FAILED_STARTS:
            self._children.append(Child(self.hello))
        if not self._children:
            raise SparseRLError(
                f"completions of the task {self.name} cannot be graded: a grading process {self._failed_starts[-1]} "
                f"before it was ready, {FAILED_STARTS} times; check that the task can be made in a new Python and that "
                f"{self.workers} processes fit in memory."
            )

    def _bury(self) -> None:
        """Children that died idle."""
        for child in [child for child in self._children if not child.busy and child.process.poll() is not None]:
            self._children.remove(child)
            child.end()

    def _replies(self) -> Iterator[tuple[Child, Any]]:
        return replies_of([child for child in self._children if child.busy])


def replies_of(busy: Sequence[Child], seconds: float = math.inf) -> Iterator[tuple[Child, Any]]:
    """Wait for replies, deaths and missed deadlines, at most so long. A reply that has arrived counts, however late we
    notice it.
    """
    heard = set()
    with selectors.DefaultSelector() as selector:
        for child in busy:
            selector.register(child.reads, selectors.EVENT_READ, child)
            if child.outbox:
                selector.register(child.writes, selectors.EVENT_WRITE, child)
        first = min((child.until for child in busy), default=0.0) - time.monotonic()
        events = selector.select(max(0.0, min(first, seconds))) if busy else []
    for key, _ in events:
        if key.data not in heard:
            reply = key.data.exchange(key)
            if reply is not None:
                heard.add(key.data)
                yield key.data, reply
    now = time.monotonic()
    for child in busy:
        if child not in heard and now >= child.until:
            yield child, _LATE


def is_late(reply: Any) -> bool:
    return reply is _LATE


def is_dead(reply: Any) -> bool:
    return reply is _DEAD


def pool_for(name: str, options: dict, limits: Limits) -> Pool:
    """The pool for tasks with this name and options: all copies, training and held out, share it."""
    hello = packed((name, options, asdict(limits)), f"the options of the task {name}")
    pool = _POOLS.get(hello) or Pool(name, limits, hello)
    _POOLS[hello] = pool
    return pool


def packed(thing: Any, what: str) -> bytes:
    try:
        return pickle.dumps(thing)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise SparseRLError(
            f"{what} cannot be sent to a grading process ({error}); use numbers, strings, lists and dicts."
        ) from error


def end_all(children: list[Child]) -> None:
    while children:
        children.pop().end()
