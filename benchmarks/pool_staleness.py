"""What does staleness cost? `rollout.ahead` 1 and 4 against the synchronous loop, on sums (docs/results/pool.md).

    OMP_NUM_THREADS=1 python benchmarks/pool_staleness.py --out runs/staleness     # repeat it to continue
    python benchmarks/pool_staleness.py --out runs/staleness --table --plot docs/pool-staleness.png

Every run is `recipes/tiny-sums.yaml` for 60 steps. Ahead of the learner, step n is sampled from the weights after
n - ahead steps, whoever samples it; so a pool whose one member computes in turn, in this process, measures what a
cluster would learn, and --check compares one such run with samplers of a real Ray pool, to the byte.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

import sparse_rl.train.pooled as pooled
from sparse_rl.config import load_recipe
from sparse_rl.files import append_line, read_lines
from sparse_rl.pool.pool import Answered, Joined
from sparse_rl.pool.worker import About, Answer
from sparse_rl.train.run import train

RECIPE = Path(__file__).parent.parent / "recipes" / "tiny-sums.yaml"
AHEAD = (0, 1, 4)
METHODS = ("sparse-rl", "shadow")
CURVES = ("reward/mean", "update/drift/mean", "update/clip/frac", "gap/abs/mean", "reject/trajectories/frac")
CURVES += ("eval/dense/accuracy", "eval/sparse/accuracy")


class InTurn:
    """A transport whose one member computes within `events`."""

    def __init__(self, address: str, make_hands, *_: Any):
        self.make_hands, self.weights, self.news = make_hands, {}, []
        self.hands: Any = None
        self.work: Sequence[Any] = ()

    def room(self) -> int:
        return 1

    def start(self, member: int) -> None:
        self.hands = self.make_hands()
        self.news.append(Joined(member, About(self.hands.rows, "here", os.getpid())))

    def hand(self, member: int, work: Sequence[Any]) -> None:
        self.member, self.work = member, work

    def events(self, seconds: float) -> list[Any]:
        found, self.news = self.news, []
        work, self.work = self.work, ()
        if not work:
            return found
        done: list[tuple[Any, bytes]] = []
        weights = self.weights[work[0][1].version]
        self.hands.complete(work, lambda: weights, lambda place, payload: done.append((place, payload)))
        return [*found, Answered(self.member, Answer(done, beats=self.hands.beats()))]

    def publish(self, version: int, parts: Any, oldest: int) -> int:
        self.weights = {known: kept for known, kept in self.weights.items() if known >= oldest}
        self.weights[version] = [{name: array.copy() for name, array in part.items()} for part in parts]
        return 0

    def close(self) -> None:
        self.hands = None


def recipe_of(seed: int, method: str, ahead: int, steps: int, **more: Any):
    keys = {"run.seed": seed, "run.steps": steps, "run.checkpoint_every": steps, "run.samples": 0, "run.keep": 1}
    keys |= {"eval.every": max(1, steps // 12), "eval.prompts": 128, "eval.samples": 2, "learn.method": method}
    keys |= {"rollout.ahead": ahead} | ({"rollout.pool": "ray"} if ahead else {}) | more
    return load_recipe(RECIPE, [(key, str(value)) for key, value in keys.items()])


def one_run(folder: Path, seed: int, method: str, ahead: int, steps: int) -> dict:
    shutil.rmtree(folder, ignore_errors=True)
    start = time.perf_counter()
    train(recipe_of(seed, method, ahead, steps), folder, show=False)
    lines = read_lines(folder / "metrics.jsonl")
    curves = {key: [round(line[key], 5) for line in lines if line.get(key) is not None] for key in CURVES}
    shutil.rmtree(folder)
    about = {"seed": seed, "method": method, "ahead": ahead, "steps": steps}
    return about | {"seconds": time.perf_counter() - start, "curves": curves}


def last(row: dict, name: str) -> float:
    """The mean of a run's last four evaluations."""
    return statistics.mean(row["curves"][f"eval/{name}/accuracy"][-4:])


def between(values: Sequence[float]) -> str:
    """Mean and 95 % t interval over seeds."""
    times = {2: 12.71, 3: 4.30, 4: 3.18}.get(len(values), math.nan)
    wide = times * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return f"{statistics.mean(values):.3f} ± {wide:.3f}"


def table(rows: list[dict]) -> str:
    heads = ["method", "ahead", "seeds", "dense, last four evaluations", "sparse, last four evaluations"]
    heads += ["sparse minus synchronous, by seed", "drift, absolute mean of a step", "clipped", "mean absolute gap"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for method in METHODS:
        by_seed = {row["seed"]: row for row in rows if (row["method"], row["ahead"]) == (method, 0)}
        for ahead in AHEAD:
            own = sorted((r for r in rows if (r["method"], r["ahead"]) == (method, ahead)), key=lambda r: r["seed"])
            if not own:
                continue
            pairs = [last(r, "sparse") - last(by_seed[r["seed"]], "sparse") for r in own if r["seed"] in by_seed]
            paired = ", ".join(f"{value:+.3f}" for value in pairs) if ahead else ""
            means = [statistics.mean(abs(value) for r in own for value in r["curves"][key]) for key in CURVES[1:4]]
            cells = [method, ahead, len(own), *(between([last(r, n) for r in own]) for n in ("dense", "sparse"))]
            cells += [paired, f"{means[0]:.4f}", f"{means[1]:.2%}", f"{means[2]:.3f}"]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(len(METHODS), 2, figsize=(10, 6.4), constrained_layout=True, sharex=True)
    for line, method in zip(axes, METHODS):
        for axis, cache in zip(line, ("dense", "sparse")):
            for ahead, colour in zip(AHEAD, ("tab:blue", "tab:orange", "tab:red")):
                own = [r for r in rows if (r["method"], r["ahead"]) == (method, ahead)]
                curves = torch.tensor([r["curves"][f"eval/{cache}/accuracy"] for r in own])
                if not len(curves):
                    continue
                steps = [i * (own[0]["steps"] // 12) for i in range(curves.shape[1])]
                axis.plot(steps, curves.mean(0), color=colour, label=f"ahead {ahead}" if ahead else "synchronous")
                axis.fill_between(steps, curves.amin(0), curves.amax(0), color=colour, alpha=0.12)
            axis.set(title=f"{method}, {cache} cache", ylabel="held-out accuracy")
            axis.grid(alpha=0.3)
    axes[0][0].legend(frameon=False)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.savefig(path, dpi=110)


def check(out: Path, ahead: int, steps: int) -> None:
    """A run of this script's transport against one whose samplers are processes of Ray."""
    pooled_ray, found = pooled.RayTransport, []
    for name, transport in (("in-turn", InTurn), ("ray", pooled_ray)):
        shutil.rmtree(out / name, ignore_errors=True)
        pooled.RayTransport = transport  # pyright: ignore[reportAttributeAccessIssue]
        more = {"rollout.samplers": 2} if name == "ray" else {}
        train(recipe_of(0, "sparse-rl", ahead, steps, **more), out / name, show=False)
        found.append((out / name / "metrics.jsonl").read_bytes())
    print(f"ahead {ahead}, {steps} steps:", "equal to the byte" if found[0] == found[1] else "DIFFERENT")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--check", type=int, metavar="AHEAD")
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    if given.check:
        return check(given.out, given.check, 6)
    results = given.out / "results.jsonl"
    pooled.RayTransport = InTurn  # pyright: ignore[reportAttributeAccessIssue]
    done = {(row["seed"], row["method"], row["ahead"]) for row in read_lines(results)}
    wanted = [(seed, method, ahead) for seed in range(given.seeds) for method in METHODS for ahead in AHEAD]
    for job in [] if given.table else [job for job in wanted if job not in done]:
        row = one_run(given.out / "run", *job, given.steps)
        append_line(results, row)
        print(f"{job}: {row['seconds']:.0f} s", file=sys.stderr, flush=True)
    rows = read_lines(results)
    if given.plot:
        plot(rows, given.plot)
    print(table(rows))


if __name__ == "__main__":
    main()
