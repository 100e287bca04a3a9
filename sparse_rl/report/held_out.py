"""The rules about held-out problems: does what is learned carry over, on the cache that the run is for?"""

from __future__ import annotations

import math
import re

import numpy as np

from .aim import Aim
from .sentence import CANNOT, Sentence, beside, judged, went
from .thresholds import level
from .trend import Curves, numbers, rewards_say_more, thirds

CORRECTS = ("sparse-rl", "sparse-rl-released")  # no other correction is better advice than these
STUDENT = re.compile(r"eval/([^/]+)/accuracy")


def held_out(curves: Curves, aim: Aim) -> list[Sentence]:
    """Held-out accuracy on both caches, first the one that the run is for, and of students: does it carry over?"""
    dense, sparse = "eval/dense/accuracy", "eval/sparse/accuracy"
    tried = [values for name in (dense, sparse) if len(values := numbers(curves, name)) > 1]
    if tried and not any(values.any() for values in tried):
        text = f"Nothing is right in any of the {len(tried[0])} evaluations; {CANNOT}."
        return [Sentence("warn", text, dense, 0.0)]
    caches = [on_dense(curves, aim, dense), on_small(curves, aim, sparse)]
    said = [sentence for cache in (reversed(caches) if aim.small else caches) for sentence in cache]
    for figure in curves:
        if (found := STUDENT.fullmatch(figure)) is not None and figure not in (dense, sparse):
            said += trained(curves, aim, figure, f"of student {found[1]}", student=True)
    return said


def on_dense(curves: Curves, aim: Aim, figure: str) -> list[Sentence]:
    where = "on the dense cache"
    if not aim.small:
        return trained(curves, aim, figure, where)
    if (ends := first_and_last(curves, figure)) is None:
        return []
    (_, first), (_, last) = ends
    said = moved(aim, where, ends)
    text = f"{said}, while {aim.method} trains the small cache; to deploy dense use learn.method: sparse-rl."
    warn = level("held_out", fall(aim, first, last)) != "good"
    return [Sentence("warn" if warn else "good", text if warn else f"{said}.", figure, last)]


def trained(curves: Curves, aim: Aim, figure: str, where: str, student: bool = False) -> list[Sentence]:
    """Accuracy where it should grow, so that a fall, or staying behind the dense cache, is bad news."""
    if (ends := first_and_last(curves, figure)) is None:
        return []
    (_, first), (_, last) = ends
    said = moved(aim, where, ends)
    found = level("held_out", fall(aim, first, last))
    if found != "good":
        remedy = "lower student.lr" if student else carry(aim)
        return [Sentence(found, f"{said}: what is learned does not carry over; {remedy}.", figure, last)]
    dense = at_both_ends(curves, "eval/dense/accuracy", figure)
    if dense is None or figure == "eval/dense/accuracy":
        return [Sentence("good", f"{said}.", figure, last)]
    said = f"{said}; it is {' '.join(beside(dense[1] - last))} on the dense cache"
    if (fell := dense_fell(aim, dense, first, last)) is not None:
        return [Sentence("warn", f"{said}, {fell}; {'lower student.lr' if student else carry(aim)}.", figure, last)]
    behind = dense[1] - last if dense[1] - last > aim.chance((dense[1], last)) else 0.0
    remedy = "train longer" if student else "train longer, or raise rollout.budget"
    return judged("behind", last, figure, f"{said}.", f"{said}: {remedy}.", judge=behind)


def on_small(curves: Curves, aim: Aim, figure: str) -> list[Sentence]:
    where = "on the small cache"
    if aim.small:
        return trained(curves, aim, figure, where)
    if (ends := first_and_last(curves, figure)) is None:
        return []
    (_, first), (_, last) = ends
    said = moved(aim, where, ends)
    remedy = "to deploy on the small cache use learn.method: shadow"
    if (dense := at_both_ends(curves, "eval/dense/accuracy", figure)) is not None:
        early, late = dense[0] - first, dense[1] - last
        said = f"{said}; it is {' '.join(beside(late))} on the dense cache (at the start {beside(early)[0]})"
        if (fell := dense_fell(aim, dense, first, last)) is not None:
            return [Sentence("warn", f"{said}, {fell}; {carry(aim)}.", figure, last)]
        wider = late - early if late - early > aim.chance((first, last, *dense)) else 0.0
        if level("gap", wider) != "good":
            return [Sentence("warn", f"{said}: the gap widens; {remedy}.", figure, last)]
    if level("held_out", fall(aim, first, last)) != "good":
        return [Sentence("warn", f"{said}; {remedy}.", figure, last)]
    return [Sentence("good", f"{said}.", figure, last)]


def first_and_last(curves: Curves, figure: str) -> tuple[tuple[int, float], tuple[int, float]] | None:
    """(step, value) of the first and of the last evaluation; None with fewer than two."""
    if len(values := numbers(curves, figure)) < 2:
        return None
    steps = curves[figure].step[np.isfinite(curves[figure].value)]
    return (int(steps[0]), float(values[0])), (int(steps[-1]), float(values[-1]))


def at_both_ends(curves: Curves, figure: str, other: str) -> tuple[float, float] | None:
    """The values of a curve at the first and at the last evaluation of another; None if it lacks one."""
    ends = first_and_last(curves, other)
    if ends is None or figure not in curves:
        return None
    known = dict(zip(curves[figure].step.tolist(), curves[figure].value.tolist()))
    first, last = (known.get(step, math.nan) for step, _ in ends)
    return (first, last) if math.isfinite(first) and math.isfinite(last) else None


def moved(aim: Aim, where: str, ends: tuple[tuple[int, float], tuple[int, float]]) -> str:
    """Held-out accuracy on the small cache went from 0.200 to 0.400 between steps 0 and 20 (64 problems: ...)"""
    (begin, first), (end, last) = ends
    chance = aim.chance((first, last))
    noise = f" ({aim.problems:,} problems, so a change of {chance:.2f} may be chance)" if aim.problems else ""
    return f"Held-out accuracy {where} {went(first, last)} between steps {begin:,} and {end:,}{noise}"


def fall(aim: Aim, first: float, last: float) -> float:
    """How far accuracy fell; 0 if that may be chance."""
    return first - last if first - last > aim.chance((first, last)) else 0.0


def dense_fell(aim: Aim, dense: tuple[float, float], first: float, last: float) -> str | None:
    """Words about a dense cache that came down to another curve which did not rise; None if that is not so."""
    if last > first or level("held_out", fall(aim, *dense)) == "good" or dense[0] - first <= dense[1] - last:
        return None
    return f"which fell from {dense[0]:.3f} to {dense[1]:.3f}: they come together because the model got worse"


def carry(aim: Aim) -> str:
    """What to do if what is learned does not carry over."""
    if aim.small or aim.method == "dense":
        return "lower optimizer.lr, or train on more problems"
    if aim.method in CORRECTS:
        return "lower optimizer.lr, or raise rollout.budget"
    return "lower optimizer.lr, or correct the mismatch (learn.method: sparse-rl)"


def held_out_reward(curves: Curves, aim: Aim) -> list[Sentence]:
    """The same for rewards, if they say more than accuracy. They have no scale, so their fall is judged as a share."""
    cache, where = ("sparse", "small") if aim.small and "eval/sparse/reward" in curves else ("dense", "dense")
    figure = f"eval/{cache}/reward"
    values = numbers(curves, figure)
    if len(values) < 2 or not rewards_say_more(curves):
        return []
    first, last = thirds(values)
    count = max(1, len(values) // 3)
    means = f" (means of the first {count} and the last {count} evaluations)" if count > 1 else ""
    said = f"Held-out reward on the {where} cache {went(first, last)}{means}"
    text = f"{said}: what is learned does not carry over; {carry(aim)}."
    fell = (first - last) / (max(abs(first), abs(last)) or 1.0)
    return judged("held_out_reward", last, figure, f"{said}.", text, judge=fell)
