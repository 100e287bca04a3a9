"""How far a run has got, so that a step happens wholly or not at all, however the run ends."""

from __future__ import annotations

from dataclasses import dataclass

from ..files import BEST
from .best import Measured, has_fallen

Versions = tuple[int, ...]  # optimizer steps behind the learner's weights, and behind those of each student,
# and trainings of the compressor's scorer


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

    def watch(self, now: Measured, prompts: int) -> str | None:
        """Note an evaluation. Returns what to say of a run that has fallen: once, until it has recovered."""
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
        """Whether the weights may belong to no whole step.

        versions: as they are now. refused: the step was ended by a sentence of ours, which no update raises halfway, so
        equal versions mean equal weights.
        """
        return self.updating and not (refused and versions == self.versions)


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps, and after the last one, happens after this one."""
    return every > 0 and (step % every == 0 or step == last)
