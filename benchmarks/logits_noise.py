"""What rounding logits does to log-probs: the gap between sampler and learner where nothing but rounding differs.

    python benchmarks/logits_noise.py models/smollm2 --out runs/logits-noise.json             # on a GPU, about a minute
    python benchmarks/logits_noise.py random:qwen2.5-1.5b --rows 64 --prompts 8
    python benchmarks/logits_noise.py tiny:4x256 --device cpu --rows 8 --prompts 2 --new 64 --budget 24 --interval 8

Trajectories are sampled with logits in the model's dtype and in fp32, on a dense cache (a dense learner) and on an
evicting one (a learner that replays the evictions), so sampler and learner should agree. Printed are the mean and the
95th percentile of |gap|, the 5th of xi = exp(gap), rounding alone (the same hidden states scored with both heads), and
the tokens per second of rollouts that never stop early.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from torch import Tensor, nn

from sparse_rl import Engine, Sampling, tasks
from sparse_rl.learn.batch import Sampled, collate, score
from sparse_rl.learn.student import copied
from sparse_rl.models import encode, load_model
from sparse_rl.models.logits import LOGITS, set_logits
from sparse_rl.models.routing import Routing, has_experts, routing_of, why_not_replayed
from sparse_rl.models.stops import stop_ids


def prompts_for(tokenizer, task: str, number: int) -> list[list[int]]:
    """A task's prompts, as chats where the tokenizer has a template."""
    texts = [prompt.text for prompt in tasks.make(task).sample(0, number)]
    if tokenizer.chat_template is not None:
        texts = [[{"role": "user", "content": text}] if isinstance(text, str) else text for text in texts]
    return [encode(tokenizer, text) for text in texts]


def logprobs(model: nn.Module, sampled: Sampled, view: str, tokens: int, routing: Routing | None = None) -> Tensor:
    """The learner's, of every response token. fp64 [n]"""
    return score(model, sampled, tokens, view=view, routing=routing).old_logprobs[sampled.mask].double()


def replayed_routing(model: nn.Module) -> Routing | None:
    """Of a mixture of experts whose routes can be replayed."""
    return routing_of(model) if has_experts(model) and why_not_replayed(model) is None else None


def noise(gap: Tensor) -> dict[str, float]:
    """gap fp64 [n]"""
    return {
        "tokens": len(gap),
        "mean_abs_gap": gap.abs().mean().item(),
        "abs_gap_95": gap.abs().quantile(0.95).item(),
        "xi_5": gap.exp().quantile(0.05).item(),
        "max_abs_gap": gap.abs().max().item(),
    }


def rate(engine: Engine, prompts: list[list[int]], group: int, new: int, seed: int) -> float:
    """Tokens per second of one call."""
    start = time.perf_counter()
    done = engine.generate(prompts, group, Sampling(new, stop_ids=()), seed=seed)
    return sum(len(t.response_tokens) for t in done) / (time.perf_counter() - start)


def measure(
    models: dict[str, nn.Module], prompts: list[list[int]], stops: tuple[int, ...], cache: str, args: argparse.Namespace
) -> dict[str, dict]:
    """The noise and the speed on one cache, by the dtype of the logits."""
    view = "dense" if cache == "dense" else "shadow"
    engines = {dtype: Engine(model, cache, args.budget, args.interval, args.rows) for dtype, model in models.items()}
    sampling = Sampling(args.new, stop_ids=stops, for_correction=True)
    found = {}
    for dtype, engine in engines.items():
        engine.reserve(max(map(len, prompts)), args.new)  # so that what is captured now serves the timed calls
        sampled = collate(engine.generate(prompts, args.group, sampling, seed=0))
        old = {h: logprobs(model, sampled, view, args.micro_batch_tokens) for h, model in models.items()}
        found[dtype] = noise(old[dtype] - sampled.sampler_logprobs[sampled.mask].double())
        found[dtype]["rounding_alone"] = (old["model"] - old["float32"]).abs().mean().item()
    rates = {dtype: [] for dtype in engines}
    for seed in range(-1, args.repeats):  # the first call compiles and captures; then in turns
        for dtype, engine in engines.items():
            speed = rate(engine, prompts, args.group, args.new, seed + 1)
            rates[dtype] += [speed] if seed >= 0 else []
    for dtype, several in rates.items():
        found[dtype] |= {"tokens_per_s": statistics.median(several), "tokens_per_s_all": several}
        forwards = {type(decoder.forward).__name__ for decoder in engines[dtype].decoders.values()}
        found[dtype]["fused"] = "FusedForward" in forwards
    return found


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The options of measurements of rounding: which model samples what."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device")
    parser.add_argument("--task", default="countdown")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument("--caches", default="dense,rkv")
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--interval", type=int, default=32)
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    start = time.perf_counter()
    model, tokenizer = load_model(args.model, args.dtype, args.device, logits="model")
    models = {dtype: set_logits(copied(model), dtype) for dtype in reversed(LOGITS)}  # model, float32
    prompts, stops = prompts_for(tokenizer, args.task, args.prompts), stop_ids(model, tokenizer)
    device = next(model.parameters()).device
    result = {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "settings": {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()},
        "stop_ids": stops,
        "caches": {},
    }
    print(f"{args.model}, {args.dtype}, {result['device']}: {len(prompts)} x {args.group} of up to {args.new} tokens")
    print(f"{'cache':<8}{'logits':<9}{'mean |gap|':>12}{'95 %':>9}{'5 % of xi':>11}{'rounding':>10}{'tokens/s':>11}")
    for cache in args.caches.split(","):
        found = result["caches"][cache] = measure(models, prompts, stops, cache, args)
        for dtype, row in found.items():
            print(
                f"{cache:<8}{dtype:<9}{row['mean_abs_gap']:>12.5f}{row['abs_gap_95']:>9.4f}{row['xi_5']:>11.4f}"
                f"{row['rounding_alone']:>10.5f}{row['tokens_per_s']:>11,.0f}"
            )
        smaller = found["model"]["mean_abs_gap"] / max(found["float32"]["mean_abs_gap"], 1e-12)
        slower = 1 - found["float32"]["tokens_per_s"] / found["model"]["tokens_per_s"]
        found["compared"] = {"gap_smaller_by": smaller, "rollouts_slower_by": slower}
        print(f"{cache}: with fp32 logits a gap {smaller:.1f} times smaller, rollouts {slower:+.1%} slower", flush=True)
        if args.out is not None:  # after every cache, so that a later failure loses nothing
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(result | {"seconds": time.perf_counter() - start}, indent=1) + "\n")


if __name__ == "__main__":
    main()
