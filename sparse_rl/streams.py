"""Random numbers that belong to a sequence, not to the batch it happens to run in.

A stream is a 64-bit key; its n-th number is a hash of (key, n). Reading a number changes no state, so no number depends
on the order in which rows are served. The same few integer operations run on any device.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64
_MULTIPLIERS = (-4658895280553007687, -7723592293110705685)  # splitmix64's two odd constants as int64
_EVICTION = 0x5EED_0E51C7  # separates a sequence's eviction numbers from its sampling numbers
_CHOICE = 0x5EED_F01D  # and the numbers by which it chooses to fold


def stream_key(seed: int, prompt: Sequence[int], *which: int) -> int:
    """A signed 64-bit key from (seed, prompt token ids, further integers such as occurrence and sample number)."""
    text = f"{seed}|{','.join(map(str, prompt))}|{','.join(map(str, which))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser: a bijection of int64 in which every input bit reaches every output bit."""
    x = (x ^ _shift(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ _shift(x, 27)) * _MULTIPLIERS[1]
    return x ^ _shift(x, 31)


def uniform(stream: Tensor, counter: Tensor) -> Tensor:
    """The `counter`-th number of each stream, float64 strictly inside (0, 1). Shapes broadcast."""
    bits = _shift(mix(stream + (counter + 1) * _GOLDEN), 12)  # 52 bits
    return (bits.double() + 0.5) / 2.0**52


def eviction_streams(stream: Tensor, layers: int, heads: int) -> Tensor:
    """One stream per (layer, row, KV head) for compressors that draw random numbers. [R] -> [L, R, H]."""
    place = torch.arange(layers * heads, device=stream.device).view(layers, 1, heads)
    return mix((stream ^ _EVICTION)[None, :, None] + (place + 1) * _GOLDEN)


def choice_numbers(stream: Tensor, counter: Tensor) -> Tensor:
    """By which sequences choose to fold before their `counter`-th token: like `uniform`, and apart from its numbers."""
    return uniform(mix(stream ^ _CHOICE), counter)
