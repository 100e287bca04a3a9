"""Is the memory plan true? Rollouts with random weights on one GPU: planned bytes beside those that the device counted.

    python benchmarks/plan_against_peak.py [--shape qwen2.5-1.5b] [--rows 64] [--prompt 1024] [--new 512]

Prompts are longer than a row, so that the peak includes the scratch row and its eviction.
"""

import argparse

import torch
from transformers import AutoModelForCausalLM

from sparse_rl import Engine, Sampling
from sparse_rl.models import shape_config
from sparse_rl.planning.memory import size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--new", type=int, default=512)
    arguments = parser.parse_args()
    config = shape_config(arguments.shape)
    lengths = f"prompts of {arguments.prompt}, {arguments.new} new tokens"
    print(f"{torch.cuda.get_device_name()}, {arguments.shape}, bf16; {arguments.rows} rows, {lengths}")
    print(
        f"{'':<22} {'KV cache':>11} {'planned':>11} {'equal':>6}   {'total peak':>11} {'planned':>11} {'peak/plan':>10}"
    )
    for name in ("dense", "rkv", "snapkv", "h2o"):
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        torch.cuda.reset_peak_memory_stats()
        engine = Engine(
            model,
            compressor=name,
            budget=512,
            interval=128,
            rows=arguments.rows,
            max_tokens=arguments.prompt + arguments.new,
        )
        prompts = torch.randint(1, 1000, (arguments.rows // 8, arguments.prompt)).tolist()
        engine.generate(prompts, group_size=8, sampling=Sampling(arguments.new, stop_ids=()))
        plan = engine.plan(arguments.prompt, arguments.new)
        allocated, planned = engine.cache.nbytes + engine.scratch.nbytes, plan.cache_bytes + plan.scratch_bytes
        peak = torch.cuda.max_memory_allocated()
        label = name if name == "dense" else f"{name}, budget 512+128"
        print(
            f"{label:<22} {size(allocated):>11} {size(planned):>11} {allocated == planned!s:>6}   "
            f"{size(peak):>11} {size(plan.total_bytes):>11} {peak / plan.total_bytes:>10.2f}",
            flush=True,
        )
        del engine, model
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
