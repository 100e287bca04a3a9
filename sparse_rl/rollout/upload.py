"""Copy what the host knows to the device, in one transfer that does not wait for the work there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The parts, all int64, on the device.

    `torch.tensor(values, device=device)` would wait until a GPU has worked off what is queued. A copy from pinned
    memory joins the queue, however large it is.
    """
    if device.type == "cpu":
        return list(parts)
    together = torch.cat([part.flatten() for part in parts])
    if device.type == "cuda":
        together = together.pin_memory()
    copied = together.to(device, non_blocking=True).split([part.numel() for part in parts])
    return [part.view(like.shape) for part, like in zip(copied, parts, strict=True)]
