"""On a GPU: online DPO and PPO learn, in both views, with packed micro-batches and fused layers."""

import math

import pytest

from sparse_rl.files import read_lines
from sparse_rl.train.run import train
from tests.helpers.runs import recipe

pytestmark = pytest.mark.gpu
ALGORITHMS = {
    "grpo": {},
    "online-dpo": {"dpo": {"pairs": "all"}},
    "ppo": {},
    "ppo, separate": {"ppo": {"critic": "separate", "kl": "loss"}, "loss": {"beta": 0.01}},
}


@pytest.mark.parametrize("method", ["shadow", "sparse-rl"])
@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_algorithm_learns(name, method, dtype, tmp_path):
    """From rewards that differ: running sums that the built-in model gets right four times in ten."""
    chosen = recipe(
        **ALGORITHMS[name],
        model={"name": "tiny-sums", "dtype": dtype},
        task={"name": "sums", "count": 8},
        rollout={"rows": 64, "prompts": 8, "group_size": 8, "max_new_tokens": 72, "budget": 38, "interval": 4},
        learn={"algorithm": name.split(",")[0], "method": method, "minibatches": 2},
        optimizer={"lr": 1e-4},
        eval={"every": 2, "prompts": 8},
        run={"steps": 2, "diagnose": 4},
    )
    train(chosen, tmp_path / "run", show=False)
    steps = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "reward/mean" in line]
    assert len(steps) == 2 and all(math.isfinite(x) for line in steps for x in line.values() if isinstance(x, float))
    assert all(line["update/grad_norm"] > 0 for line in steps)
    if name.startswith("ppo"):
        assert all(line["update/value_loss"] > 0 for line in steps)
    if name == "online-dpo":
        assert all(line["pairs/total/count"] > 0 for line in steps)
