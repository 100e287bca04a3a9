"""A model whose weights, gradients and moments are divided among the processes (FSDP2).

Every process still samples and scores with whole weights of its own; only learning, which takes 16 bytes and more for a parameter, is
divided. Shards are fp32, whatever the model's dtype: they are the masters, and what goes through the model is their rounding.

FSDP gathers weights when a module is called, on all processes at once. So all that the learner does with the model happens inside one call
(`Sharded.forward`), and every process makes as many calls as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from .score import decoder_layers

T = TypeVar("T")


class Sharded(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[nn.Module], T]) -> T:
        return run(self.model)


def shard(model: nn.Module, processes: int) -> Sharded:
    """The model, divided among all processes: layer by layer, and what is around them. It is changed, not copied."""
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
    return fully_shard(around, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


@torch.no_grad()
def publish(shards: nn.Module, whole: nn.Module) -> None:
    """Whole weights become what the shards are, rounded to their dtype. All processes do it together."""
    for theirs, ours in zip(shards.parameters(), whole.parameters(), strict=True):
        if ours.requires_grad:
            ours.copy_(full(theirs.to(ours.dtype)))


def full(tensor: Tensor) -> Tensor:
    """All of a tensor that may be divided."""
    return tensor.full_tensor() if is_divided(tensor) else tensor


def is_divided(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # torch.distributed's DTensor


@torch.no_grad()
def put(whole: Tensor, into: Tensor) -> None:
    """Copy a whole tensor, which every process has, into one that may be divided."""
    if is_divided(into) and not is_divided(whole):
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(whole.to(into.device), into.device_mesh, into.placements, src_data_rank=None)
    into.copy_(whole)


def save_shards(tensors: dict[str, Tensor], folder: Path) -> None:
    """Every process writes its own part. All do it together."""
    import torch.distributed.checkpoint as dcp

    with readable_checkpoint_errors():
        dcp.save(tensors, checkpoint_id=folder)


def load_shards(into: dict[str, Tensor], folder: Path) -> None:
    """Read what any number of processes wrote, into tensors that are whole or divided in any other way."""
    import torch.distributed.checkpoint as dcp

    with readable_checkpoint_errors():
        dcp.load(into, checkpoint_id=folder, no_dist=not torch.distributed.is_initialized())


@contextmanager
def readable_checkpoint_errors() -> Iterator[None]:
    """torch.distributed.checkpoint raises, on all processes, something that is not even an Exception: say what went wrong first."""
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (why, _) = min(error.failures.items())
        raise OSError(f"process {rank}: {why}") from error
