"""float16 beside bfloat16: the gap between sampler and learner that rounding leaves, and the speed, in one run.

    python benchmarks/half_precision.py random:qwen2.5-1.5b --out runs/half.json                # on a GPU
    python benchmarks/half_precision.py models/smollm2 --task gsm8k
    python benchmarks/half_precision.py tiny:2x64 --device cpu --rows 4 --prompts 2 --group 2 --new 12 --budget 16 \\
        --interval 8 --repeats 1                                                                # that it works

The same weights, rounded to each dtype, with fp32 logits. Rollouts on a dense cache are scored densely, those on an
evicting one under replay, that of experts included, so sampler and learner should agree; a table has mean, 95th
percentile and maximum of |gap|, tokens per second of rollouts that never stop early, and milliseconds in which the
learner scores and updates (forward and backward, no optimizer step) a part of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import torch
from learner_gpu import MicroBatch, computing, score_once, synchronize, update_once
from logits_noise import logprobs, noise, parser_of, prompts_for, rate, replayed_routing
from stay import provenance
from torch import nn

from sparse_rl import Engine, Sampling
from sparse_rl.learn.batch import Sampled, collate
from sparse_rl.learn.score import replay_of
from sparse_rl.learn.student import copied
from sparse_rl.models import load_model
from sparse_rl.models.logits import set_logits

DTYPES = ("bfloat16", "float16")


def rounded(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Its weights; buffers, such as the frequencies of rotations, stay fp32, as in a model that is loaded so."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def learner_ms(model: nn.Module, sampled: Sampled, view: str, rows: int, repeats: int) -> dict[str, float]:
    """Of the first rows: medians, after one call that compiles."""
    device = next(model.parameters()).device
    lengths = sampled.lengths[:rows].tolist()
    tokens, targets = (x[:rows, : max(lengths)].to(device) for x in (sampled.tokens, sampled.mask))
    items = [(sampled.tokens[i, :n], sampled.traces[i]) for i, n in enumerate(lengths)]
    evicted_at = replay_of(model, items).evicted_at if view == "shadow" else None
    part = MicroBatch(tokens, targets, torch.randn(targets.shape, device=device), evicted_at)
    found = {}
    for stage, run in (("score_ms", score_once), ("update_ms", update_once)):
        times = []
        with computing(model, "fused", "inductor"):
            for _ in range(1 + repeats):
                model.zero_grad()
                synchronize(device)
                start = time.perf_counter()
                run(model, part)
                synchronize(device)
                times.append(1e3 * (time.perf_counter() - start))
        found[stage] = statistics.median(times[1:])
    model.zero_grad()
    return found


def measure(model: nn.Module, prompts: list[list[int]], cache: str, args: argparse.Namespace) -> dict:
    view = "dense" if cache == "dense" else "shadow"
    routing = replayed_routing(model) if view == "shadow" else None
    engine = Engine(model, cache, args.budget, args.interval, args.rows, record_routes=routing is not None)
    engine.reserve(max(map(len, prompts)), args.new)
    sampling = Sampling(args.new, stop_ids=(), for_correction=True)
    sampled = collate(engine.generate(prompts, args.group, sampling, seed=0))
    old = logprobs(model, sampled, view, args.micro_batch_tokens, routing)
    found: dict = noise(old - sampled.sampler_logprobs[sampled.mask].double())
    several = [rate(engine, prompts, args.group, args.new, seed) for seed in range(1, 1 + args.repeats)]
    rows = max(1, min(len(sampled.tokens), args.micro_batch_tokens // sampled.tokens.shape[1]))
    found |= {"tokens_per_s": statistics.median(several), "learner_rows": rows}
    return found | learner_ms(model, sampled, view, rows, args.repeats)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--dtypes", default=",".join(DTYPES))
    args = parser.parse_args()
    exact, tokenizer = load_model(args.model, "float32", args.device)
    prompts = prompts_for(tokenizer, args.task, args.prompts)
    device = next(exact.parameters()).device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    result = {**provenance(), "command": " ".join(sys.argv), "device": where, "torch": torch.__version__, "found": {}}
    print("| cache, view | dtype | mean \\|gap\\| | 95 % | maximum | rollout tokens/s | score, ms | update, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for dtype in args.dtypes.split(","):
        model = set_logits(rounded(copied(exact), getattr(torch, dtype)).eval(), "float32")
        for cache in args.caches.split(","):
            row = result["found"].setdefault(cache, {})[dtype] = measure(model, prompts, cache, args)
            view = "dense" if cache == "dense" else "replayed"
            gaps = " | ".join(f"{row[key]:.5f}" for key in ("mean_abs_gap", "abs_gap_95", "max_abs_gap"))
            speed = f"{row['tokens_per_s']:,.0f} | {row['score_ms']:.1f} | {row['update_ms']:.1f}"
            print(f"| {cache}, {view} | {dtype} | {gaps} | {speed} |", flush=True)
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(result, indent=1) + "\n")
        del model
    print(f"{args.model}, {where}, torch {torch.__version__}: {args.prompts} x {args.group} of {args.new} tokens")


if __name__ == "__main__":
    main()
