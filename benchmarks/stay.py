"""What a benchmark needs that has a GPU for some minutes only: a clock that cuts training in time for what must follow
it, a device that several processes share, and the words that say where a number comes from.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path


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


@contextlib.contextmanager
def shared_device() -> Iterator[None]:
    """CUDA's multi-process service, where there is one: processes then compute side by side, not in turns."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
        yield
        return
    folder = tempfile.mkdtemp(prefix="mps-")
    os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    begun = subprocess.run([control, "-d"], capture_output=True, text=True)
    if begun.returncode:
        why = (begun.stdout + begun.stderr).strip()
        print(f"CUDA MPS could not be started ({why}); processes take turns.", flush=True)
        del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run([control], input="quit\n", capture_output=True, text=True, timeout=20)
        for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"):
            os.environ.pop(name, None)


@functools.cache
def provenance() -> dict[str, str]:
    """The commit, the device and its driver, and the versions of what computes; what cannot be found is left out."""
    here = Path(__file__).resolve().parent
    asked = {
        "commit": ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"],
        "device": ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
    }
    found = {}
    for name, command in asked.items():
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
            if done.returncode == 0 and done.stdout.strip():
                found[name] = done.stdout.strip().splitlines()[0]
    for package in ("torch", "transformers", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return {"device": "CPU", **found}


def sentence(where: dict[str, str]) -> str:
    """commit 1234567, NVIDIA H200, 570.1, torch 2.11.0"""
    device = [where[name] for name in ("device",) if name in where]
    commit = [f"commit {where['commit']}"] if "commit" in where else []
    return ", ".join([*commit, *device, *(f"{k} {v}" for k, v in where.items() if k not in ("commit", "device"))])
