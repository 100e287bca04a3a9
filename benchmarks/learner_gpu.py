"""What a micro-batch costs the learner, by the way its layers and head are computed:

    modules     Hugging Face's, and the head by chunks in plain torch
    fused       norms, rotations, gates and head by our kernels, as the learner does (kernels/modules.py, learn/head.py)
    compiled    torch.compile of every decoder layer; the head as in `modules`
    compiled+   the same with our head

    python benchmarks/learner_gpu.py --out runs/learner                     # ten minutes on one H200 (estimate)
    python benchmarks/learner_gpu.py --out runs/learner --quick             # about two
    python benchmarks/learner_gpu.py --model tiny --device cpu --quick      # that it works: twins instead of kernels

Scoring (log-probs, entropies, ranks; no gradient) and an update (forward, backward, gradients into fp32 masters, no
optimizer step) of rows of 1,300 tokens, 1,000 of them targets, dense and under random traces (budget 512, interval
128). Updates run with gradient checkpointing on, selective (not compiled) and off. Share: of 800 TFLOP/s, counting
recomputation. Idle: 1 - time of kernels / time. Kinds of kernels: milliseconds of one update. The last table says how
far every way's log-probs and gradients are from those of the modules, all in bf16, and how far those are from the same
weights in fp32: the noise floor. A line of results.jsonl is written as soon as it is known, table.md with it; compiled
ways come last.
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from stay import provenance, sentence
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparse_rl.attention import Replay, register
from sparse_rl.kernels import ops
from sparse_rl.kernels.modules import fused
from sparse_rl.learn.optimizer import MasterAdamW, OptimizerSettings
from sparse_rl.learn.score import batch_logprobs, decoder_layers, hidden_states, score_of
from sparse_rl.learn.selective import keeping_products
from sparse_rl.models import load_model

WAYS = ("modules", "fused", "compiled", "compiled+")
VIEWS = ("dense", "shadow")
PEAK = 800e12  # FLOP/s of a large product in bf16 on an H200
NEVER = torch.iinfo(torch.int32).max

# The first line whose words are in a kernel's name says what it is for.
KINDS = {
    "compiled": ("triton_",),
    "fused": ("_add_norm", "_gate_", "_rotate", "_token_statistics", "_logit_gradients"),
    "attention": ("flash", "fmha", "_list_kept", "_backward_queries", "_backward_keys", "_forward"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "wgmma"),
    "softmax, sums": ("reduce", "softmax", "logsumexp"),
    "copies": ("memcpy", "memset", "copy", "cat", "index", "scatter", "gather", "fill"),
    "elementwise": ("elementwise",),
    "other": ("",),
}


@dataclass(frozen=True)
class Sizes:
    """Of one row, and of the cache that sampled it."""

    length: int
    prompt: int
    budget: int
    interval: int


@dataclass(frozen=True)
class MicroBatch:
    tokens: Tensor  # [B, T]
    targets: Tensor  # bool [B, T]
    upstream: Tensor  # [B, T]
    evicted_at: Tensor | None  # int32 [B, L, H, T]; None: the dense view

    def replay(self) -> Replay | None:
        """Made anew for every pass: listing what segments keep is part of the cost."""
        if self.evicted_at is None:
            return None
        return Replay(self.evicted_at, torch.full((len(self.tokens),), self.tokens.shape[1], device=self.tokens.device))


def micro_batch(model, rows: int, sizes: Sizes, view: str) -> MicroBatch:
    torch.manual_seed(0)
    device, config = next(model.parameters()).device, model.config
    tokens = torch.randint(0, min(90, config.vocab_size), (rows, sizes.length), device=device)
    targets = (torch.arange(sizes.length, device=device) >= sizes.prompt).expand(rows, -1).contiguous()
    upstream = torch.randn(tokens.shape, device=device)
    evicted_at = None
    if view == "shadow":
        heads = config.num_hidden_layers * config.num_key_value_heads
        evicted_at = random_traces(rows * heads, sizes, device)
        evicted_at = evicted_at.view(rows, config.num_hidden_layers, config.num_key_value_heads, sizes.length)
    return MicroBatch(tokens, targets, upstream, evicted_at)


def random_traces(rows: int, sizes: Sizes, device: torch.device) -> Tensor:
    """int32 [rows, T]: whenever `budget` + `interval` tokens are held, `interval` of them leave at random."""
    evicted_at = torch.full((rows, sizes.length), NEVER, dtype=torch.int32, device=device)
    for moment in range(sizes.budget + sizes.interval, sizes.length, sizes.interval):
        alive = evicted_at[:, :moment] == NEVER
        chance = torch.rand(alive.shape, device=device).masked_fill(~alive, 2.0)
        evicted_at.scatter_(1, chance.topk(sizes.interval, largest=False).indices, moment)
    return evicted_at


# ---------------------------------------------------------------------------------------------- the ways, one at a time


@contextmanager
def computing(model, way: str, backend: str) -> Iterator[None]:
    """The model's layers and head in one of the ways, whatever the learner would choose on this device."""
    rules, shadow = ops.rules, register.ATTENTIONS["shadow"]
    ops.rules = lambda device: replace(rules(device), fuses_learning=way in ("fused", "compiled+"))
    layers = list(decoder_layers(model)) if way.startswith("compiled") else []
    try:
        if layers:
            register.ATTENTIONS["shadow"] = torch.compiler.disable(shadow)  # kernels already; dynamo stays out
        for layer in layers:
            vars(layer)["forward"] = torch.compile(layer.forward, backend=backend, dynamic=False)
        with fused(model) if way == "fused" else nullcontext():
            yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)
        register.ATTENTIONS["shadow"] = shadow
        ops.rules = rules


def score_once(model, part: MicroBatch) -> Tensor:
    with torch.no_grad():
        return score_of(model, hidden_states(model, part.tokens, part.replay()), part.tokens, part.targets, 1.0)


def update_once(model, part: MicroBatch) -> Tensor:
    logprobs = batch_logprobs(model, part.tokens, part.targets, 1.0, part.replay())
    (logprobs * part.upstream).sum().backward()
    return logprobs.detach()


# ----------------------------------------------------------------------------------------------------------- measuring


def flops(model, part: MicroBatch, sizes: Sizes, stage: str, checkpointing: bool | str) -> float:
    """Operations of products and attention, what is computed again included."""
    config, tokens, targets = model.config, part.tokens.numel(), int(part.targets.sum())
    layers = sum(p.numel() for p in decoder_layers(model).parameters() if p.dim() == 2)
    head = config.vocab_size * config.hidden_size
    position = torch.arange(1, sizes.length + 1)
    if part.evicted_at is not None:
        full = sizes.budget + sizes.interval
        late = sizes.budget + (position - full - 1) % sizes.interval + 1
        position = torch.where(position <= full, position, late)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    seen = 4 * config.num_hidden_layers * config.num_attention_heads * dim * position.sum().item() * len(part.tokens)
    if stage == "score":
        return 2 * layers * tokens + 2 * head * targets + seen
    again = 1 if checkpointing is True else 0  # of the layers; the head's logits are always computed twice
    return (6 + 2 * again) * layers * tokens + 8 * head * targets + (3.5 + again) * seen


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(run: Callable[[], object], device: torch.device, repeats: int, profiled: bool) -> dict:
    """Milliseconds (median), GiB at the peak, and what kernels ran; ms is None: out of memory."""
    on_gpu = device.type == "cuda"
    try:
        run()  # compiles
        synchronize(device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            synchronize(device)
            times.append(1e3 * (time.perf_counter() - start))
        kinds = kernels_of(run) if profiled and on_gpu else None
    except torch.OutOfMemoryError:
        return {"ms": None}
    ms = statistics.median(times)
    found: dict = {"ms": ms, "gib": torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None}
    if kinds is not None:
        found |= {"idle": 1 - sum(kinds.values()) / ms, "kinds": kinds}
    return found


def kernels_of(run: Callable[[], object]) -> dict[str, float]:
    """Milliseconds by kind of kernel."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    kinds = dict.fromkeys(KINDS, 0.0)
    for event in found.key_averages():
        if event.device_type == DeviceType.CUDA:
            name = event.key.lower()
            kind = next(kind for kind, words in KINDS.items() if any(word in name for word in words))
            kinds[kind] += event.self_device_time_total / 1e3
    return kinds


def differences(model, sizes: Sizes, view: str, ways: list[str], backend: str) -> list[dict]:
    """Of two rows: log-probs in nats per token and gradients, relative, against the modules in the same dtype."""
    part, found = micro_batch(model, 2, sizes, view), {}
    for way in ways:
        model.zero_grad()
        with computing(model, way, backend):
            logprobs = update_once(model, part)
        found[way] = logprobs.double(), [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    exact = copy.deepcopy(model).float()
    with computing(exact, "modules", backend):
        logprobs = update_once(exact, part)
    fine = logprobs.double(), [p.grad for p in exact.parameters() if p.grad is not None]
    lines = []
    for way, mine in found.items():
        gap, gradients = _distance(mine, found["modules"], part.targets)
        floor, gradient_floor = _distance(mine, fine, part.targets)
        lines.append(
            {"view": view, "way": way, "logprobs": gap, "gradients": gradients, "logprobs_to_fp32": floor}
            | {"gradients_to_fp32": gradient_floor}
        )
    return lines


def _distance(mine, theirs, targets: Tensor) -> tuple[float, float]:
    gap = (mine[0] - theirs[0])[targets].abs().mean().item()
    off = sum((a.double() - b.double()).square().sum() for a, b in zip(mine[1], theirs[1], strict=True))
    return gap, (off / sum(b.double().square().sum() for b in theirs[1])).sqrt().item()


# -------------------------------------------------------------------------------------------------------------- tables


CHECKPOINTING = {False: "off", True: "on", "selective": "selective"}


def table(rows: list[dict]) -> str:
    lines = [
        "| stage | tokens | view | checkpointing | way | ms | of 800 TFLOP/s | idle | peak GiB | "
        + " | ".join(KINDS)
        + " |",
        "|" + "---|" * (9 + len(KINDS)),
    ]
    for row in rows:
        cells = [row["stage"], f"{row['tokens']:,}", row["view"], CHECKPOINTING[row["checkpointing"]], row["way"]]
        if row["ms"] is None:
            cells += ["out of memory"]
        else:
            cells += [f"{row['ms']:.1f}", f"{row['share']:.1%}", _percent(row.get("idle")), _number(row.get("gib"))]
            cells += [_number(row["kinds"][kind]) for kind in KINDS] if "kinds" in row else []
        lines.append("| " + " | ".join(cells + [""] * (9 + len(KINDS) - len(cells))) + " |")
    return "\n".join(lines)


def difference_table(rows: list[dict]) -> str:
    lines = [
        "| view | way | log-probs to modules | to fp32 | gradients to modules | to fp32 |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = ("logprobs", "logprobs_to_fp32", "gradients", "gradients_to_fp32")
        lines.append(f"| {row['view']} | {row['way']} | " + " | ".join(f"{row[n]:.2g}" for n in numbers) + " |")
    return "\n".join(lines)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen2.5-1.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", help="of a micro-batch; default: 16384,65536")
    parser.add_argument("--ways", default="modules,fused,compiled", help=f"some of {', '.join(WAYS)}")
    parser.add_argument("--views", default=",".join(VIEWS))
    parser.add_argument("--quick", action="store_true", help="16,384 tokens with checkpointing alone")
    parser.add_argument("--backend", help="of torch.compile; default: inductor, on a CPU aot_eager")
    parser.add_argument("--out", type=Path, default=Path("runs/learner"))
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    ways, views = args.ways.split(","), args.views.split(",")
    assert set(ways) <= set(WAYS) and set(views) <= set(VIEWS) and "modules" in ways
    backend = args.backend or ("inductor" if on_gpu else "aot_eager")
    sizes = Sizes(1300, 300, 512, 128) if on_gpu else Sizes(40, 10, 12, 4)
    default = "16384" if args.quick else "16384,65536"
    counts = [int(n) for n in (args.tokens or (default if on_gpu else "160")).split(",")]
    if any(way.startswith("compiled") for way in ways):
        torch._dynamo.config.recompile_limit = 64
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    rows, apart = [], []
    (args.out / "results.jsonl").unlink(missing_ok=True)

    def note(line: dict) -> None:
        (apart if "logprobs" in line else rows).append(line)
        print(json.dumps(line), flush=True)
        with (args.out / "results.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        where = f"{args.model}, {time.perf_counter() - begin:.0f} s, {sentence(provenance())}"
        (args.out / "table.md").write_text("\n\n".join([table(rows), difference_table(apart), where]) + "\n")

    def measured(
        model, optimizer, part: MicroBatch, view: str, stage: str, checkpointing: bool | str, way: str
    ) -> None:
        model.train(stage == "update")
        options = {"context_fn": keeping_products()} if checkpointing == "selective" else {}
        for layer in decoder_layers(model):
            layer.gradient_checkpointing = bool(checkpointing)
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, **options)

        def run() -> None:
            optimizer.clear()
            (score_once if stage == "score" else update_once)(model, part)

        with computing(model, way, backend):
            found = measure(run, device, 3 if part.tokens.numel() <= 16384 else 1, profiled=True)
        optimizer.clear()
        _empty(device)
        given = {"stage": stage, "tokens": part.tokens.numel(), "view": view, "way": way}
        given |= {"checkpointing": checkpointing}
        if found["ms"] is not None:
            found["share"] = flops(model, part, sizes, stage, checkpointing) / (found["ms"] / 1e3) / PEAK
        note(given | found)

    stages: list[tuple[str, bool | str]] = [("score", False), ("update", True)]
    stages += [] if args.quick else [("update", "selective"), ("update", False)]
    compiled = [way for way in ways if way.startswith("compiled")]
    for some in filter(None, ([way for way in ways if way not in compiled], compiled)):
        model, _ = load_model(args.model, "bfloat16", args.device)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for view in views:
            for line in differences(model.train(), sizes, view, list(dict.fromkeys(["modules", *some])), backend):
                if line["way"] in some:
                    note(line)
        _empty(device)
        optimizer = MasterAdamW(model.parameters(), OptimizerSettings())  # takes gradients as they come
        for tokens, view in itertools.product(counts, views):
            part = micro_batch(model, max(1, tokens // sizes.length), sizes, view)
            for (stage, checkpointing), way in itertools.product(stages, some):
                if checkpointing != "selective" or way not in compiled:  # operations within a compiled layer are unseen
                    measured(model, optimizer, part, view, stage, checkpointing, way)
        del model, optimizer
        _empty(device)
    print((args.out / "table.md").read_text())


def _empty(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
