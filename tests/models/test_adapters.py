"""Adapters: the layers that get some, and how many parameters the plan counts."""

import copy

import pytest

from sparse_rl.errors import SparseRLError
from sparse_rl.models import with_lora
from sparse_rl.train.run import lora_parameters
from tests.helpers.models import MIXTURES, tiny
from tests.helpers.runs import recipe


def test_only_the_layers_that_are_named_get_adapters():
    model, twin = (copy.deepcopy(tiny("llama")) for _ in range(2))
    adapted = with_lora(model, 2, 4, ["q_proj", "mlp.down_proj"])
    found = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in adapted.named_parameters() if "lora_A" in name}
    assert found == {"q_proj", "down_proj"}
    trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert trained == lora_parameters(tiny("llama").config, 2, ["q_proj", "mlp.down_proj"])
    every = with_lora(twin, 2, 4)
    assert sum(p.numel() for p in every.parameters() if p.requires_grad) == lora_parameters(tiny("llama").config, 2)


@pytest.mark.parametrize("kind", MIXTURES)
def test_experts_and_routers_get_no_adapters_and_the_plan_counts_the_others(kind):
    model = tiny(kind)
    adapted = with_lora(copy.deepcopy(model), 2, 4)
    trained = {name: p.numel() for name, p in adapted.named_parameters() if p.requires_grad}
    assert sum(trained.values()) == lora_parameters(model.config, 2)
    assert trained and all("self_attn" in name or "shared_expert_gate" in name for name in trained), trained
    with pytest.raises(SparseRLError, match="the feed-forward layers of a mixture"):
        with_lora(copy.deepcopy(model), 2, 4, ["up_proj"])


@pytest.mark.parametrize("target, said", [("qproj", "did you mean 'q_proj'?"), ("lm_head", "besides the head")])
def test_adapters_for_layers_that_are_not_there_are_refused(target, said):
    with pytest.raises(SparseRLError, match=f"model.lora_targets has '{target}'") as refused:
        with_lora(copy.deepcopy(tiny("llama")), 2, 4, ["v_proj", target])
    assert said in str(refused.value)
    with pytest.raises(SparseRLError, match=r"model.lora_targets names layers \(v_proj\), but model.lora_rank is 0"):
        recipe(model={"lora_targets": ["v_proj"]})
