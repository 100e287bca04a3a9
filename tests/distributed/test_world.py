"""Several processes are one: the same completions, losses, gradients and weights; stopped, killed and resumed with
another number.
"""

import dataclasses
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sparse_rl.cache import Trace
from sparse_rl.distributed.launch import launch
from sparse_rl.distributed.world import packed, unpacked
from sparse_rl.errors import SparseRLError
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.learn.batch import accepted_rows
from sparse_rl.learn.optimizer import MasterAdamW, OptimizerSettings
from sparse_rl.models import load_model
from sparse_rl.rollout import Sampling
from sparse_rl.tasks import Grade, Prompt, make
from sparse_rl.train.deal import LengthsSeen, deal
from sparse_rl.train.log import Clock
from sparse_rl.train.loop import Trainer
from sparse_rl.train.merge import merge, without_full_traces
from sparse_rl.train.run import train
from sparse_rl.train.step import step_positions
from sparse_rl.train.worker import Sampler
from tests.helpers import runs
from tests.helpers.network import LOOPBACK, Command, attack, listening, with_descendants
from tests.helpers.processes import read_shards_alone
from tests.helpers.runs import BASE, PATIENCE, recipe, write_recipe

ROOT = Path(__file__).parent.parent.parent


def start(*arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "sparse_rl", *map(str, arguments)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    _, said = process.communicate(timeout=PATIENCE)
    return process.returncode, said


def run(*arguments: object) -> str:
    status, said = finish(start(*arguments))
    assert status == 0 and "Traceback" not in said, said
    return said


def run_here(*arguments: object) -> str:
    """The same in this process, which takes less time than to start one."""
    done = runs.run(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stderr


def weights(folder: Path) -> list[torch.Tensor]:
    _, newest = find_checkpoints(folder / "checkpoints")[-1]
    return [p.detach() for p in load_model(str(newest))[0].parameters()]


def same_run(folder: Path, other: Path) -> None:
    """The same prompts and completions, and numbers that differ by the order in which gradients were added."""
    theirs, ours = (read_lines(f / "metrics.jsonl") for f in (other, folder))
    assert [line["step"] for line in theirs] == [line["step"] for line in ours] and [
        line.keys() for line in theirs
    ] == [line.keys() for line in ours]
    for line, expected in zip(theirs, ours):
        for key, value in expected.items():
            assert line[key] == pytest.approx(value, rel=1e-3, abs=1e-4), (line["step"], key)
    samples = [sorted(f.glob("samples/*/trajectories.jsonl")) for f in (other, folder)]
    assert len(samples[0]) == len(samples[1]) > 0
    for one, two in zip(*samples):
        lines = [[json.loads(line) for line in path.open()] for path in (one, two)]
        assert [(line["tokens"], line["clipped"]) for line in lines[0]] == [
            (line["tokens"], line["clipped"]) for line in lines[1]
        ]
        traces = [
            [Trace.load(path.parent / line["trace"]).evicted_at for line in found]
            for path, found in zip((one, two), lines)
        ]
        assert all(mine.equal(theirs) for mine, theirs in zip(*traces, strict=True))
    for one, two in zip(weights(folder), weights(other), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------------
# processes


def test_processes_agree(tmp_path):
    """Losses, gradients and next weights of DDP and FSDP2 against one process; meetings, failures, shards: see
    processes.py
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "tests.helpers.processes",
    ]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("check_") == 2 * 7, done.stdout
    read_shards_alone(tmp_path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone") / "run"
    train(recipe(), folder, show=False)
    return folder


def test_two_processes_make_the_run_of_one(alone, tmp_path):
    given = write_recipe(tmp_path)
    said = run("train", given, "--out", tmp_path / "two", "--num-processes", 2)
    assert said.count("step 4/4: reward") == 1  # one process speaks
    same_run(alone, tmp_path / "two")
    timing = [line for line in read_lines(tmp_path / "two" / "timing.jsonl") if "time/rollout" in line]
    assert len(timing) == 4 and all(
        0 <= line["processes/idle/frac"] < 1 and line["time/exchange"] > 0 for line in timing
    )


@pytest.mark.slow
def test_two_processes_make_the_ppo_run_of_one(tmp_path):
    """Old values are exchanged, the critic agrees; divided between two, then whole."""
    learn = {"algorithm": "ppo", "method": "shadow"}
    given = write_recipe(tmp_path, learn=learn, loss={"beta": 0.01}, eval={"every": 2})
    run_here("train", given, "--out", tmp_path / "one")
    run("train", given, "--out", tmp_path / "two", "--num-processes", 2)
    same_run(tmp_path / "one", tmp_path / "two")
    run("train", given, "--out", tmp_path / "parts", "--num-processes", 2, "--run.steps", 2, "--model.shard", "true")
    run_here("train", tmp_path / "parts", "--resume", "--run.steps", 4, "--model.shard", "false")
    same_run(tmp_path / "one", tmp_path / "parts")


@pytest.mark.parametrize(
    "stages", [[(4, 1)], pytest.param([(3, 1), (4, 3)], marks=pytest.mark.slow)], ids=["one", "one, then three"]
)
def test_another_number_of_processes_goes_on_with_a_run(alone, tmp_path, stages):
    """It is divided between two; then whole on one; then whole on three, one of which has a prompt less."""
    given, folder = write_recipe(tmp_path, eval={"every": 3}), tmp_path / "run"
    run("train", given, "--out", folder, "--num-processes", 2, "--run.steps", 2, "--model.shard", "true")
    assert len(list((folder / "checkpoints" / "step-000002" / "shards").glob("process-*.safetensors"))) == 2
    assert load_model(str(folder / "checkpoints" / "step-000002"))[0] is not None  # an ordinary folder
    for steps, processes in stages:
        more = ["--num-processes", processes] if processes > 1 else []
        command = ["train", folder, "--resume", "--run.steps", steps, "--model.shard", "false", *more]
        said = run(*command) if processes > 1 else run_here(*command)
        assert f"step {steps}/{steps}" in said
    lines = {(line["step"], "eval/dense/accuracy" in line): line for line in read_lines(folder / "metrics.jsonl")}
    for expected in read_lines(alone / "metrics.jsonl"):
        line = lines[expected["step"], "eval/dense/accuracy" in expected]
        for key, value in expected.items():
            assert line[key] == pytest.approx(value, rel=1e-3, abs=1e-4), (line["step"], key)
    for one, two in zip(weights(alone), weights(folder), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def processes_of(launcher: int, rank: int) -> int:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return next(int(c) for c in children if f"\0RANK={rank}\0" in Path(f"/proc/{c}/environ").read_text())


def wait_for_steps(folder: Path, steps: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + PATIENCE
    while len(read_lines(folder / "metrics.jsonl")) < steps:
        assert time.monotonic() < deadline and process.poll() is None, process.stderr.read()
        time.sleep(0.05)


@pytest.mark.parametrize("shard", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_process_that_dies_takes_the_run_down_with_a_sentence_and_leaves_a_checkpoint(tmp_path, shard):
    """Not with a hang: the others end by themselves, or are ended."""
    given, folder = write_recipe(tmp_path, eval={"every": 0}, run={"steps": 500, "samples": 0}), tmp_path / "run"
    process = start("train", given, "--out", folder, "--num-processes", 2, "--model.shard", shard)
    wait_for_steps(folder, 3, process)
    os.kill(processes_of(process.pid, 1), signal.SIGKILL)
    status, said = finish(process)
    assert status == 1 and "Traceback" not in said, said
    assert "process 1 of 2 was ended by signal 9" in said and "--resume --num-processes 2" in said
    step, _ = find_checkpoints(folder / "checkpoints")[-1]
    assert step >= 2 and not list((folder / "checkpoints").glob(".*"))
    run_here("train", folder, "--resume", "--run.steps", step + 1, "--eval.every", 0)
    assert read_lines(folder / "metrics.jsonl")[-1]["step"] == step + 1


def test_stopping_one_process_stops_all_at_one_place_and_keeps_every_step(tmp_path):
    given, folder = (
        write_recipe(tmp_path, eval={"every": 0}, run={"steps": 500, "checkpoint_every": 400}),
        tmp_path / "run",
    )
    process = start("train", given, "--out", folder, "--num-processes", 2, "--model.shard", "true")
    wait_for_steps(folder, 2, process)
    check_that_strangers_are_kept_out(process.pid, tmp_path / "proof")
    os.kill(processes_of(process.pid, 1), signal.SIGTERM)
    status, said = finish(process)
    assert status == 130 and said.count("sparse-rl: stopped; continue with") == 1 and "Traceback" not in said, said
    step, _ = find_checkpoints(folder / "checkpoints")[-1]
    assert step == read_lines(folder / "metrics.jsonl")[-1]["step"]


def check_that_strangers_are_kept_out(launcher: int, proof: Path) -> None:
    """Nothing of a run can be reached from the network, and on the machine itself no store takes pickles."""
    sockets = listening(launcher)
    assert sockets and {address for address, _ in sockets} <= LOOPBACK
    assert attack({port for _, port in sockets}, proof, seconds=20) == [] and not proof.exists()
    (meeting,) = {
        part.removeprefix("SPARSE_RL_MEETING_FILE=")
        for pid in with_descendants(launcher)
        for part in Path(f"/proc/{pid}/environ").read_text().split("\0")
        if part.startswith("SPARSE_RL_MEETING_FILE=")
    }
    assert Path(meeting).parent.stat().st_mode & 0o077 == 0


def test_what_processes_send_each_other_runs_no_code(tmp_path):
    content = {"step": 3, "tensors": [torch.arange(3).to(torch.uint16)], "grades": [Grade(1.0, "right")], "none": None}
    again = unpacked(packed(content))
    assert again["tensors"][0].tolist() == [0, 1, 2] and again["grades"] == content["grades"] and again["step"] == 3
    for value in (Command(tmp_path / "proof"), [1, {"x": Command(tmp_path / "proof")}]):
        with pytest.raises(pickle.UnpicklingError):
            unpacked(packed(value))
        with pytest.raises(pickle.UnpicklingError):
            unpacked(pickle.dumps(value, protocol=2))
    assert not (tmp_path / "proof").exists()
    torch.load(io.BytesIO(packed(Command(tmp_path / "proof"))), weights_only=False)
    assert (tmp_path / "proof").exists()  # it would have


def test_what_cannot_be_divided_is_refused(tmp_path, monkeypatch):
    with pytest.raises(SparseRLError, match=r"--num-processes is 0; it must be a whole number of at least 1"):
        launch(0, [], tmp_path, "")
    with (
        monkeypatch.context() as patch,
        pytest.raises(SparseRLError, match="another launcher has already started this as one of 4"),
    ):
        patch.setenv("WORLD_SIZE", "4")
        launch(2, [], tmp_path, "")
    status, said = finish(
        start("train", write_recipe(tmp_path), "--out", tmp_path / "run", "--num-processes", 2, "--rollout.prompts", 1)
    )
    assert status == 1 and said.count("rollout.prompts is 1, but each of 2 processes needs at least one") == 1, (
        said
    )  # not by every process
    assert "Traceback" not in said and "signal" not in said and "--resume" not in said, said
    assert not (tmp_path / "run").exists()


def test_a_process_without_a_held_out_prompt_has_nothing_to_say():
    model, tokenizer = load_model("tiny-sums")
    task, sampling = make("sums").held_out(), Sampling(8)
    parts = []
    for rank in range(3):
        sampler = Sampler(recipe(), model, tokenizer, make("sums"), rank, 3)
        parts.append(sampler.complete_held_out(sampler.engine, task, task.sample(0, 2), 2, sampling))
    assert [len(part) for part in parts] == [2, 2, 0]


def test_an_optimizer_of_another_version_is_refused():
    optimizer = MasterAdamW([torch.nn.Parameter(torch.ones(2))], OptimizerSettings())
    with pytest.raises(
        SparseRLError, match=r"no exp_avg, exp_avg_sq, step \(it has: adamw, masters\): another version"
    ):
        optimizer.load_state_dict({"adamw": {}, "masters": [torch.ones(2)]})


# ----------------------------------------------------------------------------------------------------------------
# shares


@given(st.lists(st.floats(1, 1000), min_size=1, max_size=40), st.integers(1, 5), st.integers(1, 6))
@example([1.0] * 5, 1, 4)
def test_prompts_are_dealt_out_evenly(expected, minibatches, processes):
    owner_rank = deal(expected, min(minibatches, len(expected)), processes)
    loads = [sum(e for e, rank in zip(expected, owner_rank) if rank == p) for p in range(processes)]
    # No process could give its last prompt to another, and both have less.
    assert max(loads) - min(loads) <= max(expected) + 1e-6
    assert len(set(owner_rank)) == min(processes, len(expected))
    if minibatches == 1:  # the heaviest process got its smallest prompt last, when no other had less
        smallest = min(e for e, rank in zip(expected, owner_rank) if rank == loads.index(max(loads)))
        assert max(loads) <= sum(expected) / processes + (1 - 1 / processes) * smallest + 1e-6


def test_lengths_are_learned_from_prompts_seen_and_from_those_of_like_length():
    lengths = LengthsSeen()
    assert lengths.expect([Prompt("a", 0, 0)], [10]) == [11]  # nothing is known: all are alike
    trajectories = {0: (10, 100), 1: (20, 200), 2: (30, 300)}

    def rollout(places):
        records = [
            type("Trajectory", (), {"num_prompt_tokens": p, "tokens": range(p + r)})
            for p, r in (trajectories[i] for i in places)
        ]
        return [Prompt("", 0, i) for i in places], records

    lengths.note(*rollout([0, 0, 1, 2]), repeats=True)
    found = lengths.expect([Prompt("", 0, 0), Prompt("", 0, 7)], [10, 25])
    assert found[0] == 110 and found[1] == pytest.approx(25 + 250)
    again = LengthsSeen()
    again.load_state_dict(lengths.state_dict())
    assert again.expect([Prompt("", 0, 2), Prompt("", 0, 7)], [30, 40]) == pytest.approx([330, 440])
    fresh = LengthsSeen()
    fresh.note(*rollout([0, 1, 2]), repeats=False)
    assert not fresh.known and fresh.expect([Prompt("", 0, 0)], [10]) == pytest.approx([110])


@pytest.mark.parametrize("refill,dynamic", [(0, 0), (2, 0), (0, 3)])
def test_the_shares_of_processes_are_the_rollout_of_one(refill, dynamic):
    """To the bit: the same tokens, traces and log-probs in the same order, and the same ones chosen."""
    learn = {"correction": {"reject_below": 0.5}, "refill": refill, "dynamic": dynamic, "micro_batch_tokens": 400}
    settings = recipe(learn=learn)
    model, tokenizer = load_model("tiny-sums")

    def part(rank, processes):
        return Sampler(settings, model, tokenizer, make("sums"), rank, processes).step(3, Clock())

    whole, parts = part(0, 1), [part(rank, 3) for rank in range(3)]
    assert all(0 < len(p.chosen_rows) < len(whole.chosen_rows) for p in parts)
    sent = [parts[0], without_full_traces(parts[1]), without_full_traces(parts[2])]
    merged = merge(sent, settings.rollout.group_size)
    assert step_positions(merged, 4) == step_positions(whole, 4)
    assert merged.chosen_rows.equal(whole.chosen_rows) and merged.texts == whole.texts
    assert (len(whole.trajectories) > len(whole.chosen_rows)) == (refill + dynamic > 0)
    for field in ("tokens", "lengths", "mask", "sampler_logprobs"):
        assert getattr(merged.scored.sampled, field).equal(getattr(whole.scored.sampled, field)), field
    torch.testing.assert_close(merged.scored.old_logprobs, whole.scored.old_logprobs, rtol=1e-5, atol=1e-6)
    correction = settings.learn.resolve_method().correction
    accepted = accepted_rows(whole.scored, correction)
    assert accepted_rows(merged.scored, correction).equal(accepted)
    if refill:  # carried along, so that it is not computed again
        assert merged.accepted.equal(accepted) and whole.accepted.equal(accepted)
    else:
        assert merged.accepted is None and whole.accepted is None
    assert merged.alpha.keys() == whole.alpha.keys() and merged.trace_bytes == whole.trace_bytes
    assert set(merged.scored.sampled.owner_rank.tolist()) == {0, 1, 2}
    for mine, theirs, trace in zip(whole.trajectories, merged.trajectories, merged.scored.sampled.traces):
        assert (
            theirs.trace is trace
            and theirs.trace.slots_in_use().double().mean() == mine.trace.slots_in_use().double().mean()
        )
        kept = trace.evicted_at
        assert kept.equal(mine.trace.evicted_at) if kept.shape[0] > 1 else kept.equal(mine.trace.evicted_at[:1, :1])


# ---------------------------------------------------------------------------------------------------------------- one
# step ahead


def watched(folder: Path, **sections) -> tuple[list[list[int]], list[dict]]:
    """Versions of the weights that sampled each step, and its metrics."""
    trainer = Trainer(recipe(**sections), folder, show=False)
    folder.mkdir(parents=True)
    versions, collect = [], trainer.collect

    def spy(clock):
        rollout = collect(clock)
        versions.append([trainer.learner.version, *sorted({t.version for t in rollout.trajectories})])
        return rollout

    trainer.collect = spy
    trainer.run()
    return versions, [line for line in read_lines(folder / "metrics.jsonl") if "reward/mean" in line]


def test_a_step_ahead_is_one_step_old_and_its_gap_is_compression_alone(tmp_path):
    """With nothing evicted the gap is rounding, whatever the update in between did; that is in the drift."""
    dense = {"compressor": "dense", "compressor_options": {}}
    learn, loss = {"method": "none", "minibatches": 1}, {"beta": 0.01}  # a KL term, so that no update is empty
    settings = dict(optimizer={"lr": 1e-3}, learn=learn, loss=loss, run={"steps": 4, "diagnose": 0})
    versions, lines = watched(tmp_path / "ahead", rollout={**dense, "ahead": 1}, **settings)
    # Updates behind the learner, and behind the weights that sampled.
    assert versions == [[0, 0], [1, 0], [2, 1], [3, 2]]
    assert max(line["gap/abs/mean"] for line in lines) < 1e-5
    assert abs(lines[0]["update/drift/mean"]) < 1e-6 < 1e-4 < min(abs(line["update/drift/mean"]) for line in lines[1:])
    versions, lines = watched(tmp_path / "in-turn", rollout=dense, **settings)
    assert versions == [[0, 0], [1, 1], [2, 2], [3, 3]] and max(abs(line["update/drift/mean"]) for line in lines) < 1e-6


def test_a_step_ahead_replays_exactly(tmp_path):
    """Eviction replay finds the sampler's log-probs again with the weights that sampled."""
    _, lines = watched(tmp_path / "run", rollout={"ahead": 1}, learn={"method": "shadow"}, optimizer={"lr": 3e-3})
    assert all(line["gap/abs/mean"] < 1e-5 and line["gap/k3/mean"] < 1e-8 for line in lines)


def test_a_run_a_step_ahead_is_saved_stopped_and_resumed(tmp_path, monkeypatch):
    given, folder = (
        write_recipe(tmp_path, eval={"every": 3}, run={"steps": 500, "checkpoint_every": 400}),
        tmp_path / "run",
    )
    collect, calls = Trainer.collect, []

    def stopped(self, clock):
        calls.append(1)
        if len(calls) == 4:
            signal.raise_signal(signal.SIGTERM)  # while another thread samples the step after this
        return collect(self, clock)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "collect", stopped)
        done = runs.run("train", given, "--out", folder, "--rollout.ahead", 1)
    assert done.returncode == 130 and "Traceback" not in done.stderr, done.stderr
    step, _ = find_checkpoints(folder / "checkpoints")[-1]
    assert step == max(line["step"] for line in read_lines(folder / "metrics.jsonl"))
    run_here("train", folder, "--resume", "--run.steps", step + 2)
    lines = read_lines(folder / "metrics.jsonl")
    timing = next(line for line in read_lines(folder / "timing.jsonl") if line["step"] == step + 2)
    assert lines[-1]["step"] == step + 2 and timing["ahead/rollout/seconds"] > 0 and "time/rollout" not in timing
    assert timing["time/wait"] <= timing["time/step"]


def test_an_error_while_sampling_ahead_ends_the_run_and_keeps_its_steps(tmp_path, monkeypatch):
    step = Sampler.step

    def failing(self, number, clock):
        if number == 3:
            raise SparseRLError("planted.")
        return step(self, number, clock)

    monkeypatch.setattr(Sampler, "step", failing)
    with pytest.raises(SparseRLError, match="planted"):
        train(recipe(rollout={**BASE["rollout"], "ahead": 1}, eval={"every": 0}), tmp_path / "run", show=False)
    assert find_checkpoints(tmp_path / "run" / "checkpoints")[-1][0] == 3


def test_what_cannot_run_ahead_is_refused():
    with pytest.raises(SparseRLError, match=r"rollout.ahead is 2; it must be a whole number of steps from 0 to 1"):
        recipe(rollout={"ahead": 2})
    with pytest.raises(SparseRLError, match="ahead of learning, but students learn from it"):
        recipe(rollout={"ahead": 1}, student={"chunks": [4]})
    with pytest.raises(SparseRLError, match="its budget follows what each step measures"):
        recipe(rollout={"ahead": 1, "budget": {"min": 40, "max": 60, "target": {"alpha_5": 0.9}}})
    assert dataclasses.asdict(recipe().rollout)["ahead"] == 0
