"""Grouped-query attention under a boolean mask: the arithmetic that `slots` and `shadow` share.

The G query heads of a KV head become G more queries of that head, so keys and values are never repeated.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def group_heads(query: Tensor, heads: int) -> Tensor:
    """[B, H * G, T, D] -> [B, H, G * T, D]"""
    return query.unflatten(1, (heads, -1)).flatten(2, 3)


def ungroup_heads(out: Tensor, tokens: int) -> Tensor:
    """[B, H, G * T, D] -> [B, T, H * G, D]"""
    return out.unflatten(2, (-1, tokens)).flatten(1, 2).transpose(1, 2).contiguous()


def fold_mask(visible: Tensor, groups: int) -> Tensor:
    """[B, 1 or H, T, S] -> [B, 1 or H, G * T, S]"""
    if groups == 1 or visible.shape[2] == 1:
        return visible
    return visible[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scaling: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """query [B, H * G, T, D]; key, value [B, H, S, D]; visible bool [B, 1 or H, T, S] -> [B, T, H * G, D]"""
    heads, tokens = key.shape[1], query.shape[2]
    if softcap is not None:
        return attend_with_probs(query, key, value, visible, scaling, softcap, dropout)[0]
    mask = fold_mask(visible, query.shape[1] // heads)
    out = F.scaled_dot_product_attention(
        group_heads(query, heads), key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return ungroup_heads(out, tokens)


def attend_causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """The first T tokens of a sequence, each seeing itself and all before: the flash kernels' own case."""
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous()


def attend_with_probs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor,
    scaling: float,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """As `attend`, written out: soft-capped logits, and the probabilities [B, H, G * T, S] besides, in fp32 or wider."""
    heads, tokens = key.shape[1], query.shape[2]
    logits = group_heads(query, heads) @ key.transpose(-1, -2) * scaling
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~fold_mask(visible, query.shape[1] // heads), -torch.inf)
    probs = logits.softmax(-1)
    out = F.dropout(probs.to(value.dtype), dropout) @ value
    return ungroup_heads(out, tokens), probs
