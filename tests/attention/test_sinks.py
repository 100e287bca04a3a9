"""Attention sinks under replay (gpt-oss): log-probs and gradients, those of the sinks included, against a mask made of
the trace, with the sink as one more column of the softmax.
"""

import copy
import gc

import pytest
import torch
from torch.nn.attention import flex_attention as of_torch

from sparse_rl import Engine, Sampling
from sparse_rl.cache.segments import Replay
from sparse_rl.kernels import flex, ops, twins
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


@pytest.fixture
def uncompiled(monkeypatch):
    """FlexAttention as plain torch: it compiles for GPUs only, and elsewhere refuses a gradient that it can compute."""
    monkeypatch.setattr(flex, "_compiled", lambda: of_torch.flex_attention)
    monkeypatch.setattr(of_torch, "_validate_device", lambda *_: None)
    yield
    torch._dynamo.reset()  # it traces all the same, and would leave tensors of unknown sizes behind
    gc.collect()


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


@pytest.mark.parametrize("sliding_window", [None, 40])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_flex_attention_gives_sinks_their_share_and_their_gradient(sliding_window, dtype, tolerance, uncompiled):
    torch.manual_seed(0)
    rows, heads, group, tokens, dim = 2, 2, 3, 150, 8
    life = (torch.rand(rows, 1, heads, tokens) ** 3 * tokens).int()  # every token leaves at a moment of its own
    replay = Replay(torch.arange(1, tokens + 1, dtype=torch.int32) + life, torch.tensor([tokens, tokens]))
    query = torch.randn(rows, heads * group, tokens, dim, dtype=dtype)
    key, value = torch.randn(2, rows, heads, tokens, dim, dtype=dtype)
    sinks = 2 * torch.randn(heads * group, dtype=dtype)
    upstream = torch.randn(rows, tokens, heads * group, dim, dtype=dtype)
    found = []
    for module in (flex, twins):
        given = [x.clone().requires_grad_() for x in (query, key, value, sinks)]
        out = module.trace_attention(*given[:3], replay, 0, 0.3, sliding_window, None, 0.0, given[3])
        found.append([out.detach(), *torch.autograd.grad(out, given, upstream)])
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == dtype and (theirs != 0).any()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance * max(1.0, theirs.abs().max().item()))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_flex_attention_has_the_gradients_of_an_explicit_mask_through_a_model(checkpointing, uncompiled, monkeypatch):
    done = rollouts("rkv")
    own, other, sampled = in_fp64(), in_fp64(), collate(done)
    if checkpointing:
        own.gradient_checkpointing_enable()
        own.train()
    calls = []

    def attend(*given):
        calls.append(given)
        return flex.trace_attention(*given)

    monkeypatch.setattr(ops, "trace_attention", attend)
    replay = scoring.replay_of(own, [(t.tokens, t.trace) for t in done])
    mine = scoring.batch_logprobs(own, sampled.tokens, sampled.mask, replay=replay)[sampled.mask]
    assert len(calls) == len(own.model.layers)
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
