"""countdown: reach a target with + - * / from given numbers, each used exactly once. The solution shows the search.

numbers 3 7 8 2, target 34   ->   ...   answer: (7-3)*8+2
"""

from __future__ import annotations

import ast
from fractions import Fraction

from ..errors import SparseRLError
from .base import GeneratedTask, Prompt, final_answer, register

_OPERATIONS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


@register
class Countdown(GeneratedTask):
    name = "countdown"

    def __init__(self, count: int = 4, highest: int = 20, seed: int = 0, split: str = "train"):
        if count < 2 or highest < 2:
            raise SparseRLError(f"countdown: count {count} and highest {highest} must both be at least 2.")
        super().__init__(seed, split)
        self.count, self.highest = count, highest

    def __getitem__(self, i: int) -> Prompt:
        draw = self.numbers(i)
        numbers = [draw.randint(1, self.highest) for _ in range(self.count)]
        steps, target = _random_path(numbers, draw)
        text = f"numbers {' '.join(map(str, numbers))}, target {target}\n"
        return Prompt(text, answer={"numbers": numbers, "target": target, "steps": steps}, index=i)

    def solution(self, prompt: Prompt) -> str:
        """One line per operation, then the whole expression."""
        lines, parts = [], [(n, str(n)) for n in prompt.answer["numbers"]]
        for a, operation, b in prompt.answer["steps"]:
            (x, left), (y, right) = parts[a], parts[b]
            value = _apply(x, operation, y)
            parts = [part for k, part in enumerate(parts) if k not in (a, b)] + [(value, f"({left}{operation}{right})")]
            lines.append(f"{x}{operation}{y}={value} left {' '.join(str(v) for v, _ in parts)}")
        return "\n".join([*lines, f"answer: {parts[0][1]}"])

    def reward(self, prompt: Prompt, text: str) -> float:
        expression = final_answer(text)
        if expression is None:
            return 0.0
        worth = evaluate(expression)
        if worth is None:
            return 0.0
        value, used = worth
        return float(value == prompt.answer["target"] and sorted(used) == sorted(prompt.answer["numbers"]))


def _apply(x: int, operation: str, y: int) -> int:
    return {"+": x + y, "-": x - y, "*": x * y, "/": x // y if operation == "/" else 0}[operation]


def _random_path(numbers: list[int], draw) -> tuple[list[tuple[int, str, int]], int]:
    """Random operations that use all numbers and stay at whole numbers from 0 to 1000: (index, operation, index) each, and the result."""
    values, steps = list(numbers), []
    while len(values) > 1:
        a, b = draw.sample(range(len(values)), 2)
        x, y = values[a], values[b]
        allowed = ["+"] + ["-"] * (x >= y) + ["*"] * (x * y <= 1000) + ["/"] * (y > 1 and x % y == 0)
        operation = draw.choice(allowed)
        steps.append((a, operation, b))
        values = [v for k, v in enumerate(values) if k not in (a, b)] + [_apply(x, operation, y)]
    return steps, values[0]


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an arithmetic expression and the whole numbers in it; None for anything else."""
    if len(expression) > 200:
        return None
    try:
        tree = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    used: list[int] = []

    def value(node) -> Fraction:
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            left, right = value(node.left), value(node.right)
            if isinstance(node.op, ast.Add):
                return left + right
            if isinstance(node.op, ast.Sub):
                return left - right
            return left * right if isinstance(node.op, ast.Mult) else left / right
        if isinstance(node, ast.Constant) and type(node.value) is int:
            used.append(node.value)
            return Fraction(node.value)
        raise ValueError("not arithmetic")

    try:
        return value(tree), used
    except (ValueError, ZeroDivisionError, RecursionError):
        return None
