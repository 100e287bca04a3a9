"""A task for benchmarks/compressors.py: one early fact is asked for late.

    python -m sparse_rl warmup benchmarks/late_recall.yaml --out models/late-recall
    python benchmarks/compressors.py --out runs/late-recall --model models/late-recall \\
        --task benchmarks/late_recall.py:LateRecall --options '{"fact": "own"}' --budgets 16 24 32

    prompt    response
    12 47:    12 11 10 09 08 07 06 05 04 03 02 01 00 47         fact: told
    12 ??:    47;12 11 10 09 08 07 06 05 04 03 02 01 00 47      fact: own

The fact is a number: the prompt gives it, or the model writes one of its own. Then it counts down to 00, and must say
the number again. Counting needs a few recent tokens alone, so a compressor that looks at recent queries sees no reason
to keep what will be asked for. A number of its own is in the response, which `protect_prompt` does not keep.
"""

import random
import re

from sparse_rl.errors import SparseRLError
from sparse_rl.tasks import GeneratedTask, Prompt

KINDS = ("told", "own", "both")


class LateRecall(GeneratedTask):
    name = "late-recall"

    def __init__(self, fact: str = "both", count=(14, 22), seed: int = 0, split: str = "train"):
        """fact: who writes it, the prompt (told) or the model (own); both: every second prompt each
        count: the least and the most that it counts down from
        """
        if fact not in KINDS:
            raise SparseRLError(f"late-recall: fact is {fact!r}; it must be one of {', '.join(KINDS)}.")
        super().__init__(seed, split)
        self.fact, self.count = fact, count

    def __getitem__(self, i: int) -> Prompt:
        draw = self.numbers(i)
        first, number = draw.randint(*self.count), f"{draw.randrange(100):02}"
        told = self.fact == "told" or (self.fact == "both" and i % 2 == 0)
        return Prompt(f"{first:02} {number if told else '??'}:", answer=[number if told else None, first], index=i)

    def solution(self, prompt: Prompt) -> str:
        told, first = prompt.answer
        own = f"{random.Random(f'{self.split} {self.seed} {prompt.index}').randrange(100):02}"
        return f"{counted(first)} {told}" if told else f"{own};{counted(first)} {own}"

    def reward(self, prompt: Prompt, text: str) -> float:
        """1 if the count is right, and the number at the end is that at the beginning."""
        told, first = prompt.answer
        own = "" if told else r"(\d\d);"
        form = re.fullmatch(rf"{own}{counted(first)} (\d\d)", text)
        return float(form is not None and form[form.re.groups] == (told or form[1]))


def counted(first: int) -> str:
    return " ".join(f"{number:02}" for number in range(first, -1, -1))
