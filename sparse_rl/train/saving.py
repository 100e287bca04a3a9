"""Save a run and resume it: what a checkpoint contains, when one may be written, and how a run returns to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import Recipe
from ..distributed.world import World
from ..errors import CannotWrite, NonFiniteLogits, OutOfMemory, SparseRLError
from ..files import find_checkpoints, first_line, read_lines, remove
from ..learn.learner import Disagreement
from ..learn.student import Student
from ..models import Record, set_record
from ..planning.memory import is_out_of_memory
from ..signals import uninterrupted
from .best import Measured, best_of
from .checkpoint import cleaned_checkpoints, keep_best, load_state, restoring, save_checkpoint
from .log import Log
from .parts import make_rollout_record
from .pooled import end_pool

if TYPE_CHECKING:
    from .loop import Trainer


def save(trainer: Trainer, world: World | None = None) -> None:
    """Write the checkpoint of the last whole step. `world`: the processes that take part; None: all of the run's."""
    progress, learner = trainer.progress, trainer.learner
    if progress.saved == progress.steps:
        return
    with uninterrupted():
        check_finite(trainer)
        if learner.sharded is not None:
            trainer.source.wait_idle()
            trainer.publish_weights()
        elif world is None:
            learner.check_agreement()
        state = {
            "learner": learner.state_dict(),
            "budget": trainer.sampler.budget.state_dict(),
            "students": trainer.students.state_dict(),
            "lengths": trainer.sampler.lengths.state_dict(),
            "scorer": trainer.scorer.state_dict(),
        }
        students = {student.name: student.to_save() for student in trainer.students.members}
        whole = trainer.model if learner.sharded is None else trainer.sampler.model
        record = record_of_run(trainer)
        set_record(whole, record)
        for student in trainer.students.members:
            set_record(students[student.name], record_of_student(record, student))
        where, keep = trainer.folder / "checkpoints", trainer.recipe.run.keep
        best = progress.best.step if progress.best else None
        save_checkpoint(
            where, progress.steps, whole, trainer.tokenizer, state, keep, students, world or trainer.world, best
        )
        progress.saved = progress.steps


def save_if_best(trainer: Trainer, found: Measured) -> None:
    """Keep the checkpoint of an evaluation that is better than all before."""
    progress = trainer.progress
    if not progress.steps or not found.better_than(progress.best):
        return
    progress.best = found
    if progress.saved == progress.steps:
        link_best(trainer)
    else:
        save(trainer)


def link_best(trainer: Trainer) -> None:
    best, keep = trainer.progress.best, trainer.recipe.run.keep
    where = trainer.folder / "checkpoints"
    trainer.world.run_on_first(lambda: keep_best(where, best.step if best else None, keep))


def record_of_run(trainer: Trainer) -> Record:
    """The record of the run at its present step."""
    sampler = trainer.sampler
    stop_ids, compressor = sampler.sampling.stop_ids or (), sampler.engine.compressor
    return make_rollout_record(trainer.recipe, trainer.task, stop_ids, compressor, trainer.progress.steps)


def record_of_student(record: Record, student: Student) -> Record:
    """The record of a student, which runs on its own beacon; with several chunk sizes its user chooses one."""
    sizes = student.sizes
    own = f"beacon:{sizes[0]}" if len(sizes) == 1 else None
    return replace(record, compressor=own, options={}, budget=None, interval=None, method="student", view=None)


def check_finite(trainer: Trainer) -> None:
    """Refuse to save weights that are not finite; earlier checkpoints are good."""
    learners = [trainer.learner, *trainer.students.members]
    finite = all(one.optimizer.is_finite() for one in learners)
    if trainer.learner.sharded is not None:
        finite = all(trainer.world.run_on_all(lambda: finite))
    if finite:
        return
    raise SparseRLError(
        f"the weights or their moments are not finite after step {trainer.progress.steps}, so they were not saved; "
        f"{last_good(trainer)}."
    )


def last_good(trainer: Trainer) -> str:
    """Words that say from which checkpoint a run with ruined weights can continue, and how."""
    found, steps = find_checkpoints(trainer.folder / "checkpoints"), trainer.progress.steps
    good = [path for step, path in found if step < steps]
    where = f"the last good checkpoint is {good[-1]}" if good else "no checkpoint had been written before"
    remove = "".join(f"Remove {path}. " for step, path in found if step >= steps)
    return f"{where}. {remove}Lower optimizer.lr (now {trainer.recipe.optimizer.lr}) and go on with --resume"


def save_after(trainer: Trainer, error: BaseException) -> None:
    """Save before an error ends the run, unless the weights may be between two steps or differ, or writing has failed.

    When a run is stopped, all processes get here, and none leaves before the run is saved, because launchers end the
    others when one process has ended. After an error, other processes may be gone; the first process then saves alone
    if it has everything, and shards are lost.
    """
    if isinstance(error, NonFiniteLogits) and trainer.progress.steps:
        raise NonFiniteLogits(f"{error} These weights were not saved; {last_good(trainer)}.") from error
    between_steps = trainer.progress.is_between_steps(trainer.versions, refused=isinstance(error, SparseRLError))
    unexpected = isinstance(error, RuntimeError) and not is_out_of_memory(error)
    if not trainer.progress.steps or between_steps or unexpected or isinstance(error, (CannotWrite, Disagreement)):
        return
    if isinstance(error, KeyboardInterrupt):
        with uninterrupted():  # even by a second Ctrl-C
            trainer.world.stop = False
            if trainer.learner.sharded is not None:
                end_pool(trainer.pool)  # otherwise shards would wait for everything that is sampled ahead
                trainer.source.close()
            save(trainer)
    elif trainer.learner.sharded is None:
        save(trainer, World() if trainer.world.first else World(trainer.world.rank))


def out_of_memory(recipe: Recipe, error: Exception) -> OutOfMemory:
    """The error to raise if memory ran out while learning; the engine explains its own errors."""
    return OutOfMemory(
        f"out of memory while learning ({first_line(error)}); lower learn.micro_batch_tokens (now "
        f"{recipe.micro_batch_tokens}, at least one trajectory) or rollout.rows (now {recipe.rollout.rows}), or set "
        "model.gradient_checkpointing; `sparse-rl plan --recipe` says what each takes."
    )


def resume(trainer: Trainer) -> None:
    """Go back to the newest checkpoint, or to the start if there is none, and forget what was written after it."""
    world, learner = trainer.world, trainer.learner
    where = trainer.folder / "checkpoints"
    saved = world.run_on_first(lambda: {step: path.name for step, path in cleaned_checkpoints(where)})
    if saved:
        newest = where / saved[max(saved)]
        state = load_state(newest, {"learner": learner.state_dict()})
        with restoring(newest):
            learner.load_state_dict(state["learner"])
            learner.skipped %= trainer.recipe.run.max_skipped  # a run that was stopped for skipping gets another chance
            trainer.sampler.budget.load_state_dict(state.get("budget"))
            trainer.scorer.load_state_dict(state.get("scorer"))
            trainer.publish_weights()
            trainer.students.load_state_dict(state.get("students", {}))
            trainer.sampler.lengths.load_state_dict(state.get("lengths"))
            trainer.progress.resume(state["step"], trainer.versions)
    progress = trainer.progress
    lines = world.run_on_first(lambda: forget_what_came_after(progress.steps, trainer.folder, trainer.log))
    progress.evaluated = max((line["step"] for line in lines), default=-1)
    progress.highest = best_of(lines)
    progress.best = best_of(line for line in lines if line["step"] in saved)  # earlier versions did not save it
    link_best(trainer)


def forget_what_came_after(step: int, folder: Path, log: Log) -> list[dict]:
    """Remove what a run wrote after a step; returns the remaining evaluations."""
    log.cut(step)
    for samples in (folder / "samples").glob("step-*"):
        number = samples.name.removeprefix("step-")
        if number.isdecimal() and int(number) > step:
            remove(samples)
    return [line for line in read_lines(log.files["metrics"]) if "eval/dense/accuracy" in line]
