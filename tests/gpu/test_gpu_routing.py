"""Routes on a CUDA device: written down inside captured steps, and followed by the learner."""

import pytest
import torch

from sparse_rl import Engine, Sampling, token_logprobs
from tests.helpers.decoding import change_rules
from tests.helpers.gpu import eagerly, on_gpu
from tests.helpers.models import MIXTURES, prompts_of

pytestmark = pytest.mark.gpu


def rollout(model, captured=True):
    engine = Engine(model, "rkv", budget=20, interval=16, rows=4, record_routes=True)
    done = engine.generate(prompts_of(5, 36, 100, 12), group_size=2, sampling=Sampling(60, temperature=0.0))
    assert all(bool(decoder.graphs) == captured for decoder in engine.decoders.values())
    return engine, done


@pytest.mark.parametrize("name", MIXTURES)
def test_captured_steps_write_the_routes_of_eager_ones(name, monkeypatch):
    model = on_gpu(name)
    _, captured = rollout(model)
    eagerly(monkeypatch)
    _, eager = rollout(model, captured=False)
    for ours, theirs in zip(captured, eager, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        same = (ours.trace.routes == theirs.trace.routes).all(-1).float().mean()
        assert same > 0.99  # but for ties


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_learner_follows(name, dtype):
    model = on_gpu(name, dtype)
    _, done = rollout(model)
    for t in done:
        with torch.no_grad():
            gap = (token_logprobs(model, t.tokens, t.trace).cpu() - t.sampler_logprobs)[t.response_mask].abs()
        assert gap.mean() < (1e-4 if dtype == torch.float32 else 0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_by_our_product(name, dtype, monkeypatch):
    """Captured, and as far from the learner as experts by torch's product are; in bf16, where it is an option, too."""
    change_rules(monkeypatch, own_experts=(dtype,))
    _, done = rollout(on_gpu(name, dtype))
    model = on_gpu(name, dtype)
    for t in done:
        with torch.no_grad():
            gap = (token_logprobs(model, t.tokens, t.trace).cpu() - t.sampler_logprobs)[t.response_mask].abs()
        assert gap.mean() < (1e-4 if dtype == torch.float32 else 0.1)
