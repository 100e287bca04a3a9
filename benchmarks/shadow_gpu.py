"""The cost of a learner that sees what the sampler saw: dense (flash) against the shadow view by segments (ours), by
FlexAttention and under a boolean mask. One attention layer, and a whole model of Qwen2.5-1.5B's shape; forward and
backward; time and peak memory.

    python benchmarks/shadow_gpu.py --out runs/shadow                    # everything, about three minutes on one H200
    python benchmarks/shadow_gpu.py --out runs/shadow --only layer

Budget 512, interval 128, random survivors at every eviction: no kernel can profit from structure.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import statistics
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import torch

from sparse_rl.attention import Replay, shadow
from sparse_rl.cache import segments
from sparse_rl.kernels import ops
from sparse_rl.learn.score import batch_logprobs
from sparse_rl.models import load_model

BUDGET, INTERVAL = 512, 128
QUERY_HEADS, HEADS, DIM = 12, 2, 128
WAYS = ("dense (flash)", "shadow (segments)", "shadow (FlexAttention)", "shadow (boolean mask)")
NEVER = torch.iinfo(torch.int32).max


def random_traces(
    rows: int, layers: int, heads: int, tokens: int, budget: int = BUDGET, interval: int = INTERVAL
) -> torch.Tensor:
    """int32 [B, L, H, T]: every head keeps `budget` tokens at random whenever it has `budget` + `interval`."""
    evicted_at = torch.full((rows * layers * heads, tokens), NEVER, dtype=torch.int32, device="cuda")
    for moment in range(budget + interval, tokens, interval):
        alive = evicted_at[:, :moment] == NEVER
        chance = torch.rand(alive.shape, device="cuda").masked_fill(~alive, 2.0)
        leaves = chance.topk(interval, largest=False).indices
        evicted_at.scatter_(1, leaves, moment)
    return evicted_at.view(rows, layers, heads, tokens)


@contextmanager
def forced(way: str):
    """One of the shadow view's ways, whichever it would choose."""
    fits, find = ops.fits_tiles, segments.find_segments
    try:
        if "boolean" in way:
            ops.fits_tiles = lambda *_: False
        if "Flex" in way:
            segments.find_segments = lambda *given: dataclasses.replace(find(*given), are_few=False)
        yield
    finally:
        ops.fits_tiles, segments.find_segments = fits, find


def measure(run: Callable[[], None], repeats: int = 10) -> dict:
    """Milliseconds (median) and GB (peak, everything that is held while it runs included)."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            seconds.append(start.elapsed_time(end))
    except torch.OutOfMemoryError:
        return {"ms": None, "gb": None}
    return {"ms": statistics.median(seconds), "least": min(seconds), "gb": torch.cuda.max_memory_allocated() / 1e9}


def layer(rows: int, tokens: int, way: str) -> dict:
    """One attention layer on what a model hands it: heads inside tokens in memory."""
    torch.manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        return (
            torch.randn(rows, tokens, heads, DIM, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        )

    query, key, value = draw(QUERY_HEADS), draw(HEADS), draw(HEADS)
    upstream = torch.randn(rows, tokens, QUERY_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    replay = Replay(random_traces(rows, 1, HEADS, tokens), torch.full((rows,), tokens, device="cuda"))
    module = SimpleNamespace(layer_idx=0)

    def run() -> None:
        query.grad = key.grad = value.grad = None
        if way.startswith("dense"):
            out = torch.nn.functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            ).transpose(1, 2)
        else:
            out, _ = shadow.shadow_attention(module, query, key, value, None, replay=replay)
        out.backward(upstream)

    with forced(way):
        return measure(run)


def whole_model(model, rows: int, tokens: int, way: str) -> dict:
    """Log-probs of every token and their gradient, with gradient checkpointing."""
    torch.manual_seed(0)
    ids = torch.randint(0, 90, (rows, tokens), device="cuda")
    asked = torch.ones_like(ids, dtype=torch.bool)
    asked[:, 0] = False
    config = model.config
    evicted_at = random_traces(rows, config.num_hidden_layers, config.num_key_value_heads, tokens)
    lengths = torch.full((rows,), tokens, device="cuda")

    def run() -> None:
        model.zero_grad()
        replay = (
            None if way.startswith("dense") else Replay(evicted_at, lengths)
        )  # made anew: its lists are part of the cost
        batch_logprobs(model, ids, asked, 1.0, replay).sum().backward()

    with forced(way):
        return measure(run, repeats=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/shadow"))
    parser.add_argument("--only", default="layer,model")
    parser.add_argument("--ways", default=",".join(WAYS))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    rows = []
    settings = {
        "layer": [(8, 4096), (4, 8192), (2, 16384), (1, 32768)],
        "model": [(4, 4096), (2, 8192), (1, 16384), (1, 32768)],
    }
    for part in args.only.split(","):
        model = None
        if part == "model":
            model, _ = load_model("random:qwen2.5-1.5b", "bfloat16", "cuda")
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        for count, tokens in settings[part]:
            for way in args.ways.split(","):
                if model is not None and "boolean" in way and tokens > 8192:
                    continue  # its mask alone would take minutes; the layer's row says what it costs
                found = layer(count, tokens, way) if model is None else whole_model(model, count, tokens, way)
                rows.append({"part": part, "rows": count, "tokens": tokens, "way": way, **found})
                print(json.dumps(rows[-1]), flush=True)
    with (args.out / "results.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    print(table(rows))


def table(rows: list[dict]) -> str:
    lines = []
    for part in dict.fromkeys(row["part"] for row in rows):
        here = [row for row in rows if row["part"] == part]
        sizes = list(dict.fromkeys((row["rows"], row["tokens"]) for row in here))
        lines += [
            f"| {part}: ms (peak GB) | " + " | ".join(f"{a} x {b:,}" for a, b in sizes) + " |",
            "|" + "---|" * (len(sizes) + 1),
        ]
        for way in dict.fromkeys(row["way"] for row in here):
            cells = []
            for size in sizes:
                found = [row for row in here if row["way"] == way and (row["rows"], row["tokens"]) == size]
                base = [row for row in here if row["way"] == WAYS[0] and (row["rows"], row["tokens"]) == size]
                if not found:
                    cells.append("")
                elif found[0]["ms"] is None:
                    cells.append("out of memory")
                else:
                    ratio = (
                        f", {found[0]['ms'] / base[0]['ms']:.2f}x" if base and base[0]["ms"] and way != WAYS[0] else ""
                    )
                    cells.append(f"{found[0]['ms']:.2f} ({found[0]['gb']:.2f}){ratio}")
            lines.append(f"| {way} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
