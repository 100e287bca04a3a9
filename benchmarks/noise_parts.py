"""Which part of a layer makes the noise of bf16 or fp16? Two passes whose sums differ in their last bits, by part.

    python benchmarks/noise_parts.py models/smollm2 --out runs/noise-parts.json              # two CPU cores, 20 minutes
    python benchmarks/noise_parts.py models/smollm2 --dtype float16 --parts                    # all parts at once alone
    python benchmarks/noise_parts.py tiny:4x256 --prompts 2 --group 2 --new 32

Sampler and learner round the same numbers to bf16. Their kernels add in another order, so what they round differs in
the last bits of fp32, and now and then it falls on the other side. Here both passes are computed in fp32, and what
each part of a layer puts out is multiplied by 1 + 2^-22 x a random sign and then rounded to bf16, as a product with
fp32 sums is. The gap of two such passes (other signs) is the noise. Three columns for every part: the gap if only this
part rounds, the gap if all parts but this one round, and by how much the latter is below the gap if all parts round.
Logits stay in fp32 (`model.logits: float32`) but in the first line, which says what their rounding adds.

Weights are those of bf16 in all passes. Texts are samples of the model. Models of Llama's module names only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

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
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {  # part: (what of a module is rounded, ends of their names)
    "embedding and residual stream": (INPUT, ("input_layernorm", "post_attention_layernorm", "model.norm")),
    "norms": (OUTPUT, ("input_layernorm", "post_attention_layernorm", "model.norm")),
    "queries, keys, values": (OUTPUT, ("q_proj", "k_proj", "v_proj")),
    "rotated queries and keys": ("rotated", ()),
    "attention weights": ("weights", ()),
    "attention output": (INPUT, ("o_proj",)),
    "o_proj": (OUTPUT, ("o_proj",)),
    "gate and up": (OUTPUT, ("gate_proj", "up_proj")),
    "gated product": (INPUT, ("down_proj",)),
    "down_proj": (OUTPUT, ("down_proj",)),
    LOGITS: (OUTPUT, ("lm_head",)),
}
PARTS = tuple(part for part in MODULES if part != LOGITS)


def rounding(seed: int, dtype: torch.dtype) -> Round:
    """x, off in its last bits, as the nearest number of the dtype. The signs are a hash of x's bits and the seed."""

    def rounded(x: Tensor) -> Tensor:
        mixed = x.contiguous().view(torch.int32) ^ (seed * 0x3C6EF372 & 0x7FFFFFFF)
        for _ in range(2):
            mixed = (mixed ^ (mixed >> 16)) * 0x45D9F3B
        sign = ((mixed >> 16) & 2) - 1
        return (x * (1 + LAST_BIT * sign)).to(dtype).float()

    return rounded


def exact(x: Tensor) -> Tensor:
    return x


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
    """Within it these parts of the model round."""
    special = {MODULES[part][0]: rounding(seed - 1 - number, dtype) for number, part in enumerate(sorted(parts))}
    name = "noise_parts"
    AttentionInterface.register(
        name, partial(attention, rotated=special.get("rotated", exact), weights=special.get("weights", exact))
    )
    before = model.config._attn_implementation
    with ExitStack() as hooks, torch.no_grad():
        model.set_attn_implementation(name)
        hooks.callback(model.set_attn_implementation, before)
        for number, part in enumerate(sorted(parts)):
            kind, ends = MODULES[part]
            rounded = rounding(seed + 100 * number, dtype)
            for module in (m for path, m in model.named_modules() if path.endswith(ends) and ends):
                hook = (
                    module.register_forward_pre_hook(partial(round_input, rounded))
                    if kind == INPUT
                    else module.register_forward_hook(lambda module, args, out, r=rounded: r(out))
                )
                hooks.callback(hook.remove)
        yield


def logprobs(model: nn.Module, tokens: Tensor, mask: Tensor, rows: int = 4) -> Tensor:
    """Of the sampled tokens: tokens [B, T], mask [B, T] -> fp64 [n]"""
    found = []
    for here, wanted in zip(tokens.split(rows), mask.split(rows)):
        logits = model(here, use_cache=False).logits[:, :-1]  # [B, T - 1, V]
        every = logits.double().log_softmax(-1).gather(-1, here[:, 1:, None]).squeeze(-1)
        found.append(every[wanted[:, 1:]])
    return torch.cat(found)


def gap(
    model: nn.Module, tokens: Tensor, mask: Tensor, parts: set[str], dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    passes = []
    for seed in (1, 1001):
        with parts_rounded(model, parts, seed, dtype):
            passes.append(logprobs(model, tokens, mask))
    return noise(passes[0] - passes[1])


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
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help="none: only all of them at once")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    model, tokenizer = load_model(args.model, "bfloat16", "cpu")
    model = model.float()
    ends = {end for _, several in MODULES.values() for end in several}
    if absent := sorted(end for end in ends if not any(path.endswith(end) for path, _ in model.named_modules())):
        raise SparseRLError(f"{args.model} has no {', '.join(absent)}; give a model of Llama's module names.")
    engine = Engine(model, "dense", rows=args.prompts * args.group)
    sampling = Sampling(args.new, stop_ids=stop_ids(model, tokenizer))
    sampled = collate(engine.generate(prompts_for(tokenizer, args.task, args.prompts), args.group, sampling, seed=0))
    measured = partial(gap, model, sampled.tokens, sampled.mask, dtype=getattr(torch, args.dtype))
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
    with_logits, whole = (result[name]["mean_abs_gap"] for name in ("with logits", "all"))
    print(
        f"{args.model}, {result['tokens']} tokens: mean |gap| {with_logits:.5f}, with fp32 logits {whole:.5f}",
        flush=True,
    )
    print("| part | it alone rounds | all others round | less than all |\n|---|---|---|---|")
    save(args.out, result)
    for part in args.parts:
        alone, others = measured({part}), measured(set(PARTS) - {part})
        result["parts"][part] = {"alone": alone, "others": others}
        less = 1 - others["mean_abs_gap"] / whole
        print(f"| {part} | {alone['mean_abs_gap']:.5f} | {others['mean_abs_gap']:.5f} | {less:.0%} |", flush=True)
        save(args.out, result | {"seconds": time.perf_counter() - began})


if __name__ == "__main__":
    main()
