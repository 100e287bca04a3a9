"""Properties of the GPU on which kernels will run."""

from __future__ import annotations

import functools

import torch

from ..errors import SparseRLError

_H200 = 227 * 1024  # used without a GPU: Triton's interpreter has no limit


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may use: 227 KiB on an H200, 99 KiB on most consumer GPUs."""
    if device.type != "cuda":
        return _H200
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def check_slots(device: torch.device, kind: str) -> None:
    """Refuse a slot format that a GPU does not support."""
    if kind == "fp8" and device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise SparseRLError(
            f"slots are fp8, which needs compute capability 8.9 or more, but {name} has {found[0]}.{found[1]}; use "
            "int8, which rounds less and takes the same memory."
        )


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
