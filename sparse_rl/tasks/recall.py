"""recall: look up the values of some keys among many pairs; the prompt is long, and the answer is short.

A compressor must keep parts of the prompt, and only the question, which comes last, says which. The task was made to
study `prompt-only`.

    Qk58 Bt10 Xm99 ... Wa34
    Xm Qk   ->   Xm99 Qk58
                 answer: 99 58

A pair takes five characters: 200 of them make a prompt of 1,000 tokens for a character-level model.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from ..errors import SparseRLError, require_int
from .base import GeneratedTask, Prompt, final_answer, register

KEYS = [upper + lower for upper in string.ascii_uppercase for lower in string.ascii_lowercase]


@register
class Recall(GeneratedTask):
    name = "recall"

    def __init__(
        self, count: int | Sequence[int] = 200, queries: int = 4, filler: int = 0, seed: int = 0, split: str = "train"
    ):
        """count: pairs, or the least and the most of them. Then each doubling of the count is equally likely, because
            short prompts teach what long ones need.
        queries: keys that are asked for.
        filler: dots after the question, which push it out of the window that a compressor observes.
        """
        least, most = (count, count) if isinstance(count, int) else count
        counts = {"least count": least, "most count": most, "queries": queries, "filler": filler}
        require_int(at_least=0, at_most=100_000, **{f"recall: {name}": value for name, value in counts.items()})
        if not 1 <= queries <= least <= most <= len(KEYS):
            raise SparseRLError(
                f"recall: {queries} queries among {least} to {most} pairs; use at least 1 query, at least as many "
                f"pairs, and at most {len(KEYS)} pairs, one for each key."
            )
        super().__init__(seed, split)
        self.least, self.most, self.queries, self.filler = least, most, queries, filler

    def __getitem__(self, i: int) -> Prompt:
        draw = self.numbers(i)
        count = round(self.least * (self.most / self.least) ** draw.random())
        pairs = {key: f"{draw.randrange(100):02}" for key in draw.sample(KEYS, count)}
        asked = draw.sample(list(pairs), self.queries)
        listed = " ".join(key + value for key, value in pairs.items())
        text = f"{listed}\n{' '.join(asked)}\n" + "." * self.filler
        return Prompt(text, answer={key: pairs[key] for key in asked}, index=i)

    def solution(self, prompt: Prompt) -> str:
        """The pairs that are asked for, then their values."""
        pairs = " ".join(key + value for key, value in prompt.answer.items())
        return f"{pairs}\nanswer: {' '.join(prompt.answer.values())}"

    def reward(self, prompt: Prompt, text: str) -> float:
        answer = final_answer(text)
        return float(answer is not None and answer.split() == list(prompt.answer.values()))
