"""A learner with long responses on a smaller GPU: seconds by stage, and peak memory against the plan.

    python benchmarks/long_learner.py --gpu-memory 80 --out runs/long
    python benchmarks/long_learner.py --model tiny:2x64 --device cpu --lengths 96,160 --prompt 16 --budget 24 \\
        --interval 8 --sampled 16

Random weights of a public shape, with adapters. Responses are planted: random tokens, and a trace that keeps `budget`
random tokens at every eviction, whose log-probs a scoring pass finds; so score and update are those of a training step,
and its check of the replay holds. Sampling is measured over a few hundred tokens, with every row full, and counted for
the whole length. A line is printed, and written, as soon as it is known; what does not fit gets a line, too.
"""

import argparse
import json
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from stay import provenance, sentence
from torch import Tensor

from sparse_rl import Engine, Sampling
from sparse_rl.cache import Trace
from sparse_rl.cache.trace import trace_dtype
from sparse_rl.config import Recipe, make_recipe
from sparse_rl.distributed.world import World
from sparse_rl.kernels.modules import fused
from sparse_rl.learn.batch import Sampled, Scored, apply_correction, collate, make_batches, seen_by
from sparse_rl.learn.long import long_rows
from sparse_rl.learn.packing import packs
from sparse_rl.learn.score import hidden_states, score_of
from sparse_rl.models import evaluating
from sparse_rl.planning.memory import size
from sparse_rl.records import Trajectory
from sparse_rl.train.parts import checkpoint_gradients, load_for_training, make_learner, make_loss
from sparse_rl.train.run import plan_run

COLUMNS = ("tokens", "view", "checkpointing", "rollout s", "score s", "update s", "peak", "plan", "peak / plan", "host")


def recipe_for(args: argparse.Namespace, length: int, view: str) -> Recipe:
    return make_recipe(
        {
            "model": {
                "name": args.model,
                "dtype": args.dtype,
                "lora_rank": args.rank,
                "gradient_checkpointing": {"true": True}.get(args.checkpointing, args.checkpointing),
            },
            "task": {"name": "sums"},
            "rollout": {
                **{"budget": args.budget, "interval": args.interval, "rows": args.rows, "max_new_tokens": length},
                **{"prompts": 1, "group_size": args.rows},
            },
            "learn": {"method": "shadow" if view == "shadow" else "sparse-rl", "minibatches": 1},
            "eval": {"every": 0},
            "run": {"steps": 1},
        }
    )


def planted_trace(layers: int, heads: int, tokens: int, budget: int, interval: int, seed: int) -> Trace:
    """What a compressor of random scores would leave: at every eviction each head keeps `budget` random slots."""
    generator, dtype = torch.Generator().manual_seed(seed), trace_dtype(tokens)
    never = torch.iinfo(dtype).max
    evicted_at = torch.full((layers * heads, tokens), never, dtype=torch.int64)
    kept = torch.arange(min(budget, tokens)).expand(layers * heads, -1)
    for moment in range(budget + interval, tokens, interval):
        held = torch.cat([kept, torch.arange(moment - interval, moment).expand(layers * heads, -1)], 1)
        order = torch.rand(held.shape, generator=generator).argsort(1)
        evicted_at.scatter_(1, held.gather(1, order[:, budget:]), moment)
        kept = held.gather(1, order[:, :budget])
    return Trace(evicted_at.view(layers, heads, tokens).to(dtype))


def planted(model, args: argparse.Namespace, length: int) -> Sampled:
    config, tokens = model.config, args.prompt + length
    prompt = torch.randint(1, config.vocab_size, (args.prompt,), generator=torch.Generator().manual_seed(0))
    done = []
    for row in range(args.rows):
        response = torch.randint(1, config.vocab_size, (length,), generator=torch.Generator().manual_seed(1 + row))
        shape = config.num_hidden_layers, config.num_key_value_heads
        trace = planted_trace(*shape, tokens, args.budget, args.interval, seed=row)
        done.append(
            Trajectory(torch.cat([prompt, response]), args.prompt, torch.zeros(tokens), trace, "length", 0, row)
        )
    return collate(done)


@torch.no_grad()
def scored_of(model, sampled: Sampled, view: str, temperature: float) -> Scored:
    """Log-probs in a view, one trajectory at a time; they are the sampler's, too."""
    device, (old, entropies, ranks) = next(model.parameters()).device, torch.zeros(3, *sampled.tokens.shape)
    packing = packs(model, "auto")
    with evaluating(model), fused(model), long_rows(model):
        for row in range(len(old)):
            rows, mask = torch.tensor([row]), sampled.mask[row]
            tokens, target_mask = sampled.tokens[rows].to(device), mask[None].to(device)
            states = hidden_states(model, tokens, seen_by(model, sampled, rows, view == "shadow", packing))
            found = score_of(model, states, tokens, target_mask, temperature).cpu()
            old[row, mask], entropies[row, mask], ranks[row, mask] = found.unbind(-1)
    return Scored(replace(sampled, sampler_logprobs=old), old, entropies, ranks, view=view)


def seconds_per_token(model, args: argparse.Namespace) -> float:
    """Of a decode step of all rows, each of them full: the later part of a short rollout."""
    engine = Engine(model, budget=args.budget, interval=args.interval, rows=args.rows)
    prompts: list[Tensor] = [torch.arange(1, 1 + args.prompt) % model.config.vocab_size]
    times = []
    first = args.budget + 2 * args.interval
    engine.reserve(args.prompt, first + args.sampled)  # so that nothing is captured again
    engine.generate(prompts, args.rows, Sampling(first, stop_ids=()))  # compiles and captures
    for new in (first, first + args.sampled):
        start = time.perf_counter()
        engine.generate(prompts, args.rows, Sampling(new, stop_ids=()))
        synchronize(args.device)
        times.append(time.perf_counter() - start)
    return (times[1] - times[0]) / args.sampled


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(device: str, work):
    synchronize(device)
    start = time.perf_counter()
    result = work()
    synchronize(device)
    return result, time.perf_counter() - start


def measure(model, args: argparse.Namespace, length: int, view: str, per_token: float) -> dict:
    recipe, on_gpu = recipe_for(args, length, view), args.device == "cuda"
    loss, method = make_loss(recipe), recipe.learn.resolve_method()
    plan = plan_run(recipe, args.prompt)
    line = {"tokens": length, "view": view, "checkpointing": args.checkpointing, "rollout s": per_token * length}
    line |= {"plan": plan.total_bytes, "host": plan.host_bytes, "fits": plan.fits(int(args.gpu_memory * 2**30))}
    sampled = planted(model, args, length)
    learner = make_learner(recipe, loss, model, World(), None)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        scored, line["score s"] = timed(args.device, lambda: scored_of(model, sampled, view, 1.0))
        advantages = torch.linspace(-1, 1, args.rows, dtype=torch.float64)
        corrected = apply_correction(scored, method.correction)
        (batch,) = make_batches(scored, corrected, advantages, method.correction, loss, 1)
        result, line["update s"] = timed(args.device, lambda: learner.step(batch, check=view == "shadow"))
        line["grad_norm"] = result.metrics["update/grad_norm"]
    except torch.OutOfMemoryError:
        learner.optimizer.clear()
        line["update s"] = None
    if on_gpu:
        line["peak"] = torch.cuda.max_memory_allocated()
    return line


def row_of(line: dict) -> str:
    def cell(name: str) -> str:
        if name == "peak / plan":
            return f"{line['peak'] / line['plan']:.2f}" if line.get("peak") else ""
        value = line.get(name)
        if name in ("peak", "plan", "host"):
            return size(value) if value else ""
        if name.endswith(" s"):
            return f"{value:.1f}" if value is not None else "failed" if "error" in line else "out of memory"
        return str(value)

    return f"| {' | '.join(map(cell, COLUMNS))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random:qwen2.5-7b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--lengths", default="16384,32768,65536,131072", help="response tokens")
    parser.add_argument("--views", default="shadow,dense")
    parser.add_argument("--checkpointing", default="offload", choices=["offload", "true"])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rows", type=int, default=2, help="responses, of one prompt")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--sampled", type=int, default=256, help="tokens over which sampling is timed")
    parser.add_argument("--gpu-memory", type=float, default=80, help="GiB that the allocator may have")
    parser.add_argument("--out", type=Path, default=Path("runs/long"))
    args = parser.parse_args()
    if args.device == "cuda":
        fraction = args.gpu_memory * 2**30 / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, fraction))
    lengths = [int(n) for n in args.lengths.split(",")]
    args.out.mkdir(parents=True, exist_ok=True)
    recipe = recipe_for(args, lengths[0], "shadow")
    model, _ = load_for_training(recipe)
    per_token = seconds_per_token(model, args)
    checkpoint_gradients(recipe, model)
    header = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
    (args.out / "table.md").write_text(header + "\n")
    print(header, flush=True)
    failed: list[str] = []
    for length in lengths:
        for view in args.views.split(","):
            try:
                line = measure(model, args, length, view, per_token)
            except Exception as error:  # the other lengths go on
                traceback.print_exc()
                failed.append(f"{length} {view}")
                line = {"tokens": length, "view": view, "error": f"{type(error).__name__}: {error}"}
            line |= provenance()
            print(row_of(line), flush=True)
            with (args.out / "table.md").open("a") as table, (args.out / "lines.jsonl").open("a") as lines:
                table.write(row_of(line) + "\n")
                lines.write(json.dumps(line) + "\n")
    print(sentence(provenance()))
    if failed:
        sys.exit(f"long_learner: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
