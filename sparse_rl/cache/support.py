"""The support: which tokens the sampler could draw if top-k or top-p leave only some of them.

The sampler's log-probs are renormalised over the support, so the learner's must be renormalised over the same one. For
every sampled token, the size of the support and a margin are recorded: a token was kept if its logit is at most the
margin below the highest one. The margin lies halfway between the lowest logit that was kept and the highest that was
not, where rounding rarely reaches it. Under the trace the learner has the sampler's logits up to rounding and recovers
the support by the margin. In the dense view it has other logits, so the ids themselves are recorded.

Shapes: T tokens of a trajectory, n target tokens, K tokens of the largest support.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import SparseRLError
from ..files import replace_file
from .trace import in_order

MOST = 512  # tokens in a support, so at most 2 KiB of ids for a sampled token
_FORMAT = "sparse_rl.support.1"
_DTYPES = {"counts": torch.int32, "margins": torch.float32, "ids": torch.int32}


@dataclass(frozen=True)
class Support:
    counts: Tensor  # int32 [T]: tokens that could be drawn at each place; 0 if nothing was sampled there
    margins: Tensor  # fp32 [T]: highest logit - threshold, before temperature; infinite if all were kept
    ids: Tensor | None = None  # int32 [sum of counts]: these tokens, ascending at each place; None: not recorded

    def save(self, path: str | os.PathLike) -> None:
        """Write it atomically: the file is whole or absent."""
        tensors = {name: value for name, value in vars(self).items() if value is not None}
        content = save(tensors, metadata={"format": _FORMAT, "crc32": str(_crc(self))})
        replace_file(Path(path), in_order(content))

    @classmethod
    def load(cls, path: str | os.PathLike) -> Support:
        """Read a file that `save` wrote; any other content is refused."""
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in _DTYPES if name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise SparseRLError(f"{path} is not a file of supports or is damaged ({error}); write it again.") from error
        wrong = _wrong_in(tensors) if about.get("format") == _FORMAT else f"its format is {about.get('format')!r}"
        if wrong is None and about.get("crc32") != str(_crc(cls(**tensors))):
            wrong = "its checksum differs: it is damaged"
        if wrong is not None:
            raise SparseRLError(f"{path} is not a file of supports ({wrong}); write it again.")
        return cls(**tensors)


def _crc(support: Support) -> int:
    crc = 0
    for tensor in (support.counts, support.margins, support.ids):
        crc = crc if tensor is None else zlib.crc32(tensor.contiguous().numpy().tobytes(), crc)
    return crc


def _wrong_in(tensors: dict[str, Tensor]) -> str | None:
    """Why a file's tensors are not those of a support, or None."""
    for name in ("counts", "margins"):
        if name not in tensors:
            return f"it has no {name}"
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or tensor.dtype != _DTYPES[name]:
            return f"its {name} has {tensor.dim()} dimensions of {tensor.dtype}, not 1 of {_DTYPES[name]}"
    counts, ids = tensors["counts"], tensors.get("ids")
    if len(counts) != len(tensors["margins"]):
        return f"it has {len(counts)} counts, but {len(tensors['margins'])} margins"
    if len(counts) and int(counts.min()) < 0:
        return "a count is negative"
    if ids is not None and (len(ids) != int(counts.sum()) or (len(ids) and int(ids.min()) < 0)):
        return f"it has {len(ids)} ids, but its counts add up to {int(counts.sum())}"
    return None


def ids_of(supports: Sequence[Support | None], target_mask: Tensor) -> Tensor:
    """The supports of target tokens as rows, padded with -1. bool [B, T] -> int32 [n, K]"""
    parts = []
    for support, mask in zip(supports, target_mask, strict=True):
        assert support is not None and support.ids is not None, "the owner of a trajectory has its ids"
        counts = support.counts.long()
        where = mask[: len(counts)].nonzero()[:, 0]
        parts.append((support.ids, counts[where], (counts.cumsum(0) - counts)[where]))
    most = max((int(counts.max()) for _, counts, _ in parts if len(counts)), default=0)
    place = torch.arange(most)
    rows = []
    for ids, counts, first in parts:
        there = place < counts[:, None]  # [n of a row, K]
        index = torch.where(there, first[:, None] + place, 0)
        rows.append(torch.where(there, ids[index] if len(ids) else -1, -1).int())
    return torch.cat(rows)
