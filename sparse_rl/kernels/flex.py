"""Attention under a trace with FlexAttention, for traces with too many segments to list what each keeps.

Which blocks of [queries, tokens] contain anything visible follows from the least and the greatest `evicted_at` of a
block of tokens, so the block mask has (T / 128)^2 entries and no [T, T] exists. Wholly visible blocks are not masked.

A sink s takes its share of a query's attention afterwards: with lse, the log-sum-exp of the query's logits,

    out with the sink  =  out * exp(lse) / (exp(lse) + exp(s))  =  out * sigmoid(lse - s)

and torch differentiates this, through out, lse and s.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ..cache.segments import Replay

_BLOCK = 128
_VARIANTS = 64  # of the compiled kernel: with and without a window, a gradient, sinks, one row, one block of tokens


@functools.cache
def _compiled() -> Any:
    # fullgraph: beyond _VARIANTS compilation fails; without it [T, T] would be built
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


def trace_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    replay: Replay,
    layer: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    dropout: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [B, H * G, T, D]; key, value [B, H, T, D]; sinks [H * G] -> [B, T, H * G, D]. No soft-cap, no dropout."""
    assert softcap is None and dropout == 0
    group = query.shape[1] // key.shape[1]
    mask = trace_block_mask(replay.of_layer(layer, key.shape[1]).expand(-1, key.shape[1], -1), group, sliding_window)
    with torch._dynamo.config.patch(recompile_limit=_VARIANTS):
        attend = functools.partial(_compiled(), query, key, value, block_mask=mask, scale=scaling, enable_gqa=group > 1)
        if sinks is None:
            out = attend()
        else:
            out, found = attend(return_aux=AuxRequest(lse=True))
            left = torch.sigmoid(found.lse - sinks[:, None])  # [B, H * G, T]: what the sinks leave to the tokens
            out = out * left[..., None].to(out.dtype)
    return out.transpose(1, 2).contiguous()


def trace_block_mask(evicted_at: Tensor, group: int, sliding_window: int | None) -> BlockMask:
    """evicted_at [B, H, T] -> a mask of H * G heads"""
    tokens = evicted_at.shape[-1]
    some, whole = visible_blocks(evicted_at, sliding_window)

    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        """How many there are, and a list that begins with them, ascending. -> int32 [B, H * G, Q], [B, H * G, Q, K]"""
        order = blocks.int().argsort(dim=-1, descending=True, stable=True)
        count, order = (x.to(torch.int32).repeat_interleave(group, 1) for x in (blocks.sum(-1), order))
        return count, order

    def visible(b, h, q, k):
        seen = (k <= q) & (q < evicted_at[b, h // group, k])
        return seen if sliding_window is None else seen & (q - k < sliding_window)

    return BlockMask.from_kv_blocks(
        *listed(some & ~whole), *listed(whole), BLOCK_SIZE=_BLOCK, mask_mod=visible, seq_lengths=(tokens, tokens)
    )


def visible_blocks(evicted_at: Tensor, sliding_window: int | None) -> tuple[Tensor, Tensor]:
    """Blocks of queries x tokens in which something may be visible, and in which everything is.

    [B, H, T] -> bool [B, H, Q, K] each
    """
    tokens = evicted_at.shape[-1]
    short = -tokens % _BLOCK
    latest = F.pad(evicted_at, (0, short), value=0).unflatten(-1, (-1, _BLOCK)).amax(-1)[..., None, :]  # [B, H, 1, K]
    first = F.pad(evicted_at, (0, short), value=0).unflatten(-1, (-1, _BLOCK)).amin(-1)[..., None, :]
    begin = torch.arange(0, tokens + short, _BLOCK, device=evicted_at.device)
    q, k = begin[:, None], begin[None, :]
    some = (k <= q) & (q < latest)
    whole = (k < q) & (q + _BLOCK - 1 < first) & (q + _BLOCK <= tokens)
    if sliding_window is not None:
        some &= q - (k + _BLOCK - 1) < sliding_window
        whole &= q + _BLOCK - 1 - k < sliding_window
    return some, whole
