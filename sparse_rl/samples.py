"""What a step sampled, and the few completions of it that are kept for reading, with the evidence of every token."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from .checkpoint import writing
from .learn.batch import Batch, Scored
from .records import Trajectory, TrajectoryWriter
from .tasks import Grade, Prompt

BEACON = "\N{BLACK DIAMOND}"  # how a beacon is shown among the tokens


@dataclasses.dataclass
class Rollout:
    """What a step sampled, and what became of it. `chosen` are the N that are learned from; with `refill` more were sampled."""

    prompts: list[Prompt]  # one per trajectory
    trajectories: list[Trajectory]
    texts: list[str]
    grades: list[Grade]
    scored: Scored
    chosen: Tensor  # int64 [N]

    @property
    def rewards(self) -> Tensor:
        return torch.tensor([g.reward for g in self.grades], dtype=torch.float64)


def write_samples(folder: Path, rollout: Rollout, batches: Sequence[Batch], accepted: Tensor, tokenizer, wanted: int) -> None:
    """Spread over the step's prompts. Lists have an entry for every token as fed; those of the prompt and of beacons mean nothing."""
    weights = torch.cat([batch.weights * batch.mask for batch in batches])  # [N, T] of what was learned from
    clipped = torch.cat([batch.clipped for batch in batches])
    advantages = torch.cat([batch.advantages for batch in batches])
    shutil.rmtree(folder, ignore_errors=True)
    with writing(folder), TrajectoryWriter(folder) as writer:
        for slot in range(0, len(rollout.chosen), max(1, len(rollout.chosen) // wanted))[:wanted]:
            i = int(rollout.chosen[slot])
            t, scored = rollout.trajectories[i], rollout.scored
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
                clipped=clipped[slot, :tokens].tolist(),
            )
