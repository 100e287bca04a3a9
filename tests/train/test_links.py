"""A run folder may come from someone else: its links, its odd names and its odd contents harm no file of the user."""

import json
import os

import pytest
import torch

from sparse_rl.errors import CannotWrite, SparseRLError
from sparse_rl.files import append_line, read_lines, write_text
from sparse_rl.learn.optimizer import MasterAdamW, OptimizerSettings
from sparse_rl.train.best import measured
from sparse_rl.train.checkpoint import cleaned_checkpoints, keep_best, restoring
from sparse_rl.train.log import Log
from sparse_rl.train.run import train
from sparse_rl.train.saving import forget_what_came_after
from tests.helpers.runs import recipe, run, write_recipe


@pytest.fixture
def victim(tmp_path):
    """A folder of the user that looks like a part of a run: what would be written, cut and removed."""
    folder = tmp_path / "victim"
    (folder / "step-000999").mkdir(parents=True)
    (folder / "step-000999" / "thesis.txt").write_text("years of work")
    (folder / "thesis.txt").write_text("years of work")
    return folder


def unharmed(victim) -> bool:
    texts = [(victim / place / "thesis.txt").read_text() for place in ("", "step-000999")]
    return texts == ["years of work"] * 2 and len(list(victim.rglob("*"))) == 3


@pytest.mark.parametrize("command", ["train", "warmup"])
@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "timing.jsonl", ".lock", "samples", "checkpoints"])
def test_a_folder_with_a_link_out_of_it_is_not_resumed(tmp_path, victim, name, command):
    folder = tmp_path / "run"
    folder.mkdir()
    write_recipe(folder).rename(folder / "recipe.yaml")
    if name == "recipe.yaml":
        (folder / name).rename(tmp_path / name)
        (folder / name).symlink_to(tmp_path / name)
    else:
        (folder / name).symlink_to(victim if name in ("samples", "checkpoints") else victim / "thesis.txt")
    done = run(command, folder, "--resume")
    assert done.returncode == 1 and f"{folder / name} is a link to a place outside {folder}" in done.stderr, done.stderr
    assert unharmed(victim)


def test_what_a_pool_writes_is_not_written_through_a_link(tmp_path, victim):
    folder = tmp_path / "run"
    folder.mkdir()
    write_recipe(folder).rename(folder / "recipe.yaml")
    (folder / "pool.json").symlink_to(victim / "thesis.txt")
    done = run("train", folder, "--resume")
    assert done.returncode == 1 and f"{folder / 'pool.json'} is a link to a place outside {folder}" in done.stderr
    assert unharmed(victim)


def test_a_new_run_does_not_write_through_a_link(tmp_path, victim):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "samples").symlink_to(victim)
    with pytest.raises(SparseRLError, match="samples is a link to a place outside"):
        train(recipe(), tmp_path / "run", show=False)
    assert unharmed(victim)


def test_a_file_is_not_written_through_a_link(tmp_path, victim):
    (tmp_path / ".metrics.jsonl.partial").symlink_to(victim / "thesis.txt")
    write_text(tmp_path / "metrics.jsonl", "new")
    assert (tmp_path / "metrics.jsonl").read_text() == "new" and not (tmp_path / "metrics.jsonl").is_symlink()
    (tmp_path / "calls.jsonl").symlink_to(victim / "thesis.txt")
    with pytest.raises(CannotWrite, match="it is a link"):
        append_line(tmp_path / "calls.jsonl", {"a": 1})
    assert unharmed(victim)


def test_links_among_checkpoints_and_samples_go_and_what_they_link_to_stays(tmp_path, victim):
    """Also: names that only look like numbers, and files where folders are expected."""
    checkpoints, samples = tmp_path / "run" / "checkpoints", tmp_path / "run" / "samples"
    checkpoints.mkdir(parents=True)
    samples.mkdir()
    for name in (".step-000009.partial", ".step-000008.removed", "step-000007", ".step-000007.replaced"):
        (checkpoints / name).symlink_to(victim / "step-000999")
    (samples / "step-000999").symlink_to(victim / "step-000999")
    (samples / "step-000998").write_text("a file")
    (samples / "step-\u00b2").mkdir()
    assert cleaned_checkpoints(checkpoints) == []
    assert forget_what_came_after(0, tmp_path / "run", Log(tmp_path / "run", [], "", {})) == []
    assert [p.name for p in checkpoints.iterdir()] == ["step-000007"]
    assert [p.name for p in samples.iterdir()] == ["step-\u00b2"] and unharmed(victim)


def test_a_checkpoint_that_is_a_link_is_rotated_as_a_link(tmp_path):
    for step in (1, 2):
        (tmp_path / "other" / f"step-00000{step}").mkdir(parents=True)
        (tmp_path / "other" / f"step-00000{step}" / "training.pt").write_text("state")
    (tmp_path / "run").mkdir()
    for path in (tmp_path / "other").iterdir():
        (tmp_path / "run" / path.name).symlink_to(path)
    keep_best(tmp_path / "run", None, keep=1)
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["step-000002"]
    assert len(list((tmp_path / "other").rglob("training.pt"))) == 2


def test_folders_of_the_user_beside_checkpoints_stay(tmp_path):
    mine = ["step-000002-export", "step-000003", "step-notes", ".step-mine.partial", ".step-000001.backup"]
    for name in mine:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text("weights")  # no training.pt
    (tmp_path / ".step-000004.partial").mkdir()
    assert cleaned_checkpoints(tmp_path) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(mine)


@pytest.mark.parametrize("kind", ["device", "pipe"])
def test_what_is_not_a_file_is_not_read(tmp_path, kind):
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/zero") if kind == "device" else os.mkfifo(path)
    with pytest.raises(SparseRLError, match="is not a file"):
        read_lines(path)


@pytest.mark.parametrize("value", ["b", {}, [1]])
def test_a_metric_that_is_not_a_number_is_one_sentence(tmp_path, value):
    line = {"step": 1, "eval/sparse/accuracy": value, "eval/sparse/reward": 0.5, "eval/dense/accuracy": 0.5}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(SparseRLError, match=r"'eval/sparse/accuracy': .* is not a number"):
        Log(tmp_path, [], "", {}).cut(9)
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == line


@pytest.mark.parametrize("value", [-0.1, 1.5, float("inf"), 10**400])
def test_an_accuracy_that_is_no_share_is_one_sentence(value):
    with pytest.raises(SparseRLError, match="it must be from 0 to 1"):
        measured({"step": 1, "eval/dense/accuracy": value, "eval/dense/reward": 0.5})


@pytest.mark.parametrize("steps", [-1.0, float("nan"), float("inf")])
def test_an_optimizer_that_made_less_than_no_steps_is_damaged(tmp_path, steps):
    optimizer = MasterAdamW(torch.nn.Linear(2, 2).parameters(), OptimizerSettings())
    state = optimizer.state_dict()
    state["step"][0].fill_(steps)
    with pytest.raises(SparseRLError, match=r"training.pt is damaged \(the optimizer has made"), restoring(tmp_path):
        optimizer.load_state_dict(state)
