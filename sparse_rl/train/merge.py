"""Merge the parts of a step that processes sampled into the step that one process would have sampled. step.py defines
rows and positions.

A trajectory's trace is large, so it stays in the process that sampled it, which also learns from it. Other processes
need little of a trajectory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..cache import Support, Trace
from ..learn.batch import join
from .step import StepRollout, step_positions


def without_full_traces(rollout: StepRollout) -> StepRollout:
    """What other processes need of a part: one head of each trace, how many tokens could be drawn (not which), and
    neither routes nor texts and answers of prompts.

    One head is enough, because all heads evict at the same steps. An answer may be any object of a user's.
    """
    sampled = rollout.scored.sampled
    traces = tuple(first_head_trace(trace) for trace in sampled.traces)
    supports = None if sampled.supports is None else tuple(_without_ids(support) for support in sampled.supports)
    trajectories = [
        replace(t, trace=trace, support=_without_ids(t.support))
        for t, trace in zip(rollout.trajectories, traces, strict=True)
    ]
    return replace(
        rollout,
        prompts=[replace(prompt, text="", answer=None) for prompt in rollout.prompts],
        trajectories=trajectories,
        talks=[replace(talk, messages=[]) for talk in rollout.talks],
        scored=replace(
            rollout.scored,
            sampled=replace(sampled, traces=traces, supports=supports),
            routes=None if rollout.scored.routes is None else (None,) * len(traces),
        ),
    )


def _without_ids(support: Support | None) -> Support | None:
    return None if support is None else replace(support, ids=None)


def first_head_trace(trace: Trace) -> Trace:
    """The first head of one layer, or of every layer if they hold different numbers of slots: enough for metrics."""
    in_use = trace.slots_in_use()[:, 0]
    layers = slice(1) if bool((in_use == in_use[0]).all()) else slice(None)
    return Trace(trace.evicted_at[layers, :1].clone(), slots=trace.slots)


def append(rollout: StepRollout, more: StepRollout, chosen_rows: Tensor, accepted: Tensor | None = None) -> StepRollout:
    """The rows of a rollout followed by those of another."""
    return replace(
        rollout,
        prompts=rollout.prompts + more.prompts,
        trajectories=rollout.trajectories + more.trajectories,
        texts=rollout.texts + more.texts,
        grades=rollout.grades + more.grades,
        talks=rollout.talks + more.talks,
        scored=join(rollout.scored, more.scored),
        chosen_rows=chosen_rows,
        accepted=accepted,
        trace_bytes=rollout.trace_bytes + more.trace_bytes,
    )


def merge(parts: Sequence[StepRollout], group_size: int) -> StepRollout:
    """The parts of all processes as one rollout, sorted by round of sampling, then by position."""
    if len(parts) == 1:
        return parts[0]
    places: list[tuple[int, int]] = []  # (round, position) of every row, part after part
    for part in parts:
        rounds: Counter[int] = Counter()
        for position in step_positions(part, group_size):
            places.append((rounds[position], position))
            rounds[position] += 1
    order = torch.tensor(sorted(range(len(places)), key=places.__getitem__))  # row of the step -> row of the parts
    new_row = torch.empty_like(order)  # row of the parts -> row of the step
    new_row[order] = torch.arange(len(order))
    chosen_rows, start = torch.empty(sum(len(part.chosen_rows) for part in parts), dtype=torch.int64), 0
    for part in parts:
        positions = [places[start + row][1] for row in part.chosen_rows.tolist()]
        chosen_rows[positions] = new_row[start + part.chosen_rows]
        start += len(part.trajectories)

    def in_order(lists: list[list]) -> list:
        every = [value for values in lists for value in values]
        return [every[i] for i in order.tolist()]

    accepted = [part.accepted for part in parts if part.accepted is not None]
    alpha = {position: values for part in parts for position, values in part.alpha.items()}
    regret = {position: values for part in parts for position, values in part.regret.items()}
    return StepRollout(
        prompts=in_order([part.prompts for part in parts]),
        trajectories=in_order([part.trajectories for part in parts]),
        texts=in_order([part.texts for part in parts]),
        grades=in_order([part.grades for part in parts]),
        talks=in_order(talks) if any(talks := [part.talks for part in parts]) else [],
        scored=join(*(part.scored for part in parts)).rows(order),
        chosen_rows=chosen_rows,
        accepted=torch.cat(accepted)[order] if accepted else None,
        alpha={position: alpha[position] for position in sorted(alpha)},
        regret={position: regret[position] for position in sorted(regret)},
        seconds=max(part.seconds for part in parts),
        trace_bytes=sum(part.trace_bytes for part in parts),
    )
