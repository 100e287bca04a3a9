"""A policy loss for verl 0.9, registered as `sparse-rl` when verl starts (entry point `verl.plugins`). docs/verl.md has the command.

verl hands a policy loss no rollout log-probs. What it hands over, with `rollout_is: token`, is xi = exp(old - rollout log-prob) of each
token, as importance weights: the logarithm of those is the gap.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.workers.config import PolicyLossConfig

from ..errors import SparseRLError
from ..learn.correct import Correction, correct
from ..learn.loss import Loss, surrogate
from .settings import chosen, refuse_normalised

KEY = "algorithm.rollout_correction"


@dataclasses.dataclass
class PolicyLoss(PolicyLossConfig):
    """verl's own `policy_loss` section with our two settings; used by naming it as the section's `_target_`."""

    preset: str = "sparse-rl"
    correction: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.loss_mode != "sparse-rl":
            raise SparseRLError(f"policy_loss.loss_mode is {self.loss_mode}, which has no preset; set it to sparse-rl.")
        chosen("verl", self.preset, self.correction)


@register_policy_loss("sparse-rl")
def policy_loss(
    old_log_prob: Tensor,  # [N, T], as all: the response, padded
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,  # the actor's
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a micro-batch of whole trajectories, averaged as verl averages, and metrics."""
    section = config.policy_loss
    how = chosen("verl", section.get("preset", "sparse-rl"), section.get("correction", {}))
    if not whole_step(config, len(log_prob)):
        refuse_normalised("verl", f"a micro-batch of {len(log_prob)} trajectories at a time", how)
    mask = response_mask.bool()
    gap, old = gap_of(rollout_is_weights, mask, how), old_log_prob
    if how.old == "sampler":
        gap, old = torch.zeros_like(gap), old_log_prob - gap
    done = correct(gap, mask, how)
    low, high = (
        config.clip_ratio if bound is None else bound for bound in (config.clip_ratio_low, config.clip_ratio_high)
    )
    weights = torch.where(done.mask, done.weights, 0.0)
    token_loss, cut = surrogate(log_prob, old, advantages, done.mask, weights, Loss(clip_low=low, clip_high=high))
    loss = agg_loss(loss_mat=token_loss, loss_mask=done.mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    tokens = mask.sum().clamp(min=1)
    metrics = {
        "actor/pg_clipfrac": cut.sum() / done.mask.sum().clamp(min=1),
        "actor/ppo_kl": torch.where(mask, old - log_prob.detach(), 0.0).sum() / tokens,
        "sparse_rl/rejected": 1 - done.accepted.float().mean(),
        "sparse_rl/masked": 1 - done.mask.sum() / tokens,
    }
    return loss, {name: value.item() for name, value in metrics.items()}


def whole_step(config: Any, trajectories: int) -> bool:
    """Whether this micro-batch is all of the optimizer step."""
    info = config.global_batch_info
    return (
        info.get("dp_size") == 1 and info.get("global_batch_size") == trajectories
    )  # what is not said is not taken for granted


def gap_of(xi: Tensor | None, mask: Tensor, how: Correction) -> Tensor:
    """old - rollout log-prob from the importance weights [N, T], once they are seen to be xi itself."""
    if xi is None:
        raise SparseRLError(
            f"verl handed over no importance weights; set {KEY}.rollout_is=token and actor_rollout_ref.rollout.calculate_log_probs=True, "
            f"and leave {KEY}.bypass_mode=False."
        )
    xi = torch.where(mask, xi.float(), 1.0)
    zeros = int((xi == 0).sum())
    if zeros:
        raise SparseRLError(
            f"{zeros} importance weights are 0; set {KEY}.rollout_is_threshold to one number, such as 1e9."
        )
    long = mask.sum(1) > 1
    lowest, highest = (torch.where(mask, xi, beyond)[long] for beyond in (math.inf, 0.0))
    lowest, highest = lowest.amin(1), highest.amax(1)
    if len(lowest) and ((lowest == highest) & (lowest != 1)).all():
        raise SparseRLError(
            f"every trajectory has one importance weight for all its tokens; set {KEY}.rollout_is=token."
        )
    top = xi.max().item()
    needed = math.inf if how.reject_outside or how.old == "sampler" else how.cap or 0.0
    too_low = top < needed or (how.mask_outside is not None and top <= how.mask_outside[1])
    if too_low and top > 1 and xi.new_tensor(float(f"{top:.3g}")).item() == top:  # a round number, as thresholds are
        raise SparseRLError(
            f"importance weights end at {top:g}, where they were cut off; set {KEY}.rollout_is_threshold=1e9."
        )
    return xi.log()
