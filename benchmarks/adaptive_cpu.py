"""An adaptive budget on the tiny model: what the controller does, and what the model learns (docs/results).

    python benchmarks/adaptive_cpu.py --out runs/adaptive            # one run after the other; repeat it to continue

Every run is one of learning_cpu.py (recipe tiny-sums, 60 steps, R-KV, interval 4) with a `rollout.budget` that moves
between 30 and 50, or a fixed one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path

from learning_cpu import final, run

BOUNDS = "{min: 30, max: 50, target: {%s}}"
SETTINGS = [  # (method, the target that is held, rollout.budget)
    ("sparse-rl", "alpha_5 0.9", BOUNDS % "alpha_5: 0.9"),
    ("sparse-rl", "rejection 0.1", BOUNDS % "rejection: 0.1"),
    ("none", "alpha_5 0.9", BOUNDS % "alpha_5: 0.9"),
    ("shadow", "alpha_5 0.9", BOUNDS % "alpha_5: 0.9"),
    ("sparse-rl", "budget 50", "50"),
    ("none", "budget 50", "50"),
    ("shadow", "budget 50", "50"),
]


def table(rows: list[dict]) -> str:
    """A line per run; means over the second half of the steps, when the controller has settled."""
    heads = ["method", "held", "seed", "budget, steps 1 / 15 / 30 / 45 / 60", "budget", "alpha p05", "rejected"]
    heads += ["dense", "sparse"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for method, held, budget in SETTINGS:
        for row in sorted((r for r in rows if (r["method"], r["setting"]) == (method, held)), key=lambda r: r["seed"]):
            path = row["curves"]["rollout/budget"] or [float(budget)] * row["steps"]
            half = len(path) // 2
            mean = {k: statistics.mean(row["curves"][k][half:]) for k in ("gap/alpha/p05", "reject/trajectories/frac")}
            moved = ""
            if row["curves"]["rollout/budget"]:
                moved = " / ".join(f"{path[max(1, i * len(path) // 4) - 1]:.0f}" for i in range(5))
            lines.append(
                f"| {method} | {held} | {row['seed']} | {moved} | {statistics.mean(path[half:]):.1f} | "
                f"{mean['gap/alpha/p05']:.2f} | {mean['reject/trajectories/frac']:.0%} | "
                f"{final(row, 'dense'):.2f} | {final(row, 'sparse'):.2f} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/adaptive"))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--diagnose", type=int, default=16, help="trajectories on which alpha is measured")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "results.jsonl"
    rows = [json.loads(line) for line in results.open()] if results.exists() else []
    done = {(r["seed"], r["method"], r["setting"]) for r in rows}
    with results.open("a") as file:
        for (method, held, budget), seed in itertools.product(SETTINGS, range(args.seeds)):
            if (seed, method, held) not in done:
                more = {
                    "rollout.compressor": "rkv",
                    "rollout.budget": budget,
                    "learn.method": method,
                    "run.diagnose": args.diagnose,
                }
                rows.append(
                    run(((seed, "tiny-sums", method, "rkv 46"), args.out / "runs", Path(), args.steps), more)
                    | {"setting": held}
                )
                file.write(json.dumps(rows[-1]) + "\n")
                file.flush()
                print(f"{seed} {method} {held}: {rows[-1]['seconds']:.0f} s", file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
