"""How large a tensor over the vocabulary gets."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.models import VOCABULARY


class Largest(TorchDispatchMode):
    """The most rows any result over the vocabulary had, whatever its dtype."""

    def __init__(self):
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.shape[-1:] == (VOCABULARY,)
                and tensor.shape != (32, VOCABULARY)
            ):  # not W^T
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return out
