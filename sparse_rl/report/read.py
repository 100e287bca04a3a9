"""Run folders, read as they are: half-written, damaged, empty or of an older version. What is odd becomes a note, never an error.

A curve has a point for every step its run wrote, NaN where a number is missing: a gap. Lines of evaluations are read beside those of
steps, so that step 10 may have one of each; their curves have points where there was an evaluation. N points.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..config import make_recipe, migrate
from ..errors import SparseRLError
from .curves import EXPECTED, Curve, damage, lies_in, read_curves
from .lines import contents
from .recipe import LONGEST, plain

MARKS = ("recipe.yaml", "metrics.jsonl")  # a folder with one of them is a run
NOTES, LONGEST_NOTE = 20, 400  # of a run, and characters of one


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
            notes.append(
                f"{len(skipped)} of {len(here) + len(skipped)} folders in {path} are no runs and are left out: {names}"
            )
        for run in here:
            found.setdefault(run.resolve(), run)
    return list(found.values()), notes


def is_run(path: Path) -> bool:
    try:
        return any((path / mark).is_file() for mark in MARKS)
    except OSError:  # one we may not look into
        return False


def bounded(notes: Sequence[str]) -> list[str]:
    """Notes as they are shown: long ones cut, many left out, and how much of both."""
    cut = [
        note
        if len(note) <= LONGEST_NOTE
        else f"{note[:LONGEST_NOTE]} ... ({len(note) - LONGEST_NOTE:,} more characters)"
        for note in notes
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
        return make_recipe(migrate(data)[0]).to_dict(), True
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
