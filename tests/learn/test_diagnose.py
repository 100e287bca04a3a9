"""Honest metrics: planted outliers give exactly the known rates, over the mask as it was before any rejection."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_rl import Engine, Sampling
from sparse_rl.cache import Trace
from sparse_rl.learn.correct import PRESETS, correct
from sparse_rl.learn.diagnose import (
    ends_in_loop,
    gap_metrics,
    gap_since_eviction,
    looping,
    percentiles,
    rejection_metrics,
    rollout_metrics,
)
from sparse_rl.learn.overlap import overlap
from sparse_rl.learn.score import replay_of
from sparse_rl.records import Trajectory
from tests.helpers.models import prompts_of, tiny


def planted():
    """10 trajectories of 20 response tokens (the last of 10): 3 hold one token with xi below 1e-4, of which 2 have
    reward.
    """
    mask = torch.ones(10, 20, dtype=torch.bool)
    mask[9, 10:] = False
    gap = torch.zeros(10, 20)
    gap[0, 3] = gap[4, 0] = gap[9, 9] = math.log(1e-5)
    gap[1, :5] = math.log(3.0)  # outside mis's band, and not rejected by the veto
    gap[~mask] = -99.0  # must not be looked at
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 0, 0, 0, 0])
    return gap, mask, rewards


def test_rejection_is_counted_over_the_original_mask():
    gap, mask, rewards = planted()
    corrected = correct(gap, mask, PRESETS["sparse-rl"])
    loops = torch.tensor([True, True, True, False, True, False, False, False, False, False])  # 0 and 4 are rejected
    found = rejection_metrics(mask, corrected, rewards, loops)
    assert found["reject/looping/frac"] == 2 / 4
    assert found["reject/trajectories/frac"] == 3 / 10
    assert found["reject/tokens/frac"] == (20 + 20 + 10) / 190
    assert found["reject/rewarded/frac"] == 2 / 3 and found["reject/unrewarded/frac"] == 1 / 7
    mis = rejection_metrics(mask, correct(gap, mask, PRESETS["mis"]), rewards, torch.zeros(10, dtype=torch.bool))
    assert "reject/looping/frac" not in mis  # nothing loops
    assert mis["reject/trajectories/frac"] == 0 and mis["reject/tokens/frac"] == (3 + 5) / 190


def test_gap_figures_are_those_of_the_planted_gaps():
    gap, mask, _ = planted()
    found = gap_metrics(gap, mask, correct(gap, mask, PRESETS["sparse-rl"]))
    values = np.array([math.log(1e-5)] * 3 + [math.log(3)] * 5 + [0.0] * 182)
    xi = np.exp(values)
    for name, share in {"p01": 1, "p05": 5, "p50": 50, "p95": 95, "p99": 99}.items():
        assert found[f"gap/xi/{name}"] == pytest.approx(np.percentile(xi, share), rel=1e-5)
    assert found["gap/xi/min"] == pytest.approx(1e-5, rel=1e-4)
    assert found["gap/abs/mean"] == pytest.approx(np.abs(values).mean(), rel=1e-6)
    assert found["gap/k3/mean"] == pytest.approx((xi - 1 - values).mean(), rel=1e-6)
    assert found["gap/chi2/mean"] == pytest.approx((xi**2).mean() - 1, rel=1e-5)
    # The loss uses 140 tokens of accepted trajectories, 5 of them capped; 50 tokens are dropped.
    weights = np.array([2.0] * 5 + [1.0] * 135)
    assert found["gap/ess/frac"] == pytest.approx(weights.sum() ** 2 / (190 * (weights**2).sum()), rel=1e-6)
    sequences = np.exp(
        [math.log(1e-5) / 20, math.log(3) / 4, 0, 0, math.log(1e-5) / 20, 0, 0, 0, 0, math.log(1e-5) / 10]
    )
    assert found["gap/ppl_ratio/mean"] == pytest.approx(sequences.mean(), rel=1e-6)


def test_nothing_sampled_gives_no_figures():
    mask = torch.zeros(2, 3, dtype=torch.bool)
    corrected = correct(torch.zeros(2, 3), mask, PRESETS["none"])
    assert gap_metrics(torch.zeros(2, 3), mask, corrected) == {}
    assert rejection_metrics(mask, corrected, torch.zeros(2), torch.zeros(2, dtype=torch.bool)) == {
        "reject/trajectories/frac": 0.0,
        "reject/unrewarded/frac": 0.0,
    }


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_numpys(values, share):
    got = percentiles(torch.tensor(values, dtype=torch.float64), torch.tensor([share], dtype=torch.float64)).item()
    assert got == pytest.approx(np.quantile(values, share), rel=1e-9, abs=1e-9)


def trajectory(tokens, evicted_at=None, reason="stop"):
    tokens = torch.tensor(tokens)
    trace = Trace.dense(1, 1, len(tokens))
    if evicted_at:
        trace.evicted_at[0, 0, : len(evicted_at)] = torch.tensor(evicted_at, dtype=torch.uint16)
    return Trajectory(tokens, 2, torch.zeros(len(tokens)), trace, reason, 0, 0)


def test_gap_by_distance_from_the_last_eviction():
    """Interval 4; evictions before feed indices 4 and 8."""
    one = trajectory(list(range(12)), evicted_at=[4, 8])
    gap = torch.arange(12.0)[None]
    mask = torch.arange(12)[None] >= 2
    found = gap_since_eviction(gap, mask, [one], interval=4)
    assert found == {
        "gap/abs/before_eviction": 3.0,  # 2, 3 and 4: query 3, which predicts token 4, still saw everything
        "gap/abs/quarter1": 7.0,  # 5 and 9
        "gap/abs/quarter2": 8.0,
        "gap/abs/quarter3": 9.0,
        "gap/abs/quarter4": 8.0,  # 8 alone
    }


def test_evictions_are_found_in_real_traces(llama):
    done = Engine(llama, budget=12, interval=4, rows=2).generate(prompts_of(9, 30), sampling=Sampling(20))
    # The capacity is 16: a row is full after 16 tokens; a longer prompt is compressed once, after itself.
    for t, first in zip(done, (16, 30)):
        gap = torch.zeros(1, len(t.tokens))
        gap[0, first + 1] = 1.0
        mask = torch.arange(len(t.tokens))[None] >= t.num_prompt_tokens
        found = gap_since_eviction(gap, mask, [t], interval=4)
        assert found["gap/abs/quarter1"] > 0 and all(v == 0 for k, v in found.items() if k != "gap/abs/quarter1")


def test_loops():
    assert ends_in_loop(torch.tensor([9, 8, 7] + [1] * 24))
    assert not ends_in_loop(torch.tensor([9, 8, 7] + [1] * 23))  # too short
    assert ends_in_loop(torch.tensor([5, *([1, 2, 3] * 8)]))
    assert not ends_in_loop(torch.tensor([*([1, 2, 3] * 8), 5]))  # it found its way out
    assert ends_in_loop(torch.arange(64).repeat(4)) and not ends_in_loop(torch.arange(65).repeat(4))
    assert not ends_in_loop(torch.arange(64).repeat(3)) and not ends_in_loop(torch.tensor([], dtype=torch.int64))
    done = [
        trajectory([1, 2, *([3] * 30)], reason="length"),
        trajectory([1, 2, 3, 4]),
        trajectory([1, 2, 3], reason="length"),
        trajectory([1, 2]),
    ]
    rewards = torch.tensor([0.0, 1.0, 0.0, 0.5])
    found = rollout_metrics(done, rewards, rewards >= 0.5, looping(done))
    assert found["reward/right/frac"] == 0.5
    assert found["rollout/loops/frac"] == 0.25 and found["rollout/truncated/frac"] == 0.5
    assert found["reward/mean"] == 0.375
    assert found["rollout/length/mean"] == (30 + 2 + 1 + 0) / 4 and found["rollout/length/max"] == 30
    assert found["rollout/length/rewarded"] == 1 and found["rollout/length/unrewarded"] == 15.5


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_alpha_is_one_minus_total_variation(temperature):
    """Against probabilities written out in fp64, the sampler's from a forward pass under an explicit mask."""
    from sparse_rl.attention import Given, giving, use_attention

    model = tiny("llama")
    t = Engine(model, budget=12, interval=4, rows=1).generate(prompts_of(20), sampling=Sampling(30, temperature))[0]
    with torch.no_grad():
        dense = model(t.tokens[None], use_cache=False).logits[0]
        given = Given(torch.arange(len(t.tokens))[None], replay=replay_of(model, [(t.tokens, t.trace)]))
        with use_attention(model, "shadow"), giving(given):
            shadow = model(t.tokens[None], use_cache=False).logits[0]
    p, q = ((x.double() / temperature).softmax(-1)[t.num_prompt_tokens - 1 : -1] for x in (dense, shadow))
    expected = 1 - (p - q).abs().sum(-1) / 2
    assert expected.min() < 0.9  # compression matters here
    torch.testing.assert_close(overlap(model, t, temperature).double(), expected, rtol=1e-5, atol=1e-5)
    for pick, logprob in enumerate(t.sampler_logprobs[t.num_prompt_tokens :]):  # q is what was sampled from
        assert q[pick, t.response_tokens[pick]].log().item() == pytest.approx(logprob.item(), abs=1e-4)


@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.integers(0, 5), max_size=70),
    st.integers(0, 6),
    st.integers(0, 69),
)
def test_loops_are_what_their_definition_says(start, unit, times, more):
    response = torch.tensor(start + unit * times + unit[:more], dtype=torch.int64)
    n = len(response)
    spans = {period: max(24, 4 * period) for period in range(1, 65)}
    looping = any(
        s <= n and all(response[n - i] == response[n - i - p] for i in range(1, s - p + 1)) for p, s in spans.items()
    )
    assert ends_in_loop(response) == looping
