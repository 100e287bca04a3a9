"""Draw tokens from logits, with log-probs under exactly the distribution they were drawn from.

One uniform number per token, from the sequence's own random stream, inverts the cumulative distribution, so what a
sequence samples does not depend on what runs beside it. The arithmetic is in kernels/twins_sample.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..cache.support import MOST
from ..errors import SparseRLError, nearest, require_int
from ..kernels import twins_sample
from ..kernels.twins_sample import Kept

SUPPORTS = ("margins", "ids")


@dataclass(frozen=True)
class Sampling:
    """How responses are drawn."""

    max_new_tokens: int = 256
    temperature: float = 1.0  # 0: greedy; log-probs are then those at temperature 1
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    stop_ids: tuple[int, ...] | None = None  # None: those of the model's configs; (): none
    # The log-probs will be compared with another view's: refuses top-k and top-p, unless the support is recorded.
    for_correction: bool = False
    # With top-k or top-p, what is recorded of the tokens that could be drawn, then at most 512 (cache/support.py):
    # `margins`, from which the shadow view finds them again, or their `ids`, for any view.
    support: str | None = None

    def __post_init__(self):
        require_int(max_new_tokens=self.max_new_tokens)
        require_int(at_least=0, top_k=self.top_k)
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise SparseRLError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number.")
        if not 0 < self.top_p <= 1:
            raise SparseRLError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off).")
        if self.support is not None and self.support not in SUPPORTS:
            raise SparseRLError(f"support is {self.support!r}; {nearest(self.support, SUPPORTS)}")
        if self.support is not None and self.top_k > MOST:
            raise SparseRLError(f"top_k is {self.top_k}, but at most {MOST} tokens are recorded; lower it, or use 0.")
        if self.for_correction and (self.top_k or self.top_p < 1) and self.support is None:
            raise SparseRLError(
                f"top_k {self.top_k} and top_p {self.top_p} cannot be combined with a correction: the sampler's "
                "log-probs are renormalised over the kept tokens and the learner's are not, so every ratio would be "
                'biased by the kept mass; set top_k=0 and top_p=1, or support="ids" for a learner that renormalises '
                "too."
            )
        if self.stop_ids is not None:
            ids = (self.stop_ids,) if isinstance(self.stop_ids, int) else tuple(self.stop_ids)
            if odd := [i for i in ids if not isinstance(i, int) or abs(i) >= 2**31]:
                raise SparseRLError(f"stop_ids holds {str(odd[0])[:30]}, which is not a token id; give ids of tokens.")
            object.__setattr__(self, "stop_ids", ids)

    @property
    def records(self) -> str | None:
        """What is recorded about the tokens that could be drawn; None if every token could be."""
        return self.support if self.temperature > 0 and (self.top_k or self.top_p < 1) else None

    def room(self, vocabulary: int) -> int | None:
        """How many ids are recorded for every token; 0: only margins; None: nothing."""
        return {None: None, "margins": 0, "ids": min(MOST, vocabulary)}[self.records]


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """fp32 log-probs [B, V] of the distribution to sample from."""
    return twins_sample.log_distribution(
        logits, sampling.temperature, sampling.top_k, sampling.top_p, sampling.records is not None
    )


def sample(
    logits: Tensor, stream: Tensor, step: Tensor, sampling: Sampling, room: int = 0
) -> tuple[Tensor, Tensor, Kept | None]:
    """Draw one token per row: (tokens [B], log-probs fp32 [B], which tokens could be drawn).

    A row with non-finite logits has a non-finite log-prob.

    logits [B, V]; stream [B] int64; step [B] int64: how many tokens the sequence has drawn before.
    room: ids that are recorded of every token
    """
    recorded = None if sampling.records is None else room
    return twins_sample.sample(logits, stream, step, sampling.temperature, sampling.top_k, sampling.top_p, recorded)
