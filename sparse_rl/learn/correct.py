"""Corrections: what to do about the difference between the sampler's distribution and the learner's.

    gap_t = old_logprob_t - sampler_logprob_t        xi_t = exp(gap_t)

A correction turns (gap, response mask) into a token mask M and token weights w for the loss. It is a record of parts that combine
freely; a preset is a vetted combination. Everything is a pure function of detached tensors.

Left out on purpose: anything that looks at rewards. Diagnostics always use the mask as it was before any rejection.

Shapes: N trajectories of one optimizer step, T tokens (padded).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import SparseRLError, nearest


@dataclass(frozen=True)
class Correction:
    old: str = "learner"  # whose log-probs stand for `old`: recomputed in the learner's view, or the sampler's own (then xi = 1)
    reject_below: float | None = None  # reject a trajectory in which any xi is below this
    reject_outside: tuple[float, float] | None = None  # reject a trajectory whose exp(mean gap) is outside
    mask_outside: tuple[float, float] | None = None  # drop tokens whose xi is outside
    cap: float | None = None  # weight tokens by min(xi, cap); infinity: by xi; None: not at all
    normalise_weights: bool = False  # divide the weights by their mean over the response tokens of the optimizer step
    clip_gap: float | None = None  # clip the gap to +- this before anything else
    clip_kl: float | None = None  # clip the k3 estimate of KL(learner || reference) to +- this

    def __post_init__(self):
        if self.old not in ("learner", "sampler"):
            raise SparseRLError(f"correction.old is {self.old!r}; it must be 'learner' or 'sampler'.")
        for name in ("reject_below", "cap", "clip_gap", "clip_kl"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise SparseRLError(f"correction.{name} is {value}; it must be above 0, or null to switch it off.")
        for name in ("reject_outside", "mask_outside"):
            band = getattr(self, name)
            if band is not None and not 0 <= band[0] <= band[1]:
                raise SparseRLError(f"correction.{name} is {band}; it must be (low, high) with 0 <= low <= high.")

    @property
    def rejects(self) -> bool:
        """Whether it may reject trajectories: it has a bound, and a gap to compare with it."""
        return self.old == "learner" and (self.reject_below is not None or self.reject_outside is not None)


PRESETS = {
    "naive": Correction(old="sampler"),
    "none": Correction(),
    "tis": Correction(cap=2.0),
    "mis": Correction(mask_outside=(0.5, 2.0), cap=math.inf),
    "geo": Correction(reject_outside=(0.99, 1.01)),
    "sparse-rl": Correction(reject_below=1e-4, cap=2.0),
    "sparse-rl-released": Correction(
        reject_below=1e-4, mask_outside=(0.5, 1.5), cap=1.5, normalise_weights=True, clip_gap=20.0, clip_kl=10.0
    ),
}
PRESETS["icepop"] = PRESETS["mis"]


def correction(preset: str, **parts) -> Correction:
    """A preset, with parts of it changed."""
    if preset not in PRESETS:
        raise SparseRLError(f"there is no correction {preset!r}; {nearest(preset, PRESETS)}")
    return changed(PRESETS[preset], **parts)


def changed(how: Correction, **parts) -> Correction:
    unknown = set(parts) - set(Correction.__dataclass_fields__)
    if unknown:
        name = sorted(unknown)[0]
        raise SparseRLError(f"a correction has no part {name!r}; {nearest(name, Correction.__dataclass_fields__)}")
    return replace(how, **parts)


@dataclass(frozen=True)
class Corrected:
    mask: Tensor  # bool [N, T]: M, the tokens that count
    weights: Tensor  # fp32 [N, T]: w, detached; meaningless where the mask is off
    accepted: Tensor  # bool [N]


def correct(gap: Tensor, mask: Tensor, how: Correction) -> Corrected:
    """gap fp32 [N, T] = old - sampler log-prob; mask bool [N, T]: the response tokens."""
    gap = torch.where(mask, gap.detach().float(), 0.0)
    if how.clip_gap is not None:
        gap = gap.clamp(-how.clip_gap, how.clip_gap)
    xi = gap.exp()
    accepted = torch.ones(len(gap), dtype=torch.bool, device=gap.device)
    if how.reject_below is not None:
        accepted &= (gap >= math.log(how.reject_below)).all(1)  # off the mask the gap is 0, which never rejects
    if how.reject_outside is not None:
        low, high = how.reject_outside
        mean = (gap.sum(1) / mask.sum(1).clamp(min=1)).exp()
        accepted &= (mean >= low) & (mean <= high)
    kept = mask & accepted[:, None]
    if how.mask_outside is not None:
        low, high = how.mask_outside
        kept &= (xi >= low) & (xi <= high)
    weights = torch.ones_like(xi) if how.cap is None else xi.clamp(max=how.cap)
    if how.normalise_weights:
        weights = weights / (weights * mask).sum().div(mask.sum().clamp(min=1)).clamp(min=1e-12)
    return Corrected(kept, weights, accepted)
