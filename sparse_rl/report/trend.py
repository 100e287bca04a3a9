"""Where a curve started and where it is now: the means of its first and of its last fifth."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .curves import Curve

Curves = Mapping[str, Curve]
MIN_POINTS = 5  # with fewer, start and now cannot be told apart


def now(curves: Curves, name: str) -> float | None:
    """The mean of the last fifth; None without a number."""
    part = last_fifth(curves, name)
    return float(part.mean()) if len(part) else None


def start_and_now(curves: Curves, name: str) -> tuple[float, float] | None:
    """None if there are too few points, or if the start is 0, so that nothing can be compared with it."""
    first, last = first_fifth(curves, name), last_fifth(curves, name)
    if len(numbers(curves, name)) < MIN_POINTS or not first.mean():
        return None
    return float(first.mean()), float(last.mean())


def first_fifth(curves: Curves, name: str) -> np.ndarray:
    values = numbers(curves, name)
    return values[: max(1, len(values) // 5)]


def last_fifth(curves: Curves, name: str) -> np.ndarray:
    values = numbers(curves, name)
    return values[-max(1, len(values) // 5) :]


def numbers(curves: Curves, name: str) -> np.ndarray:
    """The finite values of a curve; none if there is no such curve."""
    return curves[name].finite if name in curves else np.zeros(0)


def total(curves: Curves, name: str) -> float:
    return float(numbers(curves, name).sum())


def thirds(values: np.ndarray) -> tuple[float, float]:
    """The means of the first and of the last third: for evaluations, which are few."""
    count = max(1, len(values) // 3)
    return float(values[:count].mean()), float(values[-count:].mean())


def differ(curves: Curves, one: str, other: str) -> bool:
    """Whether two curves differ where both have a number."""
    if one not in curves or other not in curves:
        return False
    _, a, b = np.intersect1d(curves[one].step, curves[other].step, return_indices=True)
    return bool((np.abs(curves[one].value[a] - curves[other].value[b]) > 1e-9).any())  # gaps compare as False


def rewards_say_more(curves: Curves) -> bool:
    """Whether held-out rewards are not just 1 for what is right and 0 for the rest, which accuracy says already."""
    return any(differ(curves, f"eval/{cache}/reward", f"eval/{cache}/accuracy") for cache in ("dense", "sparse"))
