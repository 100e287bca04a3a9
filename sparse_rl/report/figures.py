"""A report without a page: the main figures as one picture, or a summary in Markdown for a README or a tracker."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..errors import SparseRLError
from ..planning.memory import size
from .bins import binned, points_for
from .curves import Curve, is_evaluation
from .palette import colours
from .read import Run, bounded
from .recipe import command, differences
from .samplers import sentence
from .trend import differ, rewards_say_more
from .verdict import verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DENSE = "cache/bytes/dense"  # bytes that dense rows would take: not a metric, but computed from two
LINES = {  # panel -> its curves and their styles
    "reward": {"reward/mean": "-"},
    "held-out accuracy (dashed: small cache)": {"eval/dense/accuracy": "-", "eval/sparse/accuracy": "--"},
    "rejected trajectories": {"reject/trajectories/frac": "-"},
    "xi (shaded: 5th to 95th percentile)": {"gap/xi/p50": "-"},
    "alpha p05 (dotted: 0.86)": {"gap/alpha/p05": "-"},
    "entropy, nats": {"old/entropy/mean": "-"},
    "response length, tokens": {"rollout/length/mean": "-"},
    "KV bytes (dashed: dense)": {"cache/bytes/allocated": "-", DENSE: "--"},
    "tokens per second": {"rollout/tokens_per_s": "-"},
}
HELD_OUT_REWARD = {"held-out reward (dashed: small cache)": {"eval/dense/reward": "-", "eval/sparse/reward": "--"}}
XI, ALPHA = "xi (shaded: 5th to 95th percentile)", "alpha p05 (dotted: 0.86)"
STAGES = ("rollout", "grade", "score", "diagnose", "students", "update", "scorer")
COLUMNS = {  # heading -> its curve, and the format of its numbers
    "reward": ("reward/mean", "{:.3f}"),
    "dense accuracy": ("eval/dense/accuracy", "{:.3f}"),
    "sparse accuracy": ("eval/sparse/accuracy", "{:.3f}"),
    "rejected": ("reject/trajectories/frac", "{:.1%}"),
    "alpha p05": ("gap/alpha/p05", "{:.3f}"),
    "KV bytes saved": ("cache/bytes_saved/frac", "{:.1%}"),
    "tokens/s": ("rollout/tokens_per_s", "{:,.0f}"),
}
REWARD_COLUMNS = {  # heading -> curve, format, and the curve that it repeats if rewards say no more than accuracy
    "share right": ("reward/right/frac", "{:.3f}", "reward/mean"),
    "dense reward": ("eval/dense/reward", "{:.3f}", "eval/dense/accuracy"),
    "sparse reward": ("eval/sparse/reward", "{:.3f}", "eval/sparse/accuracy"),
}
WITH_BEST = ("reward", "dense accuracy", "sparse accuracy", *REWARD_COLUMNS)


def dense_bytes(run: Run) -> Curve | None:
    """Bytes that dense rows would have taken: allocated / (1 - saved)."""
    taken, saved = run.curves.get("cache/bytes/allocated"), run.curves.get("cache/bytes_saved/frac")
    if taken is None or saved is None or len(taken.step) != len(saved.step):
        return None
    return Curve(taken.step, taken.value / np.where(saved.value < 1, 1 - saved.value, np.nan))


# ---------- PNG


def png(runs: Sequence[Run]) -> bytes:
    """The main figures, with all runs in each."""
    try:
        import matplotlib
    except ImportError as error:
        raise SparseRLError("pictures need matplotlib; pip install 'sparse-rl[plot]', or use --format md.") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    figure, axes = pyplot.subplots(3, 4, figsize=(17, 10), layout="constrained")
    most, tints = points_for(sum(len(run.curves) for run in runs)), colours([run.arm for run in runs])
    shown = {**LINES, **(HELD_OUT_REWARD if any(rewards_say_more(run.curves) for run in runs) else {})}
    for axis, (title, lines) in zip(axes.flat, shown.items()):
        axis.set_title(title, fontsize=10)
        axis.grid(alpha=0.3)
        for number, run in enumerate(runs):
            known = run.curves if (dense := dense_bytes(run)) is None else {**run.curves, DENSE: dense}
            for name, style in lines.items():
                if name in known:
                    draw(axis, name, known[name], most, tints[number], style)
            if title == XI:
                shade(axis, run, most, tints[number])
        if title == XI:  # in the shadow view it is 1 but for rounding, which is not worth an axis
            (low, high), middle = axis.get_ylim(), sum(axis.get_ylim()) / 2
            axis.set_ylim(min(low, middle - 0.02), max(high, middle + 0.02))
        if title == ALPHA:
            axis.axhline(0.86, color="0.4", linestyle=":")
        if DENSE in lines:
            axis.yaxis.set_major_formatter(lambda value, _: size(value))
            axis.set_ylim(bottom=0)
        axis.set_xlabel("step")
        if not any(name in run.curves for run in runs for name in lines):
            axis.text(0.5, 0.5, "not in these runs", ha="center", va="center", transform=axis.transAxes, color="0.4")
    split_of_time(axes.flat[len(shown)], runs)
    for axis in axes.flat[len(shown) + 1 :]:
        axis.axis("off")
    handles = [Line2D([], [], color=tint) for tint in tints]
    names = axes.flat[len(shown) + 1].legend(
        handles,
        [label(run) for run in runs],
        frameon=False,
        fontsize=9 if len(runs) <= 12 else 5,
        ncols=1 + (len(runs) > 24),
        loc="upper left",
    )
    names.set_in_layout(False)  # so that a long list takes no room from the curves
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=100)
    pyplot.close(figure)
    return file.getvalue()


def draw(axis: Axes, name: str, curve: Curve, most: int, color: str, style: str) -> None:
    """Draw a curve, with its extremes shaded; gaps stay open."""
    points = binned(curve, most, regular=not is_evaluation(name))
    mean = numbers(points["mean"])
    few = len(mean) < 15
    axis.plot(points["step"], mean, style, color=color, marker="o" if few else None, markersize=3, linewidth=1.2)
    if "low" in points:
        low, high = numbers(points["low"]), numbers(points["high"])
        axis.fill_between(points["step"], low, high, color=color, alpha=0.15, linewidth=0)


def shade(axis: Axes, run: Run, most: int, color: str) -> None:
    """Shade from the 5th to the 95th percentile of xi."""
    if "gap/xi/p05" in run.curves and "gap/xi/p95" in run.curves:
        low, high = (binned(run.curves[f"gap/xi/{name}"], most) for name in ("p05", "p95"))
        lowest, highest = low.get("low", low["mean"]), high.get("high", high["mean"])
        axis.fill_between(low["step"], numbers(lowest), numbers(highest), color=color, alpha=0.2, linewidth=0)


def split_of_time(axis: Axes, runs: Sequence[Run]) -> None:
    """Draw the mean seconds of a step by stage, one bar per run."""
    axis.set_title("seconds of a step", fontsize=10)
    left = np.zeros(len(runs))
    for number, stage in enumerate(STAGES):
        found = [run.curves[f"time/{stage}"].finite if f"time/{stage}" in run.curves else np.zeros(0) for run in runs]
        seconds = np.array([values.mean() if len(values) else 0.0 for values in found])
        if seconds.any():
            axis.barh(range(len(runs)), seconds, left=left, color=str(0.15 + 0.75 * number / len(STAGES)), label=stage)
            left += seconds
    axis.set_yticks(range(len(runs)), [label(run) for run in runs], fontsize=8)
    axis.invert_yaxis()
    if left.any():
        axis.legend(frameon=False, fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.08))


def numbers(values: Sequence[float | None]) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def label(run: Run) -> str:
    """A run's name, or the end of a long one, as text that matplotlib does not interpret."""
    name = visible(run.name).replace("$", r"\$")
    return " " + (name if len(name) <= 40 else "..." + name[-37:])  # a name that begins with _ would be hidden


# ---------- Markdown


def markdown(runs: Sequence[Run], notes: Sequence[str] = ()) -> str:
    """A table of runs, their verdicts, the differences of their recipes, and the commands that run them again."""
    parts = ["# Report", *([bullets([escaped(note) for note in bounded(notes)])] if notes else []), table_of_runs(runs)]
    for run in runs:
        said = [
            f"**{s['level']}**: {escaped(s['text'])} ({escaped(s['figure'])})" for s in verdict(run.curves, run.aim)
        ]
        said += [escaped(sentence(run.samplers))] if run.samplers else []
        said += [f"note: {escaped(note)}" for note in bounded(run.notes)]
        parts += [f"## {escaped(run.name)}", bullets(said or ["no metrics yet"])]
    if len(runs) > 1:
        rows = [
            [escaped(row["key"]), *(escaped("" if v is None else str(v)) for v in row["values"])]
            for row in differences([run.recipe for run in runs])
        ]
        parts += [
            "## Recipes",
            table(["key", *(escaped(run.name) for run in runs)], rows) if rows else "The recipes are the same.",
        ]
    commands = [command(run.recipe, run.complete, run.name) for run in runs if run.recipe]
    if commands:
        text = "\n".join(visible(line, keep="\n") for line in commands)
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
        parts += ["## Commands", f"{fence}sh\n{text}\n{fence}"]
    return "\n\n".join(parts) + "\n"


def table_of_runs(runs: Sequence[Run]) -> str:
    """The last value of each column, and of some the best in brackets."""
    rows, columns = [], dict(COLUMNS)
    for heading, (name, form, other) in REWARD_COLUMNS.items():
        if any(differ(run.curves, name, other) for run in runs):
            columns[heading] = (name, form)
    for run in runs:
        clock = run.clock()
        cells = [
            escaped(run.name),
            escaped(run.method),
            f"{run.steps:,}",
            f"{clock.value[-1]:,.0f} s" if len(clock.value) else "",
        ]
        for heading, (name, form) in columns.items():
            values = run.curves[name].finite.tolist() if name in run.curves else []
            best = f" ({form.format(max(values))})" if heading in WITH_BEST and len(values) else ""
            cells.append(form.format(values[-1]) + best if len(values) else "")
        rows.append(cells)
    headings = [f"{heading}, last (best)" if heading in WITH_BEST else heading for heading in columns]
    return table(["run", "method", "steps", "time", *headings], rows)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def escaped(text: str) -> str:
    """Text, on one line, that Markdown shows as it is."""
    return re.sub(r"([\\`*_{}\[\]<>#|~$!&])", r"\\\1", visible(text)).strip()


def visible(text: str, keep: str = "") -> str:
    """Text with invisible characters (control, bidi, lone surrogates) replaced, and white space as spaces."""
    return "".join(c if c in keep or c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)
