"""The shadow view on a CUDA device: segments, FlexAttention and a boolean mask agree, forward and backward."""

import copy
import dataclasses
import json

import pytest
import torch

from sparse_rl import Engine, Sampling, Trace
from sparse_rl.cache import segments
from sparse_rl.cache.segments import find_segments
from sparse_rl.config import load_recipe
from sparse_rl.kernels import ops, twins
from sparse_rl.learn.advantage import advantage
from sparse_rl.learn.batch import collate, score
from sparse_rl.learn.correct import PRESETS
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.learn.score import batch_logprobs, replay_of
from sparse_rl.models import with_lora
from sparse_rl.train.run import train
from tests.helpers.checkpointing import checkpoint
from tests.helpers.gpu import SMALL, logprobs_and_gradients, on_gpu
from tests.helpers.learning import batches_of
from tests.helpers.models import prompts_of

pytestmark = pytest.mark.gpu


def rollouts(model, compressor="rkv", budget=40, interval=16, lengths=(5, 90, 30), new=120):
    return Engine(model, compressor=compressor, budget=budget, interval=interval, rows=6).generate(
        prompts_of(*lengths), 2, Sampling(new)
    )


def refuse(*args, **kwargs):
    raise AssertionError("the other way was taken")


def under_the_mask(monkeypatch):
    monkeypatch.setattr(ops, "fits_tiles", lambda *_: False)


def by_flex(monkeypatch):
    monkeypatch.setattr(
        segments, "find_segments", lambda *given: dataclasses.replace(find_segments(*given), are_few=False)
    )


def error(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "mistral"])
@pytest.mark.parametrize("wrap", ["plain", "checkpointed", "selective", "adapters"])
def test_segments_equal_the_mask_through_a_model(name, wrap, monkeypatch):
    model = on_gpu(name)
    done = rollouts(model)
    if wrap == "adapters":
        model = with_lora(model, rank=4, alpha=8)
        torch.manual_seed(0)
        for n, p in model.named_parameters():
            if "lora_B" in n:
                torch.nn.init.normal_(p, std=0.1)
    if wrap in ("checkpointed", "selective"):
        checkpoint(model, wrap == "checkpointed" or wrap)
    upstream = torch.randn(collate(done).tokens.shape, generator=torch.Generator().manual_seed(0)).cuda()
    with monkeypatch.context() as m:
        m.setattr(twins, "attend", refuse)
        mine, gradients = logprobs_and_gradients(model, done, upstream)
    under_the_mask(monkeypatch)
    theirs, expected = logprobs_and_gradients(model, done, upstream)
    assert (mine - theirs).abs().max() < 1e-4
    assert gradients.keys() == expected.keys() and gradients
    for n, gradient in expected.items():
        assert error(gradients[n], gradient) < 1e-3, n


@pytest.mark.parametrize("how", [False, "selective"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gpt-oss"])
def test_flex_equals_the_mask_through_a_model(name, how, monkeypatch):
    model = on_gpu(name, head_dim=16)
    done = rollouts(model, lengths=(5, 200), new=100)
    checkpoint(model, how)
    upstream = torch.randn(collate(done).tokens.shape, generator=torch.Generator().manual_seed(0)).cuda()
    with monkeypatch.context() as m:
        by_flex(m)
        m.setattr(twins, "attend", refuse)
        mine, gradients = logprobs_and_gradients(model, done, upstream)
    under_the_mask(monkeypatch)
    theirs, expected = logprobs_and_gradients(model, done, upstream)
    assert (mine - theirs).abs().max() < 2e-3  # FlexAttention multiplies fp32 in tf32 where it likes
    for n, gradient in expected.items():
        assert error(gradients[n], gradient) < 2e-2, n


@pytest.mark.parametrize("compressor", ["rkv", "snapkv", "window", "random"])
def test_bf16_first_ratio_is_one_up_to_the_noise_of_dense_rollouts(compressor):
    """The learner's first ratio and the gap to the sampler are at the noise of bf16 kernels; dense replay is not."""
    model = on_gpu("qwen2", torch.bfloat16, **SMALL)
    gaps = {}
    for name, view in (("dense", "dense"), (compressor, "shadow"), (compressor, "dense")):
        done = rollouts(model, name, new=200)
        scored = score(model, collate(done), 1024, view=view)
        gaps[name, view] = scored.gap[scored.sampled.mask].abs().mean().item()
        if view == "shadow":
            rewards = torch.tensor([1.0, 0.0] * (len(done) // 2))
            advantages, _ = advantage(rewards, torch.tensor([t.prompt_index for t in done]))
            (batch,) = batches_of(scored, advantages, PRESETS["sparse-rl"], Loss(), 1)
            assert torch.equal(batch.mask, scored.sampled.mask)  # nothing to reject
            learner = Learner(copy.deepcopy(model), OptimizerSettings(lr=1e-6), Loss(), micro_batch_tokens=1024)
            found = learner.step(batch).metrics
            assert abs(found["update/drift/mean"]) < 1e-3 and found["update/clip/frac"] < 0.01
    assert gaps[compressor, "shadow"] < 1.5 * gaps["dense", "dense"]
    assert gaps[compressor, "dense"] > 3 * gaps["dense", "dense"]


def test_memory_follows_the_tokens():
    """Four times the tokens take about four times the memory of forward and backward; a mask would take sixteen."""
    model = on_gpu("qwen2", torch.bfloat16, **SMALL)
    peaks = []
    for tokens in (2048, 8192):
        evicted_at = Trace.dense(SMALL["num_hidden_layers"], SMALL["num_key_value_heads"], tokens).evicted_at.to(
            torch.int32
        )
        for moment in range(640, tokens, 128):  # a window: the oldest go
            evicted_at[..., moment - 640 : moment - 512] = moment
        trace = Trace(evicted_at.to(torch.uint16))
        ids = torch.randint(1, 60, (1, tokens), device="cuda")
        replay = replay_of(model, [(ids[0], trace)])
        asked = torch.ones_like(ids, dtype=torch.bool)
        asked[:, 0] = False
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        batch_logprobs(model, ids, asked, 1.0, replay).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        model.zero_grad()
    assert peaks[1] < 5 * peaks[0]


def test_training_in_the_shadow_view(tmp_path):
    """A bf16 run with distillation, through the recipe: finite, and the gap is rounding."""
    keys = {
        "learn.method": "smd",
        "learn.distill": "shadow-to-dense-forward",
        "run.steps": "2",
        "model.dtype": "bfloat16",
        "eval.every": "2",
        "run.samples": "0",
    }
    train(load_recipe("tiny-sums", list(keys.items())), tmp_path / "run", show=False)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    steps = [line for line in lines if "gap/abs/mean" in line]
    assert len(steps) == 2 and all(line["gap/abs/mean"] < 0.05 and line["update/distill/mean"] > 0 for line in steps)
