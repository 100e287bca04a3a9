"""What users can get wrong, said in one sentence with the numbers and the remedy.

Every error raised on purpose is a `SparseRLError`; broken invariants are asserts, everything else propagates.
"""

import difflib
from collections.abc import Iterable


class SparseRLError(ValueError):
    """A mistake the user can mend; the message says how."""


class NonFiniteLogits(SparseRLError):
    """The model produced NaN or infinite logits; the message says for which row and step.

    The trajectories that were finished by then are in `trajectories`.
    """

    trajectories: list = []  # noqa: RUF012 (replaced, never mutated)


class OutOfMemory(SparseRLError):
    """Memory ran out; the message is the memory plan and the largest setting that fits."""


class RolloutInterrupted(KeyboardInterrupt):
    """Ctrl-C during `Engine.generate`. The trajectories that were finished by then are in `trajectories`."""

    def __init__(self, trajectories: list):
        super().__init__(f"interrupted; {len(trajectories)} finished trajectories are in `.trajectories`")
        self.trajectories = trajectories


def nearest(name: str, known: Iterable[str]) -> str:
    """The remedy for a misspelt name: the closest known one, and all of them."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(known)}."
