"""Compute advantages: how much better a completion was than the other completions of its group.

Every function here is pure: it maps the rewards [N] of a step and the group of each trajectory to fp64 advantages [N].

    grpo      (r - mean) / (std + eps)      unbiased std over the whole group; 0 for a group of one
    dr-grpo   r - mean
    rloo      r - mean of the others        = (r - mean) * n / (n - 1)

To add an estimator, decorate a function; `learn.advantage` then accepts its name:

    @estimator("sign")
    def sign(group: GroupRewards, eps: float) -> Tensor:
        return group.centred.sign()

or name the file with the function: `learn.advantage: mine.py:sign`, or `mine.py` if the function is called advantage.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ..errors import SparseRLError, nearest
from ..files import names_python_file, python_module, split_python_file


@dataclass(frozen=True)
class GroupRewards:
    """The input of an estimator: every trajectory's reward and the statistics of its group. All fp64 [N]."""

    rewards: Tensor
    centred: Tensor  # reward - mean of the group's members
    std: Tensor  # unbiased, of the group's members
    count: Tensor  # members of the group


Estimator = Callable[[GroupRewards, float], Tensor]  # (group, eps) -> advantages [N]
Estimated = tuple[Tensor, dict[str, float]]  # advantages [N] and metrics


@dataclass(frozen=True)
class Credit:
    """The advantages of a step, and what else an objective (objective.py) derives from its rewards."""

    advantages: Tensor  # [N], or [N, T] if every token has its own
    metrics: dict[str, float]
    returns: Tensor | None = None  # [N, T]: the targets of a critic


ESTIMATORS: dict[str, Estimator] = {}
_EQUAL = 1e-12  # rewards count as equal if their mean distance to their mean is not larger


def estimator(name: str) -> Callable[[Estimator], Estimator]:
    """Register an advantage estimator under the name that recipes give as `learn.advantage`."""

    def register(function: Estimator) -> Estimator:
        if name in ESTIMATORS:
            raise SparseRLError(f"the advantage estimator {name!r} exists already; register yours under another name.")
        ESTIMATORS[name] = function
        return function

    return register


@estimator("grpo")
def grpo(group: GroupRewards, eps: float) -> Tensor:
    return group.centred / (group.std + eps)


@estimator("dr-grpo")
def dr_grpo(group: GroupRewards, eps: float) -> Tensor:
    return group.centred


@estimator("rloo")
def rloo(group: GroupRewards, eps: float) -> Tensor:
    return group.centred * (group.count / (group.count - 1).clamp(min=1))


def find_estimator(name: str) -> Estimator:
    """The estimator of this name, or the function that `FILE.py` or `FILE.py:FUNCTION` names."""
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    if not names_python_file(name):
        raise SparseRLError(f"there is no advantage estimator {name!r}; {nearest(name, ESTIMATORS)}")
    path, inside = split_python_file(name)
    found = getattr(python_module(path, "advantage estimator"), inside or "advantage", None)
    if not callable(found):
        raise SparseRLError(f"{path} has no function {inside or 'advantage'}(group, eps); define it, or name another.")
    return cast(Estimator, found)


def without_variance(rewards: Tensor) -> Tensor:
    """Groups in which all completions have the same reward, so that nothing can be learned. [G, n] -> bool [G]"""
    rewards = rewards.double()
    return (rewards - rewards.mean(1, keepdim=True)).abs().mean(1) <= _EQUAL


def advantage(
    rewards: Tensor, group: Tensor, estimator: str = "grpo", members: Tensor | None = None, eps: float = 1e-6
) -> Estimated:
    """fp64 advantages [N] and metrics.

    rewards [N]; group int64 [N]: the group's id; members bool [N]: the trajectories that set the baseline (None: all).
    With `learn.rebaseline` the members are the accepted trajectories, and all others have advantage 0. In a group whose
    members all have the same reward, every advantage is 0.
    """
    estimate = find_estimator(estimator)
    rewards = rewards.double()
    members = torch.ones_like(group, dtype=torch.bool) if members is None else members
    ids, group_of = group.unique(return_inverse=True)  # group_of [N]: 0 .. groups - 1

    def per_group(values: Tensor) -> Tensor:
        """Sum over the members of each group. [N] -> [groups]"""
        sums = torch.zeros(len(ids), dtype=torch.float64, device=group.device)
        return sums.index_add(0, group_of, values.double() * members)

    count = per_group(torch.ones_like(rewards))
    mean = per_group(rewards) / count.clamp(min=1)
    centred = rewards - mean[group_of]
    variance = per_group(centred**2) / (count - 1).clamp(min=1)
    flat = per_group(centred.abs()) <= _EQUAL * count  # the group's members all have the same reward
    if not (centred.isfinite().all() and variance.isfinite().all()):
        raise SparseRLError(
            f"the rewards range from {rewards.min().item():.3g} to {rewards.max().item():.3g}, so the variance of a "
            "group is not finite; return finite rewards of moderate size, such as 0 to 1."
        )
    statistics = GroupRewards(rewards, centred, variance.sqrt()[group_of], count[group_of])
    found = estimate(statistics, eps)
    if not isinstance(found, Tensor) or found.shape != rewards.shape:
        given = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise SparseRLError(
            f"the advantage estimator {estimator} returned {given}; it must be a tensor [{len(rewards)}]."
        )
    result = torch.where(flat[group_of] | ~members, 0.0, found.double())
    if not result.isfinite().all():
        raise SparseRLError(f"the advantage estimator {estimator} returned advantages that are not finite.")
    metrics = {
        "advantage/groups_without_variance/frac": flat.double().mean().item(),
        "advantage/abs/mean": result.abs().mean().item(),
    }
    return result, metrics
