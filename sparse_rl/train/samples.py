"""What a step sampled, and the few completions of it that are kept for reading, with the evidence of every token."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..files import writing
from ..learn.batch import Batch
from ..records import Trajectory, TrajectoryWriter
from .step import StepRollout

BEACON = "\N{BLACK DIAMOND}"  # how a beacon is shown among the tokens


def places_to_write(rollout: StepRollout, wanted: int) -> list[int]:
    """Some of the N, spread over the step's prompts."""
    return list(range(0, len(rollout.chosen), max(1, len(rollout.chosen) // wanted))[:wanted])


def write_samples(
    folder: Path,
    rollout: StepRollout,
    batches: Sequence[Batch],
    accepted: Tensor,
    tokenizer,
    evidence: Mapping[int, tuple[Trajectory, Tensor]],
) -> None:
    """Some completions of a step. Lists have an entry for every token as fed; those of the prompt and of beacons mean nothing.

    evidence: by place among the N, the trajectory with its whole trace, and which of its tokens were clipped, bool [T].
    """
    weights = torch.cat([batch.weights * batch.mask for batch in batches])  # [N, T] of what was learned from
    advantages = torch.cat([batch.advantages for batch in batches])
    shutil.rmtree(folder, ignore_errors=True)
    with writing(folder), TrajectoryWriter(folder) as writer:
        for slot, (t, clipped) in evidence.items():
            i, scored = int(rollout.chosen[slot]), rollout.scored
            tokens = len(t.tokens)
            writer.write(
                t,
                tokenizer.decode(t.prompt_tokens),
                rollout.texts[i],
                reward=rollout.grades[i].reward,
                verdict=rollout.grades[i].verdict,
                advantage=advantages[slot].item(),
                accepted=bool(accepted[i]),
                old_logprobs=scored.old_logprobs[i, :tokens].tolist(),
                pieces=[BEACON if token == t.beacon_id else tokenizer.decode([token]) for token in t.tokens.tolist()],
                rank=scored.ranks[i, :tokens].int().tolist(),
                weight=weights[slot, :tokens].tolist(),
                clipped=clipped[:tokens].tolist(),
            )
