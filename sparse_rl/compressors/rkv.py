"""rkv: importance minus redundancy (R-KV, arXiv 2505.24133).

    Z = lambda * I - (1 - lambda) * R

I is SnapKV's pooled attention (snapkv.py). R says how much a key repeats the others (`redundancy` in kernels/twins.py,
and as a kernel in kernels/evict.py). The newest of several near-copies does not count as a repetition, so that one of
them survives. (Where a slot has no copy, the authors' code exempts column 0; ours exempts nothing.) Lambda,
`importance_weight`, is 0.1, as in the authors' README; the class in their code has 0.07.
"""

from torch import Tensor
from torch.nn import functional as F

from ..kernels import ops
from ..kernels.twins import BLOCK_ELEMENTS as BLOCK_ELEMENTS  # planning/memory.py counts them
from .base import CacheView, register
from .snapkv import SnapKV


@register
class RKV(SnapKV):
    name = "rkv"

    def __init__(self, *, importance_weight: float = 0.1, threshold: float = 0.5, **options):
        super().__init__(**options)
        self.importance_weight = importance_weight  # the paper's lambda
        self.threshold = threshold  # keys with a cosine above it are copies

    def score(self, view: CacheView) -> Tensor:
        if view.keys.shape[2] <= self.window:
            return super().score(view)
        importance = self.importance(view)
        repeated = ops.redundancy(view.keys, self.threshold)[..., : importance.shape[-1]]
        # The window is kept whatever its score, so it gets 0.
        return F.pad(self.importance_weight * importance - (1 - self.importance_weight) * repeated, (0, self.window))
