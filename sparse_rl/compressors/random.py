"""random: the floor every method must beat. Draws anew at each eviction, from the prompt's or the sequence's own stream."""

from torch import Tensor

from ..streams import mix, uniform
from .base import CacheView, ScoreCompressor, register


@register
class Random(ScoreCompressor):
    name = "random"
    uses_values = False

    def score(self, view: CacheView) -> Tensor:
        feed = view.feed.long()
        this_eviction = mix(view.streams[..., None] + feed[..., -1:])  # [B, H, 1]
        return uniform(this_eviction, feed)
