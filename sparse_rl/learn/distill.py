"""Distil one view of a trajectory into the other, exact over the vocabulary, in chunks (Shadow Mask Distillation).

    dense-to-shadow            KL( dense || sg(shadow) )    pulls the dense view to the shadow view: deploy dense
    shadow-to-dense-forward    KL( sg(dense) || shadow )    pulls the shadow view to the dense view: deploy sparse
    shadow-to-dense-reverse    KL( shadow || sg(dense) )    the same, weighted by the shadow view's own distribution

The view that is pulled is the student; sg stops the gradient of the other view, the teacher. Shapes: n response tokens,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .score import head, hidden_states, over_chunks

DISTILL_WEIGHT = 0.1  # the default of lambda


@dataclass(frozen=True)
class Direction:
    student: str  # the view that gets the gradient
    from_teacher: bool  # KL(teacher || student) instead of KL(student || teacher)


DIRECTIONS = {
    "dense-to-shadow": Direction("dense", False),
    "shadow-to-dense-forward": Direction("shadow", True),
    "shadow-to-dense-reverse": Direction("shadow", False),
}


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of two log-distributions. [n, V] -> [n]"""
    return (first.exp() * (first - second)).sum(-1)


def distillation(
    model: nn.Module, tokens: Tensor, target_mask: Tensor, shadow, direction: str, temperature: float
) -> Tensor:
    """The KL between the two views of every target token.

    tokens [B, T], target_mask bool [B, T]; shadow: the hidden states of the shadow view -> fp32 [B, T]
    """
    chosen = DIRECTIONS[direction]
    with torch.set_grad_enabled(chosen.student == "dense" and torch.is_grad_enabled()):
        dense = hidden_states(model, tokens)
    student, teacher = (dense, shadow) if chosen.student == "dense" else (shadow, dense)
    teacher_states = teacher.last_hidden_state[:, :-1][target_mask[:, 1:]].detach()  # [n, hidden]
    function = _divergence_from(model, teacher, chosen, temperature)
    values = over_chunks(model, student, target_mask, function, teacher_states)
    return values.new_zeros(tokens.shape).masked_scatter(target_mask, values)


def _divergence_from(
    model: nn.Module, teacher, direction: Direction, temperature: float
) -> Callable[[Tensor, Tensor], Tensor]:
    def function(logits: Tensor, states: Tensor) -> Tensor:
        with torch.no_grad():
            theirs = (head(model, teacher, states) / temperature).log_softmax(-1)
        ours = (logits / temperature).log_softmax(-1)
        return divergence(theirs, ours) if direction.from_teacher else divergence(ours, theirs)

    return function
