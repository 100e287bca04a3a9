"""The learner's kernels in plain torch (the others are in twins.py).

B sequences, T tokens, N hidden size, H heads, D head dim, n target tokens, V vocabulary. The first three are
differentiable; the last two are the halves of a differentiable function that never keeps its logits (learn/head.py).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# ------------------------------------------------------------------------------------------------- layers (layers.py)


def add_and_norm(new: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """total = residual + new, and its RMS norm. new, residual [..., N]; weight [N] -> [..., N], [..., N]"""
    total = residual if new is None else residual + new
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    unit = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return total, weight * unit.to(total.dtype)


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of one shape"""
    return F.silu(gate) * up


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary position embedding. query [B, H * G, T, D]; key [B, H, T, D]; cos, sin [1 or B, T, D]"""

    def turned(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]

    return turned(query), turned(key)


# --------------------------------------------------------------------------------------------------- head (head.py)


def token_statistics(
    logits: Tensor, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each target: its log-prob, the entropy of its distribution, its rank (1: likeliest), and the log-sum-exp.

    logits [n, V], fp32 or wider, before soft-cap and temperature; targets int64 [n] -> 4 x [n]
    """
    z = _capped(logits, softcap) / temperature
    lse = z.logsumexp(-1)
    chosen = z.gather(1, targets[:, None])
    entropies = torch.special.entr((z - lse[:, None]).exp()).sum(-1)
    return chosen[:, 0] - lse, entropies, (1 + (z > chosen).sum(-1)).to(z.dtype), lse


def logit_gradients(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropies: Tensor,
    from_logprobs: Tensor,
    from_entropies: Tensor | None,
    start: int,
    temperature: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """The gradients by the logits of vocabulary entries start, ..., start + v - 1, for all tokens.

    logits [n, v]; targets, and what `token_statistics` found of whole rows, [n]; upstream [n] -> [n, v], rounded to
    `dtype`
    """
    capped = _capped(logits, softcap)
    logprobs = capped / temperature - lse[:, None]
    share = logprobs.exp()
    hit = torch.arange(start, start + logits.shape[1], device=logits.device) == targets[:, None]
    gradient = (hit.to(share.dtype) - share) * from_logprobs[:, None]
    if from_entropies is not None:
        pull = from_entropies[:, None] * share * (logprobs + entropies[:, None])
        gradient = gradient - pull.masked_fill(share == 0, 0.0)
    if softcap is not None:
        gradient = gradient * (1 - (capped / softcap) ** 2)
    return (gradient / temperature).to(dtype)


def _capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
