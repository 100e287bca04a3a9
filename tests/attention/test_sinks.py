"""Attention sinks under replay (gpt-oss): log-probs and gradients, those of the sinks included, against a mask made of
the trace, with the sink as one more column of the softmax.
"""

import copy

import pytest
import torch

from sparse_rl import Engine, Sampling
from sparse_rl.learn import score as scoring
from sparse_rl.learn.batch import collate, seen_by
from sparse_rl.learn.packing import packs
from tests.helpers.compressors import EVICTING
from tests.helpers.explicit import compare_gradients, explicit_logprobs
from tests.helpers.models import prompts_of, tiny


def in_fp64():
    model = copy.deepcopy(tiny("gpt-oss")).double()
    model.set_experts_implementation("eager")  # torch has no grouped product in fp64
    return model


def rollouts(compressor):
    engine = Engine(tiny("gpt-oss"), compressor, budget=16, interval=6, rows=4)
    done = engine.generate(prompts_of(22, 5), 2, Sampling(30, stop_ids=()), seed=1)
    assert all((t.trace.evicted_at.long() < len(t.tokens)).any((1, 2)).all() for t in done)  # in every layer
    return done


def window(module):
    return module.sliding_window


def assert_the_same(own, other, mine, theirs):
    compare_gradients(own, other, mine, theirs)
    for here, there in zip(own.model.layers, other.model.layers, strict=True):
        expected = there.self_attn.sinks.grad
        assert (expected != 0).all()  # every head's sink takes a share
        torch.testing.assert_close(here.self_attn.sinks.grad, expected, rtol=1e-4, atol=1e-6 * expected.abs().max())


@pytest.mark.parametrize("compressor", EVICTING)
def test_gradients_of_sinks_and_all_else_are_those_of_an_explicit_mask(compressor):
    t = rollouts(compressor)[0]
    own, other, sampled = in_fp64(), in_fp64(), collate([t])
    replay = scoring.replay_of(own, [(t.tokens, t.trace)])
    mine = scoring.batch_logprobs(own, sampled.tokens, sampled.mask, replay=replay)[sampled.mask]
    assert_the_same(own, other, mine, explicit_logprobs(other, t, range(3), window))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_rows_of_different_lengths_have_the_gradients_of_an_explicit_mask_row_by_row(checkpointing):
    done = rollouts("rkv")
    own, other, sampled = in_fp64(), in_fp64(), collate(done)
    if checkpointing:
        own.gradient_checkpointing_enable()
        own.train()
    assert packs(own, "always")
    seen = seen_by(own, sampled, torch.arange(len(done)), True, packing=True)
    assert seen.packing is not None
    mine = scoring.batch_logprobs(own, sampled.tokens, sampled.mask, replay=seen)[sampled.mask]
    theirs = torch.cat([explicit_logprobs(other, t, range(3), window) for t in done])
    assert_the_same(own, other, mine, theirs)


def test_without_its_sinks_the_explicit_mask_says_something_else():
    t = rollouts("rkv")[0]
    model = in_fp64()
    with torch.no_grad():
        found = explicit_logprobs(model, t, range(3), window)
        for layer in model.model.layers:
            layer.self_attn.sinks.fill_(-torch.inf)
        assert (explicit_logprobs(model, t, range(3), window) - found).abs().max() > 0.01
