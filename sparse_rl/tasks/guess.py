"""guess: find a hidden number by asking; every guess is answered by `higher` or `lower`.

    number from 1 to 100   ->   50     higher
                                75     lower
                                62     right

The task answers by itself, without tools: a short example of `reply`.
"""

from __future__ import annotations

import math
import re

from ..errors import require_int
from .base import GeneratedTask, register
from .conversing import said
from .problem import Message, Prompt


@register
class Guess(GeneratedTask):
    name = "guess"

    def __init__(self, highest: int = 100, guesses: int | None = None, seed: int = 0, split: str = "train"):
        """highest: the number is from 1 to this.
        guesses: how many are allowed; None: as many as halving needs.
        """
        require_int(at_least=2, at_most=10**9, **{"guess: highest": highest})
        self.guesses = math.ceil(math.log2(highest + 1)) if guesses is None else guesses
        require_int(**{"guess: guesses": self.guesses})
        super().__init__(seed, split)
        self.highest = highest

    def __getitem__(self, i: int) -> Prompt:
        number = self.numbers(i).randint(1, self.highest)
        return Prompt(f"number from 1 to {self.highest}\n", number, index=i)

    def reply(self, prompt: Prompt, messages: list[Message]) -> list[Message] | None:
        guesses = self.transcript(messages).split("\n")
        guess = self.extracted(guesses[-1])
        if guess is None or int(guess) == prompt.answer or len(guesses) >= self.guesses:
            return None
        return [{"role": "user", "content": "higher" if int(guess) < prompt.answer else "lower"}]

    def transcript(self, messages: list[Message]) -> str:
        """All guesses, a line each."""
        return "\n".join(m["content"].replace("\n", " ") for m in messages if m["role"] == "assistant")

    def solution(self, prompt: Prompt) -> list[Message]:
        low, high, messages = 1, self.highest, []
        while (guess := (low + high) // 2) != prompt.answer:
            low, high = (guess + 1, high) if guess < prompt.answer else (low, guess - 1)
            messages += [said(str(guess)), *(self.reply(prompt, [said(str(guess))]) or ())]
        return [*messages, said(str(guess))]

    def reward(self, prompt: Prompt, text: str) -> float:
        """1 if the last guess is right, and no more were needed than are allowed."""
        guesses = text.split("\n")
        return float(self.extracted(guesses[-1]) == str(prompt.answer) and len(guesses) <= self.guesses)

    def extracted(self, text: str) -> str | None:
        found = re.fullmatch(r"\D{0,40}([1-9]\d{0,9})\D{0,40}", text.strip())
        return found[1] if found else None
