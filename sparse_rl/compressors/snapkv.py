"""snapkv: keep what the last few queries attend to, pooled over neighbours (arXiv 2404.14469), used while decoding.

The default is the variant of R-KV's authors: the softmax goes over the slots before the window, of the highest logit
among the query heads of a KV head, and neighbours are pooled by their maximum. With `original: true` it is that of
SnapKV's authors: every query head has a softmax of its own over all slots that the query sees, the mean over a KV
head's query heads counts, and neighbours are averaged.

                window   pool   pooling
    default     8        7      max
    original    32       5      avg
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import SparseRLError
from ..kernels import ops
from .base import CacheView, ScoreCompressor, register

POOLINGS = {"max": F.max_pool1d, "avg": F.avg_pool1d}


@register
class SnapKV(ScoreCompressor):
    name = "snapkv"
    uses_values = False
    window = 8
    copies = 1.0

    def __init__(
        self,
        *,
        window: int | None = None,
        pool: int | None = None,
        pooling: str | None = None,
        original: bool = False,
        **options,
    ):
        """`pool`: over how many neighbours; window, pool and pooling None: see above."""
        super().__init__(window=32 if original and window is None else window, **options)
        pool = (5 if original else 7) if pool is None else pool
        pooling = ("avg" if original else "max") if pooling is None else pooling
        if self.window < 1 or pool < 1 or pool % 2 == 0:
            raise SparseRLError(
                f"{self.name}: window {self.window} must be at least 1 and pool {pool} odd and positive."
            )
        if pooling not in POOLINGS:
            raise SparseRLError(f"{self.name}: pooling is {pooling!r}; it must be one of {', '.join(POOLINGS)}.")
        self.pool, self.pooling, self.original = pool, pooling, original
        self.num_queries = self.window
        self.copies = 3.0 if original else self.copies

    def score(self, view: CacheView) -> Tensor:
        if view.keys.shape[2] <= self.window:
            return torch.zeros_like(view.feed, dtype=torch.float32)  # there is nothing but the window
        return F.pad(self.importance(view), (0, self.window))

    def importance(self, view: CacheView) -> Tensor:
        """Pooled attention of the last `window` queries to the slots before them. -> [B, H, S - window]"""
        attention = own_attention(view, self.window) if self.original else joint_attention(view, self.window)
        return POOLINGS[self.pooling](attention, self.pool, stride=1, padding=self.pool // 2)


def joint_attention(view: CacheView, window: int) -> Tensor:
    """One softmax per KV head, of its heads' highest logits, over the slots before the window. -> [B, H, S - window]"""
    candidates = view.keys.shape[2] - window
    queries = view.last_queries(window)
    logits = ops.observed_logits(queries, view.keys, view.scaling, view.softcap, view.unreachable)  # [B, H, W, S]
    return logits[..., :candidates].softmax(-1).mean(2)


def own_attention(view: CacheView, window: int) -> Tensor:
    """One softmax per query head, over all slots that a query sees; the mean over heads. -> [B, H, S - window]"""
    used, total = view.keys.shape[2], torch.zeros((), device=view.keys.device)
    slot, queries = torch.arange(used, device=view.keys.device), view.last_queries(window)
    count = queries.shape[2]
    for query in range(count):  # [B, H, G, S] at a time
        logits = view.logits_of(queries[:, :, query : query + 1])[..., 0, :]
        seen = slot <= used - count + query
        total = total + logits.masked_fill(~seen, -torch.inf).softmax(-1).mean(2)[..., : used - window]
    return total / count
