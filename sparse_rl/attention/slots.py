"""`slots`: attention over the compressed cache. Stores the tokens being fed, then attends to what the row still holds.

Serves prefill (one row, many tokens) and decoding (many rows, one token) alike. A row's slots are in feed order, so causality is
"slots up to one's own"; a layer's own sliding window is honoured through the slots' feed indices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import kernels
from ..cache import SlotCache
from ..errors import SparseRLError
from ..kernels import twins
from .core import attend, attend_causal, attend_with_probs, fold_mask


@dataclass
class Feed:
    """The tokens one forward pass feeds to the first B rows of a cache. Travels to the attention as a keyword argument."""

    cache: SlotCache
    slot: Tensor  # [B, T] where each token goes in its row
    index: Tensor  # [B, T] its feed index
    span: int  # slots to read: at least the fullest row's, afterwards
    first: bool = False  # the rows were empty: plain causal attention
    ends: Tensor | None = None  # [B] where each prompt ends; tokens from there on are padding. None: all are real
    position: Tensor | None = None  # [B, T] for RoPE, where it is not the feed index
    live: Tensor | None = (
        None  # [B] bool, while decoding: rows that are fed; the others are left as they are. None: all are
    )
    layers_seen: set[int] = field(default_factory=set)

    def __post_init__(self):
        if self.live is None:
            self.cache.place(self.slot, self.index)

    @cached_property
    def visible(self) -> Tensor:
        """[B, 1, T, S]"""
        return torch.arange(self.span, device=self.slot.device) <= self.slot[:, None, :, None]

    @cached_property
    def counted(self) -> Tensor | None:
        """Whose attention counts: real tokens of rows that are fed. [B, 1, T, 1], or None for all"""
        if self.live is not None:
            return self.live[:, None, None, None]
        return None if self.ends is None else (self.index < self.ends[:, None])[:, None, :, None]


def slots_attention(
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
    slots_feed=None,
    **kwargs,
):
    """query [B, H * G, T, D] after RoPE; key, value [B, H, T, D] -> ([B, T, H * G, D], None)

    The batch may be longer than the feed by rows of padding, which have no slots and get zeros.
    """
    check_call(module, attention_mask, kwargs, slots_feed, "slots_feed")
    rows = slots_feed.slot.shape[0]
    padding = query.shape[0] - rows
    scaling = scaling or query.shape[-1] ** -0.5
    out = feed_and_attend(module, query[:rows], key[:rows], value[:rows], slots_feed, scaling, sliding_window, softcap)
    return (F.pad(out, (0, 0) * 3 + (0, padding)) if padding else out), None


def feed_and_attend(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feed: Feed,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """Store the tokens, then attend. -> [B, T, H * G, D]"""
    cache, layer, shape = feed.cache, module.layer_idx, feed.cache.shape
    given = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
    planned = (shape.query_heads, shape.heads, shape.key_dim, shape.value_dim)
    if given != planned or not 0 <= layer < shape.layers:
        raise SparseRLError(
            f"layer {layer} has (query heads, KV heads, key dim, value dim) {given} where the config says {planned} for each of "
            f"{shape.layers} layers: {type(module).__name__} is not supported."
        )
    if layer in feed.layers_seen:
        raise SparseRLError(
            f"{type(module).__name__} attends twice in layer {layer}: this architecture is not supported."
        )
    feed.layers_seen.add(layer)
    cache.scaling[layer], cache.softcap[layer], cache.sliding_window[layer] = scaling, softcap, sliding_window
    if feed.live is None:
        cache.append(layer, feed.slot, key, value)
        cache.record_queries(layer, feed.index, query, feed.ends)
    elif query.is_cuda and cache.mass is None:
        return decode_and_attend(cache, layer, query, key, value, feed, scaling, sliding_window, softcap)
    else:
        twins.store(*token_of(cache, layer, query, key, value, feed))
        if cache.mass is not None:
            cache.open_mass(layer, feed.slot[:, 0], feed.live)

    if feed.first and sliding_window is None and softcap is None and cache.mass is None:
        return attend_causal(query, key, value, scaling)

    rows = query.shape[0]
    keys, values = cache.keys[layer, :rows, :, : feed.span], cache.values[layer, :rows, :, : feed.span]  # [B, H, S, D]
    visible = feed.visible
    if sliding_window is not None:
        distance = feed.index[:, None, :, None] - cache.feed[layer, :rows, :, None, : feed.span]  # [B, H, T, S]
        visible = visible & (distance < sliding_window)
    if cache.mass is None:
        return attend(query, keys, values, visible, scaling, softcap)
    out, probs = attend_with_probs(query, keys, values, visible, scaling, softcap)
    counted = feed.counted
    received = probs if counted is None else probs * fold_mask(counted, query.shape[1] // shape.heads)
    cache.mass[layer, :rows, :, : feed.span] += received.sum(2)
    return out


def token_of(cache: SlotCache, layer: int, query: Tensor, key: Tensor, value: Tensor, feed: Feed) -> tuple:
    """One new token per row and where it goes, as the kernels take it. query [B, Hq, 1, D]; key, value [B, H, 1, D]"""
    return (
        query[:, :, 0],
        key[:, :, 0],
        value[:, :, 0],
        cache.layer(layer),
        feed.slot[:, 0],
        feed.index[:, 0],
        feed.live,
    )


def decode_and_attend(
    cache: SlotCache, layer: int, query: Tensor, key: Tensor, value: Tensor, feed: Feed, scaling, window, softcap
) -> Tensor:
    """As `feed_and_attend` for one token per row, in one kernel."""
    new = token_of(cache, layer, query, key, value, feed)
    out = kernels.on(query.device).store_and_attend(*new, scaling, softcap=softcap, sliding_window=window)
    return out.view(query.shape[0], 1, query.shape[1], -1)


def check_call(module, attention_mask, kwargs: dict, needed: object, name: str) -> None:
    """Refuse architectures that lose our argument on the way, or bend attention in ways we would silently ignore."""
    kind = type(module).__name__
    if needed is None:
        raise SparseRLError(f"{kind} does not pass {name} on to its attention: this architecture is not supported.")
    if attention_mask is not None:
        raise SparseRLError(f"{kind} brings an attention mask of its own: this architecture is not supported.")
    if getattr(module, "is_causal", True) is False:
        raise SparseRLError(f"{kind} is not causal: only causal decoders are supported.")
    for bend in ("s_aux", "position_bias"):
        if kwargs.get(bend) is not None:
            raise SparseRLError(f"{kind} adds {bend} to its attention logits: this architecture is not supported.")
