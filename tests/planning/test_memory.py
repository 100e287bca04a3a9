"""The memory plan: exactly what an engine allocates, and the largest setting that fits."""

import copy
import re

import pytest
import torch

from sparse_rl import Engine, Sampling
from sparse_rl.beacon import add_beacon
from sparse_rl.compressors import make
from sparse_rl.models import ModelShape, shape_config
from sparse_rl.planning.memory import Plan, make_plan
from tests.helpers.models import prompts_of, tiny

OPTIONS = {"beacon": {"chunk": 4}, "threshold": {"chunk": 16, "threshold": 1.0}}
SHAPE = ModelShape.of(shape_config("qwen2.5-1.5b"))


@pytest.mark.parametrize("name", ["dense", "rkv", "prompt-only", "h2o"])
def test_the_plan_is_what_an_engine_allocates(name):
    engine = Engine(tiny("llama"), name, budget=16, interval=8, rows=3)
    engine.reserve(11, 37)
    plan = engine.plan(11, 37)
    assert plan.cache_bytes == engine.cache.nbytes and plan.scratch_bytes == engine.scratch.nbytes
    assert plan.record_bytes == sum(t.nbytes for t in (engine.state.tokens, engine.state.logprobs, engine.state.trace))
    assert plan.chunk_row_bytes == 0 and not plan.folds


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("options", list(OPTIONS.values()), ids=list(OPTIONS))
def test_the_plan_of_beacons_is_what_an_engine_allocates(name, options):
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


def plan_of(rows: int, budget: int, prompt: int = 256, new: int = 4096, compressor: str = "rkv") -> Plan:
    """A rollout of qwen2.5-1.5b."""
    bound = make(compressor).bind(budget, 128)
    return make_plan(SHAPE, bound, rows=rows, prompt_tokens=prompt, new_tokens=new, weight_bytes=3 * 2**30)


def test_the_rows_that_fit_are_the_most():
    memory = 40 * 2**30
    fits = plan_of(1, 512).rows_that_fit(memory)
    assert plan_of(fits, 512).total_bytes <= memory * 0.95 < plan_of(fits + 1, 512).total_bytes
    assert plan_of(1, 1024).rows_that_fit(memory) < fits


def test_short_responses_need_little():
    assert plan_of(64, 512, prompt=1, new=100).rows_that_fit(8 * 2**30) > 50


def test_dense_rows_are_counted_as_a_dense_cache_has_them():
    memory = 40 * 2**30
    dense, h2o = (plan_of(8, 512, prompt=9000, new=100, compressor=name) for name in ("dense", "h2o"))
    # our dense rows hold feed indices and traces too
    assert h2o.dense_rows_that_fit(memory) == pytest.approx(dense.rows_that_fit(memory), rel=0.02)


def test_the_largest_setting_that_fits_is_named():
    memory = 40 * 2**30
    sentence = plan_of(1, 10**8).largest_that_fits(memory)
    budget = int(sentence.rsplit("use budget=", 1)[1].rstrip("."))
    assert plan_of(1, budget).rows_that_fit(memory) == 1 and plan_of(1, budget + 1).rows_that_fit(memory) == 0
    assert "smaller model" in plan_of(1, 512).largest_that_fits(2**30)


def test_the_largest_that_fits_speaks_of_no_budget_where_chunks_are_folded():
    memory = 8 * 2**30
    plan = plan_of(1, 512, prompt=100, new=10**8, compressor="beacon:16")
    sentence = plan.largest_that_fits(memory)
    assert "budget" not in sentence and "generate less, or fold more tokens into a beacon" in sentence
    found = re.search(r"room for (\d+) of (\d+) slots", sentence)
    assert found is not None
    assert 100 < int(found[1]) < int(found[2]) == plan.capacity
    shorter = plan_of(1, 512, prompt=100, new=10**6, compressor="beacon:16")
    assert shorter.largest_that_fits(memory).startswith("At this capacity use rows=")
    assert "smaller model" in plan_of(1, 512, prompt=100, new=100, compressor="beacon:16").largest_that_fits(2**30)


def test_saved_bytes_are_measured_against_rows_without_beacons():
    model = add_beacon(copy.deepcopy(tiny("llama")))
    engine = Engine(model, "beacon:2", rows=1)
    trajectories = engine.generate(prompts_of(5), 1, Sampling(max_new_tokens=40, stop_ids=()))
    allocated = engine.cache.nbytes + engine.scratch.nbytes
    assert engine.kv_bytes_saved(trajectories) == 1 - allocated / (45 * engine.cache.shape.kv_bytes_per_token)
