"""Send numbers of the host to the device."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def sent(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Numbers, or lists of them, as a tensor on the device.

    The copy joins the device's queue. `torch.tensor(values, device=device)` would wait until a GPU has worked off what
    is queued, and meanwhile the host could not launch what comes next.
    """
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)
