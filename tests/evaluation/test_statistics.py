"""Statistics against independent computations: by enumeration, by simulation, and by scipy."""

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from sparse_rl.evaluation.statistics import interval, mcnemar, paired, pass_at_k, wilson


@given(st.integers(1, 200), st.data())
def test_wilson_solves_its_equation(count, data):
    """Its ends are the shares p at which the observed one is z standard errors away."""
    share = data.draw(st.integers(0, count)) / count
    z = statistics.NormalDist().inv_cdf(0.975)
    low, high = wilson(share, count)
    assert 0 <= low <= share <= high <= 1
    for p in (low, high):
        if 0 < p < 1 and p != share:
            assert abs(share - p) == pytest.approx(z * math.sqrt(p * (1 - p) / count), rel=1e-6)


@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.integers(1, 6))
def test_pass_at_k_is_the_share_of_all_choices(right, k):
    """Every choice of k of a problem's six completions, counted."""
    expected = statistics.fmean(
        statistics.fmean(any(i < c for i in chosen) for chosen in itertools.combinations(range(6), k)) for c in right
    )
    assert pass_at_k(right, 6, k) == pytest.approx(expected)


def test_pass_at_k_refuses_what_it_cannot_know():
    with pytest.raises(ValueError, match=r"pass@5 of 4 completions: k must be between 1 and 4"):
        pass_at_k([1, 2], 4, 5)


@given(st.integers(0, 12), st.integers(0, 12))
def test_mcnemar_counts_every_outcome(gained, lost):
    total, observed = gained + lost, abs(gained - lost)
    outcomes = (
        [abs(2 * sum(signs) - total) for signs in itertools.product((0, 1), repeat=min(total, 10))]
        if total <= 10
        else None
    )
    if outcomes is not None:
        assert mcnemar(gained, lost) == pytest.approx(sum(gap >= observed for gap in outcomes) / len(outcomes))
    assert 0 < mcnemar(gained, lost) <= 1 and mcnemar(gained, lost) == mcnemar(lost, gained)


def test_mcnemar_is_scipys_binomial_test():
    for gained, lost in ((0, 5), (3, 11), (40, 22), (7, 7)):
        assert mcnemar(gained, lost) == pytest.approx(binomtest(gained, gained + lost).pvalue)


def test_intervals_hold_the_truth_as_often_as_they_say():
    """Problems of different difficulty, one completion and eight: about 95 of 100 intervals hold the true mean."""
    draw, held = random.Random(0), {1: 0, 8: 0}
    for samples in held:
        for _ in range(400):
            rates = [
                draw.betavariate(0.5, 1.0) for _ in range(60)
            ]  # problems are drawn, too: the truth is the mean of all, 1/3
            shares = [sum(draw.random() < rate for _ in range(samples)) / samples for rate in rates]
            low, high = interval(shares, samples)
            held[samples] += low <= 1 / 3 <= high
    assert all(0.92 < count / 400 < 0.98 for count in held.values()), held


@pytest.mark.parametrize("a, b", [(0.05, 1.0), (0.5, 5.0), (0.1, 0.4), (2.0, 2.0)])
@pytest.mark.parametrize("problems, samples", [(5, 32), (30, 32), (40, 32), (200, 4)])
def test_intervals_of_few_problems_are_not_too_narrow(problems, samples, a, b):
    """Also where a weak model solves few of them, or one solves nearly all."""
    draw, held, truth = random.Random(f"{a} {b} {problems}"), 0, a / (a + b)
    for _ in range(300):
        rates = [draw.betavariate(a, b) for _ in range(problems)]
        shares = [sum(draw.random() < rate for _ in range(samples)) / samples for rate in rates]
        low, high = interval(shares, samples)
        held += low <= truth <= high
    assert held / 300 > 0.91, held / 300


def test_one_more_right_completion_changes_an_interval_little():
    for before, after in (([0.0] * 30, [1 / 32] + [0.0] * 29), ([1.0] * 30, [31 / 32] + [1.0] * 29)):
        for x, y in zip(interval(before, 32), interval(after, 32)):
            assert abs(x - y) < 0.01


def test_more_completions_tell_more_only_where_they_differ():
    once = interval([0.0, 1.0] * 20, 1)
    assert interval([0.0, 1.0] * 20, 8) == once  # each problem always or never: eight say what one says
    low, high = interval([0.5] * 38 + [0.375, 0.625], 8)
    assert high - low < 0.5 * (once[1] - once[0])
    assert interval([0.0] * 10, 4) == wilson(0.0, 10)


def test_a_difference_is_found_where_there_is_one_and_only_there():
    draw = random.Random(1)
    base = [float(draw.random() < 0.5) for _ in range(300)]
    better = [1.0 if a == 0 and draw.random() < 0.25 else a for a in base]
    found = paired(base, better)
    assert (
        found.mean == pytest.approx(statistics.fmean(better) - statistics.fmean(base))
        and found.low > 0
        and found.p < 1e-6
    )
    same = paired(base, base)
    assert (same.mean, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    rejected = 0
    for i in range(150):
        first, second = ([sum(draw.random() < 0.4 for _ in range(4)) / 4 for _ in range(40)] for _ in range(2))
        found = paired(first, second, draws=400, seed=i)
        assert found.low <= found.mean <= found.high
        rejected += found.p < 0.05
    assert rejected < 18  # about 7 of 150 by chance


def test_the_sign_test_is_the_exact_one_where_both_can_be_had():
    gaps = [0.5, 0.25, -0.25, 0.75, 0.5, -0.5, 0.25, 0.25]
    found = paired([0.25] * 8, [0.25 + g for g in gaps], draws=20_000)
    sums = [abs(sum(s * abs(g) for s, g in zip(signs, gaps))) for signs in itertools.product((-1, 1), repeat=8)]
    assert found.p == pytest.approx(sum(s >= abs(sum(gaps)) - 1e-12 for s in sums) / len(sums), abs=0.015)
