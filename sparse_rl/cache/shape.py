"""The shape of a cache: what one slot and one row look like, and the bytes that they take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .formats import SlotFormat
from .states import LayerState


@dataclass(frozen=True)
class LayerShape:
    """What one layer stores of a token."""

    heads: int  # KV heads
    key_dim: int
    value_dim: int

    @property
    def numbers(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class CacheShape:
    """The layout of a slot and a row. The compressor decides whether `num_queries` and `mass` are recorded."""

    layers: int  # those that have slots
    heads: int  # KV heads; where layers differ, of the layer that has most, as are the dims
    query_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    num_queries: int = 0  # the last queries kept for scoring
    mass: bool = False  # accumulated attention per slot (fp32)
    states: tuple[LayerState, ...] = ()  # of recurrent layers
    by_layer: tuple[LayerShape, ...] = ()  # where layers differ; (): all are alike
    latent: int = 0  # so many numbers of a key are the value, too, which then takes no room of its own (value_dim 0)
    slots: SlotFormat | None = None  # None: in the model's dtype
    extra: tuple[int, ...] = ()  # by layer: slots that it has beyond the smallest; (): all have as many

    def of_layer(self, layer: int) -> LayerShape:
        return self.by_layer[layer] if self.by_layer else LayerShape(self.heads, self.key_dim, self.value_dim)

    @property
    def slot_bytes(self) -> int:
        """Key, value, feed index (int32) and mass of one token, over all layers and KV heads."""
        return sum(map(self.layer_slot_bytes, range(self.layers)))

    @property
    def stored_bytes(self) -> int:
        """Key and value of one token alone, as they are stored, over all layers and KV heads."""
        return sum(map(self._layer_stored_bytes, range(self.layers)))

    def layer_slot_bytes(self, layer: int) -> int:
        """Likewise `slot_bytes` of one layer."""
        return self._layer_stored_bytes(layer) + self.of_layer(layer).heads * (4 + (4 if self.mass else 0))

    def _layer_stored_bytes(self, layer: int) -> int:
        own = self.of_layer(layer)
        codes = own.numbers + 2 * own.heads  # a byte for each number, and two exponents
        return own.numbers * self.dtype.itemsize if self.kind_of(layer) is None else codes

    @property
    def kv_bytes_per_token(self) -> int:
        """What a token's keys and values alone take, in any cache of the model's dtype."""
        return sum(map(self.layer_kv_bytes, range(self.layers)))

    def layer_kv_bytes(self, layer: int) -> int:
        """Likewise, of one layer."""
        return self.of_layer(layer).numbers * self.dtype.itemsize

    def kind_of(self, layer: int) -> str | None:
        """The kind of codes in which a layer stores; None: the model's dtype."""
        return None if self.slots is None else self.slots.of_layer(layer)

    @property
    def state_bytes(self) -> int:
        """What recurrent layers keep of a row, in any cache."""
        return sum(state.row_bytes(self.dtype) for state in self.states)

    def extra_of(self, layer: int) -> int:
        return self.extra[layer] if self.extra else 0

    def capacities(self, capacity: int, most: int | None = None) -> list[int]:
        """Slots of every layer, where the smallest has `capacity`. most: tokens that are ever fed, if that is known"""
        found = [capacity + self.extra_of(layer) for layer in range(self.layers)]
        return found if most is None else [min(most, slots) for slots in found]

    def row_bytes(self, capacity: int, most: int | None = None) -> int:
        widths = sum(self.of_layer(layer).key_dim for layer in range(self.layers))
        queries = widths * self.query_heads * self.num_queries * self.dtype.itemsize
        slots = sum(n * self.layer_slot_bytes(layer) for layer, n in enumerate(self.capacities(capacity, most)))
        return slots + queries + self.state_bytes
