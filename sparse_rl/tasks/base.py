"""A task gives prompts and says what a completion is worth. Two methods make one; the rest follows.

    class Task:
        def __getitem__(self, i: int) -> Prompt: ...             # the i-th prompt, the same every time
        def reward(self, prompt: Prompt, text: str) -> float: ...

Generated tasks make prompt i from (seed, split, i) alone: nothing is stored, any position can be resumed, and held-out prompts come
from a split of their own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from ..errors import SparseRLError, nearest
from ..records import Prompt

TASKS: dict[str, type[Task]] = {}


class Task:
    name: str = ""

    def __getitem__(self, i: int) -> Prompt:
        raise NotImplementedError

    def reward(self, prompt: Prompt, text: str) -> float:
        raise NotImplementedError

    def solution(self, prompt: Prompt) -> str:
        """A worked solution that earns the full reward, for warm-up."""
        raise SparseRLError(f"the task {self.name} has no worked solutions, so a model cannot be warmed up on it.")

    def sample(self, start: int, count: int) -> list[Prompt]:
        """`count` prompts from position `start` on."""
        return [self[i] for i in range(start, start + count)]

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[float]:
        return [self.reward(prompt, text) for prompt, text in zip(prompts, texts, strict=True)]


class GeneratedTask(Task):
    """Prompts made from random numbers, without end."""

    def __init__(self, seed: int = 0, split: str = "train"):
        self.seed, self.split = seed, split

    def numbers(self, i: int) -> random.Random:
        """The random numbers of prompt i, the same in every process."""
        return random.Random(f"{self.name}|{self.seed}|{self.split}|{i}")


def final_answer(text: str) -> str | None:
    """What the last line of the form `answer: ...` says, without surrounding blanks; None where there is none."""
    found = re.findall(r"answer:[ \t]*(\S[^\n]*)", text)
    return found[-1].strip() if found else None


def register(cls: type[Task]) -> type[Task]:
    TASKS[cls.name] = cls
    return cls


def make(name: str, **options) -> Task:
    if name not in TASKS:
        raise SparseRLError(f"there is no task {name!r}; {nearest(name, TASKS)}")
    return TASKS[name](**options)
