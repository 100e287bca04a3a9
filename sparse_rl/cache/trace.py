"""The trace: one integer per (layer, KV head, token) that records a whole rollout's evictions.

Eviction is monotone (a slot that is gone never returns), so `evicted_at`, the first query that no longer sees a token,
is a complete record of what the sampler could see:

    visible(l, h, q, k) = (k <= q) and (q < evicted_at[l, h, k])

Queries and tokens are counted by feed index, the order in which tokens entered the cache.

A trace may also have `routes`, the experts that each token of a mixture of experts went through (models/routing.py),
and `slots`, the format of keys and values if it is not the model's dtype (formats.py), with `ties`, the numbers whose
code rounding alone decided (ties.py). With all of these the sampler's pass can be repeated.

A file holds `evicted_at` itself, or a byte per (layer, KV head, token) that points to one of the few moments of
eviction. It also holds `routes`, `slots` and `ties`, which older versions ignore.
"""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import SparseRLError
from ..files import replace_file
from .formats import SlotFormat
from .ties import COLUMNS

NEVER = 65535  # `evicted_at` of a token that stayed, in uint16
_PLAIN, _EVENTS = "sparse_rl.trace.1", "sparse_rl.trace.2"  # a file's two forms
_TENSORS = {_PLAIN: ("evicted_at",), _EVENTS: ("moments", "which")}
_WIDTHS = (torch.uint16, torch.int32)
# A file that has routes or ties names their form.
_FORMS = {"routes": "sparse_rl.routes.1", "ties": "sparse_rl.ties.1"}
_KINDS = {  # (rank, dtypes)
    "evicted_at": (3, _WIDTHS),
    "moments": (1, _WIDTHS),
    "which": (3, (torch.uint8,)),
    "routes": (3, (torch.uint8, torch.uint16)),
    "ties": (2, _WIDTHS),
}


def trace_dtype(tokens: int) -> torch.dtype:
    """uint16 while every feed index fits below NEVER, else int32."""
    return torch.uint16 if tokens < NEVER else torch.int32


def never(dtype: torch.dtype) -> int:
    """The value that means "not evicted" in a dtype: its largest."""
    return torch.iinfo(dtype).max


@dataclass(frozen=True)
class Trace:
    evicted_at: Tensor  # [L, H, T] uint16 (int32 for 65,535 tokens and more), on the CPU
    routes: Tensor | None = None  # [T, M, k] uint8 (uint16 for more than 256 experts); M layers have experts
    slots: SlotFormat | None = None  # how keys and values were stored; None: in the model's dtype
    ties: Tensor | None = None  # [N, 4] in the dtype of `evicted_at`: how slots of 8 bits rounded ties, if noted

    @classmethod
    def dense(cls, layers: int, heads: int, tokens: int) -> Trace:
        """The trace of a rollout in which nothing was evicted."""
        dtype = trace_dtype(tokens)
        return cls(torch.full((layers, heads, tokens), never(dtype), dtype=dtype))

    @property
    def num_tokens(self) -> int:
        return self.evicted_at.shape[-1]

    @property
    def nbytes(self) -> int:
        return self.evicted_at.nbytes + sum(tensor.nbytes for tensor in self._others.values())

    @property
    def _others(self) -> dict[str, Tensor]:
        """Routes and ties, if it has them."""
        return {name: found for name in _FORMS if (found := getattr(self, name)) is not None}

    def with_slots(self, slots: SlotFormat | None, ties: Tensor | None) -> Trace:
        """With the format of its slots, and their ties. [N, 4]"""
        return replace(self, slots=slots, ties=None if ties is None else ties.to(self.evicted_at.dtype))

    def visible(self, layer: int | None = None) -> Tensor:
        """What each query saw: bool [L, H, T queries, T tokens], or [H, T, T] for one layer."""
        evicted_at = self.evicted_at if layer is None else self.evicted_at[layer]
        return visible(evicted_at)

    def slots_in_use(self) -> Tensor:
        """The number of tokens that the last query sees, itself included. [L, H]"""
        return torch.from_numpy((self.evicted_at.numpy() >= self.num_tokens).sum(-1))

    def slice(self, start: int, stop: int) -> Trace:
        """The trace of only the tokens start .. stop - 1, counted from `start`; what stays beyond `stop`
        becomes NEVER.
        """
        if not 0 <= start <= stop <= self.num_tokens:
            raise SparseRLError(f"cannot slice tokens {start}..{stop} out of a trace of {self.num_tokens} tokens.")
        part = self.evicted_at[..., start:stop].to(torch.int64)
        dtype = trace_dtype(stop - start)
        evicted_at = torch.where(part >= stop, never(dtype), (part - start).clamp(min=0)).to(dtype)
        routes, ties = None if self.routes is None else self.routes[start:stop], self.ties
        if ties is not None:
            ties = ties.to(torch.int64)
            ties = ties[(ties[:, 0] >= start) & (ties[:, 0] < stop)] - torch.tensor([start, 0, 0, 0])
            ties = ties.to(dtype)
        return Trace(evicted_at, routes, self.slots, ties)

    def save(self, path: str | os.PathLike) -> None:
        """Write it, atomically: the file is whole or absent."""
        replace_file(Path(path), self.to_bytes())

    def to_bytes(self) -> bytes:
        """The content of a file, in the smaller of the two forms."""
        about, others = {"crc32": str(_crc(self.evicted_at))}, {}
        for name, found in self._others.items():
            about |= {name: _FORMS[name], f"{name}_crc32": str(_crc(found))}
            others[name] = found.contiguous()
        if self.slots is not None:
            about["slots"] = json.dumps([self.slots.kind, list(self.slots.kept)])
        plain = {"evicted_at": self.evicted_at.contiguous()}
        forms = [save(plain | others, metadata={"format": _PLAIN, **about})]
        if (events := _events(self.evicted_at)) is not None:
            forms.append(save(events | others, metadata={"format": _EVENTS, **about}))
        return in_order(min(forms, key=len))

    @classmethod
    def load(cls, path: str | os.PathLike) -> Trace:
        """Read a file that `save` wrote; any other content is refused."""
        if not Path(path).is_file():
            raise SparseRLError(f"there is no trace file {path}; put it back beside its trajectories.")
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                form = about.get("format")
                tensors = {name: file.get_tensor(name) for name in _TENSORS.get(form or "", ())}
                others = {name: file.get_tensor(name) for name in _FORMS if about.get(name) == _FORMS[name]}
        except (SafetensorError, OSError) as error:
            raise SparseRLError(f"{path} is not a trace file or is damaged ({error}); write it again.") from error
        if not tensors:
            raise SparseRLError(
                f"{path} is a safetensors file but not a trace (its format is {form!r}); write it with Trace.save."
            )
        for name, known in _FORMS.items():
            if about.get(name, known) != known:
                raise SparseRLError(
                    f"{path} holds {name} in the form {about[name]!r}, which this version does not know; use a newer "
                    "version."
                )
        wrong, evicted_at = _wrong_in(tensors | others), None
        if wrong is None:
            evicted_at = tensors["evicted_at"] if form == _PLAIN else _from_events(**tensors)
            wrong = _impossible_in(evicted_at)
            if "crc32" in about and about["crc32"] != str(_crc(evicted_at)):  # files of older versions have no checksum
                wrong = "its checksum differs: it is damaged"
            for name, found in others.items():
                if name == "routes" and len(found) != evicted_at.shape[-1]:
                    wrong = f"it has routes of {len(found)} tokens, but {evicted_at.shape[-1]} tokens"
                elif about.get(f"{name}_crc32") != str(_crc(found)):
                    wrong = f"the checksum of its {name} differs: it is damaged"
                elif name == "ties":
                    wrong = wrong or _wrong_ties(found, evicted_at)
        if wrong is not None or evicted_at is None:
            raise SparseRLError(f"{path} is not a trace ({wrong}); write it again.")
        return cls(evicted_at, **others, slots=_slots_in(about.get("slots"), len(evicted_at), path))

    @classmethod
    def from_bytes(cls, content: bytes) -> Trace:
        """Read what `to_bytes` returned, through a file, because safetensors reads metadata only from files."""
        with tempfile.NamedTemporaryFile(suffix=".safetensors") as file:
            file.write(content)
            file.flush()
            return cls.load(file.name)


def _slots_in(written: str | None, layers: int, path: str | os.PathLike) -> SlotFormat | None:
    if written is None:
        return None
    try:
        kind, kept = json.loads(written)
        return SlotFormat(str(kind), tuple(kept)).for_layers(layers)
    except (ValueError, TypeError, SparseRLError) as error:
        raise SparseRLError(
            f"{path} is not a trace (its slots are {written!r:.80}: {error}); write it again."
        ) from error


def _crc(tensor: Tensor) -> int:
    return zlib.crc32(tensor.contiguous().numpy().tobytes())


def _events(evicted_at: Tensor) -> dict[str, Tensor] | None:
    """The moments of eviction, and for each token a byte that points to its moment; None if there are too many moments.

    The layers and heads of a row evict together, once in `interval` tokens, so a byte is enough for most traces.
    evicted_at [L, H, T]
    """
    gone = evicted_at.numpy()
    if gone.dtype == np.uint16:
        moments = np.bincount(gone.ravel(), minlength=NEVER + 1).nonzero()[0].astype(np.uint16)
    else:
        moments = np.unique(gone)
    if len(moments) > 256:
        return None
    which = np.searchsorted(moments, gone).astype(np.uint8)
    return {"moments": torch.from_numpy(moments), "which": torch.from_numpy(which)}


def _from_events(moments: Tensor, which: Tensor) -> Tensor:
    return torch.from_numpy(moments.numpy()[which.numpy()])


def _wrong_in(tensors: dict[str, Tensor]) -> str | None:
    """Why a file's tensors are not those of a trace, or None."""
    for name, tensor in tensors.items():
        rank, dtypes = _KINDS[name]
        if tensor.dim() != rank or tensor.dtype not in dtypes:
            expected = f"{rank} of {' or '.join(map(str, dtypes))}"
            return f"its {name} has {tensor.dim()} dimensions of {tensor.dtype}, not {expected}"
    which = tensors.get("which")
    if which is not None and which.numel() and int(which.max()) >= len(tensors["moments"]):
        return f"it names moment {int(which.max())}, but has {len(tensors['moments'])}"
    return None


def _impossible_in(evicted_at: Tensor) -> str | None:
    """Why no rollout can have produced this trace, or None. [L, H, T]"""
    tokens = evicted_at.shape[-1]
    if evicted_at.dtype == torch.uint16 and trace_dtype(tokens) != torch.uint16:
        return f"{tokens} tokens do not fit in uint16"
    if (evicted_at.numpy() <= np.arange(tokens)).any():
        return "a token is gone before it has been fed"
    return None


def _wrong_ties(ties: Tensor, evicted_at: Tensor) -> str | None:
    """Why these are not ties of the trace, or None. ties [N, 4]; evicted_at [L, H, T]"""
    if ties.shape[1] != COLUMNS:
        return f"its ties have {ties.shape[1]} numbers each, not {COLUMNS}"
    if ties.dtype != evicted_at.dtype:
        return f"its ties are {ties.dtype}, but its moments are {evicted_at.dtype}"
    if not len(ties):
        return None
    if (least := int(ties.to(torch.int64).min())) < 0:
        return f"its ties have the number {least}"
    layers, heads, tokens = evicted_at.shape
    highest = ties.to(torch.int64)[:, :3].amax(0).tolist()
    for name, high, count in zip(("token", "layer", "KV head"), highest, (tokens, layers, heads), strict=True):
        if high >= count:
            return f"its ties name {name} {high}, but it has {count}"
    return None


def visible(evicted_at: Tensor) -> Tensor:
    """The mask `visible` of the module docstring. [..., T] -> bool [..., T queries, T tokens]"""
    index = torch.arange(evicted_at.shape[-1], device=evicted_at.device, dtype=torch.int32)
    causal = index[None, :] <= index[:, None]
    return causal & (index[:, None] < evicted_at.to(torch.int32)[..., None, :])


def in_order(content: bytes) -> bytes:
    """A safetensors file with its header in alphabetical order. safetensors shuffles metadata, but equal traces must
    make equal files.
    """
    size = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    assert len(header) <= size
    return content[:8] + header.ljust(size) + content[8 + size :]
