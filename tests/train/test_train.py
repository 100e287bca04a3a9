"""Runs: killed, interrupted, out of disk, badly graded; nothing is lost, and a resumed run writes the very same metrics."""

import copy
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import sparse_rl.train.loop
import sparse_rl.train.worker
from sparse_rl.config import make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.learn.optimizer import MasterAdamW
from sparse_rl.models import load_model
from sparse_rl.records import read_trajectories
from sparse_rl.train.checkpoint import save_checkpoint
from sparse_rl.train.run import train
from tests.helpers.runs import BASE, command, recipe, weights, write_recipe


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An uninterrupted run of 8 steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(recipe(run={"steps": 8}), folder, show=False)
    return folder


def test_a_run_folder_holds_everything(finished):
    lines = read_lines(finished / "metrics.jsonl")
    assert [line["step"] for line in lines] == [
        0,
        1,
        2,
        3,
        3,
        4,
        5,
        6,
        6,
        7,
        8,
        8,
    ]  # evaluations at 0, 3, 6 and the end
    steps = [line for line in lines if "reward/mean" in line]
    always = ["gap/xi/p05", "gap/xi/min", "gap/ess/frac", "gap/alpha/p05", "gap/k3/mean", "reject/trajectories/frac", "update/clip/frac",
              "rollout/loops/frac", "rollout/truncated/frac", "rollout/length/mean", "cache/tokens_saved/frac",
              "advantage/groups_without_variance/frac", "update/skipped/count", "update/empty/count", "old/entropy/mean"]  # fmt: skip
    assert len(steps) == 8 and all(set(always) <= set(line) for line in steps)
    for line in (line for line in lines if "eval/dense/accuracy" in line):
        assert 0 <= line["eval/sparse/accuracy"] <= 1
    timing = read_lines(finished / "timing.jsonl")
    stages = [f"time/{s}" for s in ("rollout", "grade", "score", "diagnose", "update", "step")]
    assert all({*stages, "cache/bytes_saved/frac"} <= set(line) for line in timing if "time/step" in line)
    assert [step for step, _ in find_checkpoints(finished / "checkpoints")] == [6, 8]  # the newest two
    samples = [json.loads(line) for line in (finished / "samples" / "step-000003" / "trajectories.jsonl").open()]
    assert len(samples) == 2 and {
        "prompt",
        "text",
        "reward",
        "verdict",
        "advantage",
        "accepted",
        "old_logprobs",
    } <= set(samples[0])
    trajectories = list(read_trajectories(finished / "samples" / "step-000003"))
    assert len(trajectories) == 2
    for s, t in zip(samples, trajectories, strict=True):  # an entry for every token as fed
        assert {len(s[name]) for name in ("pieces", "rank", "weight", "clipped", "old_logprobs")} == {len(t.tokens)}
        assert "".join(s["pieces"][: t.num_prompt_tokens]) == s["prompt"] and "".join(s["pieces"]).startswith(
            s["prompt"] + s["text"]
        )
        xi = [math.exp(o - p) for o, p in zip(s["old_logprobs"], s["sampler_logprobs"])][t.num_prompt_tokens :]
        expected = [min(x, 2.0) if s["accepted"] else 0.0 for x in xi]  # sparse-rl
        assert s["weight"][t.num_prompt_tokens :] == pytest.approx(expected, rel=1e-4) and not any(
            s["weight"][: t.num_prompt_tokens]
        )
        assert min(s["rank"][t.num_prompt_tokens :]) == 1 and {*s["clipped"]} <= {True, False}
    first = [json.loads(line) for line in (finished / "samples" / "step-000001" / "trajectories.jsonl").open()]
    assert {s["prompt"] for s in first}.isdisjoint(s["prompt"] for s in samples)  # every step has prompts of its own
    updates = sum(2 - line["update/empty/count"] - line["update/skipped/count"] for line in steps[:2])
    assert updates > 0 and {s["version"] for s in samples} == {updates} and {s["version"] for s in first} == {0}
    model, tokenizer = load_model(str(finished / "checkpoints" / "step-000008"))
    assert tokenizer.encode("1+2=") and not model.training
    start = load_model("tiny-sums")[0].state_dict()
    assert all(not torch.equal(start[name], value) for name, value in model.state_dict().items() if value.dim() > 1)


@pytest.mark.parametrize("seed", range(1))
def test_killed_at_random_moments_it_ends_the_same(finished, tmp_path, seed):
    """SIGKILL, several times, whenever: the metrics stream and the weights are those of the run that was left alone, bit for bit."""
    draw, folder = random.Random(seed), tmp_path / "run"
    given = write_recipe(tmp_path, run={"steps": 8})
    killed, resume = 0, []
    for attempt in range(60):
        process = subprocess.Popen(command("train", given, "--out", folder, *resume), stderr=subprocess.PIPE)
        if attempt < 3:
            before = (folder / "metrics.jsonl").stat().st_size if (folder / "metrics.jsonl").exists() else 0
            deadline = time.monotonic() + 60
            while (
                process.poll() is None and time.monotonic() < deadline
            ):  # until it has got somewhere, then a little longer
                grown = (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size > before
                if grown:
                    time.sleep(draw.random())
                    break
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        error = process.communicate(timeout=120)[1].decode()
        killed += process.returncode == -signal.SIGKILL
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, error
        resume = ["--resume"] if (folder / "recipe.yaml").exists() else []
        for _, path in find_checkpoints(folder / "checkpoints"):
            weights(path)  # never half written
    assert killed >= 2
    assert (folder / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()
    theirs = weights(finished / "checkpoints" / "step-000008")
    assert all(
        torch.equal(value, theirs[name]) for name, value in weights(folder / "checkpoints" / "step-000008").items()
    )
    assert not list((folder / "checkpoints").glob(".*")) and [p.name for p in folder.glob(".*")] == [".lock"]


def test_an_interrupt_saves_and_stops(finished, tmp_path):
    folder, given = tmp_path / "run", write_recipe(tmp_path, run={"steps": 8, "checkpoint_every": 100})
    process = subprocess.Popen(command("train", given, "--out", folder), stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    while sum(1 for line in read_lines(folder / "metrics.jsonl") if "reward/mean" in line) < 3:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error.decode()
    assert f"go on with: sparse-rl train {folder} --resume" in error.decode() and "Traceback" not in error.decode()
    ((step, _),) = find_checkpoints(folder / "checkpoints")
    assert step >= 3
    assert (
        subprocess.run(
            command("train", folder, "--resume", "--run.checkpoint_every", 2), capture_output=True
        ).returncode
        == 0
    )
    assert (folder / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_update_that_has_begun_is_finished_first(finished, tmp_path, monkeypatch, how):
    """The signal comes between the two optimizer steps of step 3: that step is done and saved, and the run goes on from there."""
    step, calls = sparse_rl.train.loop.Learner.step, []

    def interrupted(self, batch):
        calls.append(1)
        if len(calls) == 6:
            signal.raise_signal(how)
        return step(self, batch)

    monkeypatch.setattr(sparse_rl.train.loop.Learner, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(recipe(run={"steps": 8}), tmp_path / "run", show=False)
    assert len(calls) == 6 and [step for step, _ in find_checkpoints(tmp_path / "run" / "checkpoints")] == [2, 3]
    train(recipe(run={"steps": 8}), tmp_path / "run", resume=True, show=False)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize("where", ["between the updates of a step", "inside its first update"])
def test_memory_that_runs_out_while_learning(finished, tmp_path, monkeypatch, where):
    """The weights are then between two steps: they must not be saved as either, and the run starts over to the same end."""
    owner, name, call = (
        (sparse_rl.train.loop.Learner, "step", 6) if "between" in where else (MasterAdamW, "_publish", 5)
    )
    plain, calls = getattr(owner, name), []

    def greedy(self, *args):
        calls.append(1)
        result = plain(self, *args) if len(calls) != call or name == "_publish" else None
        if len(calls) == call:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore")
        return result

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, greedy)
        with pytest.raises(
            SparseRLError, match=r"while learning \(CUDA out of memory.* lower learn.micro_batch_tokens \(now 400"
        ):
            train(recipe(run={"steps": 8, "checkpoint_every": 100}), tmp_path / "run", show=False)
    done = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "update/empty/count" in line]
    before = sum(2 - line["update/empty/count"] for line in done) if name == "_publish" else 2 * len(done)
    assert len(calls) - before == (1 if name == "_publish" else 2)  # it was the first, or the second, of its step
    assert find_checkpoints(tmp_path / "run" / "checkpoints") == []
    train(recipe(run={"steps": 8}), tmp_path / "run", resume=True, show=False)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (finished / "metrics.jsonl").read_bytes()


def test_memory_that_runs_out_before_an_update_keeps_the_steps_done(tmp_path, monkeypatch):
    calls, plain = [], sparse_rl.train.worker.score

    def greedy(*args):
        calls.append(1)
        if len(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return plain(*args)

    monkeypatch.setattr(sparse_rl.train.worker, "score", greedy)
    with pytest.raises(SparseRLError, match="out of memory while learning"):
        train(recipe(run={"steps": 8, "checkpoint_every": 100}, eval={"every": 0}), tmp_path / "run", show=False)
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
    process.communicate(timeout=60)
    assert process.returncode == 130 and find_checkpoints(folder / "checkpoints")


def test_other_errors_are_not_called_a_full_disk(tmp_path):
    from sparse_rl.files import writing

    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError(""), RuntimeError("CUDA error")):
        with pytest.raises(type(error)) as caught, writing(tmp_path / "x"):
            raise error
        assert caught.value is error
    with pytest.raises(SparseRLError, match="could not be written \\(OSError;"), writing(tmp_path / "x"):
        raise OSError


def test_a_run_can_go_on_beyond_its_end(finished, tmp_path):
    """Four steps, then four more: the same as eight."""
    folder = tmp_path / "run"
    train(recipe(run={"steps": 4}, eval={"every": 0}), folder, show=False)
    train(recipe(run={"steps": 8}, eval={"every": 0}), folder, resume=True, show=False)
    expected = [line for line in read_lines(finished / "metrics.jsonl") if "reward/mean" in line]
    assert read_lines(folder / "metrics.jsonl") == expected
    before = (folder / "metrics.jsonl").read_bytes()
    train(recipe(run={"steps": 8}, eval={"every": 0}), folder, resume=True, show=False)  # nothing left to do
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_folders_are_not_mixed_up(finished, tmp_path):
    with pytest.raises(SparseRLError, match="holds a run already; go on with --resume"):
        train(recipe(run={"steps": 8}), finished, show=False)
    with pytest.raises(SparseRLError, match=r"rollout.interval is 5 but .* says 4"):
        train(recipe(run={"steps": 8}, rollout={"interval": 5}), finished, resume=True, show=False)
    with pytest.raises(SparseRLError, match="there is no recipe"):
        train(recipe(), tmp_path / "none", resume=True, show=False)
    with pytest.raises(SparseRLError, match="no task 'smus'"):
        train(recipe(task={"name": "smus"}), tmp_path / "none", show=False)
    assert not (tmp_path / "none").exists()  # a recipe that cannot start leaves nothing behind


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from sparse_rl.train import checkpoint
write = checkpoint.save_model
def limited(*args):
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
    write(*args)
if sys.argv.pop(1) == "full":
    checkpoint.save_model = limited
from sparse_rl.cli import main
main()
"""


def test_a_checkpoint_that_does_not_fit_leaves_no_trace(finished, tmp_path):
    """Files may grow to 200 kB only, from the second checkpoint on: the run stops with a sentence, the first checkpoint is whole."""
    folder, given = tmp_path / "run", write_recipe(tmp_path, run={"steps": 8})
    first = subprocess.run(command("train", given, "--out", folder, "--run.steps", 2), capture_output=True, text=True)
    assert first.returncode == 0, first.stderr
    args = ["train", folder, "--resume", "--run.steps", "8"]
    done = subprocess.run([sys.executable, "-c", FULL, "full", *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "step-000004 could not be written" in done.stderr and "goes on with --resume" in done.stderr
    assert [step for step, _ in find_checkpoints(folder / "checkpoints")] == [2]
    assert not list((folder / "checkpoints").glob(".*"))
    again = subprocess.run([sys.executable, "-c", FULL, "room", *map(str, args)], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    rewards = [
        [line["reward/mean"] for line in read_lines(f / "metrics.jsonl") if "reward/mean" in line]
        for f in (folder, finished)
    ]
    assert rewards[0] == rewards[1]


def test_a_full_disk_stops_the_log_with_a_sentence(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "timing.jsonl").symlink_to("/dev/full")
    with pytest.raises(SparseRLError, match=r"timing.jsonl could not be written \(the disk is full"):
        train(recipe(), folder, show=False)


def test_samples_that_cannot_be_written_stop_the_run_with_a_sentence(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "samples").write_text("a file where a folder should be")
    with pytest.raises(SparseRLError, match="step-000001 could not be written"):
        train(recipe(), tmp_path / "run", show=False)


def test_a_disk_without_room_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("usage", (), {"free": 1000})())
    with pytest.raises(SparseRLError, match=r"a checkpoint takes 5 MiB, .* has 0 MiB free"):
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


GRADER = """
import os, time
def prompt(i):
    return f"{i % 9 + 1}+2=", i
def reward(answer, text):
    if answer % 4 == 1:
        raise RuntimeError("no idea")
    if answer % 4 == 2:
        time.sleep(60)
    if answer % 4 == 3:
        os._exit(3)
    return float(len(text) % 2)
"""


def test_graders_that_raise_hang_or_die_cost_their_completions_only(tmp_path, capsys):
    (tmp_path / "grader.py").write_text(GRADER)
    task = {"name": str(tmp_path / "grader.py"), "deadline": 0.3, "workers": 2}
    plain = {name: section for name, section in BASE.items() if name != "task"}
    settings = make_recipe({**plain, "task": task, "run": {"steps": 2, "checkpoint_every": 2}, "eval": {"every": 0}})
    train(settings, tmp_path / "run", show=False)
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert (
            line["grade/timeout/count"] == 4 and line["grade/error/count"] == 8
        )  # one prompt hangs, one raises, one kills its process
        assert line.get("grade/right/count", 0) + line.get("grade/wrong/count", 0) == 4
    assert "grading failed" in capsys.readouterr().err


def test_unreadable_rows_and_empty_labels_are_counted(tmp_path, capsys):
    rows = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(30)]
    rows[5]["label"] = ""
    rows[7] = rows[8]
    lines = [json.dumps(row) for row in rows]
    lines[9] = '{"prompt": "3+'
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    plain = {name: section for name, section in BASE.items() if name != "task"}
    task = {"name": "math", "files": str(tmp_path / "data.jsonl"), "holdout": 4}
    settings = make_recipe(
        {**plain, "task": task, "run": {"steps": 1, "checkpoint_every": 1}, "eval": {"every": 1, "prompts": 4}}
    )
    train(settings, tmp_path / "run", show=False)
    evaluated, learned, _ = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert (
        learned["data/skipped/count"] == 2
        and evaluated["eval/dense/accuracy"] == 0
        and evaluated["eval/dense/ungraded"] == 0
    )
    said = capsys.readouterr().err
    assert "2 rows were omitted" in said and "1 rows repeat an earlier prompt, and were kept" in said


def test_everything_rejected_goes_on_without_an_update(tmp_path):
    settings = recipe(learn={"correction": {"reject_below": 1e9}}, run={"steps": 2}, eval={"every": 0})
    train(settings, tmp_path / "run", show=False)
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["reject/trajectories/frac"] == 1 and line["update/empty/count"] == 2
    start, end = load_model("tiny-sums")[0].state_dict(), weights(tmp_path / "run" / "checkpoints" / "step-000002")
    assert all(torch.equal(value, end[name]) for name, value in start.items())


def test_groups_without_variance_are_counted(tmp_path):
    (tmp_path / "flat.py").write_text(
        "def prompt(i):\n    return f'{i % 9}+1=', 0\ndef reward(answer, text):\n    return 1.0\n"
    )
    plain = {name: section for name, section in BASE.items() if name != "task"}
    settings = make_recipe(
        {**plain, "task": {"name": str(tmp_path / "flat.py")}, "run": {"steps": 1}, "eval": {"every": 0}}
    )
    train(settings, tmp_path / "run", show=False)
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["advantage/groups_without_variance/frac"] == 1 and line["update/empty/count"] == 2


def test_a_loss_that_is_never_finite_stops_the_run_and_keeps_its_weights(tmp_path, monkeypatch):
    def broken(*args):
        batches = original(*args)
        for batch in batches:
            batch.weights.fill_(float("nan"))
        return batches

    original = sparse_rl.train.loop.make_batches
    monkeypatch.setattr(sparse_rl.train.loop, "make_batches", broken)
    with pytest.raises(SparseRLError, match=r"4 optimizer steps in a row .* not finite"):
        train(recipe(run={"steps": 8, "max_skipped": 4}, eval={"every": 0}), tmp_path / "run", show=False)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(line["update/skipped/count"] for line in lines) >= 2
    assert find_checkpoints(tmp_path / "run" / "checkpoints")


def test_refill_replaces_what_was_rejected(tmp_path):
    """A veto so strict that much is rejected: groups fill up with accepted members, and everything sampled is counted."""
    strict = {"correction": {"reject_below": 0.9}}
    for turns in (0, 3):
        settings = recipe(learn={**strict, "refill": turns}, run={"steps": 1, "samples": 16}, eval={"every": 0})
        train(settings, tmp_path / str(turns), show=False)
    (without,), (filled,) = (read_lines(tmp_path / str(turns) / "metrics.jsonl") for turns in (0, 3))
    assert 0 < without["reject/trajectories/frac"] < 1
    rejected = round(without["reject/trajectories/frac"] * 16)
    assert filled["rollout/trajectories/count"] > 16 and 0 < filled["reject/replaced/count"] <= rejected
    used = [json.loads(line) for line in (tmp_path / "3" / "samples" / "step-000001" / "trajectories.jsonl").open()]
    assert sum(not sample["accepted"] for sample in used) == rejected - filled["reject/replaced/count"]
    prompts = [sample["prompt"] for sample in used]
    assert prompts == [p for p in dict.fromkeys(prompts) for _ in range(4)]  # groups stay whole


def test_rebaseline_and_shuffling_reach_the_advantages(tmp_path):
    found = {}
    for name, learn in {
        "plain": {},
        "rebaseline": {"rebaseline": True},
        "shuffle": {"shuffle_advantages": True},
    }.items():
        learn = {**learn, "correction": {"reject_below": 0.5}}
        settings = recipe(learn=learn, run={"steps": 1, "samples": 16}, eval={"every": 0})
        train(settings, tmp_path / name, show=False)
        found[name] = [
            json.loads(line) for line in (tmp_path / name / "samples" / "step-000001" / "trajectories.jsonl").open()
        ]
    assert any(not s["accepted"] for s in found["plain"])
    assert all(s["accepted"] or s["advantage"] == 0 for s in found["rebaseline"])
    plain, shuffled = ([s["advantage"] for s in found[name]] for name in ("plain", "shuffle"))
    assert plain != shuffled and sorted(plain) == sorted(shuffled)


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_is_where_the_run_started(tmp_path, rank):
    """The KL is 0 before the first update and positive after it, with and without adapters, also in a resumed run."""
    if rank:
        pytest.importorskip("peft")
    settings = {"loss": {"beta": 0.01}, "eval": {"every": 0}, "model": {"lora_rank": rank}, "optimizer": {"lr": 3e-3}}
    settings["learn"] = {"minibatches": 1}
    train(recipe(**settings, run={"steps": 2}), tmp_path / "run", show=False)
    train(recipe(**settings, run={"steps": 3}), tmp_path / "run", resume=True, show=False)
    kl = [line["update/kl/mean"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert abs(kl[0]) < 1e-6 and kl[1] > 1e-6 and kl[2] > 1e-6


def test_bf16_checkpointed_adapters_train_and_load(tmp_path):
    pytest.importorskip("peft")
    model = {"dtype": "bfloat16", "lora_rank": 4, "gradient_checkpointing": True}
    train(recipe(model=model, run={"steps": 2}, eval={"every": 0}), tmp_path / "run", show=False)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(line["update/grad_norm"] > 0 for line in lines)
    model, _ = load_model(str(tmp_path / "run" / "checkpoints" / "step-000002"))
    assert any("lora_" in name for name, _ in model.named_parameters())


def test_trackers_get_the_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(recipe(run={"steps": 2, "trackers": ["tensorboard"]}), tmp_path / "run", show=False)
    found = [
        EventAccumulator(str(folder)) for folder in {path.parent for path in (tmp_path / "run").rglob("events.out.*")}
    ]
    for events in found:
        events.Reload()
    (events,) = (events for events in found if "reward/mean" in events.Tags()["scalars"])
    written = [line["reward/mean"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line]
    assert [event.value for event in events.Scalars("reward/mean")] == pytest.approx(written)


def test_unknown_trackers_are_refused(tmp_path):
    with pytest.raises(SparseRLError, match="names 'tensorbord'; did you mean 'tensorboard'"):
        train(recipe(run={"trackers": ["tensorbord"]}), tmp_path / "run", show=False)


def test_prompts_of_many_lengths_resume_the_same(tmp_path):
    """Nothing in the metrics may depend on what this process happened to see before."""
    settings = {"task": {"name": "linsys"}, "rollout": {"budget": 60, "max_new_tokens": 16}, "eval": {"every": 2}}
    train(recipe(**settings, run={"steps": 4}), tmp_path / "whole", show=False)
    train(recipe(**settings, run={"steps": 2}), tmp_path / "parts", show=False)
    train(recipe(**settings, run={"steps": 4}), tmp_path / "parts", resume=True, show=False)
    assert (tmp_path / "parts" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()


def test_dense_rollouts_take_prompts_of_any_length(tmp_path):
    rollout = {"compressor": "dense", "compressor_options": {}, "max_new_tokens": 8}
    plain = {name: section for name, section in BASE.items() if name != "task"}
    settings = make_recipe(
        {**plain, "task": {"name": "linsys"}, "rollout": {**BASE["rollout"], **rollout}, "learn": {"method": "none"}}
    )
    train(settings, tmp_path / "run", show=False)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert max(line["gap/abs/mean"] for line in lines if "gap/abs/mean" in line) < 1e-5


def test_the_recipe_reaches_the_learner(tmp_path):
    trainer = sparse_rl.train.loop.Trainer(
        recipe(learn={"method": "sparse-rl-released"}, rollout={"temperature": 0.7}), tmp_path / "run", show=False
    )
    assert trainer.learner.clip_kl == 10.0 and trainer.loss.constant == 64 and trainer.learner.temperature == 0.7
    assert trainer.sampling.temperature == 0.7


def test_ratios_start_at_one_at_any_temperature(tmp_path):
    settings = recipe(
        rollout={"temperature": 0.7}, learn={"method": "none", "minibatches": 1}, run={"steps": 1}, eval={"every": 0}
    )
    train(settings, tmp_path / "run", show=False)
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert abs(line["update/drift/mean"]) < 1e-6 and line["update/grad_norm"] > 0


def test_naive_hides_the_gap_from_the_loss_but_not_from_the_metrics(tmp_path):
    for method in ("naive", "none"):
        settings = recipe(learn={"method": method, "minibatches": 1}, run={"steps": 1}, eval={"every": 0})
        train(settings, tmp_path / method, show=False)
    (naive,), (none,) = (read_lines(tmp_path / method / "metrics.jsonl") for method in ("naive", "none"))
    same = [key for key in none if key.startswith(("gap/", "reject/", "reward/"))]
    assert none["gap/abs/mean"] > 0.01 and all(naive[key] == none[key] for key in same)
    assert (
        abs(none["update/drift/mean"]) < 1e-6 < 1e-3 < abs(naive["update/drift/mean"])
    )  # its ratio starts at learner / sampler


def test_replacements_are_new_samples(tmp_path, monkeypatch):
    seeds, generate = [], sparse_rl.train.worker.Engine.generate

    def spy(self, prompts, group_size, sampling, seed, samples):
        seeds.append(seed)
        return generate(self, prompts, group_size, sampling, seed, samples=samples)

    monkeypatch.setattr(sparse_rl.train.worker.Engine, "generate", spy)
    learn = {"correction": {"reject_below": 0.9}, "refill": 3}
    train(recipe(learn=learn, run={"steps": 1, "samples": 16}, eval={"every": 0}), tmp_path / "run", show=False)
    assert len(seeds) == 4 and len(set(seeds)) == 4
    folder = tmp_path / "run" / "samples" / "step-000001"
    lines = [json.loads(line) for line in (folder / "trajectories.jsonl").open()]
    assert len({line["trace"] for line in lines}) == 16  # each with its own trace
    assert all(t.trace.num_tokens == len(t.tokens) for t in read_trajectories(folder))


def test_resuming_forgets_what_came_after_the_checkpoint(tmp_path):
    import shutil

    train(recipe(run={"steps": 4}), tmp_path / "run", show=False)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    (tmp_path / "run" / "checkpoints" / "step-best").mkdir()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # what a crash leaves
    assert read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 4
    trainer = sparse_rl.train.loop.Trainer(recipe(run={"steps": 4}), tmp_path / "run", show=False)
    trainer.resume()
    assert trainer.step == 2 and read_lines(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 2
    assert [p.name for p in (tmp_path / "run" / "samples").iterdir()] == ["step-000001"]


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


def test_one_process_per_folder(tmp_path):
    from sparse_rl.train.run import folder_lock

    folder = tmp_path / "run"
    folder.mkdir()
    with folder_lock(folder), pytest.raises(SparseRLError, match="another process is training in"):
        train(recipe(), folder, show=False)
    (folder / "metrics.jsonl").write_text("")
    with pytest.raises(SparseRLError, match="holds a run already"):
        train(recipe(), folder, show=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(SparseRLError, match="is a file or lies under one"):
        train(recipe(), tmp_path / "file" / "run", show=False)


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


PARTLY = """
from sparse_rl.tasks import Prompt, Task
class Partly(Task):
    isolated = False
    def __getitem__(self, i):
        if i == 3:
            raise KeyError("three")
        return Prompt("1+1=", i, i)
    def reward(self, prompt, text):
        return 0.5 if prompt.index % 4 else 1.0
"""


def test_accuracy_counts_full_rewards_and_bad_prompts_get_a_sentence(tmp_path):
    from sparse_rl import Engine, Sampling, tasks
    from sparse_rl.train.held_out import accuracy, dense_engine

    (tmp_path / "partly.py").write_text(PARTLY)
    task = tasks.make(f"{tmp_path / 'partly.py'}:Partly")
    with pytest.raises(SparseRLError, match=r"could not make prompt 3 \(KeyError: 'three'\)"):
        task.sample(0, 4)
    model, tokenizer = load_model("tiny")
    engine = Engine(model, budget=16, interval=4, rows=4)
    found = accuracy(engine, tokenizer, task, task.sample(4, 8), 1, Sampling(4), seed=0)
    assert found["accuracy"] == 0.25 and found["reward"] == 0.625
    dense = dense_engine(model, [[5] * 10], 50, rows=4, like=engine)
    assert dense.rows == 1 and dense.cache.capacity == 60  # 4 rows of 20 slots hold one dense row of 60
    assert dense_engine(model, [[5] * 4], 6, rows=4, like=engine).rows == 4


def test_a_warm_up_that_diverges_says_so(tmp_path, monkeypatch):
    import sparse_rl.train.warmup

    monkeypatch.setattr(
        sparse_rl.train.warmup, "batch_logprobs", lambda model, tokens, mask: model.lm_head.weight.sum() * float("nan")
    )
    with pytest.raises(
        SparseRLError, match=r"warm-up step 1: loss nan, gradient norm nan; lower warmup.lr \(now 0.002\)"
    ):
        sparse_rl.train.warmup.warmup(recipe(warmup={"steps": 2}), tmp_path / "model", show=False)
    assert not (tmp_path / "model").exists()


def test_a_warm_up_in_micro_batches_has_the_gradient_of_the_batch():
    import sparse_rl.train.warmup as module
    from tests.helpers.models import tiny

    tokens = torch.randint(1, 60, (7, 40), generator=torch.Generator().manual_seed(0))
    place, ends = torch.arange(40), torch.tensor([40, 12, 33, 9, 20, 40, 11])
    mask = (place >= 5) & (place < ends[:, None])
    found = []
    for micro_batch_tokens in (10_000, 80, 1):
        model = copy.deepcopy(tiny("llama"))
        loss = module._backward(model, tokens, mask, micro_batch_tokens)
        found.append((loss, torch.cat([p.grad.flatten() for p in model.parameters()])))
    logprobs = module.batch_logprobs(tiny("llama"), tokens, mask)
    assert found[0][0] == pytest.approx(-logprobs.sum().item() / mask.sum().item(), rel=1e-6)
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_warm_up_sees_its_prompts_in_order(tmp_path, monkeypatch, workers):
    import sparse_rl.train.warmup as module
    from sparse_rl import tasks

    seen, logprobs = [], module.batch_logprobs
    monkeypatch.setattr(
        module, "batch_logprobs", lambda model, tokens, mask: seen.append(tokens) or logprobs(model, tokens, mask)
    )
    settings = recipe(model={"name": "tiny"}, warmup={"steps": 5, "batch": 3, "workers": workers}, eval={"prompts": 2})
    module.warmup(settings, tmp_path / "model", show=False)
    tokenizer, task = load_model("tiny")[1], tasks.make(settings.task.name, **settings.task.options)
    texts = tokenizer.batch_decode([row for tokens in seen for row in tokens], skip_special_tokens=True)
    assert texts == [prompt.text + task.solution(prompt) for prompt in task.sample(0, 15)]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_warm_up_that_is_stopped_leaves_its_model(tmp_path, how, workers):
    """The signal goes to the whole group, as terminals and schedulers send it."""
    given = write_recipe(tmp_path, model={"name": "tiny"}, warmup={"steps": 100_000, "batch": 4, "workers": workers})
    process = subprocess.Popen(
        command("warmup", given, "--out", tmp_path / "model"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    while b"step 25/" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, how)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error.decode()
    assert "Traceback" not in error.decode() and "interrupted after" in error.decode()
    assert load_model(str(tmp_path / "model"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_task_that_cannot_warm_up_is_told_in_a_sentence(tmp_path, workers):
    import sparse_rl.train.warmup as module

    settings = recipe(
        model={"name": "tiny"}, task={"name": "countdown", "search": 5}, warmup={"steps": 2, "workers": workers}
    )
    with pytest.raises(
        SparseRLError, match=r"^countdown: none of 1000 problems .* had a search of at most 5 characters"
    ):
        module.warmup(settings, tmp_path / "model", show=False)
