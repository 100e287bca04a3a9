"""The best checkpoint is kept beside the newest, however a run is ended; a run that falls says so."""

import random
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.models import find_model, read_record
from sparse_rl.train import loop
from sparse_rl.train.best import Measured, best_of, has_fallen, measured
from sparse_rl.train.checkpoint import keep_best
from sparse_rl.train.loop import Trainer
from sparse_rl.train.run import train
from sparse_rl.train.saving import resume
from tests.helpers.runs import recipe

RISE_AND_FALL = [0.2, 0.3, 0.9, 0.1, 0.9, 0.0]  # held-out accuracy of steps 0, 1, ...


def planted(monkeypatch, accuracies=RISE_AND_FALL, die=None):
    """A run whose evaluations find these accuracies; it is killed after the `die`-th line of one."""
    plain, write, seen = loop.described, loop.Log.write, []

    def described(*args):
        return plain(*args) | {"accuracy": accuracies[current[0].steps_done]}

    evaluate, current = Trainer.evaluate, []

    def known(self):
        current[:] = [self]
        evaluate(self)

    def written(self, step, metrics, timing):
        write(self, step, metrics, timing)
        seen.extend([step] if "eval/dense/accuracy" in metrics else [])
        if die is not None and seen and seen[-1] == die:
            raise MemoryError("killed")  # nothing of ours catches it, as nothing catches SIGKILL

    monkeypatch.setattr(loop, "described", described)
    monkeypatch.setattr(Trainer, "evaluate", known)
    monkeypatch.setattr(loop.Log, "write", written)


RUN = {
    "run": {"steps": 5, "checkpoint_every": 2, "keep": 1, "diagnose": 0, "samples": 0},
    "eval": {"every": 1},
    "rollout": {"prompts": 2, "group_size": 2, "max_new_tokens": 6},
}


def kept(folder) -> tuple[list[int], str]:
    return [step for step, _ in find_checkpoints(folder / "checkpoints")], str((folder / "checkpoints/best").readlink())


def test_the_best_is_kept_beside_the_newest(tmp_path, monkeypatch, capsys):
    planted(monkeypatch)
    trainer = train(recipe(**RUN), tmp_path / "run", show=False)
    assert kept(tmp_path / "run") == ([2, 5], "step-000002")  # of two equal ones the first
    assert trainer.progress.best == measured(read_lines(tmp_path / "run/metrics.jsonl")[4])
    best = find_model(str(tmp_path / "run/checkpoints/best"))
    assert best.endswith("step-000002") and read_record(best).step == 2
    assert find_model(str(tmp_path / "run")).endswith("step-000005")


@pytest.mark.parametrize("die", [1, 2])
def test_a_killed_run_keeps_the_same_best(tmp_path, monkeypatch, die):
    """Killed when an evaluation was written down, and its checkpoint was not linked or not even there."""
    with monkeypatch.context() as patch:
        planted(patch, die=die)
        with pytest.raises(MemoryError):
            train(recipe(**RUN), tmp_path / "run", show=False)
    planted(monkeypatch)
    train(recipe(**RUN), tmp_path / "run", resume=True, show=False)
    assert kept(tmp_path / "run") == ([2, 5], "step-000002")
    monkeypatch.undo()
    planted(monkeypatch)
    train(recipe(**RUN), tmp_path / "whole", show=False)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    for file in ("config.json", "model.safetensors"):
        one, other = (tmp_path / name / "checkpoints/best" / file for name in ("run", "whole"))
        assert one.read_bytes() == other.read_bytes()


def test_a_resumed_run_knows_its_best(tmp_path, monkeypatch):
    planted(monkeypatch)
    train(recipe(**{**RUN, "run": {**RUN["run"], "steps": 3}}), tmp_path / "run", show=False)
    (tmp_path / "run/checkpoints/best").unlink()  # as if killed before it was made
    trainer = Trainer(recipe(**RUN), tmp_path / "run", show=False)
    resume(trainer)
    assert trainer.progress.best.step == 2 and kept(tmp_path / "run") == ([2, 3], "step-000002")
    shutil.rmtree(tmp_path / "run/checkpoints/step-000002")  # a run of an earlier version has lost it
    resume(trainer)
    assert trainer.progress.best.step == 3 and trainer.progress.highest.step == 2


def test_a_run_that_falls_says_so_once(tmp_path, monkeypatch, capsys):
    planted(monkeypatch, [0.5, 0.8, 0.1, 0.2, 0.8, 0.1])
    train(recipe(**{**RUN, "eval": {"every": 1, "prompts": 24}}), tmp_path / "run", show=False)
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("accuracy on held-out prompts fell") == 2  # it recovered in between
    assert "fell to 10.0% at step 2, from 80.0% at step 1 (24 prompts;" in told
    assert "checkpoints/best holds that step" in told and "lower optimizer.lr" in told


def test_the_start_is_no_checkpoint_but_a_fall_from_it_is_said(tmp_path, monkeypatch, capsys):
    planted(monkeypatch, [0.9, 0.1])
    train(recipe(**{**RUN, "run": {**RUN["run"], "steps": 1}, "eval": {"prompts": 24}}), tmp_path / "run", show=False)
    assert kept(tmp_path / "run") == ([1], "step-000001")
    told = " ".join(capsys.readouterr().err.split())
    assert "fell to 10.0% at step 1, from 90.0% at step 0" in told and "checkpoints/best" not in told


def line(step, accuracy, reward=0.0, cache="sparse"):
    return {"step": step, f"eval/{cache}/accuracy": accuracy, f"eval/{cache}/reward": reward}


def test_the_best_is_that_of_the_cache_the_run_is_for():
    both = line(1, 0.9, cache="dense") | line(1, 0.2)
    assert measured(both) == Measured(1, 0.2, 0.0) and measured(line(1, 0.9, 0.9, "dense")) == Measured(1, 0.9, 0.9)
    assert measured({"step": 3, "reward/mean": 1.0}) is None and measured(line(1, None)) is None
    assert best_of([line(1, 0.5), line(2, 0.5, 0.6), line(3, 0.5, 0.6), {"step": 4}]).step == 2
    assert best_of([]) is None


@given(st.integers(8, 400), st.floats(0.02, 0.98), st.randoms(use_true_random=False))
def test_equal_models_seldom_seem_to_fall(prompts, share, draw):
    assert not has_fallen(Measured(2, share, 0), Measured(1, share, 0), prompts)
    assert not has_fallen(Measured(2, 1.0, 0), Measured(1, share, 0), prompts)
    assert has_fallen(Measured(2, 0.0, 0), Measured(1, 1.0, 0), prompts)


def test_chance_alone_is_called_a_fall_about_once_in_two_hundred():
    draw, n, share = random.Random(0), 64, 0.5

    def sample() -> Measured:
        return Measured(0, sum(draw.random() < share for _ in range(n)) / n, 0)

    assert sum(has_fallen(sample(), sample(), n) for _ in range(4000)) / 4000 < 0.01


def test_pruning_keeps_the_best_and_leaves_no_other_link(tmp_path):
    for step in (1, 2, 3, 4):
        (tmp_path / f"step-{step:06d}").mkdir()
        (tmp_path / f"step-{step:06d}" / "training.pt").touch()
    (tmp_path / ".best.link").symlink_to("step-000001")  # what a kill may leave
    keep_best(tmp_path, 2, 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "step-000002", "step-000004"]
    keep_best(tmp_path, None, 1)
    assert [step for step, _ in find_checkpoints(tmp_path)] == [4]
