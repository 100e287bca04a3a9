"""Switching a model to one of our attentions: often, without looking for what to change each time."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from sparse_rl import Engine, Sampling
from sparse_rl.attention import Switch
from tests import survey
from tests.helpers.models import prompts_of, tiny

TURN = Sampling(40, stop_ids=())


@pytest.fixture
def visits(monkeypatch):
    """The modules that were walked through, one after the other."""
    seen, plain = [], nn.Module.named_modules

    def named_modules(module, *args, **options):
        seen.append(module)
        return plain(module, *args, **options)

    monkeypatch.setattr(nn.Module, "named_modules", named_modules)
    return seen


def state_of(model):
    """What a switch could leave behind."""
    configs = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    return configs, [(m.training, sorted(vars(m)), vars(m).get("forward")) for m in model.modules()]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gptj", "bart"])
def test_the_model_is_looked_through_once(architecture, visits):
    model = tiny(architecture) if architecture in ("llama", "gemma3") else survey.tiny_model(architecture)
    switch, before = Switch(model, "slots"), state_of(model)
    for _ in range(3):
        with switch():
            assert state_of(model) != before
        assert state_of(model) == before
        with pytest.raises(ZeroDivisionError), switch():
            raise ZeroDivisionError
        assert state_of(model) == before
    visits.clear()
    with switch():
        assert switch.modules
    assert not visits


@pytest.mark.parametrize("architecture, options", [("llama", {}), ("qwen3-moe", {"record_routes": True})])
def test_a_round_walks_through_no_modules(architecture, options, visits):
    """How many modules a round visits does not grow with the layers."""
    found = []
    for layers in (2, 6):
        engine = Engine(tiny(architecture, num_hidden_layers=layers), budget=16, interval=8, rows=3, **options)
        with engine.open(16, 200) as live:
            chats = [live.submit(prompt, TURN) for prompt in prompts_of(5, 9)]
            live.run()
            live.extend(chats[0], [5, 6, 7])
            visits.clear()
            live.run()
            found.append(len(visits) / live._loop.num_steps)
    assert found[0] == found[1]


@pytest.mark.parametrize("architecture", ["llama", "gptj", "bart"])
def test_a_module_that_was_replaced_between_rounds_is_noticed(architecture):
    found = []
    for replaced in (False, True):
        model = copy.deepcopy(tiny("llama") if architecture == "llama" else survey.tiny_model(architecture))
        with Engine(model, budget=16, interval=8, rows=2).open(16, 200) as live:
            chat = live.submit(prompts_of(9)[0], TURN)
            for _ in range(5):
                live.step()
            if replaced:
                owners = [(m, name) for m in model.modules() for name, _ in m.named_children() if "attn" in name]
                owners = [(m, name) for m, name in owners if "norm" not in name and "encoder" not in name]
                assert owners
                for owner, name in owners:
                    shared = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
                    setattr(owner, name, copy.deepcopy(getattr(owner, name), shared).train())
                before = state_of(model)
                live.step()
                assert state_of(model) == before
            live.run()
            found.append(live.release(chat))
    assert found[0].tokens.equal(found[1].tokens) and found[0].sampler_logprobs.equal(found[1].sampler_logprobs)
    assert found[0].trace.evicted_at.equal(found[1].trace.evicted_at)


def test_the_model_may_be_used_between_rounds(llama):
    """It is as it was: with its own attention, in its own mode, whatever that is by now."""
    plain, ids = [], torch.tensor([[3, 1, 4]])
    dropout = llama.model.layers[0].mlp
    with Engine(llama, budget=16, interval=8, rows=2).open(16, 200) as live:
        before = state_of(llama)
        with torch.no_grad():
            expected = llama(ids).logits
        chat = live.submit(prompts_of(9)[0], TURN)
        for number in range(6):
            live.step()
            dropout.train(number % 2 == 1)
            after = state_of(llama)
            with torch.no_grad() if number else nullcontext():
                plain.append(llama(ids).logits)
            live.step()
            assert state_of(llama) == after
        dropout.eval()
        assert state_of(llama) == before and chat.status == "running"
    assert all(logits.equal(expected) for logits in plain) and plain[0].requires_grad
