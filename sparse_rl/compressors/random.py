"""random: keep slots at random; the floor that every method must beat.

Every eviction draws again, from the random stream of the prompt or, after the prompt, from that of the sequence.
"""

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
