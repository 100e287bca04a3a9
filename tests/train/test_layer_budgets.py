"""`rollout.layer_budgets` through the commands, and `sparse-rl allocate`, which chooses them."""

import itertools
import json
from dataclasses import replace

import pytest
import torch

from sparse_rl import Engine, Sampling, SparseRLError, regret, token_logprobs
from sparse_rl.cli import inherit
from sparse_rl.compressors import make
from sparse_rl.learn.diagnose import gap_since_eviction
from sparse_rl.learn.score import hidden_states, replay_of
from sparse_rl.models import load_model, read_record
from sparse_rl.records import kv_tokens_saved, mean_entries, read_trajectories
from sparse_rl.rollout.text import generate
from sparse_rl.train.allocate import Choices, allocate, choose_budgets, costs, curve_at, envelope, grid_of
from sparse_rl.train.merge import first_head_trace
from sparse_rl.train.run import plan_run, train
from tests.helpers.models import prompts_of, tiny
from tests.helpers.runs import recipe, run

LAYERS = [41, 45, 40]  # of 42 each: the prompt is protected
KEYS = {
    "rollout": {"layer_budgets": LAYERS, "max_new_tokens": 40, "prompts": 2, "rows": 8},
    "learn": {"method": "shadow", "minibatches": 1},
    "eval": {"every": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layer-budgets")
    trainer = train(recipe(**KEYS, run={"steps": 2}), folder / "parts", show=False)
    engine = trainer.sampler.engine
    assert engine.cache.capacities == [n + 4 for n in LAYERS]
    assert plan_run(recipe(**KEYS), 40).rollout.cache_bytes == engine.cache.nbytes
    return folder


def test_a_run_is_replayed_and_resumes_to_the_byte(folder):
    train(recipe(**KEYS, run={"steps": 3}), folder / "parts", resume=True, show=False)
    train(recipe(**KEYS, run={"steps": 3}), folder / "whole", show=False)
    lines = (folder / "whole" / "metrics.jsonl").read_bytes()
    assert (folder / "parts" / "metrics.jsonl").read_bytes() == lines
    first = json.loads(lines.splitlines()[0])
    assert first["gap/abs/mean"] < 1e-5, first


def test_commands_inherit_them_with_their_budget(folder):
    trained = inherit.Trained.of(str(folder / "parts"))
    asked = {"compressor": None, "budget": None, "interval": None}
    cache, taken = inherit.cache_of(trained, asked, {}, "rkv", False)
    assert (cache.budget, cache.options["layer_budgets"]) == (42, LAYERS) and taken["layer_budgets"] == LAYERS
    other, _ = inherit.cache_of(trained, {**asked, "compressor": "snapkv"}, {}, "rkv", False)
    assert other.options["layer_budgets"] == LAYERS
    smaller, _ = inherit.cache_of(trained, {**asked, "budget": 38}, {}, "rkv", False)
    assert "layer_budgets" not in smaller.options
    assert inherit.options_for("dense", trained.record) == {}
    caches, _ = inherit.caches_of([trained], ["dense", "rkv"], [38, 42], None, {}, False)
    assert [c.options.get("layer_budgets") for c in caches] == [None, None, LAYERS]
    model, tokenizer = load_model(trained.model)
    said = [generate(model, tokenizer, ["3 5 2 ="], max_new_tokens=4, budget=budget) for budget in (None, 38)]
    assert all(said)


@pytest.mark.parametrize("layers", [[16, 26, 18], [26, 16, 18], [20, 20, 20]])
def test_what_processes_tell_each_other_is_enough_for_the_metrics(layers):
    """Layer 0 may be one that evicts later than others."""
    engine = Engine(tiny("llama"), make("rkv", layer_budgets=layers), 20, 4, rows=2)
    done = engine.generate(prompts_of(9, seed=2), 2, Sampling(30, stop_ids=()))
    told = [replace(t, trace=first_head_trace(t.trace)) for t in done]
    assert told[0].trace.evicted_at.shape[:2] == ((1, 1) if len(set(layers)) == 1 else (3, 1))
    assert kv_tokens_saved(told) == pytest.approx(kv_tokens_saved(done), rel=1e-12)
    assert mean_entries(told[0]) == pytest.approx(mean_entries(done[0]), rel=1e-12)
    gap, mask = torch.rand(2, 39), torch.arange(39).expand(2, -1) >= 9
    found = gap_since_eviction(gap, mask, done, 4)
    assert found == gap_since_eviction(gap, mask, told, 4)
    first = min(layers) + 4  # the first query after an eviction
    before = gap[:, 9 : first + 1].double().mean().item()
    assert found["gap/abs/before_eviction"] == pytest.approx(before, rel=1e-6)


def test_mistakes_get_a_sentence():
    with pytest.raises(SparseRLError, match=r"keep 41 slots on average, but rollout.budget is 42; their sum must be"):
        recipe(rollout={"layer_budgets": [41, 41, 41]})
    with pytest.raises(SparseRLError, match=r"rollout.layer_budgets\[1\]"):
        recipe(rollout={"layer_budgets": [41, 0, 85]})
    with pytest.raises(SparseRLError, match=r"are fixed, but rollout\.budget moves between 30 and 42; give a number"):
        budget = {"min": 30, "max": 42, "target": {"alpha_5": 0.9}}
        recipe(rollout={"layer_budgets": LAYERS, "budget": budget}, run={"diagnose": 2})
    with pytest.raises(SparseRLError, match=r"write rollout\.layer_budgets instead"):
        recipe(rollout={"compressor_options": {"layer_budgets": LAYERS}})
    with pytest.raises(SparseRLError, match="layer_budgets has 2 numbers, but 3 layers"):
        plan_run(recipe(rollout={"layer_budgets": [41, 43]}), 40)


# ------------------------------------------------------------------------------------------------------------ allocate


@pytest.mark.parametrize("seed", range(5))
def test_slots_given_one_by_one_are_the_best_of_all_choices(seed):
    """On convex costs; by trying everything."""
    g = torch.Generator().manual_seed(seed)
    budgets = list(range(2, 11))
    drops = torch.rand(3, 8, generator=g).sort(-1, descending=True).values
    cost = torch.cat([drops.sum(-1, keepdim=True), drops.sum(-1, keepdim=True) - drops.cumsum(-1)], -1)
    chosen = allocate(cost, budgets, 5)
    price = lambda layers: sum(cost[i, n - 2].item() for i, n in enumerate(layers))  # noqa: E731
    every = [layers for layers in itertools.product(budgets, repeat=3) if sum(layers) == 15]
    assert sum(chosen) == 15 and price(chosen) == pytest.approx(min(map(price, every)))


def test_envelopes_are_convex_and_below():
    budgets, cost = [4, 6, 8, 12, 16], [9.0, 9.5, 3.0, 4.0, 0.0]
    corners = envelope(budgets, cost)
    assert corners == [(4, 9.0), (8, 3.0), (16, 0.0)]
    assert [curve_at(corners, x) for x in (4, 6, 8, 10, 20)] == [9.0, 6.0, 3.0, 2.25, 0.0]
    assert allocate(torch.tensor([cost, cost]), budgets, 6) == [6, 6]  # of equal gains, to the smaller one
    assert allocate(torch.tensor([cost, [1.01 * y for y in cost]]), budgets, 6) == [4, 8]
    assert allocate(torch.tensor([[2.0, 0.0], [1.0, 0.0]]), [4, 12], 8, step=3) == [12, 4]
    assert grid_of(20, 10) == [10, 12, 14, 16, 18, 20, 23, 26, 30, 35, 40]
    with pytest.raises(SparseRLError, match="least is 21, but the budget is 20"):
        grid_of(20, 21)


@pytest.fixture(scope="module")
def dense():
    engine = Engine(tiny("llama"), "dense", rows=4)
    return engine.generate(prompts_of(9, 30, seed=2), 2, Sampling(40, stop_ids=()), seed=4)


def watched(model, t, bound, stream=0):
    """What layers evict on a rollout."""
    replay = replay_of(model, [(t.tokens, t.trace)])
    replay.observe = watch = Choices(t, bound, stream)
    with torch.no_grad():
        hidden_states(model, t.tokens[None], replay)
    return watch


@pytest.mark.parametrize("compressor", ["rkv", "h2o", "random", "window", "prompt-only:snapkv"])
def test_mass_is_the_attention_that_is_lost_under_the_chosen_trace(compressor, dense):
    """`regret` of the trace in which every layer evicts at this budget says the same."""
    model, budgets = tiny("llama"), [12, 18, 26]
    bound = Engine(model, compressor, 18, 4, rows=2).compressor
    cost = costs(model, dense, bound, budgets, "mass")
    assert cost.shape == (3, 3) and (cost[:, 0] > cost[:, 2]).all()
    found = []
    for number, t in enumerate(dense):
        watch = watched(model, t, [bound.bind(n, 4) for n in budgets], number)
        rows = []
        for gone in watch.evicted_at:
            evicted_at = torch.where(gone < len(t.tokens), gone, t.trace.evicted_at.long()).to(torch.uint16)
            r = regret(model, t.tokens, replace(t.trace, evicted_at=evicted_at), "dense")
            rows.append((r.mass.sum(-1) / (len(t.tokens) - 1)).mean(-1))
        found.append(torch.stack(rows, 1))
    torch.testing.assert_close(cost, torch.stack(found).mean(0).double(), atol=1e-5, rtol=1e-4)


def test_nats_are_what_tokens_lose_when_one_layer_is_evicted(dense):
    model = tiny("llama")
    bound = Engine(model, "knorm", 18, 4, rows=2).compressor
    cost = costs(model, dense[:1], bound, [12, 18], "nats")
    t = dense[0]
    watch = watched(model, t, [bound.bind(n, 4) for n in (12, 18)])
    with torch.no_grad():
        own = t.trace.evicted_at.clone()
        gone = watch.evicted_at[1, 2]
        own[2] = torch.where(gone < len(t.tokens), gone, own[2].long()).to(own.dtype)
        change = token_logprobs(model, t.tokens, replace(t.trace, evicted_at=own)) - token_logprobs(model, t.tokens)
    assert cost[2, 1].item() == pytest.approx(-change[t.num_prompt_tokens :].mean().item(), abs=1e-5)


def test_what_is_chosen_offline_is_what_an_engine_evicts():
    """With the keys of the run itself."""
    model = tiny("llama")
    engine = Engine(model, "knorm", 18, 4, rows=2)
    t = engine.generate(prompts_of(9, seed=2), 1, Sampling(20, stop_ids=()), seed=4)[0]
    watch = watched(model, t, [engine.compressor])
    recorded = t.trace.evicted_at.long()
    assert (recorded == 22).any() and (recorded == 26).any()
    assert watch.evicted_at[0].equal(recorded.clamp(max=len(t.tokens)))


def test_choices_have_the_sum_and_the_least(dense):
    model = tiny("llama")
    for name, measure, least in (("rkv", "nats", None), ("snapkv", "mass", 13)):
        bound = Engine(model, name, 20, 4, rows=2).compressor
        found = choose_budgets(model, dense, bound, measure, least, step=2)
        assert sum(found.layers) == 60 and min(found.layers) >= (least or 10)
        assert found.cost <= found.equal + 1e-9
        again = Engine(model, make(name, layer_budgets=found.layers), 20, 4, rows=4)
        again.generate(prompts_of(30), 2, Sampling(30, stop_ids=()))
    with pytest.raises(SparseRLError, match="it must be one of mass, nats"):
        choose_budgets(model, dense, bound, "luck")
    with pytest.raises(SparseRLError, match="evictions cost nothing in 4 rollouts, even with a budget of 100"):
        choose_budgets(model, dense, Engine(model, "rkv", 200, 4, rows=1).compressor)


def test_the_command_writes_what_others_use(tmp_path):
    out = tmp_path / "model"
    few = ["--budget", 30, "--interval", 4, "--trajectories", 4, "--max-new-tokens", 48, "--compressor", "snapkv"]
    done = run("allocate", "tiny-sums", "--task", "sums", *few, "--out", out, "--compressor.window", 4)
    assert done.returncode == 0, done.stderr
    assert "4 dense rollouts: snapkv at budget 30, interval 4 costs" in done.stdout
    record = read_record(str(out))
    layers = record.options["layer_budgets"]
    assert record.budget == 30 and sum(layers) == 90 and record.options["window"] == 4
    assert f"layer_budgets: {layers}" in done.stdout
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "3 5 2 ="}\n')
    done = run("rollout", out, "--prompts", prompts, "--out", tmp_path / "out", "--max-new-tokens", 60)
    assert done.returncode == 0 and "layer budgets" in done.stderr, done.stderr
    assert len(list(read_trajectories(tmp_path / "out"))) == 1
    done = run("allocate", "tiny-sums", "--budget", 30)
    assert (
        done.returncode == 1 and "give the prompts to measure on: either --task NAME or --prompts FILE" in done.stderr
    )
