"""Runs as one document of plain values, which the page shows."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from .bins import binned, points_for
from .curves import is_evaluation
from .palette import METHODS
from .read import Run, bounded, read_runs
from .recipe import command, differences, settings
from .trajectories import SPACE, read_samples
from .verdict import verdict

VERSION = 1
MAX_BYTES = 14_000_000  # of a document: curves first, then trajectories in the space that remains


def document(paths: Sequence[str | os.PathLike], live: float | None = None) -> dict[str, Any]:
    """The runs at these paths as the page has them. `live`: seconds until the page asks again; then runs may vanish."""
    runs, notes = read_runs(paths, may_vanish=live is not None)
    most = points_for(sum(len(run.curves) for run in runs))
    shown = [described(run, most) for run in runs]
    whole = {
        "version": VERSION,
        "live": None if live is None else {"every": live},
        "runs": shown,
        "colours": METHODS,
        "differences": differences([run.recipe for run in runs]) if len(runs) > 1 else [],
        "notes": bounded(notes),
    }
    space = (MAX_BYTES - len(dumped(whole))) // max(len(runs), 1)
    for run, entry in zip(runs, shown):
        entry["trajectories"], more = read_samples(run.folder, space=min(max(space, 0), SPACE))
        entry["notes"] = bounded([*run.notes, *more])
    return whole


def described(run: Run, most: int) -> dict[str, Any]:
    """Everything about a run except its trajectories. `most`: points of a curve."""
    clock = binned(run.clock(), most, regular=False)
    return {
        "name": run.name,
        "method": run.method,
        "arm": run.arm,
        "command": command(run.recipe, run.complete, run.name) if run.recipe else "",
        "steps": run.steps,
        "seconds": clock["high" if "high" in clock else "mean"][-1] if clock["step"] else 0.0,
        "notes": bounded(run.notes),
        "clock": {"step": clock["step"], "seconds": clock.get("high", clock["mean"])},  # at the bin's last step
        "curves": {name: binned(curve, most, regular=not is_evaluation(name)) for name, curve in run.curves.items()},
        "verdict": verdict(run.curves, run.aim),
        "recipe": settings(run.recipe),
        "samplers": run.samplers,
        "trajectories": [],
    }


def dumped(value: Any) -> str:
    """ASCII JSON without NaN, and without a `<` that could end a script. ASCII also escapes U+2028 and the like."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
