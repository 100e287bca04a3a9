"""Long curves as few points: the mean of each bin, and its extremes. A bin without a number is a gap.

N points of a curve, B bins. A curve that is short enough stays as it is.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .curves import Curve

MOST = 500  # points of a curve
FEWEST = 10
ALL = 250_000  # points of all curves of a page, about 8 MB: with many runs, bins get coarser
DIGITS = 6
_cache: WeakKeyDictionary[Curve, dict[tuple[int, bool], dict]] = WeakKeyDictionary()  # a live page asks repeatedly


def points_for(curves: int) -> int:
    """How many points each curve gets if a page shows this many curves."""
    return max(FEWEST, min(MOST, ALL // max(curves, 1)))


def binned(curve: Curve, most: int = MOST, regular: bool = True) -> dict[str, Any]:
    """A curve as the page has it. `regular`: a missing step is a gap; False for evaluations, which are rare anyway."""
    known = _cache.setdefault(curve, {})
    if (most, regular) not in known:
        known[most, regular] = _binned(curve, most, regular)
    return known[most, regular]


def _binned(curve: Curve, most: int, regular: bool) -> dict[str, Any]:
    step, value = with_gaps(curve) if regular else (curve.step, curve.value)
    if len(step) <= most:
        return {"step": step.tolist(), "mean": rounded(value)}
    bin_of, ends = _bins(step, most, regular)  # [N]; [B]: the last step of each bin
    each = int(ends[0] - step[0] + 1) / usual(step) if regular else len(step) / most
    here, first = np.unique(bin_of, return_index=True)  # bins that hold a point
    finite = np.isfinite(value)
    count = np.add.reduceat(finite.astype(np.int64), first)
    size = np.repeat(np.maximum(count, 1), np.diff(np.append(first, len(step))))
    share = np.where(finite, value, 0.0) / size  # divided before it is summed, so that no sum overflows
    mean, low, high = np.full((3, len(ends)), np.nan)
    mean[here] = np.where(count > 0, np.add.reduceat(share, first), np.nan)
    low[here] = np.fmin.reduceat(value, first)  # NaN only where the bin has no number
    high[here] = np.fmax.reduceat(value, first)
    ends[here] = step[np.append(first[1:], len(step)) - 1]
    last = rounded(value[finite][-1:])  # the run's last value, which no mean shows
    return {
        "step": ends.tolist(),
        "mean": rounded(mean),
        "low": rounded(low),
        "high": rounded(high),
        "last": last[0] if last else None,
        "each": each,  # points in a bin
    }


def _bins(step: np.ndarray, most: int, regular: bool) -> tuple[np.ndarray, np.ndarray]:
    """The bin of every point, and the last step of every bin. Bins have equally many steps, or else points."""
    if not regular:
        bin_of = np.arange(len(step)) * most // len(step)
        return bin_of, np.zeros(most, dtype=np.int64)  # every bin has a point, and gets its step later
    width = -(-(int(step[-1]) - int(step[0]) + 1) // most)
    bin_of = (step - step[0]) // width
    return bin_of, step[0] + (np.arange(int(bin_of[-1]) + 1) + 1) * width - 1


def with_gaps(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values, with a NaN after every point that missing steps follow, so that no line is drawn across."""
    if len(curve.step) < 3:
        return curve.step, curve.value
    apart = usual(curve.step)
    holes = np.flatnonzero(np.diff(curve.step) > apart)
    step = np.insert(curve.step, holes + 1, curve.step[holes] + apart)
    return step, np.insert(curve.value, holes + 1, np.nan)


def usual(step: np.ndarray) -> int:
    """The median distance between a point and the next."""
    return int(np.median(np.diff(step)))


def rounded(values: np.ndarray, digits: int = DIGITS) -> list[float | None]:
    """Each value to this many significant digits; None for NaN. [N]"""
    finite = np.isfinite(values)
    size = np.abs(np.where(finite & (values != 0), values, 1.0))
    shift = digits - 1 - np.floor(np.log10(size)).astype(np.int64)
    exact = np.abs(shift) <= 22  # a double holds these powers of ten exactly, so dividing by one rounds correctly
    power = 10.0 ** np.where(exact, np.abs(shift), 0)
    whole = np.where(finite, values, 0.0)
    short = np.where(shift >= 0, np.round(whole * power) / power, np.round(whole / power) * power)
    result = short.tolist()
    for i in np.flatnonzero(~(finite & exact)):
        result[i] = float(f"{values[i]:.{digits}g}") if finite[i] else None
    return result


def significant(value: float, digits: int = DIGITS) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
