"""Write a few completions of a step to samples/, with the log-probs, weight and trace of every token."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..config import Recipe
from ..files import remove, writing
from ..learn.batch import Batch
from ..records import Trajectory, TrajectoryWriter
from .progress import is_due
from .step import StepRollout

BEACON = "\N{BLACK DIAMOND}"  # shown in place of a beacon


def samples_due(recipe: Recipe, step: int) -> bool:
    """Whether completions of a step (from 1) are written: of the first, every 10th, and every evaluated step."""
    last = recipe.run.steps
    due = step == 1 or any(is_due(step, every, last) for every in (10, recipe.eval.every))
    return bool(recipe.run.samples) and due


def positions_to_write(count: int, wanted: int) -> list[int]:
    """Some of a step's `count` positions, spread over its prompts."""
    return list(range(0, count, max(1, count // wanted))[:wanted])


def write_samples(
    folder: Path,
    rollout: StepRollout,
    batches: Sequence[Batch],
    accepted: Tensor,
    tokenizer,
    evidence: Mapping[int, tuple[Trajectory, Tensor]],
) -> None:
    """Write some completions of a step.

    Lists have an entry for every token that was fed; entries of the prompt and of beacons have no meaning. accepted:
    bool, by row. evidence: by position, the trajectory with its whole trace, and which tokens were clipped, bool [T].
    """
    weights = torch.cat([batch.weights * batch.mask for batch in batches])  # [N, T], by position
    advantages = torch.cat([batch.row_advantages for batch in batches])
    with writing(folder):
        if os.path.lexists(folder):
            remove(folder)
    with writing(folder), TrajectoryWriter(folder) as writer:
        for position, (t, clipped) in evidence.items():
            row, scored = int(rollout.chosen_rows[position]), rollout.scored
            tokens = len(t.tokens)
            writer.write(
                t,
                tokenizer.decode(t.prompt_tokens),
                rollout.texts[row],
                reward=rollout.grades[row].reward,
                verdict=rollout.grades[row].verdict,
                **({"rewards": dict(rollout.grades[row].parts)} if rollout.grades[row].parts else {}),
                **({"task": rollout.prompts[row].task} if rollout.prompts[row].task else {}),
                advantage=advantages[position].item(),
                accepted=bool(accepted[row]),
                old_logprobs=scored.old_logprobs[row, :tokens].tolist(),
                pieces=[BEACON if token == t.beacon_id else tokenizer.decode([token]) for token in t.tokens.tolist()],
                rank=scored.ranks[row, :tokens].int().tolist(),
                weight=weights[position, :tokens].tolist(),
                clipped=clipped[:tokens].tolist(),
            )
