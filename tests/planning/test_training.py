"""The plan of a training run against real allocations, in one process and in two."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from sparse_rl.compressors import make
from sparse_rl.config import load_recipe
from sparse_rl.models import ModelShape, load_config
from sparse_rl.planning.memory import make_plan
from sparse_rl.planning.training import make_training_plan
from sparse_rl.train.loop import Trainer
from sparse_rl.train.run import plan_run
from tests.helpers.models import tiny
from tests.helpers.runs import recipe

ROOT = Path(__file__).parent.parent.parent


def test_a_training_plan_counts_what_segments_keep():
    """Replaying beacons keeps a list of prompt and beacons per chunk."""
    shape = ModelShape.of(load_config("tiny"), torch.float32)
    often, rarely = (
        make_plan(shape, make(name), rows=4, prompt_tokens=64, new_tokens=512, weight_bytes=2**20)
        for name in ("beacon:2", "beacon:16")
    )
    settings = dict(trained=10, micro_batch_tokens=2048, checkpointing=False, reference=False, evaluates=False)
    plans = [make_training_plan(rollout, shape, **settings, shadow=True) for rollout in (often, rarely)]
    assert plans[0].update_bytes > plans[1].update_bytes


def test_the_plan_counts_the_weights_of_rollouts_ahead():
    turns, ahead = recipe(), recipe(rollout={"ahead": 1})
    plan, other = plan_run(ahead, 40), plan_run(turns, 40)
    trainer = Trainer(ahead, Path("nowhere"), show=False)
    models = {id(m): m for m in (trainer.model, trainer.sampler.model)}
    held = sum(p.nbytes for m in models.values() for p in m.parameters())
    trainer.source.close()
    assert held == plan.rollout.weight_bytes + plan.learner_bytes == 2 * other.rollout.weight_bytes
    assert other.learner_bytes == 0
    more = plan.learner_bytes + min(plan.rollout.working_bytes, plan.update_bytes)  # both work at the same time
    assert plan.total_bytes - other.total_bytes == pytest.approx(more, abs=other.eval_bytes)
    assert "the learner's own weights" in plan.text() and "the learner's own weights" not in other.text()


SHARDS = """
import json, sys, torch
from tests.helpers.models import tiny
import copy
from sparse_rl.learn.optimizer import MasterAdamW, OptimizerSettings
from sparse_rl.learn.shards import shard
from sparse_rl.models import with_lora
from sparse_rl.distributed.world import join_world, leave_world
world = join_world()
found = []
for rank, dtype in ((0, torch.float32), (0, torch.bfloat16), (4, torch.float32)):
    model = copy.deepcopy(tiny("llama")).to(dtype)
    model = with_lora(model, rank, 16) if rank else model
    shard(model, world.size)
    optimizer = MasterAdamW(model.parameters(), OptimizerSettings())
    gradients = optimizer.gradients()
    bytes_of = lambda tensors: sum(t.to_local().nbytes for t in tensors)
    held = bytes_of(model.parameters()) + bytes_of(gradients)
    optimizer.step(1.0)
    state = [t for s in optimizer.adamw.state.values() for n, t in s.items() if n != "step"]
    found.append(held + bytes_of(state))
every = world.run_on_all(lambda: found)
if world.first:
    print("held", json.dumps(every))
leave_world(world)
"""


def test_the_plan_counts_a_part_of_what_is_divided(tmp_path):
    """Shards, gradients and moments of two processes; every process also has whole weights to sample with."""
    script = tmp_path / "shards.py"
    script.write_text(SHARDS)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*launch, script], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    every = json.loads(done.stdout.partition("held ")[2].splitlines()[0])
    model = tiny("llama")
    parameters = sum(p.numel() for p in model.parameters())
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.get_output_embeddings()]
    adapters = sum(4 * (m.in_features + m.out_features) for m in layers)
    settings = dict(micro_batch_tokens=64, checkpointing=False, reference=False, evaluates=False, shard=True)
    cases = ((torch.float32, parameters), (torch.bfloat16, parameters), (torch.float32, adapters))
    for held, (dtype, trained) in zip(zip(*every), cases, strict=True):
        shape = ModelShape.of(model.config, dtype)
        weights = parameters * dtype.itemsize
        rollout = make_plan(shape, make("rkv").bind(16, 8), rows=2, prompt_tokens=9, new_tokens=9, weight_bytes=weights)
        plan = make_training_plan(rollout, shape, trained=trained, processes=2, **settings)
        assert max(held) == pytest.approx(plan.optimizer_bytes, rel=0.02)
        assert plan.divided_by == 2 and plan.learner_bytes == 0 and "one of 2 parts" in plan.text()
        alone = make_training_plan(rollout, shape, trained=trained, **settings)
        assert alone.divided_by == 1 and "parts" not in alone.text()


def test_more_processes_need_less_memory_each_when_divided():
    given = load_recipe("qwen2.5-7b-simplerl", [("model.lora_rank", "0"), ("model.shard", "true")])
    plans = [plan_run(given, 512, processes) for processes in (1, 2, 8, 64)]
    assert [p.optimizer_bytes for p in plans] == [plans[0].optimizer_bytes // n for n in (1, 2, 8, 64)]
    assert all(a.total_bytes > b.total_bytes for a, b in pairwise(plans))
    assert len({p.rollout.weight_bytes for p in plans}) == 1  # every process samples with whole weights
