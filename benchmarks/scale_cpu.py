"""The scale model against two processes on a CPU: calibrated on runs of one process, it predicts the step time of two.

    OMP_NUM_THREADS=1 python benchmarks/scale_cpu.py --out runs/scale

Two runs of one process, with 4 and 32 prompts, give the machine's constants: once alone, and once beside an equal run,
because two cores of one machine slow each other down, which two GPUs do not. A probe of two processes that only
exchange bytes gives the links. Nothing is taken from the runs that are predicted: two processes that sum gradients
(DDP), two that divide the learner (FSDP2), and one that samples ahead. All runs take turns, round after round, so that
other load on the machine affects them alike. Figures are medians over the steps of all rounds, without the first of
each round.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sparse_rl.config import load_recipe
from sparse_rl.distributed.world import join_world, leave_world
from sparse_rl.files import read_lines
from sparse_rl.rollout.schedule import row_counts
from sparse_rl.scale.lengths import Lengths, lengths_of_run
from sparse_rl.scale.model import H200, Links, Machine, Work, drain, one_step, work_of

PROMPT = 16  # characters of a sum of 8 digits
RUNS = {  # name: processes, keys, number of equal runs at a time
    "one process, 4 prompts": (1, ["--rollout.prompts", "4"], 1),
    "one process, 32 prompts": (1, [], 1),
    "one of two, 4 prompts": (1, ["--rollout.prompts", "4"], 2),
    "one of two, 32 prompts": (1, [], 2),
    "two processes, DDP": (2, [], 1),
    "two processes, FSDP2": (2, ["--model.shard", "true"], 1),
    "one process, ahead": (1, ["--rollout.ahead", "1"], 1),
}
PREDICTED = ("one process, 32 prompts", "two processes, DDP", "two processes, FSDP2", "one process, ahead")


def keys(steps: int) -> list[str]:
    found = ["--rollout.prompts", "32", "--run.steps", str(steps), "--eval.every", "0"]
    return [*found, "--run.samples", "1", "--run.checkpoint_every", "1000"]


def run(folder: Path, name: str, steps: int) -> list[dict[str, float]]:
    """Seconds by stage, step by step."""
    processes, more, together = RUNS[name]
    where = folder / name.replace(",", "").replace(" ", "-")
    if not (where / "checkpoints").exists():
        command = [sys.executable, "-m", "sparse_rl", "train", "tiny-sums", "--num-processes", str(processes)]
        command += [*keys(steps), *more]
        folders = [where, *(folder / f"beside-{where.name}" for _ in range(together - 1))]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        started = [subprocess.Popen([*command, "--out", str(out)], **quiet) for out in folders]
        if any([process.wait() for process in started]):
            raise SystemExit(f"a run of {name} failed; run it by itself: {' '.join([*command, '--out', str(where)])}")
    return [line for line in read_lines(where / "timing.jsonl") if "time/update" in line][1:]


def work(name: str) -> Work:
    _, more, _ = RUNS[name]
    given = [*keys(1), *more]
    recipe = load_recipe("tiny-sums", [(k.removeprefix("--"), v) for k, v in zip(given[::2], given[1::2])])
    return work_of(recipe, PROMPT)


def steps_and_rows(it: Work, new: np.ndarray) -> tuple[float, float]:
    """(decode steps, rows of all of them)"""
    live, steps = drain(new.ravel(), it.rollout.rows)
    widths = np.array(sorted(row_counts(it.rollout.rows)))
    return steps.sum(), (steps * widths[np.searchsorted(widths, live)]).sum()


def calibrate(small: dict, large: dict, lengths: Lengths) -> Machine:
    """Constants of this CPU, from two runs of one process; prompts and evictions count as products of rows."""
    both = [work(name) for name in ("one process, 4 prompts", "one process, 32 prompts")]
    equations, seconds = [], []
    for it, timing in zip(both, (small, large)):
        new = lengths.draw(it.rollout.prompts, it.rollout.group_size, it.rollout.max_new_tokens, 0)
        steps, rows = steps_and_rows(it, new)
        equations.append([steps * it.shape.layers, 2 * rows * (it.body + it.head)])
        seconds.append(timing["time/rollout"])
    layer, product = np.linalg.solve(np.array(equations), np.array(seconds))
    none = dict(
        bandwidth=1e18,
        prefill_flops=1e30,
        token_seconds=0.0,
        evict_flops=1e30,
        rollout_rest=0.0,
        learn_flops=1.0,
        record_seconds=0.0,
    )
    machine = replace(
        H200, **none, layer_seconds=float(layer), decode_flops=1 / float(product), step_rest=0.0, hidden=1.0
    )
    alone = one_step(both[1], machine, Links(), 1, new)
    learned = large["time/score"] + large["time/update"]
    learn_flops = (alone.sample - alone.rollout + alone.update) / learned  # counted at 1 FLOP/s
    rest = large["time/step"] - large["time/rollout"] - learned
    return replace(machine, learn_flops=learn_flops, record_seconds=rest / (new.size * (new.max() + PROMPT)))


def probe(folder: Path) -> Links:
    """What two processes on this machine exchange by gloo, as World does it."""
    result = folder / "links.json"
    if not result.exists():
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*launch, __file__, "--probe", str(result)], check=True)
    found = json.loads(result.read_text())
    return Links(found["link"], found["link"], 8, found["latency"], found["records"])


def measure_links(result: Path) -> None:
    world = join_world()

    def median(work) -> float:
        seconds = []
        for _ in range(15):
            world.run_on_all(lambda: None)
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds)

    small, large, records = torch.zeros(1), torch.zeros(2**22), torch.zeros(2**22, dtype=torch.uint8)
    latency = median(lambda: torch.distributed.all_reduce(small))
    summed = median(lambda: torch.distributed.all_reduce(large))  # of two processes each sends its 16 MiB once
    taken = median(lambda: world.run_on_all(lambda: records))
    if world.first:
        rates = {"latency": latency, "link": large.nbytes / (summed - latency), "records": 2 * records.nbytes / taken}
        result.write_text(json.dumps(rates))
    leave_world(world)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/scale"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="steps of a run in a round")
    parser.add_argument("--probe", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        measure_links(args.probe)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    links = probe(args.out)
    every = {name: [] for name in RUNS}
    for i in range(args.rounds):
        for name in RUNS:
            every[name] += run(args.out / f"round-{i}", name, args.steps)
    lengths = lengths_of_run(args.out / "round-0" / "one-process-32-prompts")
    measured = {
        name: {k: statistics.median(line[k] for line in lines) for k in lines[-1]} for name, lines in every.items()
    }
    print(f"medians of {len(every['two processes, DDP'])} steps; mean length {lengths.mean:.1f}")
    print(f"links: {links.link / 1e9:.2f} GB/s, {links.latency * 1e3:.2f} ms, records {links.records / 1e9:.2f} GB/s")
    machines = [
        calibrate(*(measured[f"one {who}, {n} prompts"] for n in (4, 32)), lengths) for who in ("process", "of two")
    ]
    for machine in machines:
        print(
            f"{machine.layer_seconds * 1e6:.0f} us per layer and step, "
            f"{machine.decode_flops / 1e9:.2f} GFLOP/s decoding, "
            f"{machine.learn_flops / 1e9:.2f} learning, {machine.record_seconds * 1e6:.1f} us per record token"
        )
    print("| run | measured | predicted, calibrated alone | error | calibrated beside another | error |")
    print("|---|---|---|---|---|---|")
    for name in PREDICTED:
        it, took = work(name), measured[name]["time/step"]
        drawn = [
            lengths.draw(it.rollout.prompts, it.rollout.group_size, it.rollout.max_new_tokens, seed)
            for seed in range(4)
        ]
        cells = []
        for machine in machines:
            step = statistics.mean(one_step(it, machine, links, RUNS[name][0], new).step for new in drawn)
            cells.append(f"{step:.2f} s | {step / took - 1:+.0%}")
        print(f"| {name} | {took:.2f} s | {' | '.join(cells)} |")
    for name, timing in measured.items():
        print(name, {k: round(v, 3) for k, v in timing.items() if k.startswith(("time/", "processes/"))})


if __name__ == "__main__":
    main()
