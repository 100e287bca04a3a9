"""`shadow`: a full forward pass in which every query sees exactly what the sampler's cache still held for it.

On a GPU our own kernel computes it by segments, and its memory follows the tokens. Where a trace has so many segments
that listing what each keeps would take more, FlexAttention computes it. On a CPU, and for what those kernels do not
support (fp64, dropout, more than 256 numbers of a head; soft-caps under FlexAttention), it is computed under a mask
per layer. `kernels/ops.py` chooses.

Where the sampler's slots had 8 bits, every query reads keys and values as they were stored, its own token's included.
Ties that the trace records go the way that they went there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..cache.formats import as_stored
from ..cache.segments import Observed
from ..kernels import ops, twins
from .alibi import Alibi
from .given import given
from .slots import check_call, layer_of


def shadow_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi: Alibi | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [B, H * G, T, D]; key, value [B, H, T, D] -> ([B, T, H * G, D], None)

    s_aux [H * G]: transformers' name of attention sinks.
    """
    check_call(module, attention_mask, kwargs)
    replay, positions = given().replay, given().positions
    assert replay is not None
    layer, scale = layer_of(module), scaling or query.shape[-1] ** -0.5
    query, key, value = (as_autocast(x) for x in (query, key, value))
    if replay.slots is not None and (kind := replay.slots.of_layer(layer)) is not None:
        of_keys, of_values = (None, None) if replay.ties is None else replay.ties.of_layer(layer, key, value)
        key, value = as_stored(key, kind, of_keys), as_stored(value, kind, of_values)
    bias = None
    if alibi is not None:
        bias = alibi.bias(positions[:, None, :, None], positions[:, None, None, :], query.dtype)
    if replay.observe is not None:
        replay.observe(Observed(layer, query, key, value, scale, sliding_window, softcap, s_aux, bias))
    if bias is not None:  # which no kernel knows
        mask = twins.trace_mask(replay, layer, key.shape[1], sliding_window)
        return twins.attend(query, key, value, mask, scale, softcap, dropout, s_aux, bias), None
    return ops.trace_attention(query, key, value, replay, layer, scale, sliding_window, softcap, dropout, s_aux), None


def as_autocast(x: Tensor) -> Tensor:
    """What stock attention makes of its inputs under autocast, where RoPE returns queries and keys in fp32."""
    if x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    return x
