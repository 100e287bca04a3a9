"""Comparing rollouts, and choosing how a step is decoded."""

from dataclasses import replace

import torch

from sparse_rl.kernels import ops
from sparse_rl.rollout.fused import FusedForward

FAMILY = ("llama", "qwen2", "qwen3")  # decoded by fused kernels


def change_rules(monkeypatch, **changes):
    """Run rollouts by other rules than those of their device."""
    rules = ops.rules
    monkeypatch.setattr(ops, "rules", lambda device: replace(rules(device), **changes))


def fuse_everywhere(monkeypatch):
    """Decode by fused kernels on the CPU too, where their twins run. Returns a list of what was decided."""
    taken = []
    fits = FusedForward.fits
    change_rules(monkeypatch, fuses=True)
    monkeypatch.setattr(FusedForward, "fits", staticmethod(lambda *a: taken.append(fits(*a)) or taken[-1]))
    return taken


def same(mine, theirs, tolerance=1e-5):
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert torch.equal(a.trace.evicted_at, b.trace.evicted_at)
        assert (a.sampler_logprobs - b.sampler_logprobs).abs().max() < tolerance
        assert (a.finish_reason, a.prompt_index, a.sample_index) == (b.finish_reason, b.prompt_index, b.sample_index)
