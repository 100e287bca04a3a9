"""Top-k and top-p in training: the learner's log-probs over the sampler's support, against explicit masks in fp64."""

import copy
import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl import Engine, Sampling, SparseRLError, read_trajectories, token_logprobs
from sparse_rl.cache import Support
from sparse_rl.cache.support import MOST, ids_of
from sparse_rl.kernels.twins_sample import kept_of, truncate
from sparse_rl.learn.batch import collate, score
from sparse_rl.learn.correct import PRESETS
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.learn.overlap import overlap
from sparse_rl.learn.score import batch_logprobs, hidden_states, logprobs_entropies_ranks, replay_of
from sparse_rl.learn.support import find_again, over_support, side_by_side
from sparse_rl.records import TrajectoryWriter
from tests.helpers.decoding import change_rules
from tests.helpers.learning import batches_of, moved
from tests.helpers.models import prompts_of, tiny
from tests.helpers.processes import recorded

LIMITS = [dict(top_p=0.8), dict(top_k=1), dict(top_k=5, top_p=0.9)]


def sampled(model, support, new=20, temperature=0.8, limits=None, group=2, compressor="rkv"):
    engine = Engine(model, compressor, budget=12, interval=4, rows=6)
    chosen = dict(top_p=0.8) if limits is None else limits
    how = Sampling(new, temperature, stop_ids=(7, 30), for_correction=True, support=support, **chosen)
    return engine.generate(prompts_of(5, 9, 14), group, how, seed=1)


def masked_logprobs(model, t, shadow: bool, temperature: float, ids):
    """fp64: a masked softmax over the whole vocabulary, token by token. -> log-probs, entropies of the response"""
    replay = replay_of(model, [(t.tokens, t.trace)]) if shadow else None
    states = hidden_states(model, t.tokens[None], replay).last_hidden_state[0]
    logits = states.double() @ model.get_output_embeddings().weight.double().T
    logprobs, entropies = [], []
    for i, kept in zip(t.response_mask.nonzero()[:, 0].tolist(), ids, strict=True):
        mask = torch.full((logits.shape[1],), -math.inf, dtype=torch.float64)
        mask[kept] = 0.0
        distribution = (logits[i - 1] / temperature + mask).log_softmax(-1)
        logprobs.append(distribution[t.tokens[i]])
        inside = distribution[kept]
        entropies.append(-(inside.exp() * inside).sum())
    return torch.stack(logprobs), torch.stack(entropies)


def listed(support: Support) -> list[torch.Tensor]:
    counts = support.counts[support.counts > 0].tolist()
    return [ids.long() for ids in support.ids.split(counts)]


# ------------------------------------------------------------------------------------------------- tokens one by one


def logit_of(n):
    """Logits from -6 to 6 that are equal, or further apart than the rounding of a threshold halfway between them."""
    return n / 256


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(
            st.sampled_from([-9.0, -1.5, 0.0, 0.25, 0.25, 1.0, 3.0, 3.0]) | st.integers(-1536, 1536).map(logit_of),
            min_size=7,
            max_size=7,
        ),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from(
        [
            dict(top_k=1, top_p=1.0),
            dict(top_k=0, top_p=1e-9),
            dict(top_k=3, top_p=1.0),
            dict(top_k=0, top_p=0.7),
            dict(top_k=4, top_p=0.9),
        ]
    ),
    st.integers(0, 6),
)
def test_log_probs_over_a_support_are_those_of_a_masked_softmax(rows, temperature, limits, drawn):
    """Ties, one token, a tiny top-p, an odd vocabulary, a sampled token that is the least likely of its support."""
    logits = torch.tensor(rows)
    left = truncate(logits, temperature, **limits, capped=True)
    inside = left > -torch.inf
    kept = kept_of(logits, left, 7)
    order = torch.where(inside, logits, torch.inf).argsort(-1)  # those of the support first, the least likely ahead
    targets = order.gather(1, (drawn % kept.count.long())[:, None])[:, 0]
    counts, ids = find_again(logits, targets, kept.margin)
    assert torch.equal(counts, kept.count) and torch.equal(ids.long(), inside.nonzero()[:, 1])
    rows_of_ids = side_by_side(counts, ids)
    assert torch.equal(rows_of_ids, kept.ids[:, : rows_of_ids.shape[1]])
    mine = logits.clone().requires_grad_()
    found = over_support(logprobs_entropies_ranks(temperature))(mine, targets, rows_of_ids)
    theirs = logits.double().requires_grad_()
    expected = (theirs / temperature).masked_fill(~inside, -torch.inf).log_softmax(-1)
    chosen = expected.gather(1, targets[:, None])[:, 0]
    finite = expected.masked_fill(~inside, 0.0)
    entropies = -(torch.where(inside, expected, 0.0).exp() * finite).sum(-1)
    ranks = 1 + (inside & (logits > logits.gather(1, targets[:, None]))).sum(-1)
    torch.testing.assert_close(found[:, 0].double(), chosen, atol=2e-5, rtol=0)
    torch.testing.assert_close(found[:, 1].double(), entropies, atol=2e-5, rtol=0)
    assert torch.equal(found[:, 2].long(), ranks)
    found[:, 0].sum().backward()
    chosen.sum().backward()
    torch.testing.assert_close(mine.grad.double(), theirs.grad, atol=2e-5, rtol=0)
    assert mine.grad[~inside].eq(0).all() and found[kept.count == 1, 0].eq(0).all()


def test_a_sampled_token_that_rounding_put_outside_is_inside():
    logits = torch.tensor([[3.0, 1.0, 0.999, -2.0, 0.5]])
    counts, ids = find_again(logits, torch.tensor([4]), torch.tensor([2.0005]))
    assert counts.tolist() == [3] and ids.tolist() == [0, 1, 4]


def test_supports_of_rows_stand_side_by_side():
    first = Support(torch.tensor([0, 2, 1], dtype=torch.int32), torch.zeros(3), torch.tensor([4, 9, 2]).int())
    second = Support(torch.tensor([0, 0, 0, 3], dtype=torch.int32), torch.zeros(4), torch.tensor([1, 5, 6]).int())
    mask = torch.tensor([[False, True, True, False], [False, False, False, True]])
    assert ids_of([first, second], mask).tolist() == [[4, 9, -1], [2, -1, -1], [1, 5, 6]]
    mask[0, 1] = False  # a token that a correction dropped
    assert ids_of([first, second], mask).tolist() == [[2, -1, -1], [1, 5, 6]]


# ------------------------------------------------------------------------------------------------------ trajectories


@pytest.mark.parametrize("limits", LIMITS)
def test_what_the_engine_records(limits):
    """Ids and margins of the same rollout tell the same supports, and both views find them; nothing else changes."""
    model = tiny("llama")
    by_ids, by_margins = (sampled(model, support, limits=limits) for support in ("ids", "margins"))
    plain = Engine(model, "rkv", budget=12, interval=4, rows=3)
    how = Sampling(20, 0.8, stop_ids=(7, 30), **limits)
    for a, b, c in zip(by_ids, by_margins, plain.generate(prompts_of(5, 9, 14), 2, how, seed=1), strict=True):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.tokens, c.tokens) and c.support is None
        assert torch.equal(a.sampler_logprobs, c.sampler_logprobs)
        assert torch.equal(a.support.counts, b.support.counts) and torch.equal(a.support.margins, b.support.margins)
        assert b.support.ids is None and torch.equal(a.support.counts > 0, a.response_mask)
        for token, kept in zip(a.response_tokens, listed(a.support), strict=True):
            assert token in kept and torch.equal(kept, kept.sort().values)
        gap = token_logprobs(model, a.tokens, a.trace, 0.8, support=a.support) - a.sampler_logprobs
        assert gap.abs().max() < 1e-5
    assert any(t.support.counts.max() > 1 for t in by_ids) or limits == dict(top_k=1)
    found = score(model, collate(by_margins), 64, 0.8, view="shadow").sampled.supports
    for t, support in zip(by_ids, found, strict=True):
        assert torch.equal(t.support.ids, support.ids) and torch.equal(t.support.counts, support.counts)


def test_at_most_512_can_be_drawn():
    model = copy.deepcopy(tiny("llama", vocab_size=1101))
    with torch.no_grad():
        model.lm_head.weight.mul_(0.01)  # nearly flat: top-p alone would keep a thousand
    done = sampled(model, "ids", new=6, limits=dict(top_p=0.99))
    counts = torch.cat([t.support.counts[t.response_mask] for t in done])
    assert counts.max() <= MOST and counts.min() > 0.97 * MOST  # top-p is of what the cap leaves
    for t in done:
        gap = token_logprobs(model, t.tokens, t.trace, 0.8, support=t.support) - t.sampler_logprobs
        assert gap.abs().max() < 1e-5
    with torch.no_grad():
        model.lm_head.weight.zero_()
    with pytest.raises(SparseRLError, match=r"1101 tokens are equally likely.*at most 512.*top_p to 1"):
        sampled(model, "margins", new=6, limits=dict(top_p=0.99))


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("view, record", [("dense", "ids"), ("shadow", "margins"), ("shadow", "ids")])
@pytest.mark.parametrize("way", ["modules", "fused", "packed"])
def test_a_step_has_the_gradient_of_the_masked_formula_in_fp64(way, view, record, limits, monkeypatch):
    """Old, learner, reference, entropies, xi: all over the same tokens, which do not move with the weights."""
    if way == "fused":
        change_rules(monkeypatch, fuses_learning=True)
    packing, shadow, temperature = way == "packed", view == "shadow", 0.8
    loss, model = Loss(mean="token-mean", beta=0.05), copy.deepcopy(tiny("llama"))
    done, known = (sampled(model, support, limits=limits) for support in (record, "ids"))
    other = moved(model, 3)
    scored = score(model, collate(done), 64, temperature, nullcontext(other), view, packing=packing)
    advantages = torch.tensor([1.0, -0.5, 0.3, 0.7, -1.2, 0.4], dtype=torch.float64)
    correction = PRESETS["tis"]
    (batch,) = batches_of(scored, advantages, correction, loss)
    now = moved(model, 4, 0.01)
    old, reference, double = (copy.deepcopy(m).double() for m in (model, other, now))
    total, tokens = torch.zeros((), dtype=torch.float64), sum(len(t.response_tokens) for t in done)
    for i, (t, advantage) in enumerate(zip(done, advantages.tolist(), strict=True)):
        ids, mask = listed(known[i].support), t.response_mask
        with torch.no_grad():
            before, entropies = masked_logprobs(old, t, shadow, temperature, ids)
            theirs, _ = masked_logprobs(reference, t, shadow, temperature, ids)
        torch.testing.assert_close(scored.old_logprobs[i, : len(mask)][mask].double(), before, atol=2e-4, rtol=0)
        torch.testing.assert_close(scored.entropies[i, : len(mask)][mask].double(), entropies, atol=2e-4, rtol=0)
        torch.testing.assert_close(scored.reference_logprobs[i, : len(mask)][mask].double(), theirs, atol=2e-4, rtol=0)
        after, _ = masked_logprobs(double, t, shadow, temperature, ids)
        xi = (before - t.sampler_logprobs[mask].double()).exp()
        if shadow:
            torch.testing.assert_close(xi, torch.ones_like(xi), atol=1e-4, rtol=0)
        ratio = (after - before).exp()
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        difference = theirs - after
        total = total + (xi.clamp(max=2.0) * surrogate + 0.05 * (difference.exp() - 1 - difference)).sum() / tokens
    total.backward()
    learner = Learner(
        now, OptimizerSettings(lr=1e-3), loss, micro_batch_tokens=64, temperature=temperature, packing=packing
    )
    found = recorded(learner)
    metrics = learner.step(batch).metrics
    if limits == dict(top_k=1):  # one choice: nothing to learn
        assert metrics["update/grad_norm"] == 0 and metrics["update/loss"] == pytest.approx(total.item(), abs=1e-6)
        return
    assert metrics["update/loss"] == pytest.approx(total.item(), rel=2e-4, abs=1e-6)
    size = math.sqrt(sum(p.grad.square().sum().item() for p in double.parameters()))
    for mine, p in zip(found[0], double.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), p.grad, rtol=2e-3, atol=2e-4 * size)


@pytest.mark.parametrize("view, record", [("dense", "ids"), ("shadow", "margins")])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_the_first_ratio_is_one_and_the_support_does_not_move(name, view, record):
    model = copy.deepcopy(tiny(name))
    done = sampled(model, record)
    scored = score(model, collate(done), 64, 0.8, view=view)
    loss, advantages = Loss(clip_low=1e-3, clip_high=1e-3), torch.tensor([1.0, -1.0] * 3, dtype=torch.float64)
    batches = batches_of(scored, advantages, PRESETS["none"], loss, minibatches=2)
    learner = Learner(model, OptimizerSettings(lr=1e-3), loss, micro_batch_tokens=64, temperature=0.8)
    first, second = (learner.step(batch).metrics for batch in batches)
    assert abs(first["update/drift/mean"]) < 1e-6 and first["update/clip/frac"] == 0
    assert second["update/drift/mean"] != 0
    assert batches[1].supports[0] is scored.sampled.supports[3]  # what scoring found


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_fused_heads_find_the_same(name, monkeypatch):
    """A head that is one matrix, soft-capped or not: log-probs and gradients, over supports of different sizes."""
    model = copy.deepcopy(tiny(name, **(dict(final_logit_softcapping=5.0) if name == "gemma2" else {})))
    part = collate(sampled(model, "ids"))
    ids = ids_of(part.supports, part.mask)
    results = []
    for fuses in (False, True):
        with monkeypatch.context() as patch:
            change_rules(patch, fuses_learning=fuses)
            model.zero_grad()
            logprobs = batch_logprobs(model, part.tokens, part.mask, 0.8, support=ids)
            logprobs.square().sum().backward()
            results.append([logprobs.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4 * max(1.0, theirs.abs().max().item()))


def test_the_overlap_is_over_the_support():
    model = tiny("llama")
    (t, *_) = sampled(model, "margins", limits=dict(top_k=3))
    replay = replay_of(model, [(t.tokens, t.trace)])
    dense, shadow = (
        model.lm_head(hidden_states(model, t.tokens[None], r).last_hidden_state[0]) for r in (None, replay)
    )
    expected = []
    for i in t.response_mask.nonzero()[:, 0].tolist():
        ids = shadow[i - 1].topk(3).indices
        expected.append(torch.minimum(*((z[i - 1, ids] / 0.8).softmax(-1) for z in (dense, shadow))).sum())
    torch.testing.assert_close(overlap(model, t, 0.8), torch.stack(expected), atol=1e-5, rtol=0)


def test_beacons_have_no_support():
    from sparse_rl.beacon import add_beacon

    model = add_beacon(copy.deepcopy(tiny("llama")), (4,), "shared", 0)
    done = sampled(model, "margins", compressor="beacon:4")
    assert all(torch.equal(t.support.counts > 0, t.response_mask) for t in done)
    scored = score(model, collate(done), 64, 0.8, view="shadow")
    assert scored.gap.abs().max() < 1e-4


# ------------------------------------------------------------------------------------------------- files and mistakes


def test_files_hold_supports(tmp_path):
    done = sampled(tiny("llama"), "ids") + sampled(tiny("llama"), "margins")
    done = [replace(t, prompt_index=i) for i, t in enumerate(done)]
    with TrajectoryWriter(tmp_path / "out") as writer:
        for t in done:
            writer.write(t)
    for ours, theirs in zip(done, read_trajectories(tmp_path / "out"), strict=True):
        for mine, other in zip(vars(ours.support).values(), vars(theirs.support).values(), strict=True):
            assert (mine is None and other is None) or torch.equal(mine, other)
    path = tmp_path / "out" / "supports" / "000000-000.safetensors"
    again = tmp_path / "again.safetensors"
    done[0].support.save(again)
    assert again.read_bytes() == path.read_bytes()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(SparseRLError, match="checksum differs"):
        list(read_trajectories(tmp_path / "out"))


def test_mistakes_get_a_sentence():
    with pytest.raises(SparseRLError, match="top_k is 600, but at most 512"):
        Sampling(top_k=600, support="ids")
    with pytest.raises(SparseRLError, match="support is 'id'"):
        Sampling(support="id")
    with pytest.raises(SparseRLError, match=r'which the dense view needs.*support="ids"'):
        score(tiny("llama"), collate(sampled(tiny("llama"), "margins")), 64, 0.8, view="dense")
