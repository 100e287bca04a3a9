"""gym:NAME: a dataset of reasoning-gym. It takes the dataset's own options, and the dataset scores the answers.

Most datasets make prompt i of seed s from s + i, so neighbouring seeds give the same prompts shifted by one. Here every
(seed, split) owns a block of a million seeds, so held-out prompts and training prompts are made from different seeds.
`size` makes the task finite; otherwise it is endless.

Some datasets draw from a small stock of puzzles; the same puzzle may then be in both splits.
"""

from __future__ import annotations

from dataclasses import fields
from functools import lru_cache
from typing import Any

from ..errors import SparseRLError, nearest, require_int
from .base import Task, final_answer
from .judging import graded
from .problem import Grade, Prompt

BLOCK = 2**20  # seeds, and therefore prompts, of one (seed, split)
CHUNK = 500  # prompts of an endless task that one dataset object makes


class Gym(Task):
    isolated = True

    def __init__(self, dataset: str, /, seed: int = 0, split: str = "train", size: int | None = None, **config):
        require_int(0, seed=seed)
        if size is not None:
            require_int(size=size)
        if split not in ("train", "held-out"):
            raise SparseRLError(f"gym: split is {split!r}; it must be 'train' or 'held-out'.")
        self.name, self.dataset, self.seed, self.size, self.config = f"gym:{dataset}", dataset, seed, size, config
        self._first_seed = (2 * seed + (split == "held-out")) * BLOCK
        self._chunks = lru_cache(maxsize=2)(self._chunk)
        self._chunks(0)  # reports mistakes at once

    def __getitem__(self, i: int) -> Prompt:
        chunk, place = divmod(i % BLOCK, self.size or CHUNK)
        entry = self._chunks(chunk)[place]
        return Prompt(
            f"{entry['question']}\n\nWrite your answer in a last line of the form\nanswer: ...\n", answer=entry, index=i
        )

    def span(self) -> tuple[int, int | None]:
        return 0, self.size

    def judge(self, prompt: Prompt, text: str) -> Grade:
        answer = answer_in(text, str(prompt.answer["answer"]))
        if answer is None:
            return Grade(0.0, "no answer")
        return graded(self, self._chunks(0).score_answer(answer, prompt.answer))

    def _chunk(self, number: int) -> Any:
        datasets = _datasets()
        if self.dataset not in datasets:
            raise SparseRLError(
                f"reasoning-gym has no dataset {self.dataset!r}; {nearest(self.dataset, sorted(datasets))}"
            )
        known = [field.name for field in fields(datasets[self.dataset][1])]
        for option in self.config:
            if option not in known:
                raise SparseRLError(f"the task {self.name} has no option {option!r}; {nearest(option, known)}")
        size = self.size or CHUNK
        settings = {"seed": self._first_seed + number * size, "size": size, **self.config}
        try:
            return _create(self.dataset, settings)
        except (AssertionError, ValueError, TypeError) as error:  # datasets refuse options with any of these
            raise SparseRLError(f"reasoning-gym refuses the options of {self.name} ({error}); correct them.") from error


def answer_in(text: str, gold: str) -> str | None:
    """The text after the last `answer:`: its line, or everything if the dataset's own answer has several lines."""
    if "\n" not in gold.strip():
        return final_answer(text)
    _, marker, rest = text.rpartition("answer:")
    return rest.strip() or None if marker else None


def _datasets() -> dict:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise SparseRLError(f"tasks named gym:... need reasoning-gym ({error}); pip install reasoning-gym.") from error
    return DATASETS


def _create(name: str, settings: dict) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, **settings)
