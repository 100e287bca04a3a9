"""Sources of a step's completions: the engine of this process (`Here`) or a pool of samplers (`FromPool`).

Both give the same completions. If a pool's samplers run ahead of the learner, they score them as well, because the
learner no longer has the weights that sampled.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from ..distributed.world import exchanged, packed, unpacked
from ..learn.batch import Scored, join
from ..pool.pieces import cut
from ..pool.pool import Pool
from ..records import Trajectory
from .complete import Completer

Diagnosis = tuple[Tensor, Tensor | None]  # what `Completer.diagnose` returns for a trajectory


@dataclass(frozen=True)
class Asked:
    """A request for completions of some prompts of a step."""

    ids: Sequence[Sequence[int]]  # of all prompts of the step
    members: Sequence[Sequence[int]]  # the members of every prompt's group that are wanted
    seed: int
    version: int  # of the weights to sample with
    expected: Sequence[float]  # tokens of a completion, by prompt
    diagnose: Sequence[tuple[int, int]] = ()  # (prompt, member) to diagnose, if the source does that


@dataclass
class Done:
    """The completions, by prompt, then by member."""

    trajectories: list[Trajectory]
    scored: Scored | None = None  # None: the learner scores them
    diagnosed: dict[tuple[int, int], Diagnosis] = field(default_factory=dict)  # by (prompt, member)


exchanged(Done)


class Asks(Protocol):
    scores: bool  # whether completions come scored

    def complete(self, asked: Asked) -> Done: ...


class Here:
    """Completes prompts with the engine of this process."""

    scores = False

    def __init__(self, completer: Completer):
        self.completer = completer

    def complete(self, asked: Asked) -> Done:
        engine, sampling = self.completer.engine, self.completer.sampling
        group = self.completer.recipe.rollout.group_size
        return Done(engine.generate(asked.ids, group, sampling, asked.seed, samples=asked.members))


class FromPool:
    """Completes prompts with a pool of samplers in other processes."""

    def __init__(self, pool: Pool, completer: Completer, scores: bool, rank: int):
        self.pool, self.completer, self.scores, self.rank = pool, completer, scores, rank

    def complete(self, asked: Asked) -> Done:
        engine = self.completer.engine
        budget = engine.compressor.budget if engine.compressor.has_budget else None
        diagnose = asked.diagnose if self.scores else ()
        pieces = cut(asked.ids, asked.members, asked.seed, asked.version, budget, asked.expected, diagnose)
        with closing(self.pool.results(pieces)) as results, ThreadPoolExecutor(1, "opener") as opener:
            opening = {number: opener.submit(opened, payload) for number, payload in results}  # others are under way
        found = [opening[number].result() for number in range(len(pieces))]
        trajectories = [t for done in found for t in done.trajectories]
        assert [(t.prompt_index, t.sample_index) for t in trajectories] == [
            (i, member) for i, members in enumerate(asked.members) for member in sorted(members)
        ], "a piece was lost"
        assert all(t.version == asked.version for t in trajectories), "sampled with other weights"
        parts = [done.scored for done in found if done.scored is not None]
        diagnosed = {place: values for done in found for place, values in done.diagnosed.items()}
        return Done(trajectories, self._joined(parts) if self.scores else None, diagnosed)

    def _joined(self, parts: Sequence[Scored]) -> Scored:
        whole = join(*parts)
        owner_rank = torch.full_like(whole.sampled.owner_rank, self.rank)
        return replace(whole, sampled=replace(whole.sampled, owner_rank=owner_rank))


def closed(done: Done) -> bytes:
    """The completions as compressed bytes, to send: traces repeat themselves, so they shrink to a fraction."""
    return zlib.compress(packed(done), 1)


def opened(content: bytes) -> Done:
    return unpacked(zlib.decompress(content))
