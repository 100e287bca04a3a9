"""On a GPU: rollouts beside the learner, on their own streams; shards and sums over NCCL, as far as one device can."""

import copy
import dataclasses

import pytest
import torch

from sparse_rl.distributed.world import World
from sparse_rl.files import read_lines
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.method import METHODS
from sparse_rl.learn.shards import copy_weights, full, shard
from sparse_rl.train.run import train
from tests.helpers.models import tiny
from tests.helpers.processes import OPTIMIZER, batches
from tests.helpers.runs import recipe

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", ["shadow", "sparse-rl"])
def test_rollouts_ahead_are_those_of_the_weights_that_sampled(tmp_path, method):
    """Steps are captured and scored in a thread while the learner works: replay finds the sampler's log-probs again."""
    settings = dict(
        rollout={"ahead": 1}, learn={"method": method}, optimizer={"lr": 1e-3}, run={"steps": 6, "checkpoint_every": 6}
    )
    trainer = train(recipe(**settings), tmp_path / "run", show=False)
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "gap/abs/mean" in line]
    assert len(lines) == 6 and trainer.sampler.model is not trainer.model
    if method == "shadow":
        assert max(line["gap/abs/mean"] for line in lines) < 1e-3
    assert next(iter(trainer.sampler.engine.decoders.values())).graphs  # captured, not run launch by launch


@pytest.fixture
def nccl(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield World(0, 1, torch.distributed.new_group(backend="gloo"))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_in_one_shard_takes_the_step_of_a_whole_one(nccl, dtype):
    model = copy.deepcopy(tiny("llama")).to("cuda", dtype)
    loss, method = Loss(), METHODS["shadow"]
    every = batches(model, method, loss, nccl)
    every = [dataclasses.replace(b, owner_rank=torch.zeros_like(b.owner_rank)) for b in every]
    alone, whole = copy.deepcopy(model), copy.deepcopy(model)
    expected = Learner(alone, OPTIMIZER, loss, micro_batch_tokens=64)
    found = Learner(model, OPTIMIZER, loss, micro_batch_tokens=64, world=nccl, sharded=shard(model, 1))
    for batch in every:
        expected.step(batch)
        found.step(batch)
    for one, other in zip(expected.optimizer.masters, found.optimizer.masters, strict=True):
        assert (full(other) - one).norm() <= (1e-4 if dtype == torch.float32 else 0.03) * one.norm() + 1e-3
    copy_weights(model, whole)
    for one, other in zip(whole.parameters(), model.parameters(), strict=True):
        assert one.dtype == dtype and one.equal(full(other).to(dtype))
