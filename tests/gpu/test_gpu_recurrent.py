"""On a GPU: models with recurrent layers, decoded by captured steps."""

import copy

import pytest
import torch

from sparse_rl import Engine, Sampling
from tests.helpers.gpu import eagerly, mean_gap
from tests.helpers.hybrids import HYBRIDS, hybrid
from tests.helpers.models import prompts_of

pytestmark = pytest.mark.gpu


def rollout(model, **options):
    engine = Engine(model, "rkv", budget=24, interval=8, rows=8, **options)
    return engine, engine.generate(prompts_of(60, 33, 60, 9), 3, Sampling(64, stop_ids=(3,)), seed=2)


@pytest.mark.parametrize("name", HYBRIDS)
def test_replay_under_captured_steps(name):
    model = copy.deepcopy(hybrid(name)).cuda()
    engine, trajectories = rollout(model)
    assert all(decoder.graphs for decoder in engine.decoders.values()), "the step was not captured"
    assert mean_gap(model, trajectories, shadow=True) < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", HYBRIDS)
def test_steps_are_captured_in_half_precision(name, dtype):
    model = copy.deepcopy(hybrid(name)).to("cuda", dtype)
    engine, trajectories = rollout(model)
    assert all(decoder.graphs for decoder in engine.decoders.values()), "the step was not captured"
    assert all(t.sampler_logprobs.isfinite().all() for t in trajectories)


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "qwen3_next"])
def test_captured_steps_are_the_modules(name, monkeypatch):
    model = copy.deepcopy(hybrid(name)).cuda()
    _, captured = rollout(model)
    eagerly(monkeypatch)
    _, plain = rollout(model)
    for a, b in zip(captured, plain, strict=True):
        assert a.tokens.equal(b.tokens)
        torch.testing.assert_close(a.sampler_logprobs, b.sampler_logprobs, atol=1e-4, rtol=0)
