"""Answers that take very long, or forever, to read as mathematics: to be graded without stopping a run."""

import random
from collections.abc import Iterator


def bombs(count: int, seed: int = 0) -> Iterator[str]:
    """`count` distinct bombs, the same for a seed: powers of powers, deep nesting, endless sums, wide products."""
    draw, seen = random.Random(f"bombs|{seed}"), set()
    while len(seen) < count:
        bomb = draw.choice(KINDS)(draw)
        if bomb not in seen and len(bomb) <= 1000:
            seen.add(bomb)
            yield bomb


def _tower(draw: random.Random) -> str:
    height = draw.randint(3, 6)
    return "^{".join(str(draw.randint(7, 99)) for _ in range(height)) + "}" * (height - 1)


def _power(draw: random.Random) -> str:
    return f"{draw.randint(10**20, 10**200)}^{{{draw.randint(10**7, 10**30)}}}"


def _factorial(draw: random.Random) -> str:
    return f"{draw.randint(10**6, 10**9)}" + "!" * draw.randint(1, 3)


def _binomial(draw: random.Random) -> str:
    whole = draw.randint(10**8, 10**10)
    return rf"\binom{{{whole}}}{{{whole // draw.randint(2, 9)}}}"


def _sum(draw: random.Random) -> str:
    kind = draw.choice([r"\sum", r"\prod"])
    return (
        rf"{kind}_{{k=1}}^{{{draw.randint(10**7, 10**12)}}} \frac{{{draw.randint(1, 99)}}}{{k^k+{draw.randint(1, 99)}}}"
    )


def _nested(draw: random.Random) -> str:
    opening, depth = draw.choice([r"\frac{1}{", r"\sqrt{1+", r"\left(2+", "{", r"x^{", r"\sin("]), draw.randint(60, 90)
    closing = {r"\left(2+": r"\right)", r"\sin(": ")"}.get(opening, "}")
    return opening * depth + str(draw.randint(2, 999)) + closing * depth


def _expansion(draw: random.Random) -> str:
    letters = "+".join(draw.sample("abcdpqrstuvwxyz", draw.randint(5, 8)))
    return rf"({letters})^{{{draw.randint(60, 400)}}} - ({letters}+1)^{{{draw.randint(60, 400)}}}"


def _roots(draw: random.Random) -> str:
    terms = [rf"\sqrt{{{draw.randint(2, 9999)}+\sqrt{{{draw.randint(2, 9999)}}}}}" for _ in range(draw.randint(9, 20))]
    return draw.choice(["+", r"\cdot "]).join(terms)


def _integral(draw: random.Random) -> str:
    inner = rf"\sin(x^{{{draw.randint(7, 99)}}}) e^{{x^{{{draw.randint(3, 99)}}}}}"
    return rf"\int_0^{{{draw.randint(2, 99)}}} {inner} \, dx"


def _matrix(draw: random.Random) -> str:
    size = draw.randint(3, 4)
    cells = [[f"x_{{{draw.randint(1, 99)}}}+{draw.randint(1, 9)}" for _ in range(size)] for _ in range(size)]
    rows = r"\\".join("&".join(row) for row in cells)
    return rf"\begin{{pmatrix}}{rows}\end{{pmatrix}}^{{{draw.randint(50, 5000)}}}"


KINDS = (
    *(_tower, _power, _factorial, _binomial, _sum, _nested, _expansion, _roots, _integral, _matrix),
    _tower,
    _factorial,
)
