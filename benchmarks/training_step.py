"""A training step of a published recipe with random weights: seconds by stage, and peak memory against the plan.

    python benchmarks/training_step.py --data simplerl_qwen_level3to5.jsonl --out runs/step --steps 1
    python benchmarks/training_step.py --data ... --out runs/step --steps 2 --resume
    python benchmarks/training_step.py --recipe qwen2.5-1.5b-gsm8k-24gb --data data/train/gsm8k.jsonl --gpu-memory 24 \\
        --characters 320 --steps 3

The model has the recipe's shape and dtype; completions are as long as allowed; rewards are planted (planted_math.py),
so that grading does its full work and the update is a full one. Everything else is the recipe's, except the keys given
here. A run that was begun in the folder goes on. `--gpu-memory` lets the allocator have no more GiB than a smaller GPU
has. A random model reads prompts by character, so `--characters` cuts them to the length that the recipe's own
tokenizer would give.
"""

import argparse
import json
from pathlib import Path

import torch
from stay import provenance, sentence

from sparse_rl import tasks
from sparse_rl.config import load_recipe
from sparse_rl.files import read_lines
from sparse_rl.models import encode, tiny_tokenizer
from sparse_rl.planning.memory import size
from sparse_rl.train.run import plan_run, train

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("qwen2.5-1.5b-simplerl"))
    parser.add_argument("--model", help="default: the shape of the recipe's model, with random weights")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, default=Path("runs/training-step"))
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--gpu-memory", type=float, help="GiB that the allocator may have")
    parser.add_argument("--characters", type=int, help="of the longest prompt")
    parser.add_argument("--set", nargs=2, action="append", default=[], metavar=("KEY", "VALUE"))
    args = parser.parse_args()
    if args.gpu_memory:
        fraction = args.gpu_memory * 2**30 / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(fraction)
    given = load_recipe(args.recipe)
    shape = given.model.name.lower().split("/")[-1].removesuffix("-instruct")
    keys = [
        ("model.name", args.model or f"random:{shape}"),
        ("rollout.stop", "[]"),
        ("task.name", f"{ROOT}/benchmarks/planted_math.py:PlantedMath"),
    ]
    keys += [("task.files", args.data), ("run.steps", str(args.steps)), ("eval.every", "0"), ("run.keep", "1")]
    if given.task.options.get("template"):
        keys.append(("task.template", "plain"))  # the random model's tokenizer has no chat template
    if args.characters:
        keys.append(("task.characters", str(args.characters)))
    recipe = load_recipe(args.recipe, [*keys, *map(tuple, args.set)])
    train(recipe, args.out, resume=args.resume or (args.out / "recipe.yaml").exists())
    task, tokenizer = tasks.make(recipe.task.name, **recipe.task.options), tiny_tokenizer()
    prompts = task.sample(0, recipe.rollout.prompts * args.steps)
    plan = plan_run(recipe, max(len(encode(tokenizer, p.text)) for p in prompts))
    timing, metrics = (read_lines(args.out / f"{name}.jsonl") for name in ("timing", "metrics"))
    print(plan.text())
    stages = [k for k in timing[0] if k.startswith("time/")]
    print(f"| step | {' | '.join(k.removeprefix('time/') for k in stages)} | tokens/s | peak | peak / plan |")
    for line in timing:
        seconds = [f"{line[k]:.1f} s ({line[k] / line['time/step']:.1%})" for k in stages]
        peak = line.get("memory/peak_bytes", 0)
        cells = [
            str(line["step"]),
            *seconds,
            f"{line['rollout/tokens_per_s']:,.0f}",
            size(peak),
            f"{peak / plan.total_bytes:.2f}",
        ]
        print(f"| {' | '.join(cells)} |")
    for line in metrics:
        shown = ("step", "reward", "update", "gap", "reject", "grade", "cache")
        print(json.dumps({k: v for k, v in line.items() if k.split("/")[0] in shown}))
    if args.gpu_memory:
        print(f"the allocator had {args.gpu_memory:g} GiB and held {size(torch.cuda.max_memory_reserved())}")
    print(sentence(provenance()))


if __name__ == "__main__":
    main()
