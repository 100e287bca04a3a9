"""window: keep the first few tokens and the most recent ones (StreamingLLM, arXiv 2309.17453).

The original numbers positions inside the cache, and evicts one token per step; ours keeps the positions that tokens
had in the text, and evicts `interval` tokens at a time.
"""

import torch
from torch import Tensor

from .base import CacheView, Compressor, register


@register
class Window(Compressor):
    name = "window"
    uses_values = False
    sinks = 4

    def __init__(self, *, sinks: int | None = None, prompt_chunk: int = 0):
        super().__init__(sinks=sinks, prompt_chunk=prompt_chunk)

    def protected(self, budget: int) -> tuple[int, int]:
        return self.sinks, budget - self.sinks

    def has_room(self, budget: int, prompt: int = 0) -> bool:
        return budget > self.sinks  # nothing is left to choose; there must be one recent slot

    def smallest_budget(self, prompt: int) -> int:
        return self.sinks + 1

    def keep(self, view: CacheView, budget: int) -> Tensor:
        rows, heads, used, _ = view.keys.shape
        slot = torch.arange(used, device=view.keys.device)
        kept = torch.cat([slot[: self.sinks], slot[used - (budget - self.sinks) :]])
        return kept.expand(rows, heads, budget)
