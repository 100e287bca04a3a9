"""Triton kernels of the decode step and of evictions, and their plain torch twins.

A twin has the name and the arguments of its kernel: it runs where there is no GPU, and says in the tests what the kernel must compute.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType

import torch

from . import twins


def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def on(device: torch.device) -> ModuleType:
    """The kernels for a device: Triton's on CUDA, their twins elsewhere."""
    if device.type == "cuda" and has_triton():
        from . import decode

        return decode
    return twins
