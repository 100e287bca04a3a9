"""Beacons on the command line: plan, bench, list, rollout."""

import copy
import dataclasses
import json
import re

import pytest
import torch
from typer.testing import CliRunner

from sparse_rl import Engine, Sampling, load_model, read_trajectories, token_logprobs
from sparse_rl.attention import use_attention
from sparse_rl.beacon import add_beacon, beacon_of
from sparse_rl.bench import Setting, bench_rollout, fill
from sparse_rl.cli.main import app
from sparse_rl.compressors import make
from sparse_rl.models import ModelShape, load_config, shape_config
from sparse_rl.planning.memory import make_plan
from sparse_rl.planning.training import make_training_plan
from sparse_rl.train.checkpoint import save_model
from tests.helpers.models import prompts_of, tiny
from tests.helpers.runs import run

OPTIONS = {"beacon": {"chunk": 4}, "threshold": {"chunk": 16, "threshold": 1.0}}


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_the_plan_is_what_an_engine_allocates(name, options):
    model = add_beacon(copy.deepcopy(tiny(name)))
    beacon, weights = make("beacon", **options), sum(p.nbytes for p in model.parameters())
    shape = ModelShape.of(model.config, torch.float32)
    plan = make_plan(
        shape, beacon.bind(512, 128), rows=3, prompt_tokens=11, new_tokens=37, weight_bytes=weights, on_gpu=False
    )
    engine = Engine(model, beacon, rows=3)
    engine.reserve(11, 37)
    state = engine.state
    assert plan == engine.plan(11, 37)
    assert plan.cache_bytes == engine.cache.nbytes and plan.scratch_bytes == engine.scratch.nbytes
    assert plan.record_bytes == sum(
        t.nbytes for t in (state.tokens, state.logprobs, state.trace, *state.chunks.tensors)
    )
    assert plan.capacity == engine.cache.capacity == 11 + 36 // min(beacon.sizes) + beacon.chunk
    assert plan.trace_row_bytes == plan.eviction_bytes == plan.eviction_slot_bytes == plan.scoring_bytes == 0
    engine.generate(prompts_of(11, 5, 3, 8), 2, Sampling(max_new_tokens=37, stop_ids=()))
    assert plan.cache_bytes == engine.cache.nbytes  # nothing had to grow


@pytest.mark.parametrize("name", ["dense", "rkv", "prompt-only", "h2o"])
def test_other_plans_are_too(name):
    engine = Engine(tiny("llama"), name, budget=16, interval=8, rows=3)
    engine.reserve(11, 37)
    plan = engine.plan(11, 37)
    assert plan.cache_bytes == engine.cache.nbytes and plan.scratch_bytes == engine.scratch.nbytes
    assert plan.record_bytes == sum(t.nbytes for t in (engine.state.tokens, engine.state.logprobs, engine.state.trace))
    assert plan.chunk_row_bytes == 0 and not plan.folds


def test_the_largest_that_fits_speaks_of_no_budget():
    shape = ModelShape.of(shape_config("qwen2.5-1.5b"))

    def plan(new, chunk=16):
        return make_plan(
            shape, make(f"beacon:{chunk}"), rows=1, prompt_tokens=100, new_tokens=new, weight_bytes=3 * 2**30
        )

    memory = 8 * 2**30
    sentence = plan(10**8).largest_that_fits(memory)
    assert "budget" not in sentence and "generate less, or fold more tokens into a beacon" in sentence
    room, needed = map(int, re.search(r"room for (\d+) of (\d+) slots", sentence).groups())
    assert 100 < room < needed == plan(10**8).capacity
    assert plan(10**6).largest_that_fits(memory).startswith("At this capacity use rows=")
    assert "smaller model" in plan(100).largest_that_fits(2**30)


def test_plan_and_list_know_beacons():
    def say(*arguments):
        return CliRunner().invoke(app, arguments).stdout

    numbers = json.loads(
        say("plan", "--model", "qwen2.5-1.5b", "--compressor", "beacon:16", "--prompt-tokens", "256", "--json")
    )
    layers, heads, dim = 28, 2, 128
    assert numbers["capacity"] == 256 + 4095 // 16 + 16
    assert numbers["row_bytes"] == numbers["capacity"] * layers * heads * (dim * 2 * 2 + 4)
    assert (numbers["trace_row_bytes"], numbers["chunk_row_bytes"]) == (0, 4096 + 20)
    shown = say("plan", "--model", "qwen2.5-1.5b", "--compressor", "beacon:16", "--gpu-memory", "80")
    assert "prompt + a beacon per 16 tokens + a chunk = 783 slots" in shown and "places of beacons per row" in shown
    assert "trace" not in shown and "budget" not in shown and "rows that fit, beacon" in shown
    (line,) = (line for line in say("list", "compressors").splitlines() if line.startswith("beacon:N"))
    assert line.split(maxsplit=1)[1].startswith("after every chunk of the response the model reads a learned beacon")


def test_a_training_plan_counts_what_segments_keep():
    """Replaying beacons keeps a list of prompt and beacons per chunk."""
    shape = ModelShape.of(load_config("tiny"), torch.float32)
    plans = [
        make_training_plan(
            make_plan(shape, make(name), rows=4, prompt_tokens=64, new_tokens=512, weight_bytes=2**20),
            shape, trained=10, micro_batch_tokens=2048, checkpointing=False, reference=False, evaluates=False, shadow=True,
        ) for name in ("beacon:2", "beacon:16")
    ]  # fmt: skip
    assert plans[0].update_bytes > plans[1].update_bytes


def test_bench_gives_the_model_a_beacon():
    setting = Setting("tiny", "beacon:4", rows=3, prompt=10, new=21, repeats=1)
    model, _ = load_model("tiny", device="cpu")
    result = bench_rollout(setting, model)
    assert beacon_of(model) is not None
    assert (
        result["steps"] == 20 + 19 // 4 and result["kv_bytes"] == result["kv_bytes_planned"] < result["kv_bytes_dense"]
    )
    beacon = beacon_of(model)
    bench_rollout(dataclasses.replace(setting, compressor="beacon:8"), model)  # one that has a beacon keeps it
    assert beacon_of(model) is beacon
    shown = run("bench", "rollout", "--model-shape", "tiny", "--compressor", "beacon:8", "--rows", 4, "--prompt", 10, "--new", 20,
                "--device", "cpu", "--repeats", 1)  # fmt: skip
    assert shown.returncode == 0 and "beacon:8" in shown.stdout, shown.stderr


def test_full_rows_with_chunks_take_a_step():
    """What the timing of a single step does, without its clock."""
    model = add_beacon(copy.deepcopy(tiny("llama")))
    engine, sampling = Engine(model, "beacon:4", rows=4), Sampling(max_new_tokens=21, stop_ids=())
    engine.keeps_state = True
    engine.generate(prompts_of(9, 9, 9, 9), 1, sampling)
    cache, state = engine.cache, engine.state
    with torch.no_grad(), use_attention(model, "slots"):
        decoder = engine.decoder(sampling, torch.tensor([], dtype=torch.int64))
        state.begin(21, cache.capacity)
        for _ in range(12):
            fill(state, cache.capacity - 1)
            decoder.run(4, 1, cache.capacity)
            assert (state.count == 1).all() and (state.used == cache.capacity).all() and (state.chunks.open == 1).all()
            assert not state.chunks.ends.any() and state.logprobs[:, 0].isfinite().all()


def test_rollout_of_a_folder_with_a_beacon(tmp_path):
    model, tokenizer = load_model("tiny", seed=3)
    save_model(tmp_path / "student", add_beacon(model, (8,)), tokenizer)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "3+4="}\n{"tokens": [5, 6, 7]}\n')
    options = ["--prompts", prompts, "--out", tmp_path / "out", "--group-size", 2, "--max-new-tokens", 40, "--rows", 3]
    done = run("rollout", tmp_path / "student", "--compressor", "beacon:8", *options)
    assert done.returncode == 0 and "4 trajectories" in done.stdout, done.stderr
    student, _ = load_model(str(tmp_path / "student"))
    for t in read_trajectories(tmp_path / "out"):
        beacons = int((t.tokens == t.beacon_id).sum())
        assert beacons == max(0, len(t.response_tokens) - 2) // 8
        gap = (token_logprobs(student, t.tokens, t.trace) - t.sampler_logprobs)[t.response_mask]
        assert gap.abs().max() < 1e-4
    texts = [json.loads(line)["text"] for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()]
    assert len(texts) == 4 and all(isinstance(text, str) for text in texts)
    wrong = run(
        "rollout", tmp_path / "student", "--compressor", "beacon:4", "--prompts", prompts, "--out", tmp_path / "no"
    )
    assert (
        wrong.returncode == 1
        and "was trained with one after 8; use that." in wrong.stderr
        and not (tmp_path / "no").exists()
    )


def test_saved_bytes_are_measured_against_rows_without_beacons():
    model = add_beacon(copy.deepcopy(tiny("llama")))
    engine = Engine(model, "beacon:2", rows=1)
    trajectories = engine.generate(prompts_of(5), 1, Sampling(max_new_tokens=40, stop_ids=()))
    allocated = engine.cache.nbytes + engine.scratch.nbytes
    assert engine.kv_bytes_saved(trajectories) == 1 - allocated / (45 * engine.cache.shape.kv_bytes_per_token)
