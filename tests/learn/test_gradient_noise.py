"""The estimates of benchmarks/gradient_noise.py on gradients whose signal and noise are known."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import gradient_noise

from sparse_rl.config import load_recipe
from sparse_rl.train.loop import Trainer


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


def test_a_gradient_is_found_in_every_dtype_and_none_is_left_from_before(tmp_path):
    """Those of bf16 weights are in fp32 masters, and not on the weights."""
    found = {}
    for dtype in ("float32", "bfloat16"):
        keys = {"model.name": "tiny:1x64", "model.dtype": dtype, "rollout.prompts": 2, "rollout.group_size": 4}
        keys |= {"rollout.rows": 8, "rollout.max_new_tokens": 12, "eval.every": 0, "run.steps": 1}
        recipe = load_recipe("tiny-sums", [(key, str(value)) for key, value in keys.items()])
        trainer = Trainer(recipe, tmp_path / dtype, show=False)
        ((trajectories, _),) = gradient_noise.sampled(trainer, trainer.sampler.engine, 1)
        rewards = torch.arange(8.0, dtype=torch.float64) % 3
        first, again = (gradient_noise.gradient(trainer, trajectories, rewards, "none")[0] for _ in range(2))
        torch.testing.assert_close(first, again)
        found[dtype] = first
        trainer.log.close()
        trainer.task.close()
    assert all(gradient.dtype == torch.float32 and gradient.norm() > 0 for gradient in found.values())
    assert len(found["float32"]) == len(found["bfloat16"])


class Clock:
    """A batch takes 10 s."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


def test_where_time_runs_short_there_are_fewer_batches(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(gradient_noise, "time", clock)
    assert gradient_noise.ends(10, budgets=2, methods=4) == pytest.approx([100, 350, 600])
    done = []
    for _ in gradient_noise.in_time(24, 55.0):
        clock.now += 10.0
        done.append(clock.now)
    assert done[-1] == 50.0
    assert len(list(gradient_noise.in_time(24, 0.0))) == gradient_noise.LEAST
