"""Budgets that differ by layer at equal memory, with the budget as their mean.

All layers of a row are evicted at the same moments, when the layer with the smallest budget is full. Each then keeps as
many slots as its own budget, or all that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import SparseRLError


def as_budgets(given: Any) -> tuple[int, ...]:
    """Budgets by layer, as a user gives them; (): all layers have the same."""
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise SparseRLError(f"layer_budgets is {given!r:.80}; it must be a list with a number of slots for each layer.")
    wrong = [budget for budget in given if type(budget) is not int or budget < 1]
    if wrong:
        raise SparseRLError(
            f"layer_budgets has {wrong[0]!r:.40}; every layer keeps a whole number of slots, at least 1."
        )
    return tuple(given)


def said(budget: int, budgets: Sequence[int]) -> str:
    """What layers keep, in words."""
    if len(set(budgets)) < 2:
        return str(budget)
    return f"{budget} ({min(budgets)} to {max(budgets)} by layer)"


def check_mean(budgets: Sequence[int], budget: int) -> None:
    """Refuse budgets that take other memory than the budget says."""
    if sum(budgets) != budget * len(budgets):
        raise SparseRLError(
            f"layer_budgets keep {sum(budgets) / len(budgets):g} slots on average, but the budget is {budget}; "
            f"their sum must be {len(budgets)} x {budget} = {len(budgets) * budget}, not {sum(budgets)}."
        )


def check_layers(budgets: Sequence[int], layers: int, architecture: str) -> None:
    if budgets and len(budgets) != layers:
        raise SparseRLError(
            f"layer_budgets has {len(budgets)} numbers, but {layers} layers of {architecture} have slots; give one for "
            "each of them."
        )
