"""Run folders, read as they are: half-written, damaged, empty or of an older version. What is odd becomes a note, never an error.

A curve has a point for every step its run wrote, NaN where a number is missing: a gap. Lines of evaluations are read beside those of
steps, so that step 10 may have one of each; their curves have points where there was an evaluation. N points.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..config import make_recipe
from ..errors import SparseRLError
from .lines import Reading, Table, contents, read_on
from .recipe import LONGEST, plain

MARKS = ("recipe.yaml", "metrics.jsonl")  # a folder with one of them is a run
EXPECTED = {  # what every step of a run writes
    "metrics.jsonl": ("reward/mean", "rollout/length/mean", "old/entropy/mean", "gap/xi/p05", "reject/trajectories/frac"),
    "timing.jsonl": ("time/step", "time/rollout", "rollout/tokens_per_s", "cache/bytes/allocated"),
}
NOTES, LONGEST_NOTE = 20, 400  # of a run, and characters of one
NAMES, LONGEST_NAME = 1000, 200  # metrics of a file, and characters of one
MANY = 64_000_000  # bytes of files from which more than one process reads them


@dataclass(frozen=True, eq=False)
class Curve:
    step: np.ndarray  # int64 [N], ascending
    value: np.ndarray  # fp64 [N]; NaN: a gap

    @property
    def finite(self) -> np.ndarray:
        return self.value[np.isfinite(self.value)]


@dataclass
class Run:
    folder: Path
    name: str
    recipe: dict[str, dict[str, Any]]  # sections; empty where there is none
    complete: bool  # the recipe is one of this version, every key spelled out
    curves: dict[str, Curve]
    notes: list[str] = field(default_factory=list)

    @property
    def method(self) -> str:
        return str(self.recipe.get("learn", {}).get("method", "unknown"))

    @property
    def steps(self) -> int:
        return max((int(c.step[-1]) for c in self.curves.values() if len(c.step)), default=0)

    def clock(self) -> Curve:
        """Seconds since the start when a step, and its evaluation, were done."""
        spent = [self.curves[name] for name in ("time/step", "time/eval") if name in self.curves]
        every = np.concatenate([np.zeros(0, np.int64), *(curve.step for curve in spent)])
        seconds = np.concatenate([np.zeros(0), *(np.fmax(curve.value, 0.0) for curve in spent)])  # a gap is no time
        steps, place = np.unique(every, return_inverse=True)
        return Curve(steps, np.cumsum(np.bincount(place, seconds, len(steps))))


def find_runs(paths: Sequence[str | os.PathLike], gone: bool = False) -> tuple[list[Path], list[str]]:
    """The runs that paths name, each a run or a folder of runs, and notes on what was left out. `gone`: a path may have vanished."""
    found: dict[Path, Path] = {}
    notes = []
    for path in map(Path, paths):
        here, skipped = ([path], []) if is_run(path) else _inside(path)
        if not here and not gone:
            raise SparseRLError(
                f"{path} {'holds no run' if path.is_dir() else 'is no folder'}; give a folder with a recipe.yaml or a metrics.jsonl, "
                "or one that holds such folders."
            )
        if not here:
            notes.append(f"{path} holds no run at the moment")
        elif skipped:
            names = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
            notes.append(f"{len(skipped)} of {len(here) + len(skipped)} folders in {path} are no runs and are left out: {names}")
        for run in here:
            found.setdefault(run.resolve(), run)
    return list(found.values()), notes


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a path, links followed, is inside a folder. A link that leads to itself leads nowhere."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return False


def is_run(path: Path) -> bool:
    try:
        return any((path / mark).is_file() for mark in MARKS)
    except OSError:  # one we may not look into
        return False


def bounded(notes: Sequence[str]) -> list[str]:
    """Notes as they are shown: long ones cut, many left out, and how much of both."""
    cut = [
        note if len(note) <= LONGEST_NOTE else f"{note[:LONGEST_NOTE]} ... ({len(note) - LONGEST_NOTE:,} more characters)" for note in notes
    ]
    return cut if len(cut) <= NOTES else [*cut[:NOTES], f"{len(cut) - NOTES:,} more notes are left out"]


def _inside(path: Path) -> tuple[list[Path], list[str]]:
    """Runs in a folder, sorted, and the names of folders that are none."""
    try:
        folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:  # no folder, or one we may not look into: it holds no runs for us
        return [], []
    return [p for p in folders if is_run(p)], [p.name for p in folders if not is_run(p)]


def read_runs(paths: Sequence[str | os.PathLike], gone: bool = False) -> tuple[list[Run], list[str]]:
    """Every run that paths name, and notes about the whole."""
    folders, notes = find_runs(paths, gone)
    read_ahead(folders)
    runs = []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except SparseRLError as error:  # removed since it was found
            if not gone:
                raise
            notes.append(str(error).rstrip("."))
    return runs, notes


def read_run(folder: str | os.PathLike) -> Run:
    folder = Path(folder)
    if not is_run(folder):
        raise SparseRLError(f"{folder} is no run: it has neither a recipe.yaml nor a metrics.jsonl.")
    notes: list[str] = []
    outside = [name for name in ("recipe.yaml", *EXPECTED) if not lies_in(folder / name, folder)]
    notes += [f"{name} is a link out of the run's folder and is not read" for name in outside]
    recipe, complete = ({}, False) if "recipe.yaml" in outside else read_recipe(folder / "recipe.yaml", notes)
    curves: dict[str, Curve] = {}
    for name, expected in EXPECTED.items():
        if name in outside:
            continue
        found, odd = read_curves(folder / name, expected)
        curves |= {curve: points for curve, points in found.items() if curve not in curves}
        notes += odd
    return Run(folder, str(folder), recipe, complete, curves, notes)


def read_recipe(path: Path, notes: list[str]) -> tuple[dict[str, dict[str, Any]], bool]:
    """The sections of a recipe, with defaults where this version can read it; and whether it can."""
    import yaml

    try:
        data = yaml.safe_load(contents(path).decode("utf-8"))
    except FileNotFoundError:
        notes.append("there is no recipe.yaml: settings are unknown")
        return {}, False
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError) as error:
        notes.append(f"recipe.yaml cannot be read ({_first(error)}): settings are unknown")
        return {}, False
    try:
        return make_recipe(data).to_dict(), True
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as error:  # SparseRLError, and what damaged values lead to
        notes.append(f"recipe.yaml is not one of this version ({_first(error)}) and is shown as it is")
    sections = data.items() if isinstance(data, dict) else ()
    shown = [(str(name), list(keys.items())) for name, keys in sections if isinstance(keys, dict)]
    return {name: {str(k): plain(v) for k, v in keys[:LONGEST]} for name, keys in shown[:LONGEST]}, False


def _first(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__


def json_lines(path: Path, notes: list[str], title: str) -> Iterable[tuple[int, dict]]:
    """(number, line) of the lines that are objects, one by one; what is left out becomes notes at the end."""
    try:
        *lines, torn = contents(path).split(b"\n")
    except FileNotFoundError:
        notes.append(f"there is no {title}")
        return
    except OSError as error:
        notes.append(f"{title} cannot be read ({error.strerror or error})")
        return
    wrong = []
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested beyond sense
            line = None
        if isinstance(line, dict):
            yield number, line
        else:
            wrong.append(number)
    notes += damage(title, len(lines), bool(torn), wrong)


def damage(title: str, lines: int, torn: bool, wrong: Sequence[int]) -> list[str]:
    """What is to be said of a file's lines: none, the last one cut off, some no objects."""
    notes = [] if lines or torn else [f"{title} is empty"]
    if torn:
        notes.append(f"line {lines + 1} of {title} was cut off and is left out")
    if len(wrong):
        verb = "is no JSON object and is" if len(wrong) == 1 else "are no JSON objects and are"
        notes.append(f"{_lines(wrong)} of {title} {verb} left out")
    return notes


def is_evaluation(name: str) -> bool:
    """Whether a metric is one of held-out evaluations, which have lines of their own."""
    return name.startswith("eval/") or name == "time/eval"


Known = tuple[tuple, Reading, tuple[dict[str, Curve], list[str]]]  # how a file looked, what was read of it, its curves and notes
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
            f"there is no {path.name}" if isinstance(error, FileNotFoundError) else f"{path.name} cannot be read ({error.strerror})"
        ]


def _looks(path: Path) -> tuple:
    about = path.stat()
    return about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size


def _look_into(path: Path, expected: Sequence[str], before: Reading) -> Known:
    looks, reading = _looks(path), read_on(path, before)
    return looks, reading, curves_of(reading, path.name, expected)


def read_ahead(folders: Sequence[Path]) -> None:
    """Read files of many large runs that were not read yet by several processes; what fails here is read again, and told, afterwards."""
    new = [folder / name for folder in folders for name in EXPECTED if folder / name not in _read and lies_in(folder / name, folder)]
    large = sorted(((_size(path), path) for path in new), reverse=True)
    alone = threading.active_count() > 1 or "fork" not in multiprocessing.get_all_start_methods()  # threads do not survive a fork
    if alone or len(new) < 2 or sum(size for size, _ in large) < MANY:
        return
    files, fork = [path for _, path in large], multiprocessing.get_context("fork")
    with ProcessPoolExecutor(min(len(files), os.cpu_count() or 1, 8), fork, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        _read.update((path, known) for path, known in zip(files, pool.map(_fresh, files)) if known is not None)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _fresh(path: Path) -> Known | None:
    try:
        return _look_into(path, EXPECTED[path.name], Reading())
    except OSError:
        return None


def curves_of(reading: Reading, title: str, expected: Sequence[str]) -> tuple[dict[str, Curve], list[str]]:
    """Curves of what was read of a file, and notes."""
    notes = damage(title, reading.lines, reading.torn, reading.wrong)
    tables = list(reading.tables.values())
    line, step = (np.concatenate([np.zeros(0, np.int64), *(getattr(table, name) for table in tables)]) for name in ("line", "step"))
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
    gaps: dict[str, Counter[str]] = {"null, not finite or beyond 1e100": Counter(), "no number": Counter(), "missing": Counter()}
    steps, curves, again = _columns(tables, {name for name in shown if not is_evaluation(name)}, gaps)
    _, held_out, twice = _columns(tables, set(filter(is_evaluation, shown)), gaps)
    curves |= held_out
    if twice := np.union1d(again, twice).tolist():
        notes.append(f"{title} has {_count(len(twice), 'step')} more than once ({_some(twice)}): the later line counts")
    if late.size:
        notes.append(f"{_lines(late)} of {title} {'goes' if len(late) == 1 else 'go'} back to an earlier step: shown in order of steps")
    absent = [name for name in expected if name not in curves] if len(steps) else []
    if absent:
        notes.append(f"{title} has no {', '.join(absent)}: an older version may have written it")
    if holes := int(steps[-1] - steps[0]) + 1 - len(steps) if len(steps) else 0:
        notes.append(f"{_count(holes, 'step')} between {steps[0]} and {steps[-1]} {_is(holes)} missing in {title}: gaps")
    gaps["missing"] = Counter({name: count for name, count in gaps["missing"].items() if name in expected})  # others come and go
    notes += [f"{title}: {_per_name(counts)} {what}: gaps" for what, counts in gaps.items() if counts]
    return curves, notes


def _columns(tables: Sequence[Table], wanted: set[str], gaps: dict[str, Counter[str]]) -> tuple[np.ndarray, dict[str, Curve], np.ndarray]:
    """Steps [N], curves of the names that are wanted, and steps that come more than once, of which the last line counts.

    `gaps` counts what is no finite number, by name.
    """
    tables = [table for table in tables if not wanted.isdisjoint(table.names)]
    line, step = (np.concatenate([np.zeros(0, np.int64), *(getattr(table, name) for table in tables)]) for name in ("line", "step"))
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
            counts = {"null, not finite or beyond 1e100": lost - missing - odd[name], "no number": odd[name], "missing": missing}
            for what, count in counts.items():
                if count:
                    gaps[what][name] = count
    kept = {name: curve for name, curve in curves.items() if len(curve.finite) or not odd[name]}  # text all along: no curve
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
