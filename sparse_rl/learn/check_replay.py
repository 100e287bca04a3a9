"""Check that the learner's log-probs under a trace are the sampler's."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import SparseRLError

# Mean nats by which the log-probs of two kernels may differ: ten times what was observed.
_ROUNDING = {torch.bfloat16: 0.1, torch.float16: 0.1, torch.float32: 0.02}


def check_replay(gap: Tensor, mask: Tensor, dtype: torch.dtype) -> None:
    """Refuse traces that do not belong to their tokens: under its own trace a trajectory has the sampler's log-probs,
    up to rounding.
    """
    rounding, tokens = _ROUNDING.get(dtype, _ROUNDING[torch.float32]), mask.sum(1)
    off = (gap.abs() * mask).sum(1)  # nats per trajectory; few tokens may differ by more than the mean of many
    bad = ~(off <= rounding * tokens.clamp(min=64))
    if not off.sum() <= rounding * tokens.sum().clamp(min=64):  # many short trajectories may each differ by a little
        bad |= off > rounding * tokens
    if bad.any():
        raise SparseRLError(
            f"in the shadow view the learner's log-probs of {int(bad.sum())} of {len(bad)} trajectories differ from "
            f"the sampler's by up to {(off / tokens.clamp(min=1))[bad].max().item():.3g} nats on average, but "
            f"rounding in {str(dtype).removeprefix('torch.')} explains only {rounding}: the traces do not belong to "
            "these tokens, or other weights or another temperature sampled them; sample the trajectories again."
        )
