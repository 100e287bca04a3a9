"""Companions: what a compressor NAME has learned about a model, in a small file NAME.safetensors beside it.

The model carries the tensors along, so checkpoints and exports have them, too. Only the compressor knows what they
mean. A file may be a stranger's, so the compressor checks names and shapes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from ..errors import SparseRLError
from ..files import replace_file

NAMES = ("triattention", "learned")
_PLACE = "_sparse_rl_companions"  # an attribute of the model


@dataclass(frozen=True)
class Companion:
    tensors: dict[str, Tensor]  # on any device; training changes them in place
    about: dict[str, str] = field(default_factory=dict)


def companions_of(model: nn.Module) -> dict[str, Companion]:
    """The companions of a model by compressor, also if the model is wrapped, for example by adapters."""
    for module in model.modules():
        if (found := vars(module).get(_PLACE)) is not None:
            return found
    return {}


def set_companion(model: nn.Module, name: str, companion: Companion) -> None:
    assert name in NAMES
    found = companions_of(model)
    if not found:
        vars(model)[_PLACE] = found
    found[name] = companion


def companion_of(model: nn.Module, name: str, remedy: str) -> Companion:
    """The companion for the compressor `name`; refuses a model without one."""
    found = companions_of(model).get(name)
    if found is None:
        raise SparseRLError(f"{name} needs {name}.safetensors, but there is none beside this model; {remedy}")
    return found


@torch.no_grad()
def copy_companions(source: nn.Module, target: nn.Module) -> None:
    """Copy the companions of a model into those of its copy."""
    copies = companions_of(target)
    for name, companion in companions_of(source).items():
        for key, tensor in companion.tensors.items():
            copies[name].tensors[key].copy_(tensor)


def check_companion(name: str, companion: Companion, shapes: dict[str, tuple[int, ...]], remedy: str) -> None:
    """Refuse a companion that is damaged or belongs to another model."""
    given = {key: tuple(tensor.shape) for key, tensor in companion.tensors.items()}
    if given != shapes:
        raise SparseRLError(
            f"{name}.safetensors belongs to another model: it has {given}, but this model needs {shapes}; {remedy}"
        )
    for key, tensor in companion.tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise SparseRLError(f"{name}.safetensors has numbers in {key} that are not finite; {remedy}")


def save_companions(folder: Path, model: nn.Module) -> None:
    """Write the model's companions beside its weights."""
    for name, companion in companions_of(model).items():
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in companion.tensors.items()}
        replace_file(Path(folder) / f"{name}.safetensors", save(tensors, metadata=companion.about or None))


def load_companions(source: str | Path, model: nn.Module) -> None:
    """Give a model the companions that lie in its folder."""
    for name in NAMES:
        path = Path(source) / f"{name}.safetensors"
        if not path.is_file():
            continue
        try:
            with safe_open(path, framework="pt") as file:
                companion = Companion({key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise SparseRLError(f"{path} is damaged ({error}); write it again, or remove it.") from error
        set_companion(model, name, companion)
