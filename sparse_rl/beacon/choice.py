"""The choice to fold: after a token of an open chunk the policy either continues or folds the chunk into a beacon.

    z = w . h + b                        h: the state after the token, which also predicts the next one
    fold with probability sigmoid(z)     if the chunk has at least `least` and less than `most` tokens
    fold without asking                  if it has `most`

The next token is drawn first. If the response ends with it, there is no choice. So a step of the policy is

    p(x) sigmoid(-z)    the next token is x, and is fed
    sigmoid(z) p(x)     a beacon is fed, then x; after the beacon there is no choice before x

and a trajectory has one log-prob for everything that was fed by choice: that of folding stands at the beacon, and that
of continuing is part of the token's. Temperature, top-k and top-p only concern text and do not change z.

n tokens of a response.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import SparseRLError
from .embedding import Model, beacon_of, check_chunk


def add_choice(model: Model, least: int, most: int, mean: float) -> Model:
    """Let a model with a beacon choose its folds: at first equally likely at every token, in chunks of
    `mean` tokens.
    """
    beacon = beacon_of(model)
    assert beacon is not None, "the beacon comes first"
    check_choice(least, most)
    weight = beacon.beacon.detach()
    bias = torch.full((1,), start_logit(least, most, mean), dtype=torch.float64).to(weight)
    beacon.set_choice(torch.zeros_like(weight), bias, (least, most))
    return model


def choice_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The head of a model that chooses its folds; [] if it does not."""
    beacon = beacon_of(model)
    found = () if beacon is None else (beacon.choice_weight, beacon.choice_bias)
    return [parameter for parameter in found if parameter is not None]


def check_choice(least: int, most: int) -> None:
    for chunk in (least, most):
        check_chunk(chunk)
    if least >= most:
        raise SparseRLError(
            f"chunks of {least} to {most} tokens leave the model nothing to choose; write beacon:2-16, or "
            "beacon:16 for chunks of equal length."
        )


def start_logit(least: int, most: int, mean: float) -> float:
    """The z at which chunks have `mean` tokens on average, if it is the same at every token."""
    if not least < mean < most:
        raise SparseRLError(
            f"chunks cannot have {mean} tokens on average, because each has from {least} to {most}; "
            "choose a number between these."
        )
    low, high = -40.0, 40.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_chunk(least, most, middle) > mean else (low, middle)
    return (low + high) / 2


def mean_chunk(least: int, most: int, logit: float) -> float:
    """The mean number of tokens of a chunk, if z is the same at every token."""
    going_on = 1 / (1 + math.exp(logit))
    return least + sum(going_on**k for k in range(1, most - least + 1))


def choice_logprobs(logits: Tensor, folds: Tensor) -> Tensor:
    """Log-probs of choices to fold or to continue. logits; folds: bool [...]"""
    return F.logsigmoid(torch.where(folds, logits, -logits))


def choice_entropies(logits: Tensor) -> Tensor:
    """Entropies of choices. logits [...]"""
    p = logits.sigmoid()
    return -(p * F.logsigmoid(logits) + (1 - p) * F.logsigmoid(-logits))


def chosen_before(ends: Tensor, counts: Tensor, least: int, most: int) -> Tensor:
    """The tokens of responses before which there was a choice. ends bool [B, n]: a beacon follows; counts [B]: tokens

    -> bool [B, n]. There is no choice before the first token (no chunk is open) and the last one (it is never fed).
    """
    index = torch.arange(ends.shape[1]).expand(ends.shape)
    last = torch.where(ends, index, -1).cummax(1).values  # the last end up to each token
    before = F.pad(last, (1, 0), value=-1)[:, :-1]
    open_tokens = index - before  # of the chunk, when the token has been fed
    choice = (open_tokens >= least) & (open_tokens < most)
    return F.pad(choice, (1, 0))[:, :-1] & (index < counts[:, None] - 1)


def place_choices(sampled: Tensor, ends: Tensor, choices: Tensor) -> Tensor:
    """The places, among everything that was fed, of the choices before a response's tokens: at the beacon or the token.

    sampled bool [T]: the n tokens; ends, choices bool [n] -> int64, one for every choice
    """
    follows = F.pad(ends, (1, 0))[:-1]  # the token follows a beacon
    return (sampled.nonzero()[:, 0] - follows.long())[choices]
