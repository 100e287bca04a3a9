"""Rollouts on the CPU beside `model.generate`: the same model, prompts and number of new tokens, at temperature 1.

    make bench        or        OMP_NUM_THREADS=1 python benchmarks/rollout_cpu.py [--quick]

The engine's times include log-probs, evictions and traces, which `generate` does not make. Each figure is the median of
`--repeats` runs, taken in turn so that a slow moment of the machine hits both sides.
"""

import argparse
import statistics
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_rl import Engine, Sampling
from sparse_rl.planning.memory import size

ROWS, PROMPT = 16, 64


def make_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def generate(model, prompts: torch.Tensor, new: int) -> None:
    out = model.generate(prompts, max_new_tokens=new, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    assert out.shape == (ROWS, PROMPT + new)


def rollout(engine: Engine, prompts: torch.Tensor, new: int) -> None:
    trajectories = engine.generate(prompts.tolist(), sampling=Sampling(max_new_tokens=new))
    assert all(len(t.tokens) == PROMPT + new for t in trajectories)


def medians(runs: dict, repeats: int) -> dict[str, float]:
    seconds = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--quick", action="store_true", help="fewer tokens, one run: checks that it works, measures nothing"
    )
    arguments = parser.parse_args()
    lengths, repeats = ((16, 32), 1) if arguments.quick else ((256, 2048), arguments.repeats)

    model = make_model()
    prompts = torch.randint(1, 4096, (ROWS, PROMPT))
    short, long = lengths
    millions, threads = sum(p.numel() for p in model.parameters()) / 1e6, torch.get_num_threads()
    print(
        f"Llama shape, {millions:.1f} M parameters, fp32, {threads} thread(s); {ROWS} rows, prompts of {PROMPT} tokens"
    )
    print(f"{'new tokens':>10}  {'':<22} {'KV cache':>11} {'seconds':>8} {'tokens/s':>9} {'against generate':>17}")
    for new, compressors in ((short, ["dense"]), (long, ["dense", "rkv", "snapkv", "window"])):
        engines = {
            name if name == "dense" else f"{name}, budget 128+32": Engine(
                model, compressor=name, budget=128, interval=32, rows=ROWS, max_tokens=PROMPT + new
            )
            for name in compressors
        }
        runs = {"model.generate": lambda new=new: generate(model, prompts, new)}
        runs |= {name: lambda engine=engine, new=new: rollout(engine, prompts, new) for name, engine in engines.items()}
        rollout(engines["dense"], prompts, 4)  # warm up
        generate(model, prompts, 4)
        times = medians(runs, repeats)
        token_bytes = engines["dense"].cache.shape.kv_bytes_per_token
        for name, seconds in times.items():
            kv = engines[name].cache.nbytes if name in engines else ROWS * (PROMPT + new) * token_bytes
            ratio = times["model.generate"] / seconds
            print(f"{new:>10}  {name:<22} {size(kv):>11} {seconds:>8.2f} {ROWS * new / seconds:>9,.0f} {ratio:>16.2f}x")


if __name__ == "__main__":
    main()
