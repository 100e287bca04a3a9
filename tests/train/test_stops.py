"""Runs that are killed, interrupted or out of memory: nothing is lost, and a resumed run writes the same metrics."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import sparse_rl.train.complete
from sparse_rl.errors import SparseRLError
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.optimizer import MasterAdamW
from sparse_rl.train.run import train
from tests.helpers.runs import PATIENCE, command_that_is_stopped, recipe, run, weights, write_recipe


def run_until_killed(folder: Path, arguments: list, seconds: float) -> None:
    """Train until metrics.jsonl has grown, then for that many seconds, then kill."""
    metrics = folder / "metrics.jsonl"
    lines = 1 + (metrics.read_bytes().count(b"\n") if metrics.exists() else 0)
    stopped = command_that_is_stopped(signal.SIGKILL, metrics, lines, "train", *arguments, seconds=seconds)
    done = subprocess.run(stopped, capture_output=True, timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()  # and not at the end of the run


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_at_random_moments_it_ends_the_same(finished, tmp_path, kills):
    """SIGKILL at any moment: the metrics and the weights are those of the run that was left alone, bit for bit."""
    draw, folder = random.Random(0), tmp_path / "run"
    given, resume = write_recipe(tmp_path, run={"steps": 6}), []
    for _ in range(kills):
        run_until_killed(folder, [given, "--out", folder, *resume], draw.random() / 4)
        resume = ["--resume"] if (folder / "recipe.yaml").exists() else []
        for _, path in find_checkpoints(folder / "checkpoints"):
            weights(path)  # never half written
    train(recipe(run={"steps": 6}), folder, resume=bool(resume), show=False)
    assert (folder / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    theirs = weights(finished / "checkpoints" / "step-000006")
    assert all(
        torch.equal(value, theirs[name]) for name, value in weights(folder / "checkpoints" / "step-000006").items()
    )
    assert not list((folder / "checkpoints").glob(".*")) and [p.name for p in folder.glob(".*")] == [".lock"]


def test_an_interrupt_saves_and_stops(finished, tmp_path, monkeypatch):
    """Ctrl-C while step 4 is sampled: the three steps before it are saved, and the sentence says how to go on."""
    plain, calls = sparse_rl.train.complete.score, []

    def interrupted(*args, **options):
        calls.append(1)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGINT)
        return plain(*args, **options)

    folder, given = tmp_path / "run", write_recipe(tmp_path, run={"steps": 6, "checkpoint_every": 100})
    with monkeypatch.context() as patch:
        patch.setattr(sparse_rl.train.complete, "score", interrupted)
        done = run("train", given, "--out", folder)
    assert done.returncode == 130, done.stderr
    assert f"continue with: sparse-rl train {folder} --resume" in done.stderr and "Traceback" not in done.stderr
    assert [step for step, _ in find_checkpoints(folder / "checkpoints")] == [3]
    train(recipe(run={"steps": 6}), folder, resume=True, show=False)
    assert (folder / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_update_that_has_begun_is_finished_first(finished, tmp_path, monkeypatch, number):
    """The signal comes between the two optimizer steps of step 3: it is finished and saved, then the run stops."""
    step, calls = Learner.step, []

    def interrupted(self, batch, check):
        calls.append(1)
        if len(calls) == 6:
            signal.raise_signal(number)
        return step(self, batch, check)

    monkeypatch.setattr(Learner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(recipe(run={"steps": 6}), tmp_path / "run", show=False)
    assert len(calls) == 6 and [step for step, _ in find_checkpoints(tmp_path / "run" / "checkpoints")] == [2, 3]
    train(recipe(run={"steps": 6}), tmp_path / "run", resume=True, show=False)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("where", ["between the updates of a step", "inside its first update"])
def test_memory_that_runs_out_while_learning(finished, tmp_path, monkeypatch, where):
    """The weights are then between two steps: they must not be saved as either, and the run starts over to the same
    end.
    """
    patched, name, call = (Learner, "step", 6) if "between" in where else (MasterAdamW, "_round_masters", 5)
    plain, calls = getattr(patched, name), []

    def greedy(self, *args):
        calls.append(1)
        result = plain(self, *args) if len(calls) != call or name == "_round_masters" else None
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(patched, name, greedy)
        with pytest.raises(
            SparseRLError, match=r"while learning \(CUDA out of memory.* lower learn.micro_batch_tokens \(now 400"
        ):
            train(recipe(run={"steps": 6, "checkpoint_every": 100}), tmp_path / "run", show=False)
    done = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "update/empty/count" in line]
    before = sum(2 - line["update/empty/count"] for line in done) if name == "_round_masters" else 2 * len(done)
    assert len(calls) - before == (1 if name == "_round_masters" else 2)  # it was the first, or the second, of its step
    saved = [step for step, _ in find_checkpoints(tmp_path / "run" / "checkpoints")]
    assert saved == [step for step in (3,) if step <= len(done)]  # the best so far, from before the interrupted step
    train(recipe(run={"steps": 6}), tmp_path / "run", resume=True, show=False)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_memory_that_runs_out_before_an_update_keeps_the_steps_done(tmp_path, monkeypatch):
    calls, plain = [], sparse_rl.train.complete.score

    def greedy(*args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return plain(*args, **options)

    monkeypatch.setattr(sparse_rl.train.complete, "score", greedy)
    with pytest.raises(SparseRLError, match="out of memory while learning"):
        train(recipe(run={"steps": 6, "checkpoint_every": 100}, eval={"every": 0}), tmp_path / "run", show=False)
    assert [step for step, _ in find_checkpoints(tmp_path / "run" / "checkpoints")] == [2]


def test_a_background_job_stops_on_sigterm(tmp_path):
    """A shell starts background jobs with Ctrl-C ignored."""
    folder, given = (
        tmp_path / "run",
        write_recipe(tmp_path, run={"steps": 200, "checkpoint_every": 200}, eval={"every": 0}),
    )
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from sparse_rl.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", ignoring, "train", str(given), "--out", str(folder)], stderr=subprocess.PIPE
    )
    while not read_lines(folder / "metrics.jsonl"):
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and find_checkpoints(folder / "checkpoints")
