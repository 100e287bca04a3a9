"""The estimates of benchmarks/gradient_noise.py on gradients whose signal and noise are known."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import gradient_noise


def test_signal_noise_and_angle_are_those_of_the_planted_gradients():
    generator = torch.Generator().manual_seed(0)
    batches, weights = 400, 300
    signal, other = torch.zeros(weights, dtype=torch.float64), torch.zeros(weights, dtype=torch.float64)
    signal[0], other[:2] = 2.0, torch.tensor([3.0, 3.0])  # 45 degrees apart
    noise = torch.randn(batches, weights, generator=generator, dtype=torch.float64) * 0.2  # variance 300 * 0.04 = 12
    own, theirs = signal + noise, other + noise  # the same prompts: the noise is common, and must not count as an angle
    gram, cross = own @ own.T, own @ theirs.T
    assert gradient_noise.off_diagonal(gram).item() == pytest.approx(4.0, rel=0.03)
    needed, half = gradient_noise.jackknife(gradient_noise.needed, gram)
    assert needed == pytest.approx(12 / 4, abs=half) and 0 < half < 0.3
    cosine, half = gradient_noise.jackknife(gradient_noise.cosine, gram, cross, theirs @ theirs.T)
    assert cosine == pytest.approx(0.5**0.5, abs=max(half, 0.02)) and half < 0.1


def test_the_interval_covers_the_truth_as_often_as_it_says():
    covered = 0
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        gradients = torch.randn(24, 50, generator=generator, dtype=torch.float64)
        gradients[:, 0] += 3.0
        value, half = gradient_noise.jackknife(gradient_noise.needed, gradients @ gradients.T)
        covered += abs(value - 50 / 9) <= half
    assert 170 <= covered <= 200  # 95 % of 200 is 190
