"""Rollouts in turn with the learner against rollouts one step ahead of it: step time, GPU idle time, accuracy.

    python benchmarks/ahead.py --recipe countdown-search --model models/countdown-search --out runs/ahead --seeds 2 \\
        --plot ahead.png
    python benchmarks/ahead.py --recipe tiny-sums --out runs/ahead-cpu --seeds 2 --set run.steps 30

Both arms are `sparse-rl train RECIPE` with one key changed. They run one after the other, each alone on the device.
Idle is the share of time in which nvidia-smi, asked five times a second, saw no kernel run, from the end of the first
step to the end of the last but one. Finished runs are not repeated. A shape with random weights shows how long steps of
that size take (planted_math.py):

    python benchmarks/ahead.py --recipe qwen2.5-1.5b-simplerl --model random:qwen2.5-1.5b --out runs/ahead-1.5b \\
        --seeds 1 --set task.name benchmarks/planted_math.py:PlantedMath --set rollout.stop [] \\
        --set task.files simplerl_qwen_level3to5.jsonl --set rollout.prompts 32 --set rollout.max_new_tokens 1024 \\
        --set eval.every 0 --set run.steps 5

A pool's sampler that shares the GPU, against the thread: the same shape on problems that this script writes; an arm
ends after its last step or 300 s, and counts from three steps on. A pool's rollout contains its scoring. Where there is
CUDA's multi-process service, the arm `pool` runs under it: without it, two processes take turns. --tiny rehearses it on
a CPU. table.md in the output folder grows by every arm.

    python benchmarks/ahead.py --preset 1.5b --arms ahead pool --out runs/pool-gpu
    python benchmarks/ahead.py --tiny --arms ahead pool --out runs/pool-tiny
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml
from stay import provenance, sentence, shared_device

from sparse_rl.files import read_lines

ARMS = {
    "in turn": {"rollout.ahead": 0},
    "ahead": {"rollout.ahead": 1},
    "pool": {"rollout.ahead": 1, "rollout.pool": "ray", "rollout.samplers": 1},
}
HERE = Path(__file__).parent
PRESETS = {
    "1.5b": ("qwen2.5-1.5b-simplerl", "random:qwen2.5-1.5b", {"rollout.prompts": 32, "rollout.max_new_tokens": 1024}),
    "tiny": ("tiny-sums", None, {"rollout.prompts": 4}),
}
QUICK = {"eval.every": 0, "run.samples": 0, "run.steps": 5}  # of presets
PLANTED = {"task.name": f"{HERE / 'planted_math.py'}:PlantedMath", "task.holdout": 0, "rollout.stop": "[]"}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE": "1"}  # where /dev/shm is small: /tmp
LIMIT = 300.0  # seconds of an arm of a preset
LEAST = 3  # steps of an arm, of which the first and the last do not count


class Watch:
    """The GPU's utilisation, and the memory of all processes on it, while a run goes on; empty if there is no GPU."""

    def __enter__(self):
        try:
            asked = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits"]
            asked += ["-i", os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0], "-lms", "200"]
            self.process = subprocess.Popen(asked, stdout=subprocess.PIPE, text=True)
        except FileNotFoundError:
            self.process = None
        self.start = time.time()
        return self

    def __exit__(self, *_):
        self.values, self.most = [], None
        if self.process:
            self.process.terminate()
            lines = [line.split(", ") for line in self.process.communicate()[0].splitlines()]
            found = [(int(line[0]), int(line[1])) for line in lines if len(line) == 2 and "".join(line).isdigit()]
            self.values = [share for share, _ in found]
            self.most = max((used * 2**20 for _, used in found), default=None)
        self.end = time.time()

    def idle(self, first: float, last: float) -> float | None:
        """The mean share of time without a kernel between two moments."""
        if not self.values:
            return None
        per = len(self.values) / (self.end - self.start)
        inside = self.values[int((first - self.start) * per) : int((last - self.start) * per) + 1]
        return 1 - statistics.mean(inside) / 100


def is_whole(folder: Path) -> bool:
    """All steps are done; what may follow is a checkpoint, which takes a minute of 1.5B."""
    recipe = folder / "recipe.yaml"
    return recipe.exists() and len(steps_of(folder)) >= yaml.safe_load(recipe.read_text())["run"]["steps"]


def end(process: subprocess.Popen) -> None:
    """At once, with the processes of its cluster: the next arm is to be alone on the device."""
    family = psutil.Process(process.pid).children(recursive=True)
    for member in [process, *family]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
    psutil.wait_procs(family, timeout=30)


def steps_of(folder: Path) -> list[dict]:
    return [line for line in read_lines(folder / "timing.jsonl") if "time/step" in line]


def run(args, name: str, seed: int) -> dict:
    folder = args.out / f"{name.replace(' ', '-')}-{seed}"
    done = folder / "measured.json"
    if done.exists():
        return json.loads(done.read_text())
    keys = [*ARMS[name].items(), ("run.seed", seed), *args.set]
    keys += [("model.name", args.model)] if args.model else []
    command = [sys.executable, "-m", "sparse_rl", "train", args.recipe, "--out", str(folder)]
    command += [part for key, value in keys for part in (f"--{key}", str(value))]
    moments: dict[int, float] = {}  # steps done -> when that number was first seen
    said = folder.with_suffix(".log")
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
    began, ended = time.time(), False
    alone = contextlib.nullcontext() if "rollout.pool" not in ARMS[name] else shared_device()
    with alone, Watch() as watch, said.open("w") as file:
        mps = "CUDA_MPS_PIPE_DIRECTORY" in os.environ
        process = subprocess.Popen(command, stderr=file, stdout=file, env={**os.environ, **ENVIRONMENT})
        while process.poll() is None and not ended:
            time.sleep(0.1)
            moments.setdefault(len(steps_of(folder)), time.time())
            ended = args.limit is not None and (time.time() - began > args.limit or is_whole(folder))
        if ended:
            end(process)
    if process.returncode and not ended:
        raise SystemExit(
            f"{' '.join(command)} failed with exit status {process.returncode}:\n{said.read_text()[-3000:]}"
        )
    timing = steps_of(folder)
    if len(timing) < LEAST:
        raise SystemExit(
            f"{folder} has {len(timing)} steps; at least {LEAST} are needed, of which the first and the last do not "
            f"count:\n{said.read_text()[-3000:]}"
        )
    counted = [steps for steps in moments if 0 < steps < len(timing)]
    beside = timing[1:-1]  # the first step compiles and captures; nothing is sampled during the last
    # A step's line tells of its rollout, which was sampled during the step before.
    sampled = timing[2:] if ARMS[name]["rollout.ahead"] else beside
    metrics = read_lines(folder / "metrics.jsonl")
    result = {
        "arm": name,
        "seed": seed,
        "mps": mps,
        **provenance(),
        "command": " ".join(command),
        "seconds": [line["time/step"] for line in timing],
        "step": statistics.median(line["time/step"] for line in beside),
        "wait": statistics.median(line.get("time/wait", 0.0) for line in sampled),
        "rollout": statistics.median(
            line.get("ahead/rollout/seconds", line.get("time/rollout", 0.0)) for line in sampled
        ),
        "update": statistics.median(line["time/update"] for line in beside),
        "steps": len(timing),
        "peak": max((line.get("memory/peak_bytes", 0) for line in timing), default=0),
        "used": watch.most,
        "idle": watch.idle(moments[min(counted)], moments[max(counted)]) if len(counted) > 1 else None,
        "curve": [
            (m["step"], m["eval/dense/accuracy"], m.get("eval/sparse/accuracy"))
            for m in metrics
            if "eval/dense/accuracy" in m
        ],
        "drift": [m["update/drift/mean"] for m in metrics if "update/drift/mean" in m],
        "clip": [m["update/clip/frac"] for m in metrics if "update/clip/frac" in m],
        "gap": [m["gap/abs/mean"] for m in metrics if "gap/abs/mean" in m],
    }
    done.write_text(json.dumps(result))
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # tens of GB of a large model, and nobody reads them
    return result


def table(results: list[dict]) -> str:
    heads = [
        "",
        "seed",
        "s a step",
        "rollout",
        "update",
        "learner waits",
        "GPU idle",
        "learner's peak GiB",
        "GiB in use",
    ]
    heads += ["steps", "clipped", "accuracy dense", "sparse"]
    lines = ["|" + "|".join(f" {head} " if head else " " for head in heads) + "|", "|" + "---|" * len(heads)]
    for r in results:
        arm = f"{r['arm']} (MPS)" if r.get("mps") else r["arm"]
        idle = "" if r["idle"] is None else f"{r['idle']:.0%}"
        used = "" if r["used"] is None else f"{r['used'] / 2**30:.2f}"
        (_, *start), (_, *end) = (r["curve"][0], r["curve"][-1]) if r["curve"] else ((0, None, None),) * 2
        dense, sparse = (f"{a:.3f} to {b:.3f}" if b is not None else "" for a, b in zip(start, end))
        lines.append(
            f"| {arm} | {r['seed']} | {r['step']:.2f} | {r['rollout']:.2f} | {r['update']:.2f} | "
            f"{r['wait']:.2f} | {idle} | {r['peak'] / 2**30:.2f} | {used} | {r['steps']} | "
            f"{statistics.mean(r['clip'] or [0.0]):.2%} | {dense} | {sparse} |"
        )
    return "\n".join(lines)


def plot(results: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for r in results:
        colour = {"in turn": "tab:blue", "ahead": "tab:orange", "pool": "tab:green"}[r["arm"]]
        steps, dense, sparse = zip(*r["curve"])
        values = dense if sparse[-1] is None else sparse
        label = r["arm"] if r["seed"] == results[0]["seed"] else None
        axes[0].plot(steps, values, color=colour, label=label)
        axes[1].plot([s * r["step"] / 60 for s in steps], values, color=colour, label=label)
    for axis, name in zip(axes, ("step", "minutes of training (median step time)")):
        axis.set(xlabel=name, ylabel="held-out accuracy, same cache")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
    figure.savefig(path, dpi=130)


def apply_preset(args) -> None:
    """The recipe, the model and the keys of a preset; what is given beside it counts."""
    args.recipe, model, own = PRESETS[args.preset]
    args.model, args.seeds, args.limit = args.model or model, args.seeds or 1, args.limit or LIMIT
    keys = {**QUICK, **own}
    if args.preset != "tiny":
        keys |= PLANTED | {"task.files": write_problems(args.out / "problems.jsonl")}
    args.set = [*({**keys, **dict(args.set)}).items()]


def write_problems(path: Path) -> Path:
    """Sums of 4 to 40 numbers, as maths problems."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(512):
            numbers = [draw.randrange(1000) for _ in range(draw.randint(4, 40))]
            prompt = f"Add the numbers {', '.join(map(str, numbers))}. Show each step, and put the sum in a box."
            file.write(json.dumps({"prompt": prompt, "label": str(sum(numbers))}) + "\n")
    return path.absolute()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(PRESETS))
    parser.add_argument("--tiny", action="store_const", const="tiny", dest="preset", help="the same as --preset tiny")
    parser.add_argument("--recipe", default="countdown-search")
    parser.add_argument("--model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, help="default: 2; of a preset: 1")
    parser.add_argument("--limit", type=float, help="seconds of an arm, which is ended then, or after its last step")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=["in turn", "ahead"])
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.preset is not None:
        apply_preset(args)
    results, failed = [], []
    for seed in range(args.seeds or 2):
        for name in args.arms:
            try:
                results.append(run(args, name, seed))
            except SystemExit as error:  # the other arms go on
                failed.append(str(error))
                print(error, file=sys.stderr)
                continue
            (args.out / "table.md").write_text(f"{table(results)}\n\n{sentence(provenance())}\n")
    if args.plot and results:
        plot(results, args.plot)
    print(table(results))
    if failed:
        raise SystemExit(
            f"{len(failed)} of {len(results) + len(failed)} arms failed; the same command tries them again."
        )


if __name__ == "__main__":
    main()
