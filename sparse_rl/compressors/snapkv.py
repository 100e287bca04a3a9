"""snapkv: keep what the last few queries attend to, pooled over neighbours (arXiv 2404.14469), used while decoding."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import kernels
from ..errors import SparseRLError
from .base import CacheView, ScoreCompressor, register


def strongest_logits(view: CacheView, window: int) -> Tensor:
    """Of the last `window` queries over all slots; the strongest query head speaks for its group. -> fp32 [B, H, W, S]"""
    if view.keys.is_cuda and kernels.has_triton() and view.unreachable is None and window <= 64:
        from ..kernels.evict import observed_logits

        return observed_logits(view.queries[:, :, -window:], view.keys, view.scaling, view.softcap)
    return view.attention_logits(last=window).amax(2)


def observed_importance(view: CacheView, window: int, pool: int) -> Tensor:
    """Max-pooled attention of the last `window` queries over the slots before them. -> [B, H, S - window]"""
    candidates = view.keys.shape[2] - window
    logits = strongest_logits(view, window)[..., :candidates]  # [B, H, W, S - w]
    attention = logits.softmax(-1).mean(2)
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
            return torch.zeros_like(view.feed, dtype=torch.float32)  # nothing but window: nothing to choose
        return F.pad(observed_importance(view, self.window, self.pool), (0, self.window))
