"""Metrics that describe the rollouts of a step: what was sampled, and what compression did to it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from ..chat import talk_metrics
from ..config.recipe import LearnSettings, RolloutSettings
from ..learn.correct import Corrected, Correction, normalise_weights
from ..learn.diagnose import gap_metrics, gap_since_eviction, looping, percentiles, rejection_metrics, rollout_metrics
from ..learn.loss import k3
from ..learn.regret import regret_metrics
from ..learn.support import support_metrics
from ..records import Trajectory, kv_tokens_saved, mean_entries
from ..tasks import UNGRADED, by_task, mean_parts
from ..tasks.answering import Answers
from .step import StepRollout


def step_metrics(
    rollout: StepRollout,
    corrected: Corrected,
    correction: Correction,
    interval: int,
    skipped: int,
    learn: LearnSettings,
) -> dict[str, float]:
    """Metrics over everything that was sampled, and over the mask before any rejection. Metrics of the gap and the
    entropy only cover rows that went through the model with the weights that sampled them.

    corrected: the correction of all rows, with weights not yet normalised. interval: tokens between evictions. skipped:
    rows of the task's data that could not be used.
    """
    scored, trajectories, rewards = rollout.scored, rollout.trajectories, rollout.rewards
    mask, loops = scored.sampled.mask, looping(trajectories)
    seen = torch.arange(len(mask)) if scored.seen is None else scored.seen.nonzero()[:, 0]
    gap, seen_mask, seen_trajectories = scored.gap[seen], mask[seen], [trajectories[i] for i in seen.tolist()]
    verdicts = Counter(g.verdict for g in rollout.grades)
    metrics = {
        **rollout_metrics(trajectories, rewards, rollout.right, loops),
        **{f"reward/{name}/mean": value for name, value in mean_parts(rollout.grades).items()},
        **gap_metrics(gap, seen_mask, normalise_weights(corrected, mask, correction).rows(seen)),
        **gap_since_eviction(gap, seen_mask, seen_trajectories, interval),
        **rejection_metrics(mask, corrected, rewards, loops),
        "old/entropy/mean": scored.entropies[seen][seen_mask].double().mean().item(),
        "cache/tokens_saved/frac": kv_tokens_saved(trajectories),
    }
    if rollout.talks:
        metrics |= talk_metrics(rollout.talks, trajectories)
    if any(t.choices is not None for t in trajectories):
        metrics |= fold_metrics(trajectories)
    for label, part in by_task(rollout.prompts, rollout.grades).items():
        metrics[f"task/{label}/reward/mean"] = math.fsum(g.reward for g in part) / len(part)
        metrics[f"task/{label}/right/frac"] = sum(g.right for g in part) / len(part)
        metrics[f"task/{label}/trajectories/count"] = float(len(part))
    if scored.seen is not None:
        metrics["replay/checked/frac"] = scored.seen.double().mean().item()
    if scored.sampled.supports is not None:
        metrics |= support_metrics([t.support for t in trajectories], scored.sampled.supports)
    if skipped:
        metrics["data/skipped/count"] = float(skipped)
    for verdict, count in sorted(verdicts.items()):
        metrics[f"grade/{verdict.replace(' ', '_')}/count"] = float(count)
    if scored.reference_logprobs is not None:
        old = scored.old_logprobs if scored.seen is None else scored.sampled.sampler_logprobs
        metrics["old/kl/mean"] = k3(old, scored.reference_logprobs)[mask].double().mean().item()
    replaced = float((rollout.chosen_rows >= len(rollout.chosen_rows)).sum())
    if learn.refill:
        metrics["reject/replaced/count"] = replaced
    if learn.dynamic:
        sampled_again = float(len(trajectories) - len(rollout.chosen_rows))
        metrics["dynamic/sampled/count"], metrics["dynamic/replaced/count"] = sampled_again, replaced
    if rollout.alpha:
        alpha = torch.cat(list(rollout.alpha.values()))
        metrics["gap/alpha/p05"] = percentiles(alpha, torch.tensor([0.05], dtype=torch.float64)).item()
        metrics["gap/alpha/mean"] = alpha.mean().item()
    if rollout.regret:
        metrics |= regret_metrics(list(rollout.regret.values()))
    return metrics


def fold_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of a policy that chooses its folds: cache entries, beacons, and the tokens that each beacon replaces."""
    beacons = [t.tokens == t.beacon_id for t in trajectories]
    chosen = sum(
        int((b & t.choices).sum()) for b, t in zip(beacons, trajectories, strict=True) if t.choices is not None
    )
    folded = sum(
        int((~b)[t.num_prompt_tokens : int(b.nonzero().max())].sum()) for b, t in zip(beacons, trajectories) if b.any()
    )
    folds = sum(int(b.sum()) for b in beacons)
    return {
        "fold/entries/mean": sum(map(mean_entries, trajectories)) / len(trajectories),
        "fold/beacons/mean": folds / len(trajectories),
        "fold/chunk/mean": folded / max(folds, 1),
        "fold/chosen/frac": chosen / max(folds, 1),
    }


def step_answers(metrics: dict[str, float], rollout: RolloutSettings, distils: bool) -> Answers:
    """The completions of a step summed up for hints about what is wrong (tasks/answering.py). distils: something is
    learned from a group whatever its rewards are
    """
    count = int(metrics["rollout/trajectories/count"])
    return Answers(
        count=count,
        right=metrics["reward/right/frac"],
        cut=metrics["rollout/truncated/frac"],
        no_answer=metrics.get("grade/no_answer/count", 0.0) / count,
        max_new_tokens=rollout.max_new_tokens,
        groups=0 if distils else rollout.prompts,
        flat=metrics.get("advantage/groups_without_variance/frac", 0.0),
        ungraded={v: int(metrics.get(f"grade/{v.replace(' ', '_')}/count", 0.0)) for v in UNGRADED},
        turns=metrics.get("talk/turns/mean", 0.0),
    )
