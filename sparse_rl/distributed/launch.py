"""Run a command in several processes on this machine.

They find each other through a file that only this user can read, and talk over the loopback interface, so nothing of a
run can be reached from the network. For several machines use accelerate launch or torchrun.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..errors import SparseRLError, require_int
from .world import MEETING_FILE

# seconds to save, for processes that were stopped (True) or whose peer failed (False)
_PATIENCE = {True: 3600.0, False: 30.0}


def launch(processes: int, arguments: list[str], folder: Path, go_on: str) -> int:
    """Run `sparse-rl ARGUMENTS` in this many processes; if one fails, end the others. Returns the exit status.

    folder: that of the run; go_on: the command that continues it
    """
    import torch

    require_int(**{"--num-processes": processes})
    if (others := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise SparseRLError(
            f"--num-processes is {processes}, but another launcher has already started this as one of {others} "
            "processes; omit the option."
        )
    if torch.cuda.is_available() and processes > torch.cuda.device_count():
        raise SparseRLError(
            f"--num-processes is {processes}, but this machine has {torch.cuda.device_count()} GPUs; use at most one "
            "process per GPU."
        )
    children: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory(prefix="sparse-rl-") as private, passing_signals_on(children) as stops:
        for rank in range(processes):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            meeting = {MEETING_FILE: f"{private}/meeting"}
            environment = {**os.environ, **{name: str(value) for name, value in place.items()}, **meeting}
            # -P: do not import modules from the current folder, which may be someone else's
            command = [sys.executable, "-P", "-m", "sparse_rl", *arguments]
            children.append(subprocess.Popen(command, env=environment, start_new_session=True))
            for number in stops:  # signals that came while this process was being started
                children[-1].send_signal(number)
        statuses = wait_for_all(children, stops)
    failed = {rank: status for rank, status in statuses.items() if status}
    if stops:
        return 130
    if not failed:
        return 0
    rank = first_failure(failed)
    code = failed[rank]
    if code == 130:  # it was stopped and has said so
        return 130
    end = f"was ended by signal {-code}" if code < 0 else f"failed with exit status {code}"
    begun = (folder / "recipe.yaml").exists()
    hint = f" Go on with: {go_on} --num-processes {processes}" if begun else ""
    raise SparseRLError(
        f"process {rank} of {processes} {end}, and the others were ended; its own message is above.{hint}"
    )


@contextmanager
def passing_signals_on(children: Sequence[subprocess.Popen]) -> Iterator[list[int]]:
    """Pass Ctrl-C, SIGTERM and SIGHUP on to all processes; gives a list of the signals that came."""
    came: list[int] = []

    def pass_on(number: int, _) -> None:
        came.append(number)
        for child in children:
            child.send_signal(number if number != signal.SIGHUP else signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def wait_for_all(children: Sequence[subprocess.Popen], stops: Sequence[int]) -> dict[int, int]:
    """The exit status of every process, by rank, in the order in which they ended.

    If one fails, the others are told to stop, and killed if they do not.
    """
    statuses: dict[int, int] = {}
    deadline: float | None = None
    while True:
        for rank, child in enumerate(children):
            if rank not in statuses and (status := child.poll()) is not None:
                statuses[rank] = status
        running = [child for rank, child in enumerate(children) if rank not in statuses]
        if not running:
            return statuses
        failures = [status for status in statuses.values() if status]
        if failures and deadline is None:
            deadline = time.monotonic() + _PATIENCE[bool(stops) or failures[0] == 130]
            for child in running:
                child.terminate()
        if deadline is not None and time.monotonic() > deadline:
            for child in running:
                child.kill()
        time.sleep(0.05)


def first_failure(failed: Mapping[int, int]) -> int:
    """The rank of the process whose failure made the others fail. failed: rank -> exit status, in order of their ends

    All fail at about the same time. If one was killed by a signal, the others fail with a status, and it is the first
    failure; but SIGTERM comes from the launcher itself.
    """
    return min(failed, key=lambda rank: (failed[rank] == -signal.SIGTERM, failed[rank] > 0))
