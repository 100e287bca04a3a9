"""How often dense and sparse inference agree, token by token: the model itself judges, on a dense cache, what it said
on each cache.

    python benchmarks/agreement.py MODEL --bench gsm8k --data FOLDER --compressors dense,rkv,window \\
        --budgets 64,128 --out runs/agreement

Whole completions differ for good after the first token that differs; here every token is judged after the same tokens.
On each cache the prompts are answered greedily, which gives the share of tokens that the dense cache would have chosen
as well, and at temperature 1, which gives KL(sparse || dense). The row `dense` is the noise floor: two kernels on the
same cache. Writes agreement.json and agreement.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from sparse_rl import Engine, Sampling
from sparse_rl.evaluation.cache import Cache, caches
from sparse_rl.evaluation.run import Asked, task_of
from sparse_rl.evaluation.summary import aligned
from sparse_rl.learn.batch import Scored, apply_correction, collate, score
from sparse_rl.learn.correct import PRESETS
from sparse_rl.learn.diagnose import gap_metrics, rejection_metrics
from sparse_rl.models import encode, load_model
from sparse_rl.records import kv_tokens_saved


def measure(model, prompts: list, cache: Cache, new_tokens: int, rows: int, micro_batch_tokens: int) -> dict:
    engine = Engine(model, cache.make(), *cache.slots, rows)

    def sample(temperature: float) -> tuple[Scored, float]:
        done = engine.generate(prompts, 1, Sampling(new_tokens, temperature, for_correction=temperature > 0), seed=0)
        return score(model, collate(done), micro_batch_tokens), kv_tokens_saved(done)

    greedy, saved = sample(0.0)
    drawn, _ = sample(1.0)
    mask, corrected = drawn.sampled.mask, apply_correction(drawn, PRESETS["sparse-rl"])
    metrics = gap_metrics(drawn.gap, mask, corrected) | rejection_metrics(mask, corrected, torch.zeros(len(prompts)))
    return {
        "cache": cache.label,
        "compressor": cache.compressor,
        "budget": cache.budget,
        "tokens": int(mask.sum()),
        "saved": saved,  # by the greedy completions
        "same_choice": (greedy.ranks[greedy.sampled.mask] == 1).double().mean().item(),
        "kl": metrics["gap/k3/mean"],
        "abs": metrics["gap/abs/mean"],
        "rejected": metrics["reject/trajectories/frac"],  # by Sparse-RL
    }


def table(found: list[dict]) -> str:
    heads = ["cache", "KV tokens saved", "same choice", "KL(sparse || dense)", "mean |log ratio|", "would be rejected"]
    rows = [
        [
            row["cache"],
            f"{row['saved']:.1%}",
            f"{row['same_choice']:.2%}",
            f"{row['kl']:.4f}",
            f"{row['abs']:.4f}",
            f"{row['rejected']:.1%}",
        ]
        for row in found
    ]
    return aligned([heads, *rows])


def plot(found: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), constrained_layout=True)
    for axis, key, label in zip(
        axes, ("same_choice", "kl"), ("greedy tokens that dense chooses too", "KL(sparse || dense), nats a token")
    ):
        for name in dict.fromkeys(row["compressor"] for row in found if row["budget"]):
            line = [(row["budget"], row[key]) for row in found if row["compressor"] == name]
            axis.plot(*zip(*sorted(line)), marker="o", label=name)
        for i, row in enumerate(row for row in found if row["budget"] is None):
            axis.axhline(
                row[key], color="black" if row["cache"] == "dense" else f"C{9 - i}", linewidth=1, label=row["cache"]
            )
        axis.set(xscale="log", xlabel="budget", ylabel=label)
        budgets = sorted({row["budget"] for row in found if row["budget"]})
        axis.set_xticks(budgets, [str(budget) for budget in budgets])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[1].set_yscale("log")
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--bench", default="gsm8k")
    parser.add_argument("--data")
    parser.add_argument("--compressors", default="dense,rkv,snapkv,window")
    parser.add_argument("--budgets", default="64,128,256,512")
    parser.add_argument("--interval", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--micro-batch-tokens", type=int, default=65536)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--template", default="chat")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    task, _ = task_of(args.bench, Asked([args.bench], data=args.data, template=args.template))
    model, tokenizer = load_model(args.model, args.dtype)
    prompts = [encode(tokenizer, prompt.text) for prompt in task.sample(0, args.prompts)]
    args.out.mkdir(parents=True, exist_ok=True)
    found = []
    for cache in caches(
        args.compressors.split(","), [int(budget) for budget in args.budgets.split(",")], args.interval, {}
    ):
        found.append(measure(model, prompts, cache, args.max_new_tokens, args.rows, args.micro_batch_tokens))
        (args.out / "agreement.json").write_text(json.dumps(found, indent=1))
    plot(found, args.out / "agreement.png")
    print(table(found))


if __name__ == "__main__":
    main()
