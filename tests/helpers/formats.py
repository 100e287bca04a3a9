"""Slots of 8 bits, written out slowly: an independent reference of sparse_rl/cache/formats.py."""

import math

import torch


def e4m3() -> list[float]:
    """The numbers that are not negative, by their code."""
    numbers = []
    for code in range(127):  # 127 is NaN
        exponent, mantissa = code >> 3, code & 7
        numbers.append(mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return numbers


NUMBERS = {"fp8": torch.tensor(e4m3(), dtype=torch.float64), "int8": torch.arange(128, dtype=torch.float64)}


def nearest(x: torch.Tensor, kind: str) -> torch.Tensor:
    """The nearest number of a kind, the one with the even code of two; x fp64 [...], not negative"""
    numbers = NUMBERS[kind]
    above = torch.searchsorted(numbers, x).clamp(max=len(numbers) - 1)
    below = (above - 1).clamp(min=0)
    up, down = numbers[above] - x, x - numbers[below]
    return torch.where((up < down) | ((up == down) & (above % 2 == 0)), numbers[above], numbers[below])


def stored(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Vectors [..., D] as they are read from slots, fp64."""
    wide = x.float().double().contiguous()
    result = torch.empty_like(wide)
    for own, into in zip(wide.flatten(0, -2), result.view(-1, x.shape[-1]), strict=True):
        largest, top = own.abs().max().item(), NUMBERS[kind][-1].item()
        exponent = -100
        if largest > 0:
            exponent = max(exponent, math.floor(math.log2(largest / top)) - 1)
        while largest > top * 2.0**exponent:
            exponent += 1
        into.copy_(own.sign() * nearest(own.abs() / 2.0**exponent, kind) * 2.0**exponent)
    return result
