"""An environment that lives in a process of its own and holds many conversations at once; this is our side of it.

Like the services of replies.py it is asked and answers later. But it remembers its conversations, so each has a key
there, and it must be told when one ends. At the end it says what the conversation is worth (`Reply.graded`).

A conversation whose reply is late is dropped, with the fault `timeout`. If the process gives no sign of life for as
long, or dies, all its conversations end with a fault, and the next one starts a new process. A process that holds no
conversation and is silent is replaced at once: it may still hang in one that was dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import psutil

from ..errors import SparseRLError
from .conversing import Reply, checked
from .judging import problem_of
from .problem import Message, Prompt
from .verify import START, how_ended

_CHILD = "import sys; sys.path[:] = sys.argv[1:]; from sparse_rl.tasks.verifiers_host import main; main()"
BEAT = 1.0  # seconds between the process's signs of life
_BAD_CALL = "no_tool"  # the name of a call that could not be read; a harness answers that there is no such tool


class Environment:
    def __init__(self, name: str, made: dict[str, Any], deadline: float, released: Callable[[Environment], None]):
        """made: what the process makes the environment of. released: is told when a rollout is over."""
        self.name, self.made, self.deadline, self.released = name, made, deadline, released
        self.due: dict[Hashable, tuple[float, Prompt]] = {}  # who waits for a reply, and until when
        self.open: dict[Hashable, str] = {}  # its key in the process
        self.last: set[Hashable] = set()  # who may have no further turn
        self.lost: list[tuple[Hashable, Reply]] = []  # faults that were found without a message
        self.process: subprocess.Popen[bytes] | None = None
        self.number, self.ending = 0, ""  # conversations so far; how the last process ended
        ready = self._start()
        self.prompts: list[list[Message]] = ready["prompts"]
        self.tools: list[dict[str, Any]] = ready["tools"]

    # The service of a rollout

    def ask(self, key: Hashable, prompt: Prompt, messages: list[Message], last: bool = False) -> None:
        """Give it the model's turn. last: it was cut, and there will be no other."""
        if self.process is not None and not self.due:
            self._end_if_silent()
        if key not in self.open and len(messages) > len(prompt.text) + 1:
            return self._lose(key, prompt)
        if self.process is None:
            self._start()
        if key not in self.open:
            self.open[key], self.number = f"c{self.number}", self.number + 1
        if last:
            self.last.add(key)
        self.due[key] = time.monotonic() + self.deadline, prompt
        reason = "length" if last else "stop"
        said = wire_message(messages[-1], len(messages))
        self._send({"key": self.open[key], "say": said, "prompt": prompt.index, "reason": reason})

    def stop(self, key: Hashable, prompt: Prompt) -> None:
        """The conversation ends after what was said: ask for its grade."""
        if key not in self.open:
            return self._lose(key, prompt)
        self.last.discard(key)
        self.due[key] = time.monotonic() + self.deadline, prompt
        self._send({"key": self.open[key], "stop": True})

    def drop(self, key: Hashable) -> None:
        """Forget a conversation."""
        self.due.pop(key, None)
        self.last.discard(key)
        if (name := self.open.pop(key, None)) is not None and self.process is not None:
            self._send({"key": name, "drop": True})

    @property
    def waiting(self) -> int:
        return len(self.due) + len(self.lost)

    def ready(self, seconds: float) -> list[tuple[Hashable, Reply]]:
        until, found = time.monotonic() + seconds, []
        while True:
            found, self.lost = [*found, *self.lost], []
            if self.due:
                found += self._heard(0.0 if found else max(0.0, min(until - time.monotonic(), 0.2)))
            if found or not self.waiting or time.monotonic() >= until:
                return found

    def close(self) -> None:
        """The rollout is over. The process stays for the next one."""
        for key in list(self.open):
            self.drop(key)
        self.lost = []
        self.released(self)

    # The process

    def end(self, patience: float = 5.0) -> str:
        """End the process and all that it started; say how it ended."""
        process, self.process = self.process, None
        if process is None:
            return "was not running"
        self._finalizer.detach()
        return end_process(process, patience)

    def _start(self) -> dict[str, Any]:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
            env={"OMP_NUM_THREADS": "1", **os.environ},
        )
        self._finalizer = weakref.finalize(self, end_process, self.process)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.writes, self.reads = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.writes, False)  # a process that hangs must not stop the rollout
        os.set_blocking(self.reads, False)
        self.inbox, self.outbox, self.beat = b"", b"", time.monotonic()
        self._send(self.made)
        until = time.monotonic() + START
        while time.monotonic() < until and self.process is not None:
            for message in self._messages(0.2):
                if "ready" in message:
                    return message["ready"]
                self.end()
                raise SparseRLError(f"the environment {self.name} cannot be used: {message['refused']}")
        ending = self.end() if self.process is not None else self.ending
        raise SparseRLError(f"the environment {self.name} was not ready: its process {ending}.")

    def _send(self, message: dict[str, Any]) -> None:
        if self.process is None:  # it ended meanwhile; whoever waits is told by `_late`
            return
        self.outbox += json.dumps(message).encode() + b"\n"
        self._push()

    def _push(self) -> None:
        """Write what the pipe takes now. That the process is gone is found when it is read."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self.outbox:
                self.outbox = self.outbox[os.write(self.writes, self.outbox[: 1 << 16]) :]

    def _messages(self, seconds: float) -> list[dict[str, Any]]:
        """What the process has said, after waiting at most so long. If it is gone, `process` is None afterwards."""
        assert self.process is not None
        found: list[dict[str, Any]] = []
        until = time.monotonic() + seconds
        while not found:
            writes = [self.writes] if self.outbox else []
            readable, writable, _ = select.select([self.reads], writes, [], max(0.0, until - time.monotonic()))
            if writable:
                self._push()
            if readable:
                received = os.read(self.reads, 1 << 20)
                if not received:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.process.wait(1.0)
                    self.ending = self.end(patience=0.0)
                    break
                *lines, self.inbox = (self.inbox + received).split(b"\n")
                found += [json.loads(line) for line in lines]
                self.beat = max([self.beat, *(message.get("at", 0.0) for message in found)])  # not when it is read
            elif time.monotonic() >= until:
                break
        return found

    def _heard(self, seconds: float) -> list[tuple[Hashable, Reply]]:
        names = {name: key for key, name in self.open.items()}
        found = []
        for message in self._messages(seconds) if self.process is not None else ():
            key = names.get(message.get("key", ""))
            if key is None or key not in self.due:
                continue  # a sign of life, or a conversation that was dropped
            _, prompt = self.due.pop(key)
            reply = self._reply(message, prompt)
            if reply.messages is not None and key in self.last:
                self.stop(key, prompt)
                continue
            if reply.messages is None:
                self.drop(key) if "messages" in message else self._forget(key)
            found.append((key, reply))
        return found + self._late()

    def _reply(self, message: dict[str, Any], prompt: Prompt) -> Reply:
        if "graded" in message:
            return Reply(graded=json.dumps(message["graded"]))
        if "fault" in message:
            return Reply(fault="error", problem=f"{self.name}: {message['fault']} (prompt {prompt.index})")
        try:
            return checked(message["messages"])
        except (TypeError, ValueError) as error:
            return Reply(fault="error", problem=problem_of(error, prompt))

    def _late(self) -> list[tuple[Hashable, Reply]]:
        """Faults of conversations that waited too long, or whose process is gone."""
        now, found = time.monotonic(), []
        hangs = self.process is not None and now - self.beat > self.deadline and bool(self.due)
        if hangs:
            self.end(patience=0.0)
            self.ending = f"gave no sign of life for {self.deadline:g} s"
        for key, (until, prompt) in list(self.due.items()):
            if self.process is None:
                why = f"the process of {self.name} {self.ending} (prompt {prompt.index})"
                found.append((key, Reply(fault="timeout" if hangs else "error", problem=why)))
            elif now >= until:
                why = f"no reply to prompt {prompt.index} after {self.deadline:g} s (the option deadline)"
                found.append((key, Reply(fault="timeout", problem=why)))
                self.drop(key)
        if self.process is None:  # conversations whose turns are being sampled find out when they ask
            self.due.clear()
            self.open.clear()
            self.last.clear()
        return found

    def _end_if_silent(self) -> None:
        """Nobody waits, so nobody has looked at its signs of life: do not give another turn to a process that hangs."""
        self._messages(0.0)
        silent, allowed = time.monotonic() - self.beat, self.deadline if self.open else min(self.deadline, 3 * BEAT)
        if self.process is not None and silent > allowed:
            self.end(patience=0.0)
            self.ending = f"gave no sign of life for {silent:.0f} s"
        if self.process is None:
            self.open.clear()
            self.last.clear()

    def _lose(self, key: Hashable, prompt: Prompt) -> None:
        """The process ended while the conversation's turn was sampled."""
        why = f"the process of {self.name} {self.ending}, and with it the conversation of prompt {prompt.index}"
        self.lost.append((key, Reply(fault="error", problem=why)))

    def _forget(self, key: Hashable) -> None:
        self.open.pop(key, None)
        self.last.discard(key)


def wire_message(message: Message, turn: int) -> dict[str, Any]:
    """The model's message as OpenAI's protocol has it: calls have ids, and their arguments are text."""
    calls = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    wired: dict[str, Any] = {"role": "assistant", "content": message["content"]}
    if calls:
        wired["tool_calls"] = [
            {
                "id": f"call_{turn}_{i}",
                "type": "function",
                "function": {"name": call.get("name") or _BAD_CALL, "arguments": _arguments(call.get("arguments"))},
            }
            for i, call in enumerate(calls)
        ]
    return wired


def _arguments(given: Any) -> str:
    return given if isinstance(given, str) else json.dumps({} if given is None else given, ensure_ascii=False)


def end_process(process: subprocess.Popen[bytes], patience: float = 5.0) -> str:
    """End a process, kindly within `patience` seconds, and all that it started; say how it ended."""
    started = []
    with contextlib.suppress(psutil.Error):  # tool servers have sessions of their own
        started = psutil.Process(process.pid).children(recursive=True)
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # it is gone already
        os.killpg(process.pid, signal.SIGKILL)
    for child in started:
        with contextlib.suppress(psutil.Error):
            child.kill()
    code = process.wait()
    if process.stdout is not None:
        process.stdout.close()
    return how_ended(code)
