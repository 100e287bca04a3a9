"""Decode steps: the fused forward is the modules' forward, rounds of many steps are steps, prompts prefilled together are prompts."""

import copy

import pytest
import torch
from conftest import ARCHITECTURES, prompts_of, tiny

from sparse_rl import COMPRESSORS, Engine, Sampling, token_logprobs
from sparse_rl.rollout import capture
from sparse_rl.rollout.fused import FusedForward, side_by_side

FUSED = {"qwen2": {}, "qwen3": {}, "llama": {}, "mistral": {"sliding_window": None}}


def fuse_everywhere(monkeypatch):
    """On the CPU too, where the kernels' twins run. Returns a list of what was decided."""
    taken = []
    fits = FusedForward.fits
    monkeypatch.setattr(capture, "fusing_pays", lambda device: True)
    monkeypatch.setattr(FusedForward, "fits", staticmethod(lambda *a: taken.append(fits(*a)) or taken[-1]))
    return taken


def same(mine, theirs, tolerance=1e-5):
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert torch.equal(a.trace.evicted_at, b.trace.evicted_at)
        assert (a.sampler_logprobs - b.sampler_logprobs).abs().max() < tolerance
        assert (a.finish_reason, a.prompt_index, a.sample_index) == (b.finish_reason, b.prompt_index, b.sample_index)


def rollout(model, compressor="rkv", prompts=(5, 40, 17, 9), group=2, new=60, stop_ids=(3,), rows=4, **options):
    engine = Engine(model, compressor=compressor, budget=20, interval=12, rows=rows, **options)
    return engine.generate(prompts_of(*prompts), group, Sampling(new, stop_ids=stop_ids))


@pytest.mark.parametrize("name", list(FUSED))
@pytest.mark.parametrize("compressor", ["rkv", "window", "dense"])
def test_the_fused_forward_is_the_modules_forward(name, compressor, monkeypatch):
    model = tiny(name, **FUSED[name])
    expected = rollout(model, compressor)
    taken = fuse_everywhere(monkeypatch)
    same(rollout(copy.deepcopy(model), compressor, poll=(2, 5)), expected)
    assert taken == [True]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_only_architectures_it_is_right_for_are_fused(name):
    engine = Engine(tiny(name), budget=20, interval=12, rows=2)
    assert FusedForward.fits(engine.model, engine.cache) == (name in ("qwen2", "qwen3", "llama"))


def test_what_is_no_plain_linear_layer_is_not_fused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(copy.deepcopy(tiny("llama")), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    engine = Engine(model, budget=20, interval=12, rows=2)
    assert not FusedForward.fits(model, engine.cache)
    assert not FusedForward.fits(model.base_model.model, engine.cache)
    hooked = copy.deepcopy(tiny("llama"))
    hooked.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert not FusedForward.fits(hooked, engine.cache)
    h2o = Engine(tiny("llama"), compressor="h2o", budget=20, interval=12, rows=2)
    assert not FusedForward.fits(h2o.model, h2o.cache)


def test_weights_laid_side_by_side_stay_the_models_own(tmp_path):
    from transformers import AutoModelForCausalLM

    model = copy.deepcopy(tiny("qwen2"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    parameters = [id(p) for p in model.parameters()]
    attention = model.model.layers[0].self_attn
    product = side_by_side(attention.q_proj, attention.k_proj, attention.v_proj)
    again = side_by_side(attention.q_proj, attention.k_proj, attention.v_proj)
    assert again.weight.data_ptr() == product.weight.data_ptr() == attention.q_proj.weight.data_ptr()
    assert again.bias.data_ptr() == attention.q_proj.bias.data_ptr()
    assert [id(p) for p in model.parameters()] == parameters
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with torch.no_grad():
        attention.k_proj.weight.add_(1.0)  # an update in place is seen
    heads = slice(attention.q_proj.out_features, attention.q_proj.out_features + attention.k_proj.out_features)
    assert torch.equal(product.weight[heads], attention.k_proj.weight)
    x = torch.randn(3, 32)
    torch.testing.assert_close(product(x).split([32, 16, 16], -1)[1], attention.k_proj(x))
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, loaded.state_dict()[name]) for name, p in model.state_dict().items())


def test_after_an_update_the_fused_forward_uses_the_new_weights(monkeypatch):
    fuse_everywhere(monkeypatch)
    model = copy.deepcopy(tiny("llama"))
    engine = Engine(model, budget=20, interval=12, rows=4, poll=(2, 5))
    old = engine.generate(prompts_of(9), sampling=Sampling(30))[0]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.2)
    new = engine.generate(prompts_of(9), sampling=Sampling(30))[0]
    assert new.tokens.tolist() != old.tokens.tolist()
    with torch.no_grad():
        gap = token_logprobs(model, new.tokens, new.trace) - new.sampler_logprobs
    assert gap[9:].abs().max() < 1e-4


def test_moved_weights_are_noticed():
    model = copy.deepcopy(tiny("llama"))
    at = capture.addresses(model)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    assert capture.addresses(model) == at
    model.lm_head.weight.data = model.lm_head.weight.data.clone()
    assert capture.addresses(model) != at


def test_switched_adapters_are_noticed():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(copy.deepcopy(tiny("llama")), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"))
    at = capture.addresses(model)
    with model.disable_adapter():
        assert capture.addresses(model) != at
    assert capture.addresses(model) == at


@pytest.mark.parametrize("compressor", list(COMPRESSORS))
@pytest.mark.parametrize("poll", [(3, 3), (5, 40)])
def test_rounds_of_many_steps_change_nothing(compressor, poll):
    """Rows that fill up within a round wait for its end; what they sample is the same to the bit."""
    model = tiny("llama")
    same(rollout(model, compressor, poll=poll), rollout(model, compressor), tolerance=1e-9)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_rounds_with_sliding_windows(architecture):
    model = tiny(architecture)
    same(rollout(model, poll=(4, 9)), rollout(model), tolerance=1e-9)


@pytest.mark.parametrize("compressor", list(COMPRESSORS))
@pytest.mark.parametrize("chunk", [512, 30])
def test_prompts_prefilled_together_are_prompts(compressor, chunk):
    """Shorter prompts are padded; some are compressed at once, some end in an earlier chunk than others."""
    model = tiny("qwen3")
    lengths = (5, 40, 17, 64, 31, 33, 1)
    together = rollout(model, compressor, lengths, prefill_rows=4, prefill_chunk=chunk)
    if compressor == "knorm":  # layer 0 has exact ties, which rounding decides
        assert [len(t.tokens) for t in together] == [len(t.tokens) for t in rollout(model, compressor, lengths)]
    else:
        same(together, rollout(model, compressor, lengths), tolerance=1e-4)
    for t in together:
        with torch.no_grad():
            gap = token_logprobs(model, t.tokens, t.trace) - t.sampler_logprobs
        assert gap[t.num_prompt_tokens :].abs().max() < 1e-4


def test_where_the_time_went():
    engine = Engine(tiny("llama"), budget=20, interval=12, rows=2)
    engine.generate(prompts_of(5, 9), sampling=Sampling(50))
    assert engine.steps == 49
    spent = engine.seconds
    assert set(spent) == {"prefill", "decode", "evict", "collect", "trace", "host", "total"}
    assert all(value >= 0 for value in spent.values())
    assert sum(v for k, v in spent.items() if k != "total") == pytest.approx(spent["total"])
