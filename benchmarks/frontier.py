"""Accuracy against mean cache entries: students with beacons, their teacher, and compressors without training. One GPU.

    python benchmarks/frontier.py --out runs/frontier --seed 0 --joint models/countdown-search   # teacher and students
    python benchmarks/frontier.py --out runs/frontier --seed 0 --late             # students of the finished teacher
    python benchmarks/frontier.py --out runs/frontier --seed 0 --rl 8             # RL on a student's folded rollouts
    python benchmarks/frontier.py --out runs/frontier --seed 0 --points           # evaluate everything that is there
    python benchmarks/frontier.py --out runs/frontier --table --plot frontier.png # all seeds

Breadcrumbs' three tasks, each in its own folder, in stays of 25 minutes (their times are guesses). Give a line again
until it says that nothing is left; it goes on where it was. Several lines may share a device, each with its own seed:

    sparse-rl warmup countdown-search-warmup --out models/countdown-search     # linsys-warmup, stargraph-warmup
    S="--study countdown --out runs/frontier-countdown --seed 0 --minutes 23"  # linsys, stargraph
    python benchmarks/frontier.py $S --joint models/countdown-search --patience 4 --points
    python benchmarks/frontier.py $S --late --patience 4 --points
    python benchmarks/frontier.py $S --rl 8 --of late --points
    python benchmarks/frontier.py $S --rl 8 --of cold --points                 # from the teacher, without distillation
    python benchmarks/frontier.py --study countdown --out runs/frontier-countdown --table --plot countdown.png

--minutes is the time of the whole command: with --points, training ends --points-minutes earlier, so that what a run
has reached by then is evaluated; evaluations that find no time come with the next --points.

Runs are `sparse-rl train RECIPE` (--study sums: tiny-sums, for a CPU) with other keys (--set KEY VALUE); a stopped run
continues. With --patience N a run goes on beyond run.steps until no student has gained 0.01 of held-out accuracy over
its last N evaluations. An evaluation in points.jsonl is not repeated unless its run has continued since: then the newer
one counts. The teacher's own curve comes from the length of its responses: capped at n tokens, its dense cache ends at
n entries, and a response without an answer by then counts as wrong. "longer" is a student that may answer c / 2 times
as long as in training, so that with every c its beacons take as many entries (less where the model's positions end).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from frontier_report import FREE, at_equal_entries, learned_by_rl, plot, table
from stay import Stay

os.environ.setdefault("OMP_NUM_THREADS", "1")
GAIN = 0.01  # of held-out accuracy: less is no improvement
MOST_STEPS = 5000  # of a run that goes on until its students stop improving
THRESHOLDS = (0.05, 0.5, 2.0)  # nats, of the rule that ends chunks by surprise


@dataclass(frozen=True)
class Study:
    recipe: str
    keys: dict[str, str]  # changed in it
    budgets: tuple[int, ...]  # of the free compressors
    interval: int
    caps: tuple[int, ...]  # new tokens of the teacher


ALL_SIZES = {"student.chunks": "[2, 4, 8, 16, 32, [2, 4, 8, 16, 32]]"}
STUDIES = {
    "countdown": Study(
        "countdown-beacons", ALL_SIZES, (48, 64, 96, 128, 192), 16, (60, 90, 120, 160, 200, 260, 320, 400, 500, 656)
    ),
    "linsys": Study("linsys-beacons", {}, (50, 56, 64, 80, 96), 4, (20, 40, 60, 70, 80, 90, 100, 120, 144)),
    "stargraph": Study("stargraph-beacons", {}, (272, 280, 288, 304, 336), 8, (40, 60, 80, 100, 110, 120, 130, 160)),
    "sums": Study(
        "tiny-sums",
        {
            **{
                "rollout.compressor": "dense",
                "rollout.compressor_options": "{}",
                "learn.method": "none",
                "run.diagnose": "0",
            },
            **{"student.chunks": "[2, 4, 8, 16, [2, 4, 8, 16]]", "student.lr": "1e-3"},
        },
        (30, 34, 38, 42, 46),
        4,
        (12, 18, 24, 30, 36, 42, 48, 54, 72),
    ),
}


def recipe_of(args, **keys):
    from sparse_rl.config import load_recipe

    study, last = STUDIES[args.study], [(key.replace("__", "."), str(value)) for key, value in keys.items()]
    return load_recipe(study.recipe, [*study.keys.items(), *map(tuple, args.set), *last])


def run_folder(args, kind: str) -> Path:
    return args.out / f"{kind}-{args.seed}"


def late_folders(args) -> list[Path]:
    return sorted(args.out.glob(f"late*-{args.seed}"))


def last_checkpoint(folder: Path) -> Path:
    from sparse_rl.files import find_checkpoints

    found = find_checkpoints(folder / "checkpoints")
    if not found:
        sys.exit(f"frontier: {folder} has no checkpoint yet; train it first (--joint MODEL, --late, --rl C).")
    return found[-1][1]


def steps_of(folder: Path) -> int:
    return int(last_checkpoint(folder).name.removeprefix("step-"))


def train(args, kind: str, **keys) -> None:
    """A run to its end; with --patience until its students stop improving."""
    from sparse_rl.files import read_lines
    from sparse_rl.train.run import train as start

    folder, keys = run_folder(args, kind), {"run__seed": args.seed, "run__samples": 0, **keys}
    recipe = recipe_of(args, **keys)
    every, steps = recipe.eval.every, recipe.run.steps
    if (folder / "checkpoints").is_dir():  # an earlier call may have gone further
        known = max((line["step"] for line in read_lines(folder / "metrics.jsonl")), default=0)
        steps = max(steps, -(-known // every) * every if args.patience else steps)
    while True:
        start(recipe_of(args, **keys, run__steps=steps), folder, (folder / "recipe.yaml").exists(), show=False)
        learning = still_improving(read_lines(folder / "metrics.jsonl"), args.patience) if args.patience else []
        if not learning or steps >= MOST_STEPS:
            break
        print(f"{folder} after {steps} steps: {', '.join(learning)} may still improve", flush=True)
        steps += every
    print(f"{folder}: nothing is left to train, {steps} steps", flush=True)


def still_improving(lines: Sequence[dict], patience: int) -> list[str]:
    """The students (eval/NAME/accuracy) whose best of the last `patience` evaluations is better by GAIN than their best
    before, or that have had no more than so many; those of a run without students: on its own cache.
    """
    names = dict.fromkeys(name for line in lines for name in line if re.fullmatch(r"eval/[^/]+/accuracy", name))
    students = [n for n in names if n not in ("eval/dense/accuracy", "eval/sparse/accuracy")] or [
        n for n in ("eval/sparse/accuracy",) if n in names
    ]
    curves = {name: [line[name] for line in lines if line.get(name) is not None] for name in students}
    return [
        name.split("/")[1]
        for name, curve in curves.items()
        if len(curve) <= patience or max(curve[-patience:]) >= max(curve[:-patience]) + GAIN
    ]


def start_of(args, kind: str, find: Callable[[], Path]) -> Path:
    """A copy of the model that a run starts from: the run that made it may go on, and keeps few checkpoints."""
    from sparse_rl.config import load_recipe

    before, copy = run_folder(args, kind) / "recipe.yaml", args.out / f"start-of-{kind}-{args.seed}"
    if before.exists():
        return Path(load_recipe(before).model.name)
    shutil.rmtree(copy, ignore_errors=True)
    return shutil.copytree(find(), copy, ignore=shutil.ignore_patterns("training.pt", "students"))


def late(args) -> None:
    """Students of the finished teacher."""
    kind = f"late{args.part}"
    teacher = start_of(args, kind, lambda: last_checkpoint(run_folder(args, "joint")))
    train(args, kind, model__name=teacher, student__freeze_teacher="true")


def student_of(args, kind: str, chunk: int) -> Path:
    """The newest student of `kind` for chunks of this size: its own, or the one for any size."""
    runs = [run_folder(args, "joint")] if kind == "joint" else late_folders(args)
    folders = [folder for run in runs for folder in sorted((last_checkpoint(run) / "students").iterdir())]
    sizes = {folder: folder.name.removeprefix("c").split("-") for folder in folders}
    found = [folder for folder in folders if str(chunk) in sizes[folder]]
    if not found:
        there = f"there are {', '.join(map(str, folders))}" if folders else f"train some first (--{kind})"
        sys.exit(f"frontier: there is no {kind} student for chunks of {chunk}; {there}.")
    return min(found, key=lambda folder: len(sizes[folder]))


def reinforce(args, chunk: int) -> None:
    """RL on a model's own folded rollouts: of a student, or from a cold start, of the teacher with a new beacon."""
    kind = f"rl-c{chunk}-of-{args.of}"
    if args.of == "cold":
        start = start_of(args, kind, lambda: last_checkpoint(run_folder(args, "joint")))
        give_new_beacon(start, chunk, args.seed)
    else:
        start = start_of(args, kind, lambda: student_of(args, args.of, chunk))
    keys = {"rollout__compressor": f"beacon:{chunk}", "rollout__compressor_options": "{}", "learn__method": "shadow"}
    train(args, kind, model__name=start, student__chunks="[]", **keys)


def give_new_beacon(folder: Path, chunk: int, seed: int) -> None:
    """The beacon that a student has before it learns, if the folder has none."""
    from sparse_rl.beacon import add_beacon, beacon_of, save_beacon
    from sparse_rl.models import load_model

    model, _ = load_model(str(folder), device="cpu")
    if beacon_of(model) is None:
        save_beacon(folder, add_beacon(model, (chunk,), seed=seed))


def train_all(args) -> None:
    """The runs that the command line asks for."""
    if args.joint:
        train(args, "joint", model__name=args.joint)
    if args.late:
        late(args)
    if args.rl:
        reinforce(args, args.rl)


# ------------------------------------------------------------------------------------------------------------ points


def wanted(args) -> Iterator[tuple[str, str, Path, dict]]:
    """(curve, label, model, engine) of every evaluation but the teacher's own, those first that the claims need."""
    from sparse_rl.beacon import beacon_of
    from sparse_rl.models import load_model

    teacher = last_checkpoint(run_folder(args, "joint"))
    found = [
        (kind, folder, beacon_of(load_model(str(folder), device="cpu")[0]).chunks)
        for kind, run in [("joint", run_folder(args, "joint")), *(("late", run) for run in late_folders(args))]
        if (run / "checkpoints").is_dir()
        for folder in sorted((last_checkpoint(run) / "students").glob("*"))
    ]
    for kind, folder, sizes in found:
        for chunk in sizes:
            yield curve_of(kind, sizes), f"c = {chunk}", folder, {"compressor": "beacon", "chunk": chunk}
    for run in sorted(args.out.glob(f"rl-c*-{args.seed}")):
        if (run / "checkpoints").is_dir():
            _, chunk, _, kind, _ = run.name.split("-")
            chunk = int(chunk.removeprefix("c"))
            yield f"RL of {kind}", f"c = {chunk}", last_checkpoint(run), {"compressor": "beacon", "chunk": chunk}
    for name, budget in itertools.product(FREE, STUDIES[args.study].budgets):
        yield name, str(budget), teacher, {"compressor": name, "budget": budget}
    for kind, folder, sizes in found:
        doubled = {2**i for i in range(1, 32) if 2**i <= max(sizes)}  # where the rule may end a chunk
        for threshold in THRESHOLDS if len(sizes) > 1 and doubled <= set(sizes) else ():
            options = {"compressor": "beacon", "chunk": max(sizes), "threshold": threshold}
            yield f"{kind}, by surprise", f"{threshold} nats", folder, options
    for kind, folder, sizes in found:  # the paper's other argument: as many entries, and longer thinking
        for chunk in (size for size in sizes if size > 2):
            options = {"compressor": "beacon", "chunk": chunk, "times": chunk / 2}
            yield f"{curve_of(kind, sizes)}, longer", f"c = {chunk}", folder, options


def curve_of(kind: str, sizes: Sequence[int]) -> str:
    return kind if len(sizes) == 1 else f"{kind}, any c"


def points(args, stay: Stay) -> None:
    file, joint = args.out / "points.jsonl", run_folder(args, "joint")
    done = {(row["seed"], row["curve"], row["label"], row.get("steps")) for row in read(file)}
    with file.open("a") as lines:

        def write(row: dict) -> None:
            lines.write(json.dumps(row) + "\n")
            lines.flush()

        caps = STUDIES[args.study].caps
        if not all((args.seed, "teacher", str(cap), steps_of(joint)) in done for cap in caps) and not stay.is_over():
            for row in capped(args):
                write(row)
        for curve, label, folder, options in wanted(args):
            run = next(parent.parent for parent in folder.parents if parent.name == "checkpoints")
            steps = steps_of(run)
            if (args.seed, curve, label, steps) in done:
                continue
            if stay.is_over():
                print("time is over for --points; give the same command again.", file=sys.stderr, flush=True)
                break
            row = {"seed": args.seed, "curve": curve, "label": label, "steps": steps}
            row |= evaluate(args, folder, dict(options)) | before_rl(run)
            told = f"{row['accuracy']:.3f} at {row['entries']:.0f} entries, {row['seconds']:.1f} s"
            print(f"{curve}, {label}: {told}", flush=True)
            write(row)


def before_rl(run: Path) -> dict[str, float]:
    """Of a run of RL on folded rollouts: accuracy at its start, on its own cache."""
    from sparse_rl.files import read_lines

    if not run.name.startswith("rl-"):
        return {}
    first = next((line for line in read_lines(run / "metrics.jsonl") if "eval/sparse/accuracy" in line), None)
    return {} if first is None else {"before": first["eval/sparse/accuracy"]}


def sample(args, folder: Path, options: dict):
    """(trajectories, whether each is right) of held-out prompts. `options`: a compressor, its budget and its own."""
    from sparse_rl import tasks
    from sparse_rl.compressors import make
    from sparse_rl.models import encode, load_model
    from sparse_rl.rollout import Engine, Sampling

    recipe = recipe_of(args)
    model, tokenizer = load_model(str(folder), recipe.model.dtype)
    task = tasks.make(recipe.task.name, **recipe.task.options).held_out()
    prompts = task.sample(0, args.prompts)
    ids = [encode(tokenizer, p.text) for p in prompts]
    name, budget = options.pop("compressor"), options.pop("budget", 64)
    room = model.config.max_position_embeddings - max(map(len, ids))
    new = min(room, int(options.pop("times", 1) * recipe.rollout.max_new_tokens))
    if name in FREE:
        options = {"sinks": max(map(len, ids))} if name == "window" else {"protect_prompt": True}
    engine = Engine(
        model, make(name, **options), budget=budget, interval=STUDIES[args.study].interval, rows=recipe.rollout.rows
    )
    done = engine.generate(ids, args.samples, Sampling(new), args.seed)
    texts = tokenizer.batch_decode([t.response_tokens for t in done], skip_special_tokens=True)
    grades = task.grade([prompts[t.prompt_index] for t in done], texts)
    return done, [grade.right for grade in grades]


def evaluate(args, folder: Path, options: dict) -> dict:
    from sparse_rl.records import mean_entries

    start = time.perf_counter()
    done, right = sample(args, folder, options)
    return {
        "accuracy": statistics.mean(map(float, right)),
        "entries": statistics.mean(map(mean_entries, done)),
        "length": statistics.mean(len(t.response_tokens) for t in done),
        "seconds": time.perf_counter() - start,
    }


def capped(args) -> Iterator[dict]:
    """The teacher on a dense cache, its responses cut at every cap."""
    done, right = sample(args, last_checkpoint(run_folder(args, "joint")), {"compressor": "dense"})
    for cap in STUDIES[args.study].caps:
        lengths = [min(cap, len(t.response_tokens)) for t in done]
        # the mean over n - 1 queries of P + 1 .. P + n - 1
        entries = [t.num_prompt_tokens + n / 2 for t, n in zip(done, lengths)]
        answered = [good and len(t.response_tokens) <= cap for t, good in zip(done, right)]
        yield {
            "seed": args.seed,
            "curve": "teacher",
            "label": str(cap),
            "steps": steps_of(run_folder(args, "joint")),
            "accuracy": statistics.mean(map(float, answered)),
            "entries": statistics.mean(entries),
            "length": statistics.mean(lengths),
        }


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.open()] if file.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/frontier"))
    parser.add_argument("--study", choices=STUDIES, default="countdown")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--joint", metavar="MODEL", help="train teacher and students, from this warm start")
    parser.add_argument("--late", action="store_true", help="train students of the finished teacher")
    parser.add_argument(
        "--part", default="", help="of the late students, when several processes train some each (--set student.chunks)"
    )
    parser.add_argument("--rl", type=int, metavar="C", help="RL on a student's own rollouts, folded by C tokens")
    parser.add_argument(
        "--of",
        choices=("joint", "late", "cold"),
        default="joint",
        help="whose student --rl starts from; cold: the teacher",
    )
    parser.add_argument(
        "--patience", type=int, default=0, help="evaluations without a gain that end a run; 0: run.steps"
    )
    parser.add_argument("--points", action="store_true", help="evaluate what is there")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of this command, training and evaluations")
    parser.add_argument("--points-minutes", type=float, default=6.0, help="of these, kept for --points")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    parser.add_argument(
        "--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="change a key of the recipe"
    )
    args = parser.parse_args()
    if not (args.joint or args.late or args.rl or args.points or args.table or args.plot):
        parser.error("there is nothing to do; give --joint MODEL, --late, --rl C, --points, --table or --plot PNG")
    stay = Stay(args.minutes, args.points_minutes if args.points else 0.0)
    args.out.mkdir(parents=True, exist_ok=True)
    stay.train(lambda: train_all(args))
    if args.points:
        points(args, stay)
    rows = read(args.out / "points.jsonl")
    if not rows and (args.table or args.plot):
        sys.exit(f"frontier: {args.out / 'points.jsonl'} has no evaluation yet; make some with --points.")
    if args.table:
        print(f"{table(rows)}\n\nWith no more entries:\n\n{at_equal_entries(rows)}\n\n{learned_by_rl(rows)}")
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(rows, args.plot)


if __name__ == "__main__":
    from sparse_rl.errors import SparseRLError

    try:
        main()
    except SparseRLError as error:
        sys.exit(f"frontier: {error}")
