"""A model whose weights, gradients and moments are divided among the processes (FSDP2).

Every process still samples and scores with whole weights of its own; only learning, which takes 16 bytes or more per
parameter, is divided. Shards are fp32, whatever the model's dtype: they are the masters, and their rounding goes
through the model.

FSDP gathers weights when a module is called, on all processes at once. So everything that the learner does with the
model happens inside one call (`Sharded.forward`), and every process makes as many calls as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch
from torch import Tensor, nn

from .score import decoder_layers

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

T = TypeVar("T")


class Sharded(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[nn.Module], T]) -> T:
        return run(self.model)


def shard(model: nn.Module, processes: int) -> Sharded:
    """The model, divided among all processes: layer by layer, then the rest. The model is changed, not copied."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    first = next(model.parameters())
    mesh = init_device_mesh(first.device.type, (processes,))
    policy = (
        MixedPrecisionPolicy() if first.dtype == torch.float32 else MixedPrecisionPolicy(first.dtype, torch.float32)
    )
    for layer in decoder_layers(model):
        fully_shard(layer.float(), mesh=mesh, mp_policy=policy)
    around = Sharded(model)
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
    """All of a tensor that may be divided."""
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


def save_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Every process writes its own part. All processes do it together."""
    from torch.distributed.checkpoint.state_dict_saver import save

    with readable_checkpoint_errors():
        save(tensors, checkpoint_id=folder)


def load_shards(into: dict[str, Tensor], folder: Path) -> None:
    """Read what any number of processes wrote, into tensors that are whole or divided in any other way."""
    from torch.distributed.checkpoint.state_dict_loader import load

    with readable_checkpoint_errors():
        load(into, checkpoint_id=folder, no_dist=not torch.distributed.is_initialized())


@contextmanager
def readable_checkpoint_errors() -> Iterator[None]:
    """torch.distributed.checkpoint raises a non-Exception on every process; raise the first underlying error
    instead.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (why, _) = min(error.failures.items())
        raise OSError(f"process {rank}: {why}") from error
