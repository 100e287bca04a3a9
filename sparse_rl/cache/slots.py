"""A KV cache of fixed capacity: every running sequence owns one row of equal size, allocated once.

A slot is one (key, value, feed index) of one layer and KV head. The slots in use of a row are its first `used`, in feed
order, for every layer and head alike; which tokens they hold differs per layer and head. The cache knows nothing of
models, compressors or sampling: it appends, forks and counts its bytes. Keys and values may be stored in 8 bits
(formats.py), by all layers or by some.

Paging, block tables and reference counts are omitted on purpose. A budget makes rows equal, so a free row is a free
row.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .formats import CODES, SlotFormat, as_stored, dequantize, quantize
from .states import LayerState, RowStates

# Layers are compressed and copied together while a copy of their keys and values fits in this; on a GPU, in few calls.
CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 1024 * 2**20}


def chunk_bytes(device: torch.device | str) -> int:
    return CHUNK_BYTES.get(torch.device(device).type, CHUNK_BYTES["cpu"])


@dataclass(frozen=True)
class CacheShape:
    """What one slot and one row look like. The compressor asks for `num_queries` and `mass` to be recorded."""

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

    @property
    def slot_bytes(self) -> int:
        """Key, value, feed index (int32) and mass of one token, over all layers and KV heads."""
        return self.stored_bytes + self.layers * self.heads * (4 + (4 if self.mass else 0))

    @property
    def stored_bytes(self) -> int:
        """Key and value of one token alone, as they are stored, over all layers and KV heads."""
        quantized = sum(self.kind_of(layer) is not None for layer in range(self.layers))
        numbers, plain = self.key_dim + self.value_dim, self.layers - quantized
        return self.heads * (quantized * (numbers + 2) + plain * numbers * self.dtype.itemsize)  # 2: exponents

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

    def row_bytes(self, capacity: int) -> int:
        queries = self.layers * self.query_heads * self.num_queries * self.key_dim * self.dtype.itemsize
        return capacity * self.slot_bytes + queries + self.state_bytes


class LayerSlots(NamedTuple):
    """One layer's part of a cache, as kernels take it."""

    keys: Tensor  # [R, H, C, D]
    values: Tensor  # [R, H, C, D]
    feed: Tensor  # int32 [R, H, C]
    ring: Tensor | None  # [R, Hq, W, D] recent queries
    exponents: Tensor | None = None  # int8 [R, H, C, 2] of keys and values, which are then codes


@dataclass
class Stored:
    """Keys and values of neighbouring layers that are stored alike. l layers"""

    layers: slice
    keys: Tensor  # [l, R, H, C, D]
    values: Tensor
    exponents: Tensor | None  # int8 [l, R, H, C, 2], where keys and values are codes

    @classmethod
    def empty(cls, shape: CacheShape, layers: slice, kind: str | None, lead: tuple[int, ...], device) -> Stored:
        """lead: R, H, C"""
        lead, dtype = (layers.stop - layers.start, *lead), CODES[kind].dtype if kind else shape.dtype
        keys, values = (torch.zeros(*lead, d, dtype=dtype, device=device) for d in (shape.key_dim, shape.value_dim))
        return cls(layers, keys, values, torch.zeros(*lead, 2, dtype=torch.int8, device=device) if kind else None)

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.keys, self.values, self.exponents) if t is not None]

    def within(self, layers: slice) -> slice:
        """Layers of the cache, as these count them."""
        return slice(layers.start - self.layers.start, layers.stop - self.layers.start)

    def part(self, rows: slice) -> Stored:
        exponents = None if self.exponents is None else self.exponents[:, rows]
        return Stored(self.layers, self.keys[:, rows], self.values[:, rows], exponents)


class SlotCache:
    """`rows` rows of `capacity` slots. L layers, R rows, H KV heads, C capacity, D head dim, W recorded queries."""

    def __init__(self, shape: CacheShape, rows: int, capacity: int, device: torch.device | str = "cpu"):
        lead = (shape.layers, rows, shape.heads, capacity)
        self.shape, self.rows, self.capacity = shape, rows, capacity
        self.stored = [Stored.empty(shape, part, kind, lead[1:], device) for part, kind in _alike(shape)]
        self.feed = torch.zeros(*lead, dtype=torch.int32, device=device)  # [L, R, H, C] feed index of each slot
        self.queries: Tensor | None = None  # [L, R, Hq, W, D]; the query of feed index i lies at i % W
        self.mass: Tensor | None = None  # [L, R, H, C]
        if shape.num_queries:
            ring = (shape.layers, rows, shape.query_heads, shape.num_queries, shape.key_dim)
            self.queries = torch.zeros(*ring, dtype=shape.dtype, device=device)
        if shape.mass:
            self.mass = torch.zeros(*lead, dtype=torch.float32, device=device)
        self.states = RowStates(shape.states, rows, shape.dtype, device) if shape.states else None
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
    def device(self) -> torch.device:
        return self.feed.device

    @property
    def tensors(self) -> list[Tensor]:
        """Those of slots and queries."""
        own = [t for t in (self.feed, self.queries, self.mass) if t is not None]
        return [tensor for stored in self.stored for tensor in stored.tensors] + own

    @property
    def per_slot(self) -> list[Tensor]:
        """What is noted of slots beside keys and values. [L, R, H, C]"""
        return [self.feed] if self.mass is None else [self.feed, self.mass]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors + (self.states.tensors if self.states else []))

    def clear(self) -> None:
        for tensor in self.tensors + (self.states.tensors if self.states else []):
            tensor.zero_()

    def part(self, rows: slice) -> SlotCache:
        """Some rows as a cache of their own, on the same memory."""
        part = copy.copy(self)
        part.rows = len(range(self.rows)[rows])
        part.stored, part.feed = [stored.part(rows) for stored in self.stored], self.feed[:, rows]
        part.queries = None if self.queries is None else self.queries[:, rows]
        part.mass = None if self.mass is None else self.mass[:, rows]
        part.states = None if self.states is None else self.states.part(rows)
        return part

    def stored_by(self, layers: slice) -> Stored:
        """Keys and values of some layers, which are stored alike. [l, R, H, C, D]"""
        for stored in self.stored:
            if stored.layers.start <= layers.start and layers.stop <= stored.layers.stop:
                mine = stored.within(layers)
                exponents = None if stored.exponents is None else stored.exponents[mine]
                return Stored(layers, stored.keys[mine], stored.values[mine], exponents)
        raise AssertionError(f"layers {layers} are stored in different ways")

    def read(
        self, layers: slice, rows: slice | Tensor, used: int, with_values: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Keys and values of some layers, which are stored alike, in the model's dtype. -> [l, N, H, used, D] each"""
        stored = self.stored_by(layers)
        keys, values = stored.keys[:, rows, :, :used], None
        if with_values and not self.shape.latent:
            values = stored.values[:, rows, :, :used]
        if stored.exponents is not None:
            exponents, dtype = stored.exponents[:, rows, :, :used], self.shape.dtype
            keys = dequantize(keys, exponents[..., 0], dtype)
            values = None if values is None else dequantize(values, exponents[..., 1], dtype)
        if with_values and self.shape.latent:
            values = keys[..., : self.shape.latent]
        return keys, values

    def layer(self, layer: int) -> LayerSlots:
        ring, stored = None if self.queries is None else self.queries[layer], self.stored_by(slice(layer, layer + 1))
        exponents = None if stored.exponents is None else stored.exponents[0]
        return LayerSlots(stored.keys[0], stored.values[0], self.feed[layer], ring, exponents)

    def place(self, slot: Tensor, index: Tensor) -> None:
        """Open slots for the tokens about to be fed to the first B rows. slot, index [B, T]"""
        rows = torch.arange(slot.shape[0], device=slot.device)[:, None]
        self.feed[:, rows, :, slot] = index.to(torch.int32)[:, :, None, None]  # indexed shape [B, T, L, H]
        if self.mass is not None:
            self.mass[:, rows, :, slot] = 0.0

    def append(self, layer: int, slot: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the tokens being fed to the first B rows. -> key and value as they are read

        slot [B, T]; key, value [B, H, T, D]
        """
        rows, slots = torch.arange(slot.shape[0], device=slot.device)[:, None], self.layer(layer)
        if slots.exponents is not None and (kind := self.shape.kind_of(layer)) is not None:
            (keys, key_exponents), (values, value_exponents) = quantize(key, kind), quantize(value, kind)
            slots.exponents[rows, :, slot] = torch.stack([key_exponents, value_exponents], -1).transpose(1, 2)
            read = dequantize(keys, key_exponents, key.dtype), dequantize(values, value_exponents, value.dtype)
        else:
            keys, values = read = key, value
        slots.keys[rows, :, slot] = keys.transpose(1, 2)
        if not self.shape.latent:
            slots.values[rows, :, slot] = values.transpose(1, 2)
        return read

    def as_stored(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as they would be read from slots."""
        kind = self.shape.kind_of(layer)
        return (key, value) if kind is None else (as_stored(key, kind), as_stored(value, kind))

    def open_mass(self, layer: int, slot: Tensor, live: Tensor) -> None:
        """A token about to be fed to each live row has received no attention yet. slot, live [B]"""
        assert self.mass is not None
        rows = torch.arange(slot.shape[0], device=slot.device)
        self.mass[layer][rows, :, slot] *= ~live[:, None]

    def record_queries(self, layer: int, index: Tensor, query: Tensor, ends: Tensor | None = None) -> None:
        """Remember the last W queries for scoring.

        index [B, T], consecutive; query [B, Hq, T, D]; ends [B]: where each prompt ends, None where nothing is padding
        """
        if self.queries is None:
            return
        last = min(self.shape.num_queries, index.shape[1])
        rows = torch.arange(index.shape[0], device=index.device)[:, None]
        if ends is None:
            place = index[:, -last:] % self.shape.num_queries
            self.queries[layer][rows, :, place] = query[:, :, -last:].transpose(1, 2)
            return
        first, stop = index[:, :1], torch.minimum(index[:, -1] + 1, ends)[:, None]
        here = stop - last + torch.arange(last, device=index.device)  # [B, W'] feed indices
        real = here >= first  # a row whose prompt ended in an earlier chunk has no queries here
        new = query.transpose(1, 2)[rows, (here - first).clamp(min=0)]  # [B, W', Hq, D]
        place = here % self.shape.num_queries
        old = self.queries[layer][rows, :, place]
        self.queries[layer][rows, :, place] = torch.where(real[:, :, None, None], new, old)

    def recent_queries(self, layers: slice, rows: Tensor, fed: Tensor, count: int) -> Tensor | None:
        """The last `count` queries of some rows, oldest first. -> [l, N, Hq, count, D]

        rows [N]; fed [N]: tokens fed so far
        """
        if self.queries is None:
            return None
        index = fed[:, None] - count + torch.arange(count, device=fed.device)  # [N, W'] feed indices
        ring = self.queries[layers][:, rows]  # [l, N, Hq, W, D]
        place = (index % self.shape.num_queries)[None, :, None, :, None]
        return ring.gather(3, place.expand(*ring.shape[:3], count, ring.shape[4]))

    def layer_chunks(self, num_rows: int, used: int) -> list[slice]:
        """Layers to compress together, stored alike, so that working copies stay small whatever the model."""
        per_layer = num_rows * used * self.shape.kv_bytes_per_token // self.shape.layers
        step = max(1, min(self.shape.layers, chunk_bytes(self.device) // max(per_layer, 1)))
        parts = [(stored.layers.start, stored.layers.stop) for stored in self.stored]
        return [slice(i, min(i + step, stop)) for start, stop in parts for i in range(start, stop, step)]

    def fork(self, source: SlotCache, rows: Tensor, to: Tensor, used: int) -> None:
        """Copy the first `used` slots and the states of some rows of `source` (this cache or another) to rows `to`.

        rows, to [N]. No row is both a source and a destination.
        """
        for layers in self.layer_chunks(len(rows), used):
            stored = zip(self.stored_by(layers).tensors, source.stored_by(layers).tensors, strict=True)
            others = [(m[layers], t[layers]) for m, t in zip(self.per_slot, source.per_slot, strict=True)]
            for mine, theirs in [*stored, *others]:
                mine[:, to, :, :used] = theirs[:, rows, :, :used]
            if self.queries is not None and source.queries is not None:
                self.queries[layers, to] = source.queries[layers][:, rows]
        if self.states is not None and source.states is not None:
            self.states.fork(source.states, rows, to)
        self.scaling, self.softcap, self.sliding_window = source.scaling, source.softcap, source.sliding_window

    def take(self, row: int, used: int) -> list[Tensor]:
        """Copies in host memory of what a row holds: its first `used` slots, recent queries and states."""
        return [part.to("cpu", copy=True) for part in self._parts(row, used)]

    def put(self, row: int, taken: list[Tensor]) -> None:
        """What `take` returned, into a row of this cache."""
        for mine, theirs in zip(self._parts(row, taken[0].shape[2]), taken, strict=True):
            mine.copy_(theirs)

    def _parts(self, row: int, used: int) -> list[Tensor]:
        slots = [t[:, row] if t is self.queries else t[:, row, :, :used] for t in self.tensors]
        return [*slots, *(t[row] for t in (self.states.tensors if self.states else []))]


def _alike(shape: CacheShape) -> list[tuple[slice, str | None]]:
    """Runs of layers that are stored alike, and the kind of their codes."""
    runs = [(kind, list(run)) for kind, run in itertools.groupby(range(shape.layers), key=shape.kind_of)]
    return [(slice(run[0], run[-1] + 1), kind) for kind, run in runs]
