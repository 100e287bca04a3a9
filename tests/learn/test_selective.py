"""Selective gradient checkpointing: the gradients of false and true to the bit, fewer products than true, and less
memory than false.
"""

import copy

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint as checkpointed
from torch.utils.flop_counter import FlopCounterMode

from sparse_rl import Engine, Sampling
from sparse_rl.errors import SparseRLError
from sparse_rl.kernels import ops
from sparse_rl.kernels.modules import fused
from sparse_rl.learn import packing as packing_module
from sparse_rl.learn.batch import collate, seen_by
from sparse_rl.learn.routes import sent_to
from sparse_rl.learn.score import batch_logprobs
from sparse_rl.learn.selective import keeping_products
from sparse_rl.models import with_lora
from sparse_rl.train.run import plan_run, train
from tests.helpers.checkpointing import Operations, checkpoint
from tests.helpers.decoding import change_rules
from tests.helpers.hybrids import HYBRIDS, hybrid
from tests.helpers.models import CONFIGS, MIXTURES, prompts_of, tiny
from tests.helpers.runs import recipe, weights

WAYS = (False, "selective", True)
RANK = 4


def rollouts(model, new=20):
    routes = "num_experts_per_tok" in vars(model.config)
    engine = Engine(model, budget=12, interval=4, rows=4, record_routes=routes)
    return engine.generate(prompts_of(5, 20), 2, Sampling(new, stop_ids=(7,)))


def adapted(model):
    pytest.importorskip("peft")
    torch.manual_seed(0)
    model = with_lora(copy.deepcopy(model), RANK, 8)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def found_by(model, how, done, shadow, rank=0, counting=None, packing=False):
    """Log-probs and gradients of a micro-batch."""
    model, sampled, rows = checkpoint(copy.deepcopy(model), how, rank), collate(done), torch.arange(len(done))
    routes = None if done[0].trace.routes is None else tuple(t.trace.routes for t in done)
    seen = seen_by(model, sampled, rows, shadow, packing, routes)
    sent = sent_to(model, routes, rows, sampled.lengths, seen)
    assert (seen is not None and seen.packing is not None) == packing
    with counting or Operations(), fused(model):
        logprobs = batch_logprobs(model, sampled.tokens, sampled.mask, 1.0, seen, sent)
        logprobs.square().sum().backward()
    return logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(found, expected):
    assert torch.equal(found[0], expected[0]) and found[1].keys() == expected[1].keys()
    assert any(gradient.abs().max() > 0 for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        assert torch.equal(found[1][name], gradient), name


@pytest.mark.parametrize("adapters", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize("shadow", [False, True], ids=["dense", "shadow"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gpt-oss", "gemma2", "gemma3"])
def test_gradients_have_the_bits_of_the_other_ways(name, shadow, adapters):
    """Experts, sliding windows, norms behind products, soft-caps, and (gpt-oss) products that are changed in place."""
    model = tiny(name)
    done = rollouts(model)
    assert (done[0].trace.routes is not None) == (name in MIXTURES)
    model, rank = (adapted(model), RANK) if adapters else (model, 0)
    plain, selective, full = (found_by(model, how, done, shadow, rank) for how in WAYS)
    assert_same_bits(selective, plain)
    assert_same_bits(full, plain)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("llama", "qwen3-moe", "gpt-oss", "gemma2")])
def test_every_architecture(name):
    done = rollouts(tiny(name), new=8)
    plain, selective = (found_by(tiny(name), how, done, True) for how in WAYS[:2])
    assert_same_bits(selective, plain)


@pytest.mark.parametrize("name", [*HYBRIDS])
def test_recurrent_layers_run_again(name):
    tokens, found = torch.tensor(prompts_of(24, 24)), []
    for how in WAYS[:2]:
        model = checkpoint(copy.deepcopy(hybrid(name)), how)
        logprobs = batch_logprobs(model, tokens, torch.arange(24).expand(2, -1) > 0)
        logprobs.square().sum().backward()
        found.append((logprobs.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("name", ["llama", "qwen3-moe"])
def test_packed_rows(name, monkeypatch):
    monkeypatch.setattr(packing_module, "WORTH_PACKING", 2.0)
    done = rollouts(tiny(name))
    plain, selective = (found_by(tiny(name), how, done, True, packing=True) for how in WAYS[:2])
    assert_same_bits(selective, plain)


@pytest.mark.parametrize("shadow", [False, True], ids=["dense", "shadow"])
@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma3", "qwen2"])
def test_no_product_is_computed_again(name, shadow):
    """Nor attention, which counts as products, too."""
    done, flops = rollouts(tiny(name)), {}
    for how in WAYS:
        counting = FlopCounterMode(display=False)
        found_by(tiny(name), how, done, shadow, counting=counting)
        flops[how] = counting.get_total_flops()
    assert flops["selective"] == flops[False] and flops[True] > 1.2 * flops[False]


def test_of_adapters_only_second_products_are_computed_again():
    model = tiny("llama")
    done, model, counts = rollouts(model), adapted(model), {}
    for how in WAYS:
        counting = Operations()
        found_by(model, how, done, True, RANK, counting)
        counts[how] = counting.counts["aten::mm"]
    adapters = sum("lora_B" in name for name, _ in model.named_parameters())
    layers = model.config.num_hidden_layers
    # a layer's last one does not run again, because backward needs nothing from behind it
    assert counts["selective"] - counts[False] == adapters - layers
    assert counts[True] - counts[False] == 3 * (adapters - layers) + 2 * layers  # and down's own, and its first


def test_kernels_of_attention_are_kept_and_others_run_again(monkeypatch):
    """The Triton kernels, in their interpreter: those of norms, gates and rotations, and attention by segments."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    launch = interpreter.GridExecutor.__call__

    def unseen(self, *args, **kwargs):  # the interpreter copies by torch's operations, which a GPU does not
        with _disable_current_modes():
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", unseen)
    model = tiny("qwen3", num_hidden_layers=2)
    done, found, attended, products = rollouts(model, 8)[1:3], [], [], []
    monkeypatch.setattr(ops, "place_of", lambda tensor: ops.Place("cuda", triton=True))
    change_rules(monkeypatch, fuses_learning=True)
    for how in WAYS:
        counting = Operations()
        found.append(found_by(model, how, done, True, counting=counting))
        attended.append(counting.counts["sparse_rl::segment_attention"])
        products.append(counting.counts["aten::mm"])
    assert attended == [2, 2, 4] and products[0] == products[1] < products[2]
    for one in found[1:]:
        assert torch.equal(one[0], found[0][0])
        for name, gradient in found[0][1].items():
            assert (one[1][name] - gradient).abs().max() <= 1e-6 * max(1.0, gradient.abs().max().item()), name


def test_what_changes_in_place_is_computed_again():
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(s, generator=generator) for s in ((6, 6), (6,), (3, 6)))

    def layer(x, weight):
        out = x.tanh() @ weight
        out[1:].add_(bias)  # through a view
        return (out.sin() @ weight).cos()

    found, counts = [], []
    for how in WAYS:
        leaf, counting = weight.clone().requires_grad_(), Operations()
        options = {"context_fn": keeping_products()} if how == "selective" else {}
        with counting:
            out = checkpointed(layer, x, leaf, use_reentrant=False, **options) if how else layer(x, leaf)
            (gradient,) = torch.autograd.grad(out.sum(), leaf)
        found.append(gradient)
        counts.append(counting.counts["aten::mm"])
    assert torch.equal(found[1], found[0]) and torch.equal(found[2], found[0])
    assert counts[0] < counts[1] < counts[2]


def test_a_second_backward_pass_computes_again():
    model = checkpoint(copy.deepcopy(tiny("llama")), "selective")
    tokens = torch.tensor(prompts_of(9))
    value, parameters = batch_logprobs(model, tokens, torch.arange(9)[None] > 0).sum(), list(model.parameters())
    one, two = (torch.autograd.grad(value, parameters, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("rank", [0, RANK])
def test_a_run_is_that_of_the_other_ways(rank, tmp_path):
    for how in WAYS:
        given = recipe(
            model={"gradient_checkpointing": how, "lora_rank": rank},
            learn={"method": "shadow" if rank else "sparse-rl"},
            rollout={"prompts": 2, "max_new_tokens": 24},
            run={"steps": 2, "checkpoint_every": 2, "diagnose": 0, "samples": 0},
            eval={"every": 0},
        )
        trainer = train(given, tmp_path / str(how), show=False)
        assert trainer.model.is_gradient_checkpointing == bool(how)
    plain, *others = (
        {n: p for n, p in weights(tmp_path / str(how) / "checkpoints/step-000002").items()} for how in WAYS
    )
    for other in others:
        assert all(torch.equal(other[name], plain[name]) for name in plain)


def test_students_learn_the_same(tmp_path):
    """Copies of the teacher that read beacons, with adapters of their own."""
    found = []
    for how in WAYS[:2]:
        given = recipe(
            model={"gradient_checkpointing": how},
            learn={"method": "none"},
            rollout={"compressor": "dense", "compressor_options": {}, "prompts": 2, "max_new_tokens": 24},
            student={"chunks": [4], "lora_rank": RANK},
            run={"steps": 1, "diagnose": 0, "samples": 0},
            eval={"every": 0},
        )
        trainer = train(given, tmp_path / str(how), show=False)
        student = trainer.students.members[0].model
        assert any(getattr(module, "gradient_checkpointing", False) for module in student.modules()) == bool(how)
        found.append([p.detach().clone() for p in student.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_plan_of_a_run_lies_between():
    totals = [
        plan_run(recipe(model={"name": "random:qwen2.5-1.5b", "gradient_checkpointing": how}), 512).update_bytes
        for how in WAYS
    ]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 3


def test_other_words_are_refused():
    with pytest.raises(SparseRLError, match="must be true, false, selective, offload or auto"):
        recipe(model={"gradient_checkpointing": "some"})
