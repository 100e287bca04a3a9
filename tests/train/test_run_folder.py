"""What a run writes, and folders that are refused."""

import json
import math
from pathlib import Path

import pytest
import torch

from sparse_rl.errors import SparseRLError
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.models import load_model
from sparse_rl.records import read_trajectories
from sparse_rl.train.run import folder_lock, train
from tests.helpers.runs import recipe

ALWAYS = (  # metrics that every step has
    "advantage/groups_without_variance/frac",
    "cache/tokens_saved/frac",
    "gap/alpha/p05",
    "gap/ess/frac",
    "gap/k3/mean",
    "gap/xi/min",
    "gap/xi/p05",
    "old/entropy/mean",
    "reject/trajectories/frac",
    "rollout/length/mean",
    "rollout/loops/frac",
    "rollout/truncated/frac",
    "update/clip/frac",
    "update/empty/count",
    "update/skipped/count",
)


def samples_of(folder: Path, step: int) -> list[dict]:
    return [json.loads(line) for line in (folder / "samples" / f"step-{step:06d}" / "trajectories.jsonl").open()]


def test_every_step_and_evaluation_has_a_line(finished):
    lines = read_lines(finished / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3, 4, 5, 6, 6]  # evaluations at 0, 3, 6
    steps = [line for line in lines if "reward/mean" in line]
    assert len(steps) == 6 and all(set(ALWAYS) <= set(line) for line in steps)
    evaluations = [line for line in lines if "eval/dense/accuracy" in line]
    assert len(evaluations) == 3 and all(0 <= line["eval/sparse/accuracy"] <= 1 for line in evaluations)


def test_the_time_of_every_stage_is_written(finished):
    stages = [f"time/{s}" for s in ("rollout", "grade", "score", "diagnose", "update", "step")]
    timing = [line for line in read_lines(finished / "timing.jsonl") if "time/step" in line]
    assert len(timing) == 6 and all({*stages, "cache/bytes_saved/frac"} <= set(line) for line in timing)


def test_samples_have_an_entry_for_every_token_as_fed(finished):
    samples = samples_of(finished, 3)
    trajectories = list(read_trajectories(finished / "samples" / "step-000003"))
    assert len(samples) == len(trajectories) == 2
    assert {"prompt", "text", "reward", "verdict", "advantage", "accepted"} <= set(samples[0])
    for s, t in zip(samples, trajectories, strict=True):
        prompt = t.num_prompt_tokens
        assert {len(s[name]) for name in ("pieces", "rank", "weight", "clipped", "old_logprobs")} == {len(t.tokens)}
        assert "".join(s["pieces"][:prompt]) == s["prompt"]
        assert "".join(s["pieces"]).startswith(s["prompt"] + s["text"])
        assert min(s["rank"][prompt:]) == 1 and {*s["clipped"]} <= {True, False}


def test_weights_of_samples_are_those_of_the_correction(finished):
    for s in samples_of(finished, 3):
        prompt = s["num_prompt_tokens"]
        xi = [math.exp(o - p) for o, p in zip(s["old_logprobs"], s["sampler_logprobs"])][prompt:]
        expected = [min(x, 2.0) if s["accepted"] else 0.0 for x in xi]  # sparse-rl
        assert s["weight"][prompt:] == pytest.approx(expected, rel=1e-4) and not any(s["weight"][:prompt])


def test_every_step_has_prompts_and_weights_of_its_own(finished):
    first, third = samples_of(finished, 1), samples_of(finished, 3)
    assert {s["prompt"] for s in first}.isdisjoint(s["prompt"] for s in third)
    steps = [line for line in read_lines(finished / "metrics.jsonl") if "reward/mean" in line]
    updates = sum(2 - line["update/empty/count"] - line["update/skipped/count"] for line in steps[:2])
    assert updates > 0 and {s["version"] for s in third} == {updates} and {s["version"] for s in first} == {0}


def test_the_last_checkpoint_is_a_model_that_learned(finished):
    steps = [step for step, _ in find_checkpoints(finished / "checkpoints")]
    assert steps == [3, 4, 6] and (finished / "checkpoints" / "best").readlink().name == "step-000003"
    model, tokenizer = load_model(str(finished / "checkpoints" / "step-000006"))
    assert tokenizer.encode("1+2=") and not model.training
    start = load_model("tiny-sums")[0].state_dict()
    assert all(not torch.equal(start[name], value) for name, value in model.state_dict().items() if value.dim() > 1)


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
    assert (tmp_path / "run" / "sparse-rl") in Path(events.path).parents or Path(events.path).name == "sparse-rl"
    written = [line["reward/mean"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line]
    assert [event.value for event in events.Scalars("reward/mean")] == pytest.approx(written)


def test_unknown_trackers_are_refused(tmp_path):
    with pytest.raises(SparseRLError, match="names 'tensorbord'; did you mean 'tensorboard'"):
        train(recipe(run={"trackers": ["tensorbord"]}), tmp_path / "run", show=False)


def test_folders_are_not_mixed_up(finished, tmp_path):
    with pytest.raises(SparseRLError, match="holds a run already; continue it with --resume"):
        train(recipe(run={"steps": 6}), finished, show=False)
    with pytest.raises(SparseRLError, match=r"rollout.interval is 5 but .* says 4"):
        train(recipe(run={"steps": 6}, rollout={"interval": 5}), finished, resume=True, show=False)
    with pytest.raises(SparseRLError, match="there is no recipe"):
        train(recipe(), tmp_path / "none", resume=True, show=False)
    with pytest.raises(SparseRLError, match="no task 'smus'"):
        train(recipe(task={"name": "smus"}), tmp_path / "none", show=False)
    assert not (tmp_path / "none").exists()  # a recipe that cannot start leaves nothing behind


def test_one_process_per_folder(tmp_path):
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
