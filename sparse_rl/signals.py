"""Ctrl-C and SIGTERM: held back during work that must happen wholly or not at all, or turned into a clean stop."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM until the block ends, so that its work happens wholly or not at all."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if None in before.values() or threading.current_thread() is not threading.main_thread():  # cannot be held back here
        yield
        return
    received = []
    for number in before:
        signal.signal(number, lambda number, _: received.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM, which schedulers send, stops a run as Ctrl-C does, even where Ctrl-C is ignored (background jobs)."""

    def stop(*_):
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # signals only reach the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
