"""On a GPU: packed micro-batches against rows one by one, at the noise floor of the dtype."""

import copy

import pytest
import torch

from sparse_rl import Engine, Sampling
from sparse_rl.learn.batch import collate, seen_by
from sparse_rl.learn.packing import packs
from sparse_rl.learn.score import batch_logprobs
from tests.helpers.models import prompts_of, tiny

pytestmark = pytest.mark.gpu
NOISE = {torch.float32: 2e-4, torch.bfloat16: 0.3}  # of two passes through a model with large weights


@pytest.mark.parametrize("dtype", list(NOISE))
@pytest.mark.parametrize("view", ["dense", "shadow"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral"])
def test_packed_rows_are_rows(architecture, view, dtype):
    model = copy.deepcopy(tiny(architecture)).to("cuda", dtype)
    engine = Engine(model, compressor="rkv", budget=24, interval=8, rows=12)
    sampled = collate(engine.generate(prompts_of(60, 33, 90), 4, Sampling(96, 1.0)))
    assert packs(model, "auto")
    rows, found = torch.arange(len(sampled.tokens)), {}
    for packing in (False, True):
        model.zero_grad()
        seen = seen_by(model, sampled, rows, view == "shadow", packing)
        assert not packing or (seen is not None and seen.packing is not None)
        logprobs = batch_logprobs(model, sampled.tokens.cuda(), sampled.mask.cuda(), replay=seen)
        (logprobs / sampled.mask.sum().item()).sum().backward()
        found[packing] = logprobs.detach(), [p.grad.float() for p in model.parameters()]
    gap = (found[True][0] - found[False][0]).abs()
    assert gap.mean() < NOISE[dtype] / 10 and gap.max() < NOISE[dtype]
    norm = sum(g.norm() ** 2 for g in found[False][1]) ** 0.5
    off = sum((a - b).norm() ** 2 for a, b in zip(found[True][1], found[False][1], strict=True)) ** 0.5
    assert off < NOISE[dtype] * norm
