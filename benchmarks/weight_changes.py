"""How many bf16 weights does a training step change? What changed is what a pool sends to samplers on other machines.

    python benchmarks/weight_changes.py --model models/smollm2 --data data/train/gsm8k.jsonl --lr 1e-6 2e-5

The recipe is smollm2-gsm8k, cut to what a CPU does in a minute a step; rewards are planted (planted_math.py), so that
every step has a gradient. After each step, the weights are compared with those before it, as a pool compares them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from sparse_rl.config import load_recipe
from sparse_rl.pool.weights import Changes, Part, Versions, bytes_of
from sparse_rl.train.loop import Trainer
from sparse_rl.train.remote import weights_of
from sparse_rl.train.run import train

CUT = {
    "task.name": f"{Path(__file__).parent}/planted_math.py:PlantedMath",
    "task.characters": 200,
    "rollout.prompts": 4,
    "rollout.group_size": 4,
    "rollout.rows": 16,
    "rollout.max_new_tokens": 24,
    "optimizer.warmup_steps": 0,
    "eval.every": 0,
    "run.checkpoint_every": 1000,
}


class Watch:
    """Keeps the last two versions, and measures what lies between them."""

    def __init__(self) -> None:
        self.versions = Versions(lambda part, needed: kept(part), lambda part: part)
        self.shares: list[tuple[float, float]] = []  # of the numbers, of the bytes

    def look(self, trainer: Trainer) -> None:
        version, before = trainer.learner.version, max(self.versions.kept, default=None)
        if version == before:
            return
        whole = self.versions.publish(version, weights_of(trainer.model), before or 0, compare=True)
        if before is not None:
            parts = self.versions.offer(version).refs(before)
            numbers = sum(value.numel() for value in trainer.model.parameters())
            self.shares.append((sum(map(changed, parts)) / numbers, sum(map(bytes_of, parts)) / whole))


def kept(part: Part) -> Part:
    """The model's weights change in place."""
    return {name: content.copy() if isinstance(content, np.ndarray) else content for name, content in part.items()}


def changed(part: Part) -> int:
    return sum(len(c.places) if isinstance(c, Changes) else c.size for c in part.values())


def measure(model: str, data: str, lr: float, minibatches: int, steps: int, dtype: str) -> list[tuple[float, float]]:
    keys = CUT | {
        "model.name": model,
        "model.dtype": dtype,
        "task.files": data,
        "optimizer.lr": f"{lr:.1e}",
        "run.steps": steps,
    }
    recipe = load_recipe(
        Path("smollm2-gsm8k"), [(k, str(v)) for k, v in (keys | {"learn.minibatches": minibatches}).items()]
    )
    watch, publish = Watch(), Trainer.publish_weights

    def watched(trainer: Trainer) -> None:
        publish(trainer)
        watch.look(trainer)

    Trainer.publish_weights = watched
    try:
        with tempfile.TemporaryDirectory() as folder:
            train(recipe, Path(folder) / "run", show=False)
    finally:
        Trainer.publish_weights = publish
    return watch.shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-6, 2e-5])
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    print("| learning rate | step | weights changed | bytes sent, of the whole |\n|---|---|---|---|")
    for lr in args.lr:
        found = measure(args.model, args.data, lr, args.minibatches, args.steps, args.dtype)
        for step, (numbers, sent) in enumerate(found, 1):
            print(f"| {lr:g} | {step} | {numbers:.2%} | {sent:.2%} |", flush=True)


if __name__ == "__main__":
    main()
