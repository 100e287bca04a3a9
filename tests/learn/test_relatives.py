"""The relatives of GRPO: what their settings make of the learner, in both views, against fp64; whole runs of each."""

import copy
import math

import pytest
import torch

from sparse_rl import Engine, Sampling, token_logprobs
from sparse_rl.config import make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.files import read_lines
from sparse_rl.learn.batch import collate, score
from sparse_rl.learn.correct import PRESETS
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.objective import RELATIVES, settings_of
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.train.run import train
from tests.helpers.learning import batches_of
from tests.helpers.models import prompts_of, tiny
from tests.helpers.processes import recorded
from tests.helpers.runs import recipe, run


@pytest.mark.parametrize("view", ["dense", "shadow"])
@pytest.mark.parametrize("preset", ["none", "tis"])
def test_a_step_of_cispo_has_the_gradient_of_its_formula_in_fp64(preset, view):
    loss = Loss(clip="weight", clip_low=1.0, clip_high=0.01, mean="token-mean")
    model = copy.deepcopy(tiny("llama"))
    engine = Engine(model, "rkv", budget=12, interval=4, rows=6)
    done = engine.generate(prompts_of(5, 9, 14), 2, Sampling(20, stop_ids=(7, 30), for_correction=True), seed=1)
    scored = score(model, collate(done), 64, view=view)
    advantages = torch.tensor([1.0, -0.5, 0.0, 0.7, -1.2, 0.4], dtype=torch.float64)
    (batch,) = batches_of(scored, advantages, PRESETS[preset], loss)
    now, g = copy.deepcopy(model), torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in now.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=g))

    old, double = copy.deepcopy(model).double(), copy.deepcopy(now).double()
    total, tokens, bounded = torch.zeros((), dtype=torch.float64), sum(len(t.response_tokens) for t in done), 0
    for t, advantage in zip(done, advantages.tolist(), strict=True):
        trace = t.trace if view == "shadow" else None
        response = slice(t.num_prompt_tokens, None)
        before = token_logprobs(old, t.tokens, trace)[response].detach().tolist()
        after = token_logprobs(double, t.tokens, trace)[response]
        for i, value in enumerate(after):
            ratio = math.exp(value.item() - before[i])
            sampler = t.sampler_logprobs[t.num_prompt_tokens + i].item()
            weight = min(math.exp(before[i] - sampler), 2.0) if preset == "tis" else 1.0
            total = total - weight * min(ratio, 1.01) * advantage * value / tokens
            bounded += ratio > 1.01 and advantage != 0
    total.backward()

    learner = Learner(now, OptimizerSettings(lr=1e-3), loss, micro_batch_tokens=64)
    found = recorded(learner)
    metrics = learner.step(batch).metrics
    assert metrics["update/loss"] == pytest.approx(total.item(), rel=1e-4)
    assert metrics["update/clip/frac"] == pytest.approx(bounded / tokens) and 0 < bounded < tokens
    size = math.sqrt(sum(p.grad.square().sum().item() for p in double.parameters()))
    for mine, p in zip(found[0], double.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), p.grad, rtol=2e-3, atol=2e-4 * size)


@pytest.mark.parametrize("name", RELATIVES)
def test_the_settings_of_every_relative_make_a_run(name, tmp_path):
    sections: dict[str, dict] = {"eval": {"every": 0}, "run": {"steps": 1, "samples": 0, "diagnose": 0}}
    for key, value in RELATIVES[name][1].items():
        section, _, setting = key.partition(".")
        sections.setdefault(section, {})[setting] = value
    train(recipe(**sections), tmp_path / "run", show=False)
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["update/grad_norm"] > 0


def test_relatives_are_listed_with_their_settings_and_no_algorithms_of_their_own():
    listed = run("list", "algorithms").stdout
    assert all(settings_of(name) in listed for name in RELATIVES)
    assert len(listed.splitlines()) == 3 + len(RELATIVES)
    with pytest.raises(SparseRLError, match=r"'cispo', which is grpo with other settings; use --loss.clip weight"):
        make_recipe({"model": {"name": "tiny"}, "task": {"name": "sums"}, "learn": {"algorithm": "cispo"}})


def test_lists_say_which_to_choose_beside_the_names():
    for what, choice in (("algorithms", "Start with grpo"), ("methods", "shadow"), ("presets", "shadow")):
        told = run("list", what)
        assert choice in told.stderr and told.stderr.startswith("sparse-rl: ") and "sparse-rl: " not in told.stdout
    assert run("list", "recipes").stderr == ""
