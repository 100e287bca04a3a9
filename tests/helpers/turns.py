"""Conversations without an engine that holds any: parts of completions that somebody else is said to have written."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from sparse_rl.records import Trajectory


def with_given(trajectories: Sequence[Trajectory], seed: int = 0) -> list[Trajectory]:
    """Random spans of every completion count as given. A trace does not say who wrote a token."""
    g = torch.Generator().manual_seed(seed)
    found = []
    for t in trajectories:
        given = torch.zeros(len(t.tokens), dtype=torch.bool)
        at = t.num_prompt_tokens + int(torch.randint(1, 5, (1,), generator=g))
        while at < len(t.tokens) - 1:
            length, sampled = torch.randint(1, 7, (2,), generator=g).tolist()
            given[at : min(at + length, len(t.tokens) - 1)] = True
            at += length + sampled
        found.append(replace(t, given=given, sampler_logprobs=torch.where(given, 0.0, t.sampler_logprobs)))
    return found
