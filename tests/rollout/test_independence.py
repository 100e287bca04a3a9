"""What a sequence samples does not depend on what runs beside it, when it was admitted, or how many rows there are."""

import copy
import functools
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl import Engine, Sampling, SparseRLError
from sparse_rl.beacon import add_beacon
from sparse_rl.rollout.decode import RowState
from tests.helpers.compressors import STANDALONE
from tests.helpers.models import prompts_of, tiny

SAMPLING = Sampling(max_new_tokens=50, stop_ids=(7,))  # responses of different lengths
SHORT = Sampling(max_new_tokens=30, stop_ids=(7,))


def assert_same(a, b):
    assert a.tokens.equal(b.tokens)
    assert a.trace.evicted_at.equal(b.trace.evicted_at)
    assert a.finish_reason == b.finish_reason
    torch.testing.assert_close(a.sampler_logprobs, b.sampler_logprobs, atol=1e-5, rtol=0)


# every compressor with one architecture, every architecture with some compressors; the other pairs are a campaign
PAIRS = [
    pytest.param(compressor, architecture, marks=[] if compressor in usual else pytest.mark.slow)
    for architecture, usual in (("llama", STANDALONE), ("gemma3", ["rkv", "random"]), ("smollm3", ["rkv"]))
    for compressor in STANDALONE
]


@pytest.mark.parametrize("compressor, architecture", PAIRS)
def test_company_does_not_matter(compressor, architecture):
    model = tiny(architecture)
    prompt, *others = prompts_of(33, 4, 60, 12, 25, 9, 16)

    def run(prompts, rows, group_size=2):
        engine = Engine(model, compressor=compressor, budget=16, interval=8, rows=rows, max_tokens=120)
        by_prompt = {}
        for t in engine.generate(prompts, group_size=group_size, sampling=SHORT, seed=3):
            by_prompt.setdefault(t.prompt_index, []).append(t)
        return by_prompt

    alone = run([prompt], rows=8)[0]
    first = run([prompt, *others], rows=8)[0]
    last = run([*others, prompt], rows=8)[len(others)]
    crowded = run([*others, prompt], rows=4)[len(others)]
    single_row = run([others[0], prompt], rows=1)[1]
    larger_group = run([prompt], rows=8, group_size=5)[0]
    for other in (first, last, crowded, single_row, larger_group):
        for a, b in zip(alone, other, strict=False):
            assert_same(a, b)


def test_members_of_a_group_and_repeated_prompts_differ(llama):
    prompt = prompts_of(10)[0]
    engine = Engine(llama, budget=16, interval=8, rows=4)
    trajectories = engine.generate([prompt, prompt], group_size=3, sampling=SAMPLING)
    assert len({tuple(t.tokens.tolist()) for t in trajectories}) == 6
    assert [(t.prompt_index, t.sample_index) for t in trajectories] == [(p, s) for p in (0, 1) for s in (0, 1, 2)]


def test_seeds_and_calls(llama):
    prompt = prompts_of(10)
    engine = Engine(llama, budget=16, interval=8, rows=4)
    once, again, other = (engine.generate(prompt, sampling=SAMPLING, seed=seed)[0] for seed in (0, 0, 1))
    assert_same(once, again)
    assert not once.tokens.equal(other.tokens)


def test_random_compressor_shares_the_prompts_eviction_within_a_group(llama):
    """Inside the prompt the choice belongs to the prompt, so it is made once and forked; after it, to each sequence."""
    engine = Engine(llama, compressor="random", budget=16, interval=8, rows=4)
    a, b = engine.generate(prompts_of(40), group_size=2, sampling=Sampling(40))
    at_prompt = [t.trace.evicted_at.long()[..., :40] == 40 for t in (a, b)]
    assert at_prompt[0].equal(at_prompt[1])
    assert at_prompt[0].sum(-1).eq(40 - 16).all()
    assert not a.trace.evicted_at.equal(b.trace.evicted_at)
    assert not at_prompt[0][0].equal(at_prompt[0][1])  # layers choose apart
    assert not at_prompt[0][0, 0].equal(at_prompt[0][0, 1])  # so do heads


# ---------------------------------------------------------------------------------------- some members of groups


@functools.cache
def asked_at_once(compressor: str):
    """Three samples of each of five prompts, one of which occurs three times; and the model."""
    model = copy.deepcopy(tiny("llama"))
    if compressor == "beacon:4":
        add_beacon(model)
    a, b, c = prompts_of(33, 4, 20)
    prompts = [a, b, a, c, a]
    engine = Engine(model, compressor, budget=16, interval=8, rows=6, max_tokens=90)
    return model, prompts, engine.generate(prompts, group_size=3, sampling=SHORT, seed=3)


@settings(deadline=None, max_examples=3)
@given(calls=st.lists(st.integers(0, 2), min_size=15, max_size=15), rows=st.tuples(*[st.integers(1, 9)] * 3))
@pytest.mark.parametrize("compressor", ["dense", "rkv", "random", "prompt-only", "beacon:4"])
def test_a_call_may_be_made_in_parts(compressor, calls, rows):
    """Every sample is asked for in one of three calls, on engines of any size."""
    model, prompts, whole = asked_at_once(compressor)
    parts = []
    for call, n in enumerate(rows):
        samples = [[s for s in (2, 0, 1) if calls[3 * p + s] == call] for p in range(5)]
        engine = Engine(model, compressor, budget=16, interval=8, rows=n, max_tokens=90)
        part = engine.generate(prompts, sampling=SHORT, seed=3, samples=samples)
        assert [(t.prompt_index, t.sample_index) for t in part] == [
            (p, s) for p in range(5) for s in sorted(samples[p])
        ]
        parts += part
    parts.sort(key=lambda t: (t.prompt_index, t.sample_index))
    for a, b in zip(whole, parts, strict=True):
        assert_same(a, b)
        assert (a.prompt_index, a.sample_index) == (b.prompt_index, b.sample_index)


def test_what_is_not_wanted_is_not_read_but_has_its_place(llama, monkeypatch):
    import sparse_rl.rollout.engine as module

    totals, read, bar = [], [], module.ProgressBar
    monkeypatch.setattr(module, "ProgressBar", lambda on, total, cache: totals.append(total) or bar(on, total, cache))
    prefill = module.GenerateCall.prefill
    monkeypatch.setattr(
        module.GenerateCall,
        "prefill",
        lambda self, some: read.extend(w.prompt_index for w in some) or prefill(self, some),
    )
    engine = Engine(llama, "dense", rows=2)
    prompts = prompts_of(5, 40, 7)
    assert engine.generate(prompts, 4, samples=[[], [], []]) == [] == engine.generate([], samples=[])
    assert engine.storage.cache is None and totals == []
    done = engine.generate(prompts, 4, Sampling(10), samples=[range(2), (), [7]])
    assert [(t.prompt_index, t.sample_index) for t in done] == [(0, 0), (0, 1), (2, 7)]
    assert read == [0, 2] and totals == [3] and engine.cache.capacity == 50


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([[0]], "samples has 1 entries for 2 prompts"),
        ([[0], [-1]], r"a number in samples\[1\] is -1"),
        ([[0], [1.5]], r"a number in samples\[1\] is 1.5"),
        ([[0], 1], r"samples\[1\] is 1; give a list"),
        ([[0, 2, 0], []], r"samples\[0\] asks 2 times for sample 0"),
    ],
)
def test_samples_that_make_no_sense(samples, said, llama):
    with pytest.raises(SparseRLError, match=said) as caught:
        Engine(llama, budget=16, interval=8).generate(prompts_of(5, 6), samples=samples)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------- tokens as they come


@pytest.mark.parametrize("poll", [None, (3, 7)])
@pytest.mark.parametrize("compressor", ["dense", "rkv", "beacon:4"])
def test_every_token_is_told_once_and_in_order(compressor, poll):
    """Also of rows that end with their first token, and of rows that are moved when the batch drains."""
    model, prompts, _ = asked_at_once(compressor)
    engine = Engine(model, compressor, budget=16, interval=8, rows=9, max_tokens=90, poll=poll)
    sampling = Sampling(max_new_tokens=50, temperature=2.0, stop_ids=(7, 30, 41))
    told, finished, moved = defaultdict(list), [], []

    def on_tokens(prompt, sample, tokens):
        assert tokens and all(type(token) is int for token in tokens)
        told[prompt, sample] += tokens

    def on_finish(t):
        finished.append(t)
        assert told[t.prompt_index, t.sample_index] == t.response_tokens.tolist()  # told before it is delivered

    move = RowState.move
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowState, "move", lambda self, source, to: moved.append(len(to)) or move(self, source, to))
        done = engine.generate(prompts, 8, sampling, seed=3, on_finish=on_finish, on_tokens=on_tokens)
    assert len(done) == len(finished) == len(told) == 40 and moved
    lengths = {len(t.response_tokens) for t in done}
    assert 1 in lengths and 50 in lengths
    for a, b in zip(done, engine.generate(prompts, 8, sampling, seed=3), strict=True):
        assert_same(a, b)


def test_nobody_listening_costs_no_look_at_the_device(llama, monkeypatch):
    from sparse_rl.rollout import schedule

    asked, sync = [], schedule.sync

    def looked(state, fine, first, most, before_waiting):
        asked.append(most)
        return sync(state, fine, first, most, before_waiting)

    monkeypatch.setattr(schedule, "sync", looked)
    engine = Engine(llama, budget=16, interval=8)
    assert engine.generate(prompts_of(5), sampling=Sampling(20)) and not any(asked)
    asked.clear()
    assert engine.generate(prompts_of(5), sampling=Sampling(20), on_tokens=lambda *_: None) and all(asked)


def test_an_error_of_the_listener_ends_the_rollout(llama):
    engine, heard = Engine(llama, budget=16, interval=8), []

    def listen(prompt, sample, tokens):
        heard.append(tokens)
        if len(heard) == 5:
            raise LookupError

    expected = engine.generate(prompts_of(5), sampling=Sampling(20))[0]
    with pytest.raises(LookupError):
        engine.generate(prompts_of(5), sampling=Sampling(20), on_tokens=listen)
    assert len(heard) == 5
    assert_same(engine.generate(prompts_of(5), sampling=Sampling(20))[0], expected)


def test_trajectories_need_not_be_kept():
    engine, told = Engine(tiny("llama"), "rkv", budget=16, interval=8, rows=3), []
    assert engine.generate(prompts_of(9, 5), 3, SAMPLING, seed=3, on_finish=told.append, keep=False) == []
    kept = engine.generate(prompts_of(9, 5), 3, SAMPLING, seed=3)
    for a, b in zip(sorted(told, key=lambda t: (t.prompt_index, t.sample_index)), kept, strict=True):
        assert_same(a, b)
