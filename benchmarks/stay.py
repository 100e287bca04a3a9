"""The clock of a benchmark that has a GPU for some minutes only: training is cut in time for what must follow it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable


class Stay:
    """Minutes that a command may take, the last of which are kept for its evaluations."""

    def __init__(self, minutes: float, kept: float = 0.0):
        """`kept`: what training leaves, at most half of all."""
        self.end = time.perf_counter() + 60 * minutes
        self.training_ends = self.end - 60 * min(kept, minutes / 2)

    def is_over(self) -> bool:
        return time.perf_counter() > self.end

    def train(self, work: Callable[[], None]) -> bool:
        """Do it until the time of training is over, and then ask it to stop, as Ctrl-C would: a run saves a checkpoint,
        and can go on. Returns whether it came to its end.
        """
        from sparse_rl.signals import stoppable

        seconds = self.training_ends - time.perf_counter()
        clock = threading.Timer(min(max(0.0, seconds), threading.TIMEOUT_MAX), os.kill, (os.getpid(), signal.SIGTERM))
        clock.daemon = True
        try:
            with stoppable():
                clock.start()
                try:
                    work()
                finally:
                    clock.cancel()
                    clock.join()  # a signal that is on its way comes now
        except KeyboardInterrupt:
            if time.perf_counter() < self.training_ends:  # it was not the clock
                raise
            print("time is over; give the same command again.", file=sys.stderr, flush=True)
            return False
        return True
