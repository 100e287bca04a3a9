"""Tokens follow the distribution their log-probs name."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl import Sampling
from sparse_rl.rollout.sampling import log_distribution, sample
from sparse_rl.streams import mix, stream_key, uniform

MASK = (1 << 64) - 1


def reference_mix(x: int) -> int:
    """splitmix64's finaliser on Python integers."""
    x &= MASK
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_mix_wraps_as_64_bit_integers_do(numbers):
    assert [x & MASK for x in mix(torch.tensor(numbers)).tolist()] == [reference_mix(x) for x in numbers]


def test_uniform_numbers_are_uniform_and_unrelated():
    streams = torch.tensor([stream_key(0, [1, 2, 3], 0, s) for s in range(200)])
    u = uniform(streams[:, None], torch.arange(500))
    assert u.min() > 0 and u.max() < 1
    counts = torch.histc(u.float(), bins=50, min=0, max=1)
    chi2 = ((counts - 2000) ** 2 / 2000).sum()
    assert chi2 < 85  # 49 degrees of freedom: p = 0.001
    for a, b in ((u[:, :-1], u[:, 1:]), (u[:-1], u[1:])):
        assert torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].abs() < 0.015


def test_stream_keys_differ_in_every_part():
    keys = [
        stream_key(0, [1, 2], 0, 0),
        stream_key(1, [1, 2], 0, 0),
        stream_key(0, [12], 0, 0),
        stream_key(0, [1, 2], 1, 0),
    ]
    keys += [stream_key(0, [1, 2], 0, 1), stream_key(0, [1, 2]), stream_key(0, [2, 1], 0, 0)]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "options", [{}, dict(temperature=0.6), dict(top_k=3), dict(top_p=0.7), dict(temperature=1.5, top_k=6, top_p=0.8)]
)
def test_frequencies_follow_the_log_probs(options):
    sampling = Sampling(**options)
    logits = torch.tensor([[1.0, 0.2, -0.5, 2.0, 0.0, -3.0, 0.9, 0.9]])
    n = 40_000
    tokens, logprobs, _ = sample(logits.expand(n, -1), torch.full((n,), 77), torch.arange(n), sampling)
    distribution = log_distribution(logits, sampling)[0]
    assert logprobs.equal(distribution[tokens])
    expected = distribution.exp() * n
    counts = torch.bincount(tokens, minlength=8)
    assert counts[expected == 0].eq(0).all()
    live = expected > 0
    chi2 = ((counts - expected)[live] ** 2 / expected[live]).sum()
    assert chi2 < 26  # at most 7 degrees of freedom: p = 0.0005
    assert distribution.exp().sum().item() == pytest.approx(1.0, abs=1e-5)


@settings(max_examples=50)
@given(st.lists(st.floats(-8, 8), min_size=2, max_size=12), st.floats(0.05, 1.0), st.integers(1, 12))
def test_top_p_and_top_k_keep_the_smallest_sufficient_set(logits, top_p, top_k):
    row = torch.tensor([logits])
    probs = row.softmax(-1)[0]
    kept = log_distribution(row, Sampling(top_p=top_p))[0].isfinite()
    assert kept.any() and probs[kept].min() >= (probs[~kept].max() if (~kept).any() else 0)
    assert probs[kept].sum() >= top_p - 1e-4
    assert probs[row[0] > row[0, kept].min()].sum() < top_p + 1e-4  # what is as likely as the last one stays with it
    kept = log_distribution(row, Sampling(top_k=top_k))[0].isfinite()
    assert kept.sum() >= min(top_k, len(logits))  # more only where the last place is tied
    assert probs[kept].min() >= (probs[~kept].max() if (~kept).any() else 0)


def test_top_p_of_a_large_vocabulary_is_that_of_exact_sums():
    row = torch.randn(1, 151_936, generator=torch.Generator().manual_seed(0)) * 3
    probs = row[0].double().softmax(-1).sort(descending=True).values
    for top_p in (0.5, 0.95, 0.999):
        kept = log_distribution(row, Sampling(top_p=top_p))[0].isfinite().sum().item()
        assert kept == 1 + (probs.cumsum(0) < top_p).sum().item()
    assert log_distribution(row, Sampling(top_p=1e-46))[0].isfinite().sum() == 1


def test_greedy_log_probs_are_those_at_temperature_one():
    logits = torch.randn(5, 9)
    tokens, logprobs, _ = sample(
        logits, torch.zeros(5, dtype=torch.int64), torch.zeros(5, dtype=torch.int64), Sampling(temperature=0.0)
    )
    assert tokens.equal(logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))


def test_extreme_logits_still_give_a_token_of_positive_probability():
    logits = torch.full((1000, 50), -1e4)
    logits[:, 17] = 1e4
    tokens, logprobs, _ = sample(logits, torch.arange(1000), torch.zeros(1000, dtype=torch.int64), Sampling())
    assert tokens.eq(17).all() and logprobs.eq(0).all()
    logits[:, :] = -torch.inf
    logits[:, 49] = 0.0
    assert sample(logits, torch.arange(1000), torch.zeros(1000, dtype=torch.int64), Sampling())[0].eq(49).all()
