"""`shadow`: a full forward pass in which every query sees exactly what the sampler's cache still held for it.

On a GPU by segments, our own kernel, whose memory follows the tokens; where a trace has so many segments that listing what each keeps
would not, by FlexAttention. PeerFailed, and for what those do not know (fp64, dropout, values of another width or dtype; of FlexAttention
soft-caps), under a mask that is built per layer, so [L, H, T, T] never exists.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .. import kernels
from ..cache.segments import Segments, find_segments
from ..cache.trace import visible
from .core import attend
from .slots import check_call


@dataclass
class Replay:
    """The traces of a micro-batch, on the model's device. Travels to the attention as a keyword argument."""

    evicted_at: Tensor  # int32 [B, L, H, T]; "never" on padding; L = H = 1 where it is the same in all layers and heads
    lengths: Tensor  # int64 [B]: tokens without padding
    layouts: dict = field(default_factory=dict)  # the kernels', by what they depend on

    @cached_property
    def segments(self) -> Segments:
        return find_segments(self.evicted_at, self.lengths)

    def of_layer(self, layer: int, heads: int) -> Tensor:
        """int32 [B, H, T]"""
        return self.evicted_at[:, layer if self.evicted_at.shape[1] > 1 else 0].expand(-1, heads, -1)

    def layout(self, dim: int, dtype: torch.dtype):
        if (dim, dtype) not in self.layouts:
            from ..kernels.segments import insert_beacons

            self.layouts[dim, dtype] = insert_beacons(self.segments, self.evicted_at, dim, dtype)
        return self.layouts[dim, dtype]


def shadow_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    *,
    scaling=None,
    sliding_window=None,
    softcap=None,
    replay=None,
    **kwargs,
):
    """query [B, H * G, T, D]; key, value [B, H, T, D] -> ([B, T, H * G, D], None)"""
    check_call(module, attention_mask, kwargs, replay, "replay")
    scaling = scaling or query.shape[-1] ** -0.5
    query, key, value = (as_autocast(x) for x in (query, key, value))
    evicted_at = replay.of_layer(module.layer_idx, key.shape[1])
    if fits_kernels(query, key, value, dropout):
        if replay.segments.are_few:
            from ..kernels.segments import segment_attention

            layout = replay.layout(query.shape[-1], query.dtype)
            return segment_attention(
                query, key, value, layout, module.layer_idx, scaling, sliding_window, softcap
            ), None
        if softcap is None:  # FlexAttention cannot differentiate a soft-cap of dynamic shapes
            from .flex import flex_under_trace

            return flex_under_trace(query, key, value, evicted_at, scaling, sliding_window), None
    return attend(query, key, value, layer_mask(evicted_at, sliding_window), scaling, softcap, dropout), None


def as_autocast(x: Tensor) -> Tensor:
    """What stock attention makes of its inputs under autocast: there queries and keys leave RoPE in fp32, values do not."""
    if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x


def fits_kernels(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether attention can be computed tile by tile here."""
    alike = query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1] <= 256
    known = query.dtype in (torch.bfloat16, torch.float16, torch.float32)
    return query.is_cuda and kernels.has_triton() and alike and known and dropout == 0


def layer_mask(evicted_at: Tensor, sliding_window: int | None) -> Tensor:
    """[B, H, T] -> bool [B, H, T, T]"""
    mask = visible(evicted_at)
    if sliding_window is None:
        return mask
    index = torch.arange(evicted_at.shape[-1], device=evicted_at.device)
    return mask & (index[:, None] - index[None, :] < sliding_window)
