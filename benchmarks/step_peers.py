"""Our training step beside TRL's with vLLM: the same weights, prompts and lengths, one after the other on one device.

    python benchmarks/step_peers.py --out runs/peers                                   # minutes on one H200
    python benchmarks/step_peers.py --out runs/peers --peer-python OTHER/bin/python    # vLLM and TRL live elsewhere
    python benchmarks/step_peers.py --out runs/peers --columns sparse-rl,trl-sparse --steps 2
    python benchmarks/step_peers.py --out runs/peers --tiny                            # that it works: a CPU, seconds

    sparse-rl     ours: R-KV, correction, a dense learner, KL to a reference
    shadow        ours: R-KV, replay, no KL
    trl-vllm      TRL's GRPOTrainer with vLLM in the same process, KL to a reference
    trl-sparse    TRL's GRPOTrainer with our rollouts (`use_sparse_rollouts`), KL to a reference
    trl-replay    the same under replay; only if asked for

A step: completions of `--prompts` x `--group`, all of exactly `--new` tokens (nothing stops them), then `--minibatches`
optimizer steps; every second completion is rewarded. Every column is a process of its own, so that it gives its memory
back, and leaves COLUMN.json in the folder; columns that are there are not measured again. The weights are made once per
folder, or once for all folders with --models. The first step (compiling, capturing) is a column of the table, and not
in the means. `rest` is what is neither rollout, score nor update: grading and diagnostics with us; rewards are part of
TRL's score. Peaks: of torch's allocator, and of the device as the driver counts it, all processes and graphs included,
when a step or one of TRL's stages ends.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from peers import VLLM, add_options, environment, left_out
from stay import provenance

from sparse_rl.errors import SparseRLError
from sparse_rl.files import write_text
from sparse_rl.tasks import Grade, Prompt, Task

OURS, PEERS = ("sparse-rl", "shadow"), ("trl-vllm", "trl-sparse", "trl-replay")
NEEDS = {"trl-vllm": ("trl", "datasets", "vllm"), **dict.fromkeys(PEERS[1:], ("trl", "datasets"))}
DEFAULT = "sparse-rl,shadow,trl-vllm,trl-sparse"
STAGES = ("rollout", "score", "update", "rest", "step")
MODEL, PROMPTS = "model", "prompts.json"


@dataclass(frozen=True)
class Settings:
    """What all columns share."""

    model: str = "random:qwen2.5-1.5b"
    dtype: str = "bfloat16"
    prompts: int = 32
    group: int = 8
    new: int = 1024
    prompt_tokens: int = 300  # on average, of a tokenizer that reads characters
    minibatches: int = 4
    steps: int = 3
    budget: int = 512
    interval: int = 128
    beta: float = 1e-4
    lr: float = 1e-6
    peer_micro: int = 16  # completions of TRL's micro-batches
    peer_checkpointing: bool = True
    vllm_memory: float = 0.35  # share of the device

    @property
    def completions(self) -> int:
        return self.prompts * self.group


TINY = Settings(
    model="tiny", dtype="float32", prompts=4, group=4, new=20, prompt_tokens=12, minibatches=2, steps=2, budget=20,
    interval=4, lr=1e-4, peer_micro=4, peer_checkpointing=False,
)  # fmt: skip


# -------------------------------------------------------------------------------------------------- the same for all


def made_prompts(settings: Settings, seed: int = 0) -> list[str]:
    """For every step its prompts, of half to one and a half times the average length."""
    draw = random.Random(seed)
    average = settings.prompt_tokens
    lengths = [draw.randint(average // 2, 2 * average - average // 2) for _ in range(settings.prompts * settings.steps)]
    return ["".join(draw.choices("0123456789abcdefghijklmnopqrstuvwxyz+-*/= ", k=n)) for n in lengths]


def read_prompts(file: Path, settings: Settings) -> list[str]:
    """The `prompt` of a file's first lines."""
    with file.open() as lines:
        texts = [json.loads(line)["prompt"] for line, _ in zip(lines, range(settings.prompts * settings.steps))]
    if len(texts) < settings.prompts * settings.steps or not all(isinstance(text, str) for text in texts):
        raise SparseRLError(
            f"{file} has {len(texts)} prompts for {settings.steps} steps of {settings.prompts}, or some that are no "
            "text; give a file of JSON lines with enough of them, or fewer --steps."
        )
    return texts


class FixedPrompts(Task):
    """The prompts of a file in their order; every second completion is right."""

    isolated = False

    def __init__(self, file: str):
        self.texts = json.loads(Path(file).read_text())

    def __getitem__(self, i: int) -> Prompt:
        return Prompt(self.texts[i % len(self.texts)], None, i)

    def reward(self, prompt: Prompt, text: str) -> float:
        return 0.0  # of a completion alone

    def grade(self, prompts, texts) -> list[Grade]:
        return [Grade(float(i % 2), "right" if i % 2 else "wrong") for i in range(len(texts))]


def rewards(completions: list, **_: Any) -> list[float]:
    """The same for TRL."""
    return [float(i % 2) for i in range(len(completions))]


@dataclass
class Step:
    """What one step took, and what it sampled."""

    seconds: dict[str, float]  # by stage
    lengths: tuple[int, int]  # of the shortest and the longest completion
    prompt_tokens: float  # mean
    prompts: str  # a digest of their tokens


def digest(prompts: list[list[int]]) -> tuple[str, float]:
    """Of the tokens of a step's prompts, in order, each counted once; and their mean length."""
    once = list(dict.fromkeys(map(tuple, prompts)))
    mean = sum(map(len, once)) / len(once)
    return hashlib.sha256(json.dumps(once).encode()).hexdigest()[:16], mean


class Watch:
    """Seconds between points at which the device is idle, and the most memory that it had in use at one of them."""

    def __init__(self):
        self.on_gpu, self.seen = torch.cuda.is_available(), 0

    def now(self) -> float:
        if self.on_gpu:
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            self.seen = max(self.seen, total - free)
        return time.perf_counter()

    def peaks(self) -> dict[str, float]:
        if not self.on_gpu:
            return {}
        return {"allocated": torch.cuda.max_memory_allocated() / 2**30, "device": self.seen / 2**30}


# --------------------------------------------------------------------------------------------------------------- ours


def measure_ours(column: str, settings: Settings, folder: Path, keys: list[tuple[str, str]]) -> dict:
    from sparse_rl.config import make_recipe
    from sparse_rl.train.auto import settings_of as settings_of_auto
    from sparse_rl.train.loop import Trainer
    from sparse_rl.train.run import settle

    recipe = make_recipe(
        {
            "model": {"name": str(folder / MODEL), "dtype": settings.dtype, "gradient_checkpointing": "auto"},
            "task": {"name": f"{Path(__file__).resolve()}:FixedPrompts", "file": str(folder / PROMPTS)},
            "rollout": {
                "compressor": "rkv", "budget": settings.budget, "interval": settings.interval,
                "rows": settings.completions, "prompts": settings.prompts, "group_size": settings.group,
                "max_new_tokens": settings.new,
            },
            "learn": {"method": column, "minibatches": settings.minibatches, "micro_batch_tokens": "auto"},
            "loss": {"beta": settings.beta if column == "sparse-rl" else 0.0},
            "optimizer": {"lr": settings.lr},
            "eval": {"every": 0},
            "run": {"steps": settings.steps, "samples": 0},
        },
        keys,
    )  # fmt: skip
    run = folder / f"{column}-run"
    run.mkdir(exist_ok=True)
    for name in ("metrics", "timing"):
        (run / f"{name}.jsonl").unlink(missing_ok=True)
    trainer = Trainer(recipe, run, show=False, settle=lambda *given: settle(1, *given))
    sampler, watch = trainer.sampler, Watch()
    sampler.sampling = replace(sampler.sampling, stop_ids=())
    collect, collected = trainer.collect, []
    trainer.collect = lambda clock: collected.append(collect(clock)) or collected[-1]
    steps = []
    for _ in range(settings.steps):
        trainer.step()
        watch.now()
        done = collected.pop().trajectories
        prompts, mean = digest([t.tokens[: t.num_prompt_tokens].tolist() for t in done])
        counts = [len(t.response_tokens) for t in done]
        timing = json.loads((run / "timing.jsonl").read_text().splitlines()[-1])
        seconds = {stage: timing[f"time/{stage}"] for stage in ("rollout", "score", "update", "step")}
        steps.append(Step(with_rest(seconds), (min(counts), max(counts)), mean, prompts))
        print(json.dumps({"column": column, "number": len(steps), **steps[-1].seconds}), file=sys.stderr, flush=True)
    trainer.source.close()
    return {"steps": steps, "gib": watch.peaks(), "chosen": settings_of_auto(trainer.recipe)}


def with_rest(seconds: dict[str, float]) -> dict[str, float]:
    rest = seconds["step"] - sum(seconds[stage] for stage in ("rollout", "score", "update"))
    return {stage: {**seconds, "rest": rest}[stage] for stage in STAGES}


# --------------------------------------------------------------------------------------------------------------- TRL


def measure_trl(column: str, settings: Settings, folder: Path) -> dict:
    import trl
    from datasets import Dataset

    texts, on_gpu = json.loads((folder / PROMPTS).read_text()), torch.cuda.is_available()
    if settings.completions % (settings.minibatches * settings.peer_micro):
        raise SparseRLError(
            f"{settings.completions} completions cannot be cut into {settings.minibatches} optimizer steps of "
            f"micro-batches of {settings.peer_micro}; choose another --peer-micro."
        )
    accumulate = settings.completions // settings.minibatches // settings.peer_micro
    options: dict[str, Any] = {}
    if column == "trl-vllm":
        longest = max(map(len, texts)) + settings.new
        options = {
            "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": settings.vllm_memory,
            "vllm_max_model_length": longest + 64, "generation_kwargs": {"ignore_eos": True},
        }  # fmt: skip
    arguments = trl.GRPOConfig(
        output_dir=str(folder / f"{column}-run"), save_strategy="no", report_to="none", logging_steps=1,
        disable_tqdm=True, max_steps=settings.steps * settings.minibatches, shuffle_dataset=False,
        per_device_train_batch_size=settings.peer_micro, gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate * settings.minibatches, num_generations=settings.group,
        max_completion_length=settings.new, temperature=1.0, beta=settings.beta, learning_rate=settings.lr,
        loss_type="grpo", bf16=on_gpu and settings.dtype == "bfloat16", fp16=on_gpu and settings.dtype == "float16",
        use_cpu=not on_gpu, gradient_checkpointing=settings.peer_checkpointing,
        model_init_kwargs={"dtype": settings.dtype}, **options,
    )  # fmt: skip
    rounds = Rounds(settings.minibatches)
    trainer = trl.GRPOTrainer(
        model=str(folder / MODEL), reward_funcs=rewards, args=arguments,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]), callbacks=[rounds.callback()],
    )  # fmt: skip
    if column != "trl-vllm":
        from sparse_rl.integrations.trl import use_sparse_rollouts

        replay = column == "trl-replay"
        use_sparse_rollouts(trainer, "rkv", settings.budget, settings.interval, replay=replay)
        sampler = trainer.vllm_generation
        sampler.sampling = replace(sampler.sampling, stop_ids=())
    rounds.follow(trainer)
    trainer.train()
    return {"steps": rounds.steps(), "gib": rounds.watch.peaks(), "chosen": {"trl": trl.__version__}}


class Rounds:
    """When TRL began and ended what: a step is one generation, and the optimizer steps that learn from it."""

    def __init__(self, minibatches: int):
        self.watch, self.minibatches = Watch(), minibatches
        self.begins: list[float] = []  # of optimizer steps
        self.ends: list[float] = []
        self.generating: list[float] = []  # seconds, of each generation
        self.scoring: list[float] = []  # seconds, of each generation and what is computed from it
        self.sampled: list[tuple] = []  # prompts, completions

    def callback(self):
        from transformers import TrainerCallback

        rounds = self

        class Times(TrainerCallback):
            def on_step_begin(self, *_, **__):
                rounds.begins.append(rounds.watch.now())

            def on_step_end(self, *_, **__):
                rounds.ends.append(rounds.watch.now())

        return Times()

    def follow(self, trainer: Any) -> None:
        """Time what `trainer` does by itself."""
        generate = trainer._generate

        def noted(*given, **options):
            with self.timed(self.generating):
                out = generate(*given, **options)
            self.sampled.append(out[:2])
            return out

        trainer._generate = noted
        trainer._generate_and_score_completions = self._timed(trainer._generate_and_score_completions, self.scoring)

    @contextmanager
    def timed(self, into: list[float]) -> Iterator[None]:
        start = self.watch.now()
        yield
        into.append(self.watch.now() - start)

    def _timed(self, function: Callable, into: list[float]) -> Callable:
        def timed(*given, **options):
            with self.timed(into):
                return function(*given, **options)

        return timed

    def steps(self) -> list[Step]:
        """Every step begins with its first optimizer step, and ends where the next one begins."""
        found = []
        for i, (prompts, completions) in enumerate(self.sampled):
            own = slice(i * self.minibatches, (i + 1) * self.minibatches)
            begins, ends = self.begins[own], self.ends[own]
            whole = [*self.begins[own.stop :], ends[-1]][0] - begins[0]
            update = sum(ends) - sum(begins) - self.scoring[i]
            score = self.scoring[i] - self.generating[i]
            seconds = {"rollout": self.generating[i], "score": score, "update": update, "step": whole}
            counts = list(map(len, completions))
            shown, mean = digest(prompts)
            found.append(Step(with_rest(seconds), (min(counts), max(counts)), mean, shown))
        return found


# --------------------------------------------------------------------------------------------------- processes, tables


def share_model(settings: Settings, folder: Path, models: Path | None) -> None:
    """Make the folder's model a link to one that other folders use, too."""
    link = folder / MODEL
    if models is None or (link.exists() and not link.is_symlink()):
        return
    place = models.resolve() / re.sub(r"[^\w.-]+", "-", f"{settings.model}-{settings.dtype}")
    place.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)  # it may lead to a place that is gone
    link.symlink_to(place)


def is_made(folder: Path) -> bool:
    return (folder / MODEL / "tokenizer_config.json").exists()  # the last file to be written


def make_model(settings: Settings, folder: Path) -> None:
    """Weights and tokenizer as every column loads them."""
    from sparse_rl.models import load_model

    model, tokenizer = load_model(settings.model, settings.dtype, logits="model")
    model.save_pretrained(folder / MODEL)
    tokenizer.save_pretrained(folder / MODEL)


def column_main(column: str, folder: Path, keys: list[tuple[str, str]]) -> None:
    settings = Settings(**json.loads((folder / "settings.json").read_text()))
    if column == MODEL:
        make_model(settings, folder)
        return
    start = time.perf_counter()
    ours = column in OURS
    found = measure_ours(column, settings, folder, keys) if ours else measure_trl(column, settings, folder)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    found |= {**provenance(), "column": column, "device": where, "torch": torch.__version__}
    found |= {"seconds": time.perf_counter() - start}
    found |= {"keys": keys, "steps": [asdict(step) for step in found["steps"]]}
    write_text(folder / f"{column}.json", json.dumps(found, indent=1) + "\n")


def run_column(column: str, folder: Path, args: argparse.Namespace) -> str | None:
    """Measure a column in a process of its own; what went wrong, in a sentence."""
    ours = column not in PEERS
    python, path = (sys.executable, None) if ours else (args.peer_python, args.peer_path)
    if not ours and (why := left_out(python, path, NEEDS[column])):
        return f"{column} is left out: {why}"
    command = [python, str(Path(__file__).resolve()), "--out", str(folder), "--column", column]
    for key in args.set:
        command += ["--set", *key]
    log = folder / f"{column}.log"
    with log.open("w") as file:
        extra = VLLM if column == "trl-vllm" else {}
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, env=environment(path) | extra, cwd=folder)
    if done.returncode:
        last = (log.read_text().strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return f"{column} failed: {last} ({log})"
    return None


def check(columns: list[dict], settings: Settings) -> list[str]:
    """What is not the same in all columns: nothing, or sentences."""
    said = []
    for found in columns:
        lengths = {n for step in found["steps"] for n in step["lengths"]}
        if lengths != {settings.new}:
            said.append(f"{found['column']}: completions have {sorted(lengths)} tokens instead of {settings.new}.")
        if [s["prompts"] for s in found["steps"]] != [s["prompts"] for s in columns[0]["steps"]]:
            said.append(f"{found['column']} had other prompts than {columns[0]['column']}.")
    return said


def table(columns: list[dict], settings: Settings) -> str:
    heads = ["", *STAGES, "first step", "tokens/s of rollouts", "peak allocated", "peak of the device"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for found in columns:
        later = [step["seconds"] for step in found["steps"][1:]] or [found["steps"][0]["seconds"]]
        means = {stage: sum(seconds[stage] for seconds in later) / len(later) for stage in STAGES}
        cells = [f"{means[stage]:.2f} s" for stage in STAGES]
        if len(later) > 1:
            several = [seconds["step"] for seconds in later]
            cells[-1] += f" ({min(several):.2f} to {max(several):.2f})"
        cells += [f"{found['steps'][0]['seconds']['step']:.2f} s"]
        cells += [f"{settings.completions * settings.new / means['rollout']:,.0f}"]
        cells += [f"{found['gib'][k]:.1f} GiB" if found["gib"] else "" for k in ("allocated", "device")]
        lines.append(f"| {found['column']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(columns: list[dict], settings: Settings) -> str:
    if not columns:
        return "nothing was measured"
    where = sorted({f"{found['device']}, torch {found['torch']}" for found in columns})
    mean = columns[0]["steps"][0]["prompt_tokens"]
    notes = [
        f"{settings.model}, {settings.dtype}: {settings.prompts} prompts (mean {mean:.0f} tokens) x {settings.group} "
        f"completions of {settings.new} tokens, {settings.minibatches} optimizer steps; means of steps 2 to "
        f"{settings.steps}; {'; '.join(where)}",
        *(f"{found['column']}: {found['chosen']}" for found in columns),
    ]
    return "\n".join([table(columns, settings), "", *notes])


def settings_of(args: argparse.Namespace) -> Settings:
    given = {field.name: getattr(args, field.name) for field in fields(Settings)}
    return replace(TINY if args.tiny else Settings(), **{k: v for k, v in given.items() if v is not None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/peers"))
    parser.add_argument("--columns", default=DEFAULT, help=f"some of {', '.join((*OURS, *PEERS))}")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens, for a CPU")
    parser.add_argument("--models", type=Path, help="a folder for weights that several --out share")
    parser.add_argument("--data", type=Path, help="JSON lines with a `prompt`; default: random characters")
    add_options(parser)
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="of our recipe")
    parser.add_argument("--column", help=argparse.SUPPRESS)
    for field in fields(Settings):
        option, kind = f"--{field.name.replace('_', '-')}", type(field.default)
        if kind is bool:
            parser.add_argument(option, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(option, type=kind, help=f"default: {field.default}")
    args = parser.parse_args()
    folder = args.out.resolve()
    if args.column:
        column_main(args.column, folder, [tuple(pair) for pair in args.set])
        return
    columns, settings = args.columns.split(","), settings_of(args)
    if unknown := [column for column in columns if column not in (*OURS, *PEERS)]:
        parser.error(f"there is no column {unknown[0]!r}; known are {', '.join((*OURS, *PEERS))}")
    folder.mkdir(parents=True, exist_ok=True)
    known = folder / "settings.json"
    if known.exists() and json.loads(known.read_text()) != asdict(settings):
        parser.error(f"{folder} holds other settings ({known}); choose another --out")
    write_text(known, json.dumps(asdict(settings), indent=1) + "\n")
    if not (folder / PROMPTS).exists():
        texts = read_prompts(args.data, settings) if args.data else made_prompts(settings)
        write_text(folder / PROMPTS, json.dumps(texts))
    said = []
    share_model(settings, folder, args.models)
    if not is_made(folder) and (problem := run_column(MODEL, folder, args)):
        raise SystemExit(problem)
    for column in columns:
        if (folder / f"{column}.json").exists():
            print(f"{column}: measured before; delete {folder / column}.json to measure it again", flush=True)
        elif problem := run_column(column, folder, args):
            said.append(problem)
            print(problem, flush=True)
    found = [json.loads((folder / f"{c}.json").read_text()) for c in columns if (folder / f"{c}.json").exists()]
    text = "\n".join([summary(found, settings), *check(found, settings), *said]) + "\n"
    write_text(folder / "table.md", text)
    print(text)
    if any("failed:" in problem for problem in said) or check(found, settings):
        sys.exit(1)


if __name__ == "__main__":
    main()
