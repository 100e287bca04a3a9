"""Regret against loops and against the model's own attention; counterfactuals against explicit log-probs."""

import math
from dataclasses import replace

import pytest
import torch

from sparse_rl import Engine, Sampling, SparseRLError, counterfactuals, give_back, regret, token_logprobs
from sparse_rl.cache import Trace
from sparse_rl.cache.segments import Observed
from sparse_rl.learn import regret as module
from sparse_rl.learn.regret import Digest, Regret, mean_lost, received
from sparse_rl.learn.score import hidden_states, replay_of
from tests.helpers.models import prompts_of, tiny


def sampled(model, compressor="rkv", prompt=20, new=40, budget=12, interval=4):
    engine = Engine(model, compressor=compressor, budget=budget, interval=interval, rows=2)
    return engine.generate(prompts_of(prompt), sampling=Sampling(new))[0]


def loop_attention(query, keys, place, scaling, window, softcap, sink):
    """The softmax of one query over all tokens up to it, as a list of T numbers."""
    weights = [0.0] * len(keys)
    for j in range(place + 1):
        if window is not None and place - j >= window:
            continue
        logit = sum(a * b for a, b in zip(query, keys[j])) * scaling
        weights[j] = math.exp(math.tanh(logit / softcap) * softcap if softcap else logit)
    total = sum(weights) + (math.exp(sink) if sink is not None else 0.0)
    return [w / total for w in weights]


@pytest.mark.parametrize(
    "window, softcap, sinks, block", [(None, None, False, 128), (5, None, True, 3), (None, 2.0, False, 1)]
)
def test_received_attention_equals_the_loops(window, softcap, sinks, block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK", block)
    g = torch.Generator().manual_seed(0)
    heads, groups, tokens, dim, begins = 2, 3, 14, 4, [0, 5, 9]
    queries = torch.randn(1, heads * groups, tokens, dim, generator=g)
    keys = torch.randn(1, heads, tokens, dim, generator=g)
    sink = torch.randn(heads * groups, generator=g) if sinks else None
    seen = Observed(0, queries, keys, keys, 0.7, window, softcap, sink)
    got = received(seen, torch.tensor(begins), heads)
    expected = torch.zeros(heads, tokens, len(begins))
    for q in range(tokens - 1):
        segment = max(s for s, begin in enumerate(begins) if begin <= q)
        for head in range(heads * groups):
            own = keys[0, head // groups].tolist()
            one = None if sink is None else float(sink[head])
            probs = loop_attention(queries[0, head, q].tolist(), own, q, 0.7, window, softcap, one)
            expected[head // groups, :, segment] += torch.tensor(probs) / groups
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def loop_excess(worth, evicted_at, begin):
    """Of one head and one eviction."""
    present = [j for j in range(begin) if evicted_at[j] >= begin]
    gone = [j for j in present if evicted_at[j] == begin]
    if not gone:
        return math.nan
    least = sum(sorted(worth[j] for j in present)[: len(gone)])
    return (sum(worth[j] for j in gone) - least) / sum(worth[j] for j in present)


@pytest.mark.parametrize("at_once", [1, 2**20])
def test_mass_lost_and_excess_equal_the_loops(at_once, monkeypatch):
    monkeypatch.setattr(module, "LOGITS", at_once)
    g = torch.Generator().manual_seed(1)
    layers, heads, tokens, begins = 2, 2, 12, [0, 6, 9]
    a = torch.rand(layers, heads, tokens, 3, generator=g)
    choice = torch.randint(0, 3, (layers, heads, tokens), generator=g)
    evicted_at = torch.tensor([6, 9, 65535])[choice]
    evicted_at[..., 5:] = torch.where(evicted_at[..., 5:] == 6, 65535, evicted_at[..., 5:])
    evicted_at[..., 9:] = 65535
    evicted_at[0, 0][evicted_at[0, 0] == 6] = 9  # a head that evicts nothing then
    found = Regret(torch.tensor(begins), a, evicted_at)
    for layer in range(layers):
        for head in range(heads):
            gone_at, of = evicted_at[layer, head].tolist(), a[layer, head].tolist()
            for j in range(tokens):
                mass = sum(of[j][s] for s, begin in enumerate(begins) if begin >= gone_at[j])
                assert found.mass[layer, head, j].item() == pytest.approx(mass)
            for s, (begin, queries) in enumerate(zip(begins, (6, 3, 2))):
                lost = sum(of[j][s] for j in range(tokens) if gone_at[j] <= begin) / queries
                assert found.lost[layer, head, s].item() == pytest.approx(lost)
                worth = [sum(of[j][s:]) for j in range(tokens)]
                expected = loop_excess(worth, gone_at, begin)
                assert found.excess[layer, head, s].item() == pytest.approx(expected, nan_ok=True, abs=1e-6)
    assert math.isnan(found.excess[0, 0, 1])


def test_dense_queries_give_the_models_own_attention(llama):
    """view="dense" is what eager attention writes out; the shadow view's differs, but not in the first layer."""
    trajectory = sampled(llama)
    dense, shadow = (regret(llama, trajectory.tokens, trajectory.trace, view) for view in ("dense", "shadow"))
    llama.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            attentions = llama(trajectory.tokens[None], output_attentions=True).attentions
    finally:
        llama.set_attn_implementation("sdpa")
    ends = [*dense.begins.tolist()[1:], len(trajectory.tokens) - 1]
    assert len(ends) > 5
    for layer, attention in enumerate(attentions):
        per_head = attention[0].unflatten(0, (2, 2)).mean(1)  # [H, q, k]
        for s, (begin, end) in enumerate(zip(dense.begins.tolist(), ends)):
            torch.testing.assert_close(dense.received[layer, :, :, s], per_head[:, begin:end].sum(1))
    torch.testing.assert_close(shadow.received[0], dense.received[0])
    assert (shadow.received[2] - dense.received[2]).abs().max() > 1e-2


@pytest.mark.parametrize("architecture", ["gpt-oss", "gemma2", "gemma3", "qwen3-moe"])
def test_other_models_lose_at_most_all(architecture):
    model = tiny(architecture)
    trajectory = sampled(model, "random")
    found = regret(model, trajectory.tokens, trajectory.trace)
    assert found.mass[found.evicted_at > 60].eq(0).all() and (found.mass > 0).any()
    assert ((found.lost >= 0) & (found.lost <= 1 + 1e-5)).all()
    seen = found.received.sum(2) / found.queries  # all attention of a query, but for what sinks take
    assert (seen < 1 + 1e-4).all() and (architecture == "gpt-oss" or (seen > 1 - 1e-4).all())


def test_the_best_choice_has_no_excess(llama):
    """Let an oracle evict once, what later queries want least: its regret is 0, and that of the worst choice is not."""
    tokens = torch.tensor(prompts_of(30)[0])
    trace = Trace.dense(3, 2, 30)
    evicted_at = trace.evicted_at.to(torch.int64)
    evicted_at[..., 0] = 16  # so that a segment begins there
    worth = regret(llama, tokens, Trace(evicted_at.to(torch.uint16)), "dense").to_come[:, :, :16, 1]  # [L, H, 16]
    for largest in (False, True):
        chosen = worth.topk(6, largest=largest).indices
        traced = trace.evicted_at.to(torch.int64).scatter(2, chosen, 16).to(torch.uint16)
        excess = regret(llama, tokens, Trace(traced), "dense").excess[..., 1]
        assert (excess > 0.1).all() if largest else (excess.abs() < 1e-5).all()


def test_counterfactuals_go_through_the_sampler_s_experts():
    """Routes that the model would not choose, so that it matters."""
    model = tiny("qwen3-moe")
    engine = Engine(model, "rkv", budget=12, interval=4, rows=2, record_routes=True)
    t = engine.generate(prompts_of(20), sampling=Sampling(40))[0]
    trace = replace(t.trace, routes=t.trace.routes.roll(1, 0))
    other = give_back(trace, torch.tensor(True))
    (change,) = counterfactuals(model, t.tokens, trace, [other])
    with torch.no_grad():
        after, before = (token_logprobs(model, t.tokens, it) for it in (other, trace))
        free = [token_logprobs(model, t.tokens, replace(it, routes=None)) for it in (other, trace)]
    torch.testing.assert_close(change, after - before, atol=1e-5, rtol=0)
    assert (change - (free[0] - free[1])).abs().max() > 1e-4
    with pytest.raises(SparseRLError, match="some of the traces have routes"):
        counterfactuals(model, t.tokens, trace, [replace(other, routes=None)])


def test_counterfactuals_are_exact(llama):
    trajectory = sampled(llama)
    tokens, trace = trajectory.tokens, trajectory.trace
    evicted_at = trace.evicted_at.long()
    layer, head = 1, 0
    entry = int((evicted_at[layer, head] < 40).nonzero()[0])
    one = torch.zeros_like(evicted_at, dtype=torch.bool)
    one[layer, head, entry] = True
    everything = give_back(trace, torch.tensor(True))
    assert everything.evicted_at.equal(Trace.dense(*evicted_at.shape).evicted_at)
    changes = counterfactuals(llama, tokens, trace, [give_back(trace, one), everything, trace], rows=2)
    with torch.no_grad():
        shadow, dense = token_logprobs(llama, tokens, trace), token_logprobs(llama, tokens)
        other = trace.evicted_at.clone()
        other[layer, head, entry] = 65535
        single = token_logprobs(llama, tokens, Trace(other))
    torch.testing.assert_close(changes[0], single - shadow, atol=1e-5, rtol=0)
    torch.testing.assert_close(changes[1], dense - shadow, atol=1e-5, rtol=0)
    assert changes[2].abs().max() < 1e-5
    gone = int(evicted_at[layer, head, entry])
    assert changes[0, : gone + 1].abs().max() < 1e-5 < changes[0, gone + 1 :].abs().max()  # q = gone predicts gone + 1


def digested(model, trajectory):
    digest, replay = Digest(trajectory.trace), replay_of(model, [(trajectory.tokens, trajectory.trace)])
    replay.observe = digest
    with torch.no_grad():
        hidden_states(model, trajectory.tokens[None], replay)
    return digest.summary()


def test_what_is_logged_equals_the_whole_regret(llama):
    trajectory = sampled(llama, "random")
    found = regret(llama, trajectory.tokens, trajectory.trace)
    expected = torch.stack([mean_lost(found), found.excess.double().nanmean(), found.mass.max().double()])
    torch.testing.assert_close(digested(llama, trajectory), expected, atol=1e-6, rtol=1e-5)


def test_nothing_evicted_has_no_summary_and_a_wrong_view_is_refused(llama):
    trajectory = sampled(llama, "dense")
    assert digested(llama, trajectory) is None
    with pytest.raises(SparseRLError, match="view is 'sparse'"):
        regret(llama, trajectory.tokens, trajectory.trace, "sparse")


@pytest.mark.parametrize("chosen", [torch.tensor([3, 5]), torch.ones(7, dtype=torch.bool), torch.ones(1, 3, 2, 9) > 0])
def test_what_is_given_back_is_true_or_false_for_every_token(chosen):
    with pytest.raises(SparseRLError, match=r"what is given back is torch.*\[3, 2, 9\].*torch.arange\(9\) == 3"):
        give_back(Trace.dense(3, 2, 9), chosen)
