"""What the plug-ins share: make a correction from a preset and its changed parts, and refuse what a host cannot do."""

from __future__ import annotations

from collections.abc import Mapping

from ..config import LearnSettings
from ..errors import SparseRLError
from ..learn.correct import Correction


def make_correction(host: str, preset: str, parts: Mapping | None) -> Correction:
    """The preset with its parts changed, checked as in a recipe."""
    if not isinstance(preset, str):
        raise SparseRLError(f"the preset for {host} is {preset!r}; it must be the name of one, such as 'sparse-rl'.")
    if not isinstance(parts, Mapping | None):
        raise SparseRLError(
            f"the correction for {host} is {parts!r}; it must be parts and their values, such as {{cap: 3.0}}."
        )
    parts = dict(parts or {})
    method = LearnSettings(method=preset, correction=parts).resolve_method()
    if method.view != "dense":
        raise SparseRLError(
            f"{preset} replays a sampler's evictions, which {host} does not record; use a correction, such as "
            "sparse-rl."
        )
    if parts.get("clip_kl") is not None:
        raise SparseRLError(
            f"clip_kl is {parts['clip_kl']}, but the KL term is {host}'s own; omit clip_kl and use {host}'s settings."
        )
    return method.correction


def refuse_normalised(host: str, sees: str, correction: Correction) -> None:
    """Refuse normalised weights: their mean over the optimizer step cannot be computed from a part of it."""
    if correction.normalise_weights:
        raise SparseRLError(
            f"normalise_weights divides by a mean over the optimizer step, but {host} hands over {sees}; "
            "set normalise_weights to false."
        )
