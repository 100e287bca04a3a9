"""Beacons on a CUDA device: captured, fused, in bf16, and the students' gradients by segments."""

import copy

import pytest
import torch

from sparse_rl import Engine, Sampling, token_logprobs
from sparse_rl.beacon import add_beacon, add_choice, beacon_of
from sparse_rl.compressors import make
from sparse_rl.kernels import ops
from sparse_rl.learn.batch import collate
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.learn.student import Students, StudentSettings
from tests.helpers.decoding import FAMILY
from tests.helpers.gpu import SMALL, eagerly, logprobs_and_gradients, mean_gap, on_gpu
from tests.helpers.models import prompts_of

pytestmark = pytest.mark.gpu


def student(name: str, dtype=torch.float32, position="shared", **changes):
    return add_beacon(on_gpu(name, dtype, **changes), position=position, seed=1)


def chooser(name: str, dtype=torch.float32, **changes):
    """A student whose choices to fold depend on its states."""
    model = add_choice(student(name, dtype, **changes), 2, 16, 5.0)
    with torch.no_grad():
        beacon_of(model).choice_weight.normal_(0, 0.3)
    return model


def generate(model, new=90, rows=6, **options):
    return Engine(model, make("beacon", **options), rows=rows).generate(prompts_of(5, 90, 30), 2, Sampling(new))


@pytest.mark.parametrize("position", ["shared", "own"])
@pytest.mark.parametrize("options", [{"chunk": 2}, {"chunk": 16}, {"chunk": 16, "threshold": 30.0}])
@pytest.mark.parametrize("name", FAMILY)
def test_the_learner_finds_the_samplers_logprobs_again(name, options, position):
    model = student(name, position=position)
    for t in generate(model, **options):
        with torch.no_grad():
            gap = token_logprobs(model, t.tokens, t.trace).cpu() - t.sampler_logprobs
        assert gap[t.response_mask].abs().max() < 1e-4
        assert (t.tokens == beacon_of(model).id).any()


@pytest.mark.parametrize("options", [{"chunk": 4}, {"chunk": 16, "threshold": 30.0}])
def test_captured_steps_are_eager_steps(options, monkeypatch):
    model = student("qwen2")
    captured = generate(copy.deepcopy(model), rows=4, **options)
    eagerly(monkeypatch)
    for ours, theirs in zip(captured, generate(model, rows=4, **options), strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert (ours.sampler_logprobs - theirs.sampler_logprobs).abs().max() < 1e-4


@pytest.mark.parametrize("name", FAMILY)
def test_choices_are_captured_and_found_again(name, monkeypatch):
    model, options = chooser(name), {"chunk": 16, "least": 2}
    captured = generate(copy.deepcopy(model), rows=4, **options)
    for t in captured:
        with torch.no_grad():
            gap = token_logprobs(model, t.tokens, t.trace, choices=t.choices).cpu() - t.sampler_logprobs
        assert gap[t.action_mask].abs().max() < 1e-4
        assert (t.choices & (t.tokens == t.beacon_id)).any()
    eagerly(monkeypatch)
    for ours, theirs in zip(captured, generate(model, rows=4, **options), strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist() and torch.equal(ours.choices, theirs.choices)
        assert (ours.sampler_logprobs - theirs.sampler_logprobs).abs().max() < 1e-4


@pytest.mark.parametrize("chunk", [4, 32])
def test_bf16_is_as_noisy_as_dense_rollouts(chunk):
    model = student("llama", torch.bfloat16, **SMALL)
    dense = Engine(model, "dense", rows=8).generate(prompts_of(40, 90), 8, Sampling(200))
    folded = Engine(model, f"beacon:{chunk}", rows=8).generate(prompts_of(40, 90), 8, Sampling(200))
    assert mean_gap(model, folded, shadow=True) < 1.5 * mean_gap(model, dense, shadow=False) + 1e-4


@pytest.mark.parametrize("chunk", [2, 7, 32])
def test_gradients_by_segments_are_those_under_a_mask(chunk, monkeypatch):
    model = student("llama", **SMALL)
    trajectories = generate(model, chunk=chunk)
    upstream = torch.randn(collate(trajectories).mask.shape, generator=torch.Generator().manual_seed(0)).cuda()
    logprobs, gradients = logprobs_and_gradients(model, trajectories, upstream)
    monkeypatch.setattr(ops, "fits_tiles", lambda *_: False)
    expected, theirs = logprobs_and_gradients(model, trajectories, upstream)
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)
    for name, gradient in gradients.items():
        assert (gradient - theirs[name]).norm() <= 1e-3 * theirs[name].norm() + 1e-6, name
    assert gradients["model.embed_tokens.beacon"].abs().max() > 0


def test_students_learn_in_bf16():
    teacher = on_gpu("llama", torch.bfloat16, **SMALL)
    sampled = collate(Engine(teacher, "dense", rows=8).generate(prompts_of(20, 30), 8, Sampling(60)))
    students = Students(teacher, StudentSettings([4, [2, 16]], lr=1e-3), OptimizerSettings(lr=1e-3, weight_decay=0.0))
    curve = [students.learn(teacher, sampled, 1, i)["student/c4/kl"] for i in range(20)]
    assert curve[-1] < 0.7 * curve[0]
