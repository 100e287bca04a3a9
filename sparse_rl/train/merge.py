"""Dividing a step among processes, and putting it together again as one process would have made it.

Prompts are dealt out minibatch by minibatch, so that the processes have about as much to sample and, in every optimizer step, to learn
from. All members of a group stay on one process. What the others need to know of a trajectory is small; its trace, which is not, stays
where it was sampled, and so does the learning from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..cache import Trace
from ..learn.batch import Scored, join
from .step import StepRollout


def without_full_traces(rollout: StepRollout) -> StepRollout:
    """What other processes need of a part: of its traces one head, which evicts when all do."""
    traces = tuple(first_head_trace(trace) for trace in rollout.scored.sampled.traces)
    return replace(
        rollout,
        trajectories=[replace(t, trace=trace) for t, trace in zip(rollout.trajectories, traces, strict=True)],
        scored=replace(rollout.scored, sampled=replace(rollout.scored.sampled, traces=traces)),
    )


def first_head_trace(trace: Trace) -> Trace:
    return Trace(trace.evicted_at[:1, :1].clone())


def merge(parts: Sequence[StepRollout], group_size: int) -> StepRollout:
    """The parts of all processes as one rollout: by round of sampling, then prompt by prompt."""
    if len(parts) == 1:
        return parts[0]
    places: list[tuple[int, int]] = []  # (round, place in the step) of every trajectory, part after part
    for part in parts:
        rounds: Counter[int] = Counter()
        for slot in slots(part, group_size):
            places.append((rounds[slot], slot))
            rounds[slot] += 1
    order = sorted(range(len(places)), key=places.__getitem__)
    now_at = torch.empty(len(order), dtype=torch.int64)
    now_at[order] = torch.arange(len(order))
    chosen, start = torch.empty(sum(len(part.chosen) for part in parts), dtype=torch.int64), 0
    for part in parts:
        chosen[[places[start + i][1] for i in part.chosen.tolist()]] = now_at[start + part.chosen]
        start += len(part.trajectories)

    def in_order(name: str) -> list:
        every = [value for part in parts for value in getattr(part, name)]
        return [every[i] for i in order]

    scored: Scored = join(*(part.scored for part in parts))
    alpha = {slot: values for part in parts for slot, values in part.alpha.items()}
    return StepRollout(
        *(in_order(name) for name in ("prompts", "trajectories", "texts", "grades")),
        scored=scored.rows(torch.tensor(order)),
        chosen=chosen,
        alpha={slot: alpha[slot] for slot in sorted(alpha)},
        seconds=max(part.seconds for part in parts),
        trace_bytes=sum(part.trace_bytes for part in parts),
    )


def slots(rollout: StepRollout, group_size: int) -> list[int]:
    """The place in the step that each trajectory was sampled for."""
    return [t.prompt_index * group_size + t.sample_index for t in rollout.trajectories]


def owned(scored: Scored, rank: int) -> Scored:
    """A part as sampled by the process of that rank."""
    owner: Tensor = torch.full_like(scored.sampled.lengths, rank)
    return replace(scored, sampled=replace(scored.sampled, owner=owner))
