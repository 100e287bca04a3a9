"""Policy gradient for evictions: treats the scorer of `learned` as a policy and moves it by the group's advantage.

With a temperature tau the compressor evicts the m slots with the highest -s / tau + g among those that may go: s is a
slot's score, g Gumbel noise from the sequence's own stream. This draws slots one after the other without replacement,
so an eviction has a log-probability (Plackett-Luce; NGC, arXiv 2604.18002, does so with blocks of slots):

    log p = sum over j = 1 .. m of  [ u_j - log sum over i >= j of exp(u_i) ]     u = -s / tau, in the order of the draw

It depends on the scorer's parameters and on the features of the slots. The features are rebuilt from the forward pass
under the trace, as for regret (scorer.py). The noise is a hash, so it can be drawn again. The share of agreement says
how many of the evicted tokens the rebuilt eviction evicts, too. With the advantage A of the trajectory, relative to
its group, and the probability p_old under the scorer that sampled:

    loss = - mean over evictions, layers and heads of  min( r A, clip(r, 0.8, 1.2) A ),     r = p / p_old

Before the first optimizer step r is 1, and this is the policy gradient. Features are constants, so the language model
gets no gradient (NGC has no scorer and trains the model instead). Evictions of a prompt are left out: they are common
to its group, so no advantage can tell them apart.

Shapes: n evictions, H KV heads, C candidates (slots before the window), F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..compressors import CacheView
from ..compressors.learned import Learned, features, gumbel

CLIP = 0.2
_NEVER = -1e9  # u of a slot that cannot be drawn


@dataclass(frozen=True)
class Actions:
    """Some evictions of one layer. Candidates are in the order of the draw, evicted ones first."""

    x: Tensor  # fp32 [n, H, C, F]
    possible: Tensor  # bool [n, H, C]: may be drawn, neither always kept nor gone anyway
    count: Tensor  # int64 [n, H]: how many were drawn
    old: Tensor  # fp32 [n, H]: log-probs under the scorer that drew them
    agreed: Tensor  # fp32 [n, H]: share of the evicted slots that the rebuilt eviction evicts, too
    advantage: Tensor  # fp32 [n]


def log_prob(scores: Tensor, temperature: float, possible: Tensor, count: Tensor) -> Tensor:
    """The log-probability of each eviction. scores [n, H, C] in the order of the draw -> [n, H]"""
    u = (-scores / temperature).masked_fill(~possible, _NEVER)
    left = u.flip(-1).logcumsumexp(-1).flip(-1)  # log sum of exp over this one and those after it
    drawn = torch.arange(u.shape[-1], device=u.device) < count[..., None]
    return torch.where(drawn, u - left, 0.0).sum(-1)


def policy_loss(logp: Tensor, actions: Actions) -> Tensor:
    """The clipped policy-gradient loss. logp [n, H] -> a number"""
    ratio, advantage = (logp - actions.old.to(logp.device)).exp(), actions.advantage.to(logp.device)[:, None]
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()


def rebuilt(view: CacheView, evicted: Tensor, compressor: Learned, advantage: float) -> Actions:
    """Rebuild some evictions of one layer from the features of its slots. evicted: bool [n, H, S], from the trace"""
    assert compressor.scorer is not None and view.layer is not None and compressor.temperature > 0
    count = evicted.shape[-1] - compressor.window
    x = features(view, compressor.window, compressor.scorer.kind)  # [n, H, C, F]
    scores = compressor.scorer.scores(x, view.layer)
    stays = compressor.forced(view, compressor.budget).expand(view.feed.shape)[..., :count]
    possible = ~stays if view.unreachable is None else ~stays & ~view.unreachable[..., :count]
    gone = evicted[..., :count] & possible
    noisy = compressor.temperature * gumbel(view, count) - scores  # high ones are evicted
    number = gone.sum(-1)
    place = noisy.masked_fill(~possible, -torch.inf).argsort(-1, descending=True).argsort(-1)  # 0: the first to go
    again = place < number[..., None]
    order = torch.where(gone, place, place + count).argsort(-1)
    scores, possible = scores.gather(-1, order), possible.gather(-1, order)
    return Actions(
        x.gather(2, order[..., None].expand(x.shape)).cpu(),
        possible.cpu(),
        number.cpu(),
        log_prob(scores, compressor.temperature, possible, number).cpu(),
        ((again & gone).sum(-1) / number.clamp(min=1)).cpu(),
        torch.full((len(x),), advantage, dtype=torch.float32),
    )


def joined_actions(parts: Sequence[Actions]) -> Actions:
    """Concatenate evictions that have equally many candidates."""
    return replace(parts[0], **{name: torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])})
