"""Decode steps: the fused forward is the modules' forward; rounds of many steps, and joint prefill, change nothing."""

import copy

import pytest
import torch

from sparse_rl import Engine, Sampling, SparseRLError, token_logprobs
from sparse_rl.rollout import capture
from sparse_rl.rollout.fused import FusedForward, side_by_side
from tests.helpers.compressors import EVICTING, STANDALONE
from tests.helpers.decoding import FAMILY, change_rules, fuse_everywhere, same
from tests.helpers.models import ARCHITECTURES, prompts_of, tiny

FUSED = {
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "llama": ("llama", {}),
    "llama-biased": ("llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "llama-yarn": (
        "llama",
        dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)),
    ),
    "mistral": ("mistral", dict(sliding_window=None, head_dim=16)),
    "mixtral": ("mixtral", {}),
    "qwen3-moe": ("qwen3-moe", dict(mlp_only_layers=[1])),  # a dense layer between two with experts
}


def rollout(model, compressor="rkv", prompts=(5, 40, 17, 9), group=2, new=60, stop_ids=(3,), rows=4, **options):
    engine = Engine(model, compressor=compressor, budget=20, interval=12, rows=rows, **options)
    return engine.generate(prompts_of(*prompts), group, Sampling(new, stop_ids=stop_ids))


def _fresh(name, changes):
    """`tiny` keeps models by their changes, which must then be hashable."""
    return tiny.__wrapped__(name, **changes)


@pytest.mark.parametrize("name", list(FUSED))
@pytest.mark.parametrize("compressor", ["rkv", "window", "dense"])
def test_the_fused_forward_is_the_modules_forward(name, compressor, monkeypatch):
    name, changes = FUSED[name]
    model = _fresh(name, changes)
    expected = rollout(model, compressor)
    taken = fuse_everywhere(monkeypatch)
    same(rollout(copy.deepcopy(model), compressor, poll=(2, 5)), expected)
    assert taken == [True]


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_the_fused_forward_records_routes(name, monkeypatch):
    model = copy.deepcopy(tiny(name, num_hidden_layers=2))
    expected = rollout(model, record_routes=True)
    taken = fuse_everywhere(monkeypatch)
    change_rules(monkeypatch, own_experts=(torch.float32,))
    found = rollout(model, poll=(2, 5), record_routes=True)
    same(found, expected)
    assert taken == [True]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.trace.routes is not None and torch.equal(ours.trace.routes, theirs.trace.routes)
        with torch.no_grad():
            gap = (token_logprobs(model, ours.tokens, ours.trace) - ours.sampler_logprobs)[ours.response_mask]
        assert gap.abs().max() < 1e-4


def test_what_was_prepared_is_kept_whatever_is_called_next():
    """Also where routers are hooked to record routes: what a captured step knows of the model has these hooks."""
    engine = Engine(tiny("qwen3-moe"), budget=16, interval=8, rows=2, record_routes=True)
    engine.keeps_state = True  # as where steps are captured
    engine.reserve(20, 20)
    turn, kept = Sampling(4, stop_ids=()), {}
    for _ in range(2):
        with engine.open(8, 20) as live:
            live.submit([5, 6, 7], turn)
            live.run()
        engine.generate([[5, 6, 7]], sampling=turn)
        assert list(engine.stream([5, 6, 7], turn))
        kept = kept or dict(engine.decoders)
    assert len(kept) == 2 and all(engine.decoders[settings] is decoder for settings, decoder in kept.items())


def test_a_sliding_mixture_or_one_whose_router_is_hooked_is_not_fused():
    sliding = tiny("mixtral", sliding_window=24)
    assert not FusedForward.fits(sliding, Engine(sliding, budget=20, interval=12, rows=2).cache)
    model = copy.deepcopy(tiny("qwen3-moe"))
    engine = Engine(model, budget=20, interval=12, rows=2)
    assert FusedForward.fits(model, engine.cache)
    model.model.layers[1].mlp.gate.register_forward_hook(lambda *_: None)
    assert not FusedForward.fits(model, engine.cache)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_only_architectures_it_is_right_for_are_fused(name):
    engine = Engine(tiny(name), budget=20, interval=12, rows=2)
    assert FusedForward.fits(engine.model, engine.cache) == (name in (*FAMILY, "qwen3-moe", "mixtral"))


def _gelu(model):
    model.model.layers[1].mlp.act_fn = torch.nn.GELU()


def _adapters(model):
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(r=2, target_modules=["o_proj"]), model)


def _shared(model):
    model.model.layers[1].self_attn.q_proj.weight = model.model.layers[0].self_attn.q_proj.weight


def _flat_buffer(model):
    weights = [layer.self_attn.k_proj.weight for layer in model.model.layers]
    flat = torch.cat([w.data.flatten() for w in weights])
    for w, part in zip(weights, flat.split([w.numel() for w in weights]), strict=True):
        w.data = part.view_as(w)


CHANGED = {
    "hook on a layer": lambda model: model.model.layers[1].register_forward_hook(lambda *_: None),
    "hook before a projection": lambda model: model.model.layers[0].mlp.up_proj.register_forward_pre_hook(
        lambda *_: None
    ),
    "hook on the head": lambda model: model.lm_head.register_forward_hook(lambda *_: None),
    "hook on the norm": lambda model: model.model.norm.register_forward_hook(lambda *_: None),
    "another forward": lambda model: setattr(model.model.layers[0].mlp.down_proj, "forward", lambda x: x),
    "another activation": _gelu,
    "adapters": _adapters,
    "a class of the same name": lambda model: setattr(model, "__class__", type("LlamaForCausalLM", (type(model),), {})),
    "shared weights": _shared,
    "weights in a flat buffer": _flat_buffer,
}


@pytest.mark.parametrize("change", list(CHANGED))
def test_a_model_that_was_changed_is_not_fused(change):
    if change == "adapters":
        pytest.importorskip("peft")
    model = copy.deepcopy(tiny("llama"))
    engine = Engine(model, budget=20, interval=12, rows=2)
    assert FusedForward.fits(model, engine.cache)
    CHANGED[change](model)
    assert not FusedForward.fits(model, engine.cache)


def test_hooks_of_transformers_own_do_not_keep_a_model_from_being_fused():
    """One looks on when hidden states are asked for, one marks embeddings for gradient checkpointing."""
    model = copy.deepcopy(tiny("llama"))
    model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    assert any(m._forward_hooks for m in model.model.layers)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert model.model.embed_tokens._forward_hooks
    assert FusedForward.fits(model, Engine(model, budget=20, interval=12, rows=2).cache)


@pytest.mark.parametrize(
    "changes", [dict(hidden_act="gelu"), dict(rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0))]
)
def test_a_config_that_computes_something_else_is_not_fused(changes):
    model = _fresh("llama", changes)
    assert not FusedForward.fits(model, Engine(model, budget=20, interval=12, rows=2).cache)


def test_what_only_the_modules_record_is_not_fused():
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


def test_what_a_captured_step_took_for_granted_is_noticed():
    model = copy.deepcopy(tiny("llama"))
    at = capture.addresses(model)
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    model.train()
    assert capture.addresses(model) == at  # an update in place needs no new capture
    for change in (
        lambda: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.clone()),
        lambda: setattr(model.model.layers[1].self_attn, "scaling", 0.5),
        lambda: setattr(model.model.rotary_emb, "attention_scaling", 2.0),
        lambda: model.model.layers[1].register_forward_hook(lambda *_: None),
        lambda: setattr(model.model.norm, "forward", lambda x: x),
    ):
        change()
        assert capture.addresses(model) != at
        at = capture.addresses(model)


def test_switched_scaled_and_merged_adapters_are_noticed():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        copy.deepcopy(tiny("llama")), peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    at = capture.addresses(model)
    with model.disable_adapter():
        assert capture.addresses(model) != at
    assert capture.addresses(model) == at
    adapted = next(m for m in model.modules() if hasattr(m, "scale_layer"))
    adapted.scale_layer(3.0)
    assert capture.addresses(model) != at
    at = capture.addresses(model)
    model.merge_adapter()
    assert capture.addresses(model) != at


def test_one_engine_serves_calls_of_any_size_and_sampling(monkeypatch):
    """As on a GPU, where records and decoders are kept between calls."""
    fuse_everywhere(monkeypatch)
    model = copy.deepcopy(tiny("llama"))
    kept = Engine(model, budget=20, interval=12, rows=4, poll=(2, 5))
    kept.keeps_state = True
    calls = [
        (9, 40, {}),
        (50, 10, {}),
        (9, 20, {"temperature": 0.0}),
        (9, 20, {"top_k": 3}),
        (9, 20, {"top_p": 0.5}),
        (9, 20, {"stop_ids": (3, 5)}),
    ]
    calls += [(9, 25, {"temperature": t}) for t in (0.5, 0.6, 0.7)] + calls[:2] + [(9, 41, {}), (60, 41, {})]
    decoders = []
    for prompt, new, how in calls:
        sampling = Sampling(new, **{"stop_ids": (), **how})
        expected = Engine(model, budget=20, interval=12, rows=4).generate(prompts_of(prompt), 3, sampling)
        same(kept.generate(prompts_of(prompt), 3, sampling), expected)
        assert len(kept.decoders) <= 4
        decoders.append(list(kept.decoders.values())[-1])
    assert decoders[1] is decoders[0]  # a longer prompt needs no new capture, only more room for the trace
    with torch.no_grad():
        model.lm_head.weight.data = model.lm_head.weight.data * 1.5  # moved, and another
    expected = Engine(model, budget=20, interval=12, rows=4).generate(prompts_of(9), 3, Sampling(20))
    same(kept.generate(prompts_of(9), 3, Sampling(20)), expected)
    assert len(kept.decoders) == 1


def test_a_trace_kept_wide_gives_narrow_ones():
    engine = Engine(tiny("llama"), budget=20, interval=12, rows=4)
    expected = engine.generate(prompts_of(9, 40), 2, Sampling(50))
    engine.keeps_state = True
    engine.reserve(65000, 600)
    assert engine.state.trace.dtype == torch.int32
    wide = engine.generate(prompts_of(9, 40), 2, Sampling(50))
    same(wide, expected, tolerance=1e-9)
    assert wide[0].trace.evicted_at.dtype == torch.uint16


def test_a_logprob_that_is_not_finite_ends_the_row():
    engine = Engine(tiny("llama"), budget=20, interval=12, rows=4)
    engine.reserve(5, 10)
    state = engine.state
    state.begin(10, engine.capacity)
    rows = torch.arange(4)
    state.start(rows, rows, rows + 1, rows)
    logprobs = torch.tensor([-1.0, float("nan"), -float("inf"), -2.0])
    state.record(
        slice(0, 4), rows, logprobs, torch.tensor([], dtype=torch.int64), torch.tensor([True, True, True, False])
    )
    assert state.done.tolist() == [False, True, True, False] and state.count.tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("compressor", STANDALONE)
@pytest.mark.parametrize("poll", [(3, 3), (5, 40)])
def test_rounds_of_many_steps_change_nothing(compressor, poll):
    """Rows that fill up within a round wait for its end; what they sample is the same to the bit."""
    model = tiny("llama")
    same(rollout(model, compressor, poll=poll), rollout(model, compressor), tolerance=1e-9)


@pytest.mark.parametrize(
    "compressor, fused", [*((name, False) for name in EVICTING), ("rkv", True), ("h2o", True), ("window", True)]
)
def test_rows_that_wait_sample_what_they_would_have(compressor, fused, monkeypatch):
    """Long intervals and prompts of many lengths: rows fill up in the middle of rounds."""
    model, prompts, sampling = tiny("llama"), prompts_of(3, 11, 18, 26, 35, 41), Sampling(180, stop_ids=(3,))

    def generate(**options):
        engine = Engine(copy.deepcopy(model), compressor=compressor, budget=20, interval=64, rows=4, **options)
        return engine.generate(prompts, 2, sampling), engine.waited

    expected, waited = generate()
    assert waited == 0
    if fused:
        fuse_everywhere(monkeypatch)
    actual, waited = generate(poll=(4, 7))
    assert waited > 0
    same(actual, expected, tolerance=1e-4 if fused else 1e-9)


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3"])
def test_rounds_with_sliding_windows(architecture):
    model = tiny(architecture)
    same(rollout(model, poll=(4, 9)), rollout(model), tolerance=1e-9)


@pytest.mark.parametrize("compressor, chunk", [*((name, 30) for name in STANDALONE), ("rkv", 512), ("dense", 512)])
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


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(prefill_chunk=0), "prefill_chunk"),
        (dict(prefill_rows=0), "prefill_rows"),
        (dict(prefill_rows=1.5), "prefill_rows"),
        (dict(poll=3), "two whole numbers"),
        (dict(poll=()), "two whole numbers"),
        (dict(poll=(0, 4)), "poll"),
        (dict(poll=(5, 2)), "poll"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(SparseRLError, match=message):
        Engine(tiny("llama"), budget=20, interval=12, **options)


def test_where_the_time_went():
    engine = Engine(tiny("llama"), budget=20, interval=12, rows=2)
    engine.generate(prompts_of(5, 9), sampling=Sampling(50))
    assert engine.steps == 49
    spent = engine.seconds
    assert set(spent) == {"prefill", "decode", "evict", "collect", "trace", "host", "total"}
    assert all(value >= 0 for value in spent.values())
    assert sum(v for k, v in spent.items() if k != "total") == pytest.approx(spent["total"])
