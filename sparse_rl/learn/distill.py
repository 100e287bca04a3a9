"""Distillation between the two views of a trajectory, exact over the vocabulary, in chunks (Shadow Mask Distillation).

    a   KL( dense || sg(shadow) )    the dense view is pulled to the sparse one: deploy dense
    b   KL( sg(dense) || shadow )    dense teacher, sparse student: deploy sparse
    c   KL( shadow || sg(dense) )    the same, on the student's own distribution

sg: no gradient. Shapes: n response tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .score import head, hidden_states, over_chunks


@dataclass(frozen=True)
class Direction:
    student: str  # the view that gets the gradient
    from_teacher: bool  # KL(teacher || student) instead of KL(student || teacher)


DIRECTIONS = {"a": Direction("dense", False), "b": Direction("shadow", True), "c": Direction("shadow", False)}


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """KL(first || second) of two log-distributions. [n, V] -> [n]"""
    return (first.exp() * (first - second)).sum(-1)


def distillation(model: nn.Module, tokens: Tensor, asked: Tensor, shadow, direction: str, temperature: float) -> Tensor:
    """KL of every token asked for between its two views. tokens [B, T], asked bool [B, T]; shadow: its hidden states -> fp32 [B, T]"""
    how = DIRECTIONS[direction]
    with torch.set_grad_enabled(how.student == "dense" and torch.is_grad_enabled()):
        dense = hidden_states(model, tokens)
    student, teacher = (dense, shadow) if how.student == "dense" else (shadow, dense)
    fixed = teacher.last_hidden_state[:, :-1][asked[:, 1:]].detach()  # [n, hidden]
    values = over_chunks(model, student, asked, _between(model, teacher, how, temperature), fixed)
    return values.new_zeros(tokens.shape).masked_scatter(asked, values)


def _between(model: nn.Module, teacher, how: Direction, temperature: float) -> Callable[[Tensor, Tensor], Tensor]:
    def function(logits: Tensor, states: Tensor) -> Tensor:
        with torch.no_grad():
            theirs = (head(model, teacher, states) / temperature).log_softmax(-1)
        ours = (logits / temperature).log_softmax(-1)
        return divergence(theirs, ours) if how.from_teacher else divergence(ours, theirs)

    return function
