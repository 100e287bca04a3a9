"""Maths problems that append an answer to every completion; every second answer is right.

They serve to time a training step of a model with random weights: grading does its full work, and not all advantages
are zero.
"""

from sparse_rl.tasks import Grade, Prompt
from sparse_rl.tasks.math import Math


class PlantedMath(Math):
    def grade(self, prompts: list[Prompt], texts: list[str]) -> list[Grade]:
        return super().grade(
            prompts, [text + planted(prompt, i) for i, (prompt, text) in enumerate(zip(prompts, texts))]
        )


def planted(prompt: Prompt, i: int) -> str:
    return rf" \boxed{{{prompt.answer if i % 2 else f'{prompt.answer} + 1'}}}"
