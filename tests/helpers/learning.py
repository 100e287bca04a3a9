"""Batches from scored trajectories, corrected as a run corrects them."""

from torch import Tensor

from sparse_rl.learn.batch import Batch, Scored, apply_correction, make_batches
from sparse_rl.learn.correct import Correction
from sparse_rl.learn.loss import Loss


def batches_of(
    scored: Scored, advantages: Tensor, correction: Correction, loss: Loss, minibatches: int = 1
) -> list[Batch]:
    return make_batches(scored, apply_correction(scored, correction), advantages, correction, loss, minibatches)
