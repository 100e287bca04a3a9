"""A function for slime's `--use-tis --custom-tis-function-path sparse_rl.integrations.slime.corrected` (docs/slime.md).

slime calls it after it has computed and clipped the loss of every token, and before it averages; the function weights
tokens and drops some of them.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import SparseRLError
from ..learn.correct import correct
from .settings import make_correction, refuse_normalised


def corrected(
    args: Namespace,
    *,
    pg_loss: Tensor,  # this rank's response tokens, one sequence after the other
    train_log_probs: list[Tensor],  # of each sequence, this rank's tokens of its response
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],  # of each sequence, its whole response
    total_lengths: list[int],
    response_lengths: list[int],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """(loss of every token, masks of the whole responses, metrics of every token)"""
    from slime.backends.megatron_utils.cp_utils import (  # pyright: ignore[reportMissingImports]
        all_gather_with_cp,
        slice_log_prob_with_cp,
    )

    preset, parts = getattr(args, "sparse_rl_preset", "sparse-rl"), getattr(args, "sparse_rl_correction", None)
    correction = make_correction("slime", preset, parts)
    refuse_normalised("slime", f"a micro-batch of {len(loss_masks)} sequences at a time", correction)
    if correction.old == "sampler" or args.use_rollout_logprobs:
        raise SparseRLError(
            "to use the sampler's log-probs as the old ones (naive), set slime's --use-rollout-logprobs and omit "
            "--use-tis."
        )

    lengths = list(zip(total_lengths, response_lengths))

    def local(rows: Tensor) -> Tensor:
        """[N, T] -> this rank's tokens, in the order of pg_loss"""
        return torch.cat([slice_log_prob_with_cp(row[:size], total, size) for row, (total, size) in zip(rows, lengths)])

    gaps = [  # ranks may share a response, and rejection needs all of it
        all_gather_with_cp(old.detach() - sampler, total, size).detach()
        for old, sampler, (total, size) in zip(train_log_probs, rollout_log_probs, lengths)
    ]
    gap, mask = pad_sequence(gaps, batch_first=True), pad_sequence(loss_masks, batch_first=True).bool()
    result = correct(gap, mask, correction)
    metrics = {
        "sparse_rl_rejected": local((~result.accepted).float()[:, None].expand_as(gap)),
        "sparse_rl_masked": local((mask & ~result.mask).float()),
        "sparse_rl_abs_gap": local(torch.where(mask, gap.abs(), 0.0)),
    }
    if not args.use_tis:  # --get-mismatch-metrics alone leaves the loss as it is
        return pg_loss, loss_masks, metrics
    masks = [row[:size].to(m.dtype) for row, size, m in zip(result.mask, response_lengths, loss_masks)]
    return pg_loss * local(torch.where(result.mask, result.weights, 0.0)), masks, metrics
