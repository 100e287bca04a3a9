"""Does a tiny model learn to call a tool on a compressed cache? The recipe `calculator` on a CPU, over seeds.

    python benchmarks/calculator_cpu.py --out runs/calculator-study --processes 4      # repeat it to continue
    python benchmarks/calculator_cpu.py --out runs/calculator-study --table

Every seed has a warm-up of its own (recipe calculator-warmup), whose model calls the tool in about half of its answers
and guesses in the others. Then it learns with rewards alone: on a dense cache, and on that of R-KV at two budgets, in
the dense view (sparse-rl) and in the shadow view. What counts is accuracy on 128 held-out problems, dense and on the
own cache of the arm, and the turns of a conversation: 3 if the tool is called for every step, 1 for a guess.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

from learning_cpu import interval, lazily

ARMS = {  # of keys of the recipe
    "dense": {"rollout.compressor": "dense", "rollout.compressor_options": "{}", "learn.method": "none"},
    **{
        f"rkv {budget}, {method}": {"rollout.budget": str(budget), "learn.method": method}
        for budget in (32, 22)
        for method in ("sparse-rl", "shadow")
    },
}
CURVES = (
    "reward/mean", "talk/turns/mean", "talk/given/mean", "talk/tool_errors/mean", "reject/trajectories/frac",
    "cache/tokens_saved/frac", "gap/abs/mean",
)  # fmt: skip
HEADS = (
    "arm", "seeds", "dense, first", "dense, last", "own cache, first", "own cache, last", "turns, first", "turns, last",
    "rejected", "KV tokens saved",
)  # fmt: skip


def warmed_up(out: Path, seed: int) -> Path:
    """The model of a seed's warm-up, which is made once."""
    from sparse_rl.config import load_recipe
    from sparse_rl.train.warmup import warmup

    folder = out / "models" / f"seed-{seed}"
    if not (folder / "config.json").is_file():
        recipe = load_recipe("calculator-warmup", [("run.seed", str(1 + seed)), ("task.seed", str(100 + seed))])
        warmup(recipe, folder, resume=folder.exists(), evaluate=False, show=False)
    return folder


def run(args: tuple[int, str, Path, int]) -> dict:
    """One run: the curves of its metrics, and its accuracies. An interrupted one begins again."""
    from sparse_rl.config import load_recipe
    from sparse_rl.train.run import train

    seed, arm, out, steps = args
    began, model = time.perf_counter(), out / "models" / f"seed-{seed}"
    folder = out / "runs" / f"seed-{seed}" / arm.replace(" ", "")
    shutil.rmtree(folder, ignore_errors=True)
    changes = {"model.name": str(model), "run.seed": str(seed), "task.seed": str(seed), "run.steps": str(steps)}
    recipe = load_recipe("calculator", [*{**changes, **ARMS[arm]}.items()])
    train(recipe, folder, show=False)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    evaluated = [line for line in lines if "eval/dense/accuracy" in line]
    found = {
        view: [line.get(f"eval/{view}/accuracy", line["eval/dense/accuracy"]) for line in evaluated]
        for view in ("dense", "sparse")
    }
    turns = [line.get("eval/sparse/talk/turns/mean", line["eval/dense/talk/turns/mean"]) for line in evaluated]
    curves = {name: [line[name] for line in lines if name in line] for name in CURVES}
    row = {"seed": seed, "arm": arm, "steps": steps, "accuracy": found, "turns": turns, "curves": curves}
    return {**row, "seconds": time.perf_counter() - began}


def warm(args: tuple[Path, int]) -> str:
    return str(warmed_up(*args))


def table(rows: list[dict]) -> str:
    lines = [f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS)]
    for arm in ARMS:
        group = [r for r in rows if r["arm"] == arm]
        if not group:
            continue
        cells = [arm, str(len(group))]
        cells += [interval([r["accuracy"][view][k] for r in group]) for view in ("dense", "sparse") for k in (0, -1)]
        cells += [f"{statistics.mean(r['turns'][k] for r in group):.2f}" for k in (0, -1)]
        curves = [[x for r in group for x in r["curves"][key]] for key in CURVES[4:6]]
        lines.append(f"| {' | '.join([*cells, *(f'{statistics.mean(c):.0%}' if c else '-' for c in curves)])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--arms", default=";".join(ARMS), help="separated by ;")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    results = args.out / "results.jsonl"
    rows = [json.loads(line) for line in results.open()] if results.exists() else []
    if not args.table:
        began = time.perf_counter()
        args.out.mkdir(parents=True, exist_ok=True)
        done = {(r["seed"], r["arm"]) for r in rows}
        waiting = (
            (seed, arm, args.out, args.steps)
            for seed in range(args.seeds)
            for arm in args.arms.split(";")
            if (seed, arm) not in done and time.perf_counter() - began < args.minutes * 60
        )
        context = multiprocessing.get_context("spawn")
        with context.Pool(args.processes, maxtasksperchild=1) as pool, results.open("a") as file:
            for name in pool.imap_unordered(warm, [(args.out, seed) for seed in range(args.seeds)]):
                print(f"warmed up: {name}", file=sys.stderr, flush=True)
            for row in lazily(pool, waiting, args.processes, run):
                file.write(json.dumps(row) + "\n")
                file.flush()
                rows.append(row)
                accuracy = ", ".join(f"{view} {values[-1]:.2f}" for view, values in row["accuracy"].items())
                found = f"{accuracy}, {row['turns'][-1]:.2f} turns, {row['seconds']:.0f} s"
                print(f"{row['seed']} {row['arm']}: {found}", file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
