"""Does it learn with a pretrained model, on one GPU? SmolLM2-135M: one warm start, several methods, their evaluation.

    python benchmarks/smollm2.py prepare --gguf SmolLM2-135M-Instruct.Q4_1.gguf --to models/smollm2
    python benchmarks/smollm2.py warmup --task countdown --seed 0                   # to 30 % or more, round by round
    python benchmarks/smollm2.py probe --task countdown --seed 0                    # what budgets do to the warm start
    python benchmarks/smollm2.py arms --task countdown --seed 0 --budgets 64 --steps 150
    python benchmarks/smollm2.py evaluate --task countdown --seed 0 --budgets 64
    python benchmarks/smollm2.py report --task countdown --seed 0 --budgets 64
    python benchmarks/smollm2.py block --task countdown --seed 0 --budgets 64 --minutes 24 --keep kept    # all of it
    python benchmarks/smollm2.py block --task gsm8k --seed 0 --budgets 96                   # after sparse-rl data gsm8k

A block is one task and one seed: OUT/TASK-SEED holds its warm start, a run per method and budget (and one on a dense
cache), their evaluations, table and pictures. With `--reject 0.1,0.34` instead of `--budgets` a block probes first, and
chooses budgets at which Sparse-RL rejects that much. Everything is `sparse-rl warmup`, `train` and `eval` in processes
of their own that share the device (under CUDA MPS where there is one), and what is finished is not done again. When
time is short all runs are stopped at the same step, so that methods are compared after as many updates; `--keep`
gathers what should be kept (no weights) in one file, again every minute.

Methods are those of `learn.method`, smd-forward and smd-reverse (directions of distillation), and released-cap,
released-mask and released-weights: sparse-rl-released with one part as in sparse-rl. A method may name a compressor:
`--methods dense,shadow,snapkv:sparse-rl,snapkv:shadow` trains two arms under SnapKV. Then every model is evaluated
under every compressor of the block at its budget, so the table also says what a model that was trained under one is
worth under another.

notes are conversations: a tool's replies are most of what rows hold, and `--option forget_given 1` lets them go first.

gsm8k differs from the generated tasks: its problems are files (--data), warm-up is one round of three epochs (more with
--warm-steps 350,350,350, of which the best is taken), dense is compared with sparse-rl-released and shadow, the prompt
is not protected, all 1,319 test problems are asked, and the warm start is also asked greedily and eight times (avg@8,
pass@8).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

from smollm2_report import DENSE, Arm, cache_name, mean_of, newest_checkpoint, probed, read_lines, write_report
from stay import shared_device

END_TOKEN = 2  # <|im_end|>
METHODS = "dense,none,sparse-rl,sparse-rl-released,shadow"
FILES = "gsm8k"  # the task whose problems are in files
EVALUATION_SEED = 7  # of held-out problems other than those that runs look at while they train
KEPT = 16 * 2**20 - 2**18  # bytes of the file of what is kept

# methods by a name of their own: smd's other directions, and the released correction with one of its parts as ours is
RELEASED = {"cap": "{cap: 2.0}", "mask": "{mask_outside: null}", "weights": "{normalise_weights: false}"}
VARIANTS: dict[str, dict[str, object]] = {
    **{
        f"smd-{way}": {"learn.method": "smd", "learn.distill": f"shadow-to-dense-{way}"}
        for way in ("forward", "reverse")
    },
    **{
        f"released-{part}": {"learn.method": "sparse-rl-released", "learn.correction": change}
        for part, change in RELEASED.items()
    },
}

# budgets that `probe` tries where none are named; a story of up to 145 tokens is protected, so less is refused there
PROBED = {
    "countdown": (32, 48, 64, 80, 96, 128, 192),
    "stories": (160, 168, 176, 192, 208, 224, 256),
    "notes": (96, 128, 192, 256, 384, 512, 1024),
    FILES: (48, 64, 80, 96, 112, 128, 160),
}


@dataclass(frozen=True)
class Block:
    """What was asked for on the command line."""

    task: str
    seed: int
    out: Path
    model: str
    budgets: tuple[int, ...]
    methods: tuple[str, ...]
    steps: int
    prompts: int
    group_size: int
    lr: float
    micro_batch_tokens: int | None  # None: as many as fit with all runs on one device of 139 GiB
    compressor: str
    interval: int
    options: tuple[tuple[str, object], ...]  # of the compressor
    warm_steps: tuple[int, ...]  # of each round
    enough: float  # held-out accuracy at which warm-up ends
    too_much: float  # and above which the round before it is taken, if that was good enough to start from
    least: float
    problems: int | None  # None: all
    samples: int
    eval_rows: int
    every_cache: bool
    data: Path
    processes: int = 12  # evaluations at once
    reject: tuple[float, ...] = ()  # shares that sparse-rl should reject at the budgets, where none are named
    more: tuple[tuple[str, str], ...] = ()  # keys of the recipes, changed

    @property
    def folder(self) -> Path:
        return self.out / f"{self.task}-{self.seed}"

    @property
    def warm(self) -> Path:
        return self.folder / "warm"

    @property
    def train_file(self) -> Path:
        return self.data / "train" / "gsm8k.jsonl"

    def problems_of(self, seed: int) -> dict[str, object]:
        """Keys of a recipe that say which problems are used. Those of a file keep the recipe's seed, because it also
        says which of them are held out."""
        return {"task.files": self.train_file} if self.task == FILES else {"task.seed": seed}

    def arms(self) -> list[Arm]:
        here = [Arm(DENSE, None)] if DENSE in self.methods else []
        named = [method.rpartition(":") for method in self.methods if method != DENSE]
        return here + [Arm(method, budget, own or None) for budget in self.budgets for own, _, method in named]

    def caches(self) -> list[tuple[int, str | None]]:
        """(budget, compressor; None: the block's own) of every cache that arms train on."""
        compressors = dict.fromkeys([None, *(arm.compressor for arm in self.arms())])
        return [(budget, compressor) for compressor in compressors for budget in self.budgets]

    def cache(self, budget: int | None, compressor: str | None = None) -> dict[str, str]:
        """Keys of a recipe that say what rollouts run on; None: a dense cache."""
        if budget is None:
            return {"rollout.compressor": "dense", "rollout.compressor_options": "{}"}
        sizes = {"rollout.budget": str(budget), "rollout.interval": str(self.interval)}
        options = json.dumps(dict(self.options))
        own = {"rollout.compressor": compressor or self.compressor, "rollout.compressor_options": options}
        return {**own, **sizes}

    def keys(self, keys: Mapping[str, object]) -> list[str]:
        """Keys of a recipe as arguments, with those changed that the command line says."""
        return [part for name, value in {**keys, **dict(self.more)}.items() for part in (f"--{name}", str(value))]


@dataclass
class Clock:
    """When to be done."""

    minutes: float = math.inf
    began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.minutes * 60 - (time.monotonic() - self.began)

    def until(self, minutes: float) -> Clock:
        """A part of what is left."""
        return Clock(max(0.0, min(minutes, self.left / 60)))

    def but(self, minutes: float) -> Clock:
        """What is left but for the last minutes."""
        return Clock(max(0.0, self.left / 60 - minutes))


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


# ------------------------------------------------------------------------------------------ processes


@dataclass
class Job:
    """A command in a process of its own, which writes to a log."""

    name: str
    process: subprocess.Popen
    log: Path
    began: float
    asked: bool = False  # to stop

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def outcome(self) -> str:
        code = self.process.returncode
        stopped = self.asked and code in (130, -signal.SIGTERM)
        return "done" if code == 0 else "stopped" if stopped else f"FAILED ({code}): {self.tail()}"

    def stop(self) -> None:
        if self.running and not self.asked:
            self.process.terminate()
        self.asked = True

    def kill(self) -> None:
        if self.running:
            self.process.kill()

    def tail(self, characters: int = 600) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return text[-characters:].strip()


JOBS: list[Job] = []  # all that were started, to end them with this process


def start(name: str, arguments: Sequence[str], folder: Path) -> Job:
    """`sparse-rl ARGUMENTS`, one thread of the CPU, its output in folder/log/NAME.log"""
    log = folder / "log" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "sparse_rl", *map(str, arguments)]
    with log.open("a") as file:
        file.write(f"$ {' '.join(command)}\n")
        file.flush()
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
        )
    JOBS.append(Job(name, process, log, time.monotonic()))
    return JOBS[-1]


def wait(
    waiting: Sequence[Job],
    clock: Clock,
    watch: Callable[[], None] = lambda: None,
    grace: float = 30.0,
    more: Sequence[Callable[[], Job]] = (),
    at_once: int = 12,
) -> None:
    """Until all have ended, and those started after them; a failure is told, and costs only its job.

    When time is over nothing starts any more, and what runs is asked to stop, and soon made to.
    """
    waiting, more = list(waiting), list(more)
    while waiting or (more and clock.left > 0):
        while more and len(waiting) < at_once and clock.left > 0:
            waiting.append(more.pop(0)())
        watch()
        for job in [job for job in waiting if not job.running]:
            waiting.remove(job)
            say(f"{job.name}: {job.outcome}, {job.seconds:.0f} s")
        if clock.left < 0:
            for job in waiting:
                job.stop()
        if clock.left < -grace:
            for job in waiting:
                job.kill()
        time.sleep(0.1)


@contextlib.contextmanager
def children_ended(grace: float = 20.0) -> Iterator[None]:
    """Whatever happens, what this process started and is still running ends with it."""
    try:
        yield
    finally:
        for job in JOBS:
            job.stop()
        end = time.monotonic() + grace
        while any(job.running for job in JOBS) and time.monotonic() < end:
            time.sleep(0.1)
        for job in JOBS:
            job.kill()


# ------------------------------------------------------------------------------------------ the stages


def prepare(gguf: str, to: Path) -> None:
    """A model as an ordinary folder whose tokenizer and generation config agree on the end token."""
    if (to / "config.json").exists():
        say(f"{to} is there already")
        return
    from sparse_rl import load_model

    model, tokenizer = load_model(gguf, "bfloat16", device="cpu")
    if gguf.endswith(".gguf"):  # SmolLM2's; some versions of transformers take another end token from such files
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(END_TOKEN)
        tokenizer.pad_token = tokenizer.eos_token
        model.config.eos_token_id = model.generation_config.eos_token_id = END_TOKEN
        model.config.pad_token_id = model.generation_config.pad_token_id = END_TOKEN
    unfinished = to.with_name(f".{to.name}.partial")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    unfinished.rename(to)
    check_end_token(to)


def check_end_token(folder: Path) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer, stops = AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder).eos_token_id
    if tokenizer.eos_token_id not in (stops if isinstance(stops, list) else [stops]):
        sys.exit(
            f"smollm2: the tokenizer of {folder} ends with token {tokenizer.eos_token_id}, the model with {stops}; "
            "make them agree."
        )
    say(f"{folder}: responses end with {tokenizer.eos_token!r}, token {tokenizer.eos_token_id}")
    say(f"it reads '12+5=17 no' as {tokenizer.convert_ids_to_tokens(tokenizer.encode('12+5=17 no'))}")


def warmup(block: Block, clock: Clock) -> None:
    """Rounds of warm-up, each on problems that none before it had, until the model is good enough, or time is over."""
    if block.warm.exists():
        say(f"{block.warm} is there already")
        return
    rounds, models, model = [], [], block.model
    for turn, steps in enumerate(block.warm_steps):
        folder = block.folder / f"warm-{turn}"
        found = warm_round(block, turn, steps, model, folder, clock)
        made = model_of(folder)
        if made is None:
            break
        models.append(made)
        model = str(made)
        rounds.append({"round": turn, "steps": steps, "accuracy": found})
        write_json(block.folder / "warmup.json", rounds)
        if found is None or found >= block.enough or clock.left < 0:
            break
    if not rounds:
        sys.exit(f"smollm2: warm-up made no model; its log is in {block.folder / 'log'}.")
    chosen = models[chosen_round(block, [r["accuracy"] for r in rounds])]
    block.warm.symlink_to(chosen.relative_to(block.folder))
    say(f"the warm start is {block.warm.resolve()}: {rounds}")


def model_of(warm: Path) -> Path | None:
    """The model of a warm-up, or of the moment when it was stopped; None where there is neither."""
    return warm if (warm / "config.json").exists() else newest_checkpoint(warm)[1]


def chosen_round(block: Block, found: Sequence[float | None]) -> int:
    """The last round, or the one before it where the last is too good to be improved and that one is good enough; of a
    file, whose rounds all have the same problems, the best.
    """
    last = len(found) - 1
    if block.task == FILES:
        return max(range(len(found)), key=lambda turn: found[turn] or 0.0)
    leaps = (
        last > 0 and found[last] is not None and found[last] > block.too_much and (found[last - 1] or 0) >= block.least
    )
    return last - 1 if leaps else last


def warm_round(block: Block, turn: int, steps: int, model: str, folder: Path, clock: Clock) -> float | None:
    """Held-out accuracy after one round, which goes on if it was stopped; None where time was over before it ended."""
    seed = 1000 * block.seed + turn
    keys = {"model.name": model, **block.problems_of(seed), "run.seed": seed, "warmup.steps": steps}
    arguments = ["warmup", f"smollm2-{block.task}-warmup", "--out", folder, *block.keys(keys)]
    if (folder / "recipe.yaml").exists():
        arguments = ["warmup", folder, "--resume"]
    if accuracy_of(folder, steps) is None:
        wait([start(f"warm-{turn}", arguments, block.folder)], clock)
    return accuracy_of(folder, steps)


def accuracy_of(warm: Path, steps: int) -> float | None:
    """Held-out accuracy after the last step of a warm-up."""
    name = "eval/dense/accuracy"
    found = [line[name] for line in read_lines(warm / "metrics.jsonl") if line["step"] == steps and name in line]
    return found[-1] if found else None


def probe(block: Block, clock: Clock) -> None:
    """One step of sparse-rl from the warm start at every budget, all at once: what is right, and what is rejected."""
    folder = block.folder / "probe"
    budgets = block.budgets or PROBED[block.task]
    jobs = []
    for budget in (None, *budgets):
        run = folder / f"{budget or DENSE}"
        if read_lines(run / "metrics.jsonl"):
            continue
        shutil.rmtree(run, ignore_errors=True)
        few = {
            "run.steps": 1,
            "rollout.prompts": 64,
            "rollout.group_size": 4,
            "rollout.rows": 256,
            "learn.minibatches": 1,
        }
        few |= {"learn.micro_batch_tokens": 4096, "eval.every": 0, "run.diagnose": 16}
        keys = block.keys(train_keys(block, budget, "sparse-rl") | few)
        arguments = ["train", f"smollm2-{block.task}", "--out", run, *keys]
        jobs.append(start(f"probe-{budget or DENSE}", arguments, block.folder))
    wait(jobs, clock)
    for checkpoints in folder.glob("*/checkpoints"):
        shutil.rmtree(checkpoints)
    text = probed(folder, [None, *budgets])
    (block.folder / "probe.md").write_text(text)
    print(text, flush=True)


def choose(block: Block) -> Block:
    """With --reject: for each share the largest probed budget at which sparse-rl rejects at least as much."""
    path = block.folder / "budgets.json"
    if not block.budgets and path.exists():
        return replace(block, budgets=tuple(json.loads(path.read_text())))
    if block.budgets or not block.reject:
        return block
    runs = {budget: block.folder / "probe" / str(budget) for budget in PROBED[block.task]}
    found = {
        budget: share for budget, run in runs.items() if (share := mean_of(run, "reject/trajectories/frac")) is not None
    }
    if not found:
        sys.exit(f"smollm2: no budget could be probed; the logs are in {block.folder / 'log'}.")
    chosen = [max((b for b in found if found[b] >= share), default=min(found)) for share in block.reject]
    write_json(path, list(dict.fromkeys(chosen)))
    say(f"budgets {chosen}: sparse-rl rejects {', '.join(f'{found[budget]:.1%}' for budget in chosen)}")
    return replace(block, budgets=tuple(dict.fromkeys(chosen)))


def train_keys(block: Block, budget: int | None, method: str, compressor: str | None = None) -> dict[str, object]:
    """What a run changes in its recipe."""
    return {
        **block.cache(budget, compressor),
        "model.name": block.warm.resolve(),
        **VARIANTS.get(method, {"learn.method": "none" if method == DENSE else method}),
        "rollout.prompts": block.prompts,
        "rollout.group_size": block.group_size,
        "rollout.rows": block.prompts * block.group_size,
        "learn.micro_batch_tokens": block.micro_batch_tokens or (16384 if len(block.arms()) <= 5 else 8192),
        "optimizer.lr": block.lr,
        "run.seed": block.seed,
        **block.problems_of(100 + block.seed),
        "run.steps": block.steps,
        "run.checkpoint_every": 100_000,  # the last step has one, and so has the step at which a run is stopped
        "run.keep": 1,
        "run.samples": 0,
    }


def arms(block: Block, clock: Clock) -> None:
    """All runs at once, as far as time allows; those that were stopped go on from there."""
    if not block.warm.exists():
        sys.exit(f"smollm2: there is no {block.warm}; make it with warmup.")
    pace = Pace(block, clock)
    for arm in block.arms():
        run = block.folder / "runs" / arm.name
        if newest_checkpoint(run)[0] >= block.steps:
            continue
        if newest_checkpoint(run)[0] > 0:
            arguments = ["train", run, "--resume", "--run.steps", str(block.steps)]
        else:
            shutil.rmtree(run, ignore_errors=True)
            keys = block.keys(train_keys(block, arm.budget, arm.method, arm.compressor))
            arguments = ["train", f"smollm2-{block.task}", "--out", run, *keys]
        pace.jobs[arm] = start(arm.name, arguments, block.folder)
    late = Clock(clock.left / 60 + 0.3)  # for those that are nearly there
    wait(list(pace.jobs.values()), late, pace.watch, grace=60.0)
    write_json(
        block.folder / "arms.json",
        {arm.name: newest_checkpoint(block.folder / "runs" / arm.name)[0] for arm in block.arms()},
    )


class Pace:
    """Stops all runs after the same step: the last one that the slowest of them will reach in time.

    That step is settled when the first run comes to it. The others then have the device for themselves, so they are not
    later than thought.
    """

    def __init__(self, block: Block, clock: Clock):
        self.block, self.clock = block, clock
        self.jobs: dict[Arm, Job] = {}
        self.seen: dict[Arm, list[tuple[int, float]]] = {}  # (step, when it was first seen)
        self.last: int | None = None
        self.looked = self.told = 0.0

    def watch(self) -> None:
        now = time.monotonic()
        if now - self.looked < 0.25:
            return
        self.looked = now
        for arm in self.jobs:
            step = last_step(self.block.folder / "runs" / arm.name / "metrics.jsonl")
            history = self.seen.setdefault(arm, [])
            if step and (not history or history[-1][0] < step):
                history.append((step, now))
        going = [arm for arm, job in self.jobs.items() if job.running]
        if not going or not all(self.seen[arm] for arm in going):
            return
        reach = min(self._reach(arm, now) for arm in going)
        ahead = max(history[-1][0] for history in self.seen.values() if history)
        if self.last is None and ahead >= reach and len(going) > 1:
            self.last = ahead
            say(f"time is short: all runs stop after step {self.last}")
        for arm in going:
            if self.last is not None and self.seen[arm][-1][0] >= self.last:
                self.jobs[arm].stop()
        if now - self.told > 60:
            self.told = now
            steps = ", ".join(f"{arm.name} {history[-1][0]}" for arm, history in self.seen.items() if history)
            say(f"steps: {steps}; {min(reach, self.block.steps):.0f} within reach, {self.clock.left / 60:.1f} minutes")

    def _reach(self, arm: Arm, now: float) -> float:
        """The step that a run comes to in time, as fast as its last ten or so went; any before it has done five."""
        history = self.seen[arm][-12:]
        if len(self.seen[arm]) < 5:
            return math.inf
        seconds = (history[-1][1] - history[0][1]) / max(1, history[-1][0] - history[0][0])
        since = now - history[-1][1]  # of the step that is going on
        left = 0.96 * self.clock.left - 10 + since  # a little is left for what may become slower
        return history[-1][0] + max(0.0, left) / max(seconds, 1e-3)


def last_step(metrics: Path) -> int:
    """The last step in a file of metrics; 0 where there is none."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, metrics.stat().st_size - 20_000))
            found = re.findall(rb'\{"step": (\d+)', file.read())
    except OSError:
        return 0
    return int(found[-1]) if found else 0


def evaluate(block: Block, clock: Clock) -> None:
    """Every model on the dense cache and on its own; then under the block's other compressors, and, if it was asked
    for, on its other budgets.
    """
    more = []

    def ask(name: str, model: Path, budget: int | None, what: str, **options: object) -> None:
        folder = block.folder / "evals" / name / what
        if not (folder / "summary.json").exists():
            arguments = eval_arguments(block, model, budget, folder, **options)
            more.append(partial(start, f"eval-{name}-{what}", arguments, block.folder))

    models = list(evaluated(block))
    for name, model, own, _ in models:
        for budget, compressor in ((None, None), *own):
            ask(name, model, budget, cache_name(budget, compressor), **named(compressor))
    for name, model, _, others in models:
        for budget, compressor in others:
            ask(name, model, budget, cache_name(budget, compressor), **named(compressor))
    if block.task == FILES:
        ask("warm", block.warm.resolve(), None, "greedy", temperature=0, samples=1)
        ask("warm", block.warm.resolve(), None, "avg8", samples=8)
    wait([], clock, more=more, at_once=block.processes)


def eval_arguments(block: Block, model: Path, budget: int | None, folder: Path, **changed: object) -> list[str]:
    """Of `sparse-rl eval`; the compressor's options are those of training, said explicitly."""
    cache: dict[str, object] = {"compressor": DENSE}
    if budget is not None:
        cache = {"compressor": block.compressor, "budget": budget, "interval": block.interval}
        typed = {name: value if isinstance(value, str) else json.dumps(value) for name, value in block.options}
        cache |= {f"compressor.{name}": value for name, value in typed.items()}
    options = {
        **cache,
        "bench": block.task,
        "out": folder,
        "dtype": recipe_value(block, "model", "dtype"),
        "max-new-tokens": recipe_value(block, "rollout", "max_new_tokens"),
        **({} if block.problems is None else {"limit": block.problems}),
        "samples": block.samples,
        "rows": block.eval_rows,
        "temperature": 1,
        "top-p": 1,
        "seed": block.seed,
        **({"data": block.data} if block.task == FILES else {}),
        **{name.replace("_", "-"): recipe_value(block, "rollout", name) for name in limits_of_turns(block)},
        **{f"{block.task}.{name}": value for name, value in task_options(block).items()},
        **changed,
    }
    return ["eval", str(model), *(part for name, value in options.items() for part in (f"--{name}", str(value)))]


def named(compressor: str | None) -> dict[str, str]:
    return {} if compressor is None else {"compressor": compressor}


Caches = tuple[tuple[int, str | None], ...]


def evaluated(block: Block) -> Iterator[tuple[str, Path, Caches, Caches]]:
    """(name, model, its own caches, others that it is evaluated on) of the warm start and of every run."""
    caches = tuple(block.caches())
    yield "warm", block.warm.resolve(), caches, ()
    for arm in block.arms():
        _, model = newest_checkpoint(block.folder / "runs" / arm.name)
        if model is None:
            say(f"{arm.name}: no checkpoint to evaluate")
            continue
        own = caches if arm.budget is None else ((arm.budget, arm.compressor),)
        wanted = (cache for cache in caches if block.every_cache or cache[0] == arm.budget)
        others = tuple(cache for cache in wanted if cache not in own)
        yield arm.name, model, own, others


def task_options(block: Block) -> dict[str, object]:
    """The options of the recipe's task, with problems of their own; those of a benchmark are its file's."""
    if block.task == FILES:
        return {}
    changed = {name.removeprefix("task."): value for name, value in block.more if name.startswith("task.")}
    options = {**recipe(block)["task"], **changed, "seed": EVALUATION_SEED}
    return {name: value for name, value in options.items() if name != "name"}


def recipe(block: Block) -> dict:
    import yaml

    import sparse_rl

    return yaml.safe_load((Path(sparse_rl.__file__).parent / "recipes" / f"smollm2-{block.task}.yaml").read_text())


def limits_of_turns(block: Block) -> list[str]:
    """Keys of the recipe that bound conversations."""
    return [name for name in ("max_turns", "max_given_tokens") if name in recipe(block)["rollout"]]


def recipe_value(block: Block, section: str, name: str) -> str:
    return dict(block.more).get(f"{section}.{name}", str(recipe(block)[section][name]))


def report(block: Block) -> None:
    print(write_report(block.folder, block.arms(), block.budgets), flush=True)


# ------------------------------------------------------------------------------------------ all of it


def whole_block(block: Block, clock: Clock, warmup_minutes: float, evaluate_minutes: float) -> None:
    warmup(block, clock.until(warmup_minutes))
    if not block.budgets:
        probe(block, clock.until(2.5))
        block = choose(block)
    if not any(is_evaluated(block, arm) for arm in block.arms()):  # else arms would differ in what was evaluated
        arms(block, clock.but(evaluate_minutes))
    evaluate(block, clock.but(0.5))
    report(block)
    if left := [arm.name for arm in block.arms() if not is_evaluated(block, arm)]:
        say(f"not evaluated: {', '.join(left)}; give the same command again.")


def is_evaluated(block: Block, arm: Arm) -> bool:
    """On its own cache."""
    folder = block.folder / "evals" / arm.name / cache_name(arm.budget, arm.compressor)
    return (folder / "summary.json").exists()


class Keeper(threading.Thread):
    """Gathers what should be kept in one file, once a minute, so that little is lost whenever this ends."""

    def __init__(self, block: Block, to: Path, seconds: float = 60.0):
        super().__init__(daemon=True)
        self.block, self.to, self.seconds = block, to, seconds
        self.over, self.lock = threading.Event(), threading.Lock()

    def run(self) -> None:
        while not self.over.wait(self.seconds):
            self.gather()

    def gather(self) -> None:
        with self.lock:
            try:
                gather(self.block, self.to)
            except OSError as error:  # a file may vanish while it is read; the next minute has another chance
                say(f"could not gather what is kept ({error})")

    def close(self) -> None:
        self.over.set()
        self.gather()


SMALL = (
    "*.json",
    "*.md",
    "*.png",
    "warm-*/*.jsonl",
    "runs/*/*.jsonl",
    "runs/*/recipe.yaml",
    "probe/*/*.jsonl",
    "evals/*/*/*.json",
)


def gather(block: Block, to: Path) -> None:
    """to/TASK-SEED.tar.gz: metrics, recipes, evaluations without most texts, table, pictures, ends of logs."""
    to.mkdir(parents=True, exist_ok=True)
    for share in (1.0, 0.25, 0.0):  # of the texts
        parts = {
            str(p.relative_to(block.folder)): p.read_bytes()
            for pattern in SMALL
            for p in sorted(block.folder.glob(pattern))
        }
        for items in sorted(block.folder.glob("evals/*/*/items.jsonl")):
            parts[str(items.relative_to(block.folder).with_name("outcomes.jsonl"))] = outcomes(items, int(64 * share))
        for log in sorted(block.folder.glob("log/*.log")):
            parts[f"log/{log.name}"] = log.read_bytes()[-int(2000 + 60_000 * share) :]
        unfinished = to / f".{block.folder.name}.partial"
        with tarfile.open(unfinished, "w:gz") as file:
            for name, content in parts.items():
                about = tarfile.TarInfo(f"{block.folder.name}/{name}")
                about.size, about.mtime = len(content), int(time.time())
                file.addfile(about, io.BytesIO(content))
        if unfinished.stat().st_size < KEPT:
            break
    unfinished.replace(to / f"{block.folder.name}.tar.gz")


def outcomes(items: Path, texts: int) -> bytes:
    """Of an evaluation: problem, sample, reward, tokens, finish and loop of all completions, and the texts of a few."""
    lines = []
    for number, item in enumerate(read_lines(items)):
        shown = (
            "index",
            "sample",
            "reward",
            "tokens",
            "finish",
            "loop",
            *(("prompt", "text") if number < texts else ()),
        )
        lines.append(json.dumps({name: item[name] for name in shown if name in item}))
    return ("\n".join(lines) + "\n").encode()


def write_json(path: Path, content: object) -> None:
    unfinished = path.with_name(f".{path.name}.partial")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(path)


# ------------------------------------------------------------------------------------------ the command line


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def shares(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(",") if part.strip())


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    stages = top.add_subparsers(dest="stage", required=True)
    first = stages.add_parser("prepare", help="a GGUF file (or any model) as a folder")
    first.add_argument("--gguf", required=True)
    first.add_argument("--to", type=Path, required=True)
    for name in ("warmup", "probe", "arms", "evaluate", "report", "block"):
        stage = stages.add_parser(name)
        stage.add_argument("--task", choices=PROBED, default="countdown")
        stage.add_argument("--seed", type=int, default=0)
        stage.add_argument("--out", type=Path, default=Path("runs/smollm2"))
        stage.add_argument("--model", default="models/smollm2", help="what warm-up starts from")
        stage.add_argument("--budgets", type=numbers, default=(), help="with commas")
        stage.add_argument("--reject", type=shares, default=(), help="or choose them, such as 0.1,0.34: `probe` first")
        stage.add_argument(
            "--methods", "--arms", help="dense, some of learn.method, smd-forward, released-cap ..., with commas"
        )
        stage.add_argument(
            "--data", type=Path, default=Path("data"), help="gsm8k: where `sparse-rl data` put its files"
        )
        stage.add_argument("--steps", type=int, default=150)
        stage.add_argument("--prompts", type=int, default=64)
        stage.add_argument("--group-size", type=int, default=8)
        stage.add_argument("--lr", type=float, default=2e-5)
        stage.add_argument(
            "--micro-batch-tokens", type=int, help="of every run: 8192 take about 12 GiB, 16384 20, 65536 63"
        )
        stage.add_argument("--compressor", default="rkv")
        stage.add_argument("--interval", type=int, default=16)
        stage.add_argument("--evict-prompt", action="store_true", help="do not protect the prompt")
        stage.add_argument(
            "--option", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="of the compressor"
        )
        stage.add_argument("--warm-steps", type=numbers, help="steps of each round of warm-up")
        stage.add_argument("--enough", type=float, default=0.3, help="held-out accuracy at which warm-up ends")
        stage.add_argument("--problems", type=int, help="of an evaluation; default: 1000, or all of gsm8k")
        stage.add_argument("--samples", type=int, default=2)
        stage.add_argument("--eval-rows", type=int, help="default: 512; 128 for conversations, which are long")
        stage.add_argument(
            "--every-cache", action="store_true", help="evaluate every run on every budget: trained x deployed"
        )
        stage.add_argument("--processes", type=int, default=12, help="evaluations at once")
        stage.add_argument("--minutes", type=float, default=math.inf)
        stage.add_argument("--warmup-minutes", type=float, default=6.0, help="of a block, at most")
        stage.add_argument("--evaluate-minutes", type=float, default=4.0, help="of a block, left for evaluation")
        stage.add_argument("--keep", type=Path, help="gather what should be kept here, every minute")
        stage.add_argument(
            "--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="change a key of the recipes"
        )
    return top


def options_of(given: Sequence[Sequence[str]]) -> list[tuple[str, object]]:
    """Options of the compressor as they were typed; a word is a word."""
    found: list[tuple[str, object]] = []
    for name, text in given:
        try:
            found.append((name, json.loads(text)))
        except ValueError:
            found.append((name, text))
    return found


def block_of(args: argparse.Namespace) -> Block:
    files = args.task == FILES
    args.methods = args.methods or ("dense,sparse-rl-released,shadow" if files else METHODS)
    args.warm_steps = args.warm_steps or ((350,) if files else (200, 100, 100, 100))
    args.problems = args.problems or (None if files else 1000)
    args.eval_rows = args.eval_rows or (128 if args.task == "notes" else 512)
    same = {field.name for field in fields(Block)} & set(vars(args)) - {"methods"}
    return Block(
        **{name: getattr(args, name) for name in same},
        methods=tuple(part for part in args.methods.split(",") if part),
        options=(("protect_prompt", not (args.evict_prompt or files)), *options_of(args.option)),
        too_much=0.6,
        least=0.2,
        more=tuple(map(tuple, args.set)),
    )


def main() -> None:
    args = parser().parse_args()
    if args.stage == "prepare":
        prepare(args.gguf, args.to)
        return
    block = block_of(args)
    if block.task == FILES and args.stage != "report" and not block.train_file.is_file():
        sys.exit(f"smollm2: there is no {block.train_file}; make it with: sparse-rl data gsm8k --to {block.data}")
    if args.stage in ("arms", "evaluate", "report"):
        block = choose(block)
    if args.stage not in ("warmup", "probe") and not (block.budgets or (args.stage == "block" and block.reject)):
        sys.exit(
            "smollm2: no budget is named; give --budgets 64 (`probe` says what they do), or --reject 0.1 to a block."
        )
    block.folder.mkdir(parents=True, exist_ok=True)
    clock = Clock(args.minutes)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    keeper = Keeper(block, args.keep) if args.keep else None
    if keeper:
        keeper.start()
    stages = {"warmup": warmup, "probe": probe, "arms": arms, "evaluate": evaluate}
    try:
        with shared_device(), children_ended():
            if args.stage == "report":
                report(block)
            elif args.stage == "block":
                whole_block(block, clock, args.warmup_minutes, args.evaluate_minutes)
            else:
                stages[args.stage](block, clock)
    finally:
        if keeper:
            keeper.close()


if __name__ == "__main__":
    main()
