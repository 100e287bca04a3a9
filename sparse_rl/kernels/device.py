"""What kernels ask of the GPU that they will run on."""

from __future__ import annotations

import functools

import torch

_H200 = 227 * 1024  # where no GPU is asked: Triton's interpreter has no limit


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have: 227 KiB on an H200, 99 KiB on most consumer GPUs."""
    if device.type != "cuda":
        return _H200
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@functools.cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
