"""Divide a model's weights, gradients and moments among the processes (FSDP2).

Every process still samples and scores with its own whole weights; only learning, which takes 16 bytes or more per
parameter, is divided. Shards are fp32, whatever the model's dtype: they are the masters, and the model computes with
them rounded.

FSDP gathers weights when a module is called, in all processes at once. So everything that the learner does with the
model happens inside one call (`Sharded.forward`), and every process makes as many calls as the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..errors import SparseRLError
from .score import decoder_layers

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

T = TypeVar("T")


class Sharded(nn.Module):
    def __init__(self, model: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model, self.dtype = model, dtype  # dtype: in which it computes

    def forward(self, run: Callable[[nn.Module], T]) -> T:
        return run(self.model)


def shard(model: nn.Module, processes: int) -> Sharded:
    """Divide the model among all processes: layer by layer, then the rest. The model is changed, not copied."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    first = next(model.parameters())
    dtype, mesh = first.dtype, init_device_mesh(first.device.type, (processes,))
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else MixedPrecisionPolicy(dtype, torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer.float(), mesh=mesh, mp_policy=policy)
    around = Sharded(model, dtype)
    for parameter in model.parameters():
        if not is_divided(parameter):
            parameter.data = parameter.data.float()
    return cast(Sharded, fully_shard(around, mesh=mesh, mp_policy=policy, reshard_after_forward=False))


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Copy the trained weights of a model, whole or divided, into a whole one, rounded to its dtype.

    All processes do it together.
    """
    for theirs, ours in zip(source.parameters(), target.parameters(), strict=True):
        if ours.requires_grad:
            ours.copy_(full(theirs.to(ours.dtype)))


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be divided."""
    return tensor.full_tensor() if is_divided(tensor) else tensor


def is_divided(value: object) -> TypeIs[DTensor]:
    """Whether a value is a tensor that is divided among processes, torch.distributed's DTensor."""
    return hasattr(value, "full_tensor")


@torch.no_grad()
def put(whole: Tensor, into: Tensor) -> None:
    """Copy a whole tensor, which every process has, into a tensor that may be divided."""
    if is_divided(into) and not is_divided(whole):
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(whole.to(into.device), into.device_mesh, into.placements, src_data_rank=None)
    into.copy_(whole)


def save_shards(tensors: dict[str, DTensor], folder: Path) -> None:
    """Write this process's part: its pieces of each tensor, and in the header where they belong."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = {name: tensor.to_local().detach().contiguous().cpu() for name, tensor in tensors.items()}
    layout = {name: {"shape": list(tensor.shape), "offset": _region(tensor)[0]} for name, tensor in tensors.items()}
    rank = torch.distributed.get_rank()
    save_file(pieces, folder / f"process-{rank:05d}.safetensors", {"layout": json.dumps(layout)})


@torch.no_grad()
def load_shards(into: dict[str, Tensor], folder: Path) -> None:
    """Read what any number of processes wrote into tensors that are whole, or divided in any other way.

    The files hold only numbers and their places, no code. Raises ValueError if a tensor is incomplete.
    """
    if (folder / ".metadata").exists():
        raise SparseRLError(
            f"an earlier version wrote {folder} in a format that cannot be read without running code from it; do one "
            "step with that version and --model.shard false, which writes a checkpoint without shards, and continue "
            "with this version."
        )
    missing = {name: whole_or_part(tensor).numel() for name, tensor in into.items()}
    for path in sorted(folder.glob("process-*.safetensors")):
        with safe_open(path, "pt") as file:
            layout = json.loads(file.metadata()["layout"])
            for name in layout.keys() & into.keys():
                if layout[name]["shape"] != list(into[name].shape):
                    raise ValueError(
                        f"{name} has the shape {layout[name]['shape']} instead of {list(into[name].shape)}"
                    )
                piece, start = file.get_slice(name), layout[name]["offset"]
                missing[name] -= _copy_overlap(piece, start, into[name])
    if unread := [name for name, count in missing.items() if count]:
        raise ValueError(f"{len(unread)} of {len(into)} tensors are not whole, such as {unread[0]}")


def _copy_overlap(piece: Any, start: list[int], into: Tensor) -> int:
    """Copy the overlap of a tensor with a piece that begins at `start`; returns how many numbers were copied."""
    target, begin = whole_or_part(into), _region(into)[0]
    ends = [min(a + n, b + m) for a, n, b, m in zip(start, piece.get_shape(), begin, target.shape, strict=True)]
    low = [max(a, b) for a, b in zip(start, begin)]
    if any(a >= b for a, b in zip(low, ends)):
        return 0
    common = target[tuple(slice(a - b, e - b) for a, e, b in zip(low, ends, begin))]
    common.copy_(piece[tuple(slice(a - s, e - s) for a, e, s in zip(low, ends, start))])
    return common.numel()


def whole_or_part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor that may be divided."""
    return tensor.to_local() if is_divided(tensor) else tensor


def _region(tensor: Tensor) -> tuple[list[int], list[int]]:
    """Where this process's part of a tensor begins, and its shape."""
    if not is_divided(tensor):
        return [0] * tensor.dim(), list(tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert all(placement.is_shard() for placement in tensor.placements), "a piece must be in one file only"
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return list(offset), list(shape)
