"""Log-probs in chunks: the same numbers and gradients, and [tokens, vocabulary] never exists."""

import pytest
import torch
from conftest import VOCABULARY, prompts_of, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_rl import Engine, Sampling, token_logprobs
from sparse_rl.learn import score


class Largest(TorchDispatchMode):
    """The most elements any operation's result had whose last dimension is the vocabulary."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.dim() and tensor.shape[-1] == VOCABULARY:
                self.elements = max(self.elements, tensor.numel())
        return out


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
    tokens = trajectory.tokens
    assert score.has_plain_head(model) == (architecture != "gemma2")  # Gemma 2 soft-caps its logits
    for trace in (None, trajectory.trace):
        whole = gradients(model, tokens, trace)
        monkeypatch.setattr(score, "CHUNK", 8)
        parts = gradients(model, tokens, trace)
        monkeypatch.setattr(score, "CHUNK", 1024)
        torch.testing.assert_close(parts[0], whole[0])
        torch.testing.assert_close(parts[1], whole[1], rtol=1e-4, atol=1e-4)


def test_all_logits_at_once_never_exist(monkeypatch, llama):
    tokens = torch.tensor(prompts_of(200)[0])
    score.has_plain_head(llama)
    monkeypatch.setattr(score, "CHUNK", 16)
    with Largest() as seen:
        token_logprobs(llama, tokens).sum().backward()
    llama.zero_grad()
    assert 0 < seen.elements <= 16 * VOCABULARY + 32 * VOCABULARY  # a chunk, or the head's own gradient


def test_the_probe_leaves_train_mode_alone(llama):
    llama.train()
    try:
        score._PLAIN_HEAD.pop(llama, None)
        assert score.has_plain_head(llama)
        assert all(module.training for module in llama.modules())
    finally:
        llama.eval()
