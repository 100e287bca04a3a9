"""The shape of a cache: what one slot and one row look like, and the bytes that they take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .formats import SlotFormat
from .states import LayerState


@dataclass(frozen=True)
class CacheShape:
    """The layout of a slot and a row. The compressor decides whether `num_queries` and `mass` are recorded."""

    layers: int  # those that have slots
    heads: int  # KV heads
    query_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    num_queries: int = 0  # the last queries kept for scoring
    mass: bool = False  # accumulated attention per slot (fp32)
    states: tuple[LayerState, ...] = ()  # of recurrent layers
    mixed_widths: bool = False  # some layers have smaller dims than these, and fill them up with zeros
    latent: int = 0  # so many numbers of a key are the value, too, which then takes no room of its own (value_dim 0)
    slots: SlotFormat | None = None  # None: in the model's dtype
    extra: tuple[int, ...] = ()  # by layer: slots that it has beyond the smallest; (): all have as many

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
        return self._layer_stored_bytes(layer) + self.heads * (4 + (4 if self.mass else 0))

    def _layer_stored_bytes(self, layer: int) -> int:
        numbers = self.key_dim + self.value_dim
        return self.heads * (numbers * self.dtype.itemsize if self.kind_of(layer) is None else numbers + 2)  # exponents

    @property
    def kv_bytes_per_token(self) -> int:
        """What a token's keys and values alone take, in any cache of the model's dtype."""
        return self.layers * self.heads * (self.key_dim + self.value_dim) * self.dtype.itemsize

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
        queries = self.layers * self.query_heads * self.num_queries * self.key_dim * self.dtype.itemsize
        slots = sum(n * self.layer_slot_bytes(layer) for layer, n in enumerate(self.capacities(capacity, most)))
        return slots + queries + self.state_bytes
