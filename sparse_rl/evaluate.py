"""Accuracy on held-out prompts, sampled on whatever cache the engine has.

sparse-rl eval models/student --task countdown --compressor beacon --chunk 16
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .learn.diagnose import ends_in_loop
from .models import ModelShape, encode
from .records import Trajectory, kv_tokens_saved, mean_entries
from .rollout import Engine, Sampling
from .statistics import interval
from .tasks import Grade, Prompt, Task


@dataclass(frozen=True)
class Evaluation:
    """What `sparse-rl eval` says of a model. Shares are of completions."""

    prompts: int
    samples: int  # completions of each
    accuracy: float  # share with full reward
    low: float  # of its 95 % interval
    high: float
    reward: float
    length: float  # tokens sampled
    truncated: float
    loops: float
    ungraded: float
    entries: float  # see mean_entries
    tokens_saved: float  # see kv_tokens_saved

    def text(self) -> str:
        lines = [
            ("accuracy", f"{self.accuracy:.3f}  (95 %: {self.low:.3f} to {self.high:.3f}; {self.prompts} prompts x {self.samples})"),
            ("reward", f"{self.reward:.3f}"),
            ("mean length", f"{self.length:.1f} tokens"),
            ("truncated", f"{self.truncated:.1%}"),
            ("ends in a loop", f"{self.loops:.1%}"),
            ("ungraded", f"{self.ungraded:.1%}"),
            ("mean cache entries", f"{self.entries:.1f}"),
            ("KV tokens saved", f"{self.tokens_saved:.1%}"),
        ]
        return "\n".join(f"  {label:<18}  {value}" for label, value in lines)


def evaluate(
    engine: Engine, tokenizer, task: Task, prompts: int, samples: int, sampling: Sampling, seed: int, progress: bool = False
) -> Evaluation:
    """On the task's first prompts, all of them where it has fewer."""
    asked = task.sample(0, min(prompts, task.num_prompts or prompts))
    trajectories, grades = complete(engine, tokenizer, task, asked, samples, sampling, seed, progress)
    found = described(trajectories, grades)
    shares = torch.tensor([g.reward >= 1 for g in grades]).double().view(len(asked), samples).mean(1).tolist()  # prompt by prompt
    low, high = interval(shares, samples)
    return Evaluation(prompts=len(asked), samples=samples, low=low, high=high, tokens_saved=kv_tokens_saved(trajectories), **found)


def accuracy(
    engine: Engine, tokenizer, task: Task, prompts: Sequence[Prompt], samples: int, sampling: Sampling, seed: int
) -> dict[str, float]:
    """Share of completions with full reward, and what they were like."""
    return described(*complete(engine, tokenizer, task, prompts, samples, sampling, seed))


def complete(
    engine: Engine, tokenizer, task: Task, prompts: Sequence[Prompt], samples: int, sampling: Sampling, seed: int, progress: bool = False
) -> tuple[list[Trajectory], list[Grade]]:
    ids = [encode(tokenizer, prompt.text) for prompt in prompts]
    trajectories = engine.generate(ids, samples, sampling, seed, progress)
    texts = tokenizer.batch_decode([t.response_tokens for t in trajectories], skip_special_tokens=True)
    return trajectories, task.grade([prompts[t.prompt_index] for t in trajectories], texts)


def described(trajectories: Sequence[Trajectory], grades: Sequence[Grade]) -> dict[str, float]:
    rewards = torch.tensor([g.reward for g in grades], dtype=torch.float64)
    return {
        "accuracy": (rewards >= 1).double().mean().item(),
        "reward": rewards.mean().item(),
        "length": sum(len(t.response_tokens) for t in trajectories) / len(trajectories),
        "truncated": sum(t.finish_reason == "length" for t in trajectories) / len(trajectories),
        "loops": sum(ends_in_loop(t.response_tokens) for t in trajectories) / len(trajectories),
        "ungraded": sum(g.verdict in ("timeout", "error", "bad gold") for g in grades) / len(grades),
        "entries": sum(map(mean_entries, trajectories)) / len(trajectories),
    }


def dense_engine(model, prompts: Sequence[Sequence[int]], new_tokens: int, rows: int, like: Engine) -> Engine:
    """An engine that evicts nothing, with as many rows as fit in the bytes of `like`, but no more than `rows`."""
    longest = max(map(len, prompts))
    tokens = longest + new_tokens
    row_bytes = ModelShape.of(model.config, like.shape.dtype).cache_shape().row_bytes(tokens)
    fitting = like.plan(longest, new_tokens).cache_bytes // row_bytes
    return Engine(model, compressor="dense", rows=max(1, min(rows, fitting)), max_tokens=tokens)
