"""Files of metrics as curves, and notes on what is odd about them. N points of a curve, which are NaN where a number is missing: a gap."""

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
NAMES, LONGEST_NAME = 1000, 200  # metrics of a file, and characters of one


@dataclass(frozen=True, eq=False)
class Curve:
    step: np.ndarray  # int64 [N], ascending
    value: np.ndarray  # fp64 [N]; NaN: a gap

    @property
    def finite(self) -> np.ndarray:
        return self.value[np.isfinite(self.value)]


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a path, links followed, is inside a folder. A link that leads to itself leads nowhere."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return False


def is_evaluation(name: str) -> bool:
    """Whether a metric is one of held-out evaluations, which have lines of their own."""
    return name.startswith("eval/") or name == "time/eval"


Known = tuple[
    tuple, Reading, tuple[dict[str, Curve], list[str]]
]  # how a file looked, what was read of it, its curves and notes
_read: dict[Path, Known] = {}


def read_curves(path: Path, expected: Sequence[str]) -> tuple[dict[str, Curve], list[str]]:
    """Numbers of a file of metrics as curves, by name, and notes. A file that did not change is not read; one that grew is read on."""
    try:
        known = _read.get(path)
        if known is None or known[0] != _looks(path):
            known = _read[path] = _look_into(path, expected, Reading() if known is None else known[1])
        return known[2]
    except OSError as error:
        _read.pop(path, None)
        return {}, [
            f"there is no {path.name}"
            if isinstance(error, FileNotFoundError)
            else f"{path.name} cannot be read ({error.strerror})"
        ]


def _looks(path: Path) -> tuple:
    about = path.stat()
    return about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size


def _look_into(path: Path, expected: Sequence[str], before: Reading) -> Known:
    looks, reading = _looks(path), read_on(path, before)
    return looks, reading, curves_of(reading, path.name, expected)


def curves_of(reading: Reading, title: str, expected: Sequence[str]) -> tuple[dict[str, Curve], list[str]]:
    """Curves of what was read of a file, and notes."""
    notes = damage(title, reading.lines, reading.torn, reading.wrong)
    tables = list(reading.tables.values())
    line, step = (
        np.concatenate([np.zeros(0, np.int64), *(getattr(table, name) for table in tables)])
        for name in ("line", "step")
    )
    order = np.argsort(line)
    line, step = line[order], step[order]
    if (stepless := line[step < 0]).size:
        verb = "has no whole step and is" if len(stepless) == 1 else "have no whole step and are"
        notes.append(f"{_lines(stepless)} of {title} {verb} left out")
    line, step = line[step >= 0], step[step >= 0]
    late = line[1:][np.diff(step) < 0]
    known = dict.fromkeys(name for table in tables for name in table.names)
    short = [name for name in dict.fromkeys([*expected, *known]) if name in known and len(name) <= LONGEST_NAME]
    shown = set(short[:NAMES])
    if many := len(known) - len(shown):
        limits = f"beyond {NAMES:,}, or with names of more than {LONGEST_NAME} characters"
        notes.append(f"{_count(many, 'metric')} of {title} {_is(many)} left out: {limits}")
    gaps: dict[str, Counter[str]] = {
        "null, not finite or beyond 1e100": Counter(),
        "no number": Counter(),
        "missing": Counter(),
    }
    steps, curves, again = _columns(tables, {name for name in shown if not is_evaluation(name)}, gaps)
    _, held_out, twice = _columns(tables, set(filter(is_evaluation, shown)), gaps)
    curves |= held_out
    if twice := np.union1d(again, twice).tolist():
        notes.append(f"{title} has {_count(len(twice), 'step')} more than once ({_some(twice)}): the later line counts")
    if late.size:
        notes.append(
            f"{_lines(late)} of {title} {'goes' if len(late) == 1 else 'go'} back to an earlier step: shown in order of steps"
        )
    absent = [name for name in expected if name not in curves] if len(steps) else []
    if absent:
        notes.append(f"{title} has no {', '.join(absent)}: an older version may have written it")
    if holes := int(steps[-1] - steps[0]) + 1 - len(steps) if len(steps) else 0:
        notes.append(
            f"{_count(holes, 'step')} between {steps[0]} and {steps[-1]} {_is(holes)} missing in {title}: gaps"
        )
    gaps["missing"] = Counter(
        {name: count for name, count in gaps["missing"].items() if name in expected}
    )  # others come and go
    notes += [f"{title}: {_per_name(counts)} {what}: gaps" for what, counts in gaps.items() if counts]
    return curves, notes


def _columns(
    tables: Sequence[Table], wanted: set[str], gaps: dict[str, Counter[str]]
) -> tuple[np.ndarray, dict[str, Curve], np.ndarray]:
    """Steps [N], curves of the names that are wanted, and steps that come more than once, of which the last line counts.

    `gaps` counts what is no finite number, by name.
    """
    tables = [table for table in tables if not wanted.isdisjoint(table.names)]
    line, step = (
        np.concatenate([np.zeros(0, np.int64), *(getattr(table, name) for table in tables)])
        for name in ("line", "step")
    )
    order = np.lexsort((line, step))
    order = order[step[order] >= 0]
    last = np.diff(step[order], append=-1) != 0
    index, place = step[order][last], np.full(len(step), -1)
    place[order[last]] = np.arange(len(index))  # row of all tables -> its point
    values: dict[str, np.ndarray] = {}
    odd, there = Counter(), Counter()
    end = 0
    for table in tables:
        at = place[end : end + len(table.line)]
        end += len(at)
        kept, at = at >= 0, at[at >= 0]
        rows, strange = np.ascontiguousarray(table.value[kept].T), table.odd[kept].sum(0)  # [K, N]
        for name, row, count in zip(table.names, rows, strange.tolist()):
            if name in wanted:
                values.setdefault(name, np.full(len(index), np.nan))[at] = row
                odd[name] += count
                there[name] += len(at)
    curves = {name: Curve(index, value) for name, value in values.items()}
    for name, curve in curves.items():
        if lost := len(index) - len(curve.finite):
            missing = len(index) - there[name]
            counts = {
                "null, not finite or beyond 1e100": lost - missing - odd[name],
                "no number": odd[name],
                "missing": missing,
            }
            for what, count in counts.items():
                if count:
                    gaps[what][name] = count
    kept = {
        name: curve for name, curve in curves.items() if len(curve.finite) or not odd[name]
    }  # text all along: no curve
    return index, kept, np.unique(step[order][~last])


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
    """What is to be said of a file's lines: none, the last one cut off, some no objects."""
    notes = [] if lines or torn else [f"{title} is empty"]
    if torn:
        notes.append(f"line {lines + 1} of {title} was cut off and is left out")
    if len(wrong):
        verb = "is no JSON object and is" if len(wrong) == 1 else "are no JSON objects and are"
        notes.append(f"{_lines(wrong)} of {title} {verb} left out")
    return notes
