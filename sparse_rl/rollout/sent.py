"""Make tensors of numbers that the host has, and send them to the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def on_host(values: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
    """Numbers, or lists of them, as a tensor; several times faster than `torch.tensor`."""
    return torch.from_numpy(np.array(values)).to(dtype)


def sent(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The same on the device.

    The copy joins the device's queue. `torch.tensor(values, device=device)` would wait until a GPU has worked off what
    is queued, and meanwhile the host could not launch what comes next.
    """
    return on_host(values, dtype).to(device, non_blocking=True)


def sent_together(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The parts, all int64, on the device, in one copy from pinned memory, which waits for nothing however large."""
    if device.type == "cpu":
        return list(parts)
    together = torch.cat([part.flatten() for part in parts])
    if device.type == "cuda":
        together = together.pin_memory()
    copied = together.to(device, non_blocking=True).split([part.numel() for part in parts])
    return [part.view(like.shape) for part, like in zip(copied, parts, strict=True)]
