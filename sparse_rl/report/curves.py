"""Curves from files of metrics, and notes on what is odd about the files. A curve has N points; NaN marks a gap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .lines import Reading, Table, read_on

EXPECTED = {  # what every step of a run writes
    "metrics.jsonl": (
        "reward/mean",
        "rollout/length/mean",
        "old/entropy/mean",
        "gap/xi/p05",
        "reject/trajectories/frac",
    ),
    "timing.jsonl": ("time/step", "rollout/tokens_per_s", "cache/bytes/allocated"),
}
MAX_NAMES = 1000  # metrics of one file that are shown
MAX_NAME = 200  # characters of a metric's name
NOT_FINITE, NOT_A_NUMBER, MISSING = "null, not finite or beyond 1e100", "not a number", "missing"  # reasons for a gap


@dataclass(frozen=True, eq=False)
class Curve:
    step: np.ndarray  # int64 [N], ascending
    value: np.ndarray  # fp64 [N]; NaN: a gap

    @property
    def finite(self) -> np.ndarray:
        return self.value[np.isfinite(self.value)]


Curves = dict[str, Curve]  # name -> curve


def is_evaluation(name: str) -> bool:
    """Whether a metric belongs to held-out evaluations, which write lines of their own."""
    return name.startswith("eval/") or name == "time/eval"


@dataclass(frozen=True)
class _Cached:
    """A file when it was last read."""

    status: tuple[int, ...]
    reading: Reading
    curves: Curves
    notes: list[str]


_cache: dict[Path, _Cached] = {}


def read_curves(path: Path, expected: Sequence[str]) -> tuple[Curves, list[str]]:
    """The curves of a file, and notes. An unchanged file is not read; of one that grew, only the rest is parsed."""
    try:
        status, known = _status(path), _cache.get(path)
        if known is None or known.status != status:
            reading = read_on(path, Reading() if known is None else known.reading)
            known = _cache[path] = _Cached(status, reading, *curves_of(reading, path.name, expected))
        return known.curves, known.notes
    except FileNotFoundError:
        _cache.pop(path, None)
        return {}, [f"there is no {path.name}"]
    except OSError as error:
        _cache.pop(path, None)
        return {}, [f"{path.name} cannot be read ({error.strerror})"]


def _status(path: Path) -> tuple[int, ...]:
    """A tuple that changes when the file does."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def curves_of(reading: Reading, title: str, expected: Sequence[str]) -> tuple[Curves, list[str]]:
    """The curves of what was read of a file, and notes."""
    notes = damage(title, reading.lines, reading.torn, reading.wrong)
    tables = list(reading.tables.values())
    line, step = _lines_and_steps(tables)
    order = np.argsort(line)
    line, step = line[order], step[order]
    if stepless := line[step < 0].tolist():
        verb = "has no whole step and is" if len(stepless) == 1 else "have no whole step and are"
        notes.append(f"{_lines(stepless)} of {title} {verb} omitted")
    line, step = line[step >= 0], step[step >= 0]
    known = dict.fromkeys(name for table in tables for name in table.names)
    short = [name for name in dict.fromkeys([*expected, *known]) if name in known and len(name) <= MAX_NAME]
    shown = set(short[:MAX_NAMES])
    if many := len(known) - len(shown):
        limits = f"beyond {MAX_NAMES:,}, or with names of more than {MAX_NAME} characters"
        notes.append(f"{_count(many, 'metric')} of {title} {_is(many)} omitted: {limits}")
    gaps: dict[str, Counter[str]] = {NOT_FINITE: Counter(), NOT_A_NUMBER: Counter(), MISSING: Counter()}
    steps, curves, repeated = _columns(tables, {name for name in shown if not is_evaluation(name)}, gaps)
    _, held_out, repeated_too = _columns(tables, set(filter(is_evaluation, shown)), gaps)
    curves |= held_out
    if twice := np.union1d(repeated, repeated_too).tolist():
        notes.append(f"{title} has {_count(len(twice), 'step')} more than once ({_some(twice)}): the later line counts")
    if late := line[1:][np.diff(step) < 0].tolist():
        verb = "goes" if len(late) == 1 else "go"
        notes.append(f"{_lines(late)} of {title} {verb} back to an earlier step: shown in order of steps")
    if len(steps) and (absent := [name for name in expected if name not in curves]):
        notes.append(f"{title} has no {', '.join(absent)}: an older version may have written it")
    if len(steps) and (holes := int(steps[-1] - steps[0]) + 1 - len(steps)):
        between = f"between {steps[0]} and {steps[-1]}"
        notes.append(f"{_count(holes, 'step')} {between} {_is(holes)} missing in {title}: gaps")
    gaps[MISSING] = Counter({name: count for name, count in gaps[MISSING].items() if name in expected})
    notes += [f"{title}: {_per_name(counts)} {why}: gaps" for why, counts in gaps.items() if counts]
    return curves, notes


def _lines_and_steps(tables: Sequence[Table]) -> tuple[np.ndarray, np.ndarray]:
    none = np.zeros(0, np.int64)
    return np.concatenate([none, *(t.line for t in tables)]), np.concatenate([none, *(t.step for t in tables)])


def _columns(
    tables: Sequence[Table], wanted: set[str], gaps: dict[str, Counter[str]]
) -> tuple[np.ndarray, Curves, np.ndarray]:
    """Steps [N], the curves of the wanted names, and the steps that occur more than once: their last line counts.

    Adds to `gaps`, for each reason, how many points of a curve are not finite numbers.
    """
    tables = [table for table in tables if not wanted.isdisjoint(table.names)]
    line, step = _lines_and_steps(tables)
    order = np.lexsort((line, step))
    order = order[step[order] >= 0]
    last = np.diff(step[order], append=-1) != 0
    steps, point = step[order][last], np.full(len(step), -1)
    point[order[last]] = np.arange(len(steps))  # row of all tables -> its point
    values: dict[str, np.ndarray] = {}
    odd, there = Counter(), Counter()
    end = 0
    for table in tables:
        at = point[end : end + len(table.line)]
        end += len(at)
        kept, at = at >= 0, at[at >= 0]
        rows, strange = np.ascontiguousarray(table.value[kept].T), table.odd[kept].sum(0)  # [K, N], [K]
        for name, row, count in zip(table.names, rows, strange.tolist()):
            if name in wanted:
                values.setdefault(name, np.full(len(steps), np.nan))[at] = row
                odd[name] += count
                there[name] += len(at)
    curves = {name: Curve(steps, value) for name, value in values.items()}
    for name, curve in curves.items():
        missing = len(steps) - there[name]
        not_finite = len(steps) - len(curve.finite) - missing - odd[name]
        for why, count in ((NOT_FINITE, not_finite), (NOT_A_NUMBER, odd[name]), (MISSING, missing)):
            if count:
                gaps[why][name] = count
    text_only = {name for name, curve in curves.items() if odd[name] and not len(curve.finite)}
    curves = {name: curve for name, curve in curves.items() if name not in text_only}
    return steps, curves, np.unique(step[order][~last])


def _per_name(counts: dict[str, int]) -> str:
    """reward/mean (3 steps), ... are"""
    said = [f"{name} ({_count(count, 'step')})" for name, count in counts.items()]
    more = f" and {len(said) - 4} more" if len(said) > 4 else ""
    return f"{', '.join(said[:4])}{more} {_is(len(said))}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _some(numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    return ", ".join(map(str, ordered[:5])) + (", ..." if len(ordered) > 5 else "")


def _lines(numbers: Sequence[int]) -> str:
    return f"line {numbers[0]}" if len(numbers) == 1 else f"{len(numbers):,} lines ({_some(numbers)})"


def _is(number: int) -> str:
    return "is" if number == 1 else "are"


def damage(title: str, lines: int, torn: bool, wrong: Sequence[int]) -> list[str]:
    """Notes on a file without lines, a last line that was cut off, and lines that are not objects."""
    notes = [] if lines or torn else [f"{title} is empty"]
    if torn:
        notes.append(f"line {lines + 1} of {title} was cut off and is omitted")
    if len(wrong):
        verb = "is not a JSON object and is" if len(wrong) == 1 else "are not JSON objects and are"
        notes.append(f"{_lines(wrong)} of {title} {verb} omitted")
    return notes
