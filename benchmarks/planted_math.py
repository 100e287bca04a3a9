"""Maths problems that append an answer to every completion; every second answer is right.

They serve to time a training step of a model with random weights: grading does its full work, and not all advantages
are zero. `characters` cuts prompts of plain text.
"""

import dataclasses
from typing import Any

from sparse_rl.tasks import Grade, Prompt
from sparse_rl.tasks.math import Math


class PlantedMath(Math):
    def __init__(self, files: str, characters: int | None = None, **options: Any):
        super().__init__(files, **options)
        self.characters = characters

    def __getitem__(self, i: int) -> Prompt:
        prompt = super().__getitem__(i)
        return prompt if self.characters is None else dataclasses.replace(prompt, text=prompt.text[: self.characters])

    def grade(self, prompts: list[Prompt], texts: list[str]) -> list[Grade]:
        return super().grade(
            prompts, [text + planted(prompt, i) for i, (prompt, text) in enumerate(zip(prompts, texts))]
        )


def planted(prompt: Prompt, i: int) -> str:
    return rf" \boxed{{{prompt.answer if i % 2 else f'{prompt.answer} + 1'}}}"
