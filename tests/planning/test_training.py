"""The plan of a training run against real allocations, in one process and in two."""

import copy
import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

from sparse_rl.compressors import make
from sparse_rl.config import load_recipe
from sparse_rl.learn.score import hidden_states
from sparse_rl.learn.support import side_by_side
from sparse_rl.models import ModelShape, load_config, weight_bytes, with_lora
from sparse_rl.models.routing import Routing
from sparse_rl.planning.memory import make_plan
from sparse_rl.planning.training import layer_bytes, make_training_plan, products_bytes
from sparse_rl.train.loop import Trainer
from sparse_rl.train.run import plan_run
from tests.helpers.checkpointing import Operations, checkpoint
from tests.helpers.models import tiny
from tests.helpers.runs import recipe

ROOT = Path(__file__).parent.parent.parent
STEP = dict(trajectories=64, minibatches=4)


def small(layers: int, name: str, dtype: torch.dtype):
    config = copy.deepcopy(tiny(name).config)
    config.num_hidden_layers, config.layer_types = layers, ["full_attention"] * layers
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def kept_by_autograd(layers: int, name: str, dtype: torch.dtype, adapters: bool, tokens: torch.Tensor) -> int:
    """Bytes that the forward pass of a model keeps for backward, its weights not counted."""
    model = small(layers, name, dtype)
    model = with_lora(model, 2, 4) if adapters else model
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}  # by address; held, so that no address comes twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_states(model.train(), tokens)
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in weights)


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_a_layer_keeps_what_the_plan_counts(name, dtype, adapters):
    tokens = torch.randint(1, 50, (2, 64), generator=torch.Generator().manual_seed(0))
    one, three = (kept_by_autograd(layers, name, dtype, adapters, tokens) for layers in (1, 3))
    kept = (three - one) / 2 / tokens.numel()
    counted = layer_bytes(ModelShape.of(tiny(name).config, dtype), adapters)
    # not counted: 4 bytes per head and norm, and what lies between the two matrices of an adapter
    assert kept <= 1.15 * counted and counted <= (1.05 if name == "qwen3" else 1.35) * kept


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_selective_checkpointing_keeps_what_the_plan_counts(name, dtype, adapters):
    tokens, rank = torch.randint(1, 50, (2, 64), generator=torch.Generator().manual_seed(0)), 2 * adapters

    def kept_after_forward(layers: int, how: bool | str) -> int:
        model = small(layers, name, dtype)
        model = checkpoint(with_lora(model, rank, 4) if adapters else model, how, rank)
        with Operations() as operations:
            states = hidden_states(model, tokens).last_hidden_state
        gc.collect()
        return operations.alive(model) - states.nbytes

    kept = {}
    for how in (False, "selective", True):
        one, three = (kept_after_forward(layers, how) for layers in (1, 3))
        kept[how] = (three - one) / 2 / tokens.numel()
    one, three = (kept_by_autograd(layers, name, dtype, adapters, tokens) for layers in (1, 3))
    assert kept[False] == (three - one) / 2 / tokens.numel()  # so it is measured as above
    shape = ModelShape.of(tiny(name).config, dtype)
    assert kept["selective"] == products_bytes(shape) + 7 * rank * 4  # adapters' first products, which are not counted
    assert kept[True] == shape.hidden * dtype.itemsize
    assert kept[True] < 0.3 * kept["selective"] and kept["selective"] < 0.7 * kept[False]


def test_a_micro_batch_is_not_larger_than_a_step():
    """Two prompts x four completions of a model of 135 M parameters were once said to need 30 GiB."""
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    config = LlamaConfig(**shape, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True)
    of_model = ModelShape.of(config, torch.float32)
    rollout = make_plan(
        of_model, make("rkv").bind(64, 16), rows=8, prompt_tokens=64, new_tokens=128, weight_bytes=weight_bytes(config)
    )
    common = dict(trained=rollout.weight_bytes // 4, checkpointing=False, reference=False, evaluates=True)
    plans = [
        make_training_plan(
            rollout, of_model, micro_batch_tokens=tokens, trajectories=count, minibatches=minibatches, **common
        )
        for tokens, count, minibatches in ((8 * 192, 8, 1), (16384, 8, 1), (16384, 8, 4), (192, 10**6, 1))
    ]
    whole, capped, quarter, single = (plan.update_bytes for plan in plans)
    assert whole == capped > quarter > single and plans[1].total_bytes < 8 * 2**30
    assert quarter > 2 * layer_bytes(of_model) * 192 * 30 > single * 0.8


# What runs on one NVIDIA H200 took (docs/results): GiB, recipe, tokens of the longest prompt, keys.
STEP_OF_1_5B = [("rollout.prompts", "32"), ("eval.every", "0")]
AHEAD = [*STEP_OF_1_5B, ("rollout.max_new_tokens", "1024")]
COUNTDOWN = ("model.name", "tiny:6x256")
PEAKS = [
    (38.40, "qwen2.5-1.5b-simplerl", 1239, STEP_OF_1_5B),  # training-step.md
    (38.4, "qwen2.5-1.5b-simplerl", 1239, AHEAD),  # ahead.md
    (43.4, "qwen2.5-1.5b-simplerl", 1239, [*AHEAD, ("rollout.ahead", "1")]),
    (3.55, "countdown-search", 70, [COUNTDOWN]),
    (3.57, "countdown-search", 70, [COUNTDOWN, ("rollout.ahead", "1")]),
    (4.02e9 / 2**30, "countdown-beacons", 70, [COUNTDOWN, ("student.chunks", "[]")]),  # beacons.md
    (4.12e9 / 2**30, "countdown-beacons", 70, [COUNTDOWN, ("student.chunks", "[8]")]),
]


@pytest.mark.parametrize("peak, name, prompt_tokens, keys", PEAKS)
def test_the_plan_covers_the_peaks_that_were_measured(peak, name, prompt_tokens, keys):
    planned = plan_run(load_recipe(name, keys), prompt_tokens).total_bytes / 2**30
    assert peak <= planned <= 1.3 * peak + 0.5


def test_a_training_plan_counts_what_segments_keep():
    """Replaying beacons keeps a list of prompt and beacons per chunk."""
    shape = ModelShape.of(load_config("tiny"), torch.float32)
    often, rarely = (
        make_plan(shape, make(name), rows=4, prompt_tokens=64, new_tokens=512, weight_bytes=2**20)
        for name in ("beacon:2", "beacon:16")
    )
    settings = dict(trained=10, micro_batch_tokens=2048, checkpointing=False, reference=False, evaluates=False) | STEP
    plans = [make_training_plan(rollout, shape, **settings, shadow=True) for rollout in (often, rarely)]
    assert plans[0].update_bytes > plans[1].update_bytes


def test_a_training_plan_counts_masks_where_there_are_no_segments():
    """Heads that are wider than kernels take attend under tokens x tokens: one mask for all heads of latents."""
    latent = DeepseekV3Config()  # 128 + 64 numbers of a key, 128 of a value
    rotated = DeepseekV3Config(qk_rope_head_dim=256)
    wide = LlamaConfig(head_dim=512, num_attention_heads=8, num_key_value_heads=2)
    settings = dict(trained=10, micro_batch_tokens=4096, reference=False, evaluates=False, shadow=True) | STEP
    for config, masks in ((latent, 0), (rotated, 1), (wide, 8)):
        shape = ModelShape.of(config, torch.bfloat16)
        assert shape.learner_masks == masks
        rollout = make_plan(shape, make("rkv"), rows=4, prompt_tokens=64, new_tokens=4032, weight_bytes=2**20)
        narrow = replace(shape, value_dim=None, head_dim=min(shape.head_dim, 256))
        for checkpointing in (True, False):
            plans = [make_training_plan(rollout, s, **settings, checkpointing=checkpointing) for s in (shape, narrow)]
            more = plans[0].update_bytes - plans[1].update_bytes
            least = masks * 4096 * 4096 * (1 + 2) * (1 if checkpointing else shape.slot_layers)  # bool, bf16
            assert more >= least and (masks or more == 0)


def test_a_training_plan_counts_routes_and_supports():
    shape = ModelShape.of(load_config("tiny"))
    sizes = dict(rows=8, prompt_tokens=20, new_tokens=44, weight_bytes=4000)
    rollout = make_plan(shape, make("rkv").bind(32, 8), **sizes)
    options = dict(trained=1000, micro_batch_tokens=256, checkpointing=True, reference=False, evaluates=False, **STEP)

    def update(**told: int) -> int:
        return make_training_plan(rollout, shape, **options, **told).update_bytes

    routing, kept = Routing(layers=2, experts=300, chosen=2), 7
    tokens = 4 * (rollout.prompt_tokens + rollout.new_tokens)  # as many rows as a micro-batch holds
    routes = torch.zeros(routing.layers, tokens, routing.chosen, dtype=routing.dtype)  # as learn/routes.py makes them
    ids = side_by_side(torch.full((tokens,), kept), torch.arange(kept, dtype=torch.int32).repeat(tokens))
    assert update(routes=routing.token_bytes) - update() == routes.nbytes
    assert ids.nbytes <= update(support=kept) - update() <= 11 * ids.nbytes  # and a chunk's, with their logits
    assert update(routes=routing.token_bytes, support=kept) == update(support=kept) + routes.nbytes


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
    settings = dict(micro_batch_tokens=64, checkpointing=False, reference=False, evaluates=False, shard=True) | STEP
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
