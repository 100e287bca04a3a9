"""vase: keep wide values, and draw the rest in proportion to attention (VaSE-AttnV, arXiv 2606.03928).

    protected   a quarter of the budget: the slots whose value has the widest range, max_d v - min_d v; sinks are among
                them
    drawn       the rest, without replacement, with probability proportional to w, the attention of the last queries
                over the candidates, averaged over queries, over 5 neighbours and over the query heads of a KV head

Drawing without replacement in proportion to w is the same as taking the highest log w + Gumbel noise, so it is a score.
The noise is a hash of the sequence's stream, so a sequence and its prefix always keep the same slots. With
`protect_prompt` it is a quarter of what the prompt leaves.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import SparseRLError, require_int
from ..streams import mix, uniform
from .base import CacheView, ScoreCompressor, register

_LEAST = 1e-30  # of w: sets of exact zeros would be ordered by slot number
_CERTAIN = 1e3  # above every log w + noise
_AT_A_TIME = 8  # queries whose logits exist


@register
class VaSE(ScoreCompressor):
    name = "vase"
    sinks = 4

    def __init__(
        self,
        *,
        window: int | None = None,
        queries: int | None = None,
        pool: int = 5,
        wide: float = 0.25,
        temperature: float = 1.0,
        **options,
    ):
        """`window` None: the published 64, or an eighth of a budget below 512; `queries` None: as many."""
        super().__init__(**options)
        if queries is not None:
            require_int(queries=queries)
        require_int(pool=pool)
        if pool % 2 == 0 or not 0 <= wide < 1 or temperature <= 0:
            raise SparseRLError(
                f"{self.name}: pool {pool} must be odd, wide {wide} at least 0 and below 1, and temperature "
                f"{temperature} above 0."
            )
        self.recent, self.observed = window, queries
        self.pool, self.wide, self.temperature = pool, wide, temperature
        self.num_queries = self._observed(self.budget)

    def protected(self, budget: int) -> tuple[int, int]:
        return self.sinks, min(64, budget // 8) if self.recent is None else self.recent

    def _observed(self, budget: int) -> int:
        return max(1, self.protected(budget)[1]) if self.observed is None else self.observed

    def bind(self, budget: int, interval: int) -> Self:
        bound = super().bind(budget, interval)
        bound.num_queries = bound._observed(budget)
        return bound

    def score(self, view: CacheView) -> Tensor:
        used = view.keys.shape[2]
        candidates = used - self.protected(self.budget)[1]
        if candidates <= 0:
            return torch.zeros_like(view.feed, dtype=torch.float32)  # there is nothing but the window
        feed = view.feed.long()
        this_eviction = mix(view.streams[..., None] + feed[..., -1:])  # [B, H, 1]
        noise = -torch.log(-torch.log(uniform(this_eviction, feed[..., :candidates]).double())).float()
        drawn = self._attention(view, candidates).clamp(min=_LEAST).log() + noise
        ranges = self._ranges(view, candidates)
        wide = _rank(ranges) < self._num_wide(view)
        return F.pad(torch.where(wide, _CERTAIN + ranges.clamp(max=1e6), drawn), (0, used - candidates))

    def _attention(self, view: CacheView, candidates: int) -> Tensor:
        """w. -> fp32 [B, H, C]"""
        queries, total = view.last_queries(self.num_queries), torch.zeros((), device=view.keys.device)
        for start in range(0, queries.shape[2], _AT_A_TIME):
            logits = view.logits_of(queries[:, :, start : start + _AT_A_TIME])[..., :candidates]  # [B, H, G, W', C]
            total = total + (logits / self.temperature).softmax(-1).sum(3).mean(2)
        return F.avg_pool1d(total / queries.shape[2], self.pool, stride=1, padding=self.pool // 2)

    def _ranges(self, view: CacheView, candidates: int) -> Tensor:
        """Of the values; sinks have the widest. A slot that is kept or gone anyway does not count. -> fp32 [B, H, C]"""
        assert view.values is not None
        values = view.values[:, :, :candidates]
        ranges = values.amax(-1).float() - values.amin(-1).float()
        ranges[..., : self.sinks] = torch.inf
        if self.protect_prompt:
            ranges = ranges.masked_fill(view.is_prompt[..., :candidates], -torch.inf)
        if view.unreachable is not None:
            ranges = ranges.masked_fill(view.unreachable[..., :candidates], -torch.inf)
        return ranges

    def _num_wide(self, view: CacheView) -> Tensor | int:
        """How many slots stay for their values: of all heads, or [B, H, 1]."""
        if not self.protect_prompt:
            return int(self.budget * self.wide)
        return ((self.budget - view.is_prompt.sum(-1, keepdim=True)) * self.wide).long()


def _rank(values: Tensor) -> Tensor:
    """0 for the largest; of equal ones the newer comes first. [B, H, C] -> int64 [B, H, C]"""
    order = values.flip(-1).argsort(dim=-1, descending=True, stable=True)
    return order.argsort(dim=-1).flip(-1)
