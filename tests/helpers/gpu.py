"""Models on the device, and how far replay is from sampling there."""

import copy

import torch

from sparse_rl import token_logprobs
from sparse_rl.learn.batch import collate
from sparse_rl.learn.score import batch_logprobs, replay_of
from sparse_rl.rollout import capture
from tests.helpers.decoding import change_rules
from tests.helpers.models import tiny

SMALL = dict(
    hidden_size=512,
    intermediate_size=1408,
    num_attention_heads=8,
    num_key_value_heads=2,
    num_hidden_layers=4,
    initializer_range=0.05,
)


def on_gpu(name: str, dtype=torch.float32, **changes):
    return copy.deepcopy(tiny(name, **changes)).to("cuda", dtype)


def eagerly(monkeypatch):
    """Decode launch by launch, through the model's own modules."""
    change_rules(monkeypatch, fuses=False)
    monkeypatch.setattr(capture.Decoder, "capture", lambda self, width: setattr(self, "graphs", None))


def mean_gap(model, trajectories, shadow: bool) -> float:
    gaps = []
    for t in trajectories:
        with torch.no_grad():
            gap = token_logprobs(model, t.tokens, t.trace if shadow else None).cpu() - t.sampler_logprobs
        gaps.append(gap[t.num_prompt_tokens :].abs())
    return torch.cat(gaps).mean().item()


def logprobs_and_gradients(model, trajectories, upstream):
    """Of a padded micro-batch: fp32 [B, T], and every trained parameter's gradient."""
    sampled = collate(trajectories)
    replay = replay_of(model, [(t.tokens, t.trace) for t in trajectories])
    model.zero_grad()
    logprobs = batch_logprobs(model, sampled.tokens.cuda(), sampled.mask.cuda(), 1.0, replay)
    (logprobs * upstream).sum().backward()
    return logprobs.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
