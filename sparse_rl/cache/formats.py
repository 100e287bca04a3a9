"""Formats in which slots store keys and values: the model's dtype, or 8 bits with a scale per slot and KV head.

A vector x [D] of a key (after RoPE) or a value is stored as codes [D] and one exponent e:

    e    = the least whole number with max |x| <= 448 * 2^e    (int8: 127 * 2^e)
    code = x / 2^e, rounded to e4m3 (int8: to a whole number), ties to even

and read as code * 2^e. With a scale that is a power of two e4m3 loses nothing, an exponent fits in a byte, and the
result is exact in every dtype that a model has, so a kernel may scale keys or logits alike. So the learner can replay
the rounding (`as_stored`, with the gradient passed straight through).

Rounding is not continuous. A number near the middle of two codes may get one code from the sampler and the other from
the learner, whose numbers differ by the last bits of fp32. `ties_of` finds these numbers, and the vectors whose maximum
is near the border of two exponents. Told them, `quantize` and `as_stored` go the same way (ties.py).

The exponent is read from the bits of fp32, so every device finds the same. A vector that is not finite is read as NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import SparseRLError, nearest

PLAIN = "model"  # slots in the model's own dtype
_LEAST = -100  # exponent of vectors that are (nearly) zero
_NOT_FINITE = -128  # in place of an exponent
# Numbers this close to the middle of two codes are ties, as a share of the largest number of the format. The sampler's
# and the learner's fp32 differ by 4e-6 of a vector's maximum at most in our tests.
MARGIN = 2.0**-16
_FINE = 0.125  # smaller numbers than this have steps below the margin, so either code will do


@dataclass(frozen=True)
class Codes:
    """An 8-bit number format."""

    dtype: torch.dtype  # in which codes are stored; e4m3 as bytes, because torch can hardly index it
    exponent: int  # the largest number is (1 + mantissa / 2^23) * 2^exponent
    mantissa: int

    @property
    def largest(self) -> float:
        return (1 + self.mantissa / 2**23) * 2**self.exponent


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


class Ties(NamedTuple):
    """Numbers and vectors of x [..., D] that rounding alone decides, and what it decided. Indices are int64 tensors,
    one for each dimension.
    """

    numbers: tuple[Tensor, ...]  # indices [n] of numbers near the middle of two codes
    away: Tensor  # bool [n]: got the code further away from zero
    vectors: tuple[Tensor, ...]  # indices [m] of vectors near the border of two exponents
    larger: Tensor  # bool [m]: got the larger exponent


def quantize(x: Tensor, kind: str, ties: Ties | None = None) -> tuple[Tensor, Tensor]:
    """Codes [..., D] and exponents int8 [...] of vectors x [..., D]. ties: what these are to become"""
    codes, largest = CODES[kind], _largest(x)
    finite = largest < 0x7F800000
    if ties is not None:
        largest[ties.vectors] += torch.where(ties.larger, 2048, -2048).int()  # 2^-12 of it
    exponent = _exponent(largest, codes)
    scaled = x.float() * _power(-exponent)[..., None]
    if ties is not None:
        near, way = scaled[ties.numbers], torch.where(ties.away, 1.0, -1.0)
        # a sixteenth to an eighth of the distance between two codes
        scaled[ties.numbers] = near + way * (near / 128 if kind == "fp8" else near.sign() / 16)
    if kind == "fp8":
        numbers = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        numbers = scaled.round().nan_to_num(0.0).clamp(-127, 127).to(torch.int8)
    return numbers, torch.where(finite, exponent, _NOT_FINITE).to(torch.int8)


def ties_of(x: Tensor, kind: str) -> Ties:
    """The ties of vectors x [..., D] and what `quantize` makes of them."""
    codes, largest = CODES[kind], _largest(x)
    beyond = (largest & 0x7FFFFF) - codes.mantissa  # above 0 the exponent is the larger one
    vectors = (beyond.abs() <= MARGIN * 2**23).nonzero(as_tuple=True)
    scaled, margin = x.float().abs() * _power(-_exponent(largest, codes))[..., None], MARGIN * codes.largest
    near = _rounded(scaled - margin, kind) != _rounded(scaled + margin, kind)
    numbers = (near & (scaled > _FINE) & (scaled <= codes.largest)).nonzero(as_tuple=True)
    found = scaled[numbers]
    return Ties(numbers, _rounded(found, kind) > found, vectors, beyond[vectors] > 0)


def _largest(x: Tensor) -> Tensor:
    """The bits of max |x| in fp32, which are ordered like numbers. int32 [...]"""
    return (x.float().view(torch.int32) & 0x7FFFFFFF).amax(-1)


def _exponent(largest: Tensor, codes: Codes) -> Tensor:
    """e of vectors whose maximum has these bits. int32"""
    exponent = (largest >> 23) - 127 - codes.exponent + ((largest & 0x7FFFFF) > codes.mantissa).int()
    return exponent.clamp(min=_LEAST)


def _rounded(scaled: Tensor, kind: str) -> Tensor:
    """The nearest number that has a code."""
    return scaled.to(torch.float8_e4m3fn).float() if kind == "fp8" else scaled.round()


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


def as_stored(x: Tensor, kind: str, ties: Ties | None = None) -> Tensor:
    """Keys or values [..., D] as they are read from slots; the gradient passes as if nothing were rounded."""
    return _AsStored.apply(x, kind, ties)  # pyright: ignore[reportReturnType]


class _AsStored(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kind, ties):
        return dequantize(*quantize(x, kind, ties), x.dtype)

    @staticmethod
    def backward(ctx, upstream):  # pyright: ignore[reportIncompatibleMethodOverride]
        return upstream, None, None
