"""Write a run's metrics: one JSON line per step in two files, and the same numbers to trackers.

    metrics.jsonl   what was learned; a resumed run writes the same bytes as a run that was never interrupted
    timing.jsonl    seconds, tokens per second, bytes allocated: numbers that differ from run to run

A line is written whole, with its newline, and flushed. After a crash the last line may lack its newline; such a line
is not read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ..errors import SparseRLError, nearest, shown
from ..files import append_line, line_of, read_lines, write_text

TRACKERS = ("tensorboard", "trackio", "wandb")


class Log:
    def __init__(self, folder: Path, trackers: list[str], project: str, config: Mapping):
        self.folder = folder
        self.files = {name: folder / f"{name}.jsonl" for name in ("metrics", "timing")}
        self.trackers = make_trackers(trackers, project, folder, config)

    def write(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None:
        for path, values in zip(self.files.values(), (metrics, timing)):
            append_line(path, {"step": step, **values})
        if self.trackers:
            self.trackers.log({**metrics, **timing}, step=step)

    def cut(self, step: int) -> None:
        """Remove the lines after a step; a resumed run writes them again."""
        for path in self.files.values():
            lines = read_lines(path)
            if not all(isinstance(line.get("step"), int) for line in lines):
                raise SparseRLError(
                    f"{path} has a line whose `step` is not a whole number; remove the line, then continue."
                )
            for name, value in (pair for line in lines for pair in line.items()):
                if not isinstance(value, int | float | None):
                    raise SparseRLError(
                        f"{path} has a line with {shown(name, 80)}: {shown(value, 80)}, which is not a number; "
                        "remove the line, then continue."
                    )
            kept = [line for line in lines if line["step"] <= step]
            write_text(path, "".join(line_of(values) for values in kept))

    def close(self) -> None:
        if self.trackers:
            self.trackers.end_training()


class NoLog(Log):
    """The log of a process other than the first, which writes nothing."""

    def __init__(self): ...

    def write(self, step: int, metrics: Mapping[str, float], timing: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def make_trackers(names: list[str], project: str, folder: Path, config: Mapping):
    """An Accelerator that logs to these trackers; None if there are none."""
    if not names:
        return None
    for name in names:
        if name not in TRACKERS:
            raise SparseRLError(f"run.trackers names {name!r}; {nearest(name, TRACKERS)}")
    from accelerate import Accelerator

    try:
        accelerator = Accelerator(log_with=[*names], project_dir=folder)
        flat = {
            f"{section}.{k}": v if isinstance(v, (int, float, str, bool)) else str(v)
            for section, c in config.items()
            for k, v in c.items()
        }
        accelerator.init_trackers(project, config=flat)
    except (ImportError, ValueError) as error:
        raise SparseRLError(
            f"the run.trackers {names} cannot be used ({error}); install them, or omit them."
        ) from error
    missing = set(names) - {tracker.name for tracker in accelerator.trackers}
    if missing:
        raise SparseRLError(
            f"run.trackers names {sorted(missing)[0]}, which is not installed; pip install {sorted(missing)[0]}."
        )
    return accelerator


class Clock:
    """Measures seconds by stage, and calls `announce` with the name of each stage as it begins."""

    def __init__(self, announce: Callable[[str], None] = lambda name: None):
        self.announce = announce
        self.seconds: dict[str, float] = {}
        self.start = time.perf_counter()

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.announce(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start

    def timing(self) -> dict[str, float]:
        return {f"time/{name}": seconds for name, seconds in self.seconds.items()} | {
            "time/step": time.perf_counter() - self.start
        }


def average(updates: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the optimizer steps that have it; counts are summed, and present even if 0."""
    names = list(dict.fromkeys(name for update in updates for name in update))
    counts = {
        name: sum(update.get(name, 0.0) for update in updates)
        for name in ("update/empty/count", "update/skipped/count")
    }
    values = {name: [update[name] for update in updates if name in update] for name in names if name not in counts}
    return {name: sum(found) / len(found) for name, found in values.items()} | counts
