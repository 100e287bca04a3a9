"""Runs that go on: beyond their end, from their last checkpoint, with keys that may change."""

import shutil

import pytest

from sparse_rl.distributed.world import PeerFailed
from sparse_rl.errors import SparseRLError
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.train.loop import Trainer
from sparse_rl.train.run import train
from sparse_rl.train.saving import resume
from tests.helpers.runs import recipe


def test_a_run_can_go_on_beyond_its_end(finished, tmp_path):
    """Four steps, then two more: the same as six."""
    folder = tmp_path / "run"
    train(recipe(run={"steps": 4}, eval={"every": 0}), folder, show=False)
    train(recipe(run={"steps": 6}, eval={"every": 0}), folder, resume=True, show=False)
    expected = [line for line in read_lines(finished / "metrics.jsonl") if "reward/mean" in line]
    assert read_lines(folder / "metrics.jsonl") == expected
    before = (folder / "metrics.jsonl").read_bytes()
    train(recipe(run={"steps": 6}, eval={"every": 0}), folder, resume=True, show=False)  # nothing left to do
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_prompts_of_many_lengths_resume_the_same(tmp_path):
    """Nothing in the metrics may depend on what this process happened to see before."""
    settings = {"task": {"name": "linsys"}, "rollout": {"budget": 60, "max_new_tokens": 16}, "eval": {"every": 2}}
    train(recipe(**settings, run={"steps": 4}), tmp_path / "whole", show=False)
    train(recipe(**settings, run={"steps": 2}), tmp_path / "parts", show=False)
    train(recipe(**settings, run={"steps": 4}), tmp_path / "parts", resume=True, show=False)
    assert (tmp_path / "parts" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_resuming_forgets_what_came_after_the_checkpoint(tmp_path):
    train(recipe(run={"steps": 4}, eval={"every": 4}), tmp_path / "run", show=False)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    (tmp_path / "run" / "checkpoints" / "step-best").mkdir()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # what a crash leaves
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 4
    trainer = Trainer(recipe(run={"steps": 4}, eval={"every": 4}), tmp_path / "run", show=False)
    resume(trainer)
    assert trainer.steps_done == 2 and read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 2
    assert [p.name for p in (tmp_path / "run" / "samples").iterdir()] == ["step-000001"]
    assert not (tmp_path / "run" / "checkpoints" / "best").is_symlink()


def test_remedies_can_be_applied_on_resume(tmp_path, capsys):
    train(recipe(run={"steps": 2}), tmp_path / "run", show=False)
    train(
        recipe(run={"steps": 3}, optimizer={"lr": 1e-5}, rollout={"rows": 4}), tmp_path / "run", resume=True, show=False
    )
    told = capsys.readouterr().err
    assert (
        "from step 2 on, optimizer.lr is 1e-05 instead of 0.0001" in " ".join(told.split())
        and "rollout.rows is 4" in told
    )
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-2]["update/lr"] == pytest.approx(1e-5)


def test_a_process_that_is_lost_before_samples_are_written_loses_none(tmp_path, monkeypatch):
    """The step whose samples could not be gathered is not saved, so it is done again."""
    settings = recipe(run={"steps": 4, "checkpoint_every": 1}, eval={"every": 2})
    train(settings, tmp_path / "whole", show=False)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.yaml").write_text(settings.to_yaml())
    trainer, calls = Trainer(settings, tmp_path / "run", show=False), []

    def lost(value):
        calls.append(value)
        if len(calls) == 2:
            raise PeerFailed("gone")
        return [value]

    monkeypatch.setattr(trainer.world, "gather", lost)
    with pytest.raises(PeerFailed, match="gone"):
        trainer.run()
    assert find_checkpoints(tmp_path / "run" / "checkpoints")[-1][0] == 1
    train(settings, tmp_path / "run", resume=True, show=False)
    for file in sorted((tmp_path / "whole" / "samples").rglob("*.*")):
        assert (tmp_path / "run" / file.relative_to(tmp_path / "whole")).read_bytes() == file.read_bytes()


def test_a_run_is_not_made_shorter_than_it_is(tmp_path, capsys):
    """Its recipe.yaml, which cards and plans read, must not name fewer steps than the run has."""
    short = {"eval": {"every": 0}, "rollout": {"max_new_tokens": 8}}
    train(recipe(run={"steps": 2}, **short), tmp_path / "run", show=False)
    before = (tmp_path / "run" / "recipe.yaml").read_bytes()
    with pytest.raises(SparseRLError, match=r"run.steps is 1, but .* has 2 steps already"):
        train(recipe(run={"steps": 1}, **short), tmp_path / "run", resume=True, show=False)
    assert (tmp_path / "run" / "recipe.yaml").read_bytes() == before
    capsys.readouterr()
    train(recipe(run={"steps": 2}, **short), tmp_path / "run", resume=True, show=False)
    assert "has all of its 2 steps" in capsys.readouterr().err
