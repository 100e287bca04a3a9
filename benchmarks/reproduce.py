"""The published setting of Sparse-RL, one command per model: train its arms, evaluate them, print both tables.

    python benchmarks/reproduce.py qwen2.5-1.5b-simplerl --train simplerl_qwen_level3to5.jsonl --data FOLDER \\
        --out runs/reproduce-1.5b
    python benchmarks/reproduce.py qwen2.5-1.5b-simplerl --train FILE --data FOLDER --out FOLDER --show   # print only

We have not run this with real weights (docs/reproduce.md). Repeat the command to continue: finished arms are left
alone, the others resume. Every arm is `sparse-rl train RECIPE` with a few keys changed, and the last checkpoints are
compared by `sparse-rl eval --compare` on a dense cache and under the recipe's own.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from sparse_rl.config import Recipe, load_recipe
from sparse_rl.files import find_checkpoints

DENSE = {"rollout.compressor": "dense", "rollout.compressor_options": "{}", "learn.method": "none"}
ARMS = {  # the keys that differ from the recipe
    "dense": DENSE,
    "none": {"learn.method": "none"},
    "sparse-rl-released": {"learn.method": "sparse-rl-released"},
    "sparse-rl": {"learn.method": "sparse-rl"},
    "shadow": {"learn.method": "shadow"},
}
BENCHES = "gsm8k,math500,gaokao2023en,minerva,olympiadbench,aime24,amc23"
PUBLISHED = {  # as our notes on arXiv 2601.10079 have it; what is missing there is missing here
    "qwen2.5-1.5b-simplerl": ["mean accuracy on a dense cache: Sparse-RL 36.2, dense 35.4"],
    "qwen2.5-3b-simplerl": ["MATH500 under sparse inference: Sparse-RL 61.8, dense-trained 54.2"],
    "qwen2.5-7b-simplerl": ["mean accuracy on a dense cache: Sparse-RL 51.4, dense 53.1 (96.8 % kept)"],
    "llama-3.2-1b-instruct-simplerl": [],
}
ALL_MODELS = [
    "KV tokens saved on the four models: 35.1, 53.3, 42.0, 39.4 % (our notes do not say which is which)",
    "mean share of rejected trajectories 0.07, mean clip share 0.0005",
    "without a correction training collapses; a budget of 512 suffices, 128 degrades",
]
MEASURED = {  # the metrics of a run that the published figures are compared with
    "KV tokens saved": "cache/tokens_saved/frac",
    "rejected": "reject/trajectories/frac",
    "clipped": "update/clip/frac",
}


def last_checkpoint(run: Path) -> tuple[int, Path] | None:
    return max(find_checkpoints(run / "checkpoints"), default=None)


def train_command(recipe: str, arm: str, run: Path, changed: dict[str, str]) -> list[str]:
    if (run / "recipe.yaml").exists():
        return ["train", str(run), "--resume"]
    keys = {**changed, **ARMS[arm]}
    return ["train", recipe, *(word for k, v in keys.items() for word in (f"--{k}", v)), "--out", str(run)]


def compare_command(recipe: Recipe, checkpoints: list[str], benches: str, more: list[str], out: Path) -> list[str]:
    rollout = recipe.rollout
    caches = ["--compressors", f"dense,{rollout.compressor}", "--budgets", str(rollout.max_budget)]
    caches += ["--interval", str(rollout.interval)]
    for name, value in rollout.compressor_options.items():
        caches += [f"--compressor.{name}", json.dumps(value)]
    return ["eval", "--compare", *checkpoints, "--bench", benches, *caches, *more, "--out", str(out)]


def call(command: list[str], show: bool) -> None:
    print("sparse-rl " + shlex.join(command), flush=True)
    if not show:
        subprocess.run([sys.executable, "-m", "sparse_rl", *command], check=True, env={**os.environ})


def training_table(runs: dict[str, Path]) -> str:
    """The mean over a run's steps of what the paper reports about training."""
    lines = [f"| arm | steps | {' | '.join(MEASURED)} |", "|" + "---|" * (2 + len(MEASURED))]
    for arm, run in runs.items():
        rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
        cells = []
        for name in MEASURED.values():
            values = [row[name] for row in rows if row.get(name) is not None]
            cells.append(f"{sum(values) / len(values):.4f}" if values else "")
        lines.append(f"| {arm} | {max(row['step'] for row in rows)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help=f"one of {', '.join(PUBLISHED)}, or another recipe")
    parser.add_argument("--train", help="the training file of the recipe's task")
    parser.add_argument("--data", help="the folder with the benchmarks' files")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--arms", default="dense,none,sparse-rl-released,shadow")
    parser.add_argument("--bench", default=BENCHES)
    parser.add_argument("--limit", type=int, help="problems per benchmark; default: all")
    parser.add_argument("--show", action="store_true", help="print the commands and run none")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="of every arm")
    args = parser.parse_args()
    arms = args.arms.split(",")
    if unknown := [arm for arm in arms if arm not in ARMS]:
        parser.error(f"there is no arm {unknown[0]!r}; there are {', '.join(ARMS)}.")
    changed = dict(args.set)
    if args.train:
        changed["task.files"] = args.train
    recipe = load_recipe(args.recipe, list(changed.items()))
    runs = {arm: args.out / arm for arm in arms}
    for arm, run in runs.items():
        found = last_checkpoint(run)
        if found is None or found[0] < recipe.run.steps:
            call(train_command(args.recipe, arm, run, changed), args.show)
    last = {arm: last_checkpoint(run) for arm, run in runs.items()}
    checkpoints = [str(found[1] if found else runs[arm] / "checkpoints" / "LAST") for arm, found in last.items()]
    more = [*(["--data", args.data] if args.data else []), *(["--limit", str(args.limit)] if args.limit else [])]
    call(compare_command(recipe, checkpoints, args.bench, more, args.out / "evaluation"), args.show)
    if not args.show:
        print(training_table(runs))
    print("\nPublished (arXiv 2601.10079):")
    for line in [*PUBLISHED.get(args.recipe, []), *ALL_MODELS]:
        print(f"- {line}")


if __name__ == "__main__":
    main()
