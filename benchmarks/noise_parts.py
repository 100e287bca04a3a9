"""Which part of a layer makes the noise of bf16 or fp16? Two passes whose sums differ in their last bits, by part.

    python benchmarks/noise_parts.py models/smollm2 --prompts 3 --group 2 --new 64          # one CPU core, 15 minutes
    python benchmarks/noise_parts.py models/smollm2 --dtype float16 --parts                    # all parts at once alone
    python benchmarks/noise_parts.py tiny:4x256 --prompts 2 --group 2 --new 32

Sampler and learner round the same numbers to bf16. Their kernels add in another order, so what they round differs in
the last bits of fp32, and now and then it falls on the other side. Here both passes are computed in fp32, and what a
kernel sums (products, norms, attention) is multiplied by 1 + 2^-22 x a random sign. What is computed number by number
(residual sums, rotations, the gated product) is not: both sides get the same from the same. The parts that round then
round to bf16. The gap of two such passes (other signs) is the noise. Three columns for every part: the gap if only this
part rounds, the gap if all parts but this one round, and by how much the latter is below the gap if all parts round.
Every number is the mean over `--pairs` pairs of passes, with the lowest and the highest. The n-th pair has the same
signs in every row. Logits stay in fp32 (`model.logits: float32`) but in the first line, which says what their rounding
adds.

Weights are those of bf16 in all passes. Texts are samples of the model. Models of Llama's module names only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from logits_noise import noise, prompts_for
from torch import Tensor, nn
from transformers import AttentionInterface

from sparse_rl import Engine, Sampling
from sparse_rl.errors import SparseRLError
from sparse_rl.learn.batch import collate
from sparse_rl.models import load_model
from sparse_rl.models.stops import stop_ids

Round = Callable[[Tensor], Tensor]
LAST_BIT = 2.0**-22  # of a sum in fp32: kernels differ by a few of 2^-24
INPUT, OUTPUT, LOGITS = "input", "output", "logits"


class Part(NamedTuple):
    where: str  # what of a module it is
    modules: tuple[str, ...]  # the ends of their names
    is_sum: bool  # kernels sum it, each in another order; other parts are computed number by number


NORMS = ("input_layernorm", "post_attention_layernorm", "model.norm")
MODULES = {
    "embedding and residual stream": Part(INPUT, NORMS, False),
    "norms": Part(OUTPUT, NORMS, True),
    "queries, keys, values": Part(OUTPUT, ("q_proj", "k_proj", "v_proj"), True),
    "rotated queries and keys": Part("rotated", (), False),
    "attention weights": Part("weights", (), True),
    "attention output": Part(INPUT, ("o_proj",), True),
    "o_proj": Part(OUTPUT, ("o_proj",), True),
    "gate and up": Part(OUTPUT, ("gate_proj", "up_proj"), True),
    "gated product": Part(INPUT, ("down_proj",), False),
    "down_proj": Part(OUTPUT, ("down_proj",), True),
    LOGITS: Part(OUTPUT, ("lm_head",), True),
}
PARTS = tuple(part for part in MODULES if part != LOGITS)


def off(x: Tensor, seed: int) -> Tensor:
    """fp32 x, off in its last bits. The signs are a hash of x's bits and the seed."""
    mixed = x.contiguous().view(torch.int32) ^ (seed * 0x3C6EF372 & 0x7FFFFFFF)
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 16)) * 0x45D9F3B
    return x * (1 + LAST_BIT * (((mixed >> 16) & 2) - 1))


def rounding(part: str, rounds: bool, seed: int, dtype: torch.dtype = torch.bfloat16) -> Round:
    """What a pass makes of a part. Its signs depend on the seed and on its place in MODULES alone, so that passes in
    which other parts round have the same.
    """
    own_seed = 1 + seed * len(MODULES) + list(MODULES).index(part)

    def rounded(x: Tensor) -> Tensor:
        x = off(x, own_seed) if MODULES[part].is_sum else x
        return x.to(dtype).float() if rounds else x

    return rounded


def attention(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, scaling: float, rotated: Round,
    weights: Round, **_: object,
) -> tuple[Tensor, None]:  # fmt: skip
    """q [B, H, T, D]; k, v [B, KV, T, D] -> [B, T, H, D]. Causal; batches are padded on the right."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (rotated(k), v))
    scores = rotated(q) @ k.mT * scaling
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return (weights(scores.masked_fill(hidden, -torch.inf).softmax(-1)) @ v).transpose(1, 2), None


def round_input(rounded: Round, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    """In place, because the residual stream also goes on beside the norm."""
    args[0].copy_(rounded(args[0]))


@contextmanager
def parts_rounded(model: nn.Module, parts: set[str], seed: int, dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Within it these parts of the model round, and all sums are off in their last bits."""
    rules = {part: rounding(part, part in parts, seed, dtype) for part in MODULES}
    special = {where: rules[part] for part, (where, modules, _) in MODULES.items() if not modules}
    name = "noise_parts"
    AttentionInterface.register(name, partial(attention, **special))
    before = model.config._attn_implementation
    with ExitStack() as hooks, torch.no_grad():
        model.set_attn_implementation(name)
        hooks.callback(model.set_attn_implementation, before)
        for part, (where, ends, _) in MODULES.items():
            rounded = rules[part]
            for module in (m for path, m in model.named_modules() if path.endswith(ends) and ends):
                hook = (
                    module.register_forward_pre_hook(partial(round_input, rounded))
                    if where == INPUT
                    else module.register_forward_hook(lambda module, args, out, r=rounded: r(out))
                )
                hooks.callback(hook.remove)
        yield


def logprobs(model: nn.Module, tokens: Tensor, mask: Tensor, rows: int = 4) -> Tensor:
    """Of the sampled tokens: tokens [B, T], mask [B, T] -> fp64 [n]"""
    found = []
    for here, wanted in zip(tokens.split(rows), mask.split(rows)):
        hidden = model.model(here, use_cache=False).last_hidden_state[:, :-1]
        logits = model.lm_head(hidden[wanted[:, 1:]]).double()  # [n, V]
        found.append(logits.log_softmax(-1).gather(-1, here[:, 1:][wanted[:, 1:]][:, None]).squeeze(-1))
    return torch.cat(found)


def gaps(
    model: nn.Module, tokens: Tensor, mask: Tensor, parts: set[str], pairs: int, dtype: torch.dtype = torch.bfloat16
) -> list[dict[str, float]]:
    """The noise of every pair of passes."""
    found = []
    for seed in range(0, 2 * pairs, 2):
        passes = []
        for one in (seed, seed + 1):
            with parts_rounded(model, parts, one, dtype):
                passes.append(logprobs(model, tokens, mask))
        found.append(noise(passes[0] - passes[1]))
    return found


def means(found: list[dict[str, float]]) -> list[float]:
    """The mean |gap| of every pair."""
    return [one["mean_abs_gap"] for one in found]


def spread(values: list[float], form: str = ".5f") -> str:
    """Their mean, with the lowest and the highest."""
    return f"{statistics.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def save(path: Path | None, result: dict) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--task", default="countdown")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--group", type=int, default=4)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--pairs", type=int, default=3, help="pairs of passes, each with other last bits")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help="none: only all of them at once")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    model, tokenizer = load_model(args.model, "bfloat16", "cpu")
    model = model.float()
    ends = {end for part in MODULES.values() for end in part.modules}
    if absent := sorted(end for end in ends if not any(path.endswith(end) for path, _ in model.named_modules())):
        raise SparseRLError(f"{args.model} has no {', '.join(absent)}; give a model of Llama's module names.")
    engine = Engine(model, "dense", rows=args.prompts * args.group)
    sampling = Sampling(args.new, stop_ids=stop_ids(model, tokenizer))
    sampled = collate(engine.generate(prompts_for(tokenizer, args.task, args.prompts), args.group, sampling, seed=0))
    measured = partial(gaps, model, sampled.tokens, sampled.mask, pairs=args.pairs, dtype=getattr(torch, args.dtype))
    result = {
        "command": " ".join(sys.argv),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokens": int(sampled.mask.sum()),
        "dtype": args.dtype,
        "with logits": measured(set(MODULES)),
        "all": measured(set(PARTS)),
        "parts": {},
    }
    whole = means(result["all"])
    print(
        f"{args.model}, {result['tokens']} tokens, {args.pairs} pairs: mean |gap| "
        f"{spread(means(result['with logits']))}, with fp32 logits {spread(whole)}",
        flush=True,
    )
    print("| part | it alone rounds | all others round | less than all |\n|---|---|---|---|")
    save(args.out, result | {"seconds": time.perf_counter() - began})
    for part in args.parts:
        alone, others = measured({part}), measured(set(PARTS) - {part})
        result["parts"][part] = {"alone": alone, "others": others}
        less = [1 - one / every for one, every in zip(means(others), whole, strict=True)]
        print(f"| {part} | {spread(means(alone))} | {spread(means(others))} | {spread(less, '.0%')} |", flush=True)
        save(args.out, result | {"seconds": time.perf_counter() - began})


if __name__ == "__main__":
    main()
