"""Find the place in a model for weights that arrive from elsewhere and are copied in place, so that captured steps
stay valid.

They come under the names of the model; weights of experts, which transformers 5 packs, may come as in checkpoints:

    mlp.experts.3.gate_proj.weight [I, D]  -> mlp.experts.gate_up_proj [E, 2 I, D], [3, :I]
    mlp.experts.3.up_proj.weight   [I, D]  -> mlp.experts.gate_up_proj              [3, I:]
    mlp.experts.3.down_proj.weight [D, I]  -> mlp.experts.down_proj    [E, D, I],   [3]

What a compressor has learned beside the model is called learned:NAME.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn

from .companion import companions_of

LEARNED = "learned"
_EXPERT = re.compile(r"(.*\.experts)\.(\d{1,6})\.(gate|up|down)_proj\.weight")
# for each parameter (by identity) that came: names that were sent -> their numbers of elements
Arrived = dict[int, dict[str, int]]


class Place(NamedTuple):
    whole: Tensor  # the model's tensor
    part: Tensor  # the part of it that a name stands for


def own_weights(model: nn.Module) -> dict[str, Tensor]:
    """The model's tensors by every name under which a weight may arrive; tied weights by each of their names."""
    learned = companions_of(model).get(LEARNED)
    beside = {} if learned is None else {f"{LEARNED}:{name}": tensor for name, tensor in learned.tensors.items()}
    return {**dict(model.named_buffers()), **dict(model.named_parameters(remove_duplicate=False)), **beside}


def place_of(name: str, own: Mapping[str, Tensor]) -> Place | None:
    """The place of a weight in the model; None if the model has nothing of this name."""
    if name in own:
        return Place(own[name], own[name])
    if found := _EXPERT.fullmatch(name):
        experts, number, kind = found[1], int(found[2]), found[3]
        packed = own.get(f"{experts}.{'down' if kind == 'down' else 'gate_up'}_proj")
        if packed is not None and packed.dim() == 3 and number < len(packed):
            return Place(packed, packed[number] if kind == "down" else packed[number].chunk(2)[kind == "up"])
    return None


def note(arrived: Arrived, name: str, place: Place) -> None:
    arrived.setdefault(id(place.whole), {})[name] = place.part.numel()


def missing(model: nn.Module, arrived: Arrived) -> list[str]:
    """Parameters of which all or some parts did not come."""
    named = model.named_parameters()
    return [name for name, own in named if sum(arrived.get(id(own), {}).values()) < own.numel()]
