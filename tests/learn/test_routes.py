"""The learner sends tokens to the experts that the sampler chose."""

import copy
import dataclasses
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from sparse_rl import Engine, Sampling, Trace
from sparse_rl.errors import SparseRLError
from sparse_rl.learn import packing as packing_module
from sparse_rl.learn.advantage import advantage
from sparse_rl.learn.batch import collate, score, seen_by
from sparse_rl.learn.correct import PRESETS
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.learn.overlap import overlap
from sparse_rl.learn.routes import sent_to
from sparse_rl.learn.score import batch_logprobs, token_logprobs
from sparse_rl.models.routing import routing_of
from sparse_rl.records import TrajectoryWriter, read_trajectories
from tests.helpers.learning import batches_of
from tests.helpers.models import MIXTURES, prompts_of, tiny


def rollouts(model, lengths=(5, 30, 14), new=30, group=2, rows=4, compressor="rkv", **options):
    engine = Engine(model, compressor, budget=12, interval=6, rows=rows, record_routes=True, **options)
    return engine.generate(prompts_of(*lengths), group, Sampling(new, stop_ids=(7,)))


def gap(model, trajectory, trace):
    found = token_logprobs(model, trajectory.tokens, trace)
    return (found - trajectory.sampler_logprobs)[trajectory.response_mask].abs().max().item()


def anew(trace):
    return dataclasses.replace(trace, routes=None)


def tied(name="qwen3-moe"):
    """A model whose routers score experts in equal pairs: with three of a token, rounding chooses the third."""
    model = copy.deepcopy(tiny(name, num_experts_per_tok=3))
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[1::2] = layer.mlp.gate.weight[::2]
    return model


def perturbed(model, size=1e-6):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.mlp.gate.weight.add_(size * torch.randn_like(layer.mlp.gate.weight))
    return other


# -------------------------------------------------------------------------------------------------------- recorded


@pytest.mark.parametrize("compressor", ["rkv", "dense", "prompt-only:snapkv"])
@pytest.mark.parametrize("name", MIXTURES)
def test_under_trace_and_routes_the_learner_has_the_samplers_logprobs(name, compressor):
    model = tiny(name)
    for trajectory in rollouts(model, compressor=compressor):
        routes = trajectory.trace.routes
        assert routes.shape == (len(trajectory.tokens), 3, model.config.num_experts_per_tok)
        assert routes.dtype == torch.uint8
        assert gap(model, trajectory, trajectory.trace) < 1e-4
        assert gap(model, trajectory, anew(trajectory.trace)) < 1e-4  # no tie in these: so the routes are the model's


def test_routes_do_not_depend_on_rows_rounds_and_chunks():
    model = tiny("qwen3-moe")
    expected = rollouts(model, rows=1)
    for options in (dict(rows=6), dict(rows=3, poll=(4, 4)), dict(rows=4, prefill_chunk=7), dict(prefill_rows=3)):
        for ours, theirs in zip(rollouts(model, **options), expected, strict=True):
            assert torch.equal(ours.tokens, theirs.tokens)
            assert torch.equal(ours.trace.routes, theirs.trace.routes)


def test_without_being_asked_nothing_is_recorded():
    engine = Engine(tiny("qwen3-moe"), "rkv", budget=12, interval=6, rows=2)
    (done,) = engine.generate(prompts_of(5), 1, Sampling(8))
    assert done.trace.routes is None and engine.plan(5, 8).routes_row_bytes == 0
    engine = Engine(tiny("qwen3-moe"), "rkv", budget=12, interval=6, rows=2, record_routes=True)
    assert engine.plan(5, 8).routes_row_bytes == 13 * 3 * 2 and "routes, 2 rows" in engine.plan(5, 8).text()


def test_many_experts_are_recorded_in_two_bytes():
    model = tiny("qwen3-moe", num_experts=300, moe_intermediate_size=8)
    for trajectory in rollouts(model, lengths=(9,), new=20):
        assert trajectory.trace.routes.dtype == torch.uint16 and int(trajectory.trace.routes.long().max()) > 255
        assert gap(model, trajectory, trajectory.trace) < 1e-4


def test_routes_are_written_and_read(tmp_path):
    done = rollouts(tiny("qwen3-moe"))
    with TrajectoryWriter(tmp_path) as writer:
        for trajectory in done:
            writer.write(trajectory)
    for ours, theirs in zip(read_trajectories(tmp_path), done, strict=True):
        assert torch.equal(ours.trace.evicted_at, theirs.trace.evicted_at)
        assert torch.equal(ours.trace.routes, theirs.trace.routes)
    path = next((tmp_path / "traces").iterdir())
    assert path.read_bytes() == (Trace.load(path).save(path), path.read_bytes())[1]  # the same trace, the same file
    part = done[0].trace.slice(2, 9)
    assert torch.equal(part.routes, done[0].trace.routes[2:9])
    content = bytearray(path.read_bytes())
    content[content.index(bytes(Trace.load(path).routes.numpy().tobytes()))] ^= 1
    path.write_bytes(content)
    with pytest.raises(SparseRLError, match=r"the checksum of its routes differs: it is damaged"):
        Trace.load(path)


# -------------------------------------------------------------------------------------------------------- replayed


def test_a_near_tie_changes_nothing_under_replay():
    torch.manual_seed(0)
    model = tied()
    done = rollouts(model, lengths=(5, 30, 14, 8), new=40)
    other = perturbed(model)
    with_routes = max(gap(other, t, t.trace) for t in done)
    without = max(gap(other, t, anew(t.trace)) for t in done)
    assert with_routes < 1e-3 and without > 0.1


class ByHand(nn.Module):
    """A Qwen3-MoE block as a loop over tokens and their fixed experts, from its formula."""

    def __init__(self, block, ids):
        super().__init__()
        self.gate, self.experts, self.ids = block.gate, block.experts, ids

    def forward(self, x):
        rows = []
        for state, ids in zip(x[0], self.ids.tolist()):
            scores = self.gate.weight @ state
            total = sum(scores[e].exp() for e in ids)
            out = 0
            for e in ids:
                gate, up = (self.experts.gate_up_proj[e] @ state).chunk(2)
                down = self.experts.down_proj[e] @ (gate * torch.sigmoid(gate) * up)
                out = out + scores[e].exp() / total * down
            rows.append(out)
        return torch.stack(rows)[None]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_is_that_of_fixed_routes(checkpointing):
    torch.manual_seed(0)
    model = tied()
    trajectory = rollouts(model, lengths=(6,), new=20, group=1)[0]
    assert len(trajectory.tokens) > 20
    learner = perturbed(model, 1e-3).double()
    learner.set_experts_implementation("eager")  # torch has no grouped product in fp64
    reference = copy.deepcopy(learner)
    for i, layer in enumerate(reference.model.layers):
        layer.mlp = ByHand(layer.mlp, trajectory.trace.routes[:, i])
    if checkpointing:
        learner.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    upstream, found = torch.linspace(-1, 1, len(trajectory.tokens)), []
    for one, trace in ((learner, trajectory.trace), (reference, anew(trajectory.trace))):
        logprobs = token_logprobs(one, trajectory.tokens, trace)
        (logprobs * upstream).sum().backward()
        found.append((logprobs.detach(), {name: p.grad for name, p in one.named_parameters()}))
    (ours, gradients), (theirs, expected) = found
    assert (ours - theirs).abs().max() < 1e-5  # logits are fp32
    assert gradients.keys() == expected.keys() and gradients["model.layers.0.mlp.gate.weight"].abs().max() > 0
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() < 1e-5 * (1 + expected[name].abs().max()), name
    free = token_logprobs(learner, trajectory.tokens, anew(trajectory.trace)).detach()
    assert (free - theirs).abs().max() > 0.01  # choosing anew is something else


@pytest.mark.parametrize("view", ["shadow", "dense"])
def test_packed_rows_follow_as_rows_one_by_one(view, monkeypatch):
    monkeypatch.setattr(packing_module, "WORTH_PACKING", 2.0)
    torch.manual_seed(0)
    model = tied()
    done = rollouts(model, lengths=(30, 9), group=3)
    turned = done[1].trace.routes.clone()
    turned[12] = turned[12].roll(1, -1)  # the same experts in another order: from here on this row brings its own
    done[1] = dataclasses.replace(done[1], trace=dataclasses.replace(done[1].trace, routes=turned))
    sampled, other = collate(done), perturbed(model)
    routes, rows = tuple(t.trace.routes for t in done), torch.arange(len(done))
    found = []
    for packing in (False, True):
        other.zero_grad()
        seen = seen_by(other, sampled, rows, view == "shadow", packing, routes)
        sent = sent_to(other, routes, rows, sampled.lengths, seen)
        if packing and view == "dense":
            assert seen.packing.first[1] == 12 < seen.packing.first[2]
        logprobs = batch_logprobs(other, sampled.tokens, sampled.mask, 1.0, seen, sent)
        (logprobs * torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)).sum().backward()
        found.append((logprobs.detach(), [p.grad.clone() for p in other.parameters()]))
    assert (found[0][0] - found[1][0]).abs().max() < 1e-4
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        assert (ours - theirs).abs().max() < 1e-3 * (1 + theirs.abs().max())


# --------------------------------------------------------------------------------------------------------- scored


def test_in_the_shadow_view_scoring_follows_the_sampler():
    torch.manual_seed(0)
    model = tied()
    done = rollouts(model)
    sampled, other, routing = collate(done), perturbed(model), routing_of(model)
    scored = score(other, sampled, 64, view="shadow", routing=routing)
    assert scored.gap.abs().max() < 1e-3
    for ours, trajectory in zip(scored.rows(torch.tensor([2, 0])).routes, (done[2], done[0]), strict=True):
        assert torch.equal(ours, trajectory.trace.routes)
    assert overlap(other, done[1]).shape == (len(done[1].response_tokens),)


@pytest.mark.parametrize("packing", [False, True])
def test_in_the_dense_view_the_update_follows_the_old_pass(packing, monkeypatch):
    monkeypatch.setattr(packing_module, "WORTH_PACKING", 2.0)
    torch.manual_seed(0)
    model = tied()
    sampled = collate(rollouts(model))
    scored = score(model, sampled, 200, routing=routing_of(model), packing=packing)
    routes = scored.routes
    assert [r.shape[0] for r in routes] == sampled.lengths.tolist()
    other, rows = perturbed(model), torch.arange(len(routes))
    off = {}
    for name, told in (("told", routes), ("anew", None)):
        seen = seen_by(other, sampled, rows, False, packing, told)
        sent = sent_to(other, told, rows, sampled.lengths, seen)
        logprobs = batch_logprobs(other, sampled.tokens, sampled.mask, 1.0, seen, sent)
        off[name] = (logprobs - scored.old_logprobs).abs().max().item()
    assert off["told"] < 1e-3 and off["anew"] > 0.1


def test_the_reference_routes_itself():
    torch.manual_seed(0)
    model = tied()
    sampled, other = collate(rollouts(model)), perturbed(model)
    alone = score(other, sampled, 64)  # dense, its own routes
    beside = score(model, sampled, 64, reference=nullcontext(other), routing=routing_of(model))
    assert (beside.reference_logprobs - alone.old_logprobs).abs().max() < 1e-4
    assert (beside.old_logprobs - alone.old_logprobs).abs().max() > 0.1


def test_an_update_follows_and_checks():
    torch.manual_seed(0)
    model = tied()
    done = rollouts(model)
    scored = score(model, collate(done), 64, view="shadow", only=torch.tensor([0]), routing=routing_of(model))
    rewards = torch.tensor([1.0, 0.0] * (len(done) // 2))
    advantages, _ = advantage(rewards, torch.tensor([t.prompt_index for t in done]))
    (batch,) = batches_of(scored, advantages, PRESETS["none"], Loss())
    learner = Learner(perturbed(model), OptimizerSettings(lr=1e-3), Loss(), micro_batch_tokens=64)
    result = learner.step(batch, check=True)
    assert (result.seen.logprobs - batch.old_logprobs[result.seen.rows]).abs().max() < 1e-3
    wrong = tuple((r.long() + 1).remainder(8).to(torch.uint8) for r in batch.routes)
    with pytest.raises(SparseRLError, match=r"nats on average"):
        Learner(perturbed(model), OptimizerSettings(lr=1e-3), Loss()).step(
            dataclasses.replace(batch, routes=wrong), check=True
        )


def test_routes_that_do_not_belong_are_refused():
    model = tiny("qwen3-moe")
    done = rollouts(model)
    first, second = done[0].trace, done[2].trace

    def given(routes, model=model):
        trace = dataclasses.replace(first, routes=routes)
        return score(model, collate([dataclasses.replace(done[0], trace=trace)]), 64, view="shadow", routing=routing)

    routing = routing_of(model)
    with pytest.raises(SparseRLError, match=r"the routes are for .*; they belong to another trajectory"):
        given(second.routes)
    with pytest.raises(SparseRLError, match=r"the routes name expert 200, but the layers of this model have 8"):
        given(torch.full_like(first.routes, 200))
    with pytest.raises(SparseRLError, match=r"nats on average"):
        given(first.routes.flip(0))
    with pytest.raises(SparseRLError, match=r"but this model has no experts"):
        token_logprobs(tiny("qwen3", num_attention_heads=4), done[0].tokens, first)
