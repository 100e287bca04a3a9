"""The other end of verify.py: a process that grades completions of one task until its stdin closes.

Messages use copies of stdin and stdout; the reward itself gets an empty stdin, and what it prints goes to stderr.

A task that keeps a spare is graded by a copy of this process (a fork, made once the task is prepared). An answer that
takes more CPU time than it may ends the copy, and the next copy is there within milliseconds, where a new process would
import for seconds.
"""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import BinaryIO

from ..errors import SparseRLError
from .base import Task, make
from .conversing import Reply, answered
from .judging import judged
from .verify import GRACE, HEADER, OUT_OF_TIME, START, Outcome, frame, how_ended


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
    spare = task.keeps_spare and threading.active_count() == 1  # threads do not survive in a copy
    if spare:
        gc.freeze()  # what is shared with the copies stays shared
    busy = mmap.mmap(-1, 1)  # shared with the copies: 1 while a completion is graded

    def grade_all(parent: int) -> None:
        while (message := _receive(inbox, parent)) is not None:
            busy[0] = 1
            overstay(limits["deadline"])
            found = outcome(task, message, limited=spare)
            busy[0] = 0
            outbox.write(frame(pickle.dumps(found)))
            faulthandler.cancel_dump_traceback_later()

    if not spare:
        grade_all(parent)
        return
    while (code := run_copy(grade_all, parent)) != 0:
        if not busy[0]:
            os._exit(1)  # it died idle; the parent starts another process
        busy[0] = 0
        late = code == -signal.SIGPROF
        died: Outcome = (0.0, "error", {}, f"the grading process {how_ended(code)}")
        outbox.write(frame(pickle.dumps(OUT_OF_TIME if late else died)))


def run_copy(work: Callable[[int], None], parent: int) -> int:
    """Run `work` in a copy of this process until it ends, or until the parent is gone; returns its exit code."""
    alive, held = os.pipe()  # the copy alone holds one end
    pid = os.fork()
    if pid == 0:
        os.close(alive)
        try:
            work(os.getppid())
            os._exit(0)
        except BrokenPipeError:
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(held)
    while not select.select([alive], [], [], 5.0)[0]:
        if os.getppid() != parent:
            os.kill(pid, signal.SIGKILL)
            break
    os.close(alive)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def outcome(task: Task, message: bytes, limited: bool) -> Outcome | Reply:
    """The grade of a completion, or the reply to messages."""
    try:
        prompt, text, seconds = pickle.loads(message)
    except Exception as error:
        problem = f"the prompt could not be read in the grading process ({type(error).__name__}: {error})"
        return 0.0, "error", {}, problem
    if isinstance(text, list):
        return answered(task, prompt, text)
    if limited:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of CPU time: SIGPROF ends the process, even inside C code
    grade, problem = judged(task, prompt, text)
    signal.setitimer(signal.ITIMER_PROF, 0)
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
