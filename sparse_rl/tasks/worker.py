"""The other end of verify.py: a process that grades completions of one task until its stdin closes.

Messages use copies of stdin and stdout; the reward itself gets an empty stdin, and what it prints goes to stderr.
"""

from __future__ import annotations

import faulthandler
import os
import pickle
import select
import signal
import sys
import traceback
from typing import BinaryIO

from ..errors import SparseRLError
from .base import Task, judged, make
from .verify import GRACE, HEADER, START, Outcome, frame


def main() -> None:
    """Serve, then end at once: a thread that the reward left running must not keep the process alive."""
    code = 0
    try:
        serve()
    except BrokenPipeError:  # the parent is gone
        pass
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = os.getppid()
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    nowhere = open(os.devnull, "r+")  # noqa: SIM115  (it stays open while the process lives)
    os.dup2(nowhere.fileno(), 0)
    os.dup2(2, 1)

    def overstay(seconds: float) -> None:
        """End the process after this time. faulthandler's thread needs no lock that a reward could hold."""
        faulthandler.dump_traceback_later(seconds + GRACE, exit=True, file=nowhere)

    overstay(START)
    hello = _receive(inbox, parent)
    if hello is None:
        return
    name, options, limits = pickle.loads(hello)
    try:
        limit_memory(limits["memory"])
        task = make(name, **options)
        task.prepare()
    except Exception as error:  # the parent raises it
        why = str(error) if isinstance(error, SparseRLError) else f"{type(error).__name__}: {error}"
        outbox.write(frame(pickle.dumps(why)))
        return
    outbox.write(frame(pickle.dumps("ready")))
    faulthandler.cancel_dump_traceback_later()
    while (message := _receive(inbox, parent)) is not None:
        overstay(limits["deadline"])
        outbox.write(frame(pickle.dumps(outcome(task, message))))
        faulthandler.cancel_dump_traceback_later()


def outcome(task: Task, message: bytes) -> Outcome:
    try:
        prompt, text = pickle.loads(message)
    except Exception as error:
        return (
            0.0,
            "error",
            {},
            f"the prompt could not be read in the grading process ({type(error).__name__}: {error})",
        )
    grade, problem = judged(task, prompt, text)
    return grade.reward, grade.verdict, dict(grade.parts), problem


def limit_memory(gibibytes: float | None) -> None:
    if gibibytes is not None:
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        size = int(gibibytes * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def _receive(inbox: BinaryIO, parent: int) -> bytes | None:
    """The next message; None once the parent is gone, even if a process it forked still holds the pipe."""
    while not select.select([inbox], [], [], 5.0)[0]:
        if os.getppid() != parent:
            return None
    header = inbox.read(HEADER.size)
    return inbox.read(HEADER.unpack(header)[0]) if len(header) == HEADER.size else None


if __name__ == "__main__":
    main()
