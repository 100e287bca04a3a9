"""A sentence of a verdict, and the words that rules share."""

from __future__ import annotations

from dataclasses import dataclass

from .thresholds import Level, level

CANNOT = "warm the model up on worked solutions (`sparse-rl warmup`), or use easier problems"


@dataclass(frozen=True)
class Sentence:
    level: Level
    text: str
    figure: str  # the name of a curve
    value: float


def judged(
    rule: str, value: float, figure: str, good: str, warn: str, fail: str = "", judge: float | None = None
) -> list[Sentence]:
    """One sentence with the text of its level. Empty text: no sentence. `fail` defaults to `warn`.

    `judge`: what is compared with the thresholds, if that is not the value shown.
    """
    found = level(rule, value if judge is None else judge)
    text = {"good": good, "warn": warn, "fail": fail or warn}[found]
    return [Sentence(found, text, figure, value)] if text else []


def went(first: float, last: float) -> str:
    """went from 0.500 to 0.600, or stayed at 0.500"""
    one, other = f"{first:.3f}", f"{last:.3f}"
    return f"stayed at {last:.3f}" if one == other else f"went from {one} to {other}"


def beside(difference: float) -> tuple[str, str]:
    """How the second of two numbers lies to the first, from first - second: ("0.055 lower", "than")"""
    amount = f"{abs(difference):.3f}"
    if amount == "0.000":
        return "the same", "as"
    return f"{amount} {'lower' if difference > 0 else 'higher'}", "than"
