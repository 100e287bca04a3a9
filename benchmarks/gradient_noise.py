"""How noisy is each method's gradient? Repeated batches at fixed weights.

    python benchmarks/gradient_noise.py tiny-sums --batches 48 --budgets 46,38,32 --out runs/noise
    python benchmarks/gradient_noise.py smollm2-countdown --model runs/warm --batches 24 --budgets 80 --out runs/noise

Every batch is what a step of the recipe samples, on a dense cache and under each budget. The gradient g_i of batch i is
taken for every method from the same trajectories, and nothing is updated. With K_ij = <g_i, g_j>, without bias:

    signal^2 = mean of K_ij over i != j          the squared length of the expected gradient
    noise^2  = mean of K_ii - signal^2           the variance of one batch's gradient, summed over all weights
    needed   = noise^2 / signal^2                batches to average until noise and signal are equal
    cosine   = mean of <g_i, h_j> over i != j, divided by both signals: the angle to another method's expected gradient

Intervals are 95 %, by the jackknife over batches. With --minutes fewer batches are made where time runs short, and a
cosine takes as many as both methods have. `looping` counts responses that end by repeating themselves, and how
many of them `sparse-rl` rejects.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from stay import provenance
from torch import Tensor

from sparse_rl.compressors import make
from sparse_rl.config import load_recipe
from sparse_rl.files import write_text
from sparse_rl.learn.advantage import advantage
from sparse_rl.learn.batch import apply_correction, collate, make_batches, score
from sparse_rl.learn.diagnose import looping
from sparse_rl.learn.method import METHODS
from sparse_rl.models import encode
from sparse_rl.records import Trajectory
from sparse_rl.rollout import Engine
from sparse_rl.streams import stream_key
from sparse_rl.train.loop import Trainer

LEAST = 3  # batches, whatever the time
NAMES = ("none", "tis", "sparse-rl", "sparse-rl-released", "shadow")
REFERENCES = ("dense", "shadow")  # whose expected gradient the others are compared with


def gradient(trainer: Trainer, trajectories: Sequence[Trajectory], rewards: Tensor, name: str) -> tuple[Tensor, float]:
    """The gradient [P] of one batch under a method, and the share of trajectories it rejects."""
    recipe, method, learner = trainer.recipe, METHODS[name], trainer.learner
    micro_batch, temperature = recipe.micro_batch_tokens, recipe.rollout.temperature
    scored = score(trainer.model, collate(trajectories), micro_batch, temperature, view=method.view)
    corrected = apply_correction(scored, method.correction, None)
    group = torch.arange(len(rewards)) // recipe.rollout.group_size
    advantages, _ = advantage(rewards, group, recipe.learn.advantage, None, recipe.learn.advantage_eps)
    (batch,) = make_batches(scored, corrected, advantages, method.correction, trainer.loss, 1)
    active = learner._active_rows(batch)
    learner.optimizer.clear()
    learner._accumulate_gradients(batch, active, torch.zeros_like(batch.mask))
    found = torch.cat([g.detach().flatten() for g in learner.optimizer.gradients()])  # of bf16 weights in fp32 masters
    learner.optimizer.clear()
    return found, (~corrected.accepted).double().mean().item()


def off_diagonal(gram: Tensor) -> Tensor:
    """Mean over i != j of K [B, B]."""
    return (gram.sum() - gram.diagonal().sum()) / (len(gram) * (len(gram) - 1))


def needed(gram: Tensor) -> float:
    signal = off_diagonal(gram)
    return ((gram.diagonal().mean() - signal) / signal).item()


def cosine(own: Tensor, cross: Tensor, other: Tensor) -> float:
    return (off_diagonal(cross) / (off_diagonal(own) * off_diagonal(other)).sqrt()).item()


def jackknife(value: Callable[..., float], *grams: Tensor) -> tuple[float, float]:
    """A number made from Gram matrices [B, B], and half the width of its 95 % interval over batches."""
    batches = len(grams[0])
    kept = [[j for j in range(batches) if j != i] for i in range(batches)]
    without = torch.tensor([value(*(gram[k][:, k] for gram in grams)) for k in kept], dtype=torch.float64)
    spread = (batches - 1) / batches * (without - without.mean()).square().sum()
    return value(*grams), 1.96 * spread.sqrt().item()


def in_time(batches: int, end: float) -> Iterator[int]:
    """Numbers of batches; none that would not be over by `end` (time.perf_counter), but a few in any case."""
    begun: list[float] = []  # when each batch was
    for number in range(batches):
        begun.append(time.perf_counter())
        if number >= LEAST and begun[-1] + statistics.median(b - a for a, b in pairwise(begun)) > end:
            print(f"time is over after {number} of {batches} batches", flush=True)
            return
        yield number


def sampled(trainer: Trainer, engine: Engine, batches: int, end: float = math.inf):
    """(trajectories, rewards) of each batch."""
    count, group = trainer.recipe.rollout.prompts, trainer.recipe.rollout.group_size
    for number in in_time(batches, end):
        prompts = trainer.task.sample(number * count, count)
        ids = [encode(trainer.tokenizer, prompt.text) for prompt in prompts]
        seed = stream_key(trainer.recipe.run.seed, [number, 0])
        trajectories = engine.generate(ids, group, trainer.sampler.sampling, seed)
        texts = trainer.tokenizer.batch_decode(
            [t.response_tokens.tolist() for t in trajectories], skip_special_tokens=True
        )
        grades = trainer.task.grade([prompts[t.prompt_index] for t in trajectories], texts)
        rewards = torch.tensor([g.reward for g in grades], dtype=torch.float64)
        name, budget = engine.compressor.name, engine.compressor.budget
        print(f"{name} {budget}, batch {number + 1} of {batches}: reward {rewards.mean():.3f}", flush=True)
        yield trajectories, rewards


def ends(minutes: float, budgets: int, methods: int) -> list[float]:
    """When the batches of each cache are to be over: a method costs about as much as a rollout."""
    costs = [2, *[1 + methods] * budgets]
    return [time.perf_counter() + 60 * minutes * sum(costs[: i + 1]) / sum(costs) for i in range(len(costs))]


def measure(
    trainer: Trainer, budgets: Sequence[int], batches: int, names: Sequence[str], minutes: float = math.inf
) -> list[dict]:
    """A row for every cache and method."""
    rollout, rows = trainer.recipe.rollout, []
    until = ends(minutes, len(budgets), len(names))
    gradients: dict[tuple[str, str], list[Tensor]] = {}
    for budget, end in zip((None, *budgets), until, strict=True):
        cache = "dense" if budget is None else f"{rollout.compressor} {budget}"
        compressor = make("dense") if budget is None else make(rollout.compressor, **rollout.compressor_options)
        engine = Engine(trainer.model, compressor, budget or rollout.max_budget, rollout.interval, rollout.rows)
        chosen = ("dense",) if budget is None else tuple(names)
        rejected: dict[str, list[float]] = {name: [] for name in chosen}
        found, caught, rewards_seen = 0, 0, []
        for trajectories, rewards in sampled(trainer, engine, batches, end):
            rewards_seen.append(rewards.mean().item())
            for name in chosen:
                vector, share = gradient(trainer, trajectories, rewards, "none" if name == "dense" else name)
                gradients.setdefault((cache, name), []).append(vector)
                rejected[name].append(share)
            loops = looping(trajectories)
            found += int(loops.sum())
            if loops.any() and "sparse-rl" in chosen:
                scored = score(trainer.model, collate(trajectories), 16384, rollout.temperature)
                caught += int((loops & ~apply_correction(scored, METHODS["sparse-rl"].correction, None).accepted).sum())
        for name in chosen:
            row = {"cache": cache, "method": name, "reward": sum(rewards_seen) / len(rewards_seen)}
            row |= {"batches": len(rewards_seen)}
            row |= {"rejected": sum(rejected[name]) / len(rewards_seen), "looping": found, "looping_rejected": caught}
            rows.append(row)
        del engine
    for row in rows:
        own = torch.stack(gradients[row["cache"], row["method"]])
        gram = (own @ own.T).double().cpu()
        row["signal"], row["noise"] = (
            math.sqrt(max(off_diagonal(gram).item(), 0.0)),
            math.sqrt((gram.diagonal().mean() - off_diagonal(gram)).item()),
        )
        row["needed"], row["needed_interval"] = jackknife(needed, gram)
        for reference in REFERENCES:
            key = ("dense", "dense") if reference == "dense" else (row["cache"], reference)
            if key in gradients and key != (row["cache"], row["method"]):
                few = min(len(own), len(gradients[key]))
                other, same = torch.stack(gradients[key][:few]), own[:few]
                grams = tuple((a @ b.T).double().cpu() for a, b in ((same, same), (same, other), (other, other)))
                row[f"cosine_{reference}"], row[f"cosine_{reference}_interval"] = jackknife(cosine, *grams)
    return rows


def table(rows: Sequence[dict]) -> str:
    heads = ("cache", "method", "reward", "rejected", "signal", "noise", "batches needed")
    heads = (*heads, "cosine to dense rollouts", "cosine to replay", "looping, rejected")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [row["cache"], row["method"], f"{row['reward']:.3f}", f"{row['rejected']:.0%}"]
        cells += [f"{row['signal']:.3f}", f"{row['noise']:.3f}", f"{row['needed']:.2f} ± {row['needed_interval']:.2f}"]
        for name in ("cosine_dense", "cosine_shadow"):
            cells.append(f"{row[name]:.2f} ± {row[f'{name}_interval']:.2f}" if name in row else "")
        cells.append(f"{row['looping']}, {row['looping_rejected']}" if row["method"] == "sparse-rl" else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--model", help="another model than the recipe's, such as a warm start or a checkpoint")
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--minutes", type=float, default=math.inf, help="of the whole command, about")
    parser.add_argument("--budgets", default="46,38,32")
    parser.add_argument("--methods", default=",".join(NAMES))
    parser.add_argument("--out", type=Path, default=Path("runs/noise"))
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"), help="of the recipe")
    args = parser.parse_args()
    begin = time.perf_counter()
    keys = [("run.steps", "1"), ("eval.every", "0"), *map(tuple, args.set)]
    if args.model:
        keys.append(("model.name", args.model))
    trainer = Trainer(load_recipe(args.recipe, keys), args.out / "run", show=False)
    left = args.minutes - (time.perf_counter() - begin) / 60 - 0.5  # for the products of all gradients
    rows = measure(trainer, [int(b) for b in args.budgets.split(",")], args.batches, args.methods.split(","), left)
    trainer.log.close()
    trainer.task.close()
    write_text(args.out / "noise.json", json.dumps([row | provenance() for row in rows], indent=1))
    print(f"{table(rows)}\n\nbatches: {', '.join(str(row['batches']) for row in rows)}")


if __name__ == "__main__":
    main()
