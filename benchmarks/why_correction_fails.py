"""Why corrections fail where the budget hurts: which token ruined a rollout, its xi, and what other weights would do.

    python benchmarks/why_correction_fails.py --out runs/why --culprits      # the first wrong token of failed rollouts
    python benchmarks/why_correction_fails.py --out runs/why --processes 2   # train with other weights, R-KV 32

On running sums the first character that differs from the worked solution is the culprit. These variants change weights
and mask of the batch that `make_batches` made, by the sign of the advantage A and by xi:

    tis               w = min(xi, 2) for all tokens
    reward-only       as tis where A > 0; trajectories with A < 0 are dropped
    punish-plain      as tis where A > 0; w = 1 where A < 0, so that the culprit is punished in full
    culprit-only      as tis where A > 0; where A < 0 only tokens with xi < 0.5 count, with w = 1
    before-culprit    as tis, but no token counts from the first one with xi < 1e-4 on (accepts prefixes, not rollouts)

Three more keep sparse-rl as it is, with less noise in the updates or with other samples:

    slower            a third of the learning rate
    more-prompts      64 prompts a step instead of 16
    refill            rejected trajectories are replaced, in up to 4 rounds
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from learning_cpu import SETTINGS, final, interval, lazily, make_second
from learning_cpu import run as run_plain

ROOT = Path(__file__).parent.parent
VARIANTS = ("reward-only", "punish-plain", "culprit-only", "before-culprit")
KEYS = {  # variants of sparse-rl: the keys that they change
    "slower": {"optimizer.lr": 3e-5},
    "more-prompts": {"rollout.prompts": 64},
    "refill": {"learn.refill": 4},
}


def change(batch, loss, variant: str):
    """The batch of an optimizer step with other weights. All tensors are [N, T]."""
    from sparse_rl.learn.loss import token_scale

    gap = batch.old_logprobs - batch.sampler_logprobs
    response, bad = batch.response, (batch.advantages < 0)[:, None]
    xi, mask, weights = gap.exp(), batch.response.clone(), gap.exp().clamp(max=2)
    if variant == "reward-only":
        mask &= ~bad
    elif variant == "punish-plain":
        weights = torch.where(bad, 1.0, weights)
    elif variant == "culprit-only":
        mask &= ~bad | (xi < 0.5)
        weights = torch.where(bad, 1.0, weights)
    elif variant == "before-culprit":
        mask &= ((xi < 1e-4) & response).cumsum(1) == 0
    scale = token_scale(mask, torch.ones(len(mask), dtype=torch.bool), loss)
    return dataclasses.replace(batch.batch, mask=mask, weights=weights, scale=scale)


@dataclasses.dataclass
class Detailed:
    """A batch, and what else `make_batches` knew when it made it."""

    batch: object
    sampler_logprobs: torch.Tensor
    response: torch.Tensor

    def __getattr__(self, name):
        return getattr(self.batch, name)


def run(args: tuple) -> dict:
    """A run of learning_cpu.py with another `make_batches`."""
    import sparse_rl.train.loop

    (seed, start, variant, setting), *rest = args
    if variant in KEYS:
        return run_plain(((seed, start, "sparse-rl", setting), *rest), KEYS[variant]) | {"method": variant}
    plain = sparse_rl.train.loop.make_batches

    def other(scored, corrected, advantages, correction, loss, minibatches, *rest):
        batches = plain(scored, corrected, advantages, correction, loss, minibatches)
        parts = torch.arange(len(advantages)).tensor_split(minibatches)
        sampled = scored.sampled
        return [
            change(Detailed(b, sampled.sampler_logprobs[p], sampled.mask[p]), loss, variant)
            for b, p in zip(batches, parts)
        ]

    sparse_rl.train.loop.make_batches = other
    try:
        row = run_plain(((seed, start, "tis", setting), *rest))
    finally:
        sparse_rl.train.loop.make_batches = plain
    return row | {"method": variant}


def culprits(second: Path) -> None:
    """xi of the first wrong token of failed rollouts before any training, against xi of all tokens."""
    from sparse_rl import tasks
    from sparse_rl.compressors import make
    from sparse_rl.learn.batch import collate, score
    from sparse_rl.learn.diagnose import percentiles
    from sparse_rl.models import encode, load_model
    from sparse_rl.rollout import Engine, Sampling

    task = tasks.make("sums")
    prompts = task.sample(0, 128)
    quantiles = torch.tensor([0.05, 0.25, 0.5], dtype=torch.float64)
    print(
        "| warm start | compressor | failed | first wrong token: xi p05 / p25 / p50 | xi < 0.1 | xi < 1e-4 | all "
        "tokens: xi < 0.1 | |"
    )
    for name in ("tiny-sums", str(second)):
        model, tokenizer = load_model(name)
        for setting, (compressor, budget) in {"dense": ("dense", 80), **SETTINGS}.items():
            chosen = make(compressor) if compressor == "dense" else make(compressor, protect_prompt=True)
            engine = Engine(model, chosen, budget=budget, interval=4, rows=128)
            done = engine.generate([encode(tokenizer, p.text) for p in prompts], 4, Sampling(72), seed=7)
            scored = score(model, collate(done), 16384)
            texts = tokenizer.batch_decode([t.response_tokens for t in done], skip_special_tokens=True)
            wrong, all_xi = [], scored.gap[scored.sampled.mask].double().exp()
            for i, (t, text) in enumerate(zip(done, texts)):
                prompt = prompts[t.prompt_index]
                if task.reward(prompt, text) == 0:
                    solution = [*tokenizer.encode(task.solution(prompt)), tokenizer.eos_token_id]
                    response = t.response_tokens.tolist()
                    first = next(
                        (k for k, (a, b) in enumerate(zip(response, solution)) if a != b),
                        min(len(response), len(solution)) - 1,
                    )
                    wrong.append(scored.gap[i, t.num_prompt_tokens + first].item())
            xi = torch.tensor(wrong, dtype=torch.float64).exp()
            spread = " / ".join(f"{v:.1e}" for v in percentiles(xi, quantiles).tolist())
            below = [f"{(xi < bound).double().mean():.0%}" for bound in (0.1, 1e-4)]
            cells = [f"{len(wrong) / len(done):.0%}", spread, *below, f"{(all_xi < 0.1).double().mean():.2%}"]
            print(f"| {Path(name).name} | {setting} | {' | '.join(cells)} |")


def main() -> None:
    import multiprocessing

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/why"))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--setting", default="rkv 32")
    parser.add_argument("--variants", default=",".join([*VARIANTS, *KEYS]))
    parser.add_argument("--culprits", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.culprits:
        culprits(make_second(args.out))
        return
    results = args.out / "results.jsonl"
    rows = [json.loads(line) for line in results.open()] if results.exists() else []
    done = {(r["seed"], r["start"], r["method"], r["setting"]) for r in rows}
    wanted = [
        (seed, "tiny-sums", variant, args.setting) for seed in range(args.seeds) for variant in args.variants.split(",")
    ]
    waiting = iter([(job, args.out / "runs", args.out / "none", args.steps) for job in wanted if job not in done])
    with (
        multiprocessing.get_context("spawn").Pool(args.processes, maxtasksperchild=1) as pool,
        results.open("a") as file,
    ):
        for row in lazily(pool, waiting, args.processes, run):
            rows.append(row)
            file.write(json.dumps(row) + "\n")
            file.flush()
    for variant in (*VARIANTS, *KEYS):
        group = [r for r in rows if r["method"] == variant and r["setting"] == args.setting]
        if group:
            alpha = statistics.mean(statistics.mean(r["curves"]["gap/alpha/p05"]) for r in group)
            cells = [
                variant,
                str(len(group)),
                *(interval([final(r, view) for r in group]) for view in ("dense", "sparse")),
                f"{alpha:.2f}",
            ]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
