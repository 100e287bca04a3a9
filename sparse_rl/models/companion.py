"""What a compressor has learned about a model: a small file beside it, NAME.safetensors for the compressor NAME.

The model carries its tensors along, so checkpoints and exports have them too. What they mean is the compressor's
affair; a file may be a stranger's, so it checks their names and shapes.
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
    tensors: dict[str, Tensor]  # on any device; whoever trains them changes them in place
    about: dict[str, str] = field(default_factory=dict)


def companions_of(model: nn.Module) -> dict[str, Companion]:
    """What a model carries, by the compressor's name. Wrappers such as adapters are looked through."""
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
    """What the compressor `name` has learned; without it the model is refused."""
    found = companions_of(model).get(name)
    if found is None:
        raise SparseRLError(
            f"{name} knows nothing about this model: there is no {name}.safetensors beside it; {remedy}"
        )
    return found


@torch.no_grad()
def copy_companions(source: nn.Module, target: nn.Module) -> None:
    """Put what a model's compressors have learned into those of a copy of it."""
    copies = companions_of(target)
    for name, companion in companions_of(source).items():
        for key, tensor in companion.tensors.items():
            copies[name].tensors[key].copy_(tensor)


def check_companion(name: str, companion: Companion, shapes: dict[str, tuple[int, ...]], remedy: str) -> None:
    """Refuse what was learned of another model, or is damaged."""
    given = {key: tuple(tensor.shape) for key, tensor in companion.tensors.items()}
    if given != shapes:
        raise SparseRLError(
            f"{name}.safetensors belongs to another model: it has {given}, but this model needs {shapes}; {remedy}"
        )
    for key, tensor in companion.tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise SparseRLError(f"{name}.safetensors has numbers in {key} that are not finite; {remedy}")


def save_companions(folder: Path, model: nn.Module) -> None:
    """Write what the model carries beside its weights."""
    for name, companion in companions_of(model).items():
        tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in companion.tensors.items()}
        replace_file(Path(folder) / f"{name}.safetensors", save(tensors, metadata=companion.about or None))


def load_companions(source: str | Path, model: nn.Module) -> None:
    """Give a model what lies beside it in its folder."""
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
