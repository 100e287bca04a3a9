"""Track how far a run has got, so that a step happens wholly or not at all, however the run ends."""

from __future__ import annotations

from dataclasses import dataclass

from ..files import BEST
from .best import Measured, has_fallen

Versions = tuple[int, ...]  # optimizer steps of the learner and of each student, and trainings of the compressor


@dataclass
class Progress:
    """The progress of a run. `begin` is called before the first update of a step, `commit` after the last one.

    In between, some updates of the step may be done and others not, so the weights must not be saved.
    """

    versions: Versions  # after the last whole step
    steps: int = 0  # whole steps done
    saved: int = -1  # the step of the newest checkpoint
    evaluated: int = -1  # the step of the last evaluation
    best: Measured | None = None  # the best evaluation after a step; it has a checkpoint
    highest: Measured | None = None  # the best evaluation, including the one before training
    fallen: bool = False  # whether the last evaluation was far below the highest
    updating: bool = False

    def begin(self) -> None:
        self.updating = True

    def commit(self, versions: Versions) -> None:
        self.versions, self.steps, self.updating = versions, self.steps + 1, False

    def resume(self, steps: int, versions: Versions) -> None:
        """Continue from the checkpoint of a step."""
        self.versions, self.steps, self.saved, self.updating = versions, steps, steps, False

    def watch(self, now: Measured, prompts: int) -> str | None:
        """Note an evaluation. Returns a warning if accuracy has fallen, once until it has recovered."""
        highest, before = self.highest, self.fallen
        self.highest = now if now.better_than(highest) else highest
        self.fallen = highest is not None and has_fallen(now, highest, prompts)
        if highest is None or not self.fallen or before:
            return None
        has_best = self.best is not None and self.best.step == highest.step
        where = f"; checkpoints/{BEST} holds that step" if has_best else ""
        return (
            f"sparse-rl: accuracy on held-out prompts fell to {now.accuracy:.1%} at step {now.step}, from "
            f"{highest.accuracy:.1%} at step {highest.step} ({prompts} prompts; chance does not explain it)"
            f"{where}. If it goes on, stop, and lower optimizer.lr or raise rollout.budget."
        )

    def is_between_steps(self, versions: Versions, refused: bool) -> bool:
        """Whether the weights may be between two whole steps.

        versions: the present ones. refused: a SparseRLError ended the step; no update raises one halfway, so equal
        versions mean equal weights.
        """
        return self.updating and not (refused and versions == self.versions)


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something that is done every so many steps, and after the last one, is due now."""
    return every > 0 and (step % every == 0 or step == last)
