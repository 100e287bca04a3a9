"""On a GPU: what benchmarks compute by themselves, beside what they call, finds its tensors on one device."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import gradient_noise
from compressors import chosen_trace

from sparse_rl import Engine, Sampling, load_model
from sparse_rl.compressors import make
from sparse_rl.config import load_recipe
from sparse_rl.train.loop import Trainer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rule, oracle", [("snapkv", True), ("rkv", False), ("random", False), ("vase", False)])
def test_a_trace_is_chosen_offline(rule, oracle):
    """Random rules read streams, and the oracle what it received."""
    model, tokenizer = load_model("tiny-sums")
    engine = Engine(model, "dense", rows=1)
    done = engine.generate([tokenizer.encode("12+7+30+5=")], sampling=Sampling(50, stop_ids=()))[0]
    compressor = make(rule).bind(24, 4)
    compressor.attach(model)
    evicted_at = chosen_trace(model, done, compressor, oracle).evicted_at.long()
    for begin in range(max(done.num_prompt_tokens, 28), len(done.tokens) - 1, 4):
        present = (torch.arange(len(done.tokens)) < begin) & (evicted_at > begin)
        assert (present.sum(-1) == 24).all()


def test_gradients_of_bf16_weights_are_found(tmp_path):
    keys = {"model.name": "tiny:1x64", "model.dtype": "bfloat16", "rollout.prompts": 2, "rollout.group_size": 4}
    keys |= {"rollout.rows": 8, "rollout.max_new_tokens": 12, "eval.every": 0, "run.steps": 1}
    trainer = Trainer(load_recipe("tiny-sums", [(k, str(v)) for k, v in keys.items()]), tmp_path / "run", show=False)
    ((trajectories, _),) = gradient_noise.sampled(trainer, trainer.sampler.engine, 1)
    rewards = torch.arange(8.0, dtype=torch.float64) % 3
    for name in ("none", "sparse-rl", "shadow"):
        assert gradient_noise.gradient(trainer, trajectories, rewards, name)[0].norm() > 0
    trainer.log.close()
    trainer.task.close()
