"""The importance ratio at the first optimizer step, learner over sampler, token by token: histograms of Sparse-RL's
ratio (dense learner), the shadow learner's, and the noise floor (dense rollouts, dense learner). On a GPU also the
difference between two kernels on the tokens of the sparse rollouts: the shadow view by segments, and under a boolean
mask.

    python benchmarks/first_ratio.py countdown-search --model runs/study/warm --dtype bfloat16 --budgets 64,128 \\
        --out runs/ratio

Writes ratios.json (percentiles and counts) and ratios.png.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from sparse_rl import Engine, Sampling, tasks
from sparse_rl.compressors import make
from sparse_rl.config import load_recipe
from sparse_rl.kernels import ops
from sparse_rl.learn.batch import Sampled, collate, score
from sparse_rl.learn.diagnose import percentiles
from sparse_rl.models import encode, load_model

EDGES = torch.linspace(-2, 2, 161, dtype=torch.float64)  # of bins of log ratios; the outermost bins take the rest
QUANTILES = (0.001, 0.01, 0.05, 0.5, 0.95, 0.99, 0.999)


def gap(model, sampled: Sampled, temperature: float, view: str) -> torch.Tensor:
    """log(learner / sampler) of every response token."""
    return score(model, sampled, 65536, temperature, view=view).gap[sampled.mask].double()


def between_kernels(model, sampled: Sampled, temperature: float) -> torch.Tensor:
    """log(one learner / the other) of every response token: the same view by segments and under a mask."""
    by_segments = score(model, sampled, 8192, temperature, view="shadow")
    fits, ops.fits_tiles = ops.fits_tiles, lambda *_: False
    try:
        under_mask = score(model, sampled, 8192, temperature, view="shadow")
    finally:
        ops.fits_tiles = fits
    return (by_segments.old_logprobs - under_mask.old_logprobs)[sampled.mask].double()


def summary(gap: torch.Tensor) -> dict:
    return {
        "tokens": len(gap),
        "mean_abs": gap.abs().mean().item(),
        "max_abs": gap.abs().max().item(),
        "quantiles": dict(
            zip(
                map(str, QUANTILES),
                percentiles(gap, torch.tensor(QUANTILES, dtype=torch.float64)).tolist(),
                strict=True,
            )
        ),
        "below_1e-4": (gap < -9.2103).double().mean().item(),
        "counts": torch.histc(gap.clamp(EDGES[0], EDGES[-1]), len(EDGES) - 1, EDGES[0].item(), EDGES[-1].item())
        .int()
        .tolist(),
    }


def plot(found: dict[str, dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(1, len(found), figsize=(3.4 * len(found), 3), sharey=True, constrained_layout=True)
    centres = (EDGES[1:] + EDGES[:-1]) / 2
    for axis, (name, row) in zip(axes, found.items(), strict=True):
        axis.bar(
            centres, [c / row["tokens"] for c in row["counts"]], width=(EDGES[1] - EDGES[0]).item(), color="#2a6f97"
        )
        axis.set_yscale("log")
        axis.set_title(name, fontsize=9)
        axis.set_xlabel("log(learner / sampler)")
        axis.text(0.02, 0.97, f"mean |log ratio| {row['mean_abs']:.4f}", transform=axis.transAxes, va="top", fontsize=8)
    axes[0].set_ylabel("share of tokens")
    plt.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--budgets", required=True)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("runs/ratio"))
    args = parser.parse_args()
    recipe = load_recipe(args.recipe)
    rollout = recipe.rollout
    model, tokenizer = load_model(args.model or recipe.model.name, args.dtype)
    task = tasks.make(recipe.task.name, **recipe.task.options)
    prompts = [encode(tokenizer, p.text) for p in task.sample(0, args.prompts)]
    sampling = Sampling(rollout.max_new_tokens, rollout.temperature, for_correction=True)

    def sample(compressor, **slots) -> Sampled:
        engine = Engine(model, compressor=compressor, rows=rollout.rows, **slots)
        return collate(engine.generate(prompts, rollout.group_size, sampling, seed=0))

    found = {
        "noise floor: dense rollouts, dense learner": summary(
            gap(model, sample("dense"), sampling.temperature, "dense")
        )
    }
    for budget in map(int, args.budgets.split(",")):
        sampled = sample(
            make(rollout.compressor, **rollout.compressor_options), budget=budget, interval=rollout.interval
        )
        name = f"{rollout.compressor} {budget}"
        found[f"{name}, dense learner (Sparse-RL)"] = summary(gap(model, sampled, sampling.temperature, "dense"))
        found[f"{name}, shadow learner"] = summary(gap(model, sampled, sampling.temperature, "shadow"))
        if torch.cuda.is_available():
            found[f"{name}, two kernels of the shadow learner"] = summary(
                between_kernels(model, sampled, sampling.temperature)
            )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "ratios.json").write_text(json.dumps(found, indent=1))
    plot(found, args.out / "ratios.png")
    for name, row in found.items():
        low, high = row["quantiles"]["0.01"], row["quantiles"]["0.99"]
        tail = f"1 % {low:.4f}, 99 % {high:.4f}, below 1e-4: {row['below_1e-4']:.5f}"
        print(f"{name}: mean |log ratio| {row['mean_abs']:.5f}, {tail}")


if __name__ == "__main__":
    main()
