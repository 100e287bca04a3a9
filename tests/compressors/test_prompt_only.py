"""prompt-only: a prompt is evicted once, when it has been read; a response never."""

import pytest
import torch

from sparse_rl import Engine, Sampling
from sparse_rl.cache.trace import NEVER
from sparse_rl.compressors import make
from sparse_rl.errors import SparseRLError
from sparse_rl.models import ModelShape
from sparse_rl.planning.memory import make_plan
from sparse_rl.train.held_out import dense_engine
from tests.helpers.compressors import EVICTING
from tests.helpers.models import prompts_of, tiny

BUDGET = 20


def engine_of(model, compressor="prompt-only", rows=4, **options):
    return Engine(model, compressor=compressor, budget=BUDGET, interval=3, rows=rows, **options)


@pytest.mark.parametrize(
    "prompt", [1, 8, BUDGET - 1, BUDGET, BUDGET + 1, BUDGET + 3, 55]
)  # below, at, above the budget and its interval
@pytest.mark.parametrize("chooser", EVICTING)
def test_slots_are_the_kept_prompt_and_the_whole_response(chooser, prompt, llama):
    new = 30
    engine = engine_of(llama, f"prompt-only:{chooser}")
    trajectory = engine.generate(prompts_of(prompt), sampling=Sampling(new))[0]
    seen = trajectory.trace.visible().sum(-1)  # [L, H, T]: slots that each query sees, its own among them
    fed = torch.arange(1, new)  # response tokens fed after the first, the second, ...
    assert (seen[..., prompt:-1] == min(prompt, BUDGET) + fed).all()
    assert (seen[..., :prompt] == torch.arange(1, prompt + 1)).all()  # a prompt is read whole
    assert set(trajectory.trace.evicted_at.long().unique().tolist()) == (
        {prompt, NEVER} if prompt > BUDGET else {NEVER}
    )
    assert engine.cache.capacity == min(prompt, BUDGET) + new


@pytest.mark.parametrize("chooser", EVICTING)
def test_the_prompt_keeps_what_its_chooser_keeps(chooser, llama):
    """A prompt that fills a row is evicted by the ordinary compressor too: the same slots stay."""
    sampling, prompts = Sampling(2, stop_ids=()), prompts_of(48, 57)
    alone = Engine(llama, compressor=chooser, budget=BUDGET, interval=20, rows=4).generate(prompts, sampling=sampling)
    for ours, theirs in zip(
        engine_of(llama, f"prompt-only:{chooser}").generate(prompts, sampling=sampling), alone, strict=True
    ):
        assert ours.trace.evicted_at.equal(theirs.trace.evicted_at)
        assert ours.tokens.equal(theirs.tokens)
        torch.testing.assert_close(ours.sampler_logprobs, theirs.sampler_logprobs, atol=1e-5, rtol=0)


def test_members_of_a_group_share_the_evicted_prompt(llama):
    """Also those that are admitted later, when rows come free, and with a chooser that draws lots."""
    done = engine_of(llama, "prompt-only:random", rows=2).generate(
        prompts_of(40, 33), group_size=5, sampling=Sampling(12)
    )
    for prompt, length in ((0, 40), (1, 33)):
        traces = [t.trace.evicted_at.long()[..., :length] for t in done if t.prompt_index == prompt]
        assert len(traces) == 5 and all(trace.equal(traces[0]) for trace in traces)
        assert (traces[0] == length).sum(-1).eq(length - BUDGET).all()
    assert len({tuple(t.tokens.tolist()) for t in done}) == 10


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_prompts_within_the_budget_are_dense(architecture):
    model, prompts = tiny(architecture), prompts_of(3, 12, BUDGET, 7)
    dense = Engine(model, compressor="dense", rows=4).generate(prompts, 2, Sampling(70))
    for ours, theirs in zip(engine_of(model).generate(prompts, 2, Sampling(70)), dense, strict=True):
        assert ours.tokens.equal(theirs.tokens) and ours.sampler_logprobs.equal(theirs.sampler_logprobs)
        assert ours.trace.evicted_at.equal(theirs.trace.evicted_at)


def test_the_interval_changes_nothing(llama):
    runs = [
        Engine(llama, "prompt-only", budget=BUDGET, interval=interval, rows=2).generate(
            prompts_of(30, 50), 2, Sampling(40)
        )
        for interval in (1, 500)
    ]
    for a, b in zip(*runs, strict=True):
        assert a.tokens.equal(b.tokens) and a.trace.evicted_at.equal(b.trace.evicted_at)


def test_rows_grow_with_the_call_and_the_plan_knows(llama):
    engine = engine_of(llama)
    for prompt, new, capacity in ((9, 5, 14), (60, 5, 25), (60, 31, 51), (9, 5, 51)):  # a row never shrinks
        engine.generate(prompts_of(prompt), sampling=Sampling(new))
        plan = engine.plan(prompt, new)
        assert engine.cache.capacity == plan.capacity == capacity
        assert (engine.cache.nbytes, engine.scratch.rows) == (plan.cache_bytes, plan.prefill_rows)
    fresh = make_plan(
        ModelShape.of(llama.config),
        engine.compressor,
        rows=4,
        prompt_tokens=60,
        new_tokens=31,
        weight_bytes=0,
        on_gpu=False,
    )
    assert fresh.cache_bytes == engine.cache.nbytes
    assert "prompt-only:snapkv (prompt evicted to 20, response whole = 51 slots)" in fresh.text()


def test_a_dense_evaluation_takes_no_more_than_these_rows(llama):
    """Also before the first rollout, when there are none yet."""
    engine = engine_of(llama, "prompt-only:knorm", rows=12)
    assert engine.storage.cache is None
    before = dense_engine(llama, prompts_of(100, 7), 20, rows=12, like=engine)
    engine.generate(prompts_of(100), sampling=Sampling(20))
    after = dense_engine(llama, prompts_of(100, 7), 20, rows=12, like=engine)
    assert before.rows == after.rows == 4  # 12 rows of 20 + 20 slots hold as much as 4 of 100 + 20


def test_the_largest_budget_that_fits_is_suggested(llama):
    compressor = make("prompt-only").bind(10**9, 1)
    plan = make_plan(
        ModelShape.of(llama.config), compressor, rows=4, prompt_tokens=10**9, new_tokens=100, weight_bytes=0
    )
    memory = plan.with_rows(1).with_capacity(400).total_bytes / 0.95 + 1
    assert plan.largest_that_fits(memory) == "Not even one row fits: with rows=1, use budget=300."


def test_rows_of_a_fixed_size_refuse_longer_calls(llama):
    engine = engine_of(llama, max_tokens=60)
    engine.generate(prompts_of(50), sampling=Sampling(40))  # 20 + 40 slots
    with pytest.raises(
        SparseRLError, match=r"hold 60 tokens, but the call needs 61 \(50 prompt \+ 41 new\).*max_tokens=61"
    ):
        engine.generate(prompts_of(50), sampling=Sampling(41))


@pytest.mark.parametrize(
    "name, options, message",
    [
        (
            "prompt-only:dense",
            {},
            "prompt-only:dense: dense does not choose among slots; use one that does, such as prompt-only:snapkv",
        ),
        ("prompt-only:prompt-only", {}, "does not choose among slots"),
        ("prompt-only:snapvk", {}, "no compressor 'snapvk'; did you mean 'snapkv'"),
        ("prompt-only", {"pol": 3}, "snapkv has no parameter 'pol'; did you mean 'pool'"),
        (
            "prompt-only:rkv",
            {"protect_prompt": True},
            "evicts nothing but the prompt, so with protect_prompt there is nothing to evict",
        ),
        (
            "prompt-only",
            {"window": 20},
            r"prompt-only:snapkv: budget 20 must be above sinks 0 \+ window 20 = 20.*at least 21",
        ),
        ("prompt-only:window", {"sinks": 20}, "prompt-only:window: budget 20 must be above sinks 20.*at least 21"),
    ],
)
def test_what_makes_no_sense_is_refused(name, options, message):
    with pytest.raises(SparseRLError, match=message):
        make(name, **options).bind(BUDGET, 1)


def test_options_are_the_choosers():
    assert make("prompt-only").chooser.window == 8
    rkv = make("prompt-only:rkv", window=16, importance_weight=0.5).bind(BUDGET, 1)
    assert (rkv.chooser.importance_weight, rkv.protected(BUDGET), rkv.num_queries) == (0.5, (0, 16), 16)
