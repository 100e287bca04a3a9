"""Compute log-probs that the sampler did not record: those of an echoed prompt and of other likely tokens.

One pass over a finished answer in the shadow view, where every token sees what the sampler saw, gives the distributions
that were sampled from.
"""

from __future__ import annotations

import torch
from torch import nn

from ..learn.score import chunk_of, head, hidden_states, replay_of, routes_of
from ..models import evaluating
from ..records import Trajectory
from ..rollout import Sampling
from ..rollout.sampling import log_distribution
from .answer import Top


@torch.no_grad()
def score(
    model: nn.Module, trajectory: Trajectory, sampling: Sampling, top: int, first: int
) -> tuple[list[float], Top | None]:
    """Log-probs of the tokens from `first` (1 or more) on, and the `top` most likely tokens at each of these places."""
    device = next(model.parameters()).device
    tokens = trajectory.tokens.to(device)
    with evaluating(model):
        replay, routes = replay_of(model, [(trajectory.tokens, trajectory.trace)]), routes_of(model, trajectory.trace)
        states = hidden_states(model, tokens[None], replay, routes)
        found, ids, values = [], [], []
        hidden, targets = states.last_hidden_state[0, first - 1 : -1], tokens[first:]
        for part, chosen in zip(hidden.split(chunk_of(model)), targets.split(chunk_of(model)), strict=True):
            logprobs = log_distribution(head(model, states, part), sampling)  # [n, V]
            found += logprobs.gather(1, chosen[:, None])[:, 0].tolist()
            if top:
                best = logprobs.topk(min(top, logprobs.shape[1]), -1)
                ids, values = ids + best.indices.tolist(), values + best.values.tolist()
    return found, Top(ids, values) if top else None
