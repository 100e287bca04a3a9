"""The processes of a run and how they exchange results. With one process, the usual case, all of this does nothing.

    sparse-rl train RECIPE --num-processes 8
    accelerate launch --num_processes 8 -m sparse_rl train RECIPE        (or torchrun)

Every process does its share, then all meet: `run_on_all` gives every process's result to all processes, and an error or
a stop in one of them reaches all. So after a meeting all processes are at the same place in the program, and none waits
for a process that has given up.

Only tensors, plain data and records named by `exchanged` are sent. Nothing else is unpickled, so that someone who can
write into a connection between processes cannot run code in them.
"""

from __future__ import annotations

import datetime
import io
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..errors import SparseRLError
from ..signals import stoppable

T = TypeVar("T")
BUCKET = 2**26  # numbers that are summed over processes at once
PEER_LOST = "another process of this run is gone; see its own message, and go on with --resume."
MEETING_FILE = "SPARSE_RL_MEETING_FILE"  # environment variable: the file through which processes of launch.py meet
_PATIENCE = datetime.timedelta(days=1)  # a process may sample much longer than another; a dead one is noticed at once


class PeerFailed(SparseRLError):
    """Another process failed and has printed its own error."""


@dataclass
class _Outcome:
    """The result of a process's work, or its error, for a meeting."""

    value: Any = None
    error: str | None = None
    stopped: bool = False
    seconds: float = 0.0  # the time that its work took


_RECORDS: list[type] = []  # records that `exchanged` named


def exchanged(*records: type) -> None:
    """Register dataclasses whose instances processes may send each other."""
    _RECORDS.extend(records)


class World:
    def __init__(self, rank: int = 0, size: int = 1, group=None):
        self.rank, self.size = rank, size
        self.group = group  # for records on the CPU; gradients go by torch's default group
        self.idle = 0.0  # share of the processes' time before the last meeting that they spent waiting for the slowest
        self.waited = 0.0  # seconds this process waited at the last meeting
        self.stop = False  # Ctrl-C or SIGTERM came; all processes stop at the next meeting
        self.working = False  # whether a signal may interrupt this process

    @property
    def first(self) -> bool:
        """Whether this process is the one that writes files and messages."""
        return self.rank == 0

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Do the work in every process and return all results, by rank.

        If one process raises an error, all raise; if one is told to stop, all raise KeyboardInterrupt.
        """
        if self.size == 1:
            return [work()]
        outcome, failure, start = _Outcome(stopped=self.stop), None, time.perf_counter()
        if not self.stop:
            self.working = True
            try:
                outcome.value = work()
            except KeyboardInterrupt:
                outcome.stopped = True
            except Exception as error:
                failure, outcome.error = error, (str(error) or type(error).__name__).splitlines()[0]
            finally:
                self.working = False
        outcome.seconds = time.perf_counter() - start
        outcomes = self._gather(outcome)
        self.waited = time.perf_counter() - start - outcome.seconds
        seconds = [o.seconds for o in outcomes]
        self.idle = 1 - sum(seconds) / (self.size * max(seconds)) if max(seconds) > 0 else 0.0
        # If all have the same error, only the first process shows it.
        said_by_first = outcome.error is not None and outcomes[0].error == outcome.error and not self.first
        if failure is not None and not said_by_first:
            raise failure
        for rank, other in enumerate(outcomes):
            if other.error is not None:
                raise PeerFailed(f"process {rank} of {self.size} failed: {other.error}") from failure
        if any(o.stopped for o in outcomes):
            self.stop = False  # all know now, and may meet again to save
            raise KeyboardInterrupt
        return [o.value for o in outcomes]

    def gather(self, value: T) -> list[T]:
        """The value of every process, by rank. A stop is handled at the next meeting."""
        return [value] if self.size == 1 else self._gather(value)

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Do the work in the first process only; all get its result."""
        first: list[T | None] = self.run_on_all(lambda: work() if self.first else None)
        return cast(T, first[0])

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum tensors over processes in place; every process gets the same bits."""
        if self.size == 1:
            return
        bucket: list[Tensor] = []
        for i, tensor in enumerate(tensors):
            bucket.append(tensor)
            if i + 1 == len(tensors) or sum(t.numel() for t in bucket) + tensors[i + 1].numel() > BUCKET:
                self._add(bucket)
                bucket = []

    def add_numbers(self, numbers: dict[str, float]) -> dict[str, float]:
        """Sum numbers over processes, in double precision."""
        if self.size == 1:
            return numbers
        found = torch.tensor(list(numbers.values()), dtype=torch.float64)
        with lost_process():
            torch.distributed.all_reduce(found, group=self.group)
        return dict(zip(numbers, found.tolist()))

    def _add(self, tensors: list[Tensor]) -> None:
        flat = torch.cat([t.reshape(-1) for t in tensors])
        with lost_process():
            torch.distributed.all_reduce(flat)
        for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors])):
            tensor.copy_(part.view_as(tensor))

    def _gather(self, value) -> list:
        own = torch.frombuffer(bytearray(packed(value)), dtype=torch.uint8)
        with lost_process():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            torch.distributed.all_gather(sizes, torch.tensor([own.numel()]), group=self.group)
            longest = max(int(size) for size in sizes)
            found = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
            padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
            torch.distributed.all_gather(found, padded, group=self.group)
        return [unpacked(content[: int(size)].numpy().tobytes()) for content, size in zip(found, sizes)]

    @contextmanager
    def stoppable(self) -> Iterator[None]:
        """Handle Ctrl-C and SIGTERM: a single process stops at once; several stop together at their next meeting."""
        if self.size == 1 or threading.current_thread() is not threading.main_thread():
            with stoppable():
                yield
            return

        def stop(*_):
            self.stop = True
            if self.working:
                raise KeyboardInterrupt

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


_unpacking = threading.Lock()  # all threads share torch's list of classes that may be loaded


def packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(content: bytes) -> Any:
    """The inverse of `packed`, for tensors, plain data and records. Anything else is refused, and no code is run."""
    with _unpacking, torch.serialization.safe_globals([_Outcome, *_RECORDS]):
        return torch.load(io.BytesIO(content), weights_only=True)


@contextmanager
def lost_process() -> Iterator[None]:
    """Raise one sentence if other processes disappear in the middle of an exchange."""
    try:
        yield
    except RuntimeError as error:  # torch.distributed raises nothing more specific
        raise PeerFailed(PEER_LOST) from error


def is_lost(error: BaseException) -> bool:
    """Whether an error says that another process is gone. It can come from anywhere, because models exchange shards."""
    return isinstance(error, torch.distributed.DistError) or (
        isinstance(error, RuntimeError) and "/gloo/" in str(error)
    )


def join_world() -> World:
    """Join the processes that a launcher started; a world of one process if there was no launcher."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return World()
    from accelerate import PartialState

    meeting = {}
    if file := os.environ.get(MEETING_FILE):
        place = {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
        meeting = {"init_method": f"file://{file}", **place}
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:  # one machine, so nothing should use the network
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback())
    state = PartialState(cpu=not torch.cuda.is_available(), **meeting)
    return World(
        state.process_index, state.num_processes, torch.distributed.new_group(backend="gloo", timeout=_PATIENCE)
    )


def loopback() -> str:
    """The name of the loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")


def leave_world(world: World, failed: bool = False) -> None:
    """Close the process group, because threads of an open group would abort the process when Python ends.

    failed: do not wait for the other processes, as NCCL would
    """
    if world.size > 1 and torch.distributed.is_initialized():
        alone = failed and torch.distributed.get_backend() != "gloo"
        torch.distributed.destroy_process_group(world.group if alone else None)
