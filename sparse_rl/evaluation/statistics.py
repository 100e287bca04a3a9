"""What may be said of outcomes on a benchmark: shares with intervals, pass@k, and whether two models differ on the same problems.

Problems are independent, completions of one problem are not; so intervals and tests count problems, and completions only as far as they
tell more about each. Pure functions of plain numbers. N problems, n completions of each, c of them right.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist


def wilson(share: float, count: float, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval of a share of `count` independent trials."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))  # rounding may lead beyond


def interval(shares: Sequence[float], samples: int, level: float = 0.95) -> tuple[float, float]:
    """Of the mean of the problems' shares of right completions: Wilson's, for as many independent trials as vary as much.

    With one completion each these are the N problems; with more up to N * n, where completions are as good as independent. How much
    problems vary is not known well where they are few or nearly all alike, so one that is always right and one that never is are added
    before it is estimated: the interval then covers 95 % or more, also of 30 problems of which few are ever solved.
    """
    count, mean = len(shares), statistics.fmean(shares)
    if samples == 1:
        return wilson(mean, count, level)
    added = [*shares, 0.0, 1.0]
    centre = statistics.fmean(added)
    trials = count * centre * (1 - centre) / statistics.pvariance(added)
    return wilson(mean, min(trials, count * samples), level)


def pass_at_k(right: Sequence[int], samples: int, k: int) -> float:
    """The mean over problems of the chance that some of k completions is right, drawn from `samples` without replacement; unbiased.

    right [N]: how many of a problem's completions are.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} completions: k must be between 1 and {samples}")
    return statistics.fmean(1 - math.comb(samples - c, k) / math.comb(samples, k) for c in right)


@dataclass(frozen=True)
class Difference:
    """Of two models, second - first, on the same problems."""

    mean: float
    low: float  # of its 95 % interval: problems drawn with replacement
    high: float
    p: float  # the chance of one as large if each problem's outcomes could as well be swapped


def paired(first: Sequence[float], second: Sequence[float], draws: int = 10_000, seed: int = 0) -> Difference:
    """Whether two models differ, from their shares of right completions, problem by problem. [N]

    With one completion each the test is McNemar's, exact; with more, signs are flipped at random.
    """
    gaps = [b - a for a, b in zip(first, second, strict=True)]
    count, mean, draw = len(gaps), statistics.fmean(gaps), random.Random(seed)
    means = sorted(statistics.fmean(draw.choices(gaps, k=count)) for _ in range(draws)) if any(gaps) else [0.0] * draws
    binary = all(share in (0.0, 1.0) for share in (*first, *second))
    p = mcnemar(gaps.count(1.0), gaps.count(-1.0)) if binary else _flipped(gaps, draws, draw)
    return Difference(mean, means[int(0.025 * draws)], means[min(draws - 1, int(0.975 * draws))], p)


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided and exact: of the problems that only one model solves, each could as well be the other's."""
    total = gained + lost
    tail = sum(math.comb(total, k) for k in range(min(gained, lost) + 1)) / 2**total
    return min(1.0, 2 * tail)


def _flipped(gaps: list[float], draws: int, draw: random.Random) -> float:
    """Two-sided test by random signs. The gaps themselves are one of the draws, so p is never 0."""
    moved, found = [abs(gap) for gap in gaps if gap], abs(sum(gaps))
    as_large = sum(
        abs(sum(gap if draw.random() < 0.5 else -gap for gap in moved)) >= found - 1e-12 for _ in range(draws)
    )
    return (as_large + 1) / (draws + 1)
