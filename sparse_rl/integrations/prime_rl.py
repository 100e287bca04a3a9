"""A loss for prime-rl 0.8 (docs/prime-rl.md).

    [trainer.loss]
    type = "custom"
    import_path = "sparse_rl.integrations.prime_rl.loss"

prime-rl takes one optimizer step per batch and does not recompute old log-probs. The trainer's own log-probs stand for
them, so r = 1 and xi = trainer / inference, staleness included. prime-rl calls the loss for one sequence at a time and
divides the sum by its count of tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from ..learn.correct import correct
from ..learn.loss import Loss, surrogate
from .settings import make_correction, refuse_normalised


def loss(inputs: Any, preset: str = "sparse-rl", clip_low: float = 0.2, clip_high: float = 0.2, **parts: Any) -> Any:
    """LossInputs of one sequence -> LossOutputs: the sum over its tokens.

    `parts` change the preset. The clip acts only under `naive`.
    """
    from prime_rl.trainer.rl.loss import LossOutputs  # pyright: ignore[reportMissingImports]

    correction = make_correction("prime-rl", preset, parts)
    refuse_normalised("prime-rl", "one sequence at a time", correction)
    logprobs, sampler = inputs.trainer_logprobs[None], inputs.inference_logprobs[None]  # [1, T]
    mask = inputs.loss_mask[None]
    old = sampler if correction.old == "sampler" else logprobs.detach()
    corrected = correct(old - sampler, mask, correction)
    weights = torch.where(corrected.mask, corrected.weights, 0.0)
    bounds = Loss(clip_low=clip_low, clip_high=clip_high)
    token_loss, clipped = surrogate(logprobs, old, inputs.advantages[None], corrected.mask, weights, bounds)
    if inputs.loss_weights is not None:
        token_loss = token_loss * inputs.loss_weights
    tokens = mask.sum().clamp(min=1)
    metrics = {
        "sparse_rl/rejected": 1 - corrected.accepted.float().mean(),
        "sparse_rl/masked": (mask & ~corrected.mask).sum() / tokens,
        "sparse_rl/clipped": clipped.sum() / tokens,
    }
    return LossOutputs(loss=torch.where(corrected.mask, token_loss, 0.0).sum(), metrics=metrics)
