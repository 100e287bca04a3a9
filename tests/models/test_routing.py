"""Which mixtures of experts tell and follow routes, and what is refused."""

import copy

import pytest
import torch
import transformers

from sparse_rl import Engine
from sparse_rl.errors import SparseRLError
from sparse_rl.models.routing import (
    RouteRecorder,
    Routing,
    replaying_routes,
    routers,
    routing_of,
    why_not_replayed,
)
from tests.helpers.models import MIXTURES, tiny


def phimoe():
    """A mixture whose routers sample their experts by a rule of their own."""
    small = dict(vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_local_experts=4)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)
    config = transformers.PhimoeConfig(**small, **heads, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", MIXTURES)
def test_known_mixtures_follow(name):
    model = tiny(name)
    assert why_not_replayed(model) is None
    config = model.config
    experts = getattr(config, "num_local_experts", None) or config.num_experts
    assert routing_of(model) == Routing(3, experts, config.num_experts_per_tok)


def test_a_mixture_with_groups_and_sigmoids_follows():
    small = dict(vocab_size=61, hidden_size=32, intermediate_size=32, num_hidden_layers=2, moe_intermediate_size=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256)
    experts = dict(n_routed_experts=8, num_experts_per_tok=2, n_group=4, topk_group=2, first_k_dense_replace=1)
    config = transformers.Glm4MoeConfig(**small, **heads, **experts, pad_token_id=0)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert why_not_replayed(model) is None and routing_of(model) == Routing(1, 8, 2)


def test_other_models_say_why_not():
    assert why_not_replayed(tiny("llama")) == "has no experts"
    model = phimoe()
    assert why_not_replayed(model) == "has routers (PhimoeTopKRouter) that choose 0 times, not once"
    with pytest.raises(SparseRLError, match=r"phimoe has routers .* its routes cannot be recorded"):
        Engine(model, "window", 8, 4, record_routes=True)
    with pytest.raises(SparseRLError, match=r"llama has no experts: its routes cannot be recorded"):
        Engine(tiny("llama"), "window", 8, 4, record_routes=True)


@pytest.mark.parametrize("name", MIXTURES)
def test_what_was_recorded_is_replayed_to_the_bit(name):
    model, tokens = tiny(name), torch.arange(1, 25).view(2, 12)
    routing = routing_of(model)
    with torch.no_grad(), RouteRecorder(model, routing) as recorder:
        routes = recorder.empty(24, torch.device("cpu"))
        logits = model(input_ids=tokens, use_cache=False).logits
    assert not any(router._forward_hooks for router in routers(model)) and routes.dtype == torch.uint8
    told = (routes.long() + 1).remainder(routing.experts)
    with torch.no_grad():
        with replaying_routes(model, routes):
            again = model(input_ids=tokens, use_cache=False).logits
            with replaying_routes(model, told):  # the inner one counts
                other = model(input_ids=tokens, use_cache=False).logits
            assert torch.equal(again, model(input_ids=tokens, use_cache=False).logits)
        assert torch.equal(logits, model(input_ids=tokens, use_cache=False).logits)
    assert torch.equal(again, logits) and (other - logits).abs().max() > 0.1
    assert all("forward" not in vars(router) for router in routers(model))


def test_the_weights_are_the_models_own_at_the_recorded_experts():
    router = copy.deepcopy(routers(tiny("qwen3-moe"))[0])
    states, ids = torch.randn(4, 32), torch.tensor([[0, 1], [5, 2], [7, 3], [6, 4]])
    with replaying_routes(router, ids[None]):
        scores, weights, chosen = router(states)
        expected = scores.gather(1, ids).softmax(-1)
        assert torch.equal(chosen, ids) and torch.allclose(weights, expected, atol=1e-6)
        gradient = torch.autograd.grad(weights[:, 0].sum(), router.weight, retain_graph=True)[0]
    assert gradient.abs().max() > 0
    assert torch.allclose(gradient, torch.autograd.grad(expected[:, 0].sum(), router.weight)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "chosen", "why"),
    [(3, 2, "routes of 3 tokens were given to a forward pass of 5"), (5, 4, "choose 0 times, not once")],
)
def test_routes_of_another_pass_are_refused(tokens, chosen, why):
    model, routes = tiny("qwen3-moe"), torch.zeros(3, tokens, chosen, dtype=torch.int64)
    with pytest.raises(SparseRLError, match=why), replaying_routes(model, routes):
        model(input_ids=torch.arange(5)[None])


def test_the_record_is_small():
    assert Routing(48, 128, 8).token_bytes == 384 and Routing(48, 512, 10).token_bytes == 960
    assert Routing(1, 256, 1).dtype == torch.uint8 and Routing(1, 257, 1).dtype == torch.uint16
