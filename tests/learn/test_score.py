"""Log-probs in chunks: the same numbers and gradients, and the fp32 softmax of all tokens never exists at once."""

import pytest
import torch

from sparse_rl import Engine, Sampling, token_logprobs
from sparse_rl.learn import score
from tests.helpers.largest import Largest
from tests.helpers.models import prompts_of, tiny


def gradients(model, tokens, trace):
    model.zero_grad()
    logprobs = token_logprobs(model, tokens, trace, temperature=0.8)
    logprobs.square().sum().backward()
    grads = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return logprobs.detach(), grads


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3"])
def test_chunks_change_nothing(architecture, monkeypatch):
    model = tiny(architecture)
    trajectory = Engine(model, budget=12, interval=4, rows=1).generate(prompts_of(20), sampling=Sampling(50))[0]
    for trace in (None, trajectory.trace):
        whole = gradients(model, trajectory.tokens, trace)
        with monkeypatch.context() as patch:
            patch.setattr(score, "head_chunk", lambda vocabulary: 8)
            parts = gradients(model, trajectory.tokens, trace)
        torch.testing.assert_close(parts[0], whole[0])
        torch.testing.assert_close(parts[1], whole[1], rtol=1e-4, atol=1e-4)


def test_logits_exist_for_a_chunk_only(monkeypatch, llama):
    trajectory = Engine(llama, budget=12, interval=4, rows=1).generate(prompts_of(20), sampling=Sampling(50))[0]
    monkeypatch.setattr(score, "head_chunk", lambda vocabulary: 16)
    for trace in (None, trajectory.trace):
        with Largest() as seen:
            token_logprobs(llama, trajectory.tokens, trace).sum().backward()
        assert seen.rows == 16
    llama.zero_grad()


def test_attention_dropout_reaches_the_shadow_view():
    model = tiny("llama", attention_dropout=0.5)
    trajectory = Engine(model, budget=12, interval=4, rows=1).generate(prompts_of(20), sampling=Sampling(30))[0]
    model.train()
    try:
        with torch.no_grad():
            once, again = (token_logprobs(model, trajectory.tokens, trajectory.trace) for _ in range(2))
    finally:
        model.eval()
    assert (once - again).abs().max() > 1e-3


def test_backward_twice_under_checkpointing(llama):
    trajectory = Engine(llama, budget=12, interval=4, rows=1).generate(prompts_of(20), sampling=Sampling(30))[0]
    llama.gradient_checkpointing_enable()
    llama.train()
    try:
        value = token_logprobs(llama, trajectory.tokens, trajectory.trace).sum()
        weight = llama.model.layers[0].self_attn.k_proj.weight
        first = torch.autograd.grad(value, weight, retain_graph=True)[0]
        second = torch.autograd.grad(value, weight)[0]
    finally:
        llama.eval()
        llama.gradient_checkpointing_disable()
    torch.testing.assert_close(first, second)
