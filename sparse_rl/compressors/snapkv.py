"""snapkv: keep what the last few queries attend to, pooled over neighbours (arXiv 2404.14469), used while decoding."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import SparseRLError
from ..kernels import ops
from .base import CacheView, ScoreCompressor, register


def observed_importance(view: CacheView, window: int, pool: int) -> Tensor:
    """Max-pooled attention of the last `window` queries over the slots before them. -> [B, H, S - window]"""
    candidates = view.keys.shape[2] - window
    queries = view.last_queries(window)
    logits = ops.observed_logits(queries, view.keys, view.scaling, view.softcap, view.unreachable)  # [B, H, W, S]
    attention = logits[..., :candidates].softmax(-1).mean(2)
    return F.max_pool1d(attention, pool, stride=1, padding=pool // 2)


@register
class SnapKV(ScoreCompressor):
    name = "snapkv"
    uses_values = False
    window = 8
    copies = 1.0

    def __init__(self, *, pool: int = 7, **options):
        super().__init__(**options)
        if self.window < 1 or pool < 1 or pool % 2 == 0:
            raise SparseRLError(
                f"{self.name}: window {self.window} must be at least 1 and pool {pool} odd and positive."
            )
        self.pool = pool
        self.num_queries = self.window

    def score(self, view: CacheView) -> Tensor:
        if view.keys.shape[2] <= self.window:
            return torch.zeros_like(view.feed, dtype=torch.float32)  # there is nothing but the window
        return F.pad(observed_importance(view, self.window, self.pool), (0, self.window))
