"""Compute alpha: the overlap of the sampler's and the dense distribution, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ..cache.segments import Observed
from ..records import Trajectory
from .score import chunk_of, head, hidden_states, replay_of, routes_of
from .support import over_same_tokens


@torch.no_grad()
def overlap(
    model: nn.Module,
    trajectory: Trajectory,
    temperature: float = 1.0,
    observe: Callable[[Observed], None] | None = None,
) -> Tensor:
    """alpha of every response token: the sum over the vocabulary of min(dense, sampler) probability = 1 - total
    variation.

    The sampler's distribution is that of the shadow view, so both are exact. If the sampler drew from a support, both
    are renormalised over it. `observe` is called during the shadow pass. -> fp32 [response]
    """
    device = next(model.parameters()).device
    said = trajectory.tokens != trajectory.beacon_id if trajectory.beacon_id is not None else slice(None)
    sampled = trajectory.response_mask.to(device)[None]
    whole, target_mask = trajectory.tokens.to(device)[None, said], sampled[:, said]  # without beacons
    dense = hidden_states(model, whole)
    seen, routes = replay_of(model, [(trajectory.tokens, trajectory.trace)]), routes_of(model, trajectory.trace)
    seen.observe = observe
    shadow = hidden_states(model, trajectory.tokens.to(device)[None], seen, routes)
    views = ((dense, target_mask), (shadow, sampled))
    pairs = (
        states.last_hidden_state[:, :-1][target_mask[:, 1:]].split(chunk_of(model)) for states, target_mask in views
    )
    shares = []
    drawable = _drawable(trajectory, chunk_of(model))
    for ours, theirs in zip(*pairs, strict=True):
        logits = [head(model, dense, part) for part in (ours, theirs)]
        if drawable is not None:
            logits = over_same_tokens(*logits, *next(drawable))
        p, q = ((z / temperature).softmax(-1) for z in logits)
        shares.append(torch.minimum(p, q).sum(-1))
    return torch.cat(shares) if shares else torch.zeros(0, device=device)


def _drawable(trajectory: Trajectory, chunk: int) -> Iterator[tuple[Tensor, Tensor]] | None:
    """Tokens and margins of the response in chunks; None if all tokens could be drawn."""
    if trajectory.support is None:
        return None
    mask = trajectory.response_mask
    return zip(trajectory.tokens[mask].split(chunk), trajectory.support.margins[mask].split(chunk), strict=True)
