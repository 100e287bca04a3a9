"""`shadow`: a full forward pass in which every query sees exactly what the sampler's cache still held for it.

The mask is built per layer from the trace, so [L, H, T, T] never exists; a layer's own sliding window is added.
"""

import torch
from torch import Tensor

from ..cache.trace import visible
from .core import attend
from .slots import check_call


def shadow_attention(
    module, query, key, value, attention_mask, dropout=0.0, *, scaling=None, sliding_window=None, softcap=None, evicted_at=None, **kwargs
):
    """query [B, H * G, T, D]; key, value [B, H, T, D]; evicted_at [B, L, H, T] -> ([B, T, H * G, D], None)"""
    check_call(module, attention_mask, kwargs, evicted_at, "evicted_at")
    mask = layer_mask(evicted_at[:, module.layer_idx], sliding_window)
    scaling = scaling or query.shape[-1] ** -0.5
    return attend(query, key, value, mask, scaling, softcap, dropout), None


def layer_mask(evicted_at: Tensor, sliding_window: int | None) -> Tensor:
    """[B, H, T] -> bool [B, H, T, T]"""
    mask = visible(evicted_at)
    if sliding_window is None:
        return mask
    index = torch.arange(evicted_at.shape[-1], device=evicted_at.device)
    return mask & (index[:, None] - index[None, :] < sliding_window)
