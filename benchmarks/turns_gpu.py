"""Conversations whose replies take their time, beside the same tokens in one turn: one GPU, random weights.

    python benchmarks/turns_gpu.py --out runs/turns             # minutes on one H200
    python benchmarks/turns_gpu.py --out runs/turns --tiny      # that it works: a CPU, seconds

    one turn     `Engine.generate`: prompts that hold the given tokens, and as many sampled tokens as a conversation has
    turns        `Engine.open`: every turn samples its tokens, waits for its reply, is fed it, and samples on
    at once      the same, with replies that are there at once

Replies take a random time, from `--fastest` to `--slowest` seconds, of a clock and not of a process, so what is
measured is the engine. Twice as many conversations as rows are open, as in training, so rows have somebody else to run
while a reply is waited for. Rates are sampled tokens per second. `rows that run` is the mean share of rows, over the
time of a run, for which there is a conversation that can go on; the others wait. `waiting for a reply` is the same of
conversations.
Each line is the median of `--repeats` runs, after a warm-up that compiles and captures; all runs are in results.json.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import time
from pathlib import Path

import torch

from sparse_rl import Engine, Sampling
from sparse_rl.models import load_model

HEADS = ("run", "seconds", "sampled tokens/s", "of one turn", "rows that run", "waiting for a reply")


def prompts(count: int, length: int, vocabulary: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(0)
    return torch.randint(1, vocabulary, (count, length), generator=g).tolist()


def one_turn(engine: Engine, args: argparse.Namespace) -> dict[str, float]:
    length = args.prompt + (args.turns - 1) * args.given
    asked = prompts(args.conversations, length, engine.shape.vocabulary)
    began = time.perf_counter()
    done = engine.generate(asked, sampling=Sampling(args.turns * args.sampled, stop_ids=()))
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "sampled": sum(len(t.response_tokens) for t in done)}


def in_turns(engine: Engine, args: argparse.Namespace, slowest: float) -> dict[str, float]:
    """Conversations from the first prompt to the last release, and what rows did meanwhile."""
    rng, vocabulary = random.Random(1), engine.shape.vocabulary
    sampling, most = Sampling(args.sampled, stop_ids=()), args.turns * (args.sampled + args.given)
    asked = prompts(args.conversations, args.prompt, vocabulary)
    given = prompts(args.conversations * args.turns, args.given, vocabulary)
    turns, due, sampled, busy, late = {}, [], 0, 0.0, 0.0
    together = 2 * engine.rows
    began = time.perf_counter()
    with engine.open(args.prompt, args.prompt + most, waiting=together, park=together) as live:
        while asked or live.num_open:
            while asked and live.num_open < together:
                turns[live.submit(asked.pop(), sampling, seed=len(asked))] = 0
            before, ready = time.perf_counter(), live.num_open - len(due)  # conversations that need a row now
            for chat in live.step():
                if chat.status != "stopped":
                    continue
                turns[chat] += 1
                if turns[chat] == args.turns:
                    sampled += int(live.release(chat).response_mask.sum())
                else:
                    wait = rng.uniform(min(args.fastest, slowest), slowest)
                    heapq.heappush(due, (time.perf_counter() + wait, chat.number, chat))
            now = time.perf_counter()
            if live.idle and due:
                time.sleep(max(0.0, due[0][0] - now))
            while due and due[0][0] <= time.perf_counter():
                live.extend(heapq.heappop(due)[2], given.pop())
            passed = time.perf_counter() - before
            busy += passed * min(ready, engine.rows)
            late += passed * len(due)
    seconds = time.perf_counter() - began
    share = late / seconds / min(args.conversations, together)
    return {"seconds": seconds, "sampled": sampled, "rows": busy / seconds / engine.rows, "waiting": share}


def table(found: dict[str, list[dict[str, float]]]) -> str:
    rates = {name: statistics.median(run["sampled"] / run["seconds"] for run in runs) for name, runs in found.items()}
    lines = [f"| {' | '.join(HEADS)} |", "|" + "---|" * len(HEADS)]
    for name, runs in found.items():
        cells = [name, f"{statistics.median(run['seconds'] for run in runs):.1f}", f"{rates[name]:,.0f}"]
        cells.append(f"{rates[name] / rates['one turn']:.2f}")
        for share in ("rows", "waiting"):
            cells.append(f"{statistics.median(run[share] for run in runs):.0%}" if share in runs[0] else "-")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(given: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="random:qwen2.5-1.5b")
    parser.add_argument("--compressor", default="rkv")
    parser.add_argument("--tiny", action="store_true", help="the built-in model on a CPU, with few short turns")
    numbers = {
        "budget": 512, "interval": 128, "rows": 256, "conversations": 512, "turns": 4, "prompt": 128, "sampled": 512,
        "given": 128, "repeats": 3,
    }  # fmt: skip
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--fastest", type=float, default=0.01)
    parser.add_argument("--slowest", type=float, default=0.5)
    args = parser.parse_args(given)
    if args.tiny:
        args.model, args.budget, args.interval, args.rows, args.conversations = "tiny", 16, 8, 2, 4
        args.turns, args.prompt, args.sampled, args.given, args.repeats, args.slowest = 3, 8, 4, 5, 1, 0.05
    device = "cpu" if args.tiny else "cuda"
    model, _ = load_model(args.model, device=device)
    engine = Engine(model, args.compressor, budget=args.budget, interval=args.interval, rows=args.rows)
    ways = {
        "one turn": lambda: one_turn(engine, args),
        "turns": lambda: in_turns(engine, args, args.slowest),
        "at once": lambda: in_turns(engine, args, 0.0),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for repeat in range(args.repeats + 1):  # in turns, so that a machine that slows down slows all of them
        for name, way in ways.items():
            run = way()
            if repeat:
                found[name].append(run)
            print(f"{name}{' (warm-up)' * (not repeat)}: {run['seconds']:.2f} s", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    about = {**vars(args), "out": str(args.out), "device": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    (args.out / "results.json").write_text(json.dumps({"settings": about, "runs": found}, indent=1) + "\n")
    print(told := table(found))
    return told


if __name__ == "__main__":
    main()
