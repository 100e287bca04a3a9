"""Long rows: inputs of layers on the host, MLPs by chunks; the losses, gradients and next weights of the plain path."""

import copy
import gc
import json
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from sparse_rl import Engine, Sampling
from sparse_rl.config import make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.kernels.modules import fused
from sparse_rl.learn import long
from sparse_rl.learn import packing as packing_module
from sparse_rl.learn.batch import collate, score
from sparse_rl.learn.learner import Learner, learning
from sparse_rl.learn.long import Host, by_chunks, long_rows, use_long_rows
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.method import METHODS
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.learn.score import batch_logprobs
from sparse_rl.models import load_config, with_lora
from sparse_rl.train.run import plan_run, with_values
from tests.helpers.learning import batches_of
from tests.helpers.models import prompts_of, tiny
from tests.helpers.runs import recipe


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(long, "MLP_CHUNK", 16)


def checkpointed(model, long_ones: bool):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if hasattr(model, "peft_config"):
        model.enable_input_require_grads()
    if long_ones:
        use_long_rows(model)
    return model


def adapted(model):
    torch.manual_seed(0)
    model = with_lora(model, 2, 4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("method", ["sparse-rl", "shadow", "smd"])
@pytest.mark.parametrize("kind", ["plain", "lora", "packed"])
def test_long_rows_take_the_step_of_plain_ones(method, kind, monkeypatch):
    """fp64, dense and under a trace, packed or not: log-probs, metrics, gradients and next weights."""
    monkeypatch.setattr(packing_module, "WORTH_PACKING", 2.0)
    start = copy.deepcopy(tiny("llama"))
    start = adapted(start) if kind == "lora" else start
    engine = Engine(start, budget=12, interval=4, rows=6)
    trajectories = engine.generate(prompts_of(5, 9, 14), 2, Sampling(20))
    found = []
    for offloads in (False, True):
        model = checkpointed(copy.deepcopy(start).double(), offloads)
        chosen = METHODS[method]
        scored = score(model, collate(trajectories), 90, view=chosen.view)
        (batch,) = batches_of(scored, torch.linspace(-1, 1, 6, dtype=torch.float64), chosen.correction, Loss())
        learner = Learner(
            model, OptimizerSettings(lr=1e-2), Loss(), micro_batch_tokens=90, packing=kind == "packed",
            distill=chosen.distill,
        )  # fmt: skip
        gradients, step = [], learner.optimizer.step
        monkeypatch.setattr(
            learner.optimizer,
            "step",
            lambda *a, g=gradients, o=learner.optimizer, s=step: g.extend(x.clone() for x in o.gradients()) or s(*a),
        )
        metrics = learner.step(batch).metrics
        found.append((scored.old_logprobs, metrics, gradients, [p.detach().clone() for p in model.parameters()]))
    (old, plain, theirs, weights), (new, other, ours, next_weights) = found
    assert (old - new).abs().max() < 1e-6
    for name, value in plain.items():
        assert other[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    for a, b in zip(theirs, ours, strict=True):
        assert (a - b).abs().max() <= 1e-6 * max(1e-2, a.abs().max())  # masters gather them in fp32
    for a, b in zip(weights, next_weights, strict=True):
        assert (a - b).abs().max() < 2e-4  # AdamW's first step is lr times a sign


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3", "olmo2", "smollm3"])
def test_every_known_mlp_has_its_gradients(name):
    """In fp64, over ragged rows: every MLP goes by chunks, and every gradient is that of the plain path."""
    tokens = torch.randint(1, 50, (3, 27), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, 0], mask[2, 20:] = False, False
    found, chunks = [], []
    for offloads in (False, True):
        model = checkpointed(copy.deepcopy(tiny(name)).double(), offloads)
        for module in model.modules():
            if type(module).__name__.endswith("MLP"):
                module.register_forward_pre_hook(lambda m, x: chunks.append("forward" in vars(m)))
        with learning(model), fused(model), long_rows(model):
            loss = batch_logprobs(model, tokens, mask).sum()
            loss.backward()
        found.append((loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
        assert not any("forward" in vars(m) for m in model.modules())
    assert any(chunks)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12) and found[0][1].keys() == found[1][1].keys()
    for n, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][n], gradient, rtol=1e-9, atol=1e-11, msg=n)


def test_an_mlp_is_computed_once_more_and_not_twice(monkeypatch):
    """Forward, and each chunk in its backward pass; when its layer is computed again the MLP is not."""
    seen = []
    plain = long.by_chunks

    def spy(module, own, chunk):
        return plain(module, lambda x: seen.append((torch.is_grad_enabled(), x.shape[1])) or own(x), chunk)

    monkeypatch.setattr(long, "by_chunks", spy)
    model = checkpointed(adapted(copy.deepcopy(tiny("llama"))), True)
    tokens = torch.randint(1, 50, (1, 40))
    with learning(model), long_rows(model):
        batch_logprobs(model, tokens, torch.arange(40)[None] > 0).sum().backward()
    layers = model.config.num_hidden_layers
    assert sorted(seen) == sorted([(again, n) for again in (False, True) for n in (16, 16, 8)] * layers)


def test_layers_keep_their_inputs_on_the_host_and_only_until_backward(monkeypatch):
    model, kept = checkpointed(copy.deepcopy(tiny("llama")), True), []
    put = Host.put
    monkeypatch.setattr(Host, "put", lambda self, x: kept.append(put(self, x)) or kept[-1])
    tokens = torch.randint(1, 50, (1, 40))
    with learning(model), long_rows(model):
        loss = batch_logprobs(model, tokens, torch.arange(40)[None] > 0).sum()
        hidden = model.config.hidden_size
        assert [k.host.shape for k in kept] == [(1, 40, hidden)] * model.config.num_hidden_layers
        assert all(k.before() is before for k, before in zip(kept[1:], kept))  # so that each can be fetched in time
        loss.backward()
    alive = [weakref.ref(k) for k in kept]
    kept.clear()
    del loss
    gc.collect()
    assert not any(ref() for ref in alive)


def test_short_rows_and_other_models_are_as_they_were():
    linear = nn.Linear(4, 4)
    x = torch.randn(2, 5, 4, requires_grad=True)
    assert by_chunks(linear, linear.forward, 16)(x).equal(linear(x))
    model = copy.deepcopy(tiny("llama"))
    with long_rows(model, None):
        assert not any("forward" in vars(m) for m in model.modules())


def test_the_plan_counts_what_is_held():
    """7B with adapters on 80 GB: 128k tokens do not fit without, but fit with, and the host holds inputs."""
    given = make_recipe(
        {
            "model": {"name": "qwen2.5-7b", "lora_rank": 32, "gradient_checkpointing": True},
            "task": {"name": "sums"},
            "rollout": {"rows": 8, "prompts": 2, "group_size": 4, "max_new_tokens": 131072},
            "learn": {"method": "shadow", "minibatches": 1},
            "eval": {"every": 0},
        }
    )
    plain, offloaded = (
        plan_run(with_values(given, {"model.gradient_checkpointing": value}), 512) for value in (True, "offload")
    )
    memory = 80 * 2**30
    assert offloaded.fits(memory) and not plain.fits(memory)
    config = load_config("qwen2.5-7b")
    assert offloaded.host_bytes == config.num_hidden_layers * (512 + 131072) * config.hidden_size * 2
    assert "offloaded to the host" in offloaded.text() and "offloaded" not in plain.text()
    adam = plan_run(with_values(given, {"optimizer.offload": True, "model.lora_rank": 0}), 512)
    whole = plan_run(with_values(given, {"model.lora_rank": 0}), 512)
    parameters = whole.rollout.weight_bytes // 2
    assert whole.optimizer_bytes == 16 * parameters and adam.optimizer_bytes == 4 * parameters
    assert adam.host_bytes == 12 * parameters


def test_a_divided_learner_is_refused():
    with pytest.raises(SparseRLError, match=r"is offload, which does not work with model\.shard; use true"):
        recipe(model={"gradient_checkpointing": "offload", "shard": True})


def test_the_benchmark_runs_on_a_cpu(tmp_path, monkeypatch):
    """All its stages, the check of the planted replay included; with and without, gradients are the same."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import long_learner

    command = ["long_learner.py", "--model", "tiny:2x64", "--dtype", "float32", "--device", "cpu", "--sampled", "8"]
    command += ["--lengths", "40", "--prompt", "8", "--budget", "12", "--interval", "4"]
    norms = []
    for way in ("offload", "true"):
        monkeypatch.setattr(sys, "argv", [*command, "--checkpointing", way, "--out", str(tmp_path / way)])
        long_learner.main()
        lines = [json.loads(line) for line in (tmp_path / way / "lines.jsonl").read_text().splitlines()]
        assert [line["view"] for line in lines] == ["shadow", "dense"]
        assert all(line["fits"] and line["update s"] is not None and line["score s"] is not None for line in lines)
        assert (tmp_path / way / "table.md").read_text().count("\n") == 4
        norms.append([line["grad_norm"] for line in lines])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and min(norms[0]) > 0
