"""How far a run has got, so that a step happens wholly or not at all, however the run ends."""

from __future__ import annotations

from dataclasses import dataclass

from .best import Measured

Versions = tuple[int, ...]  # optimizer steps behind the learner's weights, and behind those of each student


@dataclass
class Progress:
    """`begin` comes before the first update of a step, `commit` after the last one.

    In between some of a step's updates may be done and others not, so the weights must not be saved.
    """

    versions: Versions  # after the last whole step
    steps: int = 0  # whole steps done
    saved: int = -1  # the step of the newest checkpoint
    evaluated: int = -1  # the step of the last evaluation
    best: Measured | None = None  # the best evaluation of a step, which has a checkpoint
    highest: Measured | None = None  # the best evaluation, that of the start included
    fallen: bool = False  # whether the last evaluation was far below the highest
    updating: bool = False

    def begin(self) -> None:
        self.updating = True

    def commit(self, versions: Versions) -> None:
        self.versions, self.steps, self.updating = versions, self.steps + 1, False

    def resume(self, steps: int, versions: Versions) -> None:
        """Start over from the checkpoint of a step."""
        self.versions, self.steps, self.saved, self.updating = versions, steps, steps, False

    def is_between_steps(self, versions: Versions, refused: bool) -> bool:
        """Whether the weights may belong to no whole step.

        versions: as they are now. refused: the step was ended by a sentence of ours, which no update raises halfway, so
        equal versions mean equal weights.
        """
        return self.updating and not (refused and versions == self.versions)


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps, and after the last one, happens after this one."""
    return every > 0 and (step % every == 0 or step == last)
