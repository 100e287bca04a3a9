"""window: keep the first few tokens and the most recent ones (StreamingLLM, arXiv 2309.17453).

The original numbers positions inside the cache and evicts one token per step; ours keeps the positions that tokens had
in the text and evicts `interval` tokens at a time.
"""

import torch
from torch import Tensor

from .base import CacheView, Compressor, best, register


@register
class Window(Compressor):
    name = "window"
    uses_values = False
    sinks = 4

    def __init__(
        self, *, sinks: int | None = None, prompt_chunk: int = 0, protect_given: int = 0, forget_given: int = 0
    ):
        super().__init__(sinks=sinks, prompt_chunk=prompt_chunk, protect_given=protect_given, forget_given=forget_given)

    def protected(self, budget: int) -> tuple[int, int]:
        return self.sinks, budget - self.sinks

    def has_room(self, budget: int, prompt: int = 0) -> bool:
        return budget > self.sinks  # nothing is left to choose; there must be one recent slot

    def smallest_budget(self, prompt: int) -> int:
        return self.sinks + 1

    def keep(self, view: CacheView, budget: int) -> Tensor:
        """Where a layer's own window has left the first slots behind, they go first: -> int64 [B, H, budget]"""
        rows, heads, used, _ = view.keys.shape
        if view.given_age is not None and self.uses_given:
            return self._by_writer(view, budget)
        place = torch.arange(budget, device=view.keys.device)
        recent = (used - budget + place).expand(rows, heads, budget)
        if view.unreachable is None:
            return torch.where(place < self.sinks, place, recent)
        lost = view.unreachable.sum(-1, keepdim=True)  # [B, H, 1]: slots are in feed order, so these are the first
        sinks = torch.where(lost < used - budget, (self.sinks - lost).clamp(min=0), 0)
        return torch.where(place < sinks, lost + place, recent)

    def _by_writer(self, view: CacheView, budget: int) -> Tensor:
        """The first slots, the last one, and of the others the most recent, given tokens before or after others."""
        used = view.keys.shape[2]
        slot = torch.arange(used, device=view.keys.device)
        score = self.in_order(slot.float().expand(view.feed.shape), view)
        if view.unreachable is not None:
            score = score.masked_fill(view.unreachable, -torch.inf)
        return best(score.masked_fill((slot < self.sinks) | (slot == used - 1), torch.inf), budget)
