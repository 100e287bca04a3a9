"""The states of recurrent layers: for each row, the last inputs of a convolution and a recurrent state. Nothing is
evicted from them, and their size does not depend on how many tokens a row was fed.

Shapes: R rows, C channels, K inputs that a convolution sees.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Types of layers, as transformers names them.
RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid"}
LAYERS_WITHOUT_SLOTS = {"linear_attention", "conv", "moe", "mlp"}


@dataclass(frozen=True)
class LayerState:
    """The shapes of what one recurrent layer keeps for a row."""

    layer: int  # its number among all layers of the model
    conv: tuple[int, int]  # (C, K), in the model's dtype
    recurrent: tuple[int, ...] | None  # in fp32; None: it has a convolution alone
    continues: bool = True  # whether several tokens may be fed to a state that is not empty

    def row_bytes(self, dtype: torch.dtype) -> int:
        return math.prod(self.conv) * dtype.itemsize + (4 * math.prod(self.recurrent) if self.recurrent else 0)


class RowStates:
    """The states of `rows` rows, by the number of their layer."""

    def __init__(self, layers: Sequence[LayerState], rows: int, dtype: torch.dtype, device: torch.device | str = "cpu"):
        self.layers, self.rows = tuple(layers), rows
        self.conv = {x.layer: torch.zeros(rows, *x.conv, dtype=dtype, device=device) for x in layers}  # [R, C, K]
        self.recurrent = {x.layer: torch.zeros(rows, *x.recurrent, device=device) for x in layers if x.recurrent}

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.conv.values(), *self.recurrent.values()]

    @property
    def continues(self) -> bool:
        return all(x.continues for x in self.layers)

    def part(self, rows: slice) -> RowStates:
        """Some rows, on the same memory."""
        part = RowStates.__new__(RowStates)
        part.layers, part.rows = self.layers, len(range(self.rows)[rows])
        part.conv = {layer: tensor[rows] for layer, tensor in self.conv.items()}
        part.recurrent = {layer: tensor[rows] for layer, tensor in self.recurrent.items()}
        return part

    def fork(self, source: RowStates, rows: Tensor, to: Tensor) -> None:
        """Copy some rows of `source` (these states or others) to rows `to`. rows, to [N]; no row is in both"""
        for mine, theirs in zip(self.tensors, source.tensors, strict=True):
            mine[to] = theirs[rows]


@functools.lru_cache
def slot_layers(kinds: tuple[str, ...], shared: int = 0) -> dict[int, int]:
    """Of a model with layers of these types: the slots that a layer reads, by its number; those without are missing.

    shared: so many layers at the end have no keys and values of their own, and read those of the last layer of their
    type before them.
    """
    own = kinds[: len(kinds) - shared] if shared < len(kinds) else kinds
    with_slots = [layer for layer, kind in enumerate(own) if kind not in LAYERS_WITHOUT_SLOTS]
    found = {layer: number for number, layer in enumerate(with_slots)}
    last = {kinds[layer]: number for layer, number in found.items()}
    return found | {layer: last[kinds[layer]] for layer in range(len(own), len(kinds)) if kinds[layer] in last}
