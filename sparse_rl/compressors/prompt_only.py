"""prompt-only: evict the prompt once, down to the budget, when it has been read; never evict the response.

This is the setting of arXiv 2605.06850. `prompt-only` lets snapkv choose the slots, `prompt-only:rkv` lets rkv choose;
options are those of the chooser. The interval has no meaning here. With `prompt_chunk: N` the prompt is evicted after
every N of its tokens, so that no row ever holds all of it; tokens that the question at its end needs may then be gone.
"""

from __future__ import annotations

from typing import Self

from torch import Tensor, nn

from ..errors import SparseRLError
from .base import CacheView, Compressor, make, register
from .budgets import said


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
                f"{self.name}: {chooser.name} does not choose among slots; "
                "use one that does, such as prompt-only:snapkv."
            )
        if chooser.protect_prompt:
            raise SparseRLError(
                f"{self.name} evicts nothing but the prompt, so with protect_prompt there is nothing to evict; "
                "set it to False."
            )
        if chooser.uses_given:
            raise SparseRLError(
                f"{self.name} evicts nothing but the prompt, so protect_given and forget_given mean nothing; set both "
                "to 0."
            )
        self.num_queries, self.uses_mass = chooser.num_queries, chooser.uses_mass
        self.uses_values, self.copies = chooser.uses_values, chooser.copies
        self.prompt_chunk = chooser.prompt_chunk

    @classmethod
    def parse(cls, argument: str | None, /, **options) -> PromptOnly:
        """The argument is the name of the chooser."""
        return cls(argument or "snapkv", **options)

    def keep(self, view: CacheView, budget: int) -> Tensor:
        return self.chooser.keep(view, budget)

    def decides(self) -> Compressor:
        return self.chooser.decides()

    def evicts_prompt(self, tokens: int) -> bool:
        return tokens > self.least_budget

    def capacity(self, prompt: int, new: int) -> int:
        return min(prompt, self.least_budget) + new

    def rule(self) -> str:
        return f"prompt evicted to {said(self.budget, self.layer_budgets)}, response whole"

    def bind(self, budget: int, interval: int) -> Self:
        bound = super().bind(budget, interval)
        bound.chooser = self.chooser.bind(budget, interval)
        bound.num_queries = bound.chooser.num_queries
        return bound

    def check_model(self, model: nn.Module) -> None:
        self.chooser.check_model(model)

    def attach(self, model: nn.Module) -> None:
        self.chooser.attach(model)

    def protected(self, budget: int) -> tuple[int, int]:
        return self.chooser.protected(budget)

    def has_room(self, budget: int, prompt: int = 0) -> bool:
        return self.chooser.has_room(budget, prompt)

    def smallest_budget(self, prompt: int) -> int:
        return self.chooser.smallest_budget(prompt)
