"""Layers that read the keys and values of another layer, and layers whose heads differ in width (Gemma 3n, Gemma 4)."""

import copy
import dataclasses

import pytest
import torch
import transformers
from packaging.version import Version

from sparse_rl import Engine, Sampling, SparseRLError, token_logprobs
from sparse_rl.cache.states import slot_layers
from sparse_rl.learn import score as scoring
from sparse_rl.learn.batch import collate
from sparse_rl.models import ModelShape
from tests.helpers.compressors import STANDALONE
from tests.helpers.explicit import compare_gradients, explicit_logprobs
from tests.helpers.models import prompts_of
from tests.survey import tiny_model

FAMILIES = ["gemma3n_text", "gemma4_text"]
SOURCES = {"gemma3n_text": [0, 1, 1, 1], "gemma4_text": [0, 1, 0, 1]}  # whose slots each of the four layers reads

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.22"), reason="older versions cache something else, and are refused"
)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return tiny_model(request.param)


def rollouts(model, compressor, **sizes):
    engine = Engine(model, compressor=compressor, **{"budget": 16, "interval": 6, "rows": 4, **sizes})
    return engine, engine.generate(prompts_of(5, 22, 40), 2, Sampling(30, stop_ids=()), seed=1)


def test_which_slots_a_layer_reads():
    kinds = ("sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention")
    assert slot_layers(kinds) == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}
    assert slot_layers(kinds, 2) == {0: 0, 1: 1, 2: 2, 3: 2, 4: 1}
    assert slot_layers(("linear_attention", "full_attention", "mlp", "full_attention")) == {1: 0, 3: 1}


@pytest.mark.parametrize("compressor", STANDALONE)
def test_the_learner_sees_what_the_sampler_saw(compressor, model):
    if model.config.model_type == "gemma3n_text" and compressor not in ("dense", "rkv"):
        pytest.skip("the wider of the two families goes through all of them")
    engine, trajectories = rollouts(model, compressor)
    shape = engine.cache.shape
    assert sum(len(stored.keys) for stored in engine.cache.stored) == shape.layers == 2  # of four layers
    for t in trajectories:
        assert t.trace.evicted_at.shape[0] == 2
        for trace in (t.trace, None) if compressor == "dense" else (t.trace,):
            with torch.no_grad():
                gap = (token_logprobs(model, t.tokens, trace) - t.sampler_logprobs)[t.num_prompt_tokens :]
            assert gap.abs().max() < 1e-4
    assert engine.plan(40, 30).cache_bytes == engine.cache.nbytes


def test_attention_of_all_readers_counts():
    """H2O's mass is what a slot received from every layer that reads it."""
    model, masses = tiny_model("gemma3n_text"), {}
    for compressor in ("h2o", "dense"):
        engine = Engine(model, compressor=compressor, budget=200, interval=6, rows=1)
        engine.keeps_state = True
        engine.generate(prompts_of(20), 1, Sampling(10, stop_ids=()), seed=1)
        if engine.cache.mass is not None:
            masses[compressor] = engine.cache.mass[:, 0].sum((1, 2))
    # Every query's attention sums to one over the slots, per query head and layer: 29 tokens, 4 heads; the second set
    # of slots is read by three layers.
    torch.testing.assert_close(masses["h2o"], torch.tensor([29.0 * 4, 3 * 29.0 * 4]), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_logprobs_and_gradients_are_those_of_an_explicit_mask(model, checkpointing):
    _, (t, *_) = rollouts(model, "rkv")
    assert (t.trace.evicted_at.long() < len(t.tokens)).any()
    own, other = copy.deepcopy(model), copy.deepcopy(model)
    if checkpointing:
        own.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        own.train()
    sampled = collate([t])
    replay = scoring.replay_of(own, [(t.tokens, t.trace)])
    mine = scoring.batch_logprobs(own, sampled.tokens, sampled.mask, 1.0, replay)[sampled.mask]
    theirs = explicit_logprobs(
        other,
        t,
        SOURCES[model.config.model_type],
        lambda module: other.config.sliding_window if module.is_sliding else None,
    )
    compare_gradients(own, other, mine, theirs)


def test_other_ways_of_sharing_are_refused():
    config = copy.deepcopy(tiny_model("gemma3n_text").config)
    assert ModelShape.of(config).slot_layers == 2 and dataclasses.asdict(ModelShape.of(config))["layers"] == 4
    config.model_type = "another"
    with pytest.raises(SparseRLError, match="shares keys and values between its last 2 layers in a way"):
        ModelShape.of(config)
