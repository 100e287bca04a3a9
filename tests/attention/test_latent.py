"""Multi-head latent attention: slots hold latents, and the learner hides from all heads what was evicted."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version
from peft import LoraConfig, get_peft_model

from sparse_rl import Engine, Sampling, SparseRLError, token_logprobs
from sparse_rl.kernels import twins
from sparse_rl.learn import score as scoring
from sparse_rl.learn.batch import collate
from sparse_rl.models import ModelShape
from tests.helpers.compressors import STANDALONE
from tests.helpers.explicit import compare_gradients, explicit_logprobs
from tests.helpers.models import prompts_of
from tests.survey import tiny_model

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.22"), reason="older versions cache something else, and are refused"
)


@pytest.fixture(scope="module")
def model():
    return tiny_model("minicpm3")


def rollouts(model, compressor):
    engine = Engine(model, compressor=compressor, budget=16, interval=6, rows=4)
    return engine, engine.generate(prompts_of(5, 22, 40), 2, Sampling(30, stop_ids=()), seed=1)


@pytest.mark.parametrize("compressor", STANDALONE)
def test_the_learner_sees_what_the_sampler_saw(compressor, model):
    engine, trajectories = rollouts(model, compressor)
    latent, rotated = model.config.kv_lora_rank, model.config.qk_rope_head_dim
    assert engine.cache.keys.shape[2:] == (1, engine.cache.capacity, latent + rotated)  # one head for all
    assert engine.cache.values.numel() == 0 and engine.plan(40, 30).cache_bytes == engine.cache.nbytes
    for t in trajectories:
        for trace in (t.trace, None) if compressor == "dense" else (t.trace,):
            with torch.no_grad():
                gap = (token_logprobs(model, t.tokens, trace) - t.sampler_logprobs)[t.num_prompt_tokens :]
            assert gap.abs().max() < 1e-4


@pytest.mark.parametrize("compressor", ["rkv", "h2o", "prompt-only:snapkv"])
def test_prompts_of_different_lengths_are_read_together(compressor, model):
    engine = Engine(model, compressor, budget=16, interval=6, rows=4, prefill_rows=3)
    for t in engine.generate(prompts_of(5, 22, 40), 2, Sampling(12, stop_ids=()), seed=1):
        with torch.no_grad():
            gap = (token_logprobs(model, t.tokens, t.trace) - t.sampler_logprobs)[t.num_prompt_tokens :]
        assert gap.abs().max() < 1e-4


def test_logprobs_and_gradients_are_those_of_an_explicit_mask(model):
    _, (t, *_) = rollouts(model, "rkv")
    assert (t.trace.evicted_at.long() < len(t.tokens)).any()
    own, other, sampled = copy.deepcopy(model), copy.deepcopy(model), collate([t])
    replay = scoring.replay_of(own, [(t.tokens, t.trace)])
    mine = scoring.batch_logprobs(own, sampled.tokens, sampled.mask, 1.0, replay)[sampled.mask]
    compare_gradients(own, other, mine, explicit_logprobs(other, t, range(4)))


def test_one_mask_serves_all_heads_that_share_a_trace(model, monkeypatch):
    _, (t, *_) = rollouts(model, "rkv")
    seen = []
    attend = twins.attend
    monkeypatch.setattr(twins, "attend", lambda *a: seen.append(tuple(a[3].shape)) or attend(*a))
    token_logprobs(model, t.tokens, t.trace)
    assert set(seen) == {(1, 1, len(t.tokens), len(t.tokens))}


def test_scores_are_those_of_expanded_keys(model):
    """What compressors see, absorbed queries and latents, has the logits of the model's own queries and keys."""
    own = copy.deepcopy(model)
    engine = Engine(own, compressor="snapkv", budget=60, interval=6, rows=1)
    engine.keeps_state = True
    layer = own.model.layers[1].self_attn
    (t,) = engine.generate(prompts_of(20), 1, Sampling(8, stop_ids=()), seed=1)
    queries = engine.cache.queries[1, 0]  # [heads, W, r + R]
    seen = {}

    def attention(module, query, key, value, attention_mask, **kwargs):
        if module is layer:
            seen["logits"] = query[0] @ key[0].transpose(-1, -2)  # [heads, T, T]
        index = torch.arange(query.shape[2])
        logits = (query @ key.transpose(-1, -2) * module.scaling).masked_fill(index > index[:, None], -torch.inf)
        return (logits.softmax(-1) @ value).transpose(1, 2), None

    from transformers import AttentionInterface

    AttentionInterface.register("explicit-latent", attention)
    own.set_attn_implementation("explicit-latent")
    with torch.no_grad():
        own(t.tokens[None, :-1], use_cache=False)
    last = len(t.tokens) - 2  # the last token that was fed
    keys = engine.cache.keys[1, 0, 0, : last + 1]
    found = queries[:, last % queries.shape[1]] @ keys.transpose(0, 1)
    torch.testing.assert_close(found, seen["logits"][:, last, : last + 1], rtol=1e-4, atol=1e-4)


def test_adapters_of_the_matrices_are_absorbed(model):
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=4, target_modules=["kv_b_proj", "q_b_proj"]))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    _, trajectories = rollouts(adapted, "rkv")
    for t in trajectories:
        with torch.no_grad():
            gap = (token_logprobs(adapted, t.tokens, t.trace) - t.sampler_logprobs)[t.num_prompt_tokens :]
        assert gap.abs().max() < 1e-4


def test_other_latents_are_refused(model, monkeypatch):
    config = copy.deepcopy(model.config)
    config.model_type = "another"
    with pytest.raises(SparseRLError, match="another has latent keys and values of a kind not known here"):
        ModelShape.of(config)
    from sparse_rl.attention.recurrent import FedStates

    monkeypatch.setattr(FedStates, "update", lambda self, keys, values, *_: (keys, values))  # as older versions do
    with pytest.raises(SparseRLError, match="does not hand its latents to the cache in this version of transformers"):
        rollouts(model, "rkv")
