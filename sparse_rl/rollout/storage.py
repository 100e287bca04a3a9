"""The memory of an engine: the cache's rows, scratch rows for prompts, and the state that rows write.

Each part is allocated when a call first needs it, after comparing the plan with the free memory, and is kept for later
calls. Graphs that use a part are dropped with it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from ..cache import SlotCache
from ..cache.slots import chunk_bytes
from ..compressors import Compressor
from ..errors import OutOfMemory, SparseRLError
from ..kernels import ops
from ..kernels.twins_sample import RowSettings
from ..models import ModelShape
from ..models.routing import Routing
from ..planning.memory import (
    Plan,
    available_memory,
    cache_shape,
    default_fed_rows,
    fed_row_bytes,
    make_plan,
    size,
)
from .capture import Decoder
from .decode import RowState, empty_trace

_USUAL_RESPONSE = 4096  # new tokens assumed when memory runs out before the first call has said how many


class Storage:
    def __init__(
        self,
        model: nn.Module,
        shape: ModelShape,
        compressor: Compressor,
        rows: int,
        max_tokens: int | None,
        prefill_chunk: int,
        prefill_rows: int | None,
        routing: Routing | None = None,
    ):
        """`compressor`: bound to the largest budget, for which rows are made; `routing`: how experts are recorded;
        other arguments: see `Engine`
        """
        self.model, self.shape, self.compressor, self.rows = model, shape, compressor, rows
        self.max_tokens, self.prefill_chunk, self.prefill_rows = max_tokens, prefill_chunk, prefill_rows
        self.routing = routing
        self.cache: SlotCache | None = None
        self.scratch: SlotCache | None = None
        self.state: RowState | None = None
        self.decoders: dict[tuple, Decoder] = {}  # by the settings that are built into a captured step
        if compressor.evicts_response:
            capacity = compressor.capacity(0, 0)
            new_tokens = max(1, (max_tokens or capacity + _USUAL_RESPONSE) - capacity)
            self._allocate_rows(capacity, self.plan(prompt_tokens=capacity, new_tokens=new_tokens))
        elif max_tokens is not None:
            self._allocate_rows(max_tokens, self.plan(prompt_tokens=1, new_tokens=max_tokens - 1))

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def plan(self, prompt_tokens: int, new_tokens: int, room: int | None = None) -> Plan:
        """The memory plan of a call with prompts of up to `prompt_tokens`. room: see `Sampling.room`"""
        return make_plan(
            self.shape,
            self.compressor,
            rows=self.rows,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            weight_bytes=sum(p.nbytes for p in self.model.parameters()),
            capacity=self.cache.capacity if self.cache else None,
            prefill_chunk=self.prefill_chunk,
            prefill_rows=self.prefill_rows,
            on_gpu=ops.rules(self.device).on_gpu,
            routing=self.routing,
            room=room,
        )

    def reserve(self, prompt_tokens: int, new_tokens: int, room: int | None = None) -> None:
        """Allocate what a call of this size needs and what is not allocated yet."""
        plan = self.plan(prompt_tokens, new_tokens, room)
        cache = self._allocate_rows(self.compressor.capacity(prompt_tokens, new_tokens), plan)
        self._allocate_scratch(plan)
        self._allocate_state(plan, cache, room)

    def live_plan(self, prompt_tokens: int, max_tokens: int, room: int | None = None) -> Plan:
        """The memory plan of an open engine with conversations of up to `max_tokens`: any of these tokens may be
        sampled, and any but the first may be given.
        """
        plan, prompts = self.plan(1, max_tokens - 1, room), self.plan(prompt_tokens, max(1, max_tokens - prompt_tokens))
        of_prompts = ("scratch_capacity", "scratch_most", "scratch_row_bytes", "prompt_piece", "most_prefill_rows")
        of_prompts += ("prompt_tokens", "prefill_chunk", "attention_token_bytes")
        plan = replace(plan, **{name: getattr(prompts, name) for name in of_prompts})
        shape, capacity = cache_shape(self.shape, self.compressor), self.capacity_for(1, max_tokens - 1)
        return replace(
            plan,
            most_fed_rows=self.fed_rows,
            fed_row_bytes=fed_row_bytes(shape, capacity, min(capacity, self.prefill_chunk)),
            most_fed_bytes=chunk_bytes(self.device),
        )

    @property
    def fed_rows(self) -> int:
        """Rows of an open engine to which given tokens are fed together at most."""
        return self.prefill_rows or default_fed_rows(self.rows, ops.rules(self.device).feeds_together)

    def capacity_for(self, prompt_tokens: int, new_tokens: int) -> int:
        """Slots of a row, once it is allocated for such a call."""
        asked = self.compressor.capacity(prompt_tokens, new_tokens)
        return max(asked, self.cache.capacity) if self.cache else asked

    def reserve_live(self, prompt_tokens: int, max_tokens: int, stops: int, room: int | None = None) -> None:
        """Allocate what an open engine needs. stops: how many ids may end a turn"""
        plan = self.live_plan(prompt_tokens, max_tokens, room)
        cache = self._allocate_rows(self.compressor.capacity(1, max_tokens - 1), plan)
        self._allocate_scratch(plan)
        self._allocate_state(replace(plan, prompt_tokens=1), cache, room)
        assert self.state is not None
        if self.state.settings is None:
            self.state.settings = RowSettings.empty(self.rows, stops, self.device)

    def clear(self) -> None:
        """Zero the slots and the states."""
        for cache in (self.cache, self.scratch):
            if cache is not None:
                cache.clear()

    def drop_state(self) -> None:
        """Drop the row state and the graphs that write to it."""
        self.state = None
        self.decoders.clear()

    def _allocate_rows(self, capacity: int, plan: Plan) -> SlotCache:
        """Allocate the cache: once, except that rows which hold whole responses grow with the longest call."""
        grows = not self.compressor.evicts_response and self.max_tokens is None
        if self.cache is not None and grows and capacity > self.cache.capacity:
            self.cache = None
            self.drop_state()
            row_bytes = cache_shape(self.shape, self.compressor).row_bytes(capacity)
            plan = replace(plan, capacity=capacity, row_bytes=row_bytes)
        if self.cache is None:
            self._require(plan.cache_bytes, plan)
            self.cache = SlotCache(cache_shape(self.shape, self.compressor), self.rows, capacity, self.device)
        elif capacity > self.cache.capacity:
            raise SparseRLError(
                f"rows of this {self.compressor.name} engine hold {self.cache.capacity} tokens, but the call needs "
                f"{capacity} ({plan.prompt_tokens} prompt + {plan.new_tokens} new); "
                f"make the engine with Engine(..., max_tokens={capacity})."
            )
        return self.cache

    def _allocate_scratch(self, plan: Plan) -> None:
        """Allocate scratch rows for the longest prompts, again if longer ones come or more of them together."""
        known, shape = self.scratch, cache_shape(self.shape, self.compressor)
        asked = shape.capacities(plan.scratch_capacity, plan.scratch_most)
        small = known is None or any(have < need for have, need in zip(known.capacities, asked, strict=True))
        if known is None or small or known.rows < plan.prefill_rows:
            self.scratch = known = None
            self._require(plan.scratch_bytes, plan)
            slots, most = plan.scratch_capacity, plan.scratch_most
            self.scratch = SlotCache(shape, plan.prefill_rows, slots, self.device, most)

    def _allocate_state(self, plan: Plan, cache: SlotCache, room: int | None) -> None:
        """Allocate the row state, as large as the largest call so far.

        A captured step holds the addresses of all of it but the trace. Rows that fold need no trace, because the ends
        of their chunks say what was visible.
        """
        new = plan.new_tokens
        tokens = 0 if self.compressor.folds else plan.prompt_tokens + new
        if self.state is None or self.state.tokens.shape[1] < new or not self.state.has_room(room):
            tokens = tokens if self.state is None else max(tokens, self.state.trace.shape[3])
            self.drop_state()
            self._require(plan.record_bytes, plan)
            folds, chooses = self.compressor.folds, self.compressor.chooses
            self.state = RowState.empty(cache, tokens, new, folds, self.routing, chooses, room)
        elif self.state.trace.shape[3] < tokens:
            state, self.state = self.state, None
            state.trace = state.trace.new_empty(0)  # freed before the larger one is made
            self._require(plan.rows * plan.trace_row_bytes, plan)
            state.trace = empty_trace(cache, tokens)
            self.state = state

    def _require(self, needed: int, plan: Plan) -> None:
        free = available_memory(self.device)
        if needed > free:
            raise self.out_of_memory(plan, f"{size(needed)} are needed, {size(free)} are free")

    def out_of_memory(self, plan: Plan, why: str) -> OutOfMemory:
        """An error that says what the plan takes, and the largest setting that fits."""
        held = sum(p.nbytes for p in self.model.parameters()) + sum(c.nbytes for c in (self.cache, self.scratch) if c)
        held += sum(t.nbytes for t in self.state.by_row) if self.state else 0
        memory = available_memory(self.device) + held
        return OutOfMemory(
            f"out of memory ({why.splitlines()[0]}).\n{plan.text(memory)}\n{plan.largest_that_fits(memory)}"
        )
