"""The record of a step: what was sampled, and what became of it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..learn.batch import Scored
from ..records import Trajectory
from ..tasks import Grade, Prompt


@dataclasses.dataclass
class StepRollout:
    """What a step sampled, and what became of it. `chosen` are the N that are learned from; with `refill` more were sampled."""

    prompts: list[Prompt]  # one per trajectory
    trajectories: list[Trajectory]
    texts: list[str]
    grades: list[Grade]
    scored: Scored
    chosen: Tensor  # int64 [N]
    alpha: dict[int, Tensor] = dataclasses.field(
        default_factory=dict
    )  # by place in the step: overlaps of a few trajectories' tokens
    seconds: float = 0.0  # that sampling took, on the slowest process
    trace_bytes: int = 0
    grading_error: str | None = None  # the last one of the grader, whatever step it was in
    timing: dict[str, float] = dataclasses.field(
        default_factory=dict
    )  # of this process: what ran beside the learner, waiting for others

    @property
    def rewards(self) -> Tensor:
        return torch.tensor([g.reward for g in self.grades], dtype=torch.float64)
