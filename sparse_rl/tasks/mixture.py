"""mixture: several tasks in one run, each with its share of the prompts.

    task: {name: mixture, tasks: [{name: sums, count: 8, weight: 2}, {name: countdown}]}

Which task a position has is known without having visited the positions before it: of every 1,000 positions each task
has its share exactly, rounded to a thousandth, and its n-th prompt lies at a random place of the n-th of as many equal
parts. So nearly every step has nearly the shares of the whole, in an order that does not repeat itself.
"""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import SparseRLError, check_count, shown
from .base import Task, make, register, takes_option
from .problem import Grade, Message, Prompt

BLOCK = 1000  # positions of which each task has exactly its share
_MOST = 100  # tasks of a mixture
_HEAVIEST = 1e300  # so that the sum of all weights is finite
_OURS = ("name", "label", "weight")  # keys of an entry that are not options of its task
_EXAMPLE = "{name: sums, weight: 2}"


@register
class Mixture(Task):
    name = "mixture"

    def __init__(self, tasks: Sequence[str | Mapping[str, Any]], seed: int = 0):
        """tasks: a name, or {name: ..., weight: 1, label: ...} with the task's own options beside them.
        seed: of the order, and of every task that has a seed and is given none.
        """
        entries = [_entry(number, given) for number, given in enumerate(_listed(tasks), 1)]
        self.labels = [entry["label"] for entry in entries]
        if twice := [label for i, label in enumerate(self.labels) if label in self.labels[:i]]:
            raise SparseRLError(
                f"mixture: two tasks are called {twice[0]!r}; give each a label of its own, such as label: "
                f"{twice[0][:38]}-2."
            )
        if not isinstance(seed, int) or isinstance(seed, bool):
            raise SparseRLError(f"mixture: seed is {shown(seed)}; it must be a whole number.")
        self.seed, self.shares = seed, shares_of([entry["weight"] for entry in entries])
        self.options = [_options(entry, seed) for entry in entries]  # of each task
        names = [entry["name"] for entry in entries]
        self._take([make(name, **options) for name, options in zip(names, self.options, strict=True)])

    def _take(self, tasks: list[Task]) -> None:
        self.tasks = tasks
        self.skipped = {
            f"{label}: {why}": count
            for label, task in zip(self.labels, tasks, strict=True)
            for why, count in task.skipped.items()
        }
        templates = {task.template for task in tasks}
        self.template = templates.pop() if len(templates) == 1 else None  # they differ

    @property
    def members(self) -> list[Task]:
        return self.tasks

    def of(self, prompt: Prompt) -> Task:
        return self.tasks[self.labels.index(prompt.task)]

    def __getitem__(self, i: int) -> Prompt:
        block, k = divmod(i, BLOCK)
        which, turn = order_of(self.seed, tuple(self.shares), block)[k]
        prompt = self.tasks[which].sample(block * self.shares[which] + turn, 1)[0]
        return replace(prompt, task=self.labels[which])

    def positions_of_all(self, start: int) -> int:
        """Enough blocks that every task has gone through its prompts from wherever it is at `start`."""
        sizes = [task.num_prompts or 0 for task in self.tasks]
        blocks = max(2 + math.ceil(size / share) for size, share in zip(sizes, self.shares)) if any(sizes) else 0
        return blocks * BLOCK

    def sample(self, start: int, count: int) -> list[Prompt]:
        check_count("prompts", count)
        return [self[position] for position in range(start, start + count)]

    def held_out(self) -> Task:
        other = copy.copy(self)
        other._take([task.held_out() for task in self.tasks])
        return other

    def reward(self, prompt: Prompt, text: str) -> float | Mapping[str, float]:
        return self.of(prompt).reward(prompt, text)

    def judge(self, prompt: Prompt, text: str) -> Grade:
        return self.of(prompt).judge(prompt, text)

    def solution(self, prompt: Prompt) -> str | list[Message]:
        return self.of(prompt).solution(prompt)

    def reply(self, prompt: Prompt, messages: list[Message]) -> Any:
        return self.of(prompt).reply(prompt, messages)

    @property
    def converses(self) -> bool:
        return any(task.converses for task in self.tasks)

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Grade]:
        """Each task grades its own completions, in its own processes if it has some."""
        pairs = list(zip(prompts, texts, strict=True))
        found: dict[int, Grade] = {}
        for label, task in zip(self.labels, self.tasks, strict=True):
            rows = [row for row, (prompt, _) in enumerate(pairs) if prompt.task == label]
            if rows:
                found |= zip(rows, task.grade([pairs[row][0] for row in rows], [pairs[row][1] for row in rows]))
                self.last_error = self.last_error or task.last_error
        return [found[row] for row in range(len(pairs))]

    def start_grading(self, completions: int) -> None:
        for task in self.tasks:
            task.start_grading(completions)

    def close(self) -> None:
        for task in self.tasks:
            task.close()


def by_task(prompts: Sequence[Prompt], grades: Sequence[Grade]) -> dict[str, list[Grade]]:
    """The grades of every task of a mixture, by its label; nothing where prompts are of one task."""
    found: dict[str, list[Grade]] = {}
    for prompt, grade in zip(prompts, grades, strict=True):
        if prompt.task:
            found.setdefault(prompt.task, []).append(grade)
    return dict(sorted(found.items()))


def mean_parts(grades: Sequence[Grade]) -> dict[str, float]:
    """The mean of every named reward. A completion without it, such as one that could not be graded, counts as 0."""
    names = sorted({name for grade in grades for name in grade.parts})
    return {name: math.fsum(grade.parts.get(name, 0.0) for grade in grades) / len(grades) for name in names}


@lru_cache(maxsize=8)
def order_of(seed: int, shares: tuple[int, ...], block: int) -> list[tuple[int, int]]:
    """(task, how many of its prompts come before it in this block) of every position of a block."""
    places = []
    for which, share in enumerate(shares):
        draw = random.Random(f"mixture|{seed}|{block}|{which}")
        places += [((turn + draw.random()) / share, which, turn) for turn in range(share)]
    return [(which, turn) for _, which, turn in sorted(places)]


def shares_of(weights: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to the weights, with the sum BLOCK: rounded down, then up where most is missing."""
    total = math.fsum(weights)
    exact = [weight / total * BLOCK for weight in weights]
    found = [max(1, math.floor(share)) for share in exact]
    while sum(found) < BLOCK:
        found[max(range(len(found)), key=lambda i: exact[i] - found[i])] += 1
    while sum(found) > BLOCK:  # tiny weights were rounded up to 1
        found[max(range(len(found)), key=lambda i: found[i] - exact[i] if found[i] > 1 else -math.inf)] -= 1
    return found


def _listed(tasks: Any) -> Sequence:
    if not isinstance(tasks, (list, tuple)) or not 1 <= len(tasks) <= _MOST:
        given = f"{len(tasks)} tasks" if isinstance(tasks, (list, tuple)) else shown(tasks)
        raise SparseRLError(f"mixture: tasks is {given}; list 1 to {_MOST} tasks, such as [{_EXAMPLE}, countdown].")
    return tasks


def _entry(number: int, given: Any) -> dict[str, Any]:
    """An entry with its name, weight and label."""
    entry = {"name": given} if isinstance(given, str) else given
    where = f"mixture: task {number}"
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise SparseRLError(f"{where} is {shown(given)}; give a name, or keys such as {_EXAMPLE}.")
    if entry["name"] == Mixture.name:
        raise SparseRLError(f"{where} is a mixture itself; list its tasks here instead.")
    weight = entry.get("weight", 1)
    if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not 0 < weight <= _HEAVIEST:
        raise SparseRLError(
            f"{where} ({shown(entry['name'])}) has the weight {shown(weight)}; use a number above 0, such as 2."
        )
    label = entry.get("label", _label(entry["name"]))
    if not isinstance(label, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,40}", label):
        raise SparseRLError(
            f"{where} is called {shown(label)}; a label is made of letters, digits, - . and _, at most 40 of them."
        )
    return {**entry, "weight": weight, "label": label}


def _label(name: str) -> str:
    """folder/my_task.py:Class -> my_task-Class"""
    file = Path(name).name.replace(".py", "", 1) if ".py" in name else name
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", file)[:40]


def _options(entry: Mapping[str, Any], seed: int) -> dict[str, Any]:
    options = {key: value for key, value in entry.items() if key not in _OURS}
    if "seed" not in options and takes_option(entry["name"], "seed"):
        options["seed"] = seed
    return options
