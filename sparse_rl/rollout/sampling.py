"""From logits to tokens and the log-probs of exactly the distribution they were drawn from.

One uniform number per token, from the sequence's own stream, inverts the cumulative distribution: what a sequence samples
does not depend on what runs beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SparseRLError, require_int
from ..streams import uniform


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn. Training keeps top_k and top_p off."""

    max_new_tokens: int = 256
    temperature: float = 1.0  # 0: greedy; log-probs are then those at temperature 1
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    stop_ids: tuple[int, ...] | None = None  # None: what the model's configs say; (): none
    for_correction: bool = False  # the log-probs will be compared with another view's: refuses top-k and top-p

    def __post_init__(self):
        require_int(max_new_tokens=self.max_new_tokens)
        require_int(at_least=0, top_k=self.top_k)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise SparseRLError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number.")
        if not 0 < self.top_p <= 1:
            raise SparseRLError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off).")
        if self.for_correction and (self.top_k or self.top_p < 1):
            raise SparseRLError(
                f"top_k {self.top_k} and top_p {self.top_p} cannot go with a correction: the sampler's log-probs are renormalised over "
                "the kept tokens, the learner's are not, so every ratio would be biased by the kept mass; set top_k=0 and top_p=1."
            )
        if self.stop_ids is not None:
            ids = (self.stop_ids,) if isinstance(self.stop_ids, int) else tuple(self.stop_ids)
            object.__setattr__(self, "stop_ids", ids)


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """fp32 log-probs [B, V] of the distribution to sample from: temperature, then top-k, then top-p, then renormalised."""
    logits = logits.float()
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered = logits.sort(-1, descending=True).values
        probs = (ordered.double() / sampling.temperature).softmax(-1)  # fp32 over a large vocabulary would not sum to 1
        beyond = probs.cumsum(-1) - probs >= sampling.top_p  # the likeliest tokens before this one suffice already
        least = ordered.masked_fill(beyond, torch.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill(logits < least, -torch.inf)  # what is as likely as the last one stays with it
    return (logits / sampling.temperature).log_softmax(-1)


def sample(logits: Tensor, stream: Tensor, step: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token per row: (tokens [B], log-probs fp32 [B]). A row with non-finite logits has a non-finite log-prob.

    logits [B, V]; stream [B] int64, step [B] int64: how many tokens the sequence has drawn before.
    """
    logprobs = log_distribution(logits, sampling)
    if sampling.temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        point = uniform(stream, step)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, point, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
