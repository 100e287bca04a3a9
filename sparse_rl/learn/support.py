"""The learner's log-probs over the sampler's support: the tokens that top-k and top-p left (cache/support.py).

    log pi_S(a) = z_a / tau - log sum over S of exp(z / tau)

S belongs to the data: it is the same for old, learner and reference, and for all updates of a step. For the dense view
the sampler records it. In the shadow view the logits are the sampler's up to rounding, so the pass that scores finds S
again. S then stays fixed, because it must not change under the ratio when logits change.

    S = { v : z_v >= max z - margin } + { a }

Shapes: c tokens of a chunk, n target tokens, V vocabulary, K tokens of the largest support.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..cache.support import MOST as MOST
from ..cache.support import Support, ids_of
from ..errors import SparseRLError

_NOTHING = -1e30  # the logit of padding: its probability is 0, and 0 times it is 0


def over_support(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Turn a function of (logits [c, V], targets [c]) into one of (logits, targets, ids of supports [c, K])."""

    def restricted(logits: Tensor, targets: Tensor, ids: Tensor) -> Tensor:
        chosen = logits.gather(1, ids.clamp(min=0).long())  # [c, K]
        return function(padded(chosen, ids), place_in(ids, targets))

    return restricted


def padded(logits: Tensor, ids: Tensor) -> Tensor:
    """The logits of supports, with `_NOTHING` where there is no id. [c, K], [c, K] -> [c, K]"""
    return logits.masked_fill(ids < 0, _NOTHING)


def place_in(ids: Tensor, targets: Tensor) -> Tensor:
    """The places of targets in their supports. [c, K], [c] -> int64 [c]"""
    return (ids == targets[:, None]).int().argmax(1)


def inside(logits: Tensor, targets: Tensor, margins: Tensor) -> Tensor:
    """Which tokens are in the supports of targets, given their margins. logits [c, V] -> bool [c, V]"""
    kept = (logits >= logits.amax(-1, keepdim=True) - margins[:, None]) & (logits > -torch.inf)
    return kept.scatter_(1, targets[:, None], True)


def find_again(logits: Tensor, targets: Tensor, margins: Tensor) -> tuple[Tensor, Tensor]:
    """The supports of targets, given their margins. logits [c, V] -> (counts int32 [c], ids int32, concatenated)"""
    kept = inside(logits, targets, margins)
    return kept.sum(-1, dtype=torch.int32), kept.nonzero()[:, 1].int()


def over_same_tokens(dense: Tensor, shadow: Tensor, targets: Tensor, margins: Tensor) -> list[Tensor]:
    """The logits of both views with -inf outside the supports, which follow from the shadow view. [c, V] each"""
    kept = inside(shadow, targets.to(shadow.device), margins.to(shadow.device))
    return [logits.masked_fill(~kept, -torch.inf) for logits in (dense, shadow)]


def side_by_side(counts: Tensor, ids: Tensor) -> Tensor:
    """Concatenated supports as rows, padded with -1. [c], [sum of counts] -> int32 [c, K]"""
    width = int(counts.max()) if len(counts) else 0
    rows = ids.new_full((len(counts), width), -1)
    return rows.masked_scatter(torch.arange(width, device=ids.device) < counts[:, None], ids)


def ids_for(supports: Sequence[Support | None] | None, rows: Tensor, target_mask: Tensor) -> Tensor | None:
    """The supports of target tokens on the mask's device; None if all tokens could be drawn. bool [B, T] -> [n, K]"""
    if supports is None:
        return None
    return ids_of([supports[row] for row in rows.tolist()], target_mask.cpu()).to(target_mask.device)


def check_recorded(supports: Sequence[Support | None], view: str) -> None:
    """Refuse the dense view, whose logits are not the sampler's, if only margins were recorded."""
    if view == "dense" and any(support is not None and support.ids is None for support in supports):
        raise SparseRLError(
            "the sampler recorded the margin of what it could draw instead of the tokens, which the dense view needs; "
            'sample with Sampling(support="ids").'
        )


def support_metrics(sampled: Sequence[Support | None], used: Sequence[Support | None]) -> dict[str, float]:
    """How many tokens could be drawn, and how often the learner found another number of them than the sampler."""
    pairs = [(s.counts, u.counts) for s, u in zip(sampled, used, strict=True) if s is not None and u is not None]
    if not pairs:
        return {}
    before, after = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    size, found = before[before > 0].double(), after[before > 0]
    if not len(size):
        return {}
    return {
        "support/tokens/mean": size.mean().item(),
        "support/single/frac": (size == 1).double().mean().item(),
        "support/changed/frac": (size != found).double().mean().item(),
    }
