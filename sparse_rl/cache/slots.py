"""A KV cache of fixed capacity: every running sequence owns one row of equal size, allocated once.

A slot is one (key, value, feed index) of one layer and KV head. The slots in use of a row are its first `used`, in feed
order, for every layer and head alike; which tokens they hold differs per layer and head. The cache knows nothing of
models, compressors or sampling: it appends, forks and counts its bytes. Keys and values may be stored in 8 bits
(formats.py), by all layers or by some.

Layers may have different numbers of slots: `capacity` counts the smallest layer's, and layer l has `extra[l]` more. All
layers of a row are evicted at the same moments, and a layer holds everything that was fed until it is full. So from
the slots in use in the smallest layer and the tokens fed, the host knows how many slots every layer uses:

    used of layer l  =  min(tokens fed, used + extra[l])

Layers may also differ in KV heads and head dims (Gemma 4). Neighbours that are alike share tensors (`Stored`).

Paging, block tables and reference counts are omitted on purpose: a budget makes all rows equal, so any free row will
do.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .formats import CODES, Ties, as_stored, dequantize, quantize
from .places import Places, Recent
from .shape import CacheShape
from .states import RowStates
from .ties import TieLog

# Layers are compressed and copied together as long as a copy of their keys and values fits in this.
CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 1024 * 2**20}


def chunk_bytes(device: torch.device | str) -> int:
    return CHUNK_BYTES.get(torch.device(device).type, CHUNK_BYTES["cpu"])


class LayerSlots(NamedTuple):
    """One layer's part of a cache, as kernels take it."""

    keys: Tensor  # [R, H, C, D]
    values: Tensor  # [R, H, C, D]
    feed: Tensor  # int32 [R, H, C]
    ring: Tensor | None  # [R, Hq, W, D] recent queries
    exponents: Tensor | None = None  # int8 [R, H, C, 2] of keys and values, which are then codes


@dataclass
class Stored:
    """Slots of l neighbouring layers that are alike: shape, format and number of slots."""

    layers: slice
    extra: int  # slots beyond those of the smallest layer
    keys: Tensor  # [l, R, H, C, D]
    values: Tensor
    exponents: Tensor | None  # int8 [l, R, H, C, 2], if keys and values are codes
    feed: Tensor  # int32 [l, R, H, C] feed index of each slot
    mass: Tensor | None  # fp32 [l, R, H, C]
    queries: Tensor | None  # [l, R, Hq, W, D]; the query of feed index i lies at i % W

    @classmethod
    def empty(cls, shape: CacheShape, layers: slice, rows: int, capacity: int, device) -> Stored:
        kind, own = shape.kind_of(layers.start), shape.of_layer(layers.start)
        lead = (layers.stop - layers.start, rows, own.heads, capacity)
        dtype = CODES[kind].dtype if kind else shape.dtype
        keys, values = (torch.zeros(*lead, d, dtype=dtype, device=device) for d in (own.key_dim, own.value_dim))
        exponents = torch.zeros(*lead, 2, dtype=torch.int8, device=device) if kind else None
        feed = torch.zeros(*lead, dtype=torch.int32, device=device)
        mass = torch.zeros(*lead, dtype=torch.float32, device=device) if shape.mass else None
        queries = None
        if shape.num_queries:
            ring = (*lead[:2], shape.query_heads, shape.num_queries, own.key_dim)
            queries = torch.zeros(*ring, dtype=shape.dtype, device=device)
        return cls(layers, shape.extra_of(layers.start), keys, values, exponents, feed, mass, queries)

    @property
    def capacity(self) -> int:
        return self.feed.shape[-1]

    @property
    def heads(self) -> int:
        return self.feed.shape[2]

    @property
    def tensors(self) -> list[Tensor]:
        """Those of slots."""
        every = (self.keys, self.values, self.exponents, self.feed, self.mass)
        return [t for t in every if t is not None]

    def _each(self, layers: slice, take: Callable[[Tensor], Tensor]) -> Stored:
        keys, values, feed = take(self.keys), take(self.values), take(self.feed)
        exponents, mass, queries = (None if t is None else take(t) for t in (self.exponents, self.mass, self.queries))
        return Stored(layers, self.extra, keys, values, exponents, feed, mass, queries)

    def of_layers(self, layers: slice) -> Stored:
        """Some of the layers, by their numbers in the cache."""
        return self if layers == self.layers else self._each(layers, lambda t: t[self.within(layers)])

    def within(self, layers: slice) -> slice:
        """Where some of the layers are in these tensors."""
        return slice(layers.start - self.layers.start, layers.stop - self.layers.start)

    def part(self, rows: slice) -> Stored:
        return self._each(self.layers, lambda t: t[:, rows])

    def used(self, used: int, fed: int) -> int:
        """Slots in use in these layers, of a row that was fed `fed` tokens and uses `used` in its smallest layer."""
        return min(fed, used + self.extra) if self.extra else used


class SlotCache:
    """`rows` rows of `capacity` slots. L layers, R rows, H KV heads, C capacity, D head dim, W recorded queries."""

    def __init__(
        self,
        shape: CacheShape,
        rows: int,
        capacity: int,
        device: torch.device | str = "cpu",
        most: int | None = None,
    ):
        """most: tokens that a row is ever fed, if that is known; no layer needs more slots"""
        self.shape, self.rows, self.capacity = shape, rows, capacity
        slots = shape.capacities(capacity, most)
        self.stored = [Stored.empty(shape, part, rows, slots[part.start], device) for part in _alike(shape)]
        self.states = RowStates(shape.states, rows, shape.dtype, device) if shape.states else None
        notes = shape.slots is not None and shape.dtype == torch.float32 and self.device.type == "cpu"
        self.ties = TieLog([[] for _ in range(rows)]) if notes else None
        self._layers: dict[int, LayerSlots] = {}  # views, made once
        # What the attention notes about each layer while it runs, so that slots are scored as the model would.
        self.scaling: list[float | None] = [None] * shape.layers
        self.softcap: list[float | None] = [None] * shape.layers
        self.sliding_window: list[int | None] = [None] * shape.layers

    @property
    def keys(self) -> Tensor:
        """[L, R, H, C, D], where all layers are stored alike."""
        (stored,) = self.stored
        return stored.keys

    @property
    def values(self) -> Tensor:
        (stored,) = self.stored
        return stored.values

    @property
    def feed(self) -> Tensor:
        """Feed index of each slot, where all layers are stored alike. [L, R, H, C]"""
        (stored,) = self.stored
        return stored.feed

    @property
    def mass(self) -> Tensor | None:
        (stored,) = self.stored
        return stored.mass

    @property
    def queries(self) -> Tensor | None:
        (stored,) = self.stored
        return stored.queries

    @property
    def device(self) -> torch.device:
        return self.stored[0].feed.device

    @property
    def tensors(self) -> list[Tensor]:
        """Those of slots and queries."""
        slots = [tensor for stored in self.stored for tensor in stored.tensors]
        return slots + [stored.queries for stored in self.stored if stored.queries is not None]

    @property
    def capacities(self) -> list[int]:
        """Slots of every layer."""
        return [stored.capacity for stored in self.stored for _ in range(stored.layers.start, stored.layers.stop)]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors + (self.states.tensors if self.states else []))

    def clear(self) -> None:
        for tensor in self.tensors + (self.states.tensors if self.states else []):
            tensor.zero_()
        if self.ties is not None:
            self.ties.begin(self.rows)

    def part(self, rows: slice) -> SlotCache:
        """Some rows as a cache of their own, on the same memory."""
        part = copy.copy(self)
        part.rows = len(range(self.rows)[rows])
        part.stored = [stored.part(rows) for stored in self.stored]
        part.states = None if self.states is None else self.states.part(rows)
        part.ties = None if self.ties is None else self.ties.part(rows)
        part._layers = {}
        return part

    def stored_by(self, layers: slice) -> Stored:
        """The slots of some layers, which are stored alike. [l, R, H, C, D]"""
        return self._holding(layers).of_layers(layers)

    def _holding(self, layers: slice) -> Stored:
        """The slots of these layers and of all that are alike beside them."""
        for stored in self.stored:
            if stored.layers.start <= layers.start and layers.stop <= stored.layers.stop:
                return stored
        raise AssertionError(f"layers {layers} are stored in different ways")

    def read(
        self, layers: slice, rows: slice | Tensor, used: int, with_values: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Keys and values of some layers, which are stored alike, in the model's dtype. -> [l, N, H, used, D] each"""
        stored = self._holding(layers)
        within = stored.within(layers)
        keys, values = stored.keys[within, rows, :, :used], None
        if with_values and not self.shape.latent:
            values = stored.values[within, rows, :, :used]
        if stored.exponents is not None:
            exponents, dtype = stored.exponents[within, rows, :, :used], self.shape.dtype
            keys = dequantize(keys, exponents[..., 0], dtype)
            values = None if values is None else dequantize(values, exponents[..., 1], dtype)
        if with_values and self.shape.latent:
            values = keys[..., : self.shape.latent]
        return keys, values

    def layer(self, layer: int) -> LayerSlots:
        if layer not in self._layers:
            stored = self._holding(slice(layer, layer + 1))
            i = layer - stored.layers.start
            ring, exponents = (None if t is None else t[i] for t in (stored.queries, stored.exponents))
            self._layers[layer] = LayerSlots(stored.keys[i], stored.values[i], stored.feed[i], ring, exponents)
        return self._layers[layer]

    def layer_mass(self, layer: int) -> Tensor:
        """Attention that the slots of a layer received. [R, H, C]"""
        stored = self._holding(slice(layer, layer + 1))
        assert stored.mass is not None
        return stored.mass[layer - stored.layers.start]

    def place(self, index: Tensor, places: Callable[[int], Places]) -> None:
        """Open slots for the tokens about to be fed. index [B, T]; places: those in layers with so many more slots"""
        for stored in self.stored:
            here = places(stored.extra)
            index_here = here.choose(index).to(torch.int32)
            stored.feed[:, here.rows, :, here.slots] = index_here[..., None, None]  # indexed shape [B, T, l, H]
            if stored.mass is not None:
                stored.mass[:, here.rows, :, here.slots] = 0.0

    def append(
        self, layer: int, places: Places, key: Tensor, value: Tensor, ties: tuple[Ties, Ties] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Store the tokens being fed, at their places in this layer. -> key and value as they are read

        key, value [B, H, T, D]; ties: known ones of both
        """
        rows, slot, slots = places.rows, places.slots, self.layer(layer)
        if slots.exponents is not None and (kind := self.shape.kind_of(layer)) is not None:
            of_keys, of_values = ties or (None, None)
            keys, key_exponents = quantize(key, kind, of_keys)
            values, value_exponents = quantize(value, kind, of_values)
            exponents = torch.stack([key_exponents, value_exponents], -1)
            slots.exponents[rows, :, slot] = places.choose(exponents.transpose(1, 2))
            read = dequantize(keys, key_exponents, key.dtype), dequantize(values, value_exponents, value.dtype)
        else:
            keys, values = read = key, value
        slots.keys[rows, :, slot] = places.choose(keys.transpose(1, 2))
        if not self.shape.latent:
            slots.values[rows, :, slot] = places.choose(values.transpose(1, 2))
        return read

    def as_stored(
        self, layer: int, key: Tensor, value: Tensor, ties: tuple[Ties, Ties] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values as they would be read from slots. ties: known ones of both"""
        kind, (of_keys, of_values) = self.shape.kind_of(layer), ties or (None, None)
        return (key, value) if kind is None else (as_stored(key, kind, of_keys), as_stored(value, kind, of_values))

    def note_ties(self, layer: int, key: Tensor, value: Tensor, index: Tensor, real: Tensor | None) -> None:
        """Note the ties of the tokens being fed, if this cache does. See `TieLog.note`."""
        if self.ties is not None and (kind := self.shape.kind_of(layer)) is not None:
            self.ties.note(layer, kind, key, value, index, real)

    def open_mass(self, layer: int, slot: Tensor, live: Tensor) -> None:
        """A token about to be fed to each live row has received no attention yet. slot, live [B]"""
        rows = torch.arange(slot.shape[0], device=slot.device)
        self.layer_mass(layer)[rows, :, slot] *= ~live[:, None]

    def record_queries(self, layer: int, recent: Recent, query: Tensor) -> None:
        """Remember the last queries for scoring. query [B, Hq, T, D]"""
        ring, (rows, place, token, real) = self.layer(layer).ring, recent
        assert ring is not None
        if token is None:
            ring[rows, :, place] = query[:, :, -place.shape[1] :].transpose(1, 2)
            return
        new = query.transpose(1, 2)[token]  # [B, W', Hq, D]
        ring[rows, :, place] = new if real is None else torch.where(real, new, ring[rows, :, place])

    def recent_queries(self, layers: slice, rows: Tensor, fed: Tensor, count: int) -> Tensor | None:
        """The last `count` queries of some rows and layers, which are alike, oldest first. -> [l, N, Hq, count, D]

        rows [N]; fed [N]: tokens fed so far
        """
        if (queries := self.stored_by(layers).queries) is None:
            return None
        index = fed[:, None] - count + torch.arange(count, device=fed.device)  # [N, W'] feed indices
        ring = queries[:, rows]  # [l, N, Hq, W, D]
        place = (index % self.shape.num_queries)[None, :, None, :, None]
        return ring.gather(3, place.expand(*ring.shape[:3], count, ring.shape[4]))

    def layer_chunks(self, num_rows: int, used: int) -> list[slice]:
        """Groups of equally stored layers to compress together, so that working copies stay small for any model."""
        most, chunks = used + max(self.shape.extra, default=0), []
        for start, stop in [(stored.layers.start, stored.layers.stop) for stored in self.stored]:
            step = max(1, chunk_bytes(self.device) // max(num_rows * most * self.shape.layer_kv_bytes(start), 1))
            chunks += [slice(i, min(i + step, stop)) for i in range(start, stop, step)]
        return chunks

    def fork(self, source: SlotCache, rows: Tensor, to: Tensor, used: int) -> None:
        """Copy the first `used` slots and the states of some rows of `source` (this cache or another) to rows `to`.

        rows, to [N]. No row is both a source and a destination. used: in the smallest layer, of the fullest row
        """
        for layers in self.layer_chunks(len(rows), used):
            mine, theirs = self.stored_by(layers), source.stored_by(layers)
            most = min(used + mine.extra, mine.capacity, theirs.capacity)
            for to_tensor, from_tensor in zip(mine.tensors, theirs.tensors, strict=True):
                to_tensor[:, to, :, :most] = from_tensor[:, rows, :, :most]
            if mine.queries is not None and theirs.queries is not None:
                mine.queries[:, to] = theirs.queries[:, rows]
        if self.states is not None and source.states is not None:
            self.states.fork(source.states, rows, to)
        if self.ties is not None and source.ties is not None:
            self.ties.fork(source.ties, rows, to)
        self.scaling, self.softcap, self.sliding_window = source.scaling, source.softcap, source.sliding_window

    def take(self, row: int, used: int, fed: int) -> list[Tensor]:
        """Copy what a row holds to host memory: its slots in use, recent queries and states."""
        taken = [t[:, row, :, : stored.used(used, fed)] for stored in self.stored for t in stored.tensors]
        return [part.to("cpu", copy=True) for part in [*taken, *self._whole(row)]]

    def put(self, row: int, taken: list[Tensor]) -> None:
        """Copy what `take` returned into a row of this cache."""
        slots = [tensor for stored in self.stored for tensor in stored.tensors]
        for mine, theirs in zip(slots, taken[: len(slots)], strict=True):
            mine[:, row, :, : theirs.shape[2]] = theirs.to(mine.device)
        for mine, theirs in zip(self._whole(row), taken[len(slots) :], strict=True):
            mine.copy_(theirs)

    def _whole(self, row: int) -> list[Tensor]:
        """The recent queries and states of a row."""
        queries = [stored.queries[:, row] for stored in self.stored if stored.queries is not None]
        return [*queries, *(t[row] for t in (self.states.tensors if self.states else []))]


def _alike(shape: CacheShape) -> list[slice]:
    """Runs of neighbouring layers with the same shape, format and number of slots."""

    def way(layer: int) -> tuple:
        return shape.of_layer(layer), shape.kind_of(layer), shape.extra_of(layer)

    runs = [list(run) for _, run in itertools.groupby(range(shape.layers), key=way)]
    return [slice(run[0], run[-1] + 1) for run in runs]
