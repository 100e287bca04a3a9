"""Where the extra time of a run's first step goes: kernels that are compiled, graphs that are captured, the rest.

    python benchmarks/first_step.py --out runs/first-step                    # on a GPU: steps by stage, first and later
    python benchmarks/first_step.py --out runs/first-step --cache FOLDER     # with Triton's files of an earlier run
    python benchmarks/first_step.py --out runs/first-step --tiny             # that it works, on a CPU
    python benchmarks/first_step.py --compile 90                             # no GPU: variants and seconds per kernel

The steps are those of benchmarks/step_peers.py (its options hold here, too), without a peer. Compiling is counted by
Triton's own listener, so that what its files on disk spare is seen; a capture includes two trial steps and what these
compile, which is taken out. `--compile` launches every kernel of a step with the shapes of Qwen2.5-1.5B, at all row
counts and with ragged micro-batches; a launch only compiles, for the compute capability that is given.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from stay import provenance, sentence
from step_peers import (
    MODEL,
    OURS,
    PROMPTS,
    STAGES,
    Settings,
    is_made,
    made_prompts,
    measure_ours,
    run_column,
    settings_of,
    share_model,
)

from sparse_rl.files import write_text
from sparse_rl.kernels.ops import has_triton


@dataclass
class Compiled:
    """Of one kernel."""

    variants: int = 0
    seconds: float = 0.0
    from_disk: int = 0


@dataclass
class Noted:
    """What happened in one stage of one step."""

    compiling: float = 0.0  # seconds
    capturing: float = 0.0  # seconds, without compiling
    captures: int = 0


@dataclass
class Record:
    step: int = 0
    stage: str = ""
    noted: dict[tuple[int, str], Noted] = field(default_factory=lambda: defaultdict(Noted))
    kernels: dict[str, Compiled] = field(default_factory=lambda: defaultdict(Compiled))

    @property
    def here(self) -> Noted:
        return self.noted[self.step, self.stage]

    def listen(self, *, metadata: dict, times: Any, cache_hit: bool, **_: Any) -> None:
        """Triton calls this for every kernel that it makes ready."""
        kernel, seconds = self.kernels[metadata["name"]], times.total / 1e6
        kernel.variants += 1
        kernel.from_disk += cache_hit
        kernel.seconds += seconds
        self.here.compiling += seconds

    def captured(self, capture: Callable) -> Callable:
        """Time every call of `Decoder.capture`."""

        @functools.wraps(capture)
        def timed(*given: Any) -> None:
            before, start = self.here.compiling, time.perf_counter()
            capture(*given)
            self.here.capturing += time.perf_counter() - start - (self.here.compiling - before)
            self.here.captures += 1

        return timed


def watch(record: Record) -> None:
    """Make Triton, decoders and stages report to `record`."""
    from sparse_rl.rollout.capture import Decoder
    from sparse_rl.train.log import Clock
    from sparse_rl.train.loop import Trainer

    if has_triton():
        from triton import knobs

        knobs.compilation.listener = record.listen
    Decoder.capture = record.captured(Decoder.capture)
    step, announce = Trainer.step, Clock.__init__

    def clock(self: Clock, show: Callable[[str], None] = lambda name: None) -> None:
        def said(name: str) -> None:
            record.stage = name if name in STAGES else "rest"
            show(name)

        announce(self, said)

    def counted(trainer: Trainer) -> None:
        record.step, record.stage = record.step + 1, "rest"
        step(trainer)

    Clock.__init__, Trainer.step = clock, counted


def table(steps: list[dict[str, float]], record: Record) -> str:
    """By stage: the first step, the mean of the later ones, and what the difference consists of."""
    lines = ["| | first step | later steps | extra | compiling | capturing | the rest of the extra |", "|" + "---|" * 7]
    for stage in STAGES:
        first, later = steps[0][stage], [seconds[stage] for seconds in steps[1:]]
        extra = first - sum(later) / len(later)
        parts = [n for (step, s), n in record.noted.items() if step == 1 and stage in (s, "step")]
        compiling, capturing = sum(n.compiling for n in parts), sum(n.capturing for n in parts)
        numbers = (first, first - extra, extra, compiling, capturing, extra - compiling - capturing)
        count = sum(n.captures for n in parts)
        cells = [f"{number:.2f} s" for number in numbers]
        cells[4] += f" ({count} graphs)" if count else ""
        lines.append(f"| {stage} | {' | '.join(cells)} |")
    return "\n".join(lines)


def kernel_table(kernels: dict[str, Compiled]) -> str:
    lines = ["| kernel | variants | seconds | from disk |", "|---|---|---|---|"]
    for name, found in sorted(kernels.items(), key=lambda pair: -pair[1].seconds):
        lines.append(f"| {name} | {found.variants} | {found.seconds:.2f} | {found.from_disk} |")
    total = [sum(getattr(found, key) for found in kernels.values()) for key in ("variants", "seconds", "from_disk")]
    return "\n".join([*lines, f"| **sum** | {total[0]} | {total[1]:.2f} | {total[2]} |"])


# ------------------------------------------------------------------------------------------- compiling without a GPU


def compile_all(capability: int, wanted: list[str], dtype: torch.dtype = torch.bfloat16) -> dict[str, Compiled]:
    """Launch kernels of a step of Qwen2.5-1.5B; a launch only compiles. wanted: names of `LAUNCHES`"""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from sparse_rl.kernels import device

    target = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
    )  # fmt: skip
    driver.set_active(target)
    run = JITFunction.run
    JITFunction.run = lambda kernel, *given, **options: run(kernel, *given, **{**options, "warmup": True})
    device.processors = lambda _: 132
    device.shared_memory = lambda _: 227 * 1024 if capability in (80, 90) else 99 * 1024
    record = Record()
    knobs.compilation.listener = record.listen
    for name in wanted:
        LAUNCHES[name](dtype)
    return dict(record.kernels)


HIDDEN, INNER, HEADS, GROUP, DIM, VOCABULARY = 1536, 8960, 2, 6, 128, 151936
ROWS, BUDGET, INTERVAL, NEW = 256, 512, 128, 1024
RAGGED = (16384, 16001, 15872, 8193)  # tokens of micro-batches


def decode_steps(dtype: torch.dtype) -> None:
    """A step at every row count at which a rollout may run."""
    from sparse_rl.cache import LayerSlots
    from sparse_rl.kernels import decode, sample
    from sparse_rl.rollout.schedule import row_counts

    capacity, weight = BUDGET + INTERVAL, torch.empty(HIDDEN, dtype=dtype)
    keys = torch.empty(ROWS, HEADS, capacity, DIM, dtype=dtype)
    ring = torch.empty(ROWS, HEADS * GROUP, 8, DIM, dtype=dtype)
    slots = LayerSlots(keys, keys, torch.empty(ROWS, HEADS, capacity, dtype=torch.int32), ring)
    numbers = [torch.zeros(ROWS, dtype=torch.int64) for _ in range(5)]
    limit, full = torch.tensor([[NEW], [capacity]]).unbind()
    state = SimpleNamespace(
        capacity=full, limit=limit, done=torch.zeros(ROWS, dtype=torch.bool),
        tokens=torch.empty(ROWS, NEW, dtype=torch.int64), logprobs=torch.empty(ROWS, NEW),
        **dict(zip(("token", "index", "used", "stream", "count"), numbers)),
    )  # fmt: skip
    for rows in row_counts(ROWS):
        joint = torch.empty(rows, (GROUP * HEADS + 2 * HEADS) * DIM, dtype=dtype)
        query, key, value = (
            x.view(rows, -1, DIM) for x in joint.split([GROUP * HEADS * DIM, HEADS * DIM, HEADS * DIM], 1)
        )
        rope = torch.empty(rows, DIM, dtype=dtype)
        used, index = state.used[:rows], state.index[:rows]
        decode.store_and_attend(
            query, key, value, slots, used, index, torch.ones(rows, dtype=torch.bool), 0.088, (rope, rope)
        )
        residual = torch.empty(rows, HIDDEN, dtype=dtype)
        for new in (None, residual, torch.empty(4, rows, HIDDEN)):
            decode.add_rms_norm(new, residual, weight, 1e-6)
        decode.silu_mul(torch.empty(rows, 2 * INNER, dtype=dtype))
        stops: Any = torch.tensor([0])
        sample.sample_and_record(torch.empty(rows, VOCABULARY), state, 1.0, stops)  # pyright: ignore


def evictions(dtype: torch.dtype) -> None:
    """Of all rows, of some, of one; and of a prompt."""
    from sparse_rl.kernels import evict

    layers = 2
    for n, used in ((256, 640), (37, 640), (1, 640), (1, 777)):
        keys = torch.empty(n, HEADS, used, DIM, dtype=dtype)
        evict.redundancy(keys, 0.5)
        evict.observed_logits(torch.empty(n, HEADS * GROUP, 8, DIM, dtype=dtype), keys, 0.1)
        cache = torch.empty(layers, n, HEADS, used, DIM, dtype=dtype)
        feed = torch.empty(layers, n, HEADS, used, dtype=torch.int32)
        rows, live = torch.arange(n), torch.ones(n, dtype=torch.bool)
        kept = torch.zeros(layers, n, HEADS, BUDGET, dtype=torch.int64)
        trace = torch.empty(n, layers, HEADS, 2048, dtype=torch.int16)
        evict.compact(cache, cache, feed, None, trace, slice(0, layers), rows, used, kept, rows, live, -1)


def learner_layers(dtype: torch.dtype) -> None:
    from sparse_rl.kernels import layers

    weight = torch.zeros(HIDDEN, dtype=dtype, requires_grad=True)
    for tokens in RAGGED:
        new, residual = (torch.empty(1, tokens, HIDDEN, dtype=dtype, requires_grad=True) for _ in range(2))
        total, normed = layers.add_and_norm(new, residual, weight, 1e-6)
        (total.sum() + normed.sum()).backward()
        layers.add_and_norm(None, residual, weight, 1e-6)[1].sum().backward()
        gate = torch.empty(1, tokens, 64, dtype=dtype, requires_grad=True)  # counted by numbers, not by rows
        layers.silu_gate(gate, gate).sum().backward()
        query, key = (
            torch.empty(1, tokens, n, DIM, dtype=dtype).transpose(1, 2).requires_grad_() for n in (HEADS * GROUP, HEADS)
        )
        angles = torch.empty(1, tokens, DIM, dtype=dtype)
        sum(x.sum() for x in layers.rotate(query, key, angles, angles)).backward()


def learner_attention(dtype: torch.dtype) -> None:
    """Under traces, and packed and dense, which is one segment per trajectory."""
    from sparse_rl.cache.segments import Replay
    from sparse_rl.kernels import segments

    for tokens, interval in ((2048, INTERVAL), (1999, INTERVAL), (2048, 1024)):
        evicted_at = torch.full((1, 1, HEADS, tokens), torch.iinfo(torch.int32).max, dtype=torch.int32)
        for moment in range(interval, tokens, interval):
            evicted_at[..., moment - 1] = moment
        query, key = (
            torch.empty(1, tokens, n, DIM, dtype=dtype).transpose(1, 2).requires_grad_() for n in (HEADS * GROUP, HEADS)
        )
        replay = Replay(evicted_at, torch.full((1,), tokens))
        segments.trace_attention(query, key, key, replay, 0, 0.1, None, None, 0.0).sum().backward()


def learner_head(dtype: torch.dtype) -> None:
    from sparse_rl.kernels import head

    for tokens, start, size in ((64, 0, 4096), (63, 4096, 4096), (64, 8192, 384)):
        targets, row = torch.zeros(tokens, dtype=torch.int64), torch.empty(tokens)
        head.token_statistics(torch.empty(tokens, VOCABULARY), targets, 1.0, None)
        head.logit_gradients(torch.empty(tokens, size), targets, row, row, row, None, start, 1.0, None, dtype)


LAUNCHES = {
    "decode": decode_steps,
    "evict": evictions,
    "layers": learner_layers,
    "attention": learner_attention,
    "head": learner_head,
}

# --------------------------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/first-step"))
    parser.add_argument("--method", choices=OURS, default="sparse-rl")
    parser.add_argument("--cache", type=Path, help="Triton's files; default: none from before")
    parser.add_argument("--compile", type=int, metavar="CAPABILITY", help="such as 90; compile, and run nothing")
    parser.add_argument("--kernels", default=",".join(LAUNCHES), help="with --compile: some of the default")
    parser.add_argument("--models", type=Path, help="a folder for weights that several --out share")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens, for a CPU")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="of the recipe")
    for setting in fields(Settings):
        if not setting.name.startswith(("peer_", "vllm_")):
            parser.add_argument(f"--{setting.name.replace('_', '-')}", type=type(setting.default))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as empty:
        os.environ["TRITON_CACHE_DIR"] = str(args.cache or empty)
        if args.compile:
            start = sum(os.times()[:4])
            print(kernel_table(compile_all(args.compile, args.kernels.split(","))))
            print(f"sm_{args.compile}, {sum(os.times()[:4]) - start:.1f} s of a processor in all")
            return
        run_steps(args)


def run_steps(args: argparse.Namespace) -> None:
    names = {setting.name for setting in fields(Settings)} - vars(args).keys()
    settings = settings_of(argparse.Namespace(**vars(args), **dict.fromkeys(names)))
    if settings.steps < 2:
        raise SystemExit(f"--steps is {settings.steps}; there is no later step to compare with.")
    folder = args.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "settings.json", json.dumps(asdict(settings), indent=1) + "\n")
    write_text(folder / PROMPTS, json.dumps(made_prompts(settings)))
    share_model(settings, folder, args.models)
    if not is_made(folder) and (problem := run_column(MODEL, folder, args)):
        raise SystemExit(problem)
    record = Record()
    watch(record)
    found = measure_ours(args.method, settings, folder, [tuple(pair) for pair in args.set])
    seconds = [step.seconds for step in found["steps"]]
    text = [table(seconds, record), "", kernel_table(record.kernels), ""]
    text += [f"{settings.model}, {args.method}, {sentence(provenance())}; {found['chosen']}"]
    if torch.cuda.is_available():
        stats = torch.cuda.memory_stats()
        text += [f"the allocator asked the driver {stats['num_device_alloc']} times for memory"]
    write_text(folder / "table.md", "\n".join(text) + "\n")
    print("\n".join(text))


if __name__ == "__main__":
    main()
