"""Corrections: what to do about the difference between the sampler's distribution and the learner's.

    gap_t = old_logprob_t - sampler_logprob_t        xi_t = exp(gap_t)

A correction turns (gap, response mask) into a token mask M and token weights w for the loss. It is a record of parts
that combine freely; a preset is a vetted combination (learn/method.py says how to register one). Everything here is a
pure function of detached tensors.

`correct_rows` treats every trajectory separately, so a whole step is corrected once and then cut into optimizer steps.
Only `normalise_weights` looks at all trajectories of an optimizer step. `correct` does both.

`sparse-rl` is our reading of the paper, whose cap no source gives; `sparse-rl-released` is the authors' code. `naive`
is our definition, and harsher than the papers' likely baseline, which is `none`.

Corrections never look at rewards. Diagnostics always use the mask as it was before any rejection.

Shapes: N trajectories, T tokens (padded).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import SparseRLError, nearest


@dataclass(frozen=True)
class Correction:
    old: str = "learner"  # which log-probs are old: the learner's, recomputed, or the sampler's, so that xi = 1
    reject_below: float | None = None  # reject a trajectory in which any xi is below this
    reject_outside: tuple[float, float] | None = None  # reject a trajectory whose exp(mean gap) is outside
    mask_outside: tuple[float, float] | None = None  # drop tokens whose xi is outside
    cap: float | None = None  # weight tokens by min(xi, cap); infinity: by xi; None: all weights are 1
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

    @property
    def looks_at_gap(self) -> bool:
        """Whether any of its parts depends on the gap."""
        bounds = (self.reject_below, self.reject_outside, self.mask_outside, self.cap)
        return self.old == "learner" and any(part is not None for part in bounds)


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


def correction(preset: str, **parts: Any) -> Correction:
    """A preset, with parts of it changed."""
    if preset not in PRESETS:
        raise SparseRLError(f"there is no correction {preset!r}; {nearest(preset, PRESETS)}")
    return changed(PRESETS[preset], **parts)


def changed(correction: Correction, **parts: Any) -> Correction:
    unknown = set(parts) - set(Correction.__dataclass_fields__)
    if unknown:
        name = sorted(unknown)[0]
        raise SparseRLError(f"a correction has no part {name!r}; {nearest(name, Correction.__dataclass_fields__)}")
    return replace(correction, **parts)


def only_rejection(correction: Correction, name: str) -> Correction:
    """The part of a correction that applies without ratios, as in online DPO: its rejection of trajectories."""
    left = replace(correction, mask_outside=None, cap=None, normalise_weights=False)
    if (left != correction and not left.rejects) or correction.old == "sampler":
        raise SparseRLError(
            f"{name} only changes the weights of tokens, which online DPO does not have; use none, geo, sparse-rl, or "
            "shadow."
        )
    return left


@dataclass(frozen=True)
class Corrected:
    """The result of a correction of N trajectories."""

    mask: Tensor  # bool [N, T]: M, the tokens that count
    weights: Tensor  # fp32 [N, T]: w, detached; meaningless where the mask is off
    accepted: Tensor  # bool [N]

    def rows(self, index: Tensor) -> Corrected:
        return Corrected(self.mask[index], self.weights[index], self.accepted[index])


def correct(gap: Tensor, mask: Tensor, correction: Correction) -> Corrected:
    """The correction of one optimizer step.

    gap fp32 [N, T]: old - sampler log-prob; mask bool [N, T]: the response tokens
    """
    return normalise_weights(correct_rows(gap, mask, correction), mask, correction)


def correct_rows(gap: Tensor, mask: Tensor, correction: Correction, accepted: Tensor | None = None) -> Corrected:
    """The correction before weights are normalised. No row depends on another, so the result can be sliced.

    accepted bool [N]: the result of `accept`, if it is known already
    """
    gap = _clipped_gap(gap, mask, correction)
    if accepted is None:
        accepted = _accept(gap, mask, correction)
    xi, kept = gap.exp(), mask & accepted[:, None]
    if correction.mask_outside is not None:
        low, high = correction.mask_outside
        kept &= (xi >= low) & (xi <= high)
    weights = torch.ones_like(xi) if correction.cap is None else xi.clamp(max=correction.cap)
    return Corrected(kept, weights, accepted)


def normalise_weights(corrected: Corrected, mask: Tensor, correction: Correction) -> Corrected:
    """Divide the weights by their mean over the response tokens, if the correction says so. mask bool [N, T]"""
    if not correction.normalise_weights:
        return corrected
    weights = corrected.weights
    mean = (weights * mask).sum().div(mask.sum().clamp(min=1)).clamp(min=1e-12)
    return replace(corrected, weights=weights / mean)


def accept(gap: Tensor, mask: Tensor, correction: Correction) -> Tensor:
    """The trajectories that a correction does not reject. bool [N]"""
    return _accept(_clipped_gap(gap, mask, correction), mask, correction)


def _clipped_gap(gap: Tensor, mask: Tensor, correction: Correction) -> Tensor:
    gap = torch.where(mask, gap.detach().float(), 0.0)
    return gap if correction.clip_gap is None else gap.clamp(-correction.clip_gap, correction.clip_gap)


def _accept(gap: Tensor, mask: Tensor, correction: Correction) -> Tensor:
    accepted = torch.ones(len(gap), dtype=torch.bool, device=gap.device)
    if correction.reject_below is not None:
        accepted &= (gap >= math.log(correction.reject_below)).all(1)  # off the mask the gap is 0, above any bound
    if correction.reject_outside is not None:
        low, high = correction.reject_outside
        mean = (gap.sum(1) / mask.sum(1).clamp(min=1)).exp()
        accepted &= (mean >= low) & (mean <= high)
    return accepted
