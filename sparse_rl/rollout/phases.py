"""Measure where a rollout's time goes: on a GPU with the device's own events, without a sync; elsewhere on the host."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..kernels import ops


class Phases:
    def __init__(self, device: torch.device):
        self.on_gpu = ops.rules(device).on_gpu
        self.start = time.perf_counter()
        self.parts: list[tuple[str, Any, Any]] = []  # (name, before, after): seconds, or events of the device

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        before = self._now()
        yield
        self.parts.append((name, before, self._now()))

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self) -> dict[str, float]:
        """Seconds by phase; `total` on the host's clock; and `host`, the time outside all phases."""
        if self.on_gpu:
            torch.cuda.synchronize()
        total = time.perf_counter() - self.start
        found: dict[str, float] = defaultdict(float)
        for name, before, after in self.parts:
            found[name] += before.elapsed_time(after) / 1000 if self.on_gpu else after - before
        return {**found, "host": max(0.0, total - sum(found.values())), "total": total}
