"""`slots`: attention over the compressed cache. It stores the tokens being fed, then attends to what a row holds.

It serves prefill (few rows, many tokens) and decoding (many rows, one token) alike. A row's slots are in feed order, so
causality means "slots up to one's own"; a layer's own sliding window is honoured through the slots' feed indices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..cache import LayerSlots, SlotCache
from ..cache.formats import Ties
from ..cache.places import Places, Recent, place_in
from ..cache.states import slot_layers
from ..cache.ties import KnownTies
from ..errors import SparseRLError
from ..kernels import ops, twins
from ..kernels.twins import attend, attend_under, attend_with_probs, group_mask
from .alibi import Alibi
from .given import given
from .latent import absorbed, expanded

_UNSEEN = -65504.0  # added to logits: nothing is left of them, in any dtype, and no kernel takes it for a NaN


@dataclass
class Feed:
    """The tokens that one forward pass feeds to B rows of a cache."""

    cache: SlotCache
    slot: Tensor  # [B, T] where each token goes in its row, in the smallest layer
    index: Tensor  # [B, T] its feed index
    span: int  # slots to read: at least those of the fullest row, after this feed; likewise
    first: bool = False  # the rows were empty: plain causal attention
    ends: Tensor | None = None  # [B] where each prompt ends; tokens from there on are padding. None: all are real
    position: Tensor | None = None  # [B, T] for RoPE, where it is not the feed index
    live: Tensor | None = None  # [B] bool, while decoding: which rows are fed; others stay unchanged. None: all are fed
    rows: Tensor | None = None  # [B] the rows that are fed; None: the first B
    stored: Tensor | None = None  # [M] of the B * T tokens, those that are stored; None: all, padding too
    known: KnownTies | None = None  # of tokens that were fed before, on slots of 8 bits; None: they are noted
    layers_seen: set[int] = field(default_factory=set)
    # By the number of a layer: the latents and rotated keys of the tokens, of a model that keeps those (latent.py).
    latents: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    shared_keys: dict[int, Tensor] = field(default_factory=dict)  # by slots, where layers share them
    # What layers have in common, by the slots that they have more.
    slots: dict[int, Tensor] = field(default_factory=dict)
    places: dict[int, Places] = field(default_factory=dict)
    visible: dict[int, Tensor] = field(default_factory=dict)
    masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # and by query heads of a KV head

    def __post_init__(self):
        if self.live is None:
            self.cache.place(self.index, self._places)
        if self.first and self.cache.ties is not None:
            self.cache.ties.begin(self.slot.shape[0])

    @property
    def read_rows(self) -> slice | Tensor:
        return slice(self.slot.shape[0]) if self.rows is None else self.rows

    @cached_property
    def row_numbers(self) -> Tensor:
        """[B, 1]"""
        rows = torch.arange(self.slot.shape[0], device=self.slot.device) if self.rows is None else self.rows
        return rows[:, None]

    def slot_of(self, layer: int) -> Tensor:
        """Where each token goes in a layer. [B, T]"""
        return self._slot(self.cache.shape.extra_of(layer))

    def _slot(self, extra: int) -> Tensor:
        if extra not in self.slots:
            self.slots[extra] = place_in(extra, self.slot, self.index)
        return self.slots[extra]

    def places_in(self, layer: int) -> Places:
        """Where tokens are stored in a layer."""
        return self._places(self.cache.shape.extra_of(layer))

    def _places(self, extra: int) -> Places:
        if extra not in self.places:
            self.places[extra] = Places.of(self.row_numbers, self._slot(extra), self.stored)
        return self.places[extra]

    def visible_to(self, layer: int) -> Tensor:
        """[B, 1, T, S], S slots to read in the layer"""
        extra, span = self.cache.shape.extra_of(layer), self.span
        if extra not in self.visible:
            if extra:
                span = next(min(span + extra, s.capacity) for s in self.cache.stored if s.extra == extra)
            self.visible[extra] = torch.arange(span, device=self.slot.device) <= self._slot(extra)[:, None, :, None]
        return self.visible[extra]

    def mask_of(self, layer: int, groups: int, dtype: torch.dtype) -> Tensor:
        """`visible_to`, for so many query heads of a KV head as more queries. [B, 1, G * T, S]

        Where kernels want to add it to the logits, it is made a sum here, once, and not by every layer.
        """
        known = self.cache.shape.extra_of(layer), groups
        if known not in self.masks:
            mask = self.visible_to(layer)
            if self.live is None and ops.rules(mask.device).adds_masks:
                mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, _UNSEEN)
            self.masks[known] = group_mask(mask, groups)
        return self.masks[known]

    @cached_property
    def recent(self) -> Recent:
        """The queries that are recorded."""
        return Recent.of(self.row_numbers, self.index, self.cache.shape.num_queries, self.ends)

    def known_of(self, layer: int, key: Tensor, value: Tensor) -> tuple[Ties, Ties] | None:
        """Known ties of a layer's keys and values. [B, H, T, D]"""
        return None if self.known is None else self.known.of_layer(layer, key, value)

    @cached_property
    def window_index(self) -> Tensor:
        """From where windows reach back. [B, T]

        Padding that is not stored reaches back from the last real token, because a token that sees nothing is NaN.
        """
        if self.stored is None or self.ends is None:
            return self.index
        return torch.minimum(self.index, self.ends[:, None] - 1)

    @cached_property
    def real(self) -> Tensor | None:
        """Which tokens are stored to stay. [B, T], or None for all"""
        if self.live is not None:
            return self.live[:, None]
        return None if self.ends is None else self.index < self.ends[:, None]

    @cached_property
    def counted(self) -> Tensor | None:
        """Whose attention counts: that of real tokens of rows that are fed. [B, 1, T, 1], or None for all"""
        return None if self.real is None else self.real[:, None, :, None]


def slots_attention(
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
    """query [B, H * G, T, D] after RoPE; key, value [B, H, T, D] -> ([B, T, H * G, D], None)

    The batch may be longer than the feed by rows of padding, which have no slots and get zeros. s_aux [H * G]:
    transformers' name of attention sinks.
    """
    check_call(module, attention_mask, kwargs)
    feed = given().feed
    assert feed is not None
    rows = feed.slot.shape[0]
    padding = query.shape[0] - rows
    scale = scaling or query.shape[-1] ** -0.5
    _check_shared(module, key, feed)
    if feed.cache.shape.latent:
        query, key, value = absorbed(module, query, feed)
    fed = query[:rows], key[:rows], value[:rows]
    out = feed_and_attend(module, *fed, feed, scale, sliding_window, softcap, s_aux, alibi)
    out = expanded(module, out) if feed.cache.shape.latent else out
    return (F.pad(out, (0, 0) * 3 + (0, padding)) if padding else out), None


def feed_and_attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feed: Feed,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None = None,
    alibi: Alibi | None = None,
) -> Tensor:
    """Store the tokens, then attend. -> [B, T, H * G, D]

    A layer that reads the slots of another finds the tokens there; the queries that are recorded for scoring are those
    of the layer that stored.
    """
    cache, layer = feed.cache, _check_layer(module, query, key, value, feed)
    stored = layer in feed.layers_seen
    feed.layers_seen.add(layer)
    cache.scaling[layer], cache.softcap[layer], cache.sliding_window[layer] = scaling, softcap, sliding_window
    # What the kernel can compute.
    whole = not cache.shape.mass and key.shape[-1] == value.shape[-1] and not cache.shape.latent and alibi is None
    if feed.live is not None and whole and ops.rules(query.device).attends_while_storing:
        token = _one_token(cache, layer, query, key, value, feed, feed.live, with_ring=not stored)
        out = ops.store_and_attend(*token, scaling, softcap=softcap, sliding_window=sliding_window, sinks=sinks)
        return out.view(query.shape[0], 1, query.shape[1], -1)
    known = feed.known_of(layer, key, value)
    if not stored and known is None:
        cache.note_ties(layer, key, value[..., : cache.shape.value_dim], feed.index, feed.real)
    if stored:
        key, value = (key, value) if feed.live is not None else cache.as_stored(layer, key, value, known)
    elif feed.live is None:
        key, value = cache.append(layer, feed.places_in(layer), key, value, known)
        if cache.shape.num_queries:
            cache.record_queries(layer, feed.recent, query)
    else:
        width = cache.shape.of_layer(layer).value_dim  # latents are stored as keys alone
        twins.store(*_one_token(cache, layer, query, key, value[..., :width], feed, feed.live))
        if cache.shape.mass:
            cache.open_mass(layer, feed.slot_of(layer)[:, 0], feed.live)
    plain = sliding_window is None and softcap is None and sinks is None and alibi is None
    if feed.first and plain and not cache.shape.mass:
        return attend_causal(query, key, value, scaling)
    return _attend_to_slots(cache, layer, query, feed, scaling, sliding_window, softcap, sinks, alibi)


def attend_causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """The first T tokens of a sequence, each seeing itself and all before: the case that flash kernels are made for."""
    out = F.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
    return out.transpose(1, 2).contiguous()


def _attend_to_slots(
    cache: SlotCache,
    layer: int,
    query: Tensor,
    feed: Feed,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    alibi: Alibi | None,
) -> Tensor:
    """Attend to what the rows hold; note how much attention each slot received, if the compressor asked for it."""
    rows, visible = feed.read_rows, feed.visible_to(layer)
    span = visible.shape[-1]
    keys, values = cache.read(slice(layer, layer + 1), rows, span)
    assert values is not None
    keys, values = keys[0], values[0]  # [B, H, S, D]
    if not cache.shape.mass and sliding_window is None and softcap is None and sinks is None and alibi is None:
        mask = feed.mask_of(layer, query.shape[1] // keys.shape[1], query.dtype)
        return attend_under(mask, query, keys, values, scaling)
    bias = None
    if sliding_window is not None or alibi is not None:
        fed, index = cache.layer(layer).feed[rows, :, None, :span], feed.window_index[:, None, :, None]  # [B, H, 1, S]
        if sliding_window is not None:
            visible = visible & (index - fed < sliding_window)  # [B, H, T, S]
        if alibi is not None:
            bias = alibi.bias(index, fed, query.dtype)
    if not cache.shape.mass:
        return attend(query, keys, values, visible, scaling, softcap, sinks=sinks, bias=bias)
    out, probs = attend_with_probs(query, keys, values, visible, scaling, softcap, sinks=sinks, bias=bias)
    counted = feed.counted
    received = probs if counted is None else probs * group_mask(counted, query.shape[1] // keys.shape[1])
    cache.layer_mass(layer)[rows, :, :span] += received.sum(2)
    return out


def _one_token(
    cache: SlotCache,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    feed: Feed,
    live: Tensor,
    with_ring: bool = True,
) -> tuple[Tensor, Tensor, Tensor, LayerSlots, Tensor, Tensor, Tensor]:
    """One new token per row and where it goes, as kernels take it. query [B, Hq, 1, D]; key, value [B, H, 1, D]"""
    new, slots = (query[:, :, 0], key[:, :, 0], value[:, :, 0]), cache.layer(layer)
    slots = slots if with_ring else slots._replace(ring=None)
    return *new, slots, feed.slot_of(layer)[:, 0], feed.index[:, 0], live


def _check_layer(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, feed: Feed) -> int:
    """Which slots the layer reads, after refusing layers that are not what the config says, or that attend twice."""
    layer, shape = layer_of(module), feed.cache.shape
    given = (query.shape[1], key.shape[1], key.shape[3], value.shape[3])
    known = 0 <= layer < shape.layers
    own = shape.of_layer(layer if known else 0)
    planned = (shape.query_heads, own.heads, own.key_dim, shape.latent or own.value_dim)
    if given != planned or not known:
        raise SparseRLError(
            f"layer {layer} of {shape.layers} has (query heads, KV heads, key dim, value dim) {given} where the config "
            f"says {planned}: {type(module).__name__} is not supported."
        )
    if layer in feed.layers_seen and not getattr(module, "is_kv_shared_layer", False):
        raise SparseRLError(
            f"{type(module).__name__} attends twice in layer {layer}, each time with other keys or values: a slot "
            "holds one of each per layer, so this architecture is not supported."
        )
    return layer


def _check_shared(module: nn.Module, key: Tensor, feed: Feed) -> None:
    """Refuse a layer that should attend with another's keys but brings its own, as some versions of transformers do."""
    if not getattr(getattr(module, "config", None), "num_kv_shared_layers", None):
        return
    if not getattr(module, "is_kv_shared_layer", False):
        feed.shared_keys[layer_of(module)] = key
    elif feed.shared_keys.get(layer_of(module)) is not key:
        raise SparseRLError(
            f"{type(module).__name__} does not share its keys without a cache of its own in this version of "
            "transformers: update transformers."
        )


def layer_of(module: nn.Module) -> int:
    """Which slots an attention reads, by their number."""
    layer, config = module.layer_idx, getattr(module, "config", None)
    assert isinstance(layer, int)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return layer
    return slot_layers(tuple(kinds), getattr(config, "num_kv_shared_layers", None) or 0).get(layer, layer)


def check_call(module: nn.Module, attention_mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    """Refuse architectures that change attention in ways we would silently ignore."""
    kind = type(module).__name__
    if attention_mask is not None:
        raise SparseRLError(
            f"{kind} brings an attention mask of its own, which a trace does not hold: this architecture is not "
            "supported."
        )
    if getattr(module, "is_causal", True) is False:
        raise SparseRLError(
            f"{kind} is not causal (is_causal is false), so queries might see later tokens: it is not supported."
        )
    if kwargs.get("position_bias") is not None:
        raise SparseRLError(f"{kind} adds position_bias to its attention logits: this architecture is not supported.")
