"""countdown: reach a target with + - * / from given numbers, using each exactly once.

    numbers 3 7 8 2, target 34   ->   ...   answer: (7-3)*8+2

By default a worked solution is one path to the target. With `search: 640` it is a depth-first search in a fixed order,
dead ends included, of at most 640 characters:

    numbers  4  9  2, target   10
    9+4=13 left 2 13
    13+2=15 no
    13-2=11 no
    13*2=26 no
    9-4=5 left 2 5
    5+2=7 no
    5-2=3 no
    5*2=10 yes
    answer: ((9-4)*2)
"""

from __future__ import annotations

import ast
import functools
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from ..errors import SparseRLError, require_int
from .base import GeneratedTask, final_answer, register
from .problem import Prompt

_OPERATIONS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_DRAWS = 1000  # problems that are drawn before a limit counts as too small
_TIMES_TABLE = 20  # a search multiplies numbers up to this, so that a small model can learn all products

Part = tuple[int, str]  # a number, and the expression that made it


@register
class Countdown(GeneratedTask):
    name = "countdown"

    def __init__(self, count: int = 4, highest: int = 20, search: int = 0, seed: int = 0, split: str = "train"):
        require_int(at_least=2, at_most=1000, **{"countdown: count": count})
        require_int(at_least=2, **{"countdown: highest": highest})
        require_int(at_least=0, **{"countdown: search": search})
        super().__init__(seed, split)
        self.count, self.highest, self.search = count, highest, search

    def __getitem__(self, i: int) -> Prompt:
        draw = self.numbers(i)
        return self._searched(draw, i) if self.search else self._walked(draw, i)

    def _walked(self, draw, i: int) -> Prompt:
        numbers = [draw.randint(1, self.highest) for _ in range(self.count)]
        steps, target = _random_path(numbers, draw)
        text = f"numbers {' '.join(map(str, numbers))}, target {target}\n"
        return Prompt(text, answer={"numbers": numbers, "target": target, "steps": steps}, index=i)

    def _searched(self, draw, i: int) -> Prompt:
        """A target that the search finds. The training split never has the numbers of a held-out problem."""
        for _ in range(_DRAWS):
            numbers = [draw.randint(1, self.highest) for _ in range(self.count)]
            if is_held_out(numbers) != (self.split == "held-out"):
                continue
            results = list(dict.fromkeys(parts[0][0] for _, parts in searched(numbers) if len(parts) == 1))
            target = results[max(draw.choices(range(len(results)), k=3))]  # the one of three that is found last
            if len(search(numbers, target)) <= self.search:
                return Prompt(self._asked(numbers, target), answer={"numbers": numbers, "target": target}, index=i)
        raise SparseRLError(
            f"countdown: none of {_DRAWS} problems with {self.count} numbers up to {self.highest} had a search of at "
            f"most {self.search} characters; raise search, or lower count."
        )

    def _asked(self, numbers: list[int], target: int) -> str:
        """A prompt. All are equally long, so that sequences that run together fill their rows together."""
        digits, most = len(str(self.highest)), len(str(self.count * max(self.highest, _TIMES_TABLE**2)))
        return f"numbers {' '.join(f'{n:{digits}}' for n in numbers)}, target {target:{most}}\n"

    def solution(self, prompt: Prompt) -> str:
        """The search, if asked for; otherwise one line per operation. Then the whole expression."""
        if self.search:
            return search(prompt.answer["numbers"], prompt.answer["target"])
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
    """Random (index, operation, index) that use all numbers, and the result. Values are whole and not negative."""
    values, steps = list(numbers), []
    while len(values) > 1:
        a, b = draw.sample(range(len(values)), 2)
        x, y = values[a], values[b]
        allowed = ["+"] + ["-"] * (x >= y) + ["*"] * (x * y <= 1000) + ["/"] * (y > 1 and x % y == 0)
        operation = draw.choice(allowed)
        steps.append((a, operation, b))
        values = [v for k, v in enumerate(values) if k not in (a, b)] + [_apply(x, operation, y)]
    return steps, values[0]


def searched(numbers: list[int]) -> Iterable[tuple[str, list[Part]]]:
    """The whole search of some numbers. That of three is cached: numbers up to 25 can be drawn in only 15,625 ways."""
    return _searched_before(tuple(numbers)) if len(numbers) <= 3 else depth_first(_leaves(numbers))


@functools.lru_cache(maxsize=20_000)
def _searched_before(numbers: tuple[int, ...]) -> list[tuple[str, list[Part]]]:
    return list(depth_first(_leaves(numbers)))


def _leaves(numbers: Sequence[int]) -> list[Part]:
    return [(n, str(n)) for n in numbers]


def depth_first(parts: list[Part]) -> Iterator[tuple[str, list[Part]]]:
    """Every operation on every pair with the parts left, each followed by all that can be done with them.

    The larger number comes first. Only numbers up to 20 are multiplied, and only whole quotients are taken.
    """
    for pair in itertools.combinations(range(len(parts)), 2):
        (x, left), (y, right) = sorted((parts[k] for k in pair), key=lambda part: -part[0])
        others = [part for k, part in enumerate(parts) if k not in pair]
        for operation in "+-" + "*" * (x <= _TIMES_TABLE) + "/" * (y > 1 and x % y == 0):
            value = _apply(x, operation, y)
            then = [*others, (value, f"({left}{operation}{right})")]
            yield f"{x}{operation}{y}={value}", then
            if others:
                yield from depth_first(then)


def search(numbers: list[int], target: int) -> str:
    """The search up to the first result that is the target, and the answer."""
    lines = []
    for operation, parts in searched(numbers):
        value, expression = parts[-1]
        if len(parts) > 1:
            lines.append(f"{operation} left {' '.join(str(v) for v, _ in parts)}")
            continue
        lines.append(f"{operation} {'yes' if value == target else 'no'}")
        if value == target:
            return "\n".join([*lines, f"answer: {expression}"])
    raise AssertionError(f"{numbers} cannot make {target}")


def is_held_out(numbers: list[int]) -> bool:
    """Whether these numbers, in any order, belong to the held-out tenth."""
    return zlib.crc32(" ".join(map(str, sorted(numbers))).encode()) % 10 == 0


def evaluate(expression: str) -> tuple[Fraction, list[int]] | None:
    """The exact value of an arithmetic expression, and the whole numbers in it; None for anything else."""
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
