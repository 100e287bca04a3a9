"""What came out of smollm2.py: a table in Markdown, and pictures. Reads what was written, in whatever state it is."""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparse_rl.report.palette import colours

DENSE = "dense"  # rollouts on a dense cache

PANELS = {
    "reward/mean": "reward of rollouts",
    "eval/dense/accuracy": "held-out, dense cache",
    "eval/sparse/accuracy": "held-out, own cache",
    "reject/trajectories/frac": "trajectories rejected",
    "gap/k3/mean": "KL(sampler || old)",
    "gap/abs/mean": "mean of abs(gap)",
    "gap/alpha/p05": "alpha p05",
    "update/clip/frac": "tokens clipped",
    "old/entropy/mean": "entropy",
    "update/grad_norm": "gradient norm",
    "rollout/length/mean": "response length",
    "rollout/loops/frac": "responses that end in loops",
}


@dataclass(frozen=True)
class Arm:
    """A run of a block. budget None: on a dense cache; compressor None: the block's own."""

    method: str
    budget: int | None
    compressor: str | None = None

    @property
    def name(self) -> str:
        parts = [part for part in (self.compressor, self.method, self.budget) if part is not None]
        return "-".join(map(str, parts))

    @property
    def title(self) -> str:
        return self.method if self.compressor is None else f"{self.compressor} {self.method}"


def cache_name(budget: int | None, compressor: str | None = None) -> str:
    """As evaluations on it are called: dense, 80, and snapkv-80 where the compressor is not the block's own."""
    if budget is None:
        return DENSE
    return f"{budget}" if compressor is None else f"{compressor}-{budget}"


def caches_of(arms: Sequence[Arm], budgets: Sequence[int]) -> list[str]:
    """The dense cache, then the budgets under every compressor of a block."""
    compressors = dict.fromkeys([None, *(arm.compressor for arm in arms)])
    return [DENSE, *(cache_name(budget, compressor) for compressor in compressors for budget in budgets)]


def read_lines(path: Path) -> list[dict]:
    """The whole lines of a JSONL file that may still be written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1] if line.strip()]


def newest_checkpoint(run: Path) -> tuple[int, Path | None]:
    """(step, folder); (0, None) where there is none"""
    found = [
        (int(p.name.removeprefix("step-")), p)
        for p in (run / "checkpoints").glob("step-*")
        if p.name.removeprefix("step-").isdigit()
    ]
    return max(found, default=(0, None))


def curve(run: Path, name: str) -> list[tuple[int, float]]:
    lines = [line for file in ("metrics", "timing") for line in read_lines(run / f"{file}.jsonl")]
    return [(line["step"], line[name]) for line in lines if line.get(name) is not None]


def mean_of(run: Path, name: str, last: int = 0) -> float | None:
    found = [value for _, value in curve(run, name)][-last:]
    return statistics.fmean(found) if found else None


def shown(value: float | None, form: str) -> str:
    return "" if value is None or math.isnan(value) else format(value, form)


def probed(folder: Path, budgets: Sequence[int | None]) -> str:
    """What one step at every budget told."""
    heads = {
        "accuracy": ("reward/mean", ".1%"),
        "rejected": ("reject/trajectories/frac", ".1%"),
        "rejected of the right": ("reject/rewarded/frac", ".1%"),
        "alpha p05": ("gap/alpha/p05", ".3f"),
        "mean gap": ("gap/abs/mean", ".4f"),
        "length": ("rollout/length/mean", ".0f"),
        "cut": ("rollout/truncated/frac", ".1%"),
        "loops": ("rollout/loops/frac", ".1%"),
        "KV tokens saved": ("cache/tokens_saved/frac", ".0%"),
    }
    lines = [f"| budget | {' | '.join(heads)} |", "|" + "---|" * (1 + len(heads))]
    for budget in budgets:
        run = folder / f"{budget or DENSE}"
        cells = [shown(mean_of(run, name), form) for name, form in heads.values()]
        lines.append(f"| {budget or DENSE} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------ the table


def write_report(folder: Path, arms: Sequence[Arm], budgets: Sequence[int]) -> str:
    """table.md and curves-BUDGET.png in the block's folder; the table."""
    text = table(folder, arms, budgets)
    (folder / "table.md").write_text(text)
    for budget in budgets:
        here = [arm for arm in arms if arm.budget in (None, budget)]
        plot(folder, here, folder / f"curves-{budget}.png", f"{folder.name}, budget {budget}")
        headline(folder, here, budget, folder / f"headline-{budget}.png")
    return text


def table(folder: Path, arms: Sequence[Arm], budgets: Sequence[int]) -> str:
    """A row per model: accuracy with 95 % intervals under the caches it was evaluated on, and what its run was like."""
    caches = caches_of(arms, budgets)
    heads = ["trained with", "steps", *(f"on budget {cache}" if cache.isdigit() else f"on {cache}" for cache in caches)]
    heads += ["last reward", "rejected", "KL", "clipped", "entropy", "length", "loops", "KV tokens saved", "s/step"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    empty = [""] * (len(heads) - 2 - len(caches))
    lines.append(
        f"| {' | '.join(['warm start', '0', *(accuracy(folder, 'warm', cache) for cache in caches), *empty])} |"
    )
    for arm in arms:
        run = folder / "runs" / arm.name
        steps = max((step for step, _ in curve(run, "reward/mean")), default=0)
        cells = [
            shown(mean_of(run, "reward/mean", 10), ".3f"),
            shown(mean_of(run, "reject/trajectories/frac"), ".1%"),
            shown(mean_of(run, "gap/k3/mean"), ".4f"),
            shown(mean_of(run, "update/clip/frac"), ".2%"),
            shown(mean_of(run, "old/entropy/mean", 10), ".3f"),
            shown(mean_of(run, "rollout/length/mean", 10), ".0f"),
            shown(mean_of(run, "rollout/loops/frac", 10), ".1%"),
            shown(mean_of(run, "cache/tokens_saved/frac"), ".0%"),
            shown(mean_of(run, "time/step"), ".1f"),
        ]
        found = [accuracy(folder, arm.name, cache) for cache in caches]
        lines.append(f"| {' | '.join([label(arm), str(steps), *found, *cells])} |")
    paired = [line for cache in caches for line in differences(folder, arms, cache)]
    lines += [
        "",
        "Accuracy on held-out problems at temperature 1, 95 % intervals. Rejected, KL, clipped and tokens saved are",
    ]
    lines += ["means over the run; reward, entropy, length and loops over its last ten steps."]
    lines += asked_again(folder)
    if paired:
        lines += ["", "Differences on the same problems, with bootstrapped 95 % intervals:", "", *paired]
    lines += ["", "Gain over the warm start for the tokens that were sampled:", "", *gains(folder, arms, caches)]
    return "\n".join(lines) + "\n"


def asked_again(folder: Path) -> list[str]:
    """The warm start on the dense cache asked greedily and eight times, where it was."""
    found = []
    for what, name in (("greedy", "greedy"), ("avg8", "avg@8")):
        if text := accuracy(folder, "warm", what):
            found.append(f"{name} {text}")
    summary = folder / "evals" / "warm" / "avg8" / "summary.json"
    if summary.exists():
        found.append(f"pass@8 {json.loads(summary.read_text())['benches'][0]['pass_at']['8']:.1%}")
    return ["", f"The warm start on the dense cache: {', '.join(found)}."] if found else []


def label(arm: Arm) -> str:
    return f"{arm.method}, dense rollouts" if arm.budget is None else f"{arm.title}, budget {arm.budget}"


def accuracy(folder: Path, name: str, cache: str) -> str:
    """38.2 % (36.1 to 40.3)"""
    path = folder / "evals" / name / cache / "summary.json"
    if not path.exists():
        return ""
    found = json.loads(path.read_text())["benches"][0]
    return f"{found['accuracy']:.1%} ({found['low']:.1%} to {found['high']:.1%})"


def differences(folder: Path, arms: Sequence[Arm], cache: str) -> list[str]:
    """Every run against the one trained on a dense cache, evaluated on the same cache."""
    base = shares(folder / "evals" / DENSE / cache)
    lines = []
    for arm in arms:
        other = shares(folder / "evals" / arm.name / cache)
        both = sorted(base.keys() & other.keys())
        if arm.budget is not None and both:
            mean, low, high = bootstrap([other[i] - base[i] for i in both])
            lines.append(f"- on {cache}: {label(arm)} against dense-trained: {mean:+.1%} ({low:+.1%} to {high:+.1%})")
    return lines


def gains(folder: Path, arms: Sequence[Arm], caches: Sequence[str]) -> list[str]:
    """Sample efficiency: points over the warm start, whole and per million sampled tokens; an arm on its own caches."""
    heads = ["trained with", "million tokens sampled", "of them learned from"]
    heads += [head for cache in caches for head in (f"points on {cache}", "per million tokens")]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for arm in arms:
        sampled, learned = sampled_tokens(folder / "runs" / arm.name)
        cells = [label(arm), f"{sampled / 1e6:.2f}", f"{learned / 1e6:.2f}"]
        for cache in caches:
            start, end = (shares(folder / "evals" / name / cache) for name in ("warm", arm.name))
            both = sorted(start.keys() & end.keys())
            if not both or not sampled:
                cells += ["", ""]
                continue
            mean, low, high = (100 * value for value in bootstrap([end[i] - start[i] for i in both]))
            cells += [f"{mean:+.1f} ({low:+.1f} to {high:+.1f})", f"{mean / (sampled / 1e6):+.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def sampled_tokens(run: Path) -> tuple[float, float]:
    """(tokens sampled while training, those that rejection left)"""
    sampled = learned = 0.0
    for line in read_lines(run / "metrics.jsonl"):
        if "rollout/length/mean" in line:
            tokens = line["rollout/trajectories/count"] * line["rollout/length/mean"]
            sampled += tokens
            learned += tokens * (1 - line.get("reject/tokens/frac", 0.0))
    return sampled, learned


def shares(evaluation: Path) -> dict[int, float]:
    """Of every problem, the share of completions that are right. An archive has the outcomes without the texts."""
    found: dict[int, list[bool]] = {}
    for item in read_lines(evaluation / "items.jsonl") or read_lines(evaluation / "outcomes.jsonl"):
        found.setdefault(item["index"], []).append(item["reward"] >= 1)
    return {index: statistics.fmean(right) for index, right in found.items()}


def bootstrap(values: Sequence[float], draws: int = 1000) -> tuple[float, float, float]:
    """(mean, low, high): problems drawn with replacement"""
    generator = random.Random(0)
    means = sorted(statistics.fmean(generator.choices(values, k=len(values))) for _ in range(draws))
    return statistics.fmean(values), means[int(0.025 * draws)], means[int(0.975 * draws) - 1]


# ------------------------------------------------------------------------------------------ the picture


def plot(folder: Path, arms: Sequence[Arm], path: Path, title: str) -> None:
    """A panel per curve, a colour per run; faint as it is, strong the mean of nine steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tints = colours(["dense" if arm.budget is None else arm.title for arm in arms])
    figure, axes = pyplot.subplots(3, 4, figsize=(16, 9), sharex=True, constrained_layout=True)
    for axis, (name, heading) in zip(axes.flat, PANELS.items(), strict=True):
        for number, arm in enumerate(arms):
            points = curve(folder / "runs" / arm.name, name)
            if not points:
                continue
            steps, values = zip(*points)
            if name.startswith("eval/"):  # few points, drawn as they are
                axis.plot(steps, values, color=tints[number], linewidth=1.6, marker=".", label=arm.name)
                continue
            axis.plot(steps, values, color=tints[number], linewidth=0.5, alpha=0.35)
            axis.plot(steps, smooth(values), color=tints[number], linewidth=1.6, label=arm.name)
        axis.set(title=heading, xlabel="step")
        axis.grid(alpha=0.3)
    for name in ("gap/k3/mean", "gap/abs/mean"):
        axes.flat[list(PANELS).index(name)].set_yscale("symlog", linthresh=1e-4)
    lines = {text: line for axis in axes.flat for line, text in zip(*axis.get_legend_handles_labels())}
    if lines:
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines), frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def smooth(values: Sequence[float], width: int = 9) -> list[float]:
    """The mean of the values around each."""
    half = width // 2
    return [statistics.fmean(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def headline(folder: Path, arms: Sequence[Arm], budget: int, path: Path) -> None:
    """Two panels: reward of the rollouts during training; accuracy after it on both caches, with intervals."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    tints = colours(["dense" if arm.budget is None else arm.title for arm in arms])
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    for number, arm in enumerate(arms):
        points = curve(folder / "runs" / arm.name, "reward/mean")
        if points:
            steps, values = zip(*points)
            name = "dense rollouts" if arm.budget is None else arm.title
            left.plot(steps, smooth(values), color=tints[number], linewidth=1.8, label=name)
    left.set(title="reward of the rollouts", xlabel="step", ylim=(0, 1))
    left.legend(frameon=False, fontsize=8, ncols=2)
    names = ["warm", *(arm.name for arm in arms)]
    own = [cache_name(budget), *(cache_name(budget, arm.compressor) for arm in arms)]
    labels = ["warm start", *("dense rollouts" if arm.budget is None else arm.title for arm in arms)]
    for row, name in enumerate(names):
        colour = "black" if row == 0 else tints[row - 1]
        for cache, marker, shift in ((DENSE, "o", -0.12), (own[row], "s", 0.12)):
            summary = folder / "evals" / name / cache / "summary.json"
            if summary.exists():
                found = json.loads(summary.read_text())["benches"][0]
                centre = found["accuracy"]
                error = [[centre - found["low"]], [found["high"] - centre]]
                face = "white" if cache == DENSE else colour
                right.errorbar(
                    centre, row + shift, xerr=error, fmt=marker, color=colour, markerfacecolor=face, capsize=2
                )
    right.set(title="accuracy after training, 95 % intervals", xlim=(-0.02, 1), yticks=range(len(names)))
    right.set_yticklabels(labels)
    right.invert_yaxis()
    right.plot([], [], "o", color="0.3", markerfacecolor="white", label="on a dense cache")
    right.plot([], [], "s", color="0.3", label=f"on {budget} slots")
    right.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
