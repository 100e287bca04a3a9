"""Statistics of a benchmark: shares with intervals, pass@k, and whether two models differ on the same problems.

Problems are independent, but completions of one problem are not. So intervals and tests count problems; several
completions only make each problem's share more precise. Pure functions of plain numbers. N problems, n completions of
each, c of them right.
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
    return max(0.0, min(share, centre - half)), min(1.0, max(share, centre + half))  # rounding may exceed the bounds


def interval(shares: Sequence[float], samples: int, level: float = 0.95) -> tuple[float, float]:
    """The interval of the mean of the problems' shares: Wilson's, with the effective number of independent trials.

    With one completion each, that number is N; with more, up to N * n if completions are nearly independent. The
    variance between problems is uncertain if they are few or nearly all alike, so one problem that is always right and
    one that never is are added to estimate it. The interval then covers at least 95 %, even for 30 problems of which
    few are ever solved.
    """
    count, mean = len(shares), statistics.fmean(shares)
    if samples == 1:
        return wilson(mean, count, level)
    added = [*shares, 0.0, 1.0]
    centre = statistics.fmean(added)
    trials = count * centre * (1 - centre) / statistics.pvariance(added)
    return wilson(mean, min(trials, count * samples), level)


def pass_at_k(right: Sequence[int], samples: int, k: int) -> float:
    """The chance, averaged over problems, that one of k completions is right; unbiased.

    right [N]: how many of each problem's `samples` completions are right. k of them are drawn without replacement.
    """
    if not 1 <= k <= samples:
        raise ValueError(f"pass@{k} of {samples} completions: k must be between 1 and {samples}")
    return statistics.fmean(1 - math.comb(samples - c, k) / math.comb(samples, k) for c in right)


@dataclass(frozen=True)
class Difference:
    """How two models differ, second - first, on the same problems."""

    mean: float
    low: float  # of the 95 % interval: problems are drawn with replacement
    high: float
    p: float  # the chance of a difference this large if the models were exchangeable on every problem


def paired(first: Sequence[float], second: Sequence[float], draws: int = 10_000, seed: int = 0) -> Difference:
    """Whether two models differ, from each problem's share of right completions, or from its mean reward. [N]

    McNemar's exact test if all are 0 or 1, as with one completion per problem; otherwise a test that flips signs at
    random.
    """
    gaps = [b - a for a, b in zip(first, second, strict=True)]
    draw = random.Random(seed)
    low, high = resampled(gaps, draws, draw)
    binary = all(share in (0.0, 1.0) for share in (*first, *second))
    p = mcnemar(gaps.count(1.0), gaps.count(-1.0)) if binary else _flipped(gaps, draws, draw)
    return Difference(statistics.fmean(gaps), low, high, p)


def resampled(values: Sequence[float], draws: int, draw: random.Random) -> tuple[float, float]:
    """The 95 % interval of a mean: problems are drawn with replacement."""
    if not any(values):
        return 0.0, 0.0
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(draws))
    return means[int(0.025 * draws)], means[min(draws - 1, int(0.975 * draws))]


def mcnemar(gained: int, lost: int) -> float:
    """Exact two-sided sign test over problems that only one model solves."""
    total = gained + lost
    tail = sum(math.comb(total, k) for k in range(min(gained, lost) + 1)) / 2**total
    return min(1.0, 2 * tail)


def _flipped(gaps: list[float], draws: int, draw: random.Random) -> float:
    """Two-sided test with random signs. The actual gaps count as one draw, so p is never 0."""
    moved, found = [abs(gap) for gap in gaps if gap], abs(sum(gaps))
    rounding = 1e-12 * max(1.0, sum(moved))
    as_large = sum(
        abs(sum(gap if draw.random() < 0.5 else -gap for gap in moved)) >= found - rounding for _ in range(draws)
    )
    return (as_large + 1) / (draws + 1)
