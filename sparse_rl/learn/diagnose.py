"""Metrics of what compression did to the samples, over the response mask before any rejection.

    xi = exp(gap), gap = old - sampler log-prob. Near 1: the learner agrees with the sampler.

Pure functions of detached tensors; keys are stage/quantity/stat. Shapes: N trajectories, T tokens (padded).

The same quantities in verl: gap/k3/mean = rollout_corr/k3_kl, gap/ess/frac = rollout_is_eff_sample_size, gap/chi2/mean
= chi2_token, gap/ppl_ratio/mean = ppl_ratio.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..records import Trajectory
from .correct import Corrected

PERCENTILES = {"p01": 0.01, "p05": 0.05, "p50": 0.5, "p95": 0.95, "p99": 0.99}
LOOP_TOKENS, LOOP_REPEATS, LONGEST_PERIOD = 24, 4, 64


def gap_metrics(gap: Tensor, mask: Tensor, corrected: Corrected) -> dict[str, float]:
    """Metrics of the gap. gap fp32 [N, T]; mask bool [N, T]: the original response mask; corrected: a correction of
    both
    """
    values = gap[mask].double()
    if not len(values):
        return {}
    xi = values.exp()
    used = (corrected.weights * corrected.mask)[mask].double()
    sequence = (gap * mask).sum(1).double() / mask.sum(1).clamp(min=1)
    quantiles = torch.tensor([*PERCENTILES.values()], dtype=torch.float64)
    return {
        **{f"gap/xi/{name}": value.item() for name, value in zip(PERCENTILES, percentiles(xi, quantiles), strict=True)},
        "gap/xi/min": xi.min().item(),
        "gap/abs/mean": values.abs().mean().item(),
        "gap/k3/mean": (xi - 1 - values).mean().item(),  # KL(sampler || old)
        "gap/chi2/mean": (xi.square().mean() - 1).item(),
        "gap/ppl_ratio/mean": sequence[mask.any(1)].exp().mean().item(),
        "gap/ess/frac": (used.sum().square() / (len(used) * used.square().sum()).clamp(min=1e-300)).item(),
    }


def percentiles(values: Tensor, quantiles: Tensor) -> Tensor:
    """Quantiles by linear interpolation, for any number of values (torch.quantile allows 16 million)."""
    ordered = values.sort().values
    place = quantiles * (len(ordered) - 1)
    low = place.floor().long()
    high = (low + 1).clamp(max=len(ordered) - 1)
    return torch.lerp(ordered[low], ordered[high], place - low)


def rejection_metrics(mask: Tensor, corrected: Corrected, rewards: Tensor, loops: Tensor) -> dict[str, float]:
    """The share of trajectories that a correction rejects: of all, of those with and without reward, and of those that
    end in a loop. rewards [N], loops bool [N]
    """
    rejected = ~corrected.accepted
    metrics = {
        "reject/trajectories/frac": _share(rejected),
        "reject/tokens/frac": _share((mask & ~corrected.mask)[mask]),
        "reject/rewarded/frac": _share(rejected[rewards > 0]),
        "reject/unrewarded/frac": _share(rejected[rewards <= 0]),
        "reject/looping/frac": _share(rejected[loops]),
    }
    return {name: value for name, value in metrics.items() if value is not None}


def gap_since_eviction(
    gap: Tensor, mask: Tensor, trajectories: Sequence[Trajectory], interval: int
) -> dict[str, float]:
    """Mean |gap| in each quarter of the interval after an eviction, and before the first eviction. A token counts where
    the query before it stands, which predicted it.

    All layers and heads of a row evict at the same moments, except that a layer with a larger budget may have nothing
    to evict yet; so the first heads of all layers show the moments.
    """
    since = torch.full(gap.shape, -1, dtype=torch.int64)  # queries since the last eviction; -1: none yet
    for i, t in enumerate(trajectories):
        tokens = len(t.tokens)
        moments = torch.zeros(tokens + 1, dtype=torch.bool)
        moments[t.trace.evicted_at[:, 0].flatten().to(torch.int64).clamp(max=tokens)] = True
        query = torch.arange(tokens)
        last = torch.where(moments[:tokens], query, -1).cummax(0).values
        since[i, 1:tokens] = torch.where(last < 0, -1, query - last)[:-1]
    quarter = torch.where(since < 0, -1, (since * 4 // interval).clamp(max=3))
    size = gap.abs().double()
    found = {}
    for name, number in (("before_eviction", -1), ("quarter1", 0), ("quarter2", 1), ("quarter3", 2), ("quarter4", 3)):
        here = mask & (quarter == number)
        if here.any():
            found[f"gap/abs/{name}"] = size[here].mean().item()
    return found


def rollout_metrics(
    trajectories: Sequence[Trajectory], rewards: Tensor, right: Tensor, loops: Tensor
) -> dict[str, float]:
    """Metrics of what was sampled: rewards, lengths, evictions. rewards [N]; right, loops bool [N]"""
    lengths = torch.tensor([len(t.response_tokens) for t in trajectories], dtype=torch.float64)
    truncated = torch.tensor([t.finish_reason == "length" for t in trajectories])
    metrics = {
        "reward/mean": rewards.double().mean().item(),
        "reward/right/frac": _share(right),
        "rollout/trajectories/count": float(len(trajectories)),
        "rollout/length/mean": lengths.mean().item(),
        "rollout/length/max": lengths.max().item(),
        "rollout/truncated/frac": _share(truncated),
        "rollout/loops/frac": _share(loops),
    }
    for name, which in (("rewarded", rewards > 0), ("unrewarded", rewards <= 0)):
        if which.any():
            metrics[f"rollout/length/{name}"] = lengths[which].mean().item()
    return metrics


def looping(trajectories: Sequence[Trajectory]) -> Tensor:
    """The trajectories that end in a loop. bool [N]"""
    return torch.tensor([ends_in_loop(t.response_tokens) for t in trajectories], dtype=torch.bool)


def ends_in_loop(response: Tensor) -> bool:
    """Whether a response ends by repeating itself: at least 4 times, over at least 24 tokens, with a period of at most
    64 tokens.

    Inside a loop xi is near 1, so a correction sees only the tokens that led into it: `reject/looping/frac`.
    """
    ids, n = response.numpy(), len(response)
    longest = min(LONGEST_PERIOD, n // LOOP_REPEATS)
    before_last = ids[n - 1 - longest : n - 1][::-1]  # one period back, two, ...
    for period in 1 + np.flatnonzero(before_last == ids[-1:]):  # a loop's last token also stands one period earlier
        span = max(LOOP_TOKENS, LOOP_REPEATS * period)
        if span <= n and (ids[n - span + period :] == ids[n - span : n - period]).all():
            return True
    return False


def _share(which: Tensor) -> float | None:
    """The fraction that is true; None if there is nothing to count."""
    return which.double().mean().item() if which.numel() else None
