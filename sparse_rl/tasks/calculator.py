"""calculator: a running calculation with numbers too large for the head; a tool does one step at a time.

    37*48+912-5=   ->   calc(37*48)         the tool says 1776
                        calc(1776+912)                    2688
                        calc(2688-5)                      2683
                        =2683

Every step acts on the result so far, from left to right. The tool takes two numbers and one operation, so a problem of
n numbers needs n - 1 calls. Each result is needed once, for the next call: it is dead after use.
"""

from __future__ import annotations

import re

from ..errors import SparseRLError, require_int
from .base import GeneratedTask, register
from .conversing import called, said
from .problem import Message, Prompt

_STEP = re.compile(r"(-?\d{1,12})([-+*])(\d{1,12})")


def calc(expression: str) -> str:
    """Calculate with two numbers.

    Args:
        expression: two whole numbers and +, - or * between them, such as 37*48
    """
    found = _STEP.fullmatch(expression.replace(" ", ""))
    if found is None:
        raise ValueError("write two numbers and + - or *")
    a, b = int(found[1]), int(found[3])
    return str(a + b if found[2] == "+" else a - b if found[2] == "-" else a * b)


@register
class Calculator(GeneratedTask):
    name = "calculator"
    tools = (calc,)

    def __init__(
        self,
        count: int = 4,
        highest: int = 99,
        operations: str = "+-*",
        direct: float = 0.0,
        seed: int = 0,
        split: str = "train",
    ):
        """count: numbers of a problem.
        highest: the largest of them.
        operations: those that occur.
        direct: the share of worked solutions that give the result without a call. A small model that learned from such
            ones guesses, and is wrong; that the tool pays is left to reinforcement learning.
        """
        require_int(at_least=2, at_most=100, **{"calculator: count": count})
        require_int(at_least=2, at_most=10**6, **{"calculator: highest": highest})
        if not operations or set(operations) - set("+-*"):
            raise SparseRLError(f"calculator: operations is {operations!r}; use some of + - and *.")
        if not 0 <= direct <= 1:
            raise SparseRLError(f"calculator: direct is {direct}; it must be a share from 0 to 1.")
        super().__init__(seed, split)
        self.count, self.highest, self.operations, self.direct = count, highest, operations, direct

    def __getitem__(self, i: int) -> Prompt:
        draw = self.numbers(i)
        text, result = str(draw.randint(2, self.highest)), 0
        steps = []
        result = int(text)
        for _ in range(self.count - 1):
            # A product of more than two factors would be longer than the tool's numbers.
            operation = draw.choice(self.operations if abs(result) < 10**6 else self.operations.replace("*", "") or "+")
            number = draw.randint(2, self.highest)
            steps.append(f"{operation}{number}")
            result = int(calc(f"{result}{steps[-1]}"))
        worked = draw.random() >= self.direct
        return Prompt(text + "".join(steps) + "=", {"result": result, "steps": [text, *steps], "worked": worked}, i)

    def solution(self, prompt: Prompt) -> list[Message]:
        first, *steps = prompt.answer["steps"]
        messages = []
        for step in steps if prompt.answer["worked"] else ():
            messages += [called("calc", expression=first + step), {"role": "tool", "content": calc(first + step)}]
            first = messages[-1]["content"]
        return [*messages, said(f"={prompt.answer['result']}")]

    def reward(self, prompt: Prompt, text: str) -> float:
        """1 if the last turn is `=` and the right result."""
        return float(self.extracted(text) == str(prompt.answer["result"]))

    def extracted(self, text: str) -> str | None:
        found = re.fullmatch(r"=(-?\d+)", text.strip())
        return found[1] if found else None
