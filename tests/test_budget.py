"""A budget that moves: the engine keeps less of the same rows, the controller says how much, a run obeys it and can be resumed."""

import pytest
from conftest import prompts_of, tiny

from sparse_rl import COMPRESSORS, Engine, Sampling
from sparse_rl.errors import SparseRLError

SAMPLING = Sampling(max_new_tokens=50, stop_ids=(7,))  # responses of different lengths


def rollout(engine: Engine, seed: int = 0) -> list:
    return engine.generate(prompts_of(33, 4, 60, 12), group_size=3, sampling=SAMPLING, seed=seed)


def assert_same(mine: list, theirs: list) -> None:
    """To the bit: tokens, log-probs, traces."""
    for a, b in zip(mine, theirs, strict=True):
        assert a.tokens.equal(b.tokens) and a.trace.evicted_at.equal(b.trace.evicted_at)
        assert a.sampler_logprobs.equal(b.sampler_logprobs)


# ------------------------------------------------------------------------------------------------------------ the engine


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("compressor", [name for name in COMPRESSORS if name != "dense"])
def test_an_engine_set_to_a_budget_is_an_engine_made_with_it(compressor, architecture):
    model = tiny(architecture)
    engine = Engine(model, compressor=compressor, budget=32, interval=8, rows=4)
    cache, nbytes = engine.cache, engine.cache.nbytes
    for step, budget in enumerate((32, 20, 12, 27, 32)):  # down, up, and back; each after what the one before left in the rows
        engine.set_budget(budget)
        mine = rollout(engine, seed=step)
        assert_same(mine, rollout(Engine(model, compressor=compressor, budget=budget, interval=8, rows=4), seed=step))
        assert max(t.trace.visible()[:, :, t.num_prompt_tokens :].sum(-1).max() for t in mine) <= budget + 8
    assert engine.cache is cache and cache.nbytes == nbytes == engine.plan(60, 50).cache_bytes


@pytest.mark.parametrize("poll", [(1, 1), (3, 7)])
def test_rows_wait_at_the_budget_that_was_set(poll, llama):
    """Rounds of several steps: a row stops at budget + interval, not at the end of its memory."""
    engine = Engine(llama, budget=40, interval=6, rows=4, poll=poll)
    engine.set_budget(16)
    assert_same(rollout(engine), rollout(Engine(llama, budget=16, interval=6, rows=4)))


def test_budgets_that_cannot_be_set(llama):
    engine = Engine(llama, budget=32, interval=8, rows=2)
    for budget, message in ((33, r"cannot be set to 33: rows of this engine were made for 32 \+ 8 slots; .*budget=33"),
                            (8, "budget 8 must be above sinks 0 . window 8"), (0, "budget is 0")):  # fmt: skip
        with pytest.raises(SparseRLError, match=message):
            engine.set_budget(budget)
    assert engine.compressor.budget == 32  # refused: nothing changed
    with pytest.raises(SparseRLError, match="dense evicts nothing"):
        Engine(llama, compressor="dense", rows=2, max_tokens=80).set_budget(16)


def test_the_plan_counts_the_largest_budget(llama):
    engine = Engine(llama, budget=32, interval=8, rows=2)
    before = engine.plan(10, 20)
    engine.set_budget(16)
    assert engine.plan(10, 20) == before
    assert any("budget 32 + interval 8 = 40 slots" in label for label, _ in before.lines())
