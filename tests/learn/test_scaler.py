"""float16: a loss whose scale moves, updates that are left out, and runs that go on to the byte."""

import copy
import math

import pytest
import torch

from sparse_rl import Engine, Sampling
from sparse_rl.errors import SparseRLError
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.learn.batch import collate, score
from sparse_rl.learn.correct import PRESETS
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.optimizer import MasterAdamW, OptimizerSettings
from sparse_rl.learn.scaler import INTERVAL, LARGEST, START, LossScale
from sparse_rl.train.checkpoint import load_state
from sparse_rl.train.run import train
from tests.helpers.learning import batches_of
from tests.helpers.models import prompts_of, tiny
from tests.helpers.runs import recipe, weights

STEADY = OptimizerSettings(lr=1e-3)


def batch_of(model, view="shadow", loss=None):
    done = Engine(model, compressor="rkv", budget=12, interval=6, rows=6).generate(
        prompts_of(5, 30, 14), 2, Sampling(40, stop_ids=(7,))
    )
    scored = score(model, collate(done), 64, view=view)
    (batch,) = batches_of(scored, torch.tensor([1.0, -1.0, 0.5, -0.5, 1.0, -1.0]), PRESETS["none"], loss or Loss())
    return batch


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def test_a_scale_halves_and_doubles():
    scale, generator = LossScale(), torch.Generator().manual_seed(0)
    for _ in range(3000):
        finite = bool(torch.rand((), generator=generator) < 0.99)
        before, scale = scale, scale.after(finite)
        if not finite:
            assert scale == LossScale(max(1.0, before.value / 2))
        elif before.updates == INTERVAL - 1:
            assert scale == LossScale(min(LARGEST, 2 * before.value))
        else:
            assert scale == LossScale(before.value, before.updates + 1)
        assert 1 <= scale.value <= LARGEST and math.frexp(scale.value)[0] == 0.5
        assert LossScale.from_state(scale.state_dict()) == scale
    assert LossScale(1.0).after(False) == LossScale(1.0)
    for wrong in ({"value": 3.0, "updates": 0}, {"value": 0.5, "updates": 0}, {"value": math.nan, "updates": 0}):
        with pytest.raises(ValueError, match="the loss scale is"):
            LossScale.from_state(wrong)


@pytest.mark.parametrize("value", [1.0, 2.0**7, START])
def test_a_scale_leaves_an_update_as_it_is(value):
    """In fp32, where nothing overflows: the same bits."""
    models, norms = [copy.deepcopy(tiny("llama")) for _ in range(2)], []
    for model, scale in zip(models, (None, LossScale(value))):
        optimizer = MasterAdamW(model.parameters(), STEADY, scale=scale)
        for step in range(3):
            tokens = torch.arange(8)[None] + step
            optimizer.scaled(model(tokens, labels=tokens).loss).backward()
            norms.append(optimizer.step(step)[0])
    assert norms[:3] == norms[3:] and all(map(torch.equal, parameters(models[0]), parameters(models[1])))


def test_gradients_that_vanish_in_float16_survive_scaled():
    """A loss divided by 1e6: against fp32 gradients of the same weights."""
    small = Loss(mean="dr-grpo", constant=10**6)
    half = copy.deepcopy(tiny("llama")).half()
    batch = batch_of(half, loss=small)
    found = {}
    for name, scale in (("scaled", None), ("plain", LossScale(1.0))):
        learner = Learner(copy.deepcopy(half), STEADY, small, micro_batch_tokens=10_000)
        learner.optimizer.scale = scale or learner.optimizer.scale
        learner._accumulate_gradients(batch, torch.arange(6), torch.zeros_like(batch.mask))
        learner.optimizer._unscale()
        found[name] = torch.cat([g.reshape(-1) for g in learner.optimizer.gradients()]).double()
    whole = Learner(copy.deepcopy(half).float(), STEADY, small, micro_batch_tokens=10_000)
    whole._accumulate_gradients(batch, torch.arange(6), torch.zeros_like(batch.mask))
    exact = torch.cat([g.reshape(-1) for g in whole.optimizer.gradients()]).double()

    def error(name):
        return ((found[name] - exact).norm() / exact.norm()).item()

    assert error("scaled") < 0.02 < 0.2 < error("plain")


def test_an_overflow_leaves_the_update_out_and_does_not_end_a_run():
    half = copy.deepcopy(tiny("llama")).half()
    batch = batch_of(half)
    learner = Learner(half, STEADY, Loss(), max_skipped=2)
    assert learner.optimizer.scale == LossScale()
    learner.optimizer.scale = LossScale(LARGEST)
    skipped, before = 0, parameters(half)
    while (metrics := learner.step(batch, check=True).metrics).get("update/skipped/count"):
        assert metrics == {"update/skipped/count": 1.0, "update/loss_scale": LARGEST / 2**skipped}
        assert all(map(torch.equal, before, parameters(half))) and learner.version == learner.skipped == 0
        skipped += 1
        assert skipped < 24
    assert skipped > 2 and metrics["update/loss_scale"] == LARGEST / 2**skipped and learner.version == 1
    assert not all(map(torch.equal, before, parameters(half)))


def test_numbers_that_no_scale_makes_finite_end_a_run():
    half = copy.deepcopy(tiny("llama")).half()
    batch = batch_of(half)
    half.model.layers[0].mlp.up_proj.weight.register_hook(lambda g: g * math.nan)
    learner = Learner(half, STEADY, Loss(), max_skipped=2)
    for _ in range(int(math.log2(START))):
        assert learner.step(batch).metrics["update/skipped/count"] == 1
    assert learner.optimizer.scale.value == 1 and learner.skipped == 0
    learner.step(batch)
    with pytest.raises(SparseRLError, match="2 optimizer steps in a row"):
        learner.step(batch)


@pytest.mark.parametrize("method", ["shadow", pytest.param("sparse-rl", marks=pytest.mark.slow)])
def test_a_float16_run_goes_on_to_the_byte(method, tmp_path):
    settings = dict(model={"dtype": "float16"}, learn={"method": method}, eval={"every": 0})
    train(recipe(**settings, run={"steps": 3}), tmp_path / "whole", show=False)
    train(recipe(**settings, run={"steps": 1}), tmp_path / "parts", show=False)
    train(recipe(**settings, run={"steps": 3}), tmp_path / "parts", resume=True, show=False)
    whole, parts = ((tmp_path / name / "metrics.jsonl").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
    _, last = find_checkpoints(tmp_path / "whole" / "checkpoints")[-1]
    state = load_state(last)["learner"]
    lines = read_lines(tmp_path / "whole" / "metrics.jsonl")
    left_out = sum(line["update/skipped/count"] for line in lines)
    assert state["loss_scale"]["value"] == START / 2**left_out and all(line["update/loss_scale"] for line in lines)
    assert all(abs(line["gap/abs/mean"]) < 0.05 for line in lines) or method != "shadow"
    assert all(tensor.dtype == torch.float16 for tensor in weights(last).values() if tensor.is_floating_point())
