"""Comparing rollouts, and choosing how a step is decoded."""

import torch

from sparse_rl.rollout import capture
from sparse_rl.rollout.fused import FusedForward

FAMILY = ("llama", "qwen2", "qwen3")  # decoded by fused kernels


def fuse_everywhere(monkeypatch):
    """On the CPU too, where the kernels' twins run. Returns a list of what was decided."""
    taken = []
    fits = FusedForward.fits
    monkeypatch.setattr(capture, "fusing_pays", lambda device: True)
    monkeypatch.setattr(FusedForward, "fits", staticmethod(lambda *a: taken.append(fits(*a)) or taken[-1]))
    return taken


def same(mine, theirs, tolerance=1e-5):
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert torch.equal(a.trace.evicted_at, b.trace.evicted_at)
        assert (a.sampler_logprobs - b.sampler_logprobs).abs().max() < tolerance
        assert (a.finish_reason, a.prompt_index, a.sample_index) == (b.finish_reason, b.prompt_index, b.sample_index)
