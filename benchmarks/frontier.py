"""Accuracy against mean cache entries: students with beacons, their teacher, and compressors without training. One GPU.

    python benchmarks/frontier.py --out runs/frontier --seed 0 --joint models/countdown-search   # teacher and students
    python benchmarks/frontier.py --out runs/frontier --seed 0 --late             # students of the finished teacher
    python benchmarks/frontier.py --out runs/frontier --seed 0 --rl 8             # RL on a student's folded rollouts
    python benchmarks/frontier.py --out runs/frontier --seed 0 --points           # evaluate everything that is there
    python benchmarks/frontier.py --out runs/frontier --table --plot frontier.png # all seeds

Breadcrumbs' three tasks, each in its own folder, in stays of 25 minutes (their times are guesses). Give a line again
until it says that nothing is left; it goes on where it was:

    sparse-rl warmup countdown-search-warmup --out models/countdown-search     # linsys-warmup, stargraph-warmup
    S="--study countdown --out runs/frontier-countdown --seed 0 --minutes 23"  # linsys, stargraph
    python benchmarks/frontier.py $S --joint models/countdown-search --patience 4
    python benchmarks/frontier.py $S --late --patience 4
    python benchmarks/frontier.py $S --rl 8 --of late
    python benchmarks/frontier.py $S --points
    python benchmarks/frontier.py --study countdown --out runs/frontier-countdown --table --plot countdown.png

Runs are `sparse-rl train RECIPE` (--study sums: tiny-sums, for a CPU) with other keys (--set KEY VALUE); a stopped run
continues. With --patience N a run goes on beyond run.steps until no student has gained 0.01 of held-out accuracy over
its last N evaluations. An evaluation in points.jsonl is not repeated unless its run has continued since: then the newer
one counts. The teacher's own curve comes from the length of its responses: capped at n tokens, its dense cache ends at
n entries, and a response without an answer by then counts as wrong. "longer" is a student that may answer c / 2 times
as long as in training, so that with every c its beacons take as many entries.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
FREE = (
    "random",
    "window",
    "tova",
    "snapkv",
    "rkv",
)  # compressors without training, on the teacher; they keep the prompt
GAIN = 0.01  # of held-out accuracy: less is no improvement
MOST_STEPS = 5000  # of a run that goes on until its students stop improving
LEARNED = ("joint", "late", "RL")  # how the curves of students begin
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

    return find_checkpoints(folder / "checkpoints")[-1][1]


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


def late(args) -> None:
    """Students of the finished teacher."""
    from sparse_rl.config import load_recipe

    before = run_folder(args, f"late{args.part}") / "recipe.yaml"  # whose teacher may have been removed since
    teacher = load_recipe(before).model.name if before.exists() else last_checkpoint(run_folder(args, "joint"))
    train(args, f"late{args.part}", model__name=teacher, student__freeze_teacher="true")


def student_of(args, kind: str, chunk: int) -> Path:
    """The newest student of `kind` for chunks of this size: its own, or the one for any size."""
    runs = [run_folder(args, "joint")] if kind == "joint" else late_folders(args)
    folders = [folder for run in runs for folder in sorted((last_checkpoint(run) / "students").iterdir())]
    sizes = {folder: folder.name.removeprefix("c").split("-") for folder in folders}
    found = [folder for folder in folders if str(chunk) in sizes[folder]]
    if not found:
        sys.exit(
            f"frontier: there is no {kind} student for chunks of {chunk}; there are {', '.join(map(str, folders))}."
        )
    return min(found, key=lambda folder: len(sizes[folder]))


def reinforce(args, chunk: int) -> None:
    """RL on a student's own folded rollouts."""
    kind = f"rl-c{chunk}-of-{args.of}"
    before = run_folder(args, kind) / "recipe.yaml"
    keys = {"rollout__compressor": f"beacon:{chunk}", "rollout__compressor_options": "{}", "learn__method": "shadow"}
    if before.exists():  # the run that it came from may have gone on
        from sparse_rl.config import load_recipe

        model = load_recipe(before).model.name
    else:
        model = student_of(args, args.of, chunk)
    train(args, kind, model__name=model, student__chunks="[]", **keys)


@contextmanager
def stopped_after(minutes: float) -> Iterator[None]:
    """Ask what runs inside to stop when time is over, as Ctrl-C would: a run saves a checkpoint, and can go on."""
    clock = threading.Timer(min(60 * minutes, threading.TIMEOUT_MAX), os.kill, (os.getpid(), signal.SIGTERM))
    clock.daemon, end = True, time.perf_counter() + 60 * minutes
    from sparse_rl.signals import stoppable

    clock.start()
    try:
        with stoppable():
            yield
    except KeyboardInterrupt:
        if time.perf_counter() < end:
            raise
        print("time is over; give the same command again.", flush=True)
    finally:
        clock.cancel()


# ------------------------------------------------------------------------------------------------------------ points


def wanted(args) -> Iterator[tuple[str, str, Path, dict]]:
    """(curve, label, model, engine) of every evaluation but the teacher's own."""
    from sparse_rl.beacon import beacon_of
    from sparse_rl.models import load_model

    teacher = last_checkpoint(run_folder(args, "joint"))
    for kind, run in [("joint", run_folder(args, "joint")), *(("late", run) for run in late_folders(args))]:
        for folder in sorted((last_checkpoint(run) / "students").iterdir()):
            sizes = beacon_of(load_model(str(folder))[0]).chunks
            curve = kind if len(sizes) == 1 else f"{kind}, any c"
            for chunk in sizes:
                yield curve, f"c = {chunk}", folder, {"compressor": "beacon", "chunk": chunk}
            for chunk in sizes:  # the paper's other argument: as many entries, and longer thinking
                longer = {"compressor": "beacon", "chunk": chunk, "times": chunk / 2}
                if chunk > 2:
                    yield f"{curve}, longer", f"c = {chunk}", folder, longer
            doubled = {2**i for i in range(1, 32) if 2**i <= max(sizes)}  # where the rule may end a chunk
            for threshold in THRESHOLDS if doubled <= set(sizes) else ():
                options = {"compressor": "beacon", "chunk": max(sizes), "threshold": threshold}
                yield f"{kind}, by surprise", f"{threshold} nats", folder, options
    for run in sorted(args.out.glob(f"rl-c*-{args.seed}")):
        if (run / "checkpoints").is_dir():
            _, chunk, _, kind, _ = run.name.split("-")
            chunk = int(chunk.removeprefix("c"))
            yield f"RL of {kind}", f"c = {chunk}", last_checkpoint(run), {"compressor": "beacon", "chunk": chunk}
    for name, budget in itertools.product(FREE, STUDIES[args.study].budgets):
        yield name, str(budget), teacher, {"compressor": name, "budget": budget}


def points(args) -> None:
    file = args.out / "points.jsonl"
    done = {(row["seed"], row["curve"], row["label"], row.get("steps")) for row in read(file)}
    end = time.perf_counter() + 60 * args.minutes
    with file.open("a") as lines:
        if not any(
            (args.seed, "teacher", str(cap), steps_of(run_folder(args, "joint"))) in done
            for cap in STUDIES[args.study].caps
        ):
            for row in capped(args):
                lines.write(json.dumps(row) + "\n")
        for curve, label, folder, options in wanted(args):
            steps = steps_of(next(parent.parent for parent in folder.parents if parent.name == "checkpoints"))
            if (args.seed, curve, label, steps) in done or time.perf_counter() > end:
                continue
            row = {
                "seed": args.seed,
                "curve": curve,
                "label": label,
                "steps": steps,
                **evaluate(args, folder, dict(options)),
            }
            print(
                f"{curve}, {label}: {row['accuracy']:.3f} at {row['entries']:.0f} entries, {row['seconds']:.1f} s",
                flush=True,
            )
            lines.write(json.dumps(row) + "\n")
            lines.flush()


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


# ----------------------------------------------------------------------------------------------------------- results


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.open()] if file.exists() else []


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
    low, high = min(row["entries"] for row in rows), max(row["entries"] for row in rows if row["curve"] == "teacher")
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
    colors = dict(zip((c for c in curves(rows) if c != "teacher"), [f"C{i}" for i in range(10)] + ["gold", "navy"])) | {
        "teacher": "black"
    }
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
    parser.add_argument("--of", choices=("joint", "late"), default="joint", help="whose student --rl starts from")
    parser.add_argument(
        "--patience", type=int, default=0, help="evaluations without a gain that end a run; 0: run.steps"
    )
    parser.add_argument("--points", action="store_true", help="evaluate what is there")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop training, and start no evaluation, after this")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    parser.add_argument(
        "--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="change a key of the recipe"
    )
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with stopped_after(args.minutes):
        if args.joint:
            train(args, "joint", model__name=args.joint)
        if args.late:
            late(args)
        if args.rl:
            reinforce(args, args.rl)
    if args.points:
        points(args)
    rows = read(args.out / "points.jsonl")
    if args.table:
        print(f"{table(rows)}\n\nWith no more entries:\n\n{at_equal_entries(rows)}")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
