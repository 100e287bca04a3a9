"""prompt-only: evict the prompt once, when it has been read, down to the budget; the response never (arXiv 2605.06850's setting).

`prompt-only` lets snapkv choose, `prompt-only:rkv` another one; options are the chooser's. The interval has no meaning here.
"""

from __future__ import annotations

from torch import Tensor

from ..errors import SparseRLError
from .base import CacheView, Compressor, make, register


@register
class PromptOnly(Compressor):
    name = "prompt-only"
    evicts_response = False

    def __init__(self, chooser: str | Compressor = "snapkv", /, **options):
        super().__init__()
        self.chooser = chooser = make(chooser, **options)
        self.name = f"prompt-only:{chooser.name}"
        if not chooser.evicts_response:
            raise SparseRLError(
                f"{self.name}: {chooser.name} does not choose among slots; use one that does, such as prompt-only:snapkv."
            )
        if chooser.protect_prompt:
            raise SparseRLError(
                f"{self.name} evicts nothing but the prompt, so protect_prompt leaves it nothing; set it to False."
            )
        self.num_queries, self.uses_mass = chooser.num_queries, chooser.uses_mass
        self.uses_values, self.copies = chooser.uses_values, chooser.copies

    def keep(self, view: CacheView, budget: int) -> Tensor:
        return self.chooser.keep(view, budget)

    def evicts_prompt(self, tokens: int) -> bool:
        return tokens > self.budget

    def capacity(self, prompt: int, new: int) -> int:
        return min(prompt, self.budget) + new

    def rule(self) -> str:
        return f"prompt evicted to {self.budget}, response whole"

    def bind(self, budget: int, interval: int) -> Compressor:
        bound = super().bind(budget, interval)
        bound.chooser = self.chooser.bind(budget, interval)
        return bound

    def protected(self, budget: int) -> tuple[int, int]:
        return self.chooser.protected(budget)

    def has_room(self, budget: int, prompt: int = 0) -> bool:
        return self.chooser.has_room(budget, prompt)

    def smallest_budget(self, prompt: int) -> int:
        return self.chooser.smallest_budget(prompt)
