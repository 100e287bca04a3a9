"""recall: look up the values of some keys among many pairs; the prompt is long, and the answer is short.

A compressor must keep parts of the prompt, and only the question, which comes last, says which. The task was made to
study `prompt-only`.

    Qk58 Bt10 Xm99 ... Wa34
    Xm Qk   ->   Xm99 Qk58
                 answer: 99 58

A pair takes five characters: 200 of them make a prompt of 1,000 tokens for a character-level model. Keys of three
letters (`letters: 3`) make it longer: 1,400 pairs are 8,400 tokens, 17,000 pairs 102,000. `depth` says where in the
list the pairs lie that are asked for, and so how far from the question; `lookalikes` are pairs whose keys differ from
an asked one by a letter.
"""

from __future__ import annotations

import itertools
import math
import random
import string
from collections.abc import Sequence
from functools import lru_cache

from ..errors import SparseRLError, require_int
from .base import GeneratedTask, final_answer, register
from .problem import Prompt


@lru_cache(maxsize=2)
def keys_of(letters: int) -> list[str]:
    """All keys: a capital letter and small ones."""
    rest = itertools.product(string.ascii_lowercase, repeat=letters - 1)
    return [upper + "".join(lower) for upper, lower in itertools.product(string.ascii_uppercase, [*rest])]


@register
class Recall(GeneratedTask):
    name = "recall"

    def __init__(
        self,
        count: int | Sequence[int] = 200,
        queries: int = 4,
        filler: int = 0,
        letters: int = 2,
        depth: Sequence[float] = (0.0, 1.0),
        lookalikes: int = 0,
        seed: int = 0,
        split: str = "train",
    ):
        """count: pairs, or the least and the most of them. Then each doubling of the count is equally likely, because
            short prompts teach what long ones need.
        queries: keys that are asked for.
        filler: dots after the question, which push it out of the window that a compressor observes.
        letters: of a key, 2 or 3.
        depth: the part of the list in which the asked pairs lie; [0, 0.25]: its first quarter, far from the question.
        lookalikes: pairs whose keys differ from an asked one by a letter, for each key that is asked for.
        """
        least, most = (count, count) if isinstance(count, int) else count
        counts = {"least count": least, "most count": most, "queries": queries, "filler": filler}
        counts |= {"lookalikes": lookalikes}
        require_int(at_least=0, at_most=100_000, **{f"recall: {name}": value for name, value in counts.items()})
        if letters not in (2, 3):
            raise SparseRLError(f"recall: letters is {letters!r}; it must be 2 or 3, the number of letters in a key.")
        self.keys = keys_of(letters)
        if not 1 <= queries <= least <= most <= len(self.keys):
            more = ", or keys of 3 letters (letters: 3)" if letters == 2 else ""
            raise SparseRLError(
                f"recall: {queries} queries among {least} to {most} pairs; use at least 1 query, at least as many "
                f"pairs, and at most {len(self.keys)} pairs, one for each key{more}."
            )
        first, last = depth
        if not 0 <= first < last <= 1:
            raise SparseRLError(f"recall: depth is {list(depth)}; it must be a part of the list, such as [0, 0.25].")
        super().__init__(seed, split)
        self.least, self.most, self.queries, self.filler = least, most, queries, filler
        self.depth, self.lookalikes = (first, last), lookalikes
        if len(self._places(least)) < queries or queries * (1 + lookalikes) > least:
            raise SparseRLError(
                f"recall: only {len(self._places(least))} of {least} pairs lie at depth {list(depth)}, but {queries} "
                f"are asked for, with {lookalikes} lookalikes each; use more pairs, or a wider depth."
            )

    def _places(self, count: int) -> range:
        """Where in a list of `count` pairs the asked ones may lie."""
        return range(math.floor(self.depth[0] * count), math.ceil(self.depth[1] * count))

    def __getitem__(self, i: int) -> Prompt:
        draw = self.numbers(i)
        count = round(self.least * (self.most / self.least) ** draw.random())
        pairs = {key: f"{draw.randrange(100):02}" for key in draw.sample(self.keys, count)}
        places = self._places(count)
        asked = draw.sample(list(pairs)[places.start : places.stop], self.queries)
        if self.lookalikes:
            pairs = with_lookalikes(pairs, asked, self.lookalikes, draw)
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


def with_lookalikes(pairs: dict[str, str], asked: Sequence[str], each: int, draw: random.Random) -> dict[str, str]:
    """The pairs, of which some that are not asked for get keys that differ from an asked one by its last letter or,
    where all of these are taken, by its first.
    """
    taken, replaced = set(pairs), {}
    others = draw.sample([key for key in pairs if key not in asked], each * len(asked))
    for i, other in enumerate(others):
        key = asked[i // each]
        last = [key[:-1] + letter for letter in draw.sample(string.ascii_lowercase, 26)]
        first = [letter + key[1:] for letter in draw.sample(string.ascii_uppercase, 26)]
        replaced[other] = next((like for like in (*last, *first) if like not in taken), other)
        taken.add(replaced[other])
    return {replaced.get(key, key): value for key, value in pairs.items()}
