"""window: the first few tokens and the most recent ones (StreamingLLM, arXiv 2309.17453), at their original positions."""

import torch
from torch import Tensor

from ..errors import SparseRLError
from .base import CacheView, Compressor, register


@register
class Window(Compressor):
    name = "window"
    sinks = 4

    def protected(self, budget: int) -> tuple[int, int]:
        return self.sinks, budget - self.sinks

    def check_room(self, budget: int, sinks: int, window: int) -> None:
        if budget <= sinks:
            raise SparseRLError(f"window: budget {budget} must be above the {sinks} sinks; raise it to at least {sinks + 1}.")

    def keep(self, view: CacheView, budget: int) -> Tensor:
        rows, heads, used, _ = view.keys.shape
        slot = torch.arange(used, device=view.keys.device)
        kept = torch.cat([slot[: self.sinks], slot[used - (budget - self.sinks) :]])
        return kept.expand(rows, heads, budget)
