"""The cross table of a comparison: models x caches on the same problems, with paired tests, as pure functions.

It answers two questions: what does the small cache cost a model, against its own dense cache, and which of two models
is better on a cache, the second against the first? Both are answered problem by problem, on the problems that both
were asked.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .results import Item, mean_rewards, shares, tokens_saved
from .run import Evaluated
from .statistics import Difference, interval, paired
from .summary import aligned, graded_rewards, reward_interval

ALL = "all problems"


@dataclass(frozen=True)
class Cell:
    """A model on a cache, on one benchmark or on all problems together."""

    bench: str
    model: str
    cache: str
    budget: int | None
    accuracy: float
    low: float  # 95 %
    high: float
    cost: Difference | None  # against the model's dense cache; None on the dense cache
    same_verdict: float | None  # share of completions with the verdict of the dense cache
    same_answer: float | None  # share with the dense cache's answer, of completions that have an answer there
    in_common: float | None  # mean share of the dense cache's text that comes before the two differ
    better: Difference | None  # against the first model on this cache; None for the first model
    length: float
    tokens_saved: float
    tokens_per_second: float
    reward: float  # mean
    reward_low: float  # 95 %
    reward_high: float
    reward_cost: Difference | None  # as `cost`; also None if rewards say no more than accuracy
    reward_better: Difference | None  # as `better`; also None if rewards say no more than accuracy
    graded_rewards: bool  # in this benchmark, rewards are not just 1 for what is right and 0 for the rest


def cross(found: Sequence[Evaluated]) -> list[Cell]:
    """Cells by benchmark, cache and model, in the order of evaluation. Every model was evaluated on a dense cache."""
    benches = [summary.bench for summary in found[0].summaries]
    cells = []
    for bench in [*benches, *([ALL] if len(benches) > 1 else [])]:
        graded = any(graded_rewards(items_on(bench, e)) for e in found)
        for label in dict.fromkeys(e.cache.label for e in found):
            here = [e for e in found if e.cache.label == label]
            for e in here:
                (dense,) = (other for other in found if other.model == e.model and other.cache.compressor == "dense")
                others = (dense if dense is not e else None, here[0] if here[0] is not e else None)
                cells.append(cell(bench, e, *others, graded))
    return cells


def cell(bench: str, e: Evaluated, dense: Evaluated | None, first: Evaluated | None, graded: bool) -> Cell:
    """The cell of an evaluation. `graded`: rewards are tested, too"""
    items = items_on(bench, e)
    by_problem = list(shares(items).values())
    low, high = interval(by_problem, round(len(items) / len(by_problem)))
    reward_low, reward_high = reward_interval(items) if graded else (low, high)
    verdicts, answers, in_common = agreement(items, items_on(bench, dense)) if dense else (None, None, None)
    return Cell(
        bench=bench,
        model=e.model,
        cache=e.cache.label,
        budget=e.cache.budget,
        accuracy=statistics.fmean(by_problem),
        low=low,
        high=high,
        cost=difference(items_on(bench, dense), items) if dense else None,
        same_verdict=verdicts,
        same_answer=answers,
        in_common=in_common,
        better=difference(items_on(bench, first), items) if first else None,
        length=statistics.fmean(item.tokens for item in items),
        tokens_saved=tokens_saved(items),
        tokens_per_second=e.tokens_per_second,
        reward=statistics.fmean(item.reward for item in items),
        reward_low=reward_low,
        reward_high=reward_high,
        reward_cost=difference(items_on(bench, dense), items, mean_rewards) if dense and graded else None,
        reward_better=difference(items_on(bench, first), items, mean_rewards) if first and graded else None,
        graded_rewards=graded,
    )


def items_on(bench: str, e: Evaluated) -> list[Item]:
    return [item for item in e.items if bench in (ALL, item.bench)]


def difference(first: Sequence[Item], second: Sequence[Item], of: Callable = shares) -> Difference:
    """Second - first, on the problems that both have. of: what is compared, shares of right answers or mean rewards"""
    a, b = of(first), of(second)
    both = [problem for problem in a if problem in b]
    return paired([a[problem] for problem in both], [b[problem] for problem in both])


def agreement(items: Sequence[Item], dense: Sequence[Item]) -> tuple[float, float | None, float]:
    """(same_verdict, same_answer, in_common) of Cell. Completions on both caches drew the same random numbers."""
    there = {item.key: item for item in dense}
    pairs = [(item, there[item.key]) for item in items if item.key in there]
    answered = [(item, other) for item, other in pairs if other.answer is not None and other.verdict != "no answer"]
    same_answer = statistics.fmean(float(item.answer == other.answer) for item, other in answered) if answered else None
    in_common = statistics.fmean(repeated(item.text, other.text) for item, other in pairs)
    return statistics.fmean(float(item.right == other.right) for item, other in pairs), same_answer, in_common


def repeated(text: str, other: str) -> float:
    """The share of the other text that this one has in common with it at the beginning."""
    alike = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, other))
    return sum(1 for _ in alike) / len(other) if other else 1.0


# ---------- text


def told(d: Difference | None) -> str:
    """+1.2 (-0.3 to +2.8), p = 0.12, in percentage points"""
    return "" if d is None else f"{100 * d.mean:+.1f} ({100 * d.low:+.1f} to {100 * d.high:+.1f}), p {probability(d.p)}"


def told_reward(d: Difference | None) -> str:
    """+0.012 (-0.003 to +0.028), p = 0.12"""
    return "" if d is None else f"{d.mean:+.3f} ({d.low:+.3f} to {d.high:+.3f}), p {probability(d.p)}"


def probability(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"= {p:.2g}"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def columns(cells: Sequence[Cell]) -> dict[str, Callable[[Cell], str]]:
    """heading -> its text for a cell. Several models are compared with the first."""
    several = len({c.model for c in cells}) > 1
    first = cells[0].model
    return {
        "cache": lambda c: c.cache,
        **({"model": lambda c: c.model} if several else {}),
        "accuracy (95 %)": lambda c: f"{c.accuracy:.1%} ({c.low:.1%} to {c.high:.1%})",
        "points against dense": lambda c: told(c.cost),
        **({f"points against {first}": lambda c: told(c.better)} if several else {}),
        "reward (95 %)": lambda c: f"{c.reward:.3f} ({c.reward_low:.3f} to {c.reward_high:.3f})" * c.graded_rewards,
        "reward against dense": lambda c: told_reward(c.reward_cost),
        **({f"reward against {first}": lambda c: told_reward(c.reward_better)} if several else {}),
        "same verdict": lambda c: share(c.same_verdict),
        "same answer": lambda c: share(c.same_answer),
        "text in common": lambda c: share(c.in_common),
        "length": lambda c: f"{c.length:,.0f}",
        "KV tokens saved": lambda c: share(c.tokens_saved),
        "tokens/s": lambda c: f"{c.tokens_per_second:,.0f}",
    }


def rows_of(bench: str, cells: Sequence[Cell]) -> list[list[str]]:
    """The table of a benchmark, headings first, without empty columns."""
    mine = [c for c in cells if c.bench == bench]
    told = {heading: [tell(c) for c in mine] for heading, tell in columns(cells).items()}
    full = {heading: column for heading, column in told.items() if any(column)}
    return [list(full), *map(list, zip(*full.values()))]


def text(cells: Sequence[Cell]) -> str:
    return "\n\n".join(f"{bench}\n{aligned(rows_of(bench, cells))}" for bench in dict.fromkeys(c.bench for c in cells))
