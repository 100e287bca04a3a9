"""Scores against slow references, one loop per index of the formulas; and what every compressor must respect."""

import importlib.util
import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl import COMPRESSORS, CacheView, Engine, Sampling
from sparse_rl.compressors import describe, make
from sparse_rl.compressors.base import best
from sparse_rl.errors import SparseRLError
from sparse_rl.kernels import twins
from tests.helpers.compressors import EVICTING, STANDALONE
from tests.helpers.models import prompts_of


def random_view(rows=2, heads=2, groups=2, used=20, dim=8, queries=8, seed=0, repeat=False):
    g = torch.Generator().manual_seed(seed)
    keys = torch.randn(rows, heads, used, dim, generator=g)
    if repeat:  # exact and near copies, so that the redundancy threshold is crossed
        keys[:, :, used // 2 :] = keys[:, :, : used - used // 2] * 1.5
        keys[:, :, 1::3] += 0.05 * torch.randn(keys[:, :, 1::3].shape, generator=g)
    return CacheView(
        keys=keys,
        values=torch.randn(rows, heads, used, dim, generator=g),
        feed=torch.arange(used).expand(rows, heads, used),
        queries=torch.randn(rows, heads * groups, queries, dim, generator=g),
        mass=torch.rand(rows, heads, used, generator=g),
        streams=torch.randint(-(2**62), 2**62, (rows, heads), generator=g),
        num_prompt_tokens=torch.full((rows,), 3),
        scaling=dim**-0.5,
    )


def reference_importance(queries, keys, window, pool):
    """I of methods, for one row and KV head. queries [G][w][D], keys [S][D] as nested lists of floats."""
    used, dim = len(keys), len(keys[0])
    candidates = used - window
    mean = [0.0] * candidates
    count = len(queries[0])
    for a in range(count):
        logits = []
        for j in range(candidates):
            per_head = [sum(q[a][d] * keys[j][d] for d in range(dim)) / math.sqrt(dim) for q in queries]
            logits.append(max(per_head))
        top = max(logits)
        weights = [math.exp(x - top) for x in logits]
        for j in range(candidates):
            mean[j] += weights[j] / sum(weights) / count
    half = pool // 2
    return [max(mean[max(0, j - half) : j + half + 1]) for j in range(candidates)]


def reference_redundancy(keys, threshold):
    used, dim = len(keys), len(keys[0])
    norm = [math.sqrt(sum(x * x for x in k)) for k in keys]
    similar = [
        [sum(keys[i][d] * keys[j][d] for d in range(dim)) / (norm[i] * norm[j]) for j in range(used)]
        for i in range(used)
    ]
    for i in range(used):
        similar[i][i] = 0.0
    for i in range(used):
        copies = [j for j in range(used) if similar[i][j] > threshold]
        if copies:
            similar[i][copies[-1]] = 0.0
    mean = [sum(similar[i][j] for i in range(used)) / used for j in range(used)]
    top = max(mean)
    weights = [math.exp(x - top) for x in mean]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("used, queries", [(9, 8), (10, 8), (24, 8), (40, 8), (12, 3)])
@pytest.mark.parametrize("groups", [1, 2, 4, 7])
def test_rkv_and_snapkv_equal_the_loops(groups, used, queries, repeat):
    view = random_view(groups=groups, used=used, queries=queries, repeat=repeat, seed=groups + used)
    window = 8
    snapkv, rkv = COMPRESSORS["snapkv"](), COMPRESSORS["rkv"]()
    got = {"snapkv": snapkv.score(view), "rkv": rkv.score(view)}
    for row in range(2):
        for head in range(2):
            keys = view.keys[row, head].double().tolist()
            group = view.queries[row, head * groups : (head + 1) * groups].double().tolist()
            importance = reference_importance(group, keys, window, pool=7)
            redundancy = reference_redundancy(keys, threshold=0.5)
            mixed = [0.1 * i - 0.9 * r for i, r in zip(importance, redundancy, strict=False)]
            for name, expected in (("snapkv", importance), ("rkv", mixed)):
                torch.testing.assert_close(
                    got[name][row, head, : used - window], torch.tensor(expected), atol=1e-5, rtol=1e-4
                )


def test_redundancy_is_the_same_in_blocks(monkeypatch):
    view = random_view(used=33, repeat=True)
    whole = twins.redundancy(view.keys, 0.5)
    monkeypatch.setattr(twins, "BLOCK_ELEMENTS", 2 * 2 * 33 * 5)  # five rows of the similarity matrix at a time
    torch.testing.assert_close(twins.redundancy(view.keys, 0.5), whole)


def test_redundancy_spares_the_newest_copy():
    keys = torch.eye(6)[None, None]
    keys[0, 0, 1] = keys[0, 0, 0]
    keys[0, 0, 4] = keys[0, 0, 0]  # 0, 1 and 4 are the same key
    repeated = twins.redundancy(keys, 0.5)[0, 0]
    # Column 4 is hit by rows 0 and 1, and spared by both: it is their newest copy.
    # Column 1 is hit by rows 0 and 4, and spared by 4 only.
    assert repeated[4] < repeated[1]
    torch.testing.assert_close(
        repeated[0], repeated[4] * math.exp(2 / 6)
    )  # column 0 is hit by rows 1 and 4, column 4 by none


def test_tova_is_the_last_querys_attention():
    view = random_view(groups=2)
    expected = torch.zeros(2, 2, 20)
    for row in range(2):
        for head in range(2):
            for group in range(2):
                query = view.queries[row, head * 2 + group, -1]
                expected[row, head] += (view.keys[row, head] @ query / math.sqrt(8)).softmax(-1) / 2
    torch.testing.assert_close(COMPRESSORS["tova"]().score(view), expected)


def test_knorm_prefers_small_keys():
    view = random_view()
    torch.testing.assert_close(COMPRESSORS["knorm"]().score(view), -view.keys.pow(2).sum(-1).sqrt())


def test_h2o_accumulates_true_attention(llama):
    """The recorded mass equals attention summed over all queries of a plain forward pass, per KV head."""
    prompt = prompts_of(30)[0]
    engine = Engine(llama, compressor="h2o", budget=60, interval=20, rows=1, prefill_chunk=7)
    trajectory = engine.generate([prompt], sampling=Sampling(20))[0]
    tokens = trajectory.tokens[:-1]  # the last token is sampled, never fed
    llama.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            attentions = llama(tokens[None], output_attentions=True).attentions  # per layer [1, Hq, T, T]
    finally:
        llama.set_attn_implementation("sdpa")
    for layer, attention in enumerate(attentions):
        expected = attention[0].sum(1).view(2, 2, -1).sum(1)  # over queries, then over the group's heads
        torch.testing.assert_close(engine.cache.mass[layer, 0, :, : len(tokens)], expected, atol=1e-4, rtol=0)


def test_ties_go_to_the_newer_slot():
    score = torch.tensor([[[1.0, 1.0, 0.0, 1.0, 0.0]]])
    assert best(score, 2).tolist() == [[[1, 3]]]
    assert best(score, 4).tolist() == [[[0, 1, 3, 4]]]


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from([n for n in STANDALONE if COMPRESSORS[n].evicts]),
    used=st.integers(12, 60),
    data=st.data(),
    seed=st.integers(0, 1000),
)
def test_kept_slots_are_unique_ordered_and_protect_sinks_and_window(name, used, data, seed):
    compressor = COMPRESSORS[name]()
    budget = data.draw(st.integers(10, used - 1), label="budget")
    compressor = compressor.bind(budget, used - budget)
    sinks, window = compressor.protected(budget)
    view = random_view(used=used, queries=min(8, used), seed=seed)
    kept = compressor.keep(view, budget)
    assert kept.shape == (2, 2, budget)
    assert (kept.diff(dim=-1) > 0).all()
    for slot in [*range(sinks), *range(used - window, used)]:
        assert (kept == slot).any(-1).all()


@pytest.mark.parametrize("name", [n for n in EVICTING if n != "window"])
def test_prompt_can_be_protected(name, llama):
    compressor = COMPRESSORS[name](protect_prompt=True)
    engine = Engine(llama, compressor=compressor, budget=48, interval=8, rows=2)
    trajectory = engine.generate(prompts_of(20), sampling=Sampling(80))[0]
    evicted = trajectory.trace.evicted_at.long() < len(trajectory.tokens)
    assert not evicted[..., :20].any()
    assert evicted[..., 20:].any()
    with pytest.raises(SparseRLError, match="protects the prompt"):
        engine.generate(prompts_of(48))


def test_sliding_layers_give_up_what_they_cannot_see():
    """In a layer with its own window, slots beyond it go first, whatever their score."""
    from dataclasses import replace

    view = random_view(used=20)
    unreachable = torch.zeros(2, 2, 20, dtype=torch.bool)
    unreachable[:, :, :6] = True
    for name in ("knorm", "tova", "h2o", "random", "snapkv", "rkv"):
        kept = COMPRESSORS[name]().keep(replace(view, unreachable=unreachable), 14)
        assert kept.min() >= 6, name


@pytest.mark.parametrize("lost", [0, 1, 3, 4, 5, 6, 9])
@pytest.mark.parametrize("budget", [9, 14, 18])
def test_a_window_spends_no_slot_on_sinks_that_a_sliding_layer_cannot_reach(lost, budget):
    """Against sets: what is beyond the layer's window goes first, then the oldest that are no sinks."""
    from dataclasses import replace

    unreachable = torch.zeros(2, 2, 20, dtype=torch.bool)
    unreachable[0, 1, :lost] = True  # the others reach all
    kept = COMPRESSORS["window"](sinks=4).keep(replace(random_view(used=20), unreachable=unreachable), budget)
    gone = [*range(lost), *range(max(4, lost), 20)][: 20 - budget]
    assert kept[0, 1].tolist() == [slot for slot in range(20) if slot not in gone]
    assert kept[1, 1].tolist() == [*range(4), *range(20 - budget + 4, 20)]


@pytest.mark.others
@pytest.mark.skipif(importlib.util.find_spec("kvpress") is None, reason="kvpress is not installed")
def test_kvpress_scorer_by_name(llama):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    stock = dict(ALL_ATTENTION_FUNCTIONS)
    ours = Engine(llama, compressor="knorm", budget=16, interval=8).generate(prompts_of(30), sampling=Sampling(30))[0]
    theirs = Engine(llama, compressor="kvpress:KnormPress", budget=16, interval=8).generate(
        prompts_of(30), sampling=Sampling(30)
    )[0]
    assert ours.tokens.equal(theirs.tokens)
    assert ours.trace.evicted_at.equal(theirs.trace.evicted_at)
    assert all(
        ALL_ATTENTION_FUNCTIONS[name] is function for name, function in stock.items()
    )  # importing kvpress patched nothing
    with pytest.raises(SparseRLError, match="KnormPress"):
        Engine(llama, compressor="kvpress:KnromPress")
    with pytest.raises(SparseRLError, match="needs more than keys and values"):
        Engine(llama, compressor="kvpress:SnapKVPress", budget=16, interval=8).generate(prompts_of(30))


def test_random_draws_anew_at_each_eviction():
    from dataclasses import replace

    view = random_view(used=20)
    later = replace(view, feed=torch.cat([view.feed[..., :19], view.feed[..., 19:] + 5], dim=-1))
    assert (COMPRESSORS["random"]().score(view)[..., :19] != COMPRESSORS["random"]().score(later)[..., :19]).all()


def test_soft_caps_and_windows_count_in_attention_scores():
    from dataclasses import replace

    view = random_view(used=20)
    capped = replace(view, softcap=0.5).attention_logits(last=3)
    torch.testing.assert_close(capped, 0.5 * torch.tanh(view.attention_logits(last=3) / 0.5))
    unreachable = torch.zeros(2, 2, 20, dtype=torch.bool)
    unreachable[:, :, :6] = True
    score = COMPRESSORS["tova"]().score(replace(view, unreachable=unreachable))
    assert score[..., :6].eq(0).all()
    torch.testing.assert_close(score.sum(-1), torch.ones(2, 2))  # all attention is on what can be seen


def test_a_name_is_given_once():
    from sparse_rl import ScoreCompressor, register

    with pytest.raises(SparseRLError, match="'rkv' belongs to RKV already; give"):
        register(type("Other", (ScoreCompressor,), {"name": "rkv"}))


def test_compaction_keeps_everything_of_a_slot_together():
    """Keys, values, feed indices and mass of kept slots move as one; other rows stay; the trace names what left."""
    from sparse_rl.cache import CacheShape, SlotCache

    cache = SlotCache(CacheShape(3, 2, 4, 5, 7, torch.float32, num_queries=2, mass=True), rows=4, capacity=10)
    for tensor in (cache.keys, cache.values, cache.mass):
        tensor.normal_()
    cache.feed[:] = torch.arange(10)
    before = [t.clone() for t in (cache.keys, cache.values, cache.feed, cache.mass)]
    rows, layers = torch.tensor([3, 1]), slice(1, 3)
    kept = torch.rand(2, 2, 2, 10).argsort(-1)[..., :6].sort(-1).values
    trace = torch.full((4, 3, 2, 12), -1, dtype=torch.int16)
    slots = cache.keys, cache.values, cache.feed, cache.mass
    twins.compact(*slots, trace, layers, rows, 10, kept, torch.tensor([10, 11]), torch.tensor([True, True]), -1)
    for tensor, old in zip((cache.keys, cache.values, cache.feed, cache.mass), before, strict=True):
        for layer in range(3):
            for row in range(4):
                for head in range(2):
                    if layer >= 1 and row in (1, 3):
                        n = [3, 1].index(row)
                        assert tensor[layer, row, head, :6].equal(old[layer, row, head, kept[layer - 1, n, head]])
                        gone = set(range(10)) - set(kept[layer - 1, n, head].tolist())
                        assert set((trace[row, layer, head] == 10 + n).nonzero()[:, 0].tolist()) == gone
                    else:
                        assert tensor[layer, row, head].equal(old[layer, row, head])
                        assert (trace[row, layer, head] == -1).all()


@pytest.mark.parametrize("chunks", [[1] * 13, [13], [5, 4, 4], [12, 1], [3, 10]])
def test_the_last_queries_are_recorded_in_order(chunks):
    from sparse_rl.cache import CacheShape, SlotCache
    from sparse_rl.cache.places import Recent

    cache = SlotCache(CacheShape(1, 2, 4, 3, 3, torch.float32, num_queries=6), rows=2, capacity=20)
    queries = torch.randn(2, 4, 13, 3)
    start = 0
    for length in chunks:
        part = slice(start, start + length)
        recent = Recent.of(torch.arange(2)[:, None], torch.arange(13)[part].expand(2, -1), 6)
        cache.record_queries(0, recent, queries[:, :, part])
        start += length
    for count in (6, 4, 1):
        recent = cache.recent_queries(slice(0, 1), torch.tensor([1, 0]), torch.tensor([13, 13]), count)
        assert recent[0].equal(queries[[1, 0], :, 13 - count :])


def test_kvpress_missing_says_how_to_install_it(monkeypatch, llama):
    monkeypatch.setitem(sys.modules, "kvpress", None)
    with pytest.raises(SparseRLError, match=r"pip install --no-deps kvpress"):
        Engine(llama, compressor="kvpress:KnormPress")


@pytest.mark.parametrize(
    "name, evicts, has_budget, evicts_response, folds",
    [
        ("dense", False, False, False, False),
        ("rkv", True, True, True, False),
        ("prompt-only", True, True, False, False),
        ("beacon", True, False, False, True),
        ("kvpress", True, True, True, False),
    ],
)
def test_a_compressor_says_what_it_does(name, evicts, has_budget, evicts_response, folds):
    cls = COMPRESSORS[name]
    assert (cls.evicts, cls.has_budget, cls.evicts_response, cls.folds) == (evicts, has_budget, evicts_response, folds)


def test_a_compressor_parses_its_own_argument():
    assert make("beacon:8").chunk == 8 and make("beacon", chunk=8).chunk == 8
    assert make("prompt-only").name == "prompt-only:snapkv" and make("prompt-only:rkv").name == "prompt-only:rkv"
    assert make("prompt-only:rkv", threshold=0.9).chooser.threshold == 0.9


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("rkv:8", {}, "rkv takes no argument, but rkv:8 was given; write rkv."),
        ("dense:", {}, "dense takes no argument"),
        ("rkw:8", {}, "there is no compressor 'rkw:8'; did you mean 'rkv'"),
        ("beacon:8", {"chunk": 4}, "beacon:8 sets chunk already, but chunk=4 was given too"),
        ("beacon:8", {"chunks": 4}, "beacon:8 has no parameter 'chunks'; did you mean 'chunk'"),
        ("kvpress", {}, "kvpress needs the name of a scorer; write kvpress:KnormPress"),
        ("prompt-only:rkw", {}, "there is no compressor 'rkw'; did you mean 'rkv'"),
        ("prompt-only:beacon:8", {}, "beacon does not choose among slots"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(name, options, message):
    with pytest.raises(SparseRLError, match=message):
        make(name, **options)


def test_the_list_comes_from_the_registry():
    rows = dict(describe())
    assert len(rows) == len(COMPRESSORS) + 1 and all(rows.values()) and "FILE.py[:CLASS]" in rows
    assert {"dense", "rkv", "prompt-only", "beacon:N", "kvpress:NAME"} <= set(rows)
    assert not any(idea.startswith(name.partition(":")[0]) for name, idea in rows.items())
