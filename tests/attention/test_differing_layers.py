"""Layers that differ in KV heads and in head dims (Gemma 4's larger models, MiMo-V2-Flash): slots of each layer are as
large as its own keys and values, and a trace repeats the heads of a layer that has fewer.
"""

import copy

import pytest
import torch
import transformers
from packaging.version import Version

from sparse_rl import Engine, Sampling, SparseRLError, token_logprobs
from sparse_rl.cache import LayerShape
from sparse_rl.compressors import make
from sparse_rl.learn import score as scoring
from sparse_rl.learn.batch import collate
from sparse_rl.learn.regret import regret
from sparse_rl.models import ModelShape
from sparse_rl.train.allocate import choose_budgets
from tests import survey
from tests.helpers.compressors import EVICTING, STANDALONE
from tests.helpers.explicit import compare_gradients, explicit_logprobs
from tests.helpers.models import prompts_of
from tests.rollout.test_live import assert_replayed, kept_and_recalled

GEMMA = dict(
    num_attention_heads=8, num_key_value_heads=4, attention_k_eq_v=True, num_global_key_value_heads=2,
    head_dim=8, global_head_dim=16, num_kv_shared_layers=0, layer_types=["sliding_attention", "full_attention"] * 2,
)  # fmt: skip
MODELS = {  # type, what its config has beside the survey's sizes, and the KV heads, key and value dims of each layer
    "gemma4": ("gemma4_text", GEMMA, [(4, 8, 8), (2, 16, 16)] * 2),
    "gemma4, shared": ("gemma4_text", GEMMA | {"num_kv_shared_layers": 2}, [(4, 8, 8), (2, 16, 16)]),
    "mimo": ("mimo_v2_flash", {"v_head_dim": 6}, [(2, 8, 6), (4, 8, 6), (4, 8, 6), (4, 8, 6)]),
}

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.22"), reason="older versions name these settings otherwise"
)


@pytest.fixture(scope="module", params=MODELS)
def case(request):
    type_name, own, shapes = MODELS[request.param]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(survey.OWN, type_name, own)
        return survey.tiny_model(type_name), [LayerShape(*shape) for shape in shapes]


def rollouts(model, compressor, **options):
    engine = Engine(model, compressor=make(compressor, **options), budget=16, interval=6, rows=4)
    return engine, engine.generate(prompts_of(5, 22, 40), 2, Sampling(30, stop_ids=()), seed=1)


def shared_by(model):
    return [0, 1, 0, 1] if getattr(model.config, "num_kv_shared_layers", 0) else range(4)


def window(model):
    return lambda module: model.config.sliding_window if model.config.layer_types[module.layer_idx][0] == "s" else None


def test_shapes_are_those_of_the_layers(case):
    model, shapes = case
    shape = ModelShape.of(model.config)
    assert shape.heads == 4 and list(shape.by_layer) == shapes
    cache = shape.cache_shape()
    assert cache.kv_bytes_per_token == sum(4 * s.heads * (s.key_dim + s.value_dim) for s in shapes)


def test_greedy_tokens_and_logprobs_are_those_of_generate(case):
    model, _ = case
    (mine,) = Engine(model, compressor="dense", rows=4).generate(prompts_of(12), 1, Sampling(16, 0.0, stop_ids=()))
    with torch.no_grad():
        tokens, logprobs = survey.generated(model, prompts_of(12)[0], 16)
    assert torch.equal(mine.response_tokens, tokens)
    torch.testing.assert_close(mine.sampler_logprobs[12:], logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("compressor", STANDALONE)
def test_the_learner_sees_what_the_sampler_saw(compressor, case):
    model, shapes = case
    engine, trajectories = rollouts(model, compressor)
    for t in trajectories:
        assert t.trace.evicted_at.shape[:2] == (len(shapes), 4)
        with torch.no_grad():
            gap = (token_logprobs(model, t.tokens, t.trace) - t.sampler_logprobs)[t.num_prompt_tokens :]
        assert gap.abs().max() < 1e-4
    assert engine.plan(40, 30).cache_bytes == engine.cache.nbytes


@pytest.mark.parametrize("compressor", EVICTING)
def test_a_layer_with_fewer_heads_repeats_them(compressor, case):
    model, shapes = case
    _, trajectories = rollouts(model, compressor)
    for t in trajectories:
        for shape, gone in zip(shapes, t.trace.evicted_at.long(), strict=True):
            repeated = gone.unflatten(0, (shape.heads, -1))  # [H, repeats, T]
            assert (repeated == repeated[:, :1]).all()
            assert (gone < len(t.tokens)).any(-1).all()


@pytest.mark.parametrize("options", [dict(slots="fp8"), dict(slots="int8", slots_kept=[-1]), dict(prompt_chunk=8)])
def test_other_ways_to_store_and_to_read(options, case):
    model, _ = case
    engine, trajectories = rollouts(model, "rkv", **options)
    for t in trajectories:
        with torch.no_grad():
            gap = (token_logprobs(model, t.tokens, t.trace) - t.sampler_logprobs)[t.num_prompt_tokens :]
        assert gap.abs().max() < 1e-4
    assert engine.plan(40, 30).cache_bytes == engine.cache.nbytes


@pytest.mark.parametrize("checkpointing", [False, True])
def test_logprobs_and_gradients_are_those_of_an_explicit_mask(case, checkpointing):
    model, _ = case
    _, (t, *_) = rollouts(model, "rkv")
    assert (t.trace.evicted_at.long() < len(t.tokens)).any()
    own, other = copy.deepcopy(model), copy.deepcopy(model)
    if checkpointing:
        own.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        own.train()
    sampled = collate([t])
    replay = scoring.replay_of(own, [(t.tokens, t.trace)])
    mine = scoring.batch_logprobs(own, sampled.tokens, sampled.mask, 1.0, replay)[sampled.mask]
    compare_gradients(own, other, mine, explicit_logprobs(other, t, shared_by(model), window(model)))


def test_regret_and_budgets_by_layer(case):
    model, shapes = case
    engine, (t, *_) = rollouts(model, "h2o")
    found = regret(model, t.tokens, t.trace)
    for shape, mass in zip(shapes, found.received, strict=True):
        repeated = mass.unflatten(0, (shape.heads, -1))
        assert (repeated == repeated[:, :1]).all()
    _, dense = rollouts(model, "dense")
    chosen = choose_budgets(model, dense[:1], engine.compressor, measure="mass")
    assert sum(chosen.layers) == 16 * len(shapes)
    engine, trajectories = rollouts(model, "h2o", layer_budgets=chosen.layers)
    for t in trajectories:
        with torch.no_grad():
            gap = (token_logprobs(model, t.tokens, t.trace) - t.sampler_logprobs)[t.num_prompt_tokens :]
        assert gap.abs().max() < 1e-4


def test_a_row_is_moved_to_host_memory_and_back(case):
    model, _ = case
    engine, _ = rollouts(model, "snapkv")
    engine.keeps_state = True
    engine.generate(prompts_of(22), 2, Sampling(20, stop_ids=()), seed=2)
    cache = engine.cache
    before = [tensor.clone() for tensor in cache.tensors]
    taken = cache.take(0, 16, 30)
    cache.put(1, taken)
    for mine, old in zip(cache.tensors, before, strict=True):
        assert torch.equal(mine[:, 0], old[:, 0])
    for stored in cache.stored:
        assert all(torch.equal(t[:, 1, :, :16], t[:, 0, :, :16]) for t in stored.tensors)
        assert torch.equal(stored.queries[:, 1], stored.queries[:, 0])


@pytest.mark.parametrize("compressor", ["rkv", "h2o"])
def test_a_conversation_read_again_under_its_trace_goes_on(compressor, case):
    model, _ = case
    kept, slots, recalled, again = kept_and_recalled(model, compressor)
    assert recalled.tokens.equal(kept.tokens) and recalled.trace.evicted_at.equal(kept.trace.evicted_at)
    assert_replayed(model, recalled)
    for mine, theirs in zip(slots, again, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_heads_that_a_trace_cannot_record_are_refused():
    config = transformers.Qwen2Config(num_hidden_layers=2, num_attention_heads=12, hidden_size=48, vocab_size=32)
    object.__setattr__(config, "num_key_value_heads", [2, 4])  # as configs beside transformers' own have them
    assert [shape.heads for shape in ModelShape.of(config).by_layer] == [2, 4]
    object.__setattr__(config, "num_key_value_heads", [2, 3])
    with pytest.raises(SparseRLError, match="2 and others with 3 KV heads, which is no multiple"):
        ModelShape.of(config)
    object.__setattr__(config, "num_key_value_heads", [2, 3, 4])
    with pytest.raises(SparseRLError, match="num_key_value_heads for 3 layers but 2 layers"):
        ModelShape.of(config)
