"""Does it learn with long responses, on one GPU? Methods x settings x seeds of a study; several runs share the device.

    python benchmarks/learning_gpu.py --out runs/search --warm --until 0.4 --minutes 3   # the model all runs start from
    python benchmarks/learning_gpu.py --out runs/search --pilot                          # what each setting does to it
    python benchmarks/learning_gpu.py --out runs/search --arms --settings "rkv 128,rkv 64" --processes 7 --minutes 9
    python benchmarks/learning_gpu.py --out runs/search --table --plot curves.png

    --study algorithms   GRPO, online DPO and PPO under shadow and under sparse-rl, countdown by search at R-KV 96
    --study distill      smd's directions x weights 0.01, 0.1, 1 beside shadow and sparse-rl, on countdown by search
    --study joint        the compressor `learned`, trained between steps, beside rkv and snapkv, countdown, 96 slots
    --study checks       shadow that scores every trajectory, and online DPO with a dense reference, same cache
    --study recall-long  prompt-only on prompts of 8,400 tokens: methods, who chooses (snapkv, rkv, ...), how much stays
                         (its retention: the budget over the prompt), whole or chunk by chunk

Blocks for stays of 25 minutes on one H200 (their times are guesses); each can be repeated, and goes on:

    python benchmarks/learning_gpu.py --study algorithms --out runs/algorithms --warm --until 0.75 --minutes 8
    python benchmarks/learning_gpu.py --study algorithms --out runs/algorithms --arms --processes 7 --minutes 23
    python benchmarks/learning_gpu.py --study distill --out runs/distill --model runs/algorithms/warm --arms \\
        --processes 7 --minutes 23                                                                      # twice
    python benchmarks/learning_gpu.py --study joint --out runs/joint-countdown --model runs/algorithms/warm --arms \\
        --processes 8 --minutes 23                                                                      # twice
    python benchmarks/learning_gpu.py --study recall-long --out runs/recall-long --warm --until 0.5 --minutes 23
    python benchmarks/learning_gpu.py --study recall-long --out runs/recall-long --pilot
    python benchmarks/learning_gpu.py --study recall-long --out runs/recall-long --arms --seeds 1 --processes 4 \\
        --minutes 23                                                                    # methods at retention 6 %
    python benchmarks/learning_gpu.py --study recall-long --out runs/recall-long --arms --seeds 1 --processes 4 \\
        --minutes 23 --methods shadow,sparse-rl --settings "snapkv 256,snapkv 1024,snapkv 2048"         # retention
    python benchmarks/learning_gpu.py --study recall-long --out runs/recall-long --arms --seeds 1 --processes 4 \\
        --minutes 23 --methods shadow --settings "rkv 512,knorm 512,tova 512,random 512,window 512,chunked 512"

Every run is `sparse-rl train RECIPE` with other keys, in a process of its own. Finished runs are lines of results.jsonl
and are not repeated, so --arms can be given again; use another folder for other keys (--set). --minutes is the time of
the whole command: --evaluate-minutes before its end, running runs are asked to stop, and each evaluates what it has
reached. The table reads that from their folders, and the next --arms continues them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from arms_cpu import CHOSEN, SCORERS
from learning_report import DENSE, final, plot, table

os.environ.setdefault("OMP_NUM_THREADS", "1")  # every process has one core
CURVES = (
    "reward/mean", "reject/trajectories/frac", "gap/alpha/p05", "gap/abs/mean", "update/grad_norm", "old/entropy/mean",
    "rollout/length/mean", "rollout/truncated/frac", "rollout/loops/frac",
    "eval/dense/accuracy", "eval/sparse/accuracy", "cache/tokens_saved/frac", "cache/bytes_saved/frac",
    "time/rollout", "time/score", "time/update", "time/step", "time/eval", "cache/regret/lost/mean",
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """The cache that rollouts run on."""

    compressor: str
    budget: int
    interval: int
    options: dict = field(default_factory=dict)

    def keys(self) -> dict:
        keys = {"compressor": self.compressor, "budget": self.budget, "interval": self.interval}
        return {f"rollout.{k}": v for k, v in keys.items()} | {"rollout.compressor_options": json.dumps(self.options)}


@dataclass(frozen=True)
class Study:
    warmup: str  # recipes
    recipe: str
    settings: dict[str, Setting]  # the settings that the pilot tries
    chosen: tuple[str, ...]  # the settings that are trained on: a comfortable one, and one that hurts
    methods: tuple[str, ...] = ("none", "sparse-rl", "shadow")
    keys: dict[str, str] = field(default_factory=dict)  # changed in both recipes
    variants: dict[str, dict[str, str]] = field(default_factory=dict)  # methods by another name: keys of the recipe

    def method(self, name: str) -> dict[str, str]:
        """The keys of a method, `dense` and variants included."""
        return self.variants.get(name) or {"learn.method": "none" if name == DENSE else name}


DISTILLATIONS = {
    f"{direction} {weight}": {
        "learn.method": "smd",
        "learn.distill": direction,
        "learn.distill_weight": weight,
    }
    for direction in ("dense-to-shadow", "shadow-to-dense-forward", "shadow-to-dense-reverse")
    for weight in ("0.01", "0.1", "1.0")
}
AT_A_TENTH = {name: keys for name, keys in DISTILLATIONS.items() if name.endswith(" 0.1")}
ALGORITHMS = {
    f"{algorithm} {method}": {"learn.algorithm": algorithm, "learn.method": method, **keys}
    for algorithm, keys in CHOSEN.items()
    for method in ("shadow", "sparse-rl")
}
JOINT = {  # names without commas, which separate them on the command line
    f"{name.replace(',', '')} {method}": {"learn.method": method, **keys}
    for name, (keys, methods) in SCORERS.items()
    for method in methods
}
CHECKS = {
    "rescored": {"learn.method": "shadow", "learn.rescore": "always"},
    "online-dpo": ALGORITHMS["online-dpo shadow"],
    "dense-reference": {**ALGORITHMS["online-dpo shadow"], "dpo.reference": "dense"},
}


def on_countdown(variants: dict[str, dict[str, str]], methods: tuple[str, ...]) -> Study:
    """Methods at 96 slots, the budget that hurts."""
    return Study(
        warmup="countdown-search-warmup",
        recipe="countdown-search",
        settings={"rkv 96": Setting("rkv", 96, 16, {"protect_prompt": True})},
        chosen=("rkv 96",),
        methods=methods,
        variants=variants,
    )


STUDIES = {
    "search": Study(
        warmup="countdown-search-warmup",
        recipe="countdown-search",
        settings={
            f"rkv {budget}": Setting("rkv", budget, 16, {"protect_prompt": True})
            for budget in (40, 48, 64, 80, 96, 128, 192)
        },
        chosen=("rkv 128", "rkv 64"),
    ),
    "recall": Study(
        warmup="recall-warmup",
        recipe="recall",
        settings={
            f"prompt {budget}": Setting("prompt-only", budget, 1, {"window": 16})
            for budget in (48, 64, 96, 128, 192, 256, 384)
        },
        chosen=("prompt 256", "prompt 96"),
    ),
    "algorithms": on_countdown(ALGORITHMS, tuple(ALGORITHMS)),
    "distill": on_countdown(DISTILLATIONS, ("shadow", "sparse-rl", *DISTILLATIONS)),
    "joint": on_countdown(JOINT, tuple(JOINT)),
    "checks": on_countdown(CHECKS, ("shadow", *CHECKS)),
    "recall-long": Study(
        warmup="recall-long-warmup",
        recipe="recall-long",
        settings={
            **{f"snapkv {n}": Setting("prompt-only", n, 1, {"window": 16}) for n in (256, 512, 1024, 2048)},
            **{f"{name} 512": Setting(f"prompt-only:{name}", 512, 1) for name in ("rkv", "knorm", "tova", "random")},
            "window 512": Setting("prompt-only:window", 512, 1),
            "chunked 512": Setting("prompt-only", 512, 1, {"window": 16, "prompt_chunk": 2048}),
        },
        chosen=("snapkv 512",),
        methods=("shadow", "sparse-rl", *AT_A_TENTH),
        variants=DISTILLATIONS,
    ),
}


@dataclass(frozen=True)
class Arm:
    method: str
    setting: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.method}-{self.setting}-{self.seed}".replace(" ", "")


@dataclass(frozen=True)
class Plan:
    """What the command line asks for."""

    study: Study
    out: Path
    settings: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: int
    processes: int
    minutes: float
    evaluate_minutes: float  # of these, for runs that were stopped
    until: float  # held-out accuracy at which warm-up ends
    more: tuple[tuple[str, str], ...]  # keys of the recipe, changed
    model: Path | None = None  # a warm start that is there already

    @property
    def warm(self) -> Path:
        return self.model or self.out / "warm"

    def arms(self) -> list[Arm]:
        """Seed by seed, so that finished runs are balanced."""
        here = [(DENSE, DENSE)] if DENSE in self.methods else []
        here += itertools.product((m for m in self.methods if m != DENSE), self.settings)
        return [Arm(method, setting, seed) for seed in range(self.seeds) for method, setting in here]

    def recipe(self, name: str, keys: dict):
        """A recipe with the keys of the study, of the command line and, last, of `keys`."""
        from sparse_rl.config import load_recipe

        return load_recipe(
            name, [*self.study.keys.items(), *self.more, *((key, str(value)) for key, value in keys.items())]
        )

    def setting(self, name: str) -> Setting:
        return Setting("dense", 1, 1) if name == DENSE else self.study.settings[name]


# ---------------------------------------------------------------------------------------------------- the warm start


def warm(plan: Plan) -> None:
    """Make --out/warm, or continue it, round after round until it is good enough or time is over."""
    import torch

    end = time.perf_counter() + plan.minutes * 60
    if plan.until and (known := reached(plan.out / "warm")) >= plan.until:
        print(f"{plan.out / 'warm'} has a held-out accuracy of {known:.3f} already", flush=True)
        return
    torch.set_float32_matmul_precision("high")
    while (found := warm_round(plan, end - time.perf_counter())) is not None and found < plan.until:
        pass
    torch.set_float32_matmul_precision("highest")  # rollouts and learner must round alike
    if reached(plan.out / "warm") < plan.until:
        print(f"it is not at {plan.until} yet; give the same command again.", flush=True)


def reached(folder: Path) -> float:
    """Held-out accuracy of a whole warm-up; 0 where it is not known."""
    from sparse_rl.files import read_lines

    last = read_lines(folder / "metrics.jsonl")[-1:]
    return last[0].get("eval/dense/accuracy", 0.0) if last else 0.0


def check_warm(plan: Plan) -> None:
    if not (plan.warm / "config.json").exists():
        sys.exit(f"learning_gpu: {plan.warm} holds no model; make it with --warm, or name one with --model.")


def warm_round(plan: Plan, seconds: float) -> float | None:
    """One warm-up on problems that no earlier one had: its held-out accuracy, or None if time was over.

    Earlier models are kept.
    """
    from sparse_rl.config import load_recipe
    from sparse_rl.files import find_checkpoints
    from sparse_rl.signals import stoppable
    from sparse_rl.train.warmup import is_finished, warmup

    folder, following = plan.out / "warm", plan.out / "warm-next"
    turn = 1 + load_recipe(folder).task.options.get("seed", 0) if folder.exists() else 0
    keys = {"task.seed": turn} | ({"model.name": folder} if turn else {})
    shutil.rmtree(following, ignore_errors=True)
    plan.out.mkdir(parents=True, exist_ok=True)
    late = threading.Timer(min(max(seconds, 0), threading.TIMEOUT_MAX), os.kill, (os.getpid(), signal.SIGTERM))
    start, late.daemon, accuracy = time.perf_counter(), True, None
    with stoppable():
        try:
            late.start()
            accuracy = warmup(plan.recipe(plan.study.warmup, keys), following)["accuracy"]
        except KeyboardInterrupt:
            if seconds > time.perf_counter() - start:  # it was not the clock
                raise
        finally:
            late.cancel()
    stopped = find_checkpoints(following / "checkpoints")  # with the model of the moment when time was over
    if is_finished(following) or stopped:
        if turn:
            folder.rename(plan.out / f"warm-{turn - 1}")
        if not is_finished(following):
            shutil.copy(following / "recipe.yaml", stopped[-1][1])
            following = stopped[-1][1]
        following.rename(folder)
    found = "time is over" if accuracy is None else f"held-out accuracy {accuracy:.3f}"
    print(f"warm-up {turn}: {found}, {time.perf_counter() - start:.0f} s", flush=True)
    return accuracy


def pilot(plan: Plan) -> str:
    """One rollout of the warm model on every setting: how often it is right, and what sparse-rl would see."""
    check_warm(plan)
    heads = ["setting", "accuracy", "rejected", "alpha p05", "mean gap", "length", "truncated"]
    heads += ["tokens saved", "bytes saved", "seconds"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    print("\n".join(lines))
    for name in (DENSE, *plan.study.settings):
        lines.append(tried(plan, name))
        print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


def tried(plan: Plan, name: str) -> str:
    from sparse_rl.learn.batch import apply_correction
    from sparse_rl.train.log import Clock
    from sparse_rl.train.loop import Trainer

    sizes = plan.recipe(plan.study.recipe, {}).eval
    keys = plan.setting(name).keys() | {"learn.method": "sparse-rl", "run.diagnose": 16, "task.split": "held-out"}
    keys |= {
        "model.name": plan.warm,
        "rollout.prompts": sizes.prompts,
        "rollout.group_size": max(2, sizes.samples),
    }
    trainer = Trainer(plan.recipe(plan.study.recipe, keys), plan.out / "pilot", show=False)
    start, clock = time.perf_counter(), Clock()
    rollout = trainer.collect(clock)
    found = trainer.diagnose(rollout, apply_correction(rollout.scored, trainer.correction), clock)
    saved = trainer.sampler.engine.kv_bytes_saved(rollout.trajectories)
    return (
        f"| {name} | {found['reward/mean']:.3f} | {found['reject/trajectories/frac']:.1%} | "
        f"{found['gap/alpha/p05']:.3f} | {found['gap/abs/mean']:.4f} | "
        f"{found['rollout/length/mean']:.0f} | {found['rollout/truncated/frac']:.1%} | "
        f"{found['cache/tokens_saved/frac']:.0%} | {saved:.0%} | "
        f"{time.perf_counter() - start:.1f} |"
    )


# ---------------------------------------------------------------------------------------------------------- the runs


def run(plan: Plan, arm: Arm) -> None:
    """One run, in its folder. A dense-trained model is also tried on every setting at the end."""
    import torch

    torch.set_num_threads(1)
    from sparse_rl.files import find_checkpoints, write_text

    folder, trainer = plan.out / "runs" / arm.name, None
    with contextlib.suppress(KeyboardInterrupt):  # stopped, as asked; what there is is in the folder
        trainer = trained(plan, arm)
    finished = trainer is not None
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # evaluations are short, and time is kept for them
    if trainer is None:
        found = find_checkpoints(folder / "checkpoints")
        if not found:
            sys.exit(130)
        trainer = trained(plan, arm, last=found[-1][0])
    names = plan.settings if arm.method == DENSE else ()
    under = {name: under_setting(trainer, plan.setting(name)) for name in names}
    write_text(folder / "under.json", json.dumps({"finished": finished, "under": under}))
    if not finished:
        sys.exit(130)


def trained(plan: Plan, arm: Arm, last: int | None = None):
    """The trainer of a run that goes on to its end, or only to its step `last`, which is then evaluated."""
    from sparse_rl.train.run import train

    folder = plan.out / "runs" / arm.name
    keys = plan.setting(arm.setting).keys() | plan.study.method(arm.method)
    keys |= {"model.name": plan.warm, "run.seed": arm.seed, "run.samples": 0}
    keys |= {} if last is None else {"run.steps": last}
    return train(plan.recipe(plan.study.recipe, keys), folder, resume=(folder / "recipe.yaml").exists(), show=False)


def under_setting(trainer, setting: Setting) -> float:
    """Accuracy of a run's model on another cache, on the prompts of its evaluations."""
    from sparse_rl.compressors import make
    from sparse_rl.rollout import Engine
    from sparse_rl.streams import stream_key
    from sparse_rl.train.held_out import accuracy

    recipe = trainer.recipe
    engine = Engine(
        trainer.model,
        make(setting.compressor, **setting.options),
        setting.budget,
        setting.interval,
        recipe.rollout.rows,
    )
    prompts = trainer.held_out.sample(0, recipe.eval.prompts)
    seed = stream_key(recipe.run.seed, [-2])
    return accuracy(
        engine, trainer.tokenizer, trainer.held_out, prompts, recipe.eval.samples, trainer.sampler.sampling, seed
    )["accuracy"]


def read_run(folder: Path, arm: Arm) -> dict:
    """What a run has written so far: every curve as [step, value] pairs."""
    from sparse_rl.files import read_lines

    lines = [line for name in ("metrics", "timing") for line in read_lines(folder / f"{name}.jsonl")]
    curves = {
        key: [[line["step"], round(line[key], 4)] for line in lines if line.get(key) is not None] for key in CURVES
    }
    told = {"finished": False, "under": {}}
    if (folder / "under.json").exists():
        told = json.loads((folder / "under.json").read_text())
    steps = max((line["step"] for line in lines), default=0)
    return {**dataclasses.asdict(arm), **told, "steps": steps, "curves": curves}


def run_arms(plan: Plan) -> None:
    """All arms that are not in results.jsonl, `processes` at a time; those that run when time is over are stopped."""
    check_warm(plan)
    start, results = time.perf_counter(), plan.out / "results.jsonl"
    done = {(row["method"], row["setting"], row["seed"]) for row in finished_rows(plan.out)}
    waiting = [arm for arm in plan.arms() if (arm.method, arm.setting, arm.seed) not in done]
    for arm, seconds, code in in_processes(waiting, plan, start + plan.minutes * 60):
        folder = plan.out / "runs" / arm.name
        row = read_run(folder, arm) | {"seconds": round(seconds)}
        if row["finished"]:
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            with results.open("a") as file:
                file.write(json.dumps(row) + "\n")
        state = (
            f"dense {final(row, 'dense'):.2f}"
            if row["finished"]
            else f"stopped at step {row['steps']}, exit code {code}"
        )
        print(
            f"{time.perf_counter() - start:5.0f} s  {arm.name}: {state}, {seconds:.0f} s", file=sys.stderr, flush=True
        )
    done = {(row["method"], row["setting"], row["seed"]) for row in finished_rows(plan.out)}
    if left := [arm.name for arm in plan.arms() if (arm.method, arm.setting, arm.seed) not in done]:
        print(f"not finished: {', '.join(left)}; give the same command again.", file=sys.stderr, flush=True)


def in_processes(arms: list[Arm], plan: Plan, end: float) -> Iterator[tuple[Arm, float, int]]:
    """(arm, seconds, exit code) of each run as it ends. Some time before `end` no run starts any more, and those that
    are not over are asked to stop and evaluate; at `end` they are killed.
    """
    spawn, waiting, running = multiprocessing.get_context("spawn"), list(arms), {}
    stops = [(end - 60 * min(plan.evaluate_minutes, plan.minutes / 2), "terminate"), (end, "kill")]
    while running or (waiting and len(stops) == 2):
        while waiting and len(stops) == 2 and len(running) < plan.processes:
            arm = waiting.pop(0)
            process = spawn.Process(target=run, args=(plan, arm))
            process.start()
            running[arm] = (process, time.perf_counter())
        if stops and time.perf_counter() > stops[0][0]:
            _, stop = stops.pop(0)
            for process, _ in running.values():
                getattr(process, stop)()
        for arm, (process, began) in list(running.items()):
            if not process.is_alive():
                del running[arm]
                yield arm, time.perf_counter() - began, process.exitcode
        time.sleep(0.1)


def finished_rows(out: Path) -> list[dict]:
    results = out / "results.jsonl"
    return [json.loads(line) for line in results.open()] if results.exists() else []


def all_rows(plan: Plan) -> list[dict]:
    """Finished runs, and what the others have written."""
    rows = finished_rows(plan.out)
    done = {(row["method"], row["setting"], row["seed"]) for row in rows}
    others = [
        read_run(plan.out / "runs" / arm.name, arm)
        for arm in plan.arms()
        if (arm.method, arm.setting, arm.seed) not in done
    ]
    return rows + [row for row in others if row["steps"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", choices=STUDIES, default="search")
    parser.add_argument("--out", type=Path, default=Path("runs/learning-gpu"))
    parser.add_argument("--warm", action="store_true", help="make the model that runs start from, or continue it")
    parser.add_argument("--model", type=Path, help="the model that runs start from, instead of that of --warm")
    parser.add_argument("--pilot", action="store_true", help="try the warm model on every setting")
    parser.add_argument("--arms", action="store_true", help="train")
    parser.add_argument("--table", action="store_true", help="print the table of all runs so far")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw the curves of all runs so far")
    parser.add_argument("--settings", help="settings of the study, such as 'rkv 128,rkv 64'")
    parser.add_argument("--methods", help="`dense`, values of learn.method, and variants of the study")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--processes", type=int, default=7)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end --warm or --arms after this time")
    parser.add_argument(
        "--evaluate-minutes", type=float, default=1.5, help="of the time of --arms, kept to evaluate stopped runs"
    )
    parser.add_argument(
        "--until", type=float, default=0.0, help="repeat --warm until this held-out accuracy; 0: one round"
    )
    parser.add_argument(
        "--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="change a key of the recipe"
    )
    args = parser.parse_args()
    study = STUDIES[args.study]
    settings = tuple(args.settings.split(",")) if args.settings else study.chosen
    methods = tuple(args.methods.split(",")) if args.methods else (DENSE, *study.methods)
    unknown = [name for name in settings if name not in study.settings]
    if unknown:
        parser.error(f"study {args.study} has no setting {unknown[0]!r}; it has {', '.join(study.settings)}")
    from sparse_rl.learn.method import METHODS

    known = (DENSE, *METHODS, *study.variants)
    if unknown := [name for name in methods if name not in known]:
        parser.error(f"there is no method {unknown[0]!r}; there are {', '.join(known)}")
    more = tuple((key, value) for key, value in args.set)
    clock = (args.minutes, args.evaluate_minutes)
    plan = Plan(study, args.out, settings, methods, args.seeds, args.processes, *clock, args.until, more, args.model)
    if not (args.warm or args.pilot or args.arms or args.table or args.plot):
        parser.error("there is nothing to do; give --warm, --pilot, --arms, --table or --plot PNG")
    if args.warm and args.model:
        parser.error("--warm makes the model that --model names; give one of them")
    if args.warm:
        warm(plan)
    if args.pilot:
        (plan.out / "pilot.md").write_text(pilot(plan))
    if args.arms:
        run_arms(plan)
    rows = all_rows(plan) if args.table or args.plot else []
    if not rows and (args.table or args.plot):
        sys.exit(f"learning_gpu: {plan.out} has no run of these methods and settings yet; make some with --arms.")
    if args.table:
        print(table(rows))
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        plot(rows, args.plot)


if __name__ == "__main__":
    from sparse_rl.errors import SparseRLError

    try:
        main()
    except SparseRLError as error:
        sys.exit(f"learning_gpu: {error}")
