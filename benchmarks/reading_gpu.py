"""What it costs a rollout to read tokens: prompts, and given tokens of conversations, by the way that layers compute.

    python benchmarks/reading_gpu.py --out runs/reading                     # Qwen2.5-1.5B's shape, under two minutes
    python benchmarks/reading_gpu.py --out runs/tiny --tiny                 # a rehearsal on a CPU

Prompts: 128 of 128 tokens. Given tokens: 129 for each of 256 rows that hold 511. The ways:

    modules, 32 rows    Hugging Face's modules, at most 32 rows at a time (as it was before both changes)
    fused, 32 rows      norms, gates and rotations by our kernels
    modules             as many rows at a time as the chunk holds
    fused               both: what an engine does

Then groups of 16 prompts, of lengths that no earlier group had, one group of each length, as they come: once without
cuDNN's attention, which is what an engine does, and once with it.

Each line has the milliseconds of all rows; those until the host had launched everything; the number of forward passes;
the peak of the device; and how far log-probs are from those of `modules`, mean over rows and vocabulary.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
import unittest.mock
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from stay import provenance
from torch import Tensor

from sparse_rl import Engine
from sparse_rl.kernels.modules import fusing, known_modules
from sparse_rl.models import load_model
from sparse_rl.rollout import prefill
from sparse_rl.rollout.feed import Chunk
from sparse_rl.rollout.live_loop import LiveLoop
from sparse_rl.rollout.queue import Waiting

WAYS = {"modules, 32 rows": (False, 32), "fused, 32 rows": (True, 32), "modules": (False, None), "fused": (True, None)}


@dataclasses.dataclass(frozen=True)
class Shape:
    model: str = "random:qwen2.5-1.5b"
    prompts: int = 128
    prompt: int = 128
    rows: int = 256
    given: int = 129
    held: int = 511
    budget: int = 512
    interval: int = 128
    repeats: int = 5


TINY = Shape("tiny", 3, 8, 6, 5, 15, 16, 8, 1)


def timed(work: Callable[[], Tensor], repeats: int, on_gpu: bool) -> tuple[dict, Tensor]:
    """Medians of some repeats, after two that compile."""
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    whole, host, found = [], [], work()
    work()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        found = work()
        host.append(1000 * (time.perf_counter() - began))
        wait()
        whole.append(1000 * (time.perf_counter() - began))
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None
    return {"ms": statistics.median(whole), "host_ms": statistics.median(host), "peak_gib": peak}, found


def reading_prompts(loop: LiveLoop, shape: Shape, most: int) -> tuple[Callable[[], Tensor], int]:
    tokens = torch.randint(1, 60, (shape.prompts, shape.prompt), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [Waiting(i, prompt, i, deque()) for i, prompt in enumerate(tokens)]
    groups = [prompts[i : i + most] for i in range(0, len(prompts), most)]

    def work() -> Tensor:
        logits = []
        for group in groups:
            loop.prefill(group)
            logits.append(loop.ready_logits)
        return torch.cat(logits)

    return work, len(groups)


def new_lengths(loop: LiveLoop, shape: Shape, first: int, on_gpu: bool) -> dict:
    """Groups of prompts of every second length from `first` on, each once."""
    lengths, rows = range(first, shape.prompt, 2), min(16, shape.prompts)
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    wait()
    began = time.perf_counter()
    for length in lengths:
        loop.prefill([Waiting(i, [1 + i] * length, i, deque()) for i in range(rows)])
    wait()
    ms = 1000 * (time.perf_counter() - began)
    return {"what": "prompts of new lengths", "passes": len(lengths), "ms": ms, "host_ms": ms, "peak_gib": None}


def feeding(loop: LiveLoop, shape: Shape, most: int, fused: bool) -> tuple[Callable[[], Tensor], int]:
    known = known_modules(loop.model) if fused else []
    feeder = dataclasses.replace(loop.feeder, most=most, known=known)
    tokens = torch.randint(1, 60, (shape.rows, shape.given), generator=torch.Generator().manual_seed(1)).tolist()
    groups = feeder.groups([Chunk(row, given, shape.held, shape.held) for row, given in enumerate(tokens)])
    return lambda: torch.cat([feeder.feed(group).logits for group in groups]), len(groups)


def measure(shape: Shape) -> list[dict]:
    on_gpu = torch.cuda.is_available() and shape.model != "tiny"
    model = load_model(shape.model, device="cuda" if on_gpu else None)[0]
    engine = Engine(model, "rkv", shape.budget, shape.interval, shape.rows, prefill_rows=shape.prompts)
    engine.storage.reserve_live(shape.prompt, 4 * (shape.budget + shape.interval), 16)
    for stored in engine.cache.stored:
        stored.keys.normal_()
        stored.values.normal_()
    loop = LiveLoop(engine, 4 * (shape.budget + shape.interval), 0, None, 0)
    lines, expected = [], {}
    with engine._switched():
        for way, (fused, most) in sorted(WAYS.items(), key=lambda item: item[0] != "modules"):
            loop.known = known_modules(model) if fused else []
            works = {
                "prompts": reading_prompts(loop, shape, most or shape.prompts),
                "given tokens": feeding(loop, shape, most or shape.rows, fused),
            }
            for what, (work, passes) in works.items():
                found, logits = timed(work, shape.repeats, on_gpu)
                logprobs = logits.float().log_softmax(-1)
                expected.setdefault(what, logprobs)
                apart = (logprobs - expected[what]).abs().mean().item()
                lines.append({"what": what, "way": way, "passes": passes, **found, "apart": apart})
                print(lines[-1], flush=True)
        for way, first in (("fused", 1), ("fused, with cuDNN", 2)):
            plain = unittest.mock.patch.object(prefill, "reading", lambda known, _: fusing(known))
            with plain if first == 2 else nullcontext():
                lines.append({"way": way, "apart": 0.0, **new_lengths(loop, shape, first, on_gpu)})
                print(lines[-1], flush=True)
    return lines


def table(lines: list[dict]) -> str:
    text = ["| what | way | passes | ms | host, ms | peak, GiB | log-probs apart |", "|" + "---|" * 7]
    ways = [*WAYS, "fused, with cuDNN"]
    for line in sorted(lines, key=lambda line: (line["what"], ways.index(line["way"]))):
        peak = "" if line["peak_gib"] is None else f"{line['peak_gib']:.1f}"
        times = f"{line['ms']:.1f} | {line['host_ms']:.1f} | {peak} | {line['apart']:.4f}"
        text.append(f"| {line['what']} | {line['way']} | {line['passes']} | {times} |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/reading"))
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    shape = TINY if args.tiny else Shape()
    lines = measure(shape)
    with (args.out / "results.jsonl").open("w") as file:
        for line in lines:
            file.write(json.dumps({**line, **dataclasses.asdict(shape), **provenance()}) + "\n")
    (args.out / "table.md").write_text(table(lines) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
