"""Sources of a step's rollouts: sampled in turn with learning, or ahead of it while the learner works.

    take(k)         the rollouts of step k, sampled with weights that include the updates up to step k - 2
    start_next(k)   the sampler gets the learner's weights, which include step k - 1, and begins the rollouts of k + 1
    learn from k

So with `rollout.ahead: 1` the rollouts are one step old, never more. The old log-probs come from the weights that
sampled, so the gap shows what compression changed, and the drift what the update in between changed. On a GPU the two
threads share the device by streams.

A pool's samplers get the weights of every version that they need, so several steps may be under way (`PoolSource`):
step k is sampled with weights that include the updates before step k - ahead, whichever sampler does it and however
often its work is lost. The pool gets weights before the learner waits for a step, not when the next one begins: they
take seconds to send, and samplers are then still busy.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from ..config import Recipe
from ..rollout import Engine
from .log import Clock
from .step import StepRollout
from .worker import Sampler

Sample = Callable[[int, Clock], StepRollout]


class SyncSource:
    """Samples each step when it is needed. The sampler's weights are always the learner's."""

    def __init__(self, sample: Sample, publish_weights: Callable[[], None]):
        self.take, self.publish_weights = sample, publish_weights

    def before_take(self, clock: Clock) -> None: ...

    def start_next(self, step: int) -> None:
        """Do nothing: no step is sampled ahead."""

    def after_update(self) -> None:
        self.publish_weights()

    def wait_idle(self) -> None: ...

    def close(self) -> None: ...


class PrefetchSource:
    """Samples one step ahead, in a thread."""

    def __init__(self, sample: Sample, publish_weights: Callable[[], None], engine: Engine, steps: int):
        self.sample, self.publish_weights, self.engine, self.steps = sample, publish_weights, engine, steps
        self.worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sampler")
        self.stream = torch.cuda.Stream(engine.device) if engine.device.type == "cuda" else None
        self.pending: tuple[int, Clock, Future[StepRollout]] | None = None

    def before_take(self, clock: Clock) -> None:
        """Do nothing: the sampler is busy; `start_next` gives it the weights when it is idle."""

    def take(self, step: int, clock: Clock) -> StepRollout:
        """The rollouts that were sampled ahead; the first ones of a run are sampled now."""
        if self.pending is None or self.pending[0] != step:
            self.wait_idle()
            return self.sample(step, clock)
        _, their_clock, future = self.pending
        with clock.stage("wait"):
            rollout = future.result()
        self.pending = None
        timing = {f"ahead/{name}/seconds": seconds for name, seconds in their_clock.seconds.items()}
        return replace(rollout, timing=rollout.timing | timing)

    def start_next(self, step: int) -> None:
        """After `take`: hand the learner's weights to the sampler and begin the next step."""
        self.publish_weights()
        if step + 1 >= self.steps:
            return
        if self.stream is not None:  # the sampler's stream waits until the weights are copied
            self.stream.wait_stream(torch.cuda.current_stream(self.engine.device))
        clock = Clock()

        def run() -> StepRollout:
            with self.sampler_stream():
                return self.sample(step + 1, clock)

        self.pending = (step + 1, clock, self.worker.submit(run))

    def after_update(self) -> None:
        """Do nothing: `start_next` hands on the weights."""

    def sampler_stream(self) -> AbstractContextManager:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def wait_idle(self) -> None:
        """Wait until nothing uses the sampler's weights; the rollouts are kept."""
        if self.pending is not None:
            self.pending[2].exception()

    def close(self) -> None:
        """Stop the thread and discard its rollouts."""
        self.engine.stopped = True
        self.worker.shutdown(wait=True)


class PoolSource:
    """Lets a pool sample and score steps, up to `ahead` steps before the learner needs them."""

    def __init__(self, sampler: Sampler, publish_weights: Callable[[], None], ahead: int, steps: int):
        self.sampler, self.publish_weights, self.ahead, self.steps = sampler, publish_weights, ahead, steps
        self.workers = ThreadPoolExecutor(max_workers=ahead + 1, thread_name_prefix="step")
        self.pending: dict[int, tuple[Clock, Future[StepRollout]]] = {}
        self.begun = -1  # the last step that was begun

    def before_take(self, clock: Clock) -> None:
        """Give the pool the learner's weights, if a step is left for them. The pool has those that a run begins with.
        Its samplers may still be busy with those before, so that nobody waits meanwhile.
        """
        if 0 <= self.begun < self.steps - 1:
            with clock.stage("publish"):
                self.publish_weights()

    def take(self, step: int, clock: Clock) -> StepRollout:
        if step not in self.pending:  # the start of a run
            self._begin(step)
        their_clock, future = self.pending[step]
        with clock.stage("wait"):
            rollout = future.result()
        del self.pending[step]
        timing = {f"ahead/{name}/seconds": seconds for name, seconds in their_clock.seconds.items()}
        return replace(rollout, timing=rollout.timing | timing)

    def start_next(self, step: int) -> None:
        """After `take`: begin every step that may be sampled with the weights that the pool has."""
        self._begin(step + 1)

    def _begin(self, first: int) -> None:
        for step in range(first, min(first + self.ahead, self.steps)):
            if step not in self.pending:
                clock = Clock()
                planned = self.sampler.plan(step, clock)  # planned now, because it depends on what was seen so far
                self.pending[step] = clock, self.workers.submit(self.sampler.carry_out, planned, clock)
                self.begun = step

    def after_update(self) -> None:
        """Do nothing: `before_take` hands on the weights, when the step is whole."""

    def wait_idle(self) -> None:
        """Do nothing: no work under way uses weights of this process."""

    def close(self) -> None:
        """Discard what is under way; the pool has been closed."""
        self.workers.shutdown(wait=True, cancel_futures=True)


def make_source(
    recipe: Recipe, sampler: Sampler, publish_weights: Callable[[], None]
) -> SyncSource | PrefetchSource | PoolSource:
    ahead, steps = recipe.rollout.ahead, recipe.run.steps
    if not ahead:
        return SyncSource(sampler.step, publish_weights)
    if recipe.rollout.pool is not None:
        return PoolSource(sampler, publish_weights, ahead, steps)
    return PrefetchSource(sampler.step, publish_weights, sampler.engine, steps)
