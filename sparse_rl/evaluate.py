"""Accuracy on held-out prompts, sampled on whatever cache the engine has."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .learn.diagnose import ends_in_loop
from .models import ModelShape, encode
from .rollout import Engine, Sampling
from .tasks import Prompt, Task


def accuracy(
    engine: Engine, tokenizer, task: Task, prompts: Sequence[Prompt], samples: int, sampling: Sampling, seed: int
) -> dict[str, float]:
    """Share of completions with full reward, and what they were like."""
    ids = [encode(tokenizer, prompt.text) for prompt in prompts]
    trajectories = engine.generate(ids, samples, sampling, seed)
    texts = tokenizer.batch_decode([t.response_tokens for t in trajectories], skip_special_tokens=True)
    grades = task.grade([prompts[t.prompt_index] for t in trajectories], texts)
    rewards = torch.tensor([g.reward for g in grades], dtype=torch.float64)
    return {
        "accuracy": (rewards >= 1).double().mean().item(),
        "reward": rewards.mean().item(),
        "length": sum(len(t.response_tokens) for t in trajectories) / len(trajectories),
        "truncated": sum(t.finish_reason == "length" for t in trajectories) / len(trajectories),
        "loops": sum(ends_in_loop(t.response_tokens) for t in trajectories) / len(trajectories),
        "ungraded": sum(g.verdict in ("timeout", "error", "bad gold") for g in grades) / len(grades),
    }


def dense_engine(model, prompts: Sequence[Sequence[int]], new_tokens: int, rows: int, like: Engine) -> Engine:
    """An engine that evicts nothing, with as many rows as fit in the bytes of `like`, but no more than `rows`."""
    longest = max(map(len, prompts))
    tokens = longest + new_tokens
    row_bytes = ModelShape.of(model.config, like.shape.dtype).cache_shape().row_bytes(tokens)
    fitting = like.plan(longest, new_tokens).cache_bytes // row_bytes
    return Engine(model, compressor="dense", rows=max(1, min(rows, fitting)), max_tokens=tokens)
