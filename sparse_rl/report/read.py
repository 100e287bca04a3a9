"""Read run folders as they are: half-written, damaged, empty or of an older version. Oddities become notes, not errors.

A curve has a point for every step that its run wrote, and NaN where a number is missing: a gap. Evaluations have lines
of their own, so step 10 may have two lines; curves of evaluations have points only where there was an evaluation.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..config import make_recipe, migrate, read_yaml
from ..errors import SparseRLError
from ..files import lies_in
from .aim import Aim, aim_of
from .curves import EXPECTED, Curve, damage, read_curves
from .lines import contents, json_object
from .recipe import LONGEST, plain
from .samplers import POOL, read_samplers

MARKS = ("recipe.yaml", "metrics.jsonl")  # a folder with one of them is a run
MAX_NOTES = 20  # notes of a run that are shown
MAX_NOTE = 400  # characters of a note


@dataclass
class Run:
    folder: Path
    name: str
    recipe: dict[str, dict[str, Any]]  # sections; empty if there is no recipe
    complete: bool  # the recipe belongs to this version, and has every key
    curves: dict[str, Curve]
    notes: list[str] = field(default_factory=list)
    samplers: dict[str, Any] | None = None  # of its pool (samplers.py)

    @property
    def method(self) -> str:
        return str(self.recipe.get("learn", {}).get("method", "unknown"))

    @property
    def arm(self) -> str:
        """What a run stands for in a comparison: its method, or `dense` if its rollouts were on a dense cache."""
        return "dense" if self.recipe.get("rollout", {}).get("compressor") == "dense" else self.method

    @property
    def aim(self) -> Aim:
        return aim_of(self.recipe)

    @property
    def steps(self) -> int:
        return max((int(c.step[-1]) for c in self.curves.values() if len(c.step)), default=0)

    def clock(self) -> Curve:
        """Seconds from the start to the end of each step and its evaluation."""
        spent = [self.curves[name] for name in ("time/step", "time/eval") if name in self.curves]
        every = np.concatenate([np.zeros(0, np.int64), *(curve.step for curve in spent)])
        seconds = np.concatenate([np.zeros(0), *(np.fmax(curve.value, 0.0) for curve in spent)])  # a gap counts as 0
        steps, place = np.unique(every, return_inverse=True)
        return Curve(steps, np.cumsum(np.bincount(place, seconds, len(steps))))


def find_runs(paths: Sequence[str | os.PathLike], may_vanish: bool = False) -> tuple[list[Path], list[str]]:
    """The runs at paths (runs, or folders of runs), and notes. `may_vanish`: a path without a run is not an error."""
    found: dict[Path, Path] = {}
    notes = []
    for path in map(Path, paths):
        here, skipped = ([path], []) if is_run(path) else _inside(path)
        if not here and not may_vanish:
            raise SparseRLError(
                f"{path} {'holds no run' if path.is_dir() else 'is not a folder'}; give a folder with a recipe.yaml or "
                "a metrics.jsonl, or one that holds such folders."
            )
        if not here:
            notes.append(f"{path} holds no run at the moment")
        elif skipped:
            names = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
            count = f"{len(skipped)} of {len(here) + len(skipped)} folders in {path}"
            notes.append(
                f"{count} {'is not a run and is' if len(skipped) == 1 else 'are not runs and are'} omitted: {names}"
            )
        for run in here:
            found.setdefault(run.resolve(), run)
    return list(found.values()), notes


def is_run(path: Path) -> bool:
    try:
        return any((path / mark).is_file() for mark in MARKS)
    except OSError:  # we may not look into it
        return False


def bounded(notes: Sequence[str]) -> list[str]:
    """Notes as they are shown: long ones are cut, and of many only the first; both say how much is missing."""
    cut = [
        note if len(note) <= MAX_NOTE else f"{note[:MAX_NOTE]} ... ({len(note) - MAX_NOTE:,} more characters)"
        for note in notes
    ]
    return cut if len(cut) <= MAX_NOTES else [*cut[:MAX_NOTES], f"{len(cut) - MAX_NOTES:,} more notes are omitted"]


def _inside(path: Path) -> tuple[list[Path], list[str]]:
    """The runs in a folder, sorted, and the names of its folders that are not runs."""
    try:
        folders = sorted(p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError:  # not a folder, or we may not look into it
        return [], []
    return [p for p in folders if is_run(p)], [p.name for p in folders if not is_run(p)]


def read_runs(paths: Sequence[str | os.PathLike], may_vanish: bool = False) -> tuple[list[Run], list[str]]:
    """Every run at these paths, and notes about the whole."""
    folders, notes = find_runs(paths, may_vanish)
    runs = []
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except SparseRLError as error:  # the run was removed after it was found
            if not may_vanish:
                raise
            notes.append(str(error).rstrip("."))
    return runs, notes


def read_run(folder: str | os.PathLike) -> Run:
    folder = Path(folder)
    if not is_run(folder):
        raise SparseRLError(
            f"{folder} has neither a recipe.yaml nor a metrics.jsonl, so it is not a run; name another."
        )
    notes: list[str] = []
    outside = [name for name in ("recipe.yaml", *EXPECTED, POOL) if not lies_in(folder / name, folder)]
    notes += [f"{name} is a link out of the run's folder and is not read" for name in outside]
    recipe, complete = ({}, False) if "recipe.yaml" in outside else read_recipe(folder / "recipe.yaml", notes)
    curves: dict[str, Curve] = {}
    for name, expected in EXPECTED.items():
        if name in outside:
            continue
        found, odd = read_curves(folder / name, expected)
        curves |= {curve: points for curve, points in found.items() if curve not in curves}
        notes += odd
    samplers = None if POOL in outside else read_samplers(folder, notes)
    return Run(folder, str(folder), recipe, complete, curves, notes, samplers)


def read_recipe(path: Path, notes: list[str]) -> tuple[dict[str, dict[str, Any]], bool]:
    """The sections of a recipe, with defaults if this version can read it; and whether it can."""
    try:
        data = read_yaml(contents(path).decode("utf-8"), "the file")
    except FileNotFoundError:
        notes.append("there is no recipe.yaml: settings are unknown")
        return {}, False
    except (OSError, ValueError) as error:
        notes.append(f"recipe.yaml cannot be read ({_first(error)}): settings are unknown")
        return {}, False
    damaged = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)
    try:
        return make_recipe(migrate(data)[0]).to_dict(), True
    except damaged as error:  # SparseRLError is a ValueError; damaged values lead to the others
        notes.append(f"recipe.yaml does not fit this version ({_first(error)}) and is shown as it is")
    sections = data.items() if isinstance(data, dict) else ()
    shown = [(str(name), list(keys.items())) for name, keys in sections if isinstance(keys, dict)]
    return {name: {str(k): plain(v) for k, v in keys[:LONGEST]} for name, keys in shown[:LONGEST]}, False


def _first(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:300] or type(error).__name__


def json_lines(path: Path, notes: list[str], title: str) -> Iterable[tuple[int, dict]]:
    """(number, object) of a file's lines, one by one; at the end, notes on the lines that are not objects."""
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
        line = json_object(text)
        if line is None:
            wrong.append(number)
        else:
            yield number, line
    notes += damage(title, len(lines), bool(torn), wrong)
