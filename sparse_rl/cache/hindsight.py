"""Hindsight on one trajectory: how much each evicted token was missed, and what giving back the worst ones changes.

learn/regret.py has the equations. The result is kept in a file beside the trace, because computing it needs weights:

    samples/step-000010/traces/000003-000.safetensors
    samples/step-000010/regret/000003-000.safetensors

L layers, H KV heads, T tokens, K tokens given back.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import SparseRLError
from ..files import replace_file
from .trace import in_order

_FORM = "sparse_rl.hindsight.1"
_KINDS = {"mass": (3, torch.float32), "tokens": (1, torch.int32), "changes": (2, torch.float32)}


@dataclass(frozen=True)
class Hindsight:
    step: int  # step of the checkpoint that was used; 0: the starting model
    mass: Tensor  # fp32 [L, H, T]: the attention that a token would have received after it was evicted
    tokens: Tensor  # int32 [K]: the tokens missed most, over all layers and heads; the worst first
    changes: Tensor  # fp32 [K, T]: the change of every log-prob if that token had never been evicted

    def save(self, path: str | os.PathLike) -> None:
        """Write it, atomically: the file is whole or absent."""
        tensors = {name: getattr(self, name).contiguous() for name in _KINDS}
        content = save(tensors, metadata={"format": _FORM, "step": str(self.step)})
        replace_file(Path(path), in_order(content))

    @classmethod
    def load(cls, path: str | os.PathLike) -> Hindsight:
        """Read a file that `save` wrote; any other content is refused."""
        try:
            with safe_open(path, framework="pt") as file:
                about, names = file.metadata() or {}, set(file.keys())
                tensors = {name: file.get_tensor(name) for name in _KINDS if name in names}
        except (SafetensorError, OSError) as error:
            raise SparseRLError(f"{path} cannot be read ({error}); remove it and compute the regret again.") from error
        if (why := _wrong_in(about, tensors)) is not None:
            raise SparseRLError(f"{path} holds no regret ({why}); remove it and compute the regret again.")
        return cls(int(about["step"]), **tensors)


def _wrong_in(about: dict[str, str], tensors: dict[str, Tensor]) -> str | None:
    step = about.get("step", "")
    if about.get("format") != _FORM or not (step.isascii() and step.isdigit() and len(step) < 16):
        return f"its format is {about.get('format')!r:.40} and its step {step!r:.40}"
    for name, (rank, dtype) in _KINDS.items():
        found = tensors.get(name)
        if found is None or found.dim() != rank or found.dtype != dtype:
            return f"it lacks {name} with {rank} dimensions of {dtype}"
    mass, tokens, changes = (tensors[name] for name in _KINDS)
    if changes.shape != (len(tokens), mass.shape[-1]):
        return f"its changes are {list(changes.shape)}, not [{len(tokens)}, {mass.shape[-1]}]"
    if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) < mass.shape[-1]):
        return f"it names token {int(tokens.max())} of {mass.shape[-1]}"
    if not (mass.isfinite().all() and (mass >= 0).all() and changes.isfinite().all()):
        return "it has numbers that are not finite, or a negative mass"
    return None
