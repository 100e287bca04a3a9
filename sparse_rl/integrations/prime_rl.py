"""A loss for prime-rl 0.8: `[trainer.loss] type = "custom"` with `import_path = "sparse_rl.integrations.prime_rl.loss"` (docs/prime-rl.md).

prime-rl takes one optimizer step per batch and recomputes no `old` log-probs: the trainer's own stand for them, so r = 1 and xi is
trainer / inference, staleness included. It calls the loss for one sequence at a time and divides the sum by its count of tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from ..learn.correct import correct
from ..learn.loss import Loss, surrogate
from .settings import chosen, refuse_normalised


def loss(inputs: Any, preset: str = "sparse-rl", clip_low: float = 0.2, clip_high: float = 0.2, **parts: Any):
    """LossInputs of one sequence -> LossOutputs: the sum over its tokens. `parts` change the preset; the clip acts under `naive` alone."""
    from prime_rl.trainer.rl.loss import LossOutputs

    how = chosen("prime-rl", preset, parts)
    refuse_normalised("prime-rl", "one sequence at a time", how)
    logprobs, sampler, mask = (
        inputs.trainer_logprobs[None],
        inputs.inference_logprobs[None],
        inputs.loss_mask[None],
    )  # [1, T]
    old = sampler if how.old == "sampler" else logprobs.detach()
    done = correct(old - sampler, mask, how)
    weights = torch.where(done.mask, done.weights, 0.0)
    bounds = Loss(clip_low=clip_low, clip_high=clip_high)
    token_loss, cut = surrogate(logprobs, old, inputs.advantages[None], done.mask, weights, bounds)
    if inputs.loss_weights is not None:
        token_loss = token_loss * inputs.loss_weights
    tokens = mask.sum().clamp(min=1)
    metrics = {
        "sparse_rl/rejected": 1 - done.accepted.float().mean(),
        "sparse_rl/masked": (mask & ~done.mask).sum() / tokens,
        "sparse_rl/clipped": cut.sum() / tokens,
    }
    return LossOutputs(loss=torch.where(done.mask, token_loss, 0.0).sum(), metrics=metrics)
