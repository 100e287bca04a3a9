"""linsys: solve a system of linear equations whose solution is whole, by elimination shown line by line.

2x+y=7; x-y=-1   ->   ...   answer: x=2 y=3
"""

from __future__ import annotations

import re
from fractions import Fraction

from ..errors import SparseRLError
from .base import GeneratedTask, final_answer, register
from .problem import Prompt

_NAMES = "xyzuvw"


@register
class LinSys(GeneratedTask):
    name = "linsys"

    def __init__(self, unknowns: int = 2, highest: int = 5, seed: int = 0, split: str = "train"):
        if not 2 <= unknowns <= len(_NAMES) or highest < 1:
            raise SparseRLError(
                f"linsys: unknowns {unknowns} must be 2 to {len(_NAMES)}, and highest {highest} at least 1."
            )
        super().__init__(seed, split)
        self.unknowns, self.highest = unknowns, highest

    def __getitem__(self, i: int) -> Prompt:
        draw = self.numbers(i)
        values = [draw.randint(-self.highest, self.highest) for _ in range(self.unknowns)]
        while True:
            rows = [[draw.randint(-self.highest, self.highest) for _ in values] for _ in values]
            rows = [[*row, sum(a * v for a, v in zip(row, values, strict=True))] for row in rows]
            if _eliminate(rows) is not None:
                break
        return Prompt("; ".join(map(_equation, rows)) + "\n", answer={"values": values, "rows": rows}, index=i)

    def solution(self, prompt: Prompt) -> str:
        lines = _eliminate(prompt.answer["rows"])
        assert lines is not None, "a prompt's system has a single solution"
        answer = " ".join(f"{name}={value}" for name, value in zip(_NAMES, prompt.answer["values"], strict=False))
        return "\n".join([*lines, f"answer: {answer}"])

    def reward(self, prompt: Prompt, text: str) -> float:
        answer = final_answer(text)
        if answer is None:
            return 0.0
        found = re.findall(r"([a-z])=(-?\d+)(?=\s|\Z)", answer)
        expected = dict(zip(_NAMES, prompt.answer["values"], strict=False))
        read = " ".join(f"{name}={value}" for name, value in found)
        wellformed = len(found) == len(expected) and read == " ".join(answer.split())
        return float(wellformed and {name: int(value) for name, value in found} == expected)


def _equation(row: list) -> str:
    """[2, 1, 7] -> 2x+y=7"""
    terms = ""
    for coefficient, name in zip(row[:-1], _NAMES, strict=False):
        if coefficient:
            sign = "-" if coefficient < 0 else "+" if terms else ""
            size = "" if abs(coefficient) == 1 else str(abs(coefficient))
            terms += f"{sign}{size}{name}"
    return f"{terms or '0'}={row[-1]}"


def _eliminate(rows: list[list[int]]) -> list[str] | None:
    """Whole-number elimination, one equation per line; None if the system has no single solution."""
    rows, lines, n = [list(row) for row in rows], [], len(rows)
    for column in range(n):
        pivot = next((r for r in range(column, n) if rows[r][column]), None)
        if pivot is None:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for r in range(n):
            if r != column and rows[r][column]:
                a, b = rows[column][column], rows[r][column]
                rows[r] = [a * x - b * y for x, y in zip(rows[r], rows[column], strict=True)]
                lines.append(_equation(rows[r]))
    for column in range(n):
        lines.append(f"{_NAMES[column]}={Fraction(rows[column][-1], rows[column][column])}")
    return lines
