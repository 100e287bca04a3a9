"""`sparse-rl bench`: the numbers agree with each other, and beacons can be timed."""

import copy
import dataclasses
import json

import pytest
import torch

from sparse_rl import Engine, Sampling, load_model
from sparse_rl.attention import use_attention
from sparse_rl.beacon import add_beacon, beacon_of
from sparse_rl.bench import Setting, bench_rollout, fill
from tests.helpers.models import prompts_of, tiny
from tests.helpers.runs import run

SMALL = ["--model-shape", "tiny", "--rows", 4, "--prompt", 10, "--device", "cpu"]


def test_bench_rollout():
    sizes = ["--budget", 24, "--interval", 8, "--new", 40, "--repeats", 2]
    done = run("bench", "rollout", *SMALL, *sizes, "--peer", "transformers", "--peer-new", 4, "--json")
    result = json.loads(done.stdout)
    assert result["steps"] == 39 and len(result["seconds_all"]) == 2
    assert result["tokens_per_s"] == pytest.approx(4 * 40 / result["seconds"])
    assert result["kv_bytes"] == result["kv_bytes_planned"] < result["kv_bytes_dense"]
    assert min(result["share"].values()) > 0 and sum(result["share"].values()) < 1 + 1e-9  # stages do not overlap
    assert result["ratio"] == pytest.approx(result["tokens_per_s"] / result["peer_tokens_per_s"])


@pytest.mark.parametrize("compressor", ["dense", "beacon:8", "beacon:2-8"])
def test_bench_shows_a_table(compressor):
    shown = run("bench", "rollout", *SMALL, "--compressor", compressor, "--new", 20, "--repeats", 1)
    assert shown.returncode == 0 and compressor in shown.stdout, shown.stderr
    assert "tokens/s, end to end" in shown.stdout


@pytest.mark.parametrize(
    "option, message",
    [
        ("--peer", "there is no peer 'qwen9'"),
        ("--model-shape", "cannot load 'qwen9'"),
        ("--rows", "Invalid value"),
    ],
)
def test_bench_mistakes_get_a_sentence(option, message):
    refused = run("bench", "rollout", option, "qwen9")
    assert refused.returncode > 0 and message in refused.stderr and "Traceback" not in refused.stderr


def test_bench_gives_the_model_a_beacon():
    setting = Setting("tiny", "beacon:4", rows=3, prompt=10, new=21, repeats=1)
    model, _ = load_model("tiny", device="cpu")
    result = bench_rollout(setting, model)
    assert result["steps"] == 20 + 19 // 4
    assert result["kv_bytes"] == result["kv_bytes_planned"] < result["kv_bytes_dense"]
    beacon = beacon_of(model)
    assert beacon is not None
    bench_rollout(dataclasses.replace(setting, compressor="beacon:8"), model)
    assert beacon_of(model) is beacon  # a model that has a beacon keeps it


def test_full_rows_with_chunks_take_a_step():
    """What the timing of a single step does, without its clock."""
    model = add_beacon(copy.deepcopy(tiny("llama")))
    engine, sampling = Engine(model, "beacon:4", rows=4), Sampling(max_new_tokens=21, stop_ids=())
    engine.keeps_state = True
    engine.generate(prompts_of(9, 9, 9, 9), 1, sampling)
    cache, state = engine.cache, engine.state
    with torch.no_grad(), use_attention(model, "slots"):
        decoder = engine.decoder(sampling)
        state.begin(21, cache.capacity)
        for _ in range(12):
            fill(state, cache.capacity - 1)
            decoder.run(4, 1, cache.capacity)
            assert (state.count == 1).all() and (state.used == cache.capacity).all() and (state.chunks.open == 1).all()
            assert not state.chunks.ends.any() and state.logprobs[:, 0].isfinite().all()
