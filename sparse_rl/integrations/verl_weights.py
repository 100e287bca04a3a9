"""Weights that verl sends, copied into the model of a rollout server (verl_server.py).

verl sends most weights under the names of our model, and experts one by one (models/arriving.py).
"""

from __future__ import annotations

import torch
from safetensors.torch import load
from torch import nn

from ..errors import SparseRLError
from ..models.arriving import Arrived, missing, note, own_weights, place_of

__all__ = ["Arrived", "copy_weights", "missing"]


@torch.no_grad()
def copy_weights(model: nn.Module, part: bytes, arrived: Arrived) -> None:
    """In place; notes what came. All of a part (safetensors) fit, or none is copied."""
    own, tensors, places = own_weights(model), load(part), {}
    for name, tensor in tensors.items():
        place = place_of(name, own)
        if place is None:
            raise SparseRLError(
                f"verl sends {name!r:.100}, which the sampler's model does not have; give both the same model."
            )
        if tensor.shape != place.part.shape:
            shape = list(place.part.shape)
            raise SparseRLError(
                f"{name:.100} has shape {list(tensor.shape)} in verl, but {shape} in the sampler; give both the same "
                "model."
            )
        places[name] = place
    for name, tensor in tensors.items():
        places[name].part.copy_(tensor)
        note(arrived, name, places[name])
