"""What a model that asks for a cache sees of the rows that are fed: transformers' own, over states of the rows.

The attention layers of such a model hand their keys and values to this cache too, and get them back as they are: slots
are the attention function's business. A recurrent layer is given its state and changes it in place, by whatever kernel
it has. While decoding, rows that are not fed must stay as they are, and a batch may be longer than the rows; then a
layer works on a copy, which is written back when the next layer begins. So one layer is copied at a time.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from ..cache import LayerState
from ..errors import SparseRLError
from .slots import Feed


class FedStates(Cache):
    """The states of the rows of one feed. `padding`: rows of the batch beyond those."""

    def __init__(self, feed: Feed, padding: int):
        states = () if feed.cache.states is None else feed.cache.states.layers
        assert not states or feed.ends is None, "padding would enter the states"
        self.feed, self.rows = feed, feed.slot.shape[0]
        self.open: _LayerStates | None = None  # the layer that is at work
        known = {state.layer: state for state in states}
        layers = [_LayerStates(self, feed, padding, known.get(i)) for i in range(max(known, default=0) + 1)]
        super().__init__(layers=layers)  # pyright: ignore[reportArgumentType]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs):
        if self.feed.cache.shape.latent:
            self.feed.latents[layer_idx] = key_states[: self.rows], value_states[: self.rows]
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def begin(self, layer: _LayerStates | None) -> None:
        """A layer is at work; the one before has run."""
        if self.open is not None and self.open is not layer:
            self.open.write_back()
        self.open = layer

    def end(self) -> list[int]:
        """The model has run. -> recurrent layers that did not ask for their state"""
        self.begin(None)
        layers = cast("list[_LayerStates]", self.layers)
        missed = [i for i, layer in enumerate(layers) if layer.state is not None and not layer.asked]
        self.layers.clear()  # they point back here, and to the rows
        return missed


class _LayerStates(LinearAttentionLayer):
    """One layer's states of the rows that are fed. `state` is None of a layer that keeps none."""

    def __init__(self, cache: FedStates, feed: Feed, padding: int, state: LayerState | None):
        self.cache, self.state, self.padding, self.live = cache, state, padding, feed.live
        self.asked = False
        self.number_of_states, self.record_past = 1, False
        self.has_previous_state = {0: not feed.first}
        self.is_conv_states_initialized = self.is_recurrent_states_initialized = {0: True}
        self.own: list[Tensor] = []  # of all rows
        self.given: list[Tensor | None] = [None, None]  # what the layer works on
        self.rows = feed.read_rows
        if state is not None:
            states = feed.cache.states
            assert states is not None
            self.conv_kernel_size = {0: state.conv[1]}
            both = (states.conv[state.layer], states.recurrent.get(state.layer))
            self.own = [tensor for tensor in both if tensor is not None]

    @property
    def conv_states(self) -> dict[int, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {0: self.take(0)}

    @property
    def recurrent_states(self) -> dict[int, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return {0: self.take(1)}

    def take(self, which: int) -> Tensor:
        self.cache.begin(self)
        self.asked = True
        given = self.given[which]
        if given is None:
            own = self.own[which][self.rows]  # a copy, unless the rows are a slice
            if self.padding:
                given = torch.cat([own, own[:1].expand(self.padding, *own.shape[1:])])
            else:
                given = own if self.live is None else own.clone()
            self.given[which] = given
        return given

    def write_back(self) -> None:
        in_place = not self.padding and self.live is None and isinstance(self.rows, slice)
        for own, given in zip(self.own, self.given):
            if given is None or in_place:
                continue
            given = given[: self.cache.rows]
            if self.live is not None:
                given = torch.where(self.live.view(-1, *[1] * (own.dim() - 1)), given, own[self.rows])
            own[self.rows] = given
        self.given = [None, None]

    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, conv_kernel_size=None, **kwargs) -> Tensor:
        assert self.state is not None
        width = self.state.conv[1] if conv_kernel_size is None else conv_kernel_size
        self.check((conv_states.shape[1], width), self.state.conv)
        return super().update_conv_state(conv_states, state_idx, conv_kernel_size=conv_kernel_size, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **kwargs) -> Tensor:
        assert self.state is not None
        self.check(tuple(recurrent_states.shape[1:]), self.state.recurrent)
        return super().update_recurrent_state(recurrent_states, state_idx, **kwargs)

    def check(self, given: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
        if given != expected:
            assert self.state is not None
            raise SparseRLError(
                f"layer {self.state.layer} keeps a state of shape {given} where the config says {expected}: this "
                "architecture is not supported."
            )
