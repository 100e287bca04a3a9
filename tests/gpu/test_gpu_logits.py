"""Logits in fp32 on a CUDA device: the product, its gradients, fused and captured steps, and the noise that goes."""

import copy

import pytest
import torch
from torch import nn

from sparse_rl import Engine, Sampling
from sparse_rl.models.logits import Float32Head, set_logits
from tests.helpers.gpu import SMALL, eagerly
from tests.helpers.logits import bf16, mean_gap
from tests.helpers.models import prompts_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows, hidden, vocabulary", [(1, 32, 61), (7, 576, 49152), (1024, 512, 1000)])
def test_the_product_and_its_gradients(rows, hidden, vocabulary, dtype):
    torch.manual_seed(0)
    layer = nn.Linear(hidden, vocabulary, bias=False).to("cuda", dtype)
    exact = copy.deepcopy(layer).double()
    layer.__class__ = Float32Head
    x = torch.randn(rows, hidden, device="cuda").to(dtype).requires_grad_()
    y = x.detach().double().requires_grad_()
    out, expected = layer(x), exact(y)
    assert out.dtype == torch.float32 and (out.double() - expected).abs().max() < 1e-4  # bf16 would be off by 0.004
    weights = torch.randn_like(expected)
    (out * weights.float()).sum().backward()
    (expected * weights).sum().backward()
    for ours, theirs in ((x.grad, y.grad), (layer.weight.grad, exact.weight.grad)):
        assert ours.dtype == dtype and (ours.double() - theirs).norm() < 0.01 * theirs.norm()


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_fused_and_captured_steps_use_it(name, monkeypatch):
    model = set_logits(bf16(name, **SMALL)).cuda()
    sampling = Sampling(48, stop_ids=(), temperature=1.0)
    engine = Engine(model, "rkv", budget=24, interval=8, rows=4)
    fused = engine.generate(prompts_of(9, 30), 2, sampling, seed=1)
    (decoder,) = engine.decoders.values()
    assert decoder.forward is not None and decoder.forward.head is model.lm_head and decoder.graphs
    set_logits(model, "model")
    engine.generate(prompts_of(9, 30), 2, sampling, seed=1)
    assert decoder not in engine.decoders.values()  # captured anew
    set_logits(model)
    eagerly(monkeypatch)
    modules = Engine(model, "rkv", budget=24, interval=8, rows=4).generate(prompts_of(9, 30), 2, sampling, seed=1)
    gaps = []
    for a, b in zip(fused, modules, strict=True):
        second = a.num_prompt_tokens + 1  # the first token that a decode step samples
        if torch.equal(a.tokens[: second + 1], b.tokens[: second + 1]):
            gaps.append((a.sampler_logprobs - b.sampler_logprobs)[second].abs().item())
    assert gaps and max(gaps) < 0.05


@pytest.mark.parametrize("compressor, view", [("dense", "dense"), ("rkv", "shadow")])
def test_sampler_and_learner_come_closer(compressor, view):
    model = bf16(tie_word_embeddings=False, **SMALL).cuda()
    before = mean_gap(set_logits(model, "model"), compressor, view)
    after = mean_gap(set_logits(model), compressor, view)
    assert after < before / 2, (before, after)
