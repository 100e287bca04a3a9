"""Sampling one step ahead: the next step's rollouts run on frozen weights while the learner works on this one's.

    take(k)      the rollouts of step k, from weights that have seen the updates of steps up to k - 2
    start_next(k)     the frozen weights become the learner's, which has seen k - 1; the rollouts of step k + 1 begin
    learn from k

So what is learned from is one step old, never more. The old log-probs are those of the weights that sampled: what compression changed
stays in the gap, what the update in between changed is in the drift. On a GPU the two share the device by streams.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from ..rollout import Engine
from .log import Clock
from .step import StepRollout

Sample = Callable[[int, Clock], StepRollout]


class SyncSource:
    """Sample, then learn. The sampler's weights are always the learner's."""

    def __init__(self, sample: Sample):
        self.take = sample

    def start_next(self, step: int, publish: Callable[[], None]) -> None:
        """Nothing runs ahead."""

    def after_update(self, publish: Callable[[], None]) -> None:
        publish()

    def wait_idle(self) -> None: ...

    def close(self) -> None: ...


class PrefetchSource:
    def __init__(self, sample: Sample, engine: Engine, steps: int):
        self.sample, self.engine, self.steps = sample, engine, steps
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampler")
        self.stream = torch.cuda.Stream(engine.device) if engine.device.type == "cuda" else None
        self.pending: tuple[int, Clock, Future[StepRollout]] | None = None

    def take(self, step: int, clock: Clock) -> StepRollout:
        """What was sampled ahead, or, at the start, what is sampled now."""
        if self.pending is None or self.pending[0] != step:
            self.wait_idle()
            return self.sample(step, clock)
        _, theirs, future = self.pending
        with clock.stage("wait"):
            rollout = future.result()
        self.pending = None
        return replace(rollout, timing={f"ahead/{name}/seconds": seconds for name, seconds in theirs.seconds.items()})

    def start_next(self, step: int, publish: Callable[[], None]) -> None:
        """After `take`: hand the learner's weights to the sampler and begin the next step."""
        publish()
        if step + 1 >= self.steps:
            return
        if self.stream is not None:
            self.stream.wait_stream(
                torch.cuda.current_stream(self.engine.device)
            )  # the weights are there before they are used
        clock = Clock()

        def run() -> StepRollout:
            with self.sampler_stream():
                return self.sample(step + 1, clock)

        self.pending = (step + 1, clock, self.worker.submit(run))

    def after_update(self, publish: Callable[[], None]) -> None:
        """The sampler is at work: its weights change when it is not."""

    def sampler_stream(self) -> AbstractContextManager:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def wait_idle(self) -> None:
        """Wait until nothing uses the sampler's weights; what was sampled is kept."""
        if self.pending is not None:
            self.pending[2].exception()

    def close(self) -> None:
        """End what runs, and throw it away."""
        self.engine.stopped = True
        self.worker.shutdown(wait=True)
