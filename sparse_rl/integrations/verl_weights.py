"""Weights that verl sends, copied into the model of a rollout server (verl_server.py).

verl sends most weights under the names of our model. Experts, which transformers 5 keeps packed, it sends one by one,
as they lie in checkpoints:

    mlp.experts.3.gate_proj.weight [I, D]  -> mlp.experts.gate_up_proj [E, 2 I, D], [3, :I]
    mlp.experts.3.up_proj.weight   [I, D]  -> mlp.experts.gate_up_proj              [3, I:]
    mlp.experts.3.down_proj.weight [D, I]  -> mlp.experts.down_proj    [E, D, I],   [3]
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from safetensors.torch import load
from torch import Tensor, nn

from ..errors import SparseRLError

_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight")
Arrived = dict[int, dict[str, int]]  # of a parameter (by identity) that came: names that were sent -> their elements


@torch.no_grad()
def copy_weights(model: nn.Module, part: bytes, arrived: Arrived) -> None:
    """In place, so that captured steps stay; notes what came. All of a part (safetensors) fit, or none is copied."""
    own = {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False))}
    tensors = load(part)
    places = {name: place_of(name, own) for name in tensors}
    for name, tensor in tensors.items():
        if tensor.shape != places[name][1].shape:
            shape = list(places[name][1].shape)
            raise SparseRLError(f"{name:.100} has shape {list(tensor.shape)} in verl, but {shape} here.")
    for name, tensor in tensors.items():
        whole, place = places[name]
        place.copy_(tensor)
        arrived.setdefault(id(whole), {})[name] = tensor.numel()


def place_of(name: str, own: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(our tensor, the part of it that a name stands for)"""
    if name in own:
        return own[name], own[name]
    if found := _EXPERT.fullmatch(name):
        experts, number, kind = found[1], int(found[2]), found[3]
        packed = own.get(f"{experts}.{'down' if kind == 'down' else 'gate_up'}_proj")
        if packed is not None and packed.dim() == 3 and number < len(packed):
            return packed, packed[number] if kind == "down" else packed[number].chunk(2)[kind == "up"]
    raise SparseRLError(f"verl sends {name!r:.100}, which the model does not have.")


def missing(model: nn.Module, arrived: Arrived) -> list[str]:
    """Parameters that did not come, or of which parts did not come."""
    named = model.named_parameters()
    return [name for name, own in named if sum(arrived.get(id(own), {}).values()) < own.numel()]
