"""A policy loss and rollouts for verl 0.9, both registered as `sparse-rl` when verl starts (entry point `verl.plugins`;
docs/verl.md). The rollouts are in verl_rollout.py.

verl hands a policy loss no rollout log-probs. With `rollout_is: token` and a `rollout_is_threshold` that cuts nothing
off (1e9), it hands over the importance weights xi = exp(old - rollout log-prob) of every token; their logarithm is the
gap. The loss cannot see which threshold verl was given, so the threshold is the user's to set.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss  # pyright: ignore[reportMissingImports]
from verl.workers.config import PolicyLossConfig  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.base import _ROLLOUT_REGISTRY  # pyright: ignore[reportMissingImports]
from verl.workers.rollout.replica import RolloutReplicaRegistry  # pyright: ignore[reportMissingImports]

from ..errors import SparseRLError
from ..learn.correct import correct
from ..learn.loss import Loss, surrogate
from .settings import make_correction, refuse_normalised

KEY = "algorithm.rollout_correction"


def _replica() -> Any:
    from .verl_rollout import Replica

    return Replica


RolloutReplicaRegistry.register("sparse-rl", _replica)
_ROLLOUT_REGISTRY["sparse-rl", "async"] = "sparse_rl.integrations.verl_rollout.ServerAdapter"


@dataclasses.dataclass
class PolicyLoss(PolicyLossConfig):
    """verl's `policy_loss` section with two settings of ours; to use it, name it as the section's `_target_`."""

    preset: str = "sparse-rl"
    correction: dict = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        if self.loss_mode != "sparse-rl":
            raise SparseRLError(f"policy_loss.loss_mode is {self.loss_mode}, which has no preset; set it to sparse-rl.")
        make_correction("verl", self.preset, self.correction)


@register_policy_loss("sparse-rl")
def policy_loss(
    old_log_prob: Tensor,  # [N, T] like all the others: the response, padded
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,  # the actor's
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss of a micro-batch of whole trajectories, averaged as verl averages, and metrics."""
    section = config.policy_loss
    correction = make_correction("verl", section.get("preset", "sparse-rl"), section.get("correction", {}))
    if not is_whole_step(config, len(log_prob)):
        refuse_normalised("verl", f"a micro-batch of {len(log_prob)} trajectories at a time", correction)
    mask = response_mask.bool()
    gap, old = gap_of(rollout_is_weights, mask), old_log_prob
    if correction.old == "sampler":
        gap, old = torch.zeros_like(gap), old_log_prob - gap
    corrected = correct(gap, mask, correction)
    kept = corrected.mask
    weights = torch.where(kept, corrected.weights, 0.0)
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    token_loss, clipped = surrogate(log_prob, old, advantages, kept, weights, Loss(clip_low=low, clip_high=high))
    loss = agg_loss(loss_mat=token_loss, loss_mask=kept, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    tokens = mask.sum().clamp(min=1)
    metrics = {
        "actor/pg_clipfrac": clipped.sum() / kept.sum().clamp(min=1),
        "actor/ppo_kl": torch.where(mask, old - log_prob.detach(), 0.0).sum() / tokens,
        "sparse_rl/rejected": 1 - corrected.accepted.float().mean(),
        "sparse_rl/masked": 1 - kept.sum() / tokens,
    }
    return loss, {name: value.item() for name, value in metrics.items()}


def is_whole_step(config: Any, trajectories: int) -> bool:
    """Whether this micro-batch is the whole optimizer step. If verl does not say, it is not."""
    info = config.global_batch_info
    return info.get("dp_size") == 1 and info.get("global_batch_size") == trajectories


def gap_of(xi: Tensor | None, mask: Tensor) -> Tensor:
    """old - rollout log-prob from the importance weights [N, T]; refuses weights that are not those of tokens."""
    if xi is None:
        raise SparseRLError(
            f"verl handed over no importance weights; set {KEY}.rollout_is=token and "
            f"actor_rollout_ref.rollout.calculate_log_probs=True, and leave {KEY}.bypass_mode=False."
        )
    xi = torch.where(mask, xi.float(), 1.0)
    zeros = int((xi == 0).sum())
    if zeros:
        raise SparseRLError(
            f"{zeros} importance weights are 0; set {KEY}.rollout_is_threshold to one number, such as 1e9."
        )
    several = mask.sum(1) > 1
    lowest = torch.where(mask, xi, math.inf)[several].amin(1)
    highest = torch.where(mask, xi, 0.0)[several].amax(1)
    if len(lowest) and ((lowest == highest) & (lowest != 1)).all():
        raise SparseRLError(
            f"every trajectory has one importance weight for all its tokens; set {KEY}.rollout_is=token."
        )
    return xi.log()
