"""Which part of Sparse-RL's correction does the work? One change at a time on running sums.

    python benchmarks/ablations_cpu.py --out runs/ablations --processes 2      # repeat it to continue
    python benchmarks/ablations_cpu.py --out runs/ablations --table

Every run is the one of benchmarks/learning_cpu.py at R-KV 38 + 4 with parts of the correction changed. All arms are
evaluated alike: on the same 128 held-out prompts x 2 samples, dense and sparse, at 3/4 and at the end; the mean of
the two counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

from learning_cpu import STARTS, final, interval, lazily, make_second
from learning_cpu import run as run_plain

SETTING = "rkv 38"
ARMS = {  # the keys that differ from `sparse-rl`: reject a trajectory with xi < 1e-4, weight tokens by min(xi, 2)
    "both (sparse-rl)": {},
    "neither (none)": {"learn.correction": "{reject_below: null, cap: null}"},
    "rejection only": {"learn.correction": "{cap: null}"},
    "weighting only (tis)": {"learn.correction": "{reject_below: null}"},
    "epsilon 1e-2": {"learn.correction": "{reject_below: 1.0e-2}"},
    "epsilon 1e-6": {"learn.correction": "{reject_below: 1.0e-6}"},
    "cap 1": {"learn.correction": "{cap: 1.0}"},
    "cap 5": {"learn.correction": "{cap: 5.0}"},
    "rebaseline": {"learn.rebaseline": "true"},
    "sequence-mean": {"loss.mean": "sequence-mean"},
    "sequence-mean, renormalise": {"loss.mean": "sequence-mean", "loss.renormalise": "true"},
}
HEADS = ("arm", "runs", "dense inference", "worst", "sparse inference", "worst", "rejected", "gradient norm")


def run(args: tuple) -> dict:
    (seed, start, arm), folder, second, steps = args
    row = run_plain(((seed, start, "sparse-rl", SETTING), folder / arm, second, steps), ARMS[arm])
    return {**row, "method": arm}


def table(rows: list[dict]) -> str:
    lines = [f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS)]
    for start in STARTS:
        here = [r for r in rows if r["start"] == start]
        if not here:
            continue
        first = [interval([r["curves"][f"eval/{view}/accuracy"][0] for r in here]) for view in ("dense", "sparse")]
        lines.append(f"| **from {start}** | | {first[0]} at the start | | {first[1]} at the start | | | |")
        for arm in ARMS:
            group = [r for r in here if r["method"] == arm]
            if not group:
                continue
            cells = [arm, str(len(group))]
            for view in ("dense", "sparse"):
                values = [final(r, view) for r in group]
                cells += [interval(values), f"{min(values):.2f}"]
            rejected, norm = (
                statistics.mean(statistics.mean(r["curves"][key]) for r in group)
                for key in ("reject/trajectories/frac", "update/grad_norm")
            )
            lines.append(f"| {' | '.join(cells)} | {rejected:.0%} | {norm:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/ablations"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--starts", default=",".join(STARTS))
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    results = args.out / "results.jsonl"
    rows = [json.loads(line) for line in results.open()] if results.exists() else []
    if not args.table:
        began = time.perf_counter()
        second = make_second(args.out)
        done = {(r["seed"], r["start"], r["method"]) for r in rows}
        wanted = itertools.product(range(args.seeds), args.starts.split(","), ARMS)
        waiting = (
            (job, args.out / "runs", second, args.steps)
            for job in wanted
            if job not in done and time.perf_counter() - began < args.minutes * 60
        )
        context = multiprocessing.get_context("spawn")
        with context.Pool(args.processes, maxtasksperchild=1) as pool, results.open("a") as file:
            for row in lazily(pool, waiting, args.processes, run):
                file.write(json.dumps(row) + "\n")
                file.flush()
                rows.append(row)
                found = f"dense {final(row, 'dense'):.2f}, sparse {final(row, 'sparse'):.2f}, {row['seconds']:.0f} s"
                print(f"{row['seed']} {row['start']} {row['method']}: {found}", file=sys.stderr, flush=True)
    print(table(rows))


if __name__ == "__main__":
    main()
