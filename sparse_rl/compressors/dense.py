"""dense: keep everything. The cache must hold the longest prompt and all new tokens."""

from .base import Compressor, register


@register
class Dense(Compressor):
    name = "dense"
    evicts = False
    has_budget = False
    evicts_response = False

    def capacity(self, prompt: int, new: int) -> int:
        return prompt + new

    def rule(self) -> str:
        return "nothing evicted"

    def has_room(self, budget: int, prompt: int = 0) -> bool:
        return True  # nothing is chosen, so the budget has no meaning
