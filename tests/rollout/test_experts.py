"""Experts of a decode step by our product: the experts of transformers' modules, switched on for a step alone."""

import copy

import pytest
import torch

from sparse_rl import Engine, Sampling
from sparse_rl.kernels import ops
from sparse_rl.rollout import experts
from sparse_rl.rollout.capture import addresses
from sparse_rl.rollout.experts import NAME, computing_experts, experts_to_switch
from tests.helpers.decoding import change_rules, same
from tests.helpers.hybrids import HYBRIDS, hybrid
from tests.helpers.models import MIXTURES, prompts_of, tiny

NEMOTRON = dict(  # experts without a gate, two of its four layers
    layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    moe_shared_expert_intermediate_size=16,
    n_group=1,
    topk_group=1,
)
WITH_EXPERTS = [*MIXTURES, "granitemoehybrid", "jamba", "qwen3_next", "nemotron_h"]


def mixture(name):
    if name == "nemotron_h":
        return hybrid.__wrapped__(name, **NEMOTRON)
    return copy.deepcopy(hybrid(name) if name in HYBRIDS else tiny(name))


@pytest.fixture
def switched(monkeypatch):
    """Our product in fp32 everywhere. Returns the implementations that experts were computed by."""
    change_rules(monkeypatch, own_experts=(torch.float32,))
    seen, forward = [], experts.experts_forward

    def noted(module, *args):
        seen.append(module.config._experts_implementation_internal)
        return forward(module, *args)

    monkeypatch.setattr(experts, "experts_forward", noted)
    return seen


def implementations(model):
    return [m.config._experts_implementation for m in model.modules() if hasattr(m, "config")]


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_experts_are_those_of_the_modules(name, kernel, switched, monkeypatch):
    device = "cuda" if kernel and torch.cuda.is_available() else "cpu"
    model, found = mixture(name).to(device), []
    modules = [m for m in model.modules() if experts._is_dispatched(m)]
    assert modules, "no experts were found"
    for module in modules:
        module.register_forward_hook(lambda module, args, output: found.append((module, args, output)))
    tokens = torch.arange(1, 10, device=device)[None]
    with torch.no_grad():
        model(tokens, use_cache=False)
        if kernel:  # in Triton's interpreter, if there is no GPU
            pytest.importorskip("triton")
            monkeypatch.setattr(ops, "place_of", lambda tensor: ops.Place("cuda", triton=True))
        for module, args, expected in list(found):
            with computing_experts(experts_to_switch(model)):
                torch.testing.assert_close(module(*args), expected, atol=1e-5, rtol=1e-4)
    assert switched == [NAME] * len(modules)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_rollouts_are_those_of_the_modules(name, switched, monkeypatch):
    model = mixture(name)
    before = implementations(model)

    def rollout():
        engine = Engine(model, "rkv", budget=12, interval=4, rows=3)
        return engine.generate(prompts_of(4, 21, 9), 2, Sampling(20, stop_ids=(3,)), seed=2)

    ours = rollout()
    assert switched and implementations(model) == before
    change_rules(monkeypatch, own_experts=())
    calls = len(switched)
    same(ours, rollout(), tolerance=1e-4)
    assert len(switched) == calls


def test_only_steps_are_switched(switched):
    """Prompts of any length, and learners, keep the model's own: theirs are fast where thousands of tokens are fed."""
    model = mixture("qwen3-moe")
    engine = Engine(model, "rkv", budget=12, interval=4, rows=3)
    engine.generate(prompts_of(9), 1, Sampling(1), seed=2)
    assert not switched
    engine.generate(prompts_of(9), 1, Sampling(2, stop_ids=()), seed=2)
    assert len(switched) == 3  # layers


def test_a_failing_step_leaves_the_model_as_it_was(switched, monkeypatch):
    model = mixture("mixtral")
    before = implementations(model)
    monkeypatch.setattr(ops, "expert_product", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        Engine(model, "rkv", budget=12, interval=4, rows=3).generate(prompts_of(9), 1, Sampling(4), seed=2)
    assert implementations(model) == before


def test_what_is_not_switched(monkeypatch):
    model = mixture("qwen3-moe")
    assert experts_to_switch(model) == []  # a CPU has no use for it
    change_rules(monkeypatch, own_experts=(torch.float32,))
    assert experts_to_switch(model) == [model.config]
    assert experts_to_switch(tiny("llama")) == []
    assert experts_to_switch(copy.deepcopy(model).bfloat16()) == []
    grouped = addresses(model)
    model.set_experts_implementation("batched_mm")
    assert experts_to_switch(model) == []  # the user's choice, which can be captured
    assert addresses(model) != grouped  # a captured step would be stale
    model.set_experts_implementation("eager")
    assert experts_to_switch(model) == [model.config]
    next(m for m in model.modules() if experts._is_dispatched(m))._is_expert_parallel = True
    assert experts_to_switch(model) == []


def test_where_devices_need_it():
    cuda, cpu = (ops.rules(torch.device(kind)).own_experts for kind in ("cuda", "cpu"))
    assert set(cuda) == {torch.float32, torch.float16} and cpu == ()
