"""Summaries and the cross table are what their items say."""

import itertools
from collections import Counter
from pathlib import Path

import pytest

from sparse_rl import SparseRLError
from sparse_rl.evaluation import Cache, summarize
from sparse_rl.evaluation.cache import caches
from sparse_rl.evaluation.compare import ALL, agreement, cross, difference, rows_of
from sparse_rl.evaluation.page import draw, of_accuracy, page, panel
from sparse_rl.evaluation.results import Item, shares
from sparse_rl.evaluation.run import Evaluated
from sparse_rl.evaluation.statistics import interval, mcnemar, paired
from tests.helpers.evaluating import item


def test_a_summary_is_what_its_items_say():
    right = [[1, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1], [0, 0, 1, 1]]
    verdicts = iter(["timeout", "error", "bad gold", "no answer", "no answer"])
    items = [
        item(
            index=i,
            sample=s,
            right=bool(r),
            tokens=10 * i + s,
            entries=float(i),
            peak_entries=float(i + s),
            loop=i == 1,
        )
        for i, row in enumerate(right)
        for s, r in enumerate(row)
    ]
    wrong = [k for k, i in enumerate(items) if not i.right][:5]
    for k in wrong:
        items[k] = Item(**{**vars(items[k]), "verdict": next(verdicts), "finish": "length"})
    found = summarize(items, 4, 100)
    assert found.accuracy == 10 / 20 and (found.low, found.high) == interval([sum(r) / 4 for r in right], 4)
    for k in (1, 2, 4):  # of all ways to choose k of a problem's completions
        chances = [[any(chosen) for chosen in itertools.combinations(row, k)] for row in right]
        assert found.pass_at[k] == pytest.approx(sum(sum(c) / len(c) for c in chances) / 5)
    assert list(found.pass_at) == [1, 2, 4]
    assert (found.timeouts, found.errors, found.bad_golds, found.ungraded, found.no_answer) == (1, 1, 1, 3, 0.1)
    assert (found.truncated, found.loops, found.entries, found.peak_entries) == (0.25, 0.2, 2.0, 7.0)
    assert (found.kv_bytes, found.peak_kv_bytes) == (200.0, 700.0)
    assert found.length == sum(10 * i + s for i in range(5) for s in range(4)) / 20
    with pytest.raises(ValueError, match="19 items of 5 problems are not 4 for each"):
        summarize(items[1:], 4, 100)


def evaluated(model: str, cache: Cache, items: list[Item]) -> Evaluated:
    benches = list(dict.fromkeys(i.bench for i in items))
    summaries = [
        summarize([i for i in items if i.bench == b], Counter((i.bench, i.index) for i in items)[b, 0], 1)
        for b in benches
    ]
    return Evaluated(model, cache, "", Path(), summaries, items, 10.0, 0)


def test_models_and_caches_are_compared_on_the_same_problems():
    outcomes = {  # of eight problems
        ("a", "dense"): "11110000",
        ("a", "rkv"): "10100100",
        ("b", "dense"): "11111000",
        ("b", "rkv"): "11111100",
    }
    found = [
        evaluated(
            model,
            Cache(name, 8 if name == "rkv" else None),
            [item(index=i, right=r == "1", answer=r) for i, r in enumerate(row)],
        )
        for (model, name), row in outcomes.items()
    ]
    cells = {(c.model, c.cache): c for c in cross(found)}
    assert list(cells) == [("a", "dense"), ("b", "dense"), ("a", "rkv 8"), ("b", "rkv 8")]
    assert cells["a", "dense"].cost is None is cells["a", "dense"].better is cells["a", "rkv 8"].better
    cost = cells["a", "rkv 8"].cost
    assert cost.mean == -1 / 8 and cost.p == mcnemar(1, 2)
    assert cells["b", "rkv 8"].cost.mean == 1 / 8
    assert cells["b", "dense"].better.mean == 1 / 8 and cells["b", "dense"].better.p == mcnemar(1, 0) == 1.0
    better = cells["b", "rkv 8"].better
    assert better.mean == 3 / 8 and better.p == mcnemar(3, 0) == 0.25
    assert cells["a", "rkv 8"].same_verdict == 5 / 8 == cells["a", "rkv 8"].same_answer
    here, there = item(index=0, answer="", verdict="no answer"), item(index=0, answer="", verdict="no answer")
    assert agreement([here], [there])[1] is None  # an empty box is not an answer
    assert cells["a", "rkv 8"].tokens_saved == pytest.approx(0.1) and cells["a", "rkv 8"].accuracy == 3 / 8


def test_several_benchmarks_are_also_pooled():
    def both(first: str, second: str) -> list[Item]:
        return [
            item(bench, i, right=r == "1")
            for bench, row in (("sums", first), ("more", second))
            for i, r in enumerate(row)
        ]

    found = [evaluated("a", Cache("dense"), both("110", "1")), evaluated("a", Cache("rkv", 8), both("100", "0"))]
    cells = {(c.bench, c.cache): c for c in cross(found)}
    assert cells[ALL, "dense"].accuracy == 3 / 4 and cells[ALL, "rkv 8"].accuracy == 1 / 4
    assert cells[ALL, "rkv 8"].cost.mean == -1 / 2 and cells["sums", "rkv 8"].cost.mean == pytest.approx(-1 / 3)


def test_pairs_are_problems_with_all_their_completions():
    first = [item(index=i, sample=s, right=(i + s) % 3 == 0) for i in range(9) for s in range(2)]
    second = [item(index=i, sample=s, right=i % 2 == 0) for i in range(9) for s in range(2)]
    a, b = shares(first), shares(second)
    assert difference(first, second) == paired(list(a.values()), list(b.values()))
    assert difference(first, second[4:]) == paired(list(a.values())[2:], list(b.values())[2:])
    assert (
        agreement(second, first)[0] == sum(((i + s) % 3 == 0) == (i % 2 == 0) for i in range(9) for s in range(2)) / 18
    )
    assert agreement([item(answer=None)], [item(answer=None)]) == (1.0, None, 1.0)
    assert (
        agreement([item(text="abxd"), item(sample=1, text="")], [item(text="abcde"), item(sample=1, text="a")])[2]
        == 0.2
    )


def test_caches_of_a_comparison():
    found = caches(["rkv", "dense", "beacon:8", "snapkv"], [16, 32], 4, {"protect_prompt": True})
    assert [c.label for c in found] == [
        "dense",
        "rkv 16 protect_prompt=True",
        "rkv 32 protect_prompt=True",
        "beacon:8",
        "snapkv 16 protect_prompt=True",
        "snapkv 32 protect_prompt=True",
    ]
    assert found[0].make().name == "dense" and found[1].make().protect_prompt and found[1].interval == 4
    with pytest.raises(SparseRLError, match="has no dense cache to compare with; add dense"):
        caches(["rkv"], [16], 4, {})
    with pytest.raises(SparseRLError, match="none of the compressors dense, rkv has a parameter 'snks'"):
        caches(["dense", "rkv"], [16], 4, {"snks": 3})


def test_rewards_are_compared_in_pairs_where_they_say_more_than_accuracy():
    def items(rewards):
        return [item(index=i, right=r >= 1, reward=r, rewards={"brief": r / 2}) for i, r in enumerate(rewards)]

    dense = evaluated("a", Cache("dense"), items([0.5, 2.0, -1.0, 0.25, 3.0]))
    small = evaluated("a", Cache("rkv", 8, 4), items([0.25, 1.5, -1.0, 0.0, 1.0]))
    first, second = cross([dense, small])
    assert first.reward_cost is None and first.reward == pytest.approx(4.75 / 5)
    assert second.reward_cost == paired([0.5, 2.0, -1.0, 0.25, 3.0], [0.25, 1.5, -1.0, 0.0, 1.0])
    assert second.reward_cost.mean == pytest.approx(-0.6) and second.cost.mean == 0.0  # as many are right
    assert second.reward_cost.p == pytest.approx(2 / 16, abs=0.02)  # four gaps, all of one sign
    assert second.reward_low <= second.reward <= second.reward_high
    assert dense.summaries[0].rewards == {"brief": pytest.approx(4.75 / 10)}
    told = rows_of("sums", [first, second])
    assert "reward against dense" in told[0] and "reward (95 %)" in told[0]
    plain = [evaluated("a", cache, [item(right=True)]) for cache in (Cache("dense"), Cache("rkv", 8, 4))]
    assert not any("reward" in heading for heading in rows_of("sums", cross(plain))[0])
    assert draw([first, second]).startswith(b"\x89PNG")


def test_models_on_one_budget_can_be_told_apart():
    figure = pytest.importorskip("matplotlib.figure")
    sets = [(model, cache) for model in ("mine", "start") for cache in (Cache("dense"), Cache("rkv", 48, 4))]
    cells = cross([evaluated(m, c, [item(index=i, right=i % 2 == 0) for i in range(8)]) for m, c in sets])
    axis = figure.Figure().subplots()
    panel(axis, "sums", cells, of_accuracy)
    points = [bars.lines[0] for bars in axis.containers]
    assert len({(line.get_color(), line.get_marker()) for line in points}) == len(points) == 2
    assert len({line.get_color() for line in points}) == len({line.get_marker() for line in points}) == 2
    (low, high), at = axis.get_xlim(), [line.get_xdata()[0] for line in points]
    assert at[0] != at[1] and all(0.9 * 48 < x < 1.1 * 48 for x in at)  # beside the tick
    assert low < 0.6 * 48 and high > 1.6 * 48  # which is not at an edge
    assert sorted(axis.get_legend_handles_labels()[1]) == ["mine, dense", "mine, rkv", "start, dense", "start, rkv"]
    shown = page(cells, draw(cells), "sums; `sparse-rl eval <b>`")
    assert "<p>sums; <code>sparse-rl eval &lt;b&gt;</code></p>" in shown and "`" not in shown
