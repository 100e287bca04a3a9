"""vase and the original snapkv against loops; the draw is the one that the method asks for."""

import math
from dataclasses import replace

import pytest
import torch

from sparse_rl import COMPRESSORS, Engine, Sampling, SparseRLError
from sparse_rl.streams import mix, uniform
from tests.compressors.test_compressors import random_view
from tests.helpers.models import prompts_of


def loop_attention(queries, keys, candidates, pool):
    """w of one row and KV head. queries [G][W][D], keys [S][D]"""
    per_head = []
    for head in queries:
        mean = [0.0] * candidates
        for query in head:
            logits = [sum(a * b for a, b in zip(query, keys[j])) / math.sqrt(len(query)) for j in range(candidates)]
            total = sum(math.exp(x) for x in logits)
            for j in range(candidates):
                mean[j] += math.exp(logits[j]) / total / len(head)
        half = pool // 2
        pooled = []
        for j in range(candidates):
            near = [mean[i] if 0 <= i < candidates else 0.0 for i in range(j - half, j + half + 1)]
            pooled.append(sum(near) / pool)
        per_head.append(pooled)
    return [sum(head[j] for head in per_head) / len(per_head) for j in range(candidates)]


def loop_kept(view, row, head, groups, budget, window, sinks=4, wide=0.25):
    """What VaSE keeps: wide values, then draws one by one without replacement, then the window."""
    used = view.keys.shape[2]
    candidates = used - window
    queries = view.queries[row, head * groups : (head + 1) * groups].double().tolist()
    w = loop_attention(queries, view.keys[row, head].double().tolist(), candidates, 5)
    values = view.values[row, head].tolist()
    ranges = [math.inf if j < sinks else max(values[j]) - min(values[j]) for j in range(candidates)]
    kept = sorted(range(candidates), key=lambda j: (ranges[j], j), reverse=True)[: int(budget * wide)]
    stream = mix(view.streams[row, head] + view.feed[row, head, -1])
    others = [j for j in range(candidates) if j not in kept]
    race = {j: -math.log(float(uniform(stream, view.feed[row, head, j]))) / w[j] for j in others}  # exponential clocks
    while len(kept) < budget - window:
        first = min(race, key=lambda j: race[j])
        kept.append(first)
        del race[first]
    return sorted(kept) + list(range(candidates, used))


@pytest.mark.parametrize("groups, used, budget", [(1, 40, 24), (2, 60, 48), (7, 33, 32)])
def test_vase_equals_the_loops(groups, used, budget):
    view = random_view(groups=groups, used=used, queries=8, seed=used)
    compressor = COMPRESSORS["vase"](queries=8).bind(budget, used - budget)
    window = budget // 8
    kept = compressor.keep(view, budget)
    for row in range(2):
        for head in range(2):
            assert kept[row, head].tolist() == loop_kept(view, row, head, groups, budget, window)


def test_vase_draws_in_proportion_to_attention():
    """Over many streams, the slot that is drawn first is drawn as often as its weight says."""
    view = random_view(rows=1, heads=1, groups=1, used=14, queries=4)
    compressor = COMPRESSORS["vase"](sinks=0, window=4, queries=4, wide=0.0, pool=1).bind(5, 9)
    weights = torch.tensor(loop_attention(view.queries[0, None, 0].tolist(), view.keys[0, 0].tolist(), 10, 1))
    n = 6000
    slots = {name: getattr(view, name) for name in ("keys", "values", "feed", "queries")}
    many = replace(
        view, **{name: x.expand(n, *x.shape[1:]) for name, x in slots.items()},
        streams=mix(torch.arange(n))[:, None], num_prompt_tokens=torch.zeros(n),
    )  # fmt: skip
    drawn = torch.bincount(compressor.keep(many, 5)[:, 0, 0], minlength=10)[:10] / n
    assert (drawn - weights).abs().max() < 4 * (weights.max() / n).sqrt()


def test_vase_takes_the_published_window_and_scales_it_down():
    vase = COMPRESSORS["vase"]()
    assert [vase.bind(b, 64).protected(b) for b in (4096, 512, 256, 48)] == [(4, 64), (4, 64), (4, 32), (4, 6)]
    assert [vase.bind(b, 64).num_queries for b in (4096, 48)] == [64, 6]
    assert COMPRESSORS["vase"](queries=8).bind(4096, 64).num_queries == 8
    with pytest.raises(SparseRLError, match="pool 4 must be odd"):
        COMPRESSORS["vase"](pool=4)


def test_a_protected_prompt_leaves_room_for_draws(llama):
    engine = Engine(llama, COMPRESSORS["vase"](protect_prompt=True), budget=48, interval=8, rows=2)
    trajectory = engine.generate(prompts_of(38), sampling=Sampling(60))[0]
    gone = trajectory.trace.evicted_at.long() < len(trajectory.tokens)
    assert not gone[..., :38].any() and gone[..., 38:].any()


def loop_original(queries, keys, window, pool):
    used = len(keys)
    per_head = []
    for head in queries:
        mean = [0.0] * (used - window)
        for i, query in enumerate(head):
            seen = used - len(head) + i + 1
            logits = [sum(a * b for a, b in zip(query, keys[j])) / math.sqrt(len(query)) for j in range(seen)]
            total = sum(math.exp(x) for x in logits)
            for j in range(used - window):
                mean[j] += math.exp(logits[j]) / total / len(head)
        per_head.append(mean)
    mean = [sum(head[j] for head in per_head) / len(per_head) for j in range(used - window)]
    half = pool // 2
    return [sum(mean[max(0, j - half) : j + half + 1]) / pool for j in range(len(mean))]


@pytest.mark.parametrize("groups", [1, 4])
def test_the_original_snapkv_equals_the_loops(groups):
    view = random_view(groups=groups, used=50, queries=32)
    snapkv = COMPRESSORS["snapkv"](original=True)
    assert (snapkv.window, snapkv.pool, snapkv.pooling, snapkv.num_queries) == (32, 5, "avg", 32)
    got = snapkv.score(view)
    for row in range(2):
        for head in range(2):
            queries = view.queries[row, head * groups : (head + 1) * groups].double().tolist()
            expected = loop_original(queries, view.keys[row, head].double().tolist(), 32, 5)
            torch.testing.assert_close(got[row, head, :18], torch.tensor(expected), atol=1e-6, rtol=1e-4)
    assert COMPRESSORS["snapkv"](original=True, window=8, pooling="max").window == 8
    with pytest.raises(SparseRLError, match="pooling is 'min'; it must be one of max, avg"):
        COMPRESSORS["snapkv"](pooling="min")
