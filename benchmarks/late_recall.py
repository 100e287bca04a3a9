"""A task for benchmarks/compressors.py: one of some early facts is asked for after a long count.

    python -m sparse_rl warmup benchmarks/late_recall.yaml --out models/late-recall
    python benchmarks/compressors.py --out runs/late-recall --model models/late-recall \\
        --task benchmarks/late_recall.py:LateRecall --options '{"notes": "own"}' --budgets 24 32 40 48 --new 96

    prompt                response
    k47 b12 x93 e05;12:   12 11 10 09 08 07 06 05 04 03 02 01 00 x93      notes: told
    ?;12:                 k47 b12 x93 e05;12 11 10 09 ... 01 00 x93       notes: own

The prompt gives the notes, or the model writes some of its own. It counts down to 00, says which letter it asks for,
and must give that letter's number. Which note is asked for nobody knows until then: the model draws the letter, as it
draws its own notes. Counting needs the last few tokens alone, so a compressor that looks at recent queries sees no
reason to keep the notes. Notes that are told survive where the prompt is kept; a model's own do not.
"""

import random
import re
import string

from sparse_rl.errors import SparseRLError
from sparse_rl.tasks import GeneratedTask, Prompt

KINDS = ("told", "own", "both")


class LateRecall(GeneratedTask):
    name = "late-recall"

    def __init__(
        self, notes: str = "both", facts: int = 4, count: tuple[int, int] = (14, 22), seed: int = 0, split="train"
    ):
        """notes: who writes them, the prompt (told) or the model (own); both: every second prompt each
        count: the least and the most that it counts down from
        """
        if notes not in KINDS:
            raise SparseRLError(f"late-recall: notes is {notes!r}; it must be one of {', '.join(KINDS)}.")
        super().__init__(seed, split)
        self.notes, self.facts, self.count = notes, facts, tuple(count)

    def __getitem__(self, i: int) -> Prompt:
        draw = self.numbers(i)
        notes, first = written(draw, self.facts), draw.randint(*self.count)
        told = self.notes == "told" or (self.notes == "both" and i % 2 == 0)
        return Prompt(f"{notes if told else '?'};{first:02}:", [notes if told else "", first], index=i)

    def solution(self, prompt: Prompt) -> str:
        notes, first = prompt.answer
        draw = self.numbers(prompt.index)
        own = written(draw, self.facts)
        asked = draw.choice((notes or own).split(" "))
        return f"{'' if notes else own + ';'}{counted(first)} {asked}"

    def reward(self, prompt: Prompt, text: str) -> float:
        """1 if the count is right and the note that is given at the end is one of those at the beginning."""
        notes, first = prompt.answer
        if not notes:
            notes, _, text = text.partition(";")
        form = re.fullmatch(rf"{counted(first)} ([a-z]\d\d)", text)
        own = notes.split(" ")
        letters = {note[:1] for note in own if re.fullmatch(r"[a-z]\d\d", note)}
        return float(form is not None and len(own) == len(letters) == self.facts and form[1] in own)


def written(draw: random.Random, facts: int) -> str:
    """Notes: different letters, each with a number."""
    return " ".join(f"{letter}{draw.randrange(100):02}" for letter in draw.sample(string.ascii_lowercase, facts))


def counted(first: int) -> str:
    return " ".join(f"{number:02}" for number in range(first, -1, -1))
