"""The trace: one integer per (layer, KV head, token) that records a whole rollout's evictions.

Eviction is monotone (a slot that is gone never returns), so `evicted_at`, the first query that no longer sees a token,
is a complete record of what the sampler could see:

    visible(l, h, q, k) = (k <= q) and (q < evicted_at[l, h, k])

Queries and tokens are counted by feed index, the order in which tokens entered the cache.
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

NEVER = 65535  # `evicted_at` of a token that stayed, in uint16
_FORMAT = "sparse_rl.trace.1"


def trace_dtype(tokens: int) -> torch.dtype:
    """uint16 while every feed index fits below NEVER, else int32."""
    return torch.uint16 if tokens < NEVER else torch.int32


def never(dtype: torch.dtype) -> int:
    """The value that means "not evicted" in a dtype: its largest."""
    return torch.iinfo(dtype).max


@dataclass(frozen=True)
class Trace:
    evicted_at: Tensor  # [L, H, T] uint16 (int32 for 65,535 tokens and more), on the CPU

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
        return self.evicted_at.nbytes

    def visible(self, layer: int | None = None) -> Tensor:
        """What each query saw: bool [L, H, T queries, T tokens], or [H, T, T] for one layer."""
        evicted_at = self.evicted_at if layer is None else self.evicted_at[layer]
        return visible(evicted_at)

    def slots_in_use(self) -> Tensor:
        """Tokens the last query can see, itself included. [L, H]"""
        return torch.from_numpy((self.evicted_at.numpy() >= self.num_tokens).sum(-1))

    def slice(self, start: int, stop: int) -> Trace:
        """The trace of tokens start .. stop - 1 alone, counted from `start`; what stays beyond `stop` is NEVER."""
        if not 0 <= start <= stop <= self.num_tokens:
            raise SparseRLError(f"cannot slice tokens {start}..{stop} out of a trace of {self.num_tokens} tokens.")
        part = self.evicted_at[..., start:stop].to(torch.int64)
        dtype = trace_dtype(stop - start)
        return Trace(torch.where(part >= stop, never(dtype), (part - start).clamp(min=0)).to(dtype))

    def save(self, path: str | os.PathLike) -> None:
        """Write atomically: the file is whole or absent."""
        path = Path(path)
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        partial.write_bytes(save({"evicted_at": self.evicted_at.contiguous()}, metadata={"format": _FORMAT}))
        os.replace(partial, path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Trace:
        try:
            with safe_open(path, framework="pt") as file:
                known = (file.metadata() or {}).get("format") == _FORMAT
                evicted_at = file.get_tensor("evicted_at") if known else None
        except SafetensorError as error:
            raise SparseRLError(f"{path} is not a trace file or is damaged ({error}); write it again.") from error
        if evicted_at is None or evicted_at.dim() != 3:
            raise SparseRLError(f"{path} is a safetensors file but not a trace; write it with Trace.save.")
        return cls(evicted_at)


def visible(evicted_at: Tensor) -> Tensor:
    """The mask of the module docstring. [..., T] -> bool [..., T queries, T tokens]"""
    index = torch.arange(evicted_at.shape[-1], device=evicted_at.device, dtype=torch.int32)
    causal = index[None, :] <= index[:, None]
    return causal & (index[:, None] < evicted_at.to(torch.int32)[..., None, :])
