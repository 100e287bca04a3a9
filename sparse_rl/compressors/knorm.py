"""knorm: keep keys of small norm (arXiv 2406.11430)."""

from torch import Tensor

from .base import CacheView, ScoreCompressor, register


@register
class KNorm(ScoreCompressor):
    name = "knorm"
    uses_values = False

    def score(self, view: CacheView) -> Tensor:
        return -view.keys.float().norm(dim=-1)
