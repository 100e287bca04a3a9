"""Mixtures of experts: how far the learner's log-probs are from the sampler's, with routes replayed and without.

    python benchmarks/routing_replay.py                      # tiny models with random weights, on a CPU

A model with random weights samples trajectories on an evicting cache; the learner computes their log-probs under the
same trace, as rows of a padded micro-batch: with the sampler's experts, and choosing anew. A dense model of the same
size stands beside it. In fp32 the two passes nearly always choose alike; in bf16 rounding decides many choices.
"""

from __future__ import annotations

import argparse
import platform
import time
from contextlib import nullcontext

import torch
import transformers

from sparse_rl import Engine, Sampling
from sparse_rl.learn.batch import collate, micro_batches_of, seen_by
from sparse_rl.learn.routes import sent_to
from sparse_rl.learn.score import batch_logprobs
from sparse_rl.models.routing import RouteRecorder, routing_of

SIZE = dict(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=1024,
    initializer_range=0.1,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
EXPERTS = dict(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=64, norm_topk_prob=True)


def make_model(experts: bool, dtype: torch.dtype):
    torch.manual_seed(0)
    kind = transformers.Qwen3MoeConfig if experts else transformers.Qwen3Config
    own = EXPERTS if experts else dict(intermediate_size=256)
    return transformers.AutoModelForCausalLM.from_config(kind(**SIZE, **own)).to(dtype).eval()


@torch.no_grad()
def measure(model, trajectories, replay: bool, micro_batch_tokens: int) -> tuple[torch.Tensor, str]:
    """|learner - sampler| of every token [N, T], and the share of tokens that went to other experts in some layer."""
    sampled, routing = collate(trajectories), routing_of(model)
    routes = tuple(t.trace.routes for t in trajectories) if replay else None
    found, elsewhere, fed = torch.zeros(sampled.mask.shape), 0, 0
    for rows in micro_batches_of(model, sampled.tokens, sampled.lengths, micro_batch_tokens, packing=False):
        tokens, mask = sampled.tokens[rows], sampled.mask[rows]  # all trajectories are equally long
        seen = seen_by(model, sampled, rows, shadow=True)
        sent = sent_to(model, routes, rows, sampled.lengths, seen)
        with nullcontext() if routing is None else RouteRecorder(model, routing) as recorder:
            into = None if recorder is None else recorder.empty(tokens.numel(), tokens.device)
            logprobs = batch_logprobs(model, tokens, mask, 1.0, seen, sent)
        found[rows] = (logprobs - sampled.sampler_logprobs[rows]).abs() * mask
        if into is not None:
            mine = into.transpose(0, 1).unflatten(0, tokens.shape).sort(-1).values[:, :-1]  # [B, T - 1, M, k]
            theirs = torch.stack([trajectories[row].trace.routes for row in rows.tolist()]).sort(-1).values[:, :-1]
            elsewhere, fed = elsewhere + int((mine != theirs).flatten(2).any(2).sum()), fed + mine[..., 0, 0].numel()
    return found, f"{elsewhere / fed:.2%}" if fed else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--micro-batch-tokens", type=int, default=4096)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--models", nargs="+", default=["dense", "experts"], choices=["dense", "experts"])
    args = parser.parse_args()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}")
    print("\n| dtype | model | routes | mean gap | worst trajectory | worst token | other experts |")
    print("|---|---|---|---|---|---|---|")
    for dtype in (getattr(torch, name) for name in args.dtypes):
        for experts in (name == "experts" for name in args.models):
            model = make_model(experts, dtype)
            engine = Engine(model, "rkv", budget=24, interval=8, rows=64, record_routes=experts)
            generator = torch.Generator().manual_seed(1)
            prompts = torch.randint(1, 512, (args.trajectories // 8, 16), generator=generator).tolist()
            start = time.perf_counter()
            trajectories = engine.generate(prompts, 8, Sampling(args.new_tokens), seed=0)
            seconds = time.perf_counter() - start
            for replay in (False, True) if experts else (False,):
                found, elsewhere = measure(model, trajectories, replay, args.micro_batch_tokens)
                name = "Qwen3-MoE" if experts else "Qwen3 (dense)"
                routes = ("replayed" if replay else "chosen anew") if experts else "none"
                each = found.sum(1) / args.new_tokens  # of a trajectory, in nats
                numbers = " | ".join(f"{value:.2g}" for value in (each.mean(), each.max(), found.max()))
                short = str(dtype).removeprefix("torch.")
                print(f"| {short} | {name} | {routes} | {numbers} | {elsewhere} |", flush=True)
            print(f"<!-- {len(trajectories)} trajectories in {seconds:.0f} s -->", flush=True)


if __name__ == "__main__":
    main()
