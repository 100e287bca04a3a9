"""rkv: importance minus redundancy (R-KV, arXiv 2505.24133).

    Z = lambda * I - (1 - lambda) * R

I is SnapKV's pooled attention; R says how much a key repeats the others. Where a slot has near-copies, the newest copy is
exempt, so that one of them survives. (The authors' code exempts column 0 when there is no copy; here the row is left alone.)
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import kernels
from .base import CacheView, register
from .snapkv import SnapKV, observed_importance

BLOCK_ELEMENTS = 16 * 2**20  # similarity entries made at a time: [S, S] never exists for all rows at once


def redundancy(keys: Tensor, threshold: float) -> Tensor:
    """How similar each key is to all others on average, as a softmax over the slots. [B, H, S, D] -> [B, H, S]"""
    if keys.is_cuda and kernels.has_triton():
        from ..kernels.evict import redundancy as on_gpu

        return on_gpu(keys, threshold)
    rows, heads, used, _ = keys.shape
    unit = F.normalize(keys.float(), dim=-1)
    slot = torch.arange(used, device=keys.device)
    total = torch.zeros(rows, heads, used, device=keys.device)
    block = max(1, BLOCK_ELEMENTS // (rows * heads * used))
    for start in range(0, used, block):
        i = slot[start : start + block]
        similar = unit[:, :, i] @ unit.transpose(-1, -2)  # [B, H, i, S]
        similar.masked_fill_(i[:, None] == slot, 0.0)
        copies = similar > threshold
        newest = torch.where(copies, slot, -1).amax(-1, keepdim=True)  # [B, H, i, 1]; -1: no copy
        similar.masked_fill_(slot == newest, 0.0)
        total += similar.sum(2)
    return (total / used).softmax(-1)


@register
class RKV(SnapKV):
    name = "rkv"

    def __init__(self, *, importance_weight: float = 0.1, threshold: float = 0.5, **options):
        super().__init__(**options)
        self.importance_weight, self.threshold = (
            importance_weight,
            threshold,
        )  # methods' lambda; cosine above which keys are copies

    def score(self, view: CacheView) -> Tensor:
        if view.keys.shape[2] <= self.window:
            return super().score(view)
        importance = observed_importance(view, self.window, self.pool)
        repeated = redundancy(view.keys, self.threshold)[..., : importance.shape[-1]]
        return F.pad(self.importance_weight * importance - (1 - self.importance_weight) * repeated, (0, self.window))
