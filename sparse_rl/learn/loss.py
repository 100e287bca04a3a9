"""GRPO's loss: a clipped surrogate and a KL term, with one scale per token.

    L = sum over tokens of  scale_it * ( w_it * surrogate_it + beta * k3_it )

    surrogate = -min( r A, clip(r) A )            clip: ratio.   A token whose gain was clipped has no gradient
              = -stopped(clip(r)) A log pi        clip: weight.  CISPO: every token keeps its gradient, of bounded size

`token_scale` turns the choice of mean into one number per token before the batch is cut into micro-batches, so the
losses of the micro-batches add up to the loss of the optimizer step, however it was cut.

Shapes: N trajectories, T tokens (padded). M the mask after corrections, w the token weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import SparseRLError, nearest
from ..keys import key
from .advantage import Credit, Estimated

if TYPE_CHECKING:
    from .batch import Batch, Scored
    from .correct import Corrected

MEANS = ("sequence-mean", "token-mean", "dr-grpo")
LEVELS = ("token", "sequence")
CLIPS = ("ratio", "weight")


@dataclass(frozen=True)
class Loss:
    clip: str = key(
        "what is clipped: the `ratio` (a clipped token has no gradient) or the `weight` of each token's gradient "
        "(CISPO: no token is dropped)",
        "ratio",
    )
    clip_low: float = key("the ratio is clipped below at 1 - clip_low", 0.2)
    clip_high: float = key("the ratio is clipped above at 1 + clip_high", 0.2)
    beta: float = key(
        "weight of the KL to the starting model; 0 turns it off, and then no reference model is kept in memory",
        0.0,
    )
    mean: str = key(
        "how tokens are averaged: sequence-mean: 1/N sum_i 1/|M_i| sum_t; token-mean: 1/|M| sum; dr-grpo: "
        "1/(N * constant) sum",
        "sequence-mean",
    )
    constant: int | None = key(
        "denominator per trajectory when loss.mean is dr-grpo; null: rollout.max_new_tokens", None
    )
    level: str = key(
        "which ratio is clipped: that of each `token`, or the geometric mean over the `sequence` (GSPO)", "token"
    )
    renormalise: bool = key("divide by the number of accepted trajectories instead of all", False)

    def __post_init__(self):
        for name, known in (("mean", MEANS), ("level", LEVELS), ("clip", CLIPS)):
            if getattr(self, name) not in known:
                raise SparseRLError(f"loss.{name} is {getattr(self, name)!r}; {nearest(getattr(self, name), known)}")
        negative = min(self.clip_low, self.clip_high, self.beta) < 0
        if negative or (self.constant is not None and self.constant < 1):
            raise SparseRLError(
                f"loss: clip_low {self.clip_low}, clip_high {self.clip_high} and beta {self.beta} must not be "
                f"negative, and constant {self.constant} must be at least 1."
            )

    # ------------------------------------------------------------------------- as an objective (objective.py)

    @property
    def needs_reference(self) -> bool:
        return self.beta > 0

    def credit(
        self, by_group: Callable[[], Estimated], rewards: Tensor, scored: Scored, corrected: Corrected
    ) -> Credit:
        return Credit(*by_group())

    def prepare(self, batch: Batch, row_sums: Callable[[Batch], Tensor]) -> tuple[Batch, dict[str, float]]:
        return batch, {}  # no row depends on another

    def active(self, batch: Batch) -> Tensor:
        moves = batch.mask.any(1)
        return moves if self.beta > 0 else moves & (batch.advantages != 0)

    def micro_batch(
        self, logprobs: Tensor, part: Batch, values: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        return policy_loss(
            logprobs,
            part.old_logprobs,
            part.advantages,
            part.mask,
            part.weights,
            part.scale,
            self,
            part.reference_logprobs,
            part.clip_kl,
        )

    def metrics(self, sums: dict[str, float], batch: Batch) -> dict[str, float]:
        tokens = max(sums["tokens"], 1)
        metrics = {
            "update/loss": sums["loss"],
            "update/clip/frac": sums["clipped"] / max(batch.response_tokens, 1),
            "update/drift/mean": sums["drift"] / tokens,
        }
        if self.beta > 0:
            metrics["update/kl/mean"] = sums["kl"] / tokens
        return metrics


def token_scale(mask: Tensor, accepted: Tensor, loss: Loss) -> Tensor:
    """The factor of each token's loss that makes the sum over tokens the chosen mean.

    mask bool [N, T], accepted bool [N] -> fp32 [N, T]
    """
    trajectories = accepted.sum().clamp(min=1) if loss.renormalise else len(mask)
    if loss.mean == "token-mean":
        scale = 1 / mask.sum().clamp(min=1)
    elif loss.mean == "dr-grpo":
        if loss.constant is None:
            raise SparseRLError(
                "loss.mean is dr-grpo but loss.constant is not given; use the longest response, such as max_new_tokens."
            )
        scale = torch.as_tensor(1 / (trajectories * loss.constant), device=mask.device)
    else:
        scale = 1 / (trajectories * mask.sum(1, keepdim=True).clamp(min=1))
    return scale * mask.float()


def ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, level: str) -> Tensor:
    """r = exp(learner - old), per token or per sequence (then all of its tokens have the same number). -> [N, T]"""
    drift = torch.where(mask, logprobs - old_logprobs, 0.0)
    if level == "sequence":
        drift = (drift.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)).expand_as(drift)
    return drift.exp()


def k3(logprobs: Tensor, reference_logprobs: Tensor, clip: float | None = None) -> Tensor:
    """The non-negative estimate of KL(learner || reference) at the sampled tokens."""
    difference = reference_logprobs - logprobs
    estimate = difference.exp() - 1 - difference
    return estimate if clip is None else estimate.clamp(-clip, clip)


def surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor, loss: Loss
) -> tuple[Tensor, Tensor]:
    """Every token's weighted, clipped loss before any mean, and which tokens were clipped.

    All tensors are [N, T]; advantages may be [N, 1]. Values off the mask have no meaning.
    """
    r = ratio(logprobs, old_logprobs, mask, loss.level)
    clipped = r.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    if loss.clip == "weight":
        return weights * -clipped.detach() * advantages * logprobs, (clipped != r) & (advantages != 0) & mask
    gain, clipped_gain = r * advantages, clipped * advantages
    return weights * -torch.minimum(gain, clipped_gain), (clipped_gain < gain) & mask


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    weights: Tensor,
    scale: Tensor,
    loss: Loss,
    reference_logprobs: Tensor | None = None,
    clip_kl: float | None = None,
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The loss of a micro-batch, the sums for its metrics, and which tokens were clipped.

    logprobs [N, T] carry the gradient; advantages [N] or [N, T]; mask bool, weights, scale [N, T].
    -> (loss, sums, clipped bool [N, T])
    """
    advantages = advantages[:, None] if advantages.dim() == 1 else advantages
    token_loss, clipped = surrogate(logprobs, old_logprobs, advantages, mask, weights, loss)
    sums = {
        "tokens": mask.sum(),
        "clipped": clipped.sum(),
        "drift": ((logprobs - old_logprobs).detach() * mask).sum(),
    }
    if loss.beta > 0:
        assert reference_logprobs is not None, "a KL term needs the reference's log-probs"
        penalty = k3(logprobs, reference_logprobs, clip_kl)
        sums["kl"] = (penalty.detach() * mask).sum()
        token_loss = token_loss + loss.beta * penalty
    return torch.where(mask, scale * token_loss, 0.0).sum(), sums, clipped
