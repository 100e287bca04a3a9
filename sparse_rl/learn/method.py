"""A method: how the learner sees a trajectory, what it does about the difference from the sampler, and what else it learns from.

    view        `dense`: every token sees all before it. `shadow`: exactly what the sampler's cache still held, replayed from the trace
    correction  what to do about the gap; in the shadow view there is none but rounding
    distill     the view that is trained is pulled to the other one, or the other one to it (distill.py)

A preset is a vetted combination.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import SparseRLError, nearest
from .correct import PRESETS, Correction
from .distill import DIRECTIONS

VIEWS = ("dense", "shadow")


@dataclass(frozen=True)
class Method:
    correction: Correction = PRESETS["none"]
    view: str = "dense"
    distill: str | None = None  # a direction of distill.py; needs the shadow view

    def __post_init__(self):
        if self.view not in VIEWS:
            raise SparseRLError(f"learn.view is {self.view!r}; {nearest(self.view, VIEWS)}")
        if self.distill is not None and self.distill not in DIRECTIONS:
            raise SparseRLError(
                f"learn.distill is {self.distill!r}; it must be one of {', '.join(DIRECTIONS)}, or null for the method's."
            )
        if self.distill is not None and self.view != "shadow":
            raise SparseRLError(
                f"distillation ({self.distill}) is between the two views, so it goes with learn.view: shadow, not {self.view}."
            )
        if self.view == "shadow" and self.correction.old == "sampler":
            raise SparseRLError(
                "a correction with old: sampler (naive) takes the sampler's own log-probs, so it has no view to replay; use shadow."
            )


METHODS = {name: Method(how) for name, how in PRESETS.items()}
METHODS["shadow"] = Method(view="shadow")
METHODS["smd"] = Method(view="shadow", distill="a")


def method(preset: str, **parts) -> Method:
    """A preset, with parts of it changed."""
    if preset not in METHODS:
        raise SparseRLError(f"there is no method {preset!r}; {nearest(preset, METHODS)}")
    return replace(METHODS[preset], **parts)
