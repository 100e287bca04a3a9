"""Studies of running sums in which arms differ by a few keys of the recipe.

    python benchmarks/arms_cpu.py ablations --out runs/ablations --processes 2      # repeat it to continue
    python benchmarks/arms_cpu.py algorithms --out runs/algorithms --processes 2
    python benchmarks/arms_cpu.py algorithms --out runs/algorithms --table
    python benchmarks/arms_cpu.py top-p --out runs/top-p --processes 1 --starts tiny-sums
    python benchmarks/arms_cpu.py top-p --out runs/top-p --first-ratio
    python benchmarks/arms_cpu.py joint --out runs/joint --processes 2 --starts tiny-sums --seeds 2
    python benchmarks/arms_cpu.py distill --out runs/distill --processes 2 --starts tiny-sums
    python benchmarks/arms_cpu.py relatives --out runs/relatives --processes 2 --starts tiny-sums

    ablations    which part of Sparse-RL's correction does the work? One change at a time, at R-KV 38 + 4
    algorithms   GRPO, online DPO and PPO in the dense view (sparse-rl; online DPO keeps its rejection) and in the
                 shadow view, at a harmless and at a hurting budget
    distill      distillation between the views at weights 0.01 and 1, beside `shadow`, which has none (0.1 is in the
                 table of methods), at two hurting budgets
    joint        the compressor `learned`, trained between the steps of a run, beside rkv and snapkv, at two budgets;
                 also with evictions that are drawn, and moved by advantages
    reference    online DPO in the shadow view, its reference in the same view or in the dense one, at two budgets
    relatives    GRPO and its relatives in both views, at R-KV 38 + 4
    top-p        rollouts with top-p 0.95 and with 1, in both views, at two budgets; evaluations have no top-p

Every run is one of benchmarks/learning_cpu.py with keys changed. All arms are evaluated alike: on the same 128
held-out prompts x 2 samples, dense and sparse, at 3/4 and at the end; the mean of the two counts.

`--first-ratio` instead makes three steps of one minibatch with every arm, so that each update's ratio is taken under
the weights that sampled, and prints the largest |log ratio| of a token.
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
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

from learning_cpu import STARTS, final, interval, lazily, make_second
from learning_cpu import run as run_plain

from sparse_rl.learn.objective import RELATIVES


@dataclass(frozen=True)
class Arm:
    keys: dict[str, str] = field(default_factory=dict)
    method: str = "sparse-rl"
    setting: str = "rkv 38"


def correction(**keys: str) -> Arm:
    return Arm({"learn.correction": "{" + ", ".join(f"{key}: {value}" for key, value in keys.items()) + "}"})


ABLATIONS = {  # `sparse-rl` rejects a trajectory with xi < 1e-4 and weights tokens by min(xi, 2)
    "both (sparse-rl)": Arm(),
    "neither (none)": correction(reject_below="null", cap="null"),
    "rejection only": correction(cap="null"),
    "weighting only (tis)": correction(reject_below="null"),
    "epsilon 1e-2": correction(reject_below="1.0e-2"),
    "epsilon 1e-6": correction(reject_below="1.0e-6"),
    "cap 1": correction(cap="1.0"),
    "cap 5": correction(cap="5.0"),
    "rebaseline": Arm({"learn.rebaseline": "true"}),
    "sequence-mean": Arm({"loss.mean": "sequence-mean"}),
    "sequence-mean, renormalise": Arm({"loss.mean": "sequence-mean", "loss.renormalise": "true"}),
}
CHOSEN = {  # on seed 100, which is in no table
    "grpo": {},
    "online-dpo": {"dpo.pairs": "all"},
    "ppo": {"ppo.lam": "1.0"},
}
ALGORITHMS = {
    f"{setting}, {algorithm}, {method}": Arm({"learn.algorithm": algorithm, **keys}, method, setting)
    for setting in ("rkv 46", "rkv 32")
    for algorithm, keys in CHOSEN.items()
    for method in ("sparse-rl", "shadow")
}
REFERENCE = {
    f"{setting}, reference {view}": Arm(
        {"learn.algorithm": "online-dpo", **CHOSEN["online-dpo"], "dpo.reference": view}, "shadow", setting
    )
    for setting in ("rkv 46", "rkv 32")
    for view in ("view", "dense")
}
TOP_P = {
    f"{setting}, {method}, top-p {p}": Arm({"rollout.top_p": p}, method, setting)
    for setting in ("rkv 46", "rkv 38")
    for method in ("sparse-rl", "shadow")
    for p in ("0.95", "1")
}
LEARNED = {"rollout.compressor": "learned", "scorer.every": "1"}
DRAWN = LEARNED | {"rollout.compressor_options": "{protect_prompt: true, temperature: 0.5}"}
SCORERS = {  # name: (keys, methods)
    "rkv": ({}, ("shadow", "sparse-rl")),
    "snapkv": ({"rollout.compressor": "snapkv"}, ("shadow",)),  # as which `learned` begins
    "learned": (LEARNED, ("shadow", "sparse-rl")),
    "learned, drawn": (DRAWN, ("shadow",)),
    "learned, drawn, advantage": (DRAWN | {"scorer.advantage": "1.0"}, ("shadow",)),
}
JOINT = {
    f"{setting.removeprefix('rkv ')} slots, {method}, {name}": Arm(keys, method, setting)
    for setting in ("rkv 38", "rkv 32")
    for name, (keys, methods) in SCORERS.items()
    for method in methods
}
DIRECTIONS = ("dense-to-shadow", "shadow-to-dense-forward", "shadow-to-dense-reverse")
DISTILL = {
    f"{setting}, {name}": Arm(keys, method, setting)
    for setting in ("rkv 38", "rkv 32")
    for name, method, keys in [
        ("shadow", "shadow", {}),
        *((f"{d}, {w}", f"smd {d}", {"learn.distill_weight": w}) for d in DIRECTIONS for w in ("0.01", "1.0")),
    ]
}
RELATIVE = {
    f"{name}, {method}": Arm({key: str(value) for key, value in keys.items()}, method)
    for name, keys in {"grpo": {}, **{name: keys for name, (_, keys) in RELATIVES.items()}}.items()
    for method in ("sparse-rl", "shadow")
}
STUDIES = {
    "ablations": ABLATIONS,
    "algorithms": ALGORITHMS,
    "distill": DISTILL,
    "joint": JOINT,
    "reference": REFERENCE,
    "relatives": RELATIVE,
    "top-p": TOP_P,
}
HEADS = {  # of the table, after the accuracies; means over the steps of a run, and how they are written
    "rejected": ("reject/trajectories/frac", ".0%"),
    "gradient norm": ("update/grad_norm", ".2f"),
    "attention lost": ("cache/regret/lost/mean", ".1%"),
    "clipped": ("update/clip/frac", ".2%"),
    "loops": ("rollout/loops/frac", ".2%"),
}


def run(args: tuple) -> dict:
    (seed, start, name), arm, folder, second, steps = args
    place = folder / name.replace(" ", "")
    row = run_plain(((seed, start, arm.method, arm.setting), place, second, steps), arm.keys)
    return {**row, "method": name}


def first_ratio(arm: Arm, folder: Path, second: Path) -> float:
    """The largest |log ratio| of a token where no update came between sampling and learning, in nats."""
    from sparse_rl.learn import loss

    plain, largest = loss.ratio, [0.0]

    def watched(logprobs, old_logprobs, mask, level):
        largest.append(((logprobs - old_logprobs).detach() * mask).abs().max().item())
        return plain(logprobs, old_logprobs, mask, level)

    loss.ratio = watched
    try:
        job = (0, STARTS[0], arm.method, arm.setting)
        more = {**arm.keys, "learn.minibatches": "1", "eval.every": "0"}
        run_plain((job, folder, second, 3), more)
    finally:
        loss.ratio = plain
    return max(largest)


def table(rows: list[dict], arms: dict[str, Arm]) -> str:
    heads = ["arm", "runs", "dense inference", "worst", "sparse inference", "worst", *HEADS]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for start in STARTS:
        here = [r for r in rows if r["start"] == start]
        if not here:
            continue
        first = [interval([r["curves"][f"eval/{view}/accuracy"][0] for r in here]) for view in ("dense", "sparse")]
        if len({r["setting"] for r in here}) > 1:
            first[1] = "differs"
        lines.append(
            f"| **from {start}** | | {first[0]} at the start | | {first[1]} at the start |{' |' * (1 + len(HEADS))}"
        )
        for name in arms:
            group = [r for r in here if r["method"] == name]
            if not group:
                continue
            cells = [name, str(len(group))]
            for view in ("dense", "sparse"):
                values = [final(r, view) for r in group]
                cells += [interval(values), f"{min(values):.2f}"]
            for key, written in HEADS.values():
                means = [statistics.mean(r["curves"].get(key) or [math.nan]) for r in group]
                cells.append(f"{statistics.mean(means):{written}}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--starts", default=",".join(STARTS))
    parser.add_argument("--only", default="", help="run only arms whose name has this in it")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--first-ratio", action="store_true")
    args = parser.parse_args()
    arms, results = STUDIES[args.study], args.out / "results.jsonl"
    if args.first_ratio:
        args.out.mkdir(parents=True, exist_ok=True)
        for name, arm in arms.items():
            print(f"| {name} | {first_ratio(arm, args.out / 'ratios', args.out):.1e} |", flush=True)
        return
    rows = [json.loads(line) for line in results.open()] if results.exists() else []
    if not args.table:
        began = time.perf_counter()
        args.out.mkdir(parents=True, exist_ok=True)
        second = make_second(args.out) if "second" in args.starts.split(",") else args.out
        done = {(r["seed"], r["start"], r["method"]) for r in rows}
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        waiting = (
            (job, arms[job[2]], args.out / "runs", second, args.steps)
            for job in itertools.product(seeds, args.starts.split(","), [name for name in arms if args.only in name])
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
        if time.perf_counter() - began > args.minutes * 60:
            print("time is over; give the same command again.", file=sys.stderr, flush=True)
    print(table(rows, arms))


if __name__ == "__main__":
    main()
