"""sums: add up a row of digits, one running sum at a time. The built-in tiny model learns this task.

3+4+1=   ->   3+4=7;7+1=8
"""

from __future__ import annotations

import re

from ..errors import SparseRLError, check_count
from .base import GeneratedTask, register
from .problem import Prompt


@register
class Sums(GeneratedTask):
    name = "sums"

    def __init__(self, count: int = 8, seed: int = 0, split: str = "train"):
        if count < 2:
            raise SparseRLError(f"sums: count is {count}; it must be at least 2.")
        check_count("numbers of a sum", count, 100_000)
        super().__init__(seed, split)
        self.count = count

    def __getitem__(self, i: int) -> Prompt:
        draw = self.numbers(i)
        numbers = [draw.randint(1, 9) for _ in range(self.count)]
        return Prompt("+".join(map(str, numbers)) + "=", answer=numbers, index=i)

    def solution(self, prompt: Prompt) -> str:
        steps, total = [], prompt.answer[0]
        for number in prompt.answer[1:]:
            steps.append(f"{total}+{number}={total + number}")
            total += number
        return ";".join(steps)

    def reward(self, prompt: Prompt, text: str) -> float:
        """1 if the text ends in `=` and the right sum."""
        found = self.extracted(text)
        return float(found is not None and int(found) == sum(prompt.answer) and not found.startswith("0"))

    def extracted(self, text: str) -> str | None:
        found = re.search(r"=(\d+)\Z", text)
        return found[1] if found else None
