"""The record of a step: what was sampled, and how it was graded and scored.

Four numbers refer to completions of a step:

    position      0 .. N - 1: the place in the step that a completion was sampled for, prompt * group_size + member
    row           0 .. R - 1: one of all completions sampled, as an index of the lists and tensors of a StepRollout.
                  With `learn.refill` or `learn.dynamic` a position may have several rows, so R >= N; otherwise R = N
    chosen_rows   int64 [N]: for every position, the row that is learned from
    owner_rank    int64 [R]: the process that sampled the row; it alone has the whole trace, and learns from it

A process only samples for some positions, its `own_positions`. The rows of its part of the step are counted from 0, and
chosen_rows[i] is the row for its i-th own position; merge.py joins the parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache import SlotFormat, Support, Trace
from ..chat import Talk
from ..distributed.world import exchanged
from ..learn.batch import Batch, Sampled, Scored
from ..learn.learner import UpdateResult
from ..records import Trajectory
from ..tasks import Grade, Prompt


@dataclasses.dataclass
class StepRollout:
    """What a step, or a process's part of it, sampled. Lists and tensors have an entry for every row."""

    prompts: list[Prompt]
    trajectories: list[Trajectory]
    texts: list[str]
    grades: list[Grade]
    scored: Scored
    chosen_rows: Tensor  # int64 [N]
    accepted: Tensor | None = None  # bool [R], if refilling had to know it; otherwise the trainer computes it
    alpha: dict[int, Tensor] = dataclasses.field(default_factory=dict)  # by position: overlaps of a few trajectories
    regret: dict[int, Tensor] = dataclasses.field(default_factory=dict)  # by position: the regret of a few trajectories
    seconds: float = 0.0  # of sampling, in the slowest process
    trace_bytes: int = 0
    grading_error: str | None = None  # the grader's last error, of this or an earlier step
    talks: list[Talk] = dataclasses.field(default_factory=list)  # the conversations; empty if the task never replies
    timing: dict[str, float] = dataclasses.field(default_factory=dict)  # seconds of waiting and of sampling ahead

    @property
    def rewards(self) -> Tensor:
        return torch.tensor([g.reward for g in self.grades], dtype=torch.float64)

    @property
    def right(self) -> Tensor:
        return torch.tensor([g.right for g in self.grades], dtype=torch.bool)


exchanged(StepRollout, Prompt, Trajectory, Trace, SlotFormat, Support, Grade, Scored, Sampled, Talk)


def with_seen(rollout: StepRollout, batches: Sequence[Batch], updates: Sequence[UpdateResult]) -> StepRollout:
    """A step that was scored in part, completed with the rows that the update scored before the weights moved.

    updates: by optimizer step; the batches are those of the chosen rows, in their order
    """
    start = 0
    for batch, update in zip(batches, updates):
        if (seen := update.seen) is not None:
            rows = rollout.chosen_rows[start + seen.rows]
            scored = rollout.scored.with_seen(rows, seen.logprobs, seen.entropies)
            rollout = dataclasses.replace(rollout, scored=scored)
        start += len(batch.mask)
    return rollout


def step_positions(rollout: StepRollout, group_size: int) -> list[int]:
    """The position in the step that each row was sampled for."""
    return [t.prompt_index * group_size + t.sample_index for t in rollout.trajectories]
