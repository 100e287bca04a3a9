"""Does it learn? Methods x compressors x budgets x warm starts x seeds on the tiny model (docs/results/sums.md).

    python benchmarks/learning_cpu.py --out runs/learning --processes 2            # everything; repeat it to continue
    python benchmarks/learning_cpu.py --out runs/learning --table                   # the table of finished runs
    for mode in auto always; do python benchmarks/learning_cpu.py --out runs/rescore-$mode --methods shadow \\
        --settings "rkv 46,rkv 32" --starts tiny-sums --set learn.rescore $mode; done # does scoring matter?

Every run is `sparse-rl train recipes/tiny-sums.yaml` with other keys, from the built-in warm start and from a second
one that the warm-up recipe makes with seed 2. A run's accuracy is the mean of its evaluations at 3/4 and at the end,
each on 128 held-out prompts x 2 samples.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
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
ROOT = Path(__file__).parent.parent
SETTINGS = {
    "rkv 46": ("rkv", 46),
    "rkv 38": ("rkv", 38),
    "rkv 32": ("rkv", 32),
    "snapkv 46": ("snapkv", 46),
    "snapkv 38": ("snapkv", 38),
}
DENSE = ("dense", "shuffled")  # on a dense cache; the second is a control
METHODS = (
    "naive",
    "none",
    "tis",
    "sparse-rl",
    "sparse-rl-released",
    "shadow",
    "smd dense-to-shadow",
    "smd shadow-to-dense-forward",
    "smd shadow-to-dense-reverse",
)
STARTS = ("tiny-sums", "second")
CURVES = (
    "reward/mean",
    "reject/trajectories/frac",
    "gap/xi/p05",
    "gap/alpha/p05",
    "gap/abs/mean",
    "support/tokens/mean",
    "update/grad_norm",
    "cache/tokens_saved/frac",
    "cache/regret/lost/mean",
    "rollout/truncated/frac",
    "rollout/loops/frac",
    "update/clip/frac",
    "rollout/budget",
    "old/entropy/mean",
    "eval/dense/accuracy",
    "eval/sparse/accuracy",
)
SECOND_SEED = 2


def jobs(seeds: int, methods: tuple[str, ...], settings: tuple[str, ...], starts: tuple[str, ...]) -> list[tuple]:
    """(seed, warm start, method, setting), seed by seed so that what is there is balanced."""
    everything = []
    for seed, start in itertools.product(range(seeds), starts):
        everything += [(seed, start, method, "dense") for method in DENSE if method in methods]
        everything += [
            (seed, start, method, setting) for setting in settings for method in methods if method not in DENSE
        ]
    return everything


def overrides(job: tuple, second: Path, steps: int, more: dict) -> list[tuple[str, str]]:
    seed, start, method, setting = job
    keys = {"run.seed": seed, "run.steps": steps, "run.checkpoint_every": steps, "run.samples": 0, "run.keep": 1}
    keys |= {"eval.every": steps // 4, "eval.prompts": 128, "eval.samples": 2}
    keys["model.name"] = str(second) if start == "second" else start
    if setting == "dense":
        keys |= {"rollout.compressor": "dense", "rollout.compressor_options": "{}", "learn.method": "none"}
    else:
        name, budget = SETTINGS[setting]
        preset, _, direction = method.partition(" ")
        keys |= {
            "rollout.compressor": name,
            "rollout.budget": budget,
            "learn.method": preset,
            "learn.distill": direction or "null",
        }
    return [(k, str(v)) for k, v in {**keys, **more}.items()]


def run(args: tuple, more: dict | None = None) -> dict:
    """One run, with `more` keys of its recipe changed: its curves."""
    job, folder, second, steps = args
    import torch

    torch.set_num_threads(1)
    from sparse_rl.config import load_recipe
    from sparse_rl.files import read_lines
    from sparse_rl.train.run import train

    recipe = load_recipe(ROOT / "recipes" / "tiny-sums.yaml", overrides(job, second, steps, more or {}))
    name = "-".join(str(part).replace(" ", "") for part in (*job, *(more or {}).values()))
    shutil.rmtree(folder / name, ignore_errors=True)
    start = time.perf_counter()
    with shuffled_advantages(recipe.run.seed) if job[2] == "shuffled" else contextlib.nullcontext():
        trainer = train(recipe, folder / name, show=False)
    lines = read_lines(folder / name / "metrics.jsonl")
    row = dict(zip(("seed", "start", "method", "setting"), job)) | {
        "steps": steps,
        "seconds": time.perf_counter() - start,
    }
    row["curves"] = {key: [round(line[key], 4) for line in lines if line.get(key) is not None] for key in CURVES}
    if job[2] == "dense":
        row["under"] = {setting: under(trainer, *SETTINGS[setting]) for setting in SETTINGS}
    shutil.rmtree(folder / name)
    return row


@contextlib.contextmanager
def shuffled_advantages(seed: int):
    """A control: every trajectory gets another one's advantage, so that nothing can be learned."""
    import torch

    from sparse_rl.streams import stream_key
    from sparse_rl.train.loop import Trainer

    plain = Trainer.advantages

    def shuffled(self, rollout, accepted):
        values, metrics = plain(self, rollout, accepted)
        generator = torch.Generator().manual_seed(stream_key(seed, [self.steps_done, -1]) % 2**63)
        return values[torch.randperm(len(values), generator=generator)], metrics

    Trainer.advantages = shuffled
    try:
        yield
    finally:
        Trainer.advantages = plain


def under(trainer, compressor: str, budget: int) -> float:
    """Accuracy of a dense-trained model on a compressed cache."""
    from sparse_rl.compressors import make
    from sparse_rl.rollout import Engine
    from sparse_rl.train.held_out import accuracy

    engine = Engine(trainer.model, make(compressor, protect_prompt=True), budget=budget, interval=4, rows=128)
    prompts = trainer.held_out.sample(0, 128)
    sampling = trainer.sampler.sampling
    return accuracy(engine, trainer.tokenizer, trainer.held_out, prompts, 2, sampling, seed=0)["accuracy"]


def interval(values: list[float]) -> str:
    """Mean and half the width of a 95 % t interval over runs."""
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else ""
    t = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26, 11: 2.23, 12: 2.20}.get(
        len(values), 2.0
    )
    return f"{statistics.mean(values):.2f} ± {t * statistics.stdev(values) / math.sqrt(len(values)):.2f}"


def final(row: dict, view: str) -> float:
    return statistics.mean(row["curves"][f"eval/{view}/accuracy"][-2:])


def table(rows: list[dict]) -> str:
    heads = ["compressor", "method", "runs", "dense inference", "sparse inference", "worst run, dense"]
    heads += ["rejected", "alpha p05", "KV tokens saved"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for start in STARTS:
        here = [r for r in rows if r["start"] == start]
        if not here:
            continue
        first = interval([r["curves"]["eval/dense/accuracy"][0] for r in here])
        lines.append(f"| **from {start}** | | | {first} at the start | | | | | |")
        dense = [r for r in here if r["method"] == "dense"]
        shown = "; ".join(f"{s} {interval([r['under'][s] for r in dense])}" for s in SETTINGS) if dense else ""
        for method in DENSE:
            group = [r for r in here if r["method"] == method]
            if group:
                values = [final(r, "dense") for r in group]
                sparse = shown if method == "dense" else ""
                cells = ["none (dense)", method, str(len(group)), interval(values), sparse, f"{min(values):.2f}"]
                lines.append(f"| {' | '.join(cells)} | | | |")
        for setting in SETTINGS:
            for method in METHODS:
                group = [r for r in here if (r["method"], r["setting"]) == (method, setting)]
                if not group:
                    continue
                means = {k: statistics.mean(statistics.mean(r["curves"][k]) for r in group)
                         for k in ("reject/trajectories/frac", "gap/alpha/p05", "cache/tokens_saved/frac")}  # fmt: skip
                values, sparse = ([final(r, view) for r in group] for view in ("dense", "sparse"))
                cells = [setting, method, str(len(group)), interval(values), interval(sparse), f"{min(values):.2f}"]
                cells += [f"{means['reject/trajectories/frac']:.0%}", f"{means['gap/alpha/p05']:.2f}"]
                lines.append(f"| {' | '.join(cells)} | {means['cache/tokens_saved/frac']:.0%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/learning"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--methods", default=",".join((*DENSE, *METHODS)))
    parser.add_argument("--settings", default=",".join(SETTINGS))
    parser.add_argument("--starts", default=",".join(STARTS))
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this")
    parser.add_argument(
        "--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="change a key of every recipe"
    )
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "results.jsonl"
    rows = [json.loads(line) for line in results.open()] if results.exists() else []
    if not args.table:
        start = time.perf_counter()
        args.out.mkdir(parents=True, exist_ok=True)
        starts = tuple(args.starts.split(","))
        second = make_second(args.out) if "second" in starts else args.out
        done = {(r["seed"], r["start"], r["method"], r["setting"]) for r in rows}
        wanted = jobs(args.seeds, tuple(args.methods.split(",")), tuple(args.settings.split(",")), starts)
        waiting = [(job, args.out / "runs", second, args.steps) for job in wanted if job not in done]

        def until_late():
            for job in waiting:
                if time.perf_counter() - start < args.minutes * 60:
                    yield job

        with (
            multiprocessing.get_context("spawn").Pool(args.processes, maxtasksperchild=1) as pool,
            results.open("a") as file,
        ):
            for row in lazily(pool, until_late(), args.processes, functools.partial(run, more=dict(args.set))):
                file.write(json.dumps(row) + "\n")
                file.flush()
                rows.append(row)
                name = f"{row['seed']} {row['start']} {row['method']} {row['setting']}"
                found = f"dense {final(row, 'dense'):.2f}, {row['seconds']:.0f} s"
                print(f"{len(rows)}: {name}: {found}", file=sys.stderr, flush=True)
    print(table(rows))


def lazily(pool, jobs, width: int, run):
    """Results as they come; never more jobs are handed out than can run."""
    running = [pool.apply_async(run, (job,)) for job in itertools.islice(jobs, width)]
    while running:
        ready = next((r for r in running if r.ready()), None)
        if ready is None:
            time.sleep(0.05)
            continue
        running.remove(ready)
        running += [pool.apply_async(run, (job,)) for job in itertools.islice(jobs, 1)]
        yield ready.get()


def make_second(out: Path) -> Path:
    """The second warm start, from the same recipe with another seed."""
    from sparse_rl.config import load_recipe
    from sparse_rl.train.warmup import is_finished, warmup

    folder = out / "second-warm-start"
    if not is_finished(folder):
        out.mkdir(parents=True, exist_ok=True)
        found = warmup(
            load_recipe(ROOT / "recipes" / "tiny-sums-warmup.yaml", [("run.seed", str(SECOND_SEED))]),
            folder,
            resume=folder.exists(),
            show=False,
        )
        print(f"second warm start: {found['accuracy']:.3f}", file=sys.stderr)
    return folder


if __name__ == "__main__":
    main()
