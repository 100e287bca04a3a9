"""Budgets that differ by layer: what layers hold, replay, gradients, memory, conversations; equal ones are as none."""

import copy

import pytest
import torch

from sparse_rl import Engine, Sampling, SparseRLError, token_logprobs
from sparse_rl.cache import SlotFormat
from sparse_rl.compressors import make
from sparse_rl.compressors.learned import fresh
from sparse_rl.kernels import ops
from sparse_rl.learn.batch import collate, seen_by
from sparse_rl.learn.calibrate import calibrate
from sparse_rl.learn.score import batch_logprobs
from sparse_rl.models import companions_of, set_companion
from tests.helpers.compressors import EVICTING
from tests.helpers.decoding import fuse_everywhere, same
from tests.helpers.explicit import explicit_logprobs
from tests.helpers.hybrids import hybrid
from tests.helpers.models import prompts_of, tiny
from tests.survey import tiny_model

BUDGET, INTERVAL = 13, 4
LAYERS = {"llama": [9, 20, 10], "qwen2-sliding": [18, 9, 12], "qwen3": [9, 15, 15], "gemma3": [10, 10, 19]}


def rollouts(model, compressor="rkv", layers=(9, 20, 10), lengths=(5, 16, 40, 13), new=30, rows=4, **options):
    """With prompts that fit, that fill a small layer, and that no layer can hold."""
    poll = options.pop("poll", None)
    made = make(compressor, layer_budgets=list(layers), **options)
    engine = Engine(model, made, BUDGET, INTERVAL, rows=rows, poll=poll)
    trajectories = engine.generate(prompts_of(*lengths, seed=3), 2, Sampling(new, stop_ids=()), seed=1)
    plan = engine.plan(max(lengths), new)
    assert (plan.cache_bytes, plan.scratch_bytes) == (engine.cache.nbytes, engine.scratch.nbytes)
    return trajectories


def check(model, trajectories, within=1e-4):
    for t in trajectories:
        with torch.no_grad():
            found = token_logprobs(model, t.tokens, t.trace)
        assert (found - t.sampler_logprobs)[t.num_prompt_tokens :].abs().max() < within


def held(trajectory):
    """How many tokens each query sees beside its own, by layer and head. [L, H, T]"""
    gone, index = trajectory.trace.evicted_at.long(), torch.arange(len(trajectory.tokens))
    return ((index < index[:, None]) & (index[:, None] < gone[..., None, :])).sum(-1)


# -------------------------------------------------------------------------------------------------------------- replay


@pytest.mark.parametrize("architecture", ["llama", "qwen2-sliding", "qwen3"])
@pytest.mark.parametrize("compressor", [*EVICTING, "prompt-only:rkv"])
def test_every_compressor_is_replayed(compressor, architecture):
    model = tiny(architecture)
    check(model, rollouts(model, compressor, LAYERS[architecture]))


def test_compressors_that_know_a_model_are_replayed():
    model = copy.deepcopy(tiny("llama"))
    set_companion(model, "learned", fresh(model))
    calibrate(model, prompts_of(60, seed=8))
    for name in ("learned", "triattention"):
        check(model, rollouts(model, name, window=2 if name == "learned" else None))
    companions_of(model).clear()


def test_other_models_are_replayed():
    """Sliding windows in some layers; recurrent layers, of which none counts; slots that layers share."""
    check(tiny("gemma3"), rollouts(tiny("gemma3"), "snapkv", LAYERS["gemma3"]))
    falcon = hybrid("falcon_h1")
    check(falcon, rollouts(falcon, "rkv"))
    shared = tiny_model("gemma3n_text")
    check(shared, rollouts(shared, "rkv", [9, 17]))


@pytest.mark.parametrize(
    "options", [{"prompt_chunk": 7}, {"protect_prompt": True}, {"slots": "int8", "slots_kept": [1]}]
)
def test_options_are_replayed(options):
    model = copy.deepcopy(tiny("llama")).double()
    lengths = (3, 5, 6) if "protect_prompt" in options else (5, 16, 40)
    trajectories = rollouts(model, "snapkv", [12, 15, 12], lengths, window=2, **options)
    check(model, trajectories)
    assert trajectories[0].trace.slots == (SlotFormat("int8", (1,)) if "slots" in options else None)


def test_packed_rows_are_replayed():
    model = tiny("llama")
    sampled = collate(rollouts(model, lengths=(9, 10)))
    seen = seen_by(model, sampled, torch.arange(4), True, True)
    assert seen.packing is not None
    with torch.no_grad():
        found = batch_logprobs(model, sampled.tokens, sampled.mask, 1.0, seen)
    assert (found - sampled.sampler_logprobs)[sampled.mask].abs().max() < 1e-4


def test_gradients_are_those_of_evictions_written_out():
    model = copy.deepcopy(tiny("qwen3")).double()
    other = copy.deepcopy(model)
    t = rollouts(model, "rkv", LAYERS["qwen3"])[-1]
    mine = token_logprobs(model, t.tokens, t.trace)[t.num_prompt_tokens :].double()
    theirs = explicit_logprobs(other, t, [0, 1, 2])
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-5)
    weights = torch.randn(len(mine), generator=torch.Generator().manual_seed(0)).double()
    (mine * weights).sum().backward()
    (theirs * weights).sum().backward()
    for (name, here), there in zip(model.named_parameters(), other.parameters(), strict=True):
        scale = max(1.0, there.grad.abs().max().item())
        torch.testing.assert_close(here.grad, there.grad, rtol=1e-5, atol=1e-5 * scale, msg=name)
    assert any(p.grad.any() for p in model.parameters())


# ------------------------------------------------------------------------------------------------------ what rows hold


@pytest.mark.parametrize("prompt", [5, 16, 40])
def test_layers_hold_what_the_formula_says(prompt):
    """All layers are evicted at the same moments; each keeps its budget, or all that it has."""
    layers = [9, 20, 10]
    for t in rollouts(tiny("llama"), "rkv", layers, lengths=(prompt,)):
        expected, used = [list(map(float, range(prompt))) for _ in layers], [prompt] * 3
        if prompt >= min(layers) + INTERVAL:
            used = [min(n, budget) for n, budget in zip(used, layers, strict=True)]
        for _ in range(prompt, len(t.tokens)):
            if min(used) == min(layers) + INTERVAL:
                used = [min(n, budget) for n, budget in zip(used, layers, strict=True)]
            for seen, n in zip(expected, used, strict=True):
                seen.append(n)
            used = [n + 1 for n in used]
        found = held(t)[..., prompt:]
        for layer in range(3):
            assert all(head.tolist() == expected[layer][prompt:] for head in found[layer])
        assert found.amax((1, 2)).tolist() == [n + INTERVAL - 1 for n in layers]


def test_memory_is_that_of_equal_budgets():
    model = tiny("llama")
    unequal = Engine(model, make("rkv", layer_budgets=[9, 20, 10]), BUDGET, INTERVAL, rows=4)
    equal = Engine(model, "rkv", BUDGET, INTERVAL, rows=4)
    assert unequal.cache.capacities == [13, 24, 14] and unequal.cache.nbytes == equal.cache.nbytes
    assert unequal.plan(40, 30).cache_bytes == equal.plan(40, 30).cache_bytes
    assert "budget 13 (9 to 20 by layer) + interval 4 = 17 slots" in unequal.plan(40, 30).text()
    assert "prompt evicted to 13 (9 to 20 by layer), response whole" in (
        make("prompt-only:rkv", layer_budgets=[9, 20, 10]).bind(13, 4).rule()
    )


@pytest.mark.parametrize("compressor", ["rkv", "h2o", "vase", "prompt-only"])
def test_equal_ones_are_the_same_bits_as_none(compressor):
    model = tiny("llama")
    for a, b in zip(rollouts(model, compressor, [13, 13, 13]), rollouts(model, compressor, []), strict=True):
        assert a.tokens.equal(b.tokens) and a.sampler_logprobs.equal(b.sampler_logprobs)
        assert a.trace.evicted_at.equal(b.trace.evicted_at)


def test_company_and_rounds_of_many_steps_do_not_matter():
    model = tiny("llama")
    expected = rollouts(model)
    same(rollouts(model, rows=2), expected)
    same(rollouts(model, rows=3, poll=(3, 7)), expected)


# ------------------------------------------------------------------------------------------------------------- kernels


def test_the_fused_forward_is_the_modules_forward(monkeypatch):
    expected = rollouts(tiny("qwen3"))
    taken = fuse_everywhere(monkeypatch)
    same(rollouts(copy.deepcopy(tiny("qwen3")), poll=(2, 5)), expected)
    assert taken == [True]


def test_kernels_decode_and_evict_them(monkeypatch):
    """The Triton kernels themselves, in the interpreter where there is no GPU."""
    pytest.importorskip("triton")
    from sparse_rl.kernels import decode, evict

    calls = []
    expected = rollouts(tiny("llama"), "snapkv", lengths=(5,), new=12)
    fuse_everywhere(monkeypatch)
    monkeypatch.setattr(
        ops, "store_and_attend", lambda *a, **k: calls.append(a[3].keys) or decode.store_and_attend(*a, **k)
    )
    monkeypatch.setattr(ops, "compact", lambda *a, **k: calls.append(a[0]) or evict.compact(*a, **k))
    same(rollouts(copy.deepcopy(tiny("llama")), "snapkv", lengths=(5,), new=12, poll=(2, 5)), expected)
    assert {keys.shape[-2] for keys in calls if keys.dim() == 4} == {13, 24, 14}
    assert {keys.shape[-2] for keys in calls if keys.dim() == 5} >= {13, 14}


# ------------------------------------------------------------------------------------------------------- conversations


def converse(model, compressor, **options):
    """A conversation of several turns. -> its trajectory"""
    engine = Engine(model, make(compressor, layer_budgets=[9, 20, 10]), BUDGET, INTERVAL, rows=2)
    with engine.open(64, 300, **options) as live:
        assert engine.storage.live_plan(64, 300).cache_bytes == engine.cache.nbytes
        assert engine.storage.live_plan(64, 300).scratch_bytes == engine.scratch.nbytes
        chat = live.submit(prompts_of(11)[0], Sampling(6, stop_ids=()), 5)
        live.run()
        for turn, length in enumerate((2, 9, 40, 1, 17)):
            places = (chat.row is not None, chat.parked is not None, chat.trace is not None)
            assert places == (options.get("hold") is None, options.get("park") == 9, options.get("park") == 0)
            live.extend(chat, prompts_of(length, seed=turn)[0], Sampling(4 + turn, stop_ids=()))
            live.run()
        return live.release(chat)


@pytest.mark.parametrize("compressor", ["rkv", "h2o", "prompt-only:rkv"])
def test_conversations_are_held_parked_and_read_again(compressor):
    model = tiny("llama")
    held, parked = converse(model, compressor), converse(model, compressor, hold=0, park=9)
    assert held.tokens.equal(parked.tokens) and held.sampler_logprobs.equal(parked.sampler_logprobs)
    assert held.trace.evicted_at.equal(parked.trace.evicted_at)
    with torch.no_grad():
        found = token_logprobs(model, held.tokens, held.trace)
    assert (found - held.sampler_logprobs)[held.response_mask].abs().max() < 1e-4
    again = converse(model, compressor, hold=0, park=0)
    assert again.tokens.equal(held.tokens) and again.trace.evicted_at.equal(held.trace.evicted_at)


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    "layers, why",
    [
        ([9, 20, 9], "keep 12.6667 slots on average, but the budget is 13; their sum must be 3 x 13 = 39, not 38"),
        ([13, 13], "layer_budgets has 2 numbers, but 3 layers of llama have slots"),
        ([0, 20, 19], "layer_budgets has 0; every layer keeps a whole number of slots, at least 1"),
        ([8.0, 20, 11], "layer_budgets has 8.0"),
        ([8, 20, 11], "budget 8 must be above sinks 0 \\+ window 8"),
        ("13", "it must be a list with a number of slots for each layer"),
    ],
)
def test_budgets_that_make_no_sense_are_refused(layers, why):
    with pytest.raises(SparseRLError, match=why):
        Engine(tiny("llama"), make("snapkv", layer_budgets=layers), BUDGET, INTERVAL)


def test_what_has_no_budget_and_budgets_that_move_are_refused():
    for name in ("dense", "beacon:4"):
        with pytest.raises(SparseRLError, match="has no budget, so layer_budgets have no meaning"):
            make(name, layer_budgets=[9, 20, 10])
    engine = Engine(tiny("llama"), make("rkv", layer_budgets=[9, 20, 10]), BUDGET, INTERVAL)
    with pytest.raises(SparseRLError, match="keep 13 slots on average, but the budget is 12"):
        engine.set_budget(12)
    protects = make("window", layer_budgets=[9, 20, 10])
    assert protects.least_budget == 9
    engine = Engine(tiny("llama"), make("rkv", layer_budgets=[9, 20, 10], protect_prompt=True), BUDGET, INTERVAL)
    with pytest.raises(SparseRLError, match="leave nothing of budget 9"):
        engine.generate(prompts_of(9))
