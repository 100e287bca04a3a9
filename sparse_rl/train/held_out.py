"""Sample and grade held-out prompts during a run, on whatever cache the engine has."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ..chat import Chats, Talk, Turns, converse, graded_texts, talk_metrics, with_faults
from ..compressors import make
from ..learn.diagnose import ends_in_loop
from ..learn.student import Student
from ..models import ModelShape, encode, end_token
from ..records import Trajectory, mean_entries
from ..rollout import Engine, Sampling
from ..tasks import UNGRADED, Grade, Prompt, Task, by_task, mean_parts
from ..tasks.answering import Answers
from .rewards import AddedRewards


def accuracy(
    engine: Engine,
    tokenizer,
    task: Task,
    prompts: Sequence[Prompt],
    samples: int,
    sampling: Sampling,
    seed: int,
    turns: Turns | None = None,
) -> dict[str, float]:
    """The share of right completions, and statistics of the completions."""
    trajectories, grades, talks = complete(engine, tokenizer, task, prompts, samples, sampling, seed, turns=turns)
    return described(trajectories, grades, prompts, talks)


def complete(
    engine: Engine,
    tokenizer,
    task: Task,
    prompts: Sequence[Prompt],
    samples: int,
    sampling: Sampling,
    seed: int,
    members: Sequence[Sequence[int]] | None = None,
    rewards: AddedRewards | None = None,
    turns: Turns | None = None,
) -> tuple[list[Trajectory], list[Grade], list[Talk]]:
    """Completions, their grades and conversations; there are no conversations if the task does not reply.

    `members`: which samples of every prompt are wanted; None: all. `rewards`: rewards that the run adds. `turns`: the
    limits of conversations.
    """
    members = [range(samples)] * len(prompts) if members is None else members
    chats = chats_of(engine.model, tokenizer, task)
    ids = starts(tokenizer, chats, prompts)
    trajectories, texts, talks = sampled(
        engine, tokenizer, task, chats, prompts, ids, members, sampling, seed, turns or Turns()
    )
    if not trajectories:  # a process may have no prompts
        return [], [], []
    asked = [prompts[t.prompt_index] for t in trajectories]
    grades = rewards.grade(task, asked, trajectories, texts) if rewards else task.grade(asked, texts)
    return trajectories, with_faults(task, grades, talks) if talks else grades, talks


def chats_of(model, tokenizer, task: Task) -> Chats | None:
    """How a task's conversations are written as tokens; None: the task never replies."""
    return Chats(tokenizer, task, end_token(model, tokenizer)) if task.converses else None


def starts(tokenizer, chats: Chats | None, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The tokens of each prompt, with which its completion begins."""
    return [encode(tokenizer, p.text) if chats is None else chats.of(p).start(p) for p in prompts]


def sampled(
    engine: Engine,
    tokenizer,
    task: Task,
    chats: Chats | None,
    prompts: Sequence[Prompt],
    ids: Sequence[Sequence[int]],
    members: Sequence[Sequence[int]],
    sampling: Sampling,
    seed: int,
    turns: Turns,
) -> tuple[list[Trajectory], list[str], list[Talk]]:
    """Sample completions, or conversations if the task replies; also return the texts to grade."""
    if chats is None:
        trajectories = engine.generate(ids, sampling=sampling, seed=seed, samples=members)
        responses = [t.response_tokens.tolist() for t in trajectories]
        return trajectories, tokenizer.batch_decode(responses, skip_special_tokens=True) if responses else [], []
    pairs = converse(engine, chats, task, prompts, ids, members, sampling, seed, turns)
    talks = [talk for _, talk in pairs]
    return [t for t, _ in pairs], graded_texts(task, [prompts[t.prompt_index] for t, _ in pairs], talks), talks


def described(
    trajectories: Sequence[Trajectory],
    grades: Sequence[Grade],
    prompts: Sequence[Prompt],
    talks: Sequence[Talk] = (),
) -> dict[str, float]:
    """Statistics of completions. prompts: those of the evaluation, to which trajectories point"""
    parts = by_task([prompts[t.prompt_index] for t in trajectories], grades)
    rewards = torch.tensor([g.reward for g in grades], dtype=torch.float64)
    return {
        "accuracy": sum(g.right for g in grades) / len(grades),
        "reward": rewards.mean().item(),
        **{f"reward/{name}": value for name, value in mean_parts(grades).items()},
        "length": sum(len(t.response_tokens) for t in trajectories) / len(trajectories),
        "truncated": sum(t.finish_reason == "length" for t in trajectories) / len(trajectories),
        "loops": sum(ends_in_loop(t.response_tokens) for t in trajectories) / len(trajectories),
        "ungraded": sum(g.verdict in UNGRADED for g in grades) / len(grades),
        "entries": sum(map(mean_entries, trajectories)) / len(trajectories),
        **(talk_metrics(talks, trajectories) if talks else {}),
        **{f"task/{label}/accuracy": sum(g.right for g in part) / len(part) for label, part in parts.items()},
        **{f"task/{label}/reward": math.fsum(g.reward for g in part) / len(part) for label, part in parts.items()},
    }


def held_out_answers(found: dict[str, float], grades: Sequence[Grade], new_tokens: int) -> Answers:
    """Held-out completions summed up for hints about what is wrong (tasks/answering.py)."""
    return Answers(
        count=len(grades),
        right=found["accuracy"],
        cut=found["truncated"],
        no_answer=sum(g.verdict == "no answer" for g in grades) / len(grades),
        max_new_tokens=new_tokens,
        ungraded={verdict: sum(g.verdict == verdict for g in grades) for verdict in UNGRADED},
        turns=found.get("talk/turns/mean", 0.0),
    )


def engines_for(
    engine: Engine, students: Sequence[Student], prompts: list[list[int]], new_tokens: int
) -> dict[str, Callable[[], Engine]]:
    """The engines that sample a run's held-out prompts: on the dense cache, on the run's own, and for each student one
    per chunk size. Each is made when it is needed.
    """
    engines: dict[str, Callable[[], Engine]] = {
        "dense": lambda: dense_engine(engine.model, prompts, new_tokens, engine.rows, like=engine)
    }
    if engine.compressor.evicts:
        engines["sparse"] = lambda: engine
    for student, chunk in [(s, size) for s in students for size in s.sizes]:
        name = student.name if len(student.sizes) == 1 else f"{student.name}@{chunk}"
        engines[name] = partial(
            fitting_engine, student.model, f"beacon:{chunk}", prompts, new_tokens, engine.rows, engine
        )
    return engines


def dense_engine(model, prompts: Sequence[Sequence[int]], new_tokens: int, rows: int, like: Engine) -> Engine:
    """An engine that evicts nothing, with as many rows as fit in the memory of `like`, but no more than `rows`."""
    return fitting_engine(model, "dense", prompts, new_tokens, rows, like)


def fitting_engine(
    model, compressor: str, prompts: Sequence[Sequence[int]], new_tokens: int, rows: int, like: Engine
) -> Engine:
    """An engine whose rows hold these prompts and as many new tokens.

    It has as many rows as fit in the memory of `like`, but no more than `rows`.
    """
    longest = max(map(len, prompts))
    capacity = make(compressor).capacity(longest, new_tokens)
    row_bytes = ModelShape.of(model.config, like.shape.dtype).cache_shape().row_bytes(capacity)
    fitting = like.plan(longest, new_tokens).cache_bytes // row_bytes
    engine = Engine(model, compressor, rows=max(1, min(rows, fitting)))
    engine.reserve(longest, new_tokens)
    return engine
