"""Adapters: the layers that get some, and how many parameters the plan counts."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
    assert trained and all("self_attn" in name for name in trained), trained
    with pytest.raises(SparseRLError, match="the feed-forward layers of a mixture"):
        with_lora(copy.deepcopy(model), 2, 4, ["up_proj"])


@pytest.mark.parametrize("kind", ["phimoe", "llama4_text", "jetmoe", "granitemoehybrid", "gpt2"])
def test_routers_of_any_kind_get_none_and_a_pass_still_runs(kind):
    """Routers of some families are linear layers that return several tensors, which an adapter's wrapper breaks."""
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    own = {"intermediate_size": 48, "vocab_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}
    layers = {"layer_types": ["attention"], "mamba_n_heads": 8} if kind == "granitemoehybrid" else {}
    config = AutoConfig.for_model(kind, **small, **own, **layers, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_config(config)
    adapted = with_lora(model, 2, 4)
    trained = {name: p.numel() for name, p in adapted.named_parameters() if p.requires_grad}
    assert sum(trained.values()) == lora_parameters(config, 2) > 0
    assert not any("router" in name or "expert" in name for name in trained), trained
    adapted(torch.tensor([[3, 4, 5]])).logits.sum().backward()
    assert any(p.grad is not None for p in adapted.parameters() if p.requires_grad)


@pytest.mark.parametrize("target, said", [("qproj", "did you mean 'q_proj'?"), ("lm_head", "besides the head")])
def test_adapters_for_layers_that_are_not_there_are_refused(target, said):
    with pytest.raises(SparseRLError, match=f"model.lora_targets has '{target}'") as refused:
        with_lora(copy.deepcopy(tiny("llama")), 2, 4, ["v_proj", target])
    assert said in str(refused.value)
    with pytest.raises(SparseRLError, match=r"model.lora_targets names layers \(v_proj\), but model.lora_rank is 0"):
        recipe(model={"lora_targets": ["v_proj"]})
