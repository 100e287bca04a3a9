"""Recover the supports of the shadow view in the pass that scores (support.py defines them).

Shapes: B sequences, T tokens (padded), n target tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..cache import Support
from .head import plain_head
from .score import causal_lm_of, chunk_of, head, logprobs_entropies_ranks
from .support import find_again, over_support, side_by_side


def needs_search(supports: Sequence[Support | None], rows: Tensor) -> bool:
    """Whether only margins were recorded for some rows."""
    own = [supports[row] for row in rows.tolist()] if supports else []
    return any(support is not None and support.ids is None for support in own)


@torch.no_grad()
def score_and_find(
    model: nn.Module,
    states,
    tokens: Tensor,
    target_mask: Tensor,
    temperature: float,
    rows: Tensor,
    supports: list[Support | None],
) -> Tensor:
    """`score_of` some rows over the supports that follow from their margins; these are put into `supports`.

    One pass through the head finds the supports chunk by chunk, and the log-probs over them. tokens, target_mask
    [B, T]; rows [B]: the indices of these rows in `supports` -> fp32 [n, 3]
    """
    known, targets, mask = plain_head(causal_lm_of(model)), tokens[target_mask], target_mask.cpu()
    before = states.last_hidden_state[:, :-1][target_mask[:, 1:]]  # [n, hidden]
    own = [support for row in rows.tolist() if (support := supports[row]) is not None]
    margins = torch.cat([s.margins[m[: len(s.margins)]] for s, m in zip(own, mask, strict=True)]).to(tokens.device)
    function, found = over_support(logprobs_entropies_ranks(temperature)), []
    for part, wanted, margin in zip(*(x.split(chunk_of(model)) for x in (before, targets, margins)), strict=True):
        logits = head(model, states, part) if known is None else known.logits(part)
        counts, ids = find_again(logits, wanted, margin)
        found.append((function(logits, wanted, side_by_side(counts, ids)), counts, ids))
    values, counts, ids = (torch.cat(parts) for parts in zip(*found, strict=True))
    by_row = counts.cpu().split(mask.sum(1).tolist())
    ids_by_row = ids.cpu().split([int(count.sum()) for count in by_row])
    for row, support, asked, count, listed in zip(rows.tolist(), own, mask, by_row, ids_by_row, strict=True):
        whole = torch.zeros_like(support.counts).masked_scatter(asked[: len(support.counts)], count)
        supports[row] = replace(support, counts=whole, ids=listed)
    return values
