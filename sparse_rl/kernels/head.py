"""Triton kernels that turn the learner's logits into log-probs and back, in one pass each (see twins_learner.py)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .jit import jit

_TILE = dict(BLOCK=4096, num_warps=8)


@jit
def _capped(logits, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        logits = (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0) * softcap  # tanh
    return logits


@jit
def _token_statistics(
    logits, targets, logprobs, entropies, ranks, lse, size, temperature, softcap,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token: with a running maximum m, the sums of exp(z - m) and of exp(z - m) (z - m), and how many are above."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * size
    chosen = _capped(tl.load(logits + tl.load(targets + row)), softcap, SOFTCAP) / temperature
    top = chosen
    total, weighted, above = chosen * 0.0, chosen * 0.0, (chosen * 0.0).to(tl.int32)
    for begin in range(0, size, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        z = _capped(tl.load(logits + i, mask=i < size, other=0.0), softcap, SOFTCAP) / temperature
        z = tl.where(i < size, z, -float("inf"))
        higher = tl.maximum(top, tl.max(z, 0))
        shrink, moved = tl.exp(top - higher), top - higher
        below = z - higher
        share = tl.exp(below)
        weighted = shrink * (weighted + moved * total) + tl.sum(share * tl.where(share > 0, below, 0.0), 0)
        total = shrink * total + tl.sum(share, 0)
        above += tl.sum((z > chosen).to(tl.int32), 0)
        top = higher
    norm = top + tl.log(total)
    tl.store(logprobs + row, chosen - norm)
    tl.store(entropies + row, tl.log(total) - weighted / total)
    tl.store(ranks + row, (1 + above).to(tl.float32))
    tl.store(lse + row, norm)


def token_statistics(
    logits: Tensor, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    tokens, size = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32
    # separate tensors: at addresses inside one tensor, alignment would require another variant
    logprobs, entropies, ranks, lse = (torch.empty(tokens, dtype=torch.float32, device=logits.device) for _ in range(4))
    if tokens:
        _token_statistics[(tokens,)](
            logits, targets.contiguous(), logprobs, entropies, ranks, lse, size, float(temperature),
            float(softcap or 1.0), SOFTCAP=softcap is not None, **_TILE,
        )  # fmt: skip
    return logprobs, entropies, ranks, lse


@jit
def _logit_gradients(
    logits, targets, lse, entropies, from_logprobs, from_entropies, out, size, start, temperature, softcap,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    capped = _capped(tl.load(logits + row * size + i, mask=i < size, other=0.0), softcap, SOFTCAP)
    logprob = capped / temperature - tl.load(lse + row)
    share = tl.exp(logprob)
    hit = (i == tl.load(targets + row) - start).to(tl.float32)
    gradient = (hit - share) * tl.load(from_logprobs + row)
    if ENTROPY:
        pull = share * tl.where(share > 0, logprob + tl.load(entropies + row), 0.0)
        gradient -= tl.load(from_entropies + row) * pull
    if SOFTCAP:
        gradient *= 1.0 - (capped / softcap) * (capped / softcap)
    tl.store(out + row * size + i, (gradient / temperature).to(out.dtype.element_ty), mask=i < size)


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
    tokens, size = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32
    out = torch.empty(tokens, size, dtype=dtype, device=logits.device)
    if tokens:
        _logit_gradients[(tokens, triton.cdiv(size, _TILE["BLOCK"]))](
            logits, targets.contiguous(), lse, entropies, from_logprobs.contiguous(),
            (from_logprobs if from_entropies is None else from_entropies).contiguous(), out, size, start,
            float(temperature), float(softcap or 1.0),
            SOFTCAP=softcap is not None, ENTROPY=from_entropies is not None, **_TILE,
        )  # fmt: skip
    return out
