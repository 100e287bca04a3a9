"""Ask a model the problems of benchmarks: sample the completions that are missing, then grade them.

    results = Results(folder, question)
    summaries = ask(engine, tokenizer, exams, seed, results)

Benchmarks with the same sampling settings share an engine run. A task that replies has a separate one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..chat import Chats, Talk, Turns, converse, graded_texts
from ..learn.diagnose import ends_in_loop
from ..models import encode, end_token
from ..records import Trajectory, entries
from ..rollout import Engine, Sampling
from ..tasks import Grade, Prompt, Task
from .results import Completion, Item, Key, Results
from .summary import Summary, summarize

GRADED_TOGETHER = 512  # completions between two updates of the progress bar


@dataclass(frozen=True)
class Exam:
    """A benchmark with its prompts and its sampling settings."""

    name: str
    task: Task
    prompts: list[Prompt]
    samples: int
    sampling: Sampling
    options: Mapping[str, Any] = field(default_factory=dict)  # of the task
    turns: Turns | None = None  # limits of conversations; None: the task never replies

    @property
    def keys(self) -> list[Key]:
        return [(self.name, i, sample) for i in range(len(self.prompts)) for sample in range(self.samples)]

    def settings(self) -> dict[str, Any]:
        """The settings that all items of this benchmark must share."""
        return {
            "max_new_tokens": self.sampling.max_new_tokens,
            "temperature": self.sampling.temperature,
            "top_k": self.sampling.top_k,
            "top_p": self.sampling.top_p,
            "options": dict(self.options),
            **({} if self.turns is None else {"max_turns": self.turns.most, "max_given_tokens": self.turns.given}),
        }


def ask(
    engine: Engine, tokenizer, exams: Sequence[Exam], seed: int, results: Results, progress: bool = False
) -> list[Summary]:
    """Sample and grade what is missing in `results`, and summarize every benchmark."""
    asked_once = [exam for exam in exams if exam.turns is None]
    for sampling in dict.fromkeys(exam.sampling for exam in asked_once):
        alike = [exam for exam in asked_once if exam.sampling == sampling]
        sample(engine, tokenizer, alike, seed, results, progress)
    for exam in exams:
        if exam.turns is not None:
            hold(engine, tokenizer, exam, exam.turns, seed, results)
        grade(exam, results, progress)
    return [
        summarize(items_of(exam, results), exam.samples, engine.shape.cache_shape().kv_bytes_per_token)
        for exam in exams
    ]


def items_of(exam: Exam, results: Results) -> list[Item]:
    return [results.items[key] for key in exam.keys]


def sample(engine: Engine, tokenizer, exams: Sequence[Exam], seed: int, results: Results, progress: bool) -> None:
    """Sample the missing completions. All prompts are passed, so that random streams and rows are those of one call."""
    asked = [(exam, i) for exam in exams for i in range(len(exam.prompts))]
    ids = [encode(tokenizer, exam.prompts[i].text) for exam, i in asked]
    texts = [tokenizer.decode(prompt) for prompt in ids]  # what the model sees
    for (exam, i), text in zip(asked, texts, strict=True):
        results.check_prompt(exam.name, i, text)
    wanted = [[n for n in range(exam.samples) if not results.has((exam.name, i, n))] for exam, i in asked]
    if not any(wanted):
        return
    sampled, start = 0, time.perf_counter()

    def save(trajectory: Trajectory) -> None:
        nonlocal sampled
        exam, i = asked[trajectory.prompt_index]
        text = tokenizer.decode(trajectory.response_tokens, skip_special_tokens=True)
        sampled += len(trajectory.response_tokens)
        results.add(completion(exam.name, i, texts[trajectory.prompt_index], text, trajectory))

    try:
        engine.generate(
            ids, sampling=exams[0].sampling, seed=seed, progress=progress, on_finish=save, samples=wanted, keep=False
        )
    finally:
        seconds = time.perf_counter() - start
        results.add_call(tokens=sampled, seconds=seconds, cache_bytes=engine.cache_bytes, rows=engine.rows)


def hold(engine: Engine, tokenizer, exam: Exam, turns: Turns, seed: int, results: Results) -> None:
    """Hold the missing conversations. All prompts are passed, for the same reason as in `sample`."""
    chats = Chats(tokenizer, exam.task, end_token(engine.model, tokenizer))
    ids = [chats.of(prompt).start(prompt) for prompt in exam.prompts]
    texts = [tokenizer.decode(prompt) for prompt in ids]
    for i, text in enumerate(texts):
        results.check_prompt(exam.name, i, text)
    wanted = [[n for n in range(exam.samples) if not results.has((exam.name, i, n))] for i in range(len(ids))]
    if not any(wanted):
        return
    sampled, start = 0, time.perf_counter()

    def save(trajectory: Trajectory, talk: Talk) -> None:
        nonlocal sampled
        i = trajectory.prompt_index
        (text,) = graded_texts(exam.task, [exam.prompts[i]], [talk])
        exam.task.last_error = exam.task.last_error or talk.problem
        sampled += len(trajectory.response_tokens)
        said = {"turns": talk.turns, "given": trajectory.num_given_tokens, "fault": talk.fault}
        results.add(replace(completion(exam.name, i, texts[i], text, trajectory), messages=talk.messages, **said))

    try:
        converse(engine, chats, exam.task, exam.prompts, ids, wanted, exam.sampling, seed, turns, save)
    finally:
        seconds = time.perf_counter() - start
        results.add_call(tokens=sampled, seconds=seconds, cache_bytes=engine.cache_bytes, rows=engine.rows)


def completion(bench: str, index: int, prompt: str, text: str, trajectory: Trajectory) -> Completion:
    held = entries(trajectory)
    return Completion(
        bench=bench,
        index=index,
        sample=trajectory.sample_index,
        prompt=prompt,
        text=text,
        finish=trajectory.finish_reason,
        prompt_tokens=trajectory.num_prompt_tokens,
        tokens=len(trajectory.response_tokens),
        loop=ends_in_loop(trajectory.response_tokens),
        entries=held.mean().item(),
        peak_entries=held.max().item(),
        last_entries=trajectory.trace.slots_in_use().double().mean().item(),
    )


def grade(exam: Exam, results: Results, progress: bool) -> None:
    """Grade completions that have no verdict, also of earlier calls, and those whose reference answer has changed."""
    for key, item in list(results.items.items()):
        if (
            item.bench == exam.name
            and item.index < len(exam.prompts)
            and item.gold != plain(exam.prompts[item.index].answer)
        ):
            results.reopen(key)
    waiting = [c for c in results.ungraded.values() if c.bench == exam.name and c.index < len(exam.prompts)]
    parts = [waiting[i : i + GRADED_TOGETHER] for i in range(0, len(waiting), GRADED_TOGETHER)]
    grades = {}
    for part in shown(parts, f"grading {exam.name}", progress):
        found = exam.task.grade([exam.prompts[c.index] for c in part], [c.text for c in part])
        grades |= {
            c.key: grade if c.fault is None else Grade(0.0, c.fault) for c, grade in zip(part, found, strict=True)
        }
    if grades:
        golds = {c.key: plain(exam.prompts[c.index].answer) for c in waiting}
        results.grade(golds, {c.key: exam.task.extracted(c.text) for c in waiting}, grades)


def plain(answer: Any) -> Any:
    """A reference answer in the form in which it would be read from a file."""
    return json.loads(json.dumps(answer, default=str))


def shown(parts: list, what: str, progress: bool) -> Iterator:
    if not progress or not parts:
        yield from parts
        return
    from tqdm import tqdm

    yield from tqdm(parts, desc=what, unit=f"x{GRADED_TOGETHER}")


def fingerprint(model: nn.Module) -> str:
    """A short hash of the beginning and the end of every parameter, by which the weights can be recognised."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        ends = torch.cat([flat[:64], flat[-64:]]).float().cpu().contiguous()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode() + ends.numpy().tobytes())
    return digest.hexdigest()[:16]
