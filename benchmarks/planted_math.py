"""Maths problems whose completions get an answer planted at the end, right or wrong by a coin that their text decides.

For measuring a training step of a model with random weights: grading does its full work, and advantages are not all zero.
"""

import zlib

from sparse_rl.tasks import Grade, Prompt
from sparse_rl.tasks.math import Math


class PlantedMath(Math):
    def grade(self, prompts: list[Prompt], texts: list[str]) -> list[Grade]:
        return super().grade(prompts, [text + planted(prompt, text) for prompt, text in zip(prompts, texts)])


def planted(prompt: Prompt, text: str) -> str:
    answer = prompt.answer if zlib.crc32(text.encode()) % 2 else f"{prompt.answer} + 1"
    return rf" \boxed{{{answer}}}"
