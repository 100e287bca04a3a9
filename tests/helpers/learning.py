"""Batches from scored trajectories, corrected as a run corrects them; models with other weights."""

import torch
from torch import Tensor

from sparse_rl.learn.batch import Batch, Scored, apply_correction, make_batches
from sparse_rl.learn.correct import Correction
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.student import copied


def batches_of(
    scored: Scored, advantages: Tensor, correction: Correction, loss: Loss, minibatches: int = 1
) -> list[Batch]:
    return make_batches(scored, apply_correction(scored, correction), advantages, correction, loss, minibatches)


def moved(model, seed: int, size: float = 0.02):
    """A copy with other weights."""
    other, g = copied(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=g))
    return other
