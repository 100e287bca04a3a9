"""Kills of samplers and nodes of a Ray pool throughout runs: is the run still the run of one process, to the byte?

    OMP_NUM_THREADS=1 python benchmarks/pool_storm.py --out runs/pool-storm --seconds 600   # repeat it: counts add up
    python benchmarks/pool_storm.py --out runs/pool-storm --table

A case is a run of tiny-sums on a local cluster of two nodes, on the loopback interface, with 1, 2 or 5 samplers, and
`rollout.ahead` 0 or 2. While it runs, samplers are killed (SIGKILL), stopped (SIGSTOP), and the second node is taken
away and given back, at moments drawn from the case's number. Its metrics.jsonl is compared with that of a run that was
left alone: of one process without a pool, or, ahead, of a pool. Every case is one line of results.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": ""}

from sparse_rl.config import make_recipe
from sparse_rl.files import append_line, read_lines

STUCK = 900.0  # seconds after which a case is said to hang
PATIENCE = 15.0  # of the pool, with samplers that were stopped
STORE = 80 * 2**20
CASES = [(samplers, ahead) for samplers in (1, 2, 5) for ahead in (0, 2)]


def settings(steps: int, **rollout):
    return make_recipe(
        {
            "model": {"name": "tiny-sums"},
            "task": {"name": "sums"},
            "rollout": {
                **{"budget": 42, "interval": 4, "compressor_options": {"protect_prompt": True}, "rows": 16},
                **{"prompts": 6, "group_size": 4, "max_new_tokens": 64},
                **rollout,
            },
            "learn": {"minibatches": 2, "micro_batch_tokens": 400},
            "optimizer": {"lr": 1e-4},
            "eval": {"every": 0},
            "run": {"steps": steps, "checkpoint_every": steps, "diagnose": 2, "samples": 0},
        }
    )


def storm(trainer, cluster, draw: random.Random, every: float, happened: Counter) -> None:
    """Until the run ends: now and then, something is lost."""
    node = cluster.add_node(num_cpus=1, object_store_memory=STORE)
    while trainer.progress.steps < trainer.recipe.run.steps:
        time.sleep(draw.expovariate(1 / every))
        if trainer.pool is None:
            continue
        if node is None:
            node = cluster.add_node(num_cpus=1, object_store_memory=STORE)
            happened["node came back"] += 1
            continue
        known = [s.about for s in list(trainer.pool.pool.samplers.values()) if s.about is not None]
        what = draw.choices(["killed", "stopped", "node lost"], [8, 1, 1])[0]
        if what == "node lost":
            cluster.remove_node(node, allow_graceful=False)
            node = None
        elif known:
            number = signal.SIGKILL if what == "killed" else signal.SIGSTOP
            with suppress(ProcessLookupError):
                os.kill(draw.choice(known).pid, number)
        else:
            continue
        happened[what] += 1


def run_case(folder: Path, number: int, samplers: int, ahead: int, steps: int, every: float) -> None:
    """In a process of its own; every 0: it is left alone. Prints what happened."""
    import ray
    from ray.cluster_utils import Cluster

    from sparse_rl.train.loop import Trainer
    from sparse_rl.train.run import train

    head = {"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)  # nodes come in a thread
    ray.init(address=cluster.address, log_to_driver=False)
    happened: Counter = Counter()
    begin = Trainer.run

    def run(trainer):
        if every:
            draw = random.Random(f"{number}")
            threading.Thread(target=storm, args=(trainer, cluster, draw, every, happened), daemon=True).start()
        begin(trainer)

    Trainer.run = run
    pool = {"pool": f"ray://{cluster.address}", "samplers": samplers, "ahead": ahead, "patience": PATIENCE}
    try:
        train(settings(steps, **pool, over_ask=0.2), folder, show=False)
        assert not every or happened, "the storm did not begin"
        print("happened", json.dumps(happened), flush=True)
    finally:
        ray.shutdown()
        cluster.shutdown()


def child(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, __file__, "--case", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=STUCK)


def reference(out: Path, ahead: int, steps: int) -> bytes:
    """The metrics of a run that is left alone, made once."""
    folder = out / f"calm-{ahead}-{steps}"
    if not (folder / "checkpoints" / f"step-{steps:06d}").exists():
        shutil.rmtree(folder, ignore_errors=True)
        if ahead:
            done = child(folder, 0, 2, ahead, steps, 0)
            assert done.returncode == 0, done.stderr[-2000:]
        else:
            from sparse_rl.train.run import train

            train(settings(steps), folder, show=False)
    return (folder / "metrics.jsonl").read_bytes()


def do_case(out: Path, number: int, steps: int, every: float) -> dict:
    samplers, ahead = CASES[number % len(CASES)]
    expected, folder, start = reference(out, ahead, steps), out / "case", time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    line = {"case": number, "samplers": samplers, "ahead": ahead, "steps": steps}
    try:
        done = child(folder, number, samplers, ahead, steps, every)
    except subprocess.TimeoutExpired:
        return line | {"outcome": "hung"}
    seconds = time.monotonic() - start
    if done.returncode:
        return line | {"outcome": "failed", "why": done.stderr[-600:], "seconds": seconds}
    happened = json.loads(done.stdout.split("happened", 1)[1].splitlines()[0])
    last = read_lines(folder / "timing.jsonl")[-1]
    same = (folder / "metrics.jsonl").read_bytes() == expected
    counts = {name.removeprefix("pool/"): value for name, value in last.items() if name.startswith("pool/")}
    return line | {"outcome": "same" if same else "different", "seconds": seconds, "happened": happened} | counts


def table(lines: list[dict]) -> str:
    heads = ["samplers", "ahead", "runs", "equal to the byte", "killed", "stopped", "nodes lost", "samplers lost"]
    heads += ["pieces asked again", "duplicates", "of these different"]
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for samplers, ahead in sorted({(line["samplers"], line["ahead"]) for line in lines}):
        own = [line for line in lines if (line["samplers"], line["ahead"]) == (samplers, ahead)]
        done = [line for line in own if "happened" in line]
        what = [sum(line["happened"].get(name, 0) for line in done) for name in ("killed", "stopped", "node lost")]
        names = ("lost/count", "asked_again/count", "duplicates/count", "duplicates/different")
        counts = [sum(int(line[name]) for line in done) for name in names]
        same = sum(line["outcome"] == "same" for line in own)
        rows.append("| " + " | ".join(map(str, [samplers, ahead, len(own), same, *what, *counts])) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/pool-storm"))
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no case after so long")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=float, default=2.0, help="seconds between two losses, on average")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--case", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        folder, number, samplers, ahead, steps, every = given.case
        return run_case(Path(folder), int(number), int(samplers), int(ahead), int(steps), float(every))
    results, start = given.out / "results.jsonl", time.monotonic()
    given.out.mkdir(parents=True, exist_ok=True)
    while not given.table and time.monotonic() - start < given.seconds:
        line = do_case(given.out, len(read_lines(results)), given.steps, given.every)
        append_line(results, line)
        print(json.dumps(line), flush=True)
    print(table(read_lines(results)))


if __name__ == "__main__":
    main()
