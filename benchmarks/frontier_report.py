"""The points of frontier.py as Markdown tables and a picture. A row is one evaluation (`points` there)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

# compressors without training, on the teacher; they keep the prompt
FREE = ("random", "window", "tova", "snapkv", "rkv")
LEARNED = ("joint", "late", "RL")  # how the curves of students begin


def newest(rows: list[dict]) -> list[dict]:
    """One row of every setting and seed, seed by seed within a setting."""
    latest = {(row["curve"], row["label"], row["seed"]): row for row in rows}
    return sorted(latest.values(), key=lambda row: row["seed"])


def area(points: list[tuple[float, float]], low: float, high: float) -> float:
    """The mean, over cache sizes from `low` to `high`, of the best accuracy with at most that many entries.

    The curve has steps, not lines between points. points: (entries, accuracy)
    """
    inside = sorted({low, high, *(x for x, _ in points if low < x < high)})
    best = [max((y for x, y in points if x <= left), default=0.0) for left in inside[:-1]]
    return sum(y * (right - left) for y, left, right in zip(best, inside, inside[1:])) / (high - low)


def curves(rows: list[dict]) -> dict[str, dict[str, list[dict]]]:
    """curve -> label -> the rows of all seeds."""
    found: dict[str, dict[str, list[dict]]] = {row["curve"]: {} for row in rows}
    for row in newest(rows):
        found.setdefault(row["curve"], {}).setdefault(row["label"], []).append(row)
    return found


def table(rows: list[dict]) -> str:
    low = min(row["entries"] for row in rows)
    high = max(row["entries"] for row in ([r for r in rows if r["curve"] == "teacher"] or rows))
    lines = ["| | setting: mean entries, accuracy (each seed) | area under the curve (each seed) |", "|---|---|---|"]
    for curve, labels in curves(rows).items():
        ordered = sorted(labels.items(), key=lambda item: statistics.mean(r["entries"] for r in item[1]))
        shown = [shown_point(label, group) for label, group in ordered]
        by_seed: dict[int, list[tuple[float, float]]] = {}
        for row in (row for row in newest(rows) if row["curve"] == curve):
            by_seed.setdefault(row["seed"], []).append((row["entries"], row["accuracy"]))
        areas = [area(found, low, high) for _, found in sorted(by_seed.items())]
        many = f" ({', '.join(f'{a:.2f}' for a in areas)})" if len(areas) > 1 else ""
        lines.append(f"| {curve} | {'; '.join(shown)} | {statistics.mean(areas):.2f}{many} |")
    return "\n".join([*lines, "", f"Areas from {low:.0f} to {high:.0f} entries."])


def at_equal_entries(rows: list[dict]) -> str:
    """What else is possible with no more entries than each student takes, means over seeds, and the share of the
    teacher's best accuracy that the student keeps (65 to 90 % is the published band).
    """
    means = {
        (curve, label): [statistics.mean(row[key] for row in group) for key in ("entries", "accuracy")]
        for curve, labels in curves(rows).items()
        for label, group in labels.items()
    }
    best = max((accuracy for (curve, _), (_, accuracy) in means.items() if curve == "teacher"), default=0.0)

    def rival(curves: Sequence[str], most: float) -> str:
        found = [
            (accuracy, curve, label)
            for (curve, label), (entries, accuracy) in means.items()
            if curve in curves and entries <= most
        ]
        return f"{max(found)[0]:.2f} ({max(found)[1]} {max(found)[2]})" if found else "none"

    heads = ["student", "entries", "accuracy", "of the teacher's", "teacher, cut", "best without training"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for (curve, label), (entries, accuracy) in sorted(means.items(), key=lambda item: item[1][0]):
        if curve.startswith(LEARNED):
            share = f"{accuracy / best:.0%}" if best else ""
            cells = [f"{curve}, {label}", f"{entries:.0f}", f"{accuracy:.2f}", share]
            lines.append(f"| {' | '.join([*cells, rival(['teacher'], entries), rival(FREE, entries)])} |")
    return "\n".join(lines)


def learned_by_rl(rows: list[dict]) -> str:
    """What RL on folded rollouts did, each seed: accuracy of its first evaluation, and at the end."""
    lines = ["| RL | steps | before (each seed) | after (each seed) |", "|---|---|---|---|"]
    for curve, labels in curves([row for row in rows if "before" in row]).items():
        for label, group in labels.items():
            cells = [
                f"{statistics.mean(r[key] for r in group):.2f} ({', '.join(f'{r[key]:.2f}' for r in group)})"
                for key in ("before", "accuracy")
            ]
            steps = ", ".join(str(row["steps"]) for row in group)
            lines.append(f"| {curve.removeprefix('RL of ')}, {label} | {steps} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) if len(lines) > 2 else ""


def shown_point(label: str, group: list[dict]) -> str:
    """The mean entries and accuracy of one setting, and the accuracy of each seed."""
    entries, accuracies = statistics.mean(r["entries"] for r in group), [r["accuracy"] for r in group]
    each = f" ({', '.join(f'{accuracy:.2f}' for accuracy in accuracies)})" if len(group) > 1 else ""
    return f"{label}: {entries:.0f}, {statistics.mean(accuracies):.2f}{each}"


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8.5, 4.4), constrained_layout=True)
    tints = pyplot.get_cmap("tab20").colors
    others = [curve for curve in curves(rows) if curve != "teacher"]
    colors = {"teacher": "black", **{curve: tints[i % len(tints)] for i, curve in enumerate(others)}}
    for curve, labels in curves(rows).items():
        means = sorted(
            (statistics.mean(r["entries"] for r in g), statistics.mean(r["accuracy"] for r in g))
            for g in labels.values()
        )
        learned = curve.startswith(LEARNED)
        axis.plot(
            *zip(*means),
            marker="o" if learned else "x",
            linewidth=2 if learned else 1,
            color=colors[curve],
            label=curve,
        )
        for row in (row for row in rows if row["curve"] == curve):
            axis.plot(row["entries"], row["accuracy"], marker=".", markersize=3, color=colors[curve], linestyle="")
    axis.set(xlabel="mean cache entries of a row", ylabel="accuracy", ylim=(-0.02, 1.0))
    axis.grid(alpha=0.3)
    figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=110)
    print(path)
