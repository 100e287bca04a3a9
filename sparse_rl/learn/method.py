"""Methods: how the learner sees a trajectory, how it corrects the gap to the sampler, and whether it distils.

    view        `dense`: every token sees all tokens before it. `shadow`: exactly what the sampler's cache still held,
                replayed from the trace
    correction  what to do about the gap (correct.py); in the shadow view the gap is only rounding
    distill     a direction of distillation between the two views (distill.py)

A preset is a vetted combination. To add one, register it; `learn.method` then accepts its name, and
`sparse-rl list methods` shows it:

    register_method("tis-5", Method(Correction(cap=5.0)))
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import SparseRLError, nearest
from .correct import PRESETS, Correction
from .distill import DIRECTIONS, DISTILL_WEIGHT

VIEWS = ("dense", "shadow")


@dataclass(frozen=True)
class Method:
    correction: Correction = PRESETS["none"]
    view: str = "dense"
    distill: str | None = None  # a direction of distill.py; needs the shadow view
    distill_weight: float = DISTILL_WEIGHT  # lambda; without a direction it has no effect

    def __post_init__(self):
        if self.view not in VIEWS:
            raise SparseRLError(f"learn.view is {self.view!r}; {nearest(self.view, VIEWS)}")
        if self.distill is not None and self.distill not in DIRECTIONS:
            raise SparseRLError(
                f"learn.distill is {self.distill!r}; it must be one of {', '.join(DIRECTIONS)}, or null for the "
                "method's own."
            )
        if self.distill is not None and self.view != "shadow":
            raise SparseRLError(
                f"learn.view is {self.view}, but distillation ({self.distill}) compares the dense with the shadow "
                "view; set learn.view to shadow."
            )
        if self.view == "shadow" and self.correction.old == "sampler":
            raise SparseRLError(
                "a correction with old: sampler (naive) takes the sampler's own log-probs, so there is nothing to "
                "replay; use learn.method: shadow."
            )


METHODS: dict[str, Method] = {name: Method(correction) for name, correction in PRESETS.items()}


def register_method(name: str, method: Method) -> Method:
    """Register a method under a name, for recipes and `sparse-rl list methods`.

    A method that only corrects is also registered as a correction preset, for `correction(name)` and the adapters of
    other trainers.
    """
    if METHODS.get(name, method) != method:
        raise SparseRLError(f"the method {name!r} exists already; register yours under another name.")
    METHODS[name] = method
    if method == Method(method.correction):
        PRESETS[name] = method.correction
    return method


register_method("shadow", Method(view="shadow"))
register_method("smd", Method(view="shadow", distill="dense-to-shadow"))


def method(preset: str, **parts: Any) -> Method:
    """A preset, with parts of it changed."""
    if preset not in METHODS:
        raise SparseRLError(f"there is no method {preset!r}; {nearest(preset, METHODS)}")
    return replace(METHODS[preset], **parts)
