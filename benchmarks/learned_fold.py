r"""Folds that the policy chooses (beacon:LEAST-MOST) against chunks of equal length, at equal mean cache entries.

    sparse-rl warmup tiny-sums-warmup --out models/sums4 --model.name tiny-sums --task.count 4 --warmup.steps 100 \
        --warmup.lr 1e-3                                                                    # the teacher
    python benchmarks/learned_fold.py --out runs/fold --seed 0 --student                    # distillation, drawn sizes
    python benchmarks/learned_fold.py --out runs/fold --seed 0 --arms                       # RL of every arm
    python benchmarks/learned_fold.py --out runs/fold --table                               # all seeds
    python benchmarks/learned_fold.py --study countdown --out runs/fold-countdown --seed 0 \
        --teacher models/countdown-search --student --arms --minutes 23        # a GPU; give it again to go on; several
                                                                               # seeds, or --only PART, share a device

All arms of a seed start from one student, which was distilled with the size of every chunk drawn, and learn by
reinforcement on their own folded rollouts for as many steps: with chunks of 2, 4, 8, ... tokens, and with folds of the
policy's choice at several prices per cache entry. `--price 0` and the rows `before` say what choosing does without a
price, and before it is learned. A stopped run continues; finished ones are not repeated. --minutes is the time of the
whole command: what an arm has reached shortly before its end is measured, and measured again when it has gone on.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from stay import Stay

os.environ.setdefault("OMP_NUM_THREADS", "1")


@dataclass(frozen=True)
class Study:
    recipe: str
    teacher: str
    keys: dict[str, str]  # of all runs
    most: int  # tokens of the longest chunk
    fixed: tuple[int, ...]
    student: dict[str, str]  # keys of the distillation
    arms: dict[str, str]  # of reinforcement learning
    prices: tuple[float, ...]
    prompts: int  # held out


STUDIES = {
    "sums": Study(
        recipe="tiny-sums",
        teacher="models/sums4",  # sparse-rl warmup tiny-sums-warmup --model.name tiny-sums --task.count 4 ...
        keys={
            **{"task.count": "4", "rollout.max_new_tokens": "32", "rollout.compressor_options": "{}"},
            **{"rollout.rows": "64", "rollout.prompts": "8"},
            **{"run.diagnose": "0", "run.samples": "0", "eval.every": "0", "run.checkpoint_every": "50"},
        },
        most=8,
        fixed=(2, 4, 8),
        student={"student.lr": "2e-3", "run.steps": "150"},
        arms={"optimizer.lr": "2e-4", "run.steps": "50"},
        prices=(0.0, 0.02),
        prompts=256,
    ),
    "countdown": Study(
        recipe="countdown-beacons",
        teacher="models/countdown-search",
        keys={"run.diagnose": "0", "run.samples": "0", "eval.every": "0"},
        most=32,
        fixed=(2, 4, 8, 16, 32),
        student={"student.lr": "1e-3", "run.steps": "400"},
        arms={"run.steps": "100", "learn.advantage": "dr-grpo"},  # students are seldom right
        prices=(0.0, 0.002, 0.005),  # a right answer earns 1 and holds 20 to 90 entries beside the prompt
        prompts=512,
    ),
}


def run_folder(args, name: str) -> Path:
    return args.out / f"{name}-{args.seed}"


def last_checkpoint(folder: Path) -> tuple[int, Path] | None:
    from sparse_rl.files import find_checkpoints

    return next(reversed(find_checkpoints(folder / "checkpoints")), None)


def student_of(args) -> Path:
    """A copy of the student that the arms of a seed start from, which no later distillation changes."""
    seed = args.seed if args.student_seed is None else args.student_seed
    run, copy = args.out / f"student-{seed}", args.out / f"start-{seed}"
    if (copy / "config.json").exists():
        return copy
    found = last_checkpoint(run)
    if found is None:
        sys.exit(f"learned_fold: {run} has no student yet; make it with --student.")
    if found[0] < int(steps_of(args, "student")):
        sys.exit(f"learned_fold: the student in {run} is at step {found[0]}; go on with --student before --arms.")
    (folder,) = (found[1] / "students").iterdir()
    part = shutil.copytree(folder, args.out / f"{copy.name}.{os.getpid()}")  # others may do the same (--only)
    part.rename(copy) if not copy.exists() else shutil.rmtree(part)
    return copy


def steps_of(args, stage: str) -> str:
    """The steps of a whole run: of the distillation (`student`) or of an arm (`arms`)."""
    return dict(map(tuple, args.set)).get("run.steps", getattr(STUDIES[args.study], stage)["run.steps"])


def train(args, name: str, keys: dict[str, str]) -> Path:
    from sparse_rl.config import load_recipe
    from sparse_rl.train.run import train as start

    folder, study = run_folder(args, name), STUDIES[args.study]
    keys = {**study.keys, **keys, "run.seed": str(args.seed)}
    recipe = load_recipe(study.recipe, [*keys.items(), *map(tuple, args.set)])
    start(recipe, folder, resume=(folder / "recipe.yaml").exists(), show=False)
    return folder


def distil(args) -> None:
    """A student that has seen chunks of every size, each drawn on its own."""
    study = STUDIES[args.study]
    sizes = list(range(2, study.most + 1))
    fixed = {"rollout.compressor": "dense", "learn.method": "none", "student.freeze_teacher": "true"}
    own = {"student.chunks": f"[{sizes}]", "student.draw": "chunk", "model.name": args.teacher or study.teacher}
    train(args, "student", {**fixed, **own, **study.student})


def arms_of(args) -> dict[str, tuple[str, dict[str, str]]]:
    """By name: compressor and further keys."""
    study = STUDIES[args.study]
    chooses = f"beacon:2-{study.most}"
    arms: dict[str, tuple[str, dict[str, str]]] = {f"c = {c}": (f"beacon:{c}", {}) for c in study.fixed}
    for price in args.price or study.prices:
        more = {"task.entry_price": str(price), "rollout.start_chunk": str(args.start_chunk)}
        arms[f"chosen, price {price:g}"] = (chooses, more)
    return arms


def arms(args, stay: Stay) -> None:
    """Every arm before and after its reinforcement learning; a line of points.jsonl each."""
    chosen = {arm: found for arm, found in arms_of(args).items() if args.only in arm}
    if not chosen:
        sys.exit(f"learned_fold: no arm's name holds {args.only!r}; there are {', '.join(arms_of(args))}.")
    start = student_of(args)
    for arm, (compressor, _) in chosen.items():
        write_point(args, arm, compressor, "before", 0, start, stay)
    stay.train(lambda: train_arms(args, chosen, start, stay))
    for arm, (compressor, _) in chosen.items():  # one of them may have been stopped
        found = last_checkpoint(run_folder(args, name_of(arm)))
        if found is not None:
            write_point(args, arm, compressor, "after", *found, stay)


def train_arms(args, chosen: dict[str, tuple[str, dict[str, str]]], start: Path, stay: Stay) -> None:
    for arm, (compressor, more) in chosen.items():
        if is_measured(args, arm):
            continue
        keys = {**STUDIES[args.study].arms, "rollout.compressor": compressor, "learn.method": "shadow"}
        folder = train(args, name_of(arm), {**keys, "model.name": str(start), **more})
        found = last_checkpoint(folder)
        assert found is not None
        write_point(args, arm, compressor, "after", *found, stay)


def is_measured(args, arm: str) -> bool:
    """Whether an arm was trained to its end and measured there."""
    last = int(steps_of(args, "arms"))
    return any(
        (row["seed"], row["arm"], row["when"]) == (args.seed, arm, "after") and row.get("steps", last) >= last
        for row in read(args.out / "points.jsonl")
    )


def name_of(arm: str) -> str:
    return arm.replace(" ", "").replace("=", "").replace(",", "-")


def write_point(args, arm: str, compressor: str, when: str, steps: int, model: Path, stay: Stay) -> None:
    """Measure an arm, if that was not done at so many steps and there is time."""
    file = args.out / "points.jsonl"
    known = {(row["seed"], row["arm"], row["when"], row.get("steps", steps)) for row in read(file)}
    if (args.seed, arm, when, steps) in known or stay.is_over():
        return
    row = {"seed": args.seed, "arm": arm, "when": when, "steps": steps, **measure(args, model, compressor)}
    with file.open("a") as lines:
        lines.write(json.dumps(row) + "\n")
    print(json.dumps(row), flush=True)


def measure(args, model: Path, compressor: str) -> dict[str, float]:
    """Accuracy on held-out prompts, mean entries, beacons and tokens of a chunk."""
    import torch

    from sparse_rl import tasks
    from sparse_rl.compressors import let_choose, make
    from sparse_rl.config import load_recipe
    from sparse_rl.models import encode, load_model, stop_ids
    from sparse_rl.records import mean_entries
    from sparse_rl.rollout import Engine, Sampling

    study = STUDIES[args.study]
    keys = {**study.keys, "model.name": str(model)}
    recipe = load_recipe(study.recipe, [*keys.items(), *map(tuple, args.set)])
    loaded, tokenizer = load_model(str(model), recipe.model.dtype)
    let_choose(loaded, make(compressor), args.start_chunk)  # before it has learned to
    if torch.cuda.is_available():
        loaded = loaded.cuda()
    task = tasks.make(recipe.task.name, **{**recipe.task.options, **recipe.eval.options}).held_out()
    prompts = task.sample(0, study.prompts)
    engine = Engine(loaded, compressor, rows=recipe.rollout.rows)
    sampling = Sampling(recipe.rollout.max_new_tokens, stop_ids=stop_ids(loaded, tokenizer))
    found = engine.generate([encode(tokenizer, prompt.text) for prompt in prompts], 2, sampling, seed=1)
    texts = tokenizer.batch_decode([t.response_tokens.tolist() for t in found], skip_special_tokens=True)
    grades = task.grade([prompts[t.prompt_index] for t in found], texts)
    beacons = [t.tokens == t.beacon_id for t in found]
    folded = sum(int(t.response_mask[: int(b.nonzero().max())].sum()) for b, t in zip(beacons, found) if b.any())
    count = sum(int(b.sum()) for b in beacons)
    return {
        "accuracy": sum(grade.right for grade in grades) / len(grades),
        "entries": statistics.fmean(mean_entries(t) - t.num_prompt_tokens for t in found),
        "beacons": count / len(found),
        "chunk": folded / max(1, count),
        "length": statistics.fmean(len(t.response_tokens) for t in found),
    }


def read(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def table(args) -> None:
    """A row of every arm before and after, its newest measurement of every seed."""
    newest = {(row["seed"], row["arm"], row["when"]): row for row in read(args.out / "points.jsonl")}
    if not newest:
        sys.exit(f"learned_fold: {args.out / 'points.jsonl'} has no measurement yet; make some with --arms.")
    print("| arm | when | steps | entries beside the prompt | tokens of a chunk | accuracy | by seed |")
    print("|---|---|---|---|---|---|---|")
    for arm, when in dict.fromkeys((row["arm"], row["when"]) for row in newest.values()):
        mine = sorted((r for r in newest.values() if (r["arm"], r["when"]) == (arm, when)), key=lambda r: r["seed"])
        mean = {name: statistics.fmean(r[name] for r in mine) for name in ("entries", "chunk", "accuracy")}
        seeds = ", ".join(f"{r['accuracy']:.2f} at {r['entries']:.1f}" for r in mine)
        steps = ", ".join(str(r.get("steps", "")) for r in mine)
        cells = f"{mean['entries']:.1f} | {mean['chunk']:.1f} | {mean['accuracy']:.2f} | {seeds}"
        print(f"| {arm} | {when} | {steps} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=STUDIES, default="sums")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--teacher", help="the model that the student learns from, if not the study's own")
    parser.add_argument("--price", type=float, nargs="*", help="per cache entry; default: the study's")
    parser.add_argument("--start-chunk", type=float, default=0.0, help="mean tokens of a chunk at first; 0: halfway")
    parser.add_argument("--student-seed", type=int, help="the seed of the student to start from, if not --seed")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"))
    parser.add_argument("--only", default="", help="arms whose name holds this")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of this command, training and measurements")
    parser.add_argument("--measure-minutes", type=float, default=1.0, help="of these, kept to measure a stopped arm")
    parser.add_argument("--student", action="store_true")
    parser.add_argument("--arms", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if not (args.student or args.arms or args.table):
        parser.error("there is nothing to do; give --student, --arms or --table")
    stay = Stay(args.minutes, args.measure_minutes if args.arms else 0.0)
    args.out.mkdir(parents=True, exist_ok=True)
    finished = not args.student or stay.train(lambda: distil(args))
    if args.arms and finished:
        arms(args, stay)
    if args.table:
        table(args)


if __name__ == "__main__":
    from sparse_rl.errors import SparseRLError

    try:
        main()
    except SparseRLError as error:
        sys.exit(f"learned_fold: {error}")
