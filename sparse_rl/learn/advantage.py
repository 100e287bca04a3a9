"""Advantages: how much better a completion was than the others of its group.

Pure functions over rewards [N] and the group each belongs to. N trajectories of an optimizer step.

    grpo      (r - mean) / (std + eps)      unbiased std over the whole group; 0 for a group of one
    dr-grpo   r - mean
    rloo      r - mean of the others        = (r - mean) * n / (n - 1)
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import SparseRLError, nearest

ESTIMATORS = ("grpo", "dr-grpo", "rloo")


def advantage(
    rewards: Tensor, group: Tensor, estimator: str = "grpo", members: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, dict[str, float]]:
    """fp64 advantages [N] and metrics.

    rewards [N]; group [N] int64 ids; members [N] bool: who sets the baseline (None: everyone). With `rebaseline`, that is the accepted
    trajectories; the others' advantages are then 0. A group whose baseline has no spread teaches nothing: its advantages are 0.
    """
    if estimator not in ESTIMATORS:
        raise SparseRLError(f"there is no advantage estimator {estimator!r}; {nearest(estimator, ESTIMATORS)}")
    rewards = rewards.double()
    members = torch.ones_like(group, dtype=torch.bool) if members is None else members
    ids, place = group.unique(return_inverse=True)  # place [N]: 0 .. groups - 1

    def per_group(values: Tensor) -> Tensor:
        """Sum over the members of each group. [N] -> [groups]"""
        return torch.zeros(len(ids), dtype=torch.float64, device=group.device).index_add(
            0, place, values.double() * members
        )

    count = per_group(torch.ones_like(rewards))
    mean = per_group(rewards) / count.clamp(min=1)
    centred = rewards - mean[place]
    variance = per_group(centred**2) / (count - 1).clamp(min=1)
    flat = per_group(centred.abs()) <= 1e-12 * count  # rewards of the group are all the same
    if estimator == "grpo":
        result = centred / (variance.sqrt()[place] + eps)
    elif estimator == "rloo":
        result = centred * (count / (count - 1).clamp(min=1))[place]
    else:
        result = centred
    result = torch.where(flat[place] | ~members, 0.0, result)
    metrics = {
        "advantage/groups_without_variance/frac": flat.double().mean().item(),
        "advantage/abs/mean": result.abs().mean().item(),
    }
    return result, metrics
