"""Warm-up: gradients, order, signals and sentences."""

import copy
import os
import signal
import subprocess

import pytest
import torch

import sparse_rl.train.warmup as module
from sparse_rl import tasks
from sparse_rl.errors import SparseRLError
from sparse_rl.models import load_model
from tests.helpers.models import tiny
from tests.helpers.runs import command, recipe, write_recipe


def test_a_warm_up_that_diverges_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "batch_logprobs", lambda model, tokens, mask: model.lm_head.weight.sum() * float("nan"))
    with pytest.raises(
        SparseRLError, match=r"warm-up step 1: loss nan, gradient norm nan; lower warmup.lr \(now 0.002\)"
    ):
        module.warmup(recipe(warmup={"steps": 2}), tmp_path / "model", show=False)
    assert not (tmp_path / "model").exists()


def test_a_warm_up_in_micro_batches_has_the_gradient_of_the_batch():
    tokens = torch.randint(1, 60, (7, 40), generator=torch.Generator().manual_seed(0))
    place, ends = torch.arange(40), torch.tensor([40, 12, 33, 9, 20, 40, 11])
    mask = (place >= 5) & (place < ends[:, None])
    found = []
    for micro_batch_tokens in (10_000, 80, 1):
        model = copy.deepcopy(tiny("llama"))
        loss = module._backward(model, tokens, mask, micro_batch_tokens)
        found.append((loss, torch.cat([p.grad.flatten() for p in model.parameters()])))
    logprobs = module.batch_logprobs(tiny("llama"), tokens, mask)
    assert found[0][0] == pytest.approx(-logprobs.sum().item() / mask.sum().item(), rel=1e-6)
    for loss, gradient in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-6)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_warm_up_sees_its_prompts_in_order(tmp_path, monkeypatch, workers):
    seen, logprobs = [], module.batch_logprobs
    monkeypatch.setattr(
        module, "batch_logprobs", lambda model, tokens, mask: seen.append(tokens) or logprobs(model, tokens, mask)
    )
    settings = recipe(model={"name": "tiny"}, warmup={"steps": 5, "batch": 3, "workers": workers}, eval={"prompts": 2})
    module.warmup(settings, tmp_path / "model", show=False)
    tokenizer, task = load_model("tiny")[1], tasks.make(settings.task.name, **settings.task.options)
    texts = tokenizer.batch_decode([row for tokens in seen for row in tokens], skip_special_tokens=True)
    assert texts == [prompt.text + task.solution(prompt) for prompt in task.sample(0, 15)]


@pytest.mark.parametrize(
    ("number", "workers"),
    [
        (signal.SIGTERM, 2),
        pytest.param(signal.SIGINT, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow),
    ],
)
def test_a_warm_up_that_is_stopped_leaves_its_model(tmp_path, number, workers):
    """The signal goes to the whole group, as terminals and schedulers send it."""
    given = write_recipe(tmp_path, model={"name": "tiny"}, warmup={"steps": 100_000, "batch": 4, "workers": workers})
    process = subprocess.Popen(
        command("warmup", given, "--out", tmp_path / "model"),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    while b"step 25/" not in process.stderr.readline():
        assert process.poll() is None
    os.killpg(process.pid, number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error.decode()
    assert "Traceback" not in error.decode() and "interrupted after" in error.decode()
    assert load_model(str(tmp_path / "model"))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_task_that_cannot_warm_up_is_told_in_a_sentence(tmp_path, workers):
    settings = recipe(
        model={"name": "tiny"}, task={"name": "countdown", "search": 5}, warmup={"steps": 2, "workers": workers}
    )
    with pytest.raises(
        SparseRLError, match=r"^countdown: none of 1000 problems .* had a search of at most 5 characters"
    ):
        module.warmup(settings, tmp_path / "model", show=False)
