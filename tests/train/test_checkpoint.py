"""Files that cannot be written, and checkpoints that are whole or absent."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparse_rl.errors import SparseRLError
from sparse_rl.files import append_line, find_checkpoints, read_lines
from sparse_rl.models import load_model
from sparse_rl.train.checkpoint import cleaned_checkpoints, save_checkpoint
from sparse_rl.train.loop import Trainer
from sparse_rl.train.run import train
from tests.helpers.runs import recipe, weights


def test_other_errors_are_not_called_a_full_disk(tmp_path):
    from sparse_rl.files import writing

    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(""), RuntimeError("CUDA error")):
        with pytest.raises(type(error)) as caught, writing(tmp_path / "x"):
            raise error
        assert caught.value is error
    with pytest.raises(SparseRLError, match="could not be written \\(OSError;"), writing(tmp_path / "x"):
        raise OSError


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from sparse_rl.train import checkpoint
write = checkpoint.save_model
def limited(*args):
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    write(*args)
checkpoint.save_model = limited
from sparse_rl.cli import main
main()
"""


def test_a_checkpoint_that_does_not_fit_leaves_no_trace(finished, tmp_path):
    """From the second checkpoint on files may grow to 200 kB only: the run stops with a sentence, the first one is
    whole.
    """
    folder = tmp_path / "run"
    train(recipe(run={"steps": 2}), folder, show=False)
    arguments = ["train", str(folder), "--resume", "--run.steps", "6"]
    done = subprocess.run([sys.executable, "-c", FULL, *arguments], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "step-000004 could not be written" in done.stderr and "continues with --resume" in done.stderr
    assert [step for step, _ in find_checkpoints(folder / "checkpoints")] == [2]
    assert not list((folder / "checkpoints").glob(".*"))
    train(recipe(run={"steps": 6}), folder, resume=True, show=False)
    rewards = [
        [line["reward/mean"] for line in read_lines(f / "metrics.jsonl") if "reward/mean" in line]
        for f in (folder, finished)
    ]
    assert rewards[0] == rewards[1]


def test_a_full_disk_stops_the_log_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("sparse_rl.train.log.append_line", lambda _, values: append_line(Path("/dev/full"), values))
    with pytest.raises(SparseRLError, match=r"/dev/full could not be written \(the disk is full"):
        train(recipe(), tmp_path / "run", show=False)


def test_samples_that_cannot_be_written_stop_the_run_with_a_sentence(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "samples").write_text("a file where a folder should be")
    with pytest.raises(SparseRLError, match=r"step-000001.* could not be written"):
        train(recipe(), tmp_path / "run", show=False)


def test_a_disk_without_room_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 1000})())
    with pytest.raises(SparseRLError, match=r"a checkpoint takes 5 MiB, but .* has only 0 MiB free"):
        train(recipe(), tmp_path / "run", show=False)


def test_an_old_checkpoint_is_replaced_only_by_a_whole_one(tmp_path):
    model, tokenizer = load_model("tiny")
    save_checkpoint(tmp_path, 3, model, tokenizer, {"learner": 1}, keep=2)

    class Broken(torch.nn.Module):
        def save_pretrained(self, folder):
            (Path(folder) / "model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")

    with pytest.raises(SparseRLError, match="the disk is full"):
        save_checkpoint(tmp_path, 3, Broken(), tokenizer, {}, keep=2)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]
    weights(tmp_path / "step-000003")


def test_random_state_comes_back(tmp_path):
    from sparse_rl.train.checkpoint import load_state

    model, tokenizer = load_model("tiny")
    torch.manual_seed(5)
    path = save_checkpoint(tmp_path, 1, model, tokenizer, {}, keep=1)
    drawn = torch.rand(3)
    load_state(path)
    assert torch.rand(3).equal(drawn)
    (path / "training.pt").write_bytes((path / "training.pt").read_bytes()[:100])
    with pytest.raises(SparseRLError, match=r"training.pt is damaged .* remove"):
        load_state(path)


@pytest.mark.parametrize("place", ["removed", "replaced"])
def test_a_kill_while_a_checkpoint_is_removed_leaves_no_half(tmp_path, monkeypatch, place):
    """The folder loses its name first, so what is found under the name of a checkpoint is whole."""
    model, tokenizer = load_model("tiny")
    save_checkpoint(tmp_path, 1, model, tokenizer, {"learner": 1}, keep=1)

    def killed(folder, **_):
        for file in sorted(Path(folder).glob("*"))[:3]:
            file.unlink()
        raise SystemExit("killed") if str(folder).endswith(place) else FileNotFoundError

    with monkeypatch.context() as patch, pytest.raises((SystemExit, FileNotFoundError)):
        patch.setattr("sparse_rl.train.checkpoint.shutil.rmtree", killed)
        save_checkpoint(tmp_path, 1 if place == "replaced" else 2, model, tokenizer, {"learner": 2}, keep=1)
    for _, path in find_checkpoints(tmp_path):
        weights(path)
    cleaned_checkpoints(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [p.name for _, p in find_checkpoints(tmp_path)] != []


def test_what_a_kill_left_is_cleaned(tmp_path):
    model, tokenizer = load_model("tiny")
    for step in (3, 4, 5):
        save_checkpoint(tmp_path, step, model, tokenizer, {"learner": 1}, keep=9)
    (tmp_path / "step-000003" / "training.pt").unlink()  # by its user, who keeps the model
    (tmp_path / "step-000004").rename(tmp_path / ".step-000004.replaced")  # killed before the new one took its place
    (tmp_path / ".step-000006.partial").mkdir()
    (tmp_path / ".step-000001.removed" / "students").mkdir(parents=True)
    (tmp_path / "step-notes").write_text("a user's own file stays")
    cleaned_checkpoints(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [*("step-000003", "step-000004", "step-000005", "step-notes")]
    assert [step for step, _ in find_checkpoints(tmp_path)] == [4, 5]
    weights(tmp_path / "step-000004")


def nan_weight(trainer):
    trainer.learner.optimizer.masters[0].data[:] = torch.nan


def infinite_moment(trainer):
    next(iter(trainer.learner.optimizer.adamw.state.values()))["exp_avg_sq"][:] = torch.inf


@pytest.mark.parametrize(
    "damage, message",
    [
        (nan_weight, "the logits of row .* are not finite at step 0 .* These weights were not saved; "),
        (infinite_moment, "the weights or their moments are not finite after step 4, so they were not saved; "),
    ],
)
def test_weights_that_are_ruined_are_not_saved_over_good_ones(tmp_path, monkeypatch, damage, message):
    folder, finish = tmp_path / "run", Trainer.finish_update

    def ruin(self, clock):
        if self.progress.steps == 2:
            damage(self)
        finish(self, clock)

    settings = recipe(eval={"every": 0}, run={"steps": 4, "checkpoint_every": 2, "samples": 0})
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "finish_update", ruin)
        with pytest.raises(SparseRLError, match=message + r"the last good .*step-000002\. Low"):
            train(settings, folder, show=False)
    assert [step for step, _ in find_checkpoints(folder / "checkpoints")] == [2]
    train(settings, folder, resume=True, show=False)
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == [1, 2, 3, 4]
