"""Replies while others are sampled: in child processes like grading, or at once where a task is not isolated.

    replies.ask(key, prompt, messages)          never waits
    for key, reply in replies.ready(seconds):   those that have come, after waiting at most so long for one

Whoever asked first is served first, but replies come in whatever order they are ready. A child that misses the deadline
is killed, and its conversation ends with the fault `timeout`; if a child dies, with the fault `error`; both are
replaced. The deadline runs from when a child begins with a reply, not from when it was asked.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Any

from ..errors import SparseRLError
from .base import Task
from .conversing import Reply, answered
from .environment import Environment
from .problem import Message, Prompt
from .verify import FAILED_STARTS, START, Child, is_dead, is_late, packed, replies_of

Asked = tuple[Hashable, Prompt, list[Message]]


class Replies:
    """The replies of one task, of several in a mixture. Close it: its processes end then."""

    def __init__(self, task: Task):
        self.task = task
        self.services = {id(member): _service(member) for member in task.members}

    def ask(self, key: Hashable, prompt: Prompt, messages: list[Message]) -> None:
        self.services[id(self.task.of(prompt))].ask(key, prompt, messages)

    def conclude(self, key: Hashable, prompt: Prompt, messages: list[Message] | None = None) -> bool:
        """End a conversation from the model's side. True: a last reply, without messages, brings its grade.

        messages: those whose last one, which was cut, the task has not read; None: it has read all
        """
        service = self.services[id(self.task.of(prompt))]
        if not isinstance(service, Environment):
            return False
        if messages is None:
            service.stop(key, prompt)
        else:
            service.ask(key, prompt, messages, last=True)
        return True

    def drop(self, key: Hashable, prompt: Prompt) -> None:
        """A conversation has ended for another reason."""
        service = self.services[id(self.task.of(prompt))]
        if isinstance(service, Environment):
            service.drop(key)

    @property
    def waiting(self) -> int:
        """How many were asked and have not been answered."""
        return sum(service.waiting for service in self.services.values())

    def ready(self, seconds: float) -> list[tuple[Hashable, Reply]]:
        """The replies that have come, after waiting at most `seconds` for a first one."""
        until, found = time.monotonic() + seconds, []
        while True:
            busy = [service for service in self.services.values() if service.waiting]
            for service in busy:
                found += service.ready(max(0.0, until - time.monotonic()) if len(busy) == 1 and not found else 0.0)
            if found or not busy or time.monotonic() >= until:
                return found
            if len(busy) > 1:
                time.sleep(0.001)

    def close(self) -> None:
        for service in self.services.values():
            service.close()

    def __enter__(self) -> Replies:
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class AtOnce:
    """Replies of a task that is not isolated, in this process."""

    def __init__(self, task: Task):
        self.task, self.done = task, []

    def ask(self, key: Hashable, prompt: Prompt, messages: list[Message]) -> None:
        self.done.append((key, answered(self.task, prompt, messages)))

    @property
    def waiting(self) -> int:
        return len(self.done)

    def ready(self, seconds: float) -> list[tuple[Hashable, Reply]]:
        found, self.done = self.done, []
        return found

    def close(self) -> None:
        self.done = []


class Processes:
    """Replies of an isolated task, each of its children busy with one at a time. They are those that grade: nothing is
    graded while conversations are held.
    """

    def __init__(self, task: Task):
        assert task._pool is not None
        self.name, self.pool = task.name, task._pool
        self.limits, self.hello, self.most = self.pool.limits, self.pool.hello, self.pool.workers
        self.asked: deque[Asked] = deque()
        self.running: dict[Child, Asked] = {}
        self.children = self.pool.lend()
        for child in self.children:
            if not child.ready:
                child.until = time.monotonic() + START  # nobody has read its report so far
        self.failed: list[str] = []  # how children ended that were never ready

    def ask(self, key: Hashable, prompt: Prompt, messages: list[Message]) -> None:
        self.asked.append((key, prompt, messages))
        self._begin()

    @property
    def waiting(self) -> int:
        return len(self.asked) + len(self.running)

    def ready(self, seconds: float) -> list[tuple[Hashable, Reply]]:
        until, found = time.monotonic() + seconds, []
        while self.waiting:
            self._begin()
            found += self._received(0.0 if found else max(0.0, until - time.monotonic()))
            if found or time.monotonic() >= until:
                break
        self._begin()
        return found

    def close(self) -> None:
        """What is still asked is forgotten, with the children that are busy with it."""
        for child in self.running:
            self.children.remove(child)
            child.end()
        self.pool.take_back(self.children)
        self.children = []
        self.asked.clear()
        self.running.clear()

    def _begin(self) -> None:
        """Give idle children something to do; replace those that died idle, and start more where there are too few."""
        for child in [c for c in self.children if c.ready and c not in self.running and c.process.poll() is not None]:
            self.children.remove(child)
            child.end()
        while len(self.children) < min(self.most, self.waiting) and len(self.failed) < FAILED_STARTS:
            self.children.append(Child(self.hello))
        if not self.children and self.asked:
            raise SparseRLError(
                f"the task {self.name} cannot reply: a process {self.failed[-1]} before it was ready, {FAILED_STARTS} "
                f"times; check that the task can be made in a new Python and that {self.most} processes fit in memory."
            )
        for child in self.children:
            if child.ready and child not in self.running and self.asked:
                asked = self.running[child] = self.asked.popleft()
                what = f"the conversation of prompt {asked[1].index}"
                child.send(packed((asked[1], asked[2], self.limits.deadline), what), self.limits.deadline)
            child.push()

    def _received(self, seconds: float) -> Iterator[tuple[Hashable, Reply]]:
        busy = [child for child in self.children if not child.ready or child in self.running]
        for child, reply in replies_of(busy, seconds):
            if is_dead(reply) or is_late(reply):
                late = time.monotonic() >= child.until
                self.children.remove(child)
                ending = child.end(patience=0.0 if late else 1.0)
                if not child.ready:
                    self.failed.append(f"was not ready after {START:g} s" if late else ending)
                    continue
                key, prompt, _ = self.running.pop(child)
                yield key, self._fault(prompt, ending if not late else None)
            elif not child.ready:
                child.ready = reply == "ready"
                if not child.ready:
                    raise SparseRLError(f"the task {self.name} cannot reply: {reply}")
            else:
                key, *_ = self.running.pop(child)
                yield key, reply if isinstance(reply, Reply) else Reply(fault="error", problem=reply[3])

    def _fault(self, prompt: Prompt, ending: str | None) -> Reply:
        if ending is None:
            why = f"no reply to prompt {prompt.index} after {self.limits.deadline:g} s (the option deadline)"
            return Reply(fault="timeout", problem=why)
        return Reply(fault="error", problem=f"the process that replies to prompt {prompt.index} {ending}")


def _service(task: Task) -> Any:
    return task.service() or (Processes(task) if task.isolated else AtOnce(task))
