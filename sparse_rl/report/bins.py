"""Curves of any length as few points, honestly: the mean of what lies in a bin, and its extremes. A bin without a number is a gap.

N points of a curve, B bins. A curve that is short enough stays as it is.
"""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import numpy as np

from .curves import Curve

MOST = 500  # points of a curve
FEWEST = 10
ALL = 250_000  # points of all curves of a page, about 8 MB: many runs get coarser bins
DIGITS = 6
_made: WeakKeyDictionary[Curve, dict[tuple[int, bool], dict]] = (
    WeakKeyDictionary()
)  # a page that is watched asks again and again


def points_for(curves: int) -> int:
    """How many points each of so many curves gets."""
    return max(FEWEST, min(MOST, ALL // max(curves, 1)))


def binned(curve: Curve, most: int = MOST, regular: bool = True) -> dict[str, list]:
    """A curve as the page has it. `regular`: a step that is missing is a gap; evaluations are rare by nature."""
    made = _made.setdefault(curve, {})
    if (most, regular) not in made:
        made[most, regular] = _binned(curve, most, regular)
    return made[most, regular]


def _binned(curve: Curve, most: int, regular: bool) -> dict[str, list]:
    step, value = with_gaps(curve) if regular else (curve.step, curve.value)
    if len(step) <= most:
        return {"step": step.tolist(), "mean": rounded(value)}
    place, ends = _places(step, most, regular)  # [N]; [B]: the last step of each bin
    each = int(ends[0] - step[0] + 1) / usual(step) if regular else len(step) / most
    here, first = np.unique(place, return_index=True)  # bins in which some point lies
    finite = np.isfinite(value)
    count = np.add.reduceat(finite.astype(np.int64), first)
    share = np.where(finite, value, 0.0) / np.repeat(
        np.maximum(count, 1), np.diff(np.append(first, len(step)))
    )  # so that no sum overflows
    mean, low, high = np.full((3, len(ends)), np.nan)
    mean[here] = np.where(count > 0, np.add.reduceat(share, first), np.nan)
    low[here], high[here] = (
        np.fmin.reduceat(value, first),
        np.fmax.reduceat(value, first),
    )  # NaN only where nothing else is
    ends[here] = step[np.append(first[1:], len(step)) - 1]
    last = rounded(value[finite][-1:])  # what the run ended with, which no mean says
    return {
        "step": ends.tolist(),
        "mean": rounded(mean),
        "low": rounded(low),
        "high": rounded(high),
        "last": last[0] if last else None,
        "each": each,  # points in a bin
    }


def _places(step: np.ndarray, most: int, regular: bool) -> tuple[np.ndarray, np.ndarray]:
    """The bin of every point, and the last step of every bin: as many steps in each, or as many points."""
    if not regular:
        place = np.arange(len(step)) * most // len(step)
        return place, np.zeros(most, dtype=np.int64)  # every bin has a point, and its step
    width = -(-(int(step[-1]) - int(step[0]) + 1) // most)
    place = (step - step[0]) // width
    return place, step[0] + (np.arange(int(place[-1]) + 1) + 1) * width - 1


def with_gaps(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values, with a NaN behind every point after which steps are missing, so that no line is drawn across."""
    if len(curve.step) < 3:
        return curve.step, curve.value
    holes = np.flatnonzero(np.diff(curve.step) > usual(curve.step))
    return np.insert(curve.step, holes + 1, curve.step[holes] + usual(curve.step)), np.insert(
        curve.value, holes + 1, np.nan
    )


def usual(step: np.ndarray) -> int:
    """How far one point is from the next, as a rule."""
    return int(np.median(np.diff(step)))


def rounded(values: np.ndarray, digits: int = DIGITS) -> list[float | None]:
    """Significant digits of each; None for NaN. [N]"""
    finite = np.isfinite(values)
    size = np.abs(np.where(finite & (values != 0), values, 1.0))
    shift = digits - 1 - np.floor(np.log10(size)).astype(np.int64)
    exact = np.abs(shift) <= 22  # powers of ten that a double holds exactly: dividing by one gives the nearest double
    power = 10.0 ** np.where(exact, np.abs(shift), 0)
    whole = np.where(finite, values, 0.0)
    short = np.where(shift >= 0, np.round(whole * power) / power, np.round(whole / power) * power)
    result = short.tolist()
    for i in np.flatnonzero(~(finite & exact)):
        result[i] = float(f"{values[i]:.{digits}g}") if finite[i] else None
    return result


def significant(value: float, digits: int = DIGITS) -> float | None:
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
