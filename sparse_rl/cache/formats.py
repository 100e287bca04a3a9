"""Formats in which slots store keys and values: the model's dtype, or 8 bits with a scale per slot and KV head.

A vector x [D] of a key (after RoPE) or a value is stored as codes [D] and one exponent e:

    e    = the least whole number with max |x| <= 448 * 2^e    (int8: 127 * 2^e)
    code = x / 2^e, rounded to e4m3 (int8: to a whole number), ties to even

and read as code * 2^e. With a scale that is a power of two e4m3 loses nothing, an exponent fits in a byte, and the
result is exact in every dtype that a model has, so a kernel may scale keys or logits alike. So the learner can replay
the rounding (`as_stored`, with the gradient passed straight through).

The exponent is read from the bits of fp32, so every device finds the same. A vector that is not finite is read as NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import SparseRLError, nearest

PLAIN = "model"  # slots in the model's own dtype
_LEAST = -100  # exponent of vectors that are (nearly) zero
_NOT_FINITE = -128  # in place of an exponent


@dataclass(frozen=True)
class Codes:
    """An 8-bit number format."""

    dtype: torch.dtype  # in which codes are stored; e4m3 as bytes, because torch can hardly index it
    exponent: int  # the largest number is (1 + mantissa / 2^23) * 2^exponent
    mantissa: int


CODES = {
    "fp8": Codes(torch.uint8, exponent=8, mantissa=0x600000),  # 448, in e4m3
    "int8": Codes(torch.int8, exponent=6, mantissa=0x7E0000),  # 127
}
KINDS = {codes.dtype: kind for kind, codes in CODES.items()}


@dataclass(frozen=True)
class SlotFormat:
    """The format of slots of 8 bits."""

    kind: str  # of CODES
    # layers that store the model's dtype, numbered as in traces; negative ones count from the end
    kept: tuple[int, ...] = ()

    def __post_init__(self):
        if self.kind not in CODES:
            raise SparseRLError(f"there is no slot format {self.kind!r}; {nearest(self.kind, [PLAIN, *CODES])}")
        if not all(type(layer) is int for layer in self.kept):
            raise SparseRLError(f"slots_kept is {list(self.kept)!r:.80}; it must be a list of layer numbers.")

    def of_layer(self, layer: int) -> str | None:
        """The kind of codes in which a layer stores; None: the model's dtype."""
        return None if layer in self.kept else self.kind

    def for_layers(self, layers: int) -> SlotFormat:
        """The same format with layer numbers from 0 on, ascending; refuses numbers that a model of `layers` layers
        lacks.
        """
        wrong = [layer for layer in self.kept if not -layers <= layer < layers]
        if wrong:
            raise SparseRLError(
                f"slots_kept names layer {wrong[0]}, but {layers} layers have slots: numbers go from {-layers} to "
                f"{layers - 1}."
            )
        return SlotFormat(self.kind, tuple(sorted({layer % layers for layer in self.kept})))

    def __str__(self) -> str:
        return self.kind + (f", layers {', '.join(map(str, self.kept))} as the model" if self.kept else "")


def slot_format(slots: Any = PLAIN, kept: Any = ()) -> SlotFormat | None:
    """A format from its name and the layers that are kept in the model's dtype; None: all layers are."""
    if slots in (None, PLAIN):
        if kept:
            raise SparseRLError(
                f"slots_kept is {kept}, but all layers store the model's dtype anyway; set slots to fp8 or int8."
            )
        return None
    if isinstance(kept, str) or not isinstance(kept, Sequence):
        raise SparseRLError(f"slots_kept is {kept!r:.80}; it must be a list of layer numbers, such as [0, -1].")
    return SlotFormat(str(slots), tuple(kept))


def common_format(formats: Iterable[SlotFormat | None]) -> SlotFormat | None:
    """The format in which all of these trajectories stored slots; refuses trajectories that differ."""
    found = set(formats)
    if len(found) > 1:
        names = sorted("the model's dtype" if slots is None else str(slots) for slots in found)
        raise SparseRLError(
            f"trajectories whose slots were stored in different formats ({'; '.join(names)}) cannot be scored "
            "together; score each format in a separate call."
        )
    return next(iter(found), None)


def quantize(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Codes [..., D] and exponents int8 [...] of vectors x [..., D]."""
    codes, wide = CODES[kind], x.float()
    largest = (wide.view(torch.int32) & 0x7FFFFFFF).amax(-1)  # the bits of max |x|, which are ordered like numbers
    exponent = (largest >> 23) - 127 - codes.exponent + ((largest & 0x7FFFFF) > codes.mantissa).int()
    exponent = exponent.clamp(min=_LEAST)
    finite = largest < 0x7F800000
    scaled = wide * _power(-exponent)[..., None]
    if kind == "fp8":
        numbers = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        numbers = scaled.round().nan_to_num(0.0).clamp(-127, 127).to(torch.int8)
    return numbers, torch.where(finite, exponent, _NOT_FINITE).to(torch.int8)


def dequantize(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """The vectors that slots with these codes [..., D] and exponents [...] stand for."""
    scale = torch.where(exponents == _NOT_FINITE, torch.nan, _power(exponents.int()))[..., None]
    numbers = codes.view(torch.float8_e4m3fn) if codes.dtype == torch.uint8 else codes
    if dtype == torch.float16:  # float16 does not hold every power
        return (numbers.float() * scale).to(dtype)
    return numbers.to(dtype).mul_(scale.to(dtype))


def _power(exponent: Tensor) -> Tensor:
    """2^exponent in fp32, for int32 above -127."""
    return ((exponent + 127) << 23).view(torch.float32)


def as_stored(x: Tensor, kind: str) -> Tensor:
    """Keys or values [..., D] as they are read from slots; the gradient passes as if nothing were rounded."""
    return _AsStored.apply(x, kind)  # pyright: ignore[reportReturnType]


class _AsStored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kind):
        return dequantize(*quantize(x, kind), x.dtype)

    @staticmethod
    def backward(ctx, upstream):  # pyright: ignore[reportIncompatibleMethodOverride]
        return upstream, None
