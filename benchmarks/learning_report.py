"""The results of learning_gpu.py as a Markdown table and a picture. A row is what one run wrote (`read_run` there)."""

from __future__ import annotations

import itertools
import math
import statistics
from pathlib import Path

from sparse_rl.report.palette import colours

DENSE = "dense"  # rollouts on a dense cache: a method and a setting


def values(row: dict, curve: str) -> list[float]:
    return [value for _, value in row["curves"][curve]]


def final(row: dict, view: str) -> float:
    """The mean of a run's last two evaluations, without the first if there are others; NaN if there is none."""
    found = values(row, f"eval/{view}/accuracy")
    found = found[1:][-2:] or found
    return statistics.mean(found) if found else math.nan


def spread(numbers: list[float]) -> str:
    """The mean, and every run's value."""
    numbers = [n for n in numbers if not math.isnan(n)]
    return f"{statistics.mean(numbers):.2f} ({', '.join(f'{n:.2f}' for n in numbers)})" if numbers else ""


def mean_of(rows: list[dict], curve: str, form: str) -> str:
    means = [statistics.mean(values(row, curve)) for row in rows if values(row, curve)]
    return format(statistics.mean(means), form) if means else ""


def grouped(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """By (setting, method), in the order of settings and methods."""
    names = dict.fromkeys((row["setting"], row["method"]) for row in rows)
    order = sorted(names, key=lambda name: (name[0] != DENSE, [*dict.fromkeys(s for s, _ in names)].index(name[0])))
    return {
        name: sorted((r for r in rows if (r["setting"], r["method"]) == name), key=lambda r: r["seed"])
        for name in order
    }


def table(rows: list[dict]) -> str:
    heads = ["cache", "method", "steps", "dense inference", "sparse inference", "last reward", "rejected", "alpha p05"]
    heads += ["length", "KV tokens saved", "KV bytes saved"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for view in ("dense", "sparse"):
        for setting in dict.fromkeys(row["setting"] for row in rows):
            found = {
                r["seed"]: v[0] for r in rows if r["setting"] == setting and (v := values(r, f"eval/{view}/accuracy"))
            }
            if found and (view == "sparse" or setting == DENSE):
                shown = {"dense": "", "sparse": "", view: spread(list(found.values()))}  # the same for every method
                lines.append(f"| {setting} | at the start | 0 | {shown['dense']} | {shown['sparse']} |" + " |" * 6)
    for (setting, method), group in grouped(rows).items():
        sparse = spread([final(r, "sparse") for r in group])
        if method == DENSE:
            names = dict.fromkeys(name for r in group for name in r["under"])
            sparse = "; ".join(
                f"{name}: {spread([r['under'][name] for r in group if name in r['under']])}" for name in names
            )
        last = spread([statistics.mean(values(r, "reward/mean")[-10:]) for r in group if values(r, "reward/mean")])
        steps = ", ".join(str(r["steps"]) for r in group)
        lines.append(
            f"| {setting} | {method} | {steps} | {spread([final(r, 'dense') for r in group])} | {sparse} | {last} | "
            f"{mean_of(group, 'reject/trajectories/frac', '.0%')} | {mean_of(group, 'gap/alpha/p05', '.2f')} | "
            f"{mean_of(group, 'rollout/length/mean', '.0f')} | {mean_of(group, 'cache/tokens_saved/frac', '.0%')} | "
            f"{mean_of(group, 'cache/bytes_saved/frac', '.0%')} |"
        )
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    """A row of panels per cache, each with the dense rollouts; a colour per method; a thick line for the mean of the
    seeds, a thin one for each seed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = {
        "reward/mean": "reward of rollouts",
        "reject/trajectories/frac": "trajectories rejected",
        "gap/alpha/p05": "alpha p05",
        "eval/dense/accuracy": "accuracy, dense inference",
        "eval/sparse/accuracy": "accuracy, sparse inference",
    }
    groups = grouped(rows)
    caches = [name for name in dict.fromkeys(setting for setting, _ in groups) if name != DENSE] or [DENSE]
    methods = list(dict.fromkeys(method for _, method in groups))
    tints = dict(zip(methods, colours(methods)))
    size = (3.3 * len(panels), 2.6 * len(caches) + 0.5)
    figure, axes = pyplot.subplots(
        len(caches), len(panels), figsize=size, squeeze=False, sharex=True, constrained_layout=True
    )
    for (row, cache), (column, curve) in itertools.product(enumerate(caches), enumerate(panels)):
        axis = axes[row][column]
        for (setting, method), group in groups.items():
            if setting in (DENSE, cache):
                draw(axis, group, curve, tints[method], method)
        axis.set(
            ylim=(-0.02, 1.02), title=panels[curve] if row == 0 else "", xlabel="step" if row == len(caches) - 1 else ""
        )
        axis.set_ylabel(cache if column == 0 else "")
        axis.grid(alpha=0.3)
    shown = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(tints), frameon=False)
    figure.savefig(path, dpi=90)
    print(path)


def draw(axis, group: list[dict], curve: str, colour: str, label: str) -> None:
    lines = [dict(map(tuple, row["curves"][curve])) for row in group]
    for line in lines if len(lines) > 1 else ():
        axis.plot(list(line), list(line.values()), linewidth=0.5, alpha=0.5, color=colour)
    if steps := sorted(set.intersection(*map(set, lines))):  # steps that every seed has
        axis.plot(
            steps, [statistics.mean(line[s] for line in lines) for s in steps], linewidth=1.8, color=colour, label=label
        )
