"""Run folders, read as they are: half-written, damaged, empty or of an older version. What is odd becomes a note, never an error.

A curve has a point for every step its run wrote, NaN where a number is missing: a gap. Lines of evaluations are read beside those of
steps, so that step 10 may have one of each; their curves have points where there was an evaluation. N points.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..config import make_recipe
from ..errors import SparseRLError
from .recipe import LONGEST, plain

MARKS = ("recipe.yaml", "metrics.jsonl")  # a folder with one of them is a run
EXPECTED = {  # what every step of a run writes
    "metrics.jsonl": ("reward/mean", "rollout/length/mean", "old/entropy/mean", "gap/xi/p05", "reject/trajectories/frac"),
    "timing.jsonl": ("time/step", "time/rollout", "rollout/tokens_per_s", "cache/bytes/allocated"),
}
_LARGEST = 2**53  # whole numbers that JavaScript knows


@dataclass(frozen=True)
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
        spent: Counter[int] = Counter()
        for name in ("time/step", "time/eval"):
            if name in self.curves:
                curve = self.curves[name]
                for step, seconds in zip(curve.step.tolist(), curve.value.tolist()):
                    spent[step] += max(seconds, 0.0) if seconds == seconds else 0.0
        steps = sorted(spent)
        return Curve(np.array(steps, dtype=np.int64), np.cumsum([spent[step] for step in steps], dtype=np.float64))


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
    """Whether a path, links followed, is inside a folder."""
    return path.resolve().is_relative_to(folder.resolve())


def is_run(path: Path) -> bool:
    return any((path / mark).is_file() for mark in MARKS)


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
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
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
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        notes.append(f"there is no {title}")
        return
    except OSError as error:
        notes.append(f"{title} cannot be read ({error.strerror or error})")
        return
    torn, wrong = lines.pop(), []
    if not lines and not torn:
        notes.append(f"{title} is empty")
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text.decode("utf-8"))
        except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested beyond sense
            line = None
        if isinstance(line, dict):
            yield number, line
        else:
            wrong.append(number)
    if torn:
        notes.append(f"line {len(lines) + 1} of {title} was cut off and is left out")
    if wrong:
        verb = "is no JSON object and is" if len(wrong) == 1 else "are no JSON objects and are"
        notes.append(f"{_lines(wrong)} of {title} {verb} left out")


def is_evaluation(name: str) -> bool:
    """Whether a metric is one of held-out evaluations, which have lines of their own."""
    return name.startswith("eval/") or name == "time/eval"


def read_curves(path: Path, expected: Sequence[str]) -> tuple[dict[str, Curve], list[str]]:
    """Every number of a file of metrics as a curve, by name; and notes. A file that did not change is not read again."""
    try:
        about = path.stat()
        return _read_curves(path, tuple(expected), about.st_mtime_ns, about.st_size)
    except OSError as error:
        return {}, [
            f"there is no {path.name}" if isinstance(error, FileNotFoundError) else f"{path.name} cannot be read ({error.strerror})"
        ]


@functools.lru_cache(maxsize=64)
def _read_curves(path: Path, expected: tuple[str, ...], changed: int, size: int) -> tuple[dict[str, Curve], list[str]]:
    notes: list[str] = []
    steps, evaluations = {}, {}  # step -> its line
    known: dict[str, None] = {}  # names, in the order they come
    asked: set[str] = set()  # those of evaluations
    stepless, twice, late, last = [], set(), [], -1
    for number, line in json_lines(path, notes, path.name):
        step = line.pop("step", None)
        if type(step) is not int or not 0 <= step < _LARGEST:
            stepless.append(number)
            continue
        if step < last:
            late.append(number)
        last = step
        if line.keys() - known.keys():
            known |= dict.fromkeys(line)
            asked = {name for name in known if is_evaluation(name)}
        held_out = {name: line.pop(name) for name in line.keys() & asked}
        for table, values in ((steps, line), (evaluations, held_out)):
            if values:
                if step in table:
                    twice.add(step)
                table[step] = values
    if stepless:
        verb = "has no whole step and is" if len(stepless) == 1 else "have no whole step and are"
        notes.append(f"{_lines(stepless)} of {path.name} {verb} left out")
    if twice:
        notes.append(f"{path.name} has {_count(len(twice), 'step')} more than once ({_some(twice)}): the later line counts")
    if late:
        notes.append(f"{_lines(late)} of {path.name} {'goes' if len(late) == 1 else 'go'} back to an earlier step: shown in order of steps")
    gaps: dict[str, Counter[str]] = {"null or not finite": Counter(), "no number": Counter(), "missing": Counter()}
    curves = _columns(steps, [name for name in known if name not in asked], gaps)
    curves |= _columns(evaluations, [name for name in known if name in asked], gaps)
    absent = [name for name in expected if name not in curves] if steps else []
    if absent:
        notes.append(f"{path.name} has no {', '.join(absent)}: an older version may have written it")
    if holes := max(steps, default=0) - min(steps, default=1) + 1 - len(steps):
        notes.append(f"{_count(holes, 'step')} between {min(steps)} and {max(steps)} {_is(holes)} missing in {path.name}: gaps")
    gaps["missing"] = Counter({name: count for name, count in gaps["missing"].items() if name in expected})  # others come and go
    notes += [f"{path.name}: {_per_name(counts)} {what}: gaps" for what, counts in gaps.items() if counts]
    return curves, notes


def _columns(table: dict[int, dict], names: Sequence[str], gaps: dict[str, Counter[str]]) -> dict[str, Curve]:
    """The lines of a file, by step, as curves; `gaps` counts what is no finite number, by name."""
    steps = sorted(table)
    rows = [table[step] for step in steps]
    index = np.array(steps, dtype=np.int64)
    curves = {}
    for name in names:
        column = [row.get(name) for row in rows]
        odd = 0
        if not set(map(type, column)) <= {float, type(None)}:
            numbers = [_number(value) for value in column]
            odd = sum(b is None and a is not None for a, b in zip(column, numbers))
            column = numbers
        value = np.array(column, dtype=np.float64)
        value[np.isinf(value)] = np.nan
        curves[name] = Curve(index, value)
        if lost := int(np.isnan(value).sum()):
            missing = sum(name not in row for row in rows)
            counts = {"null or not finite": lost - missing - odd, "no number": odd, "missing": missing}
            for what, count in counts.items():
                if count:
                    gaps[what][name] = count
    return {name: curve for name, curve in curves.items() if len(curve.finite) or name not in gaps["no number"]}  # text all along: no curve


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


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


def _lines(numbers: list[int]) -> str:
    return f"line {numbers[0]}" if len(numbers) == 1 else f"{len(numbers):,} lines ({_some(numbers)})"


def _is(number: int) -> str:
    return "is" if number == 1 else "are"
