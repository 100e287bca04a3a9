"""Compressors that know who wrote a token: replies are protected, or go first."""

import pytest
import torch

from sparse_rl import Engine, Sampling, token_logprobs
from sparse_rl.compressors import make
from sparse_rl.errors import SparseRLError
from tests.helpers.compressors import EVICTING
from tests.helpers.models import prompts_of, tiny

PROMPT, GIVEN = 6, 9


def conversation(compressor, **options):
    """Four turns of 8 tokens, a reply of 9 before each but the first; rows of 24 + 4 slots."""
    g = torch.Generator().manual_seed(0)
    engine = Engine(tiny("llama"), make(compressor, **options), budget=24, interval=4, rows=2)
    with engine.open(PROMPT, 200) as live:
        chat = live.submit(prompts_of(PROMPT)[0], Sampling(8, stop_ids=()), seed=1)
        live.run()
        for _ in range(3):
            live.extend(chat, torch.randint(1, 60, (GIVEN,), generator=g).tolist())
            live.run()
        trajectory = live.release(chat)
    assert [turn.stop - turn.start for turn in trajectory.turns] == [8] * 4
    logprobs = token_logprobs(tiny("llama"), trajectory.tokens, trajectory.trace)
    assert (logprobs - trajectory.sampler_logprobs)[trajectory.response_mask].abs().max() < 1e-4
    return trajectory


def evictions(t, compressor):
    """Of every eviction, layer and head: the ages of the slots that could be chosen, and which of them went."""
    number, count = torch.zeros(len(t.tokens), dtype=torch.int64), 0
    for i in range(PROMPT, len(t.tokens)):
        count += bool(t.given[i] and not t.given[i - 1])
        number[i] = count * t.given[i]
    sinks, window = (4, 1) if compressor == "window" else make(compressor).protected(24)
    gone = t.trace.evicted_at.long()
    for moment in gone[gone < len(t.tokens)].unique().tolist():
        age = torch.where(number > 0, number[:moment].max() - number, -1)
        for head in gone.flatten(0, 1):
            slots = (head[:moment] >= moment).nonzero()[:, 0]
            slots = slots[sinks : len(slots) - window]
            yield age[slots], head[slots] == moment


@pytest.mark.parametrize("compressor", EVICTING)
def test_old_replies_go_first_and_new_ones_stay(compressor):
    seen = {"forgot": 0, "protected": 0}
    for age, went in evictions(conversation(compressor, forget_given=1), compressor):
        old = age >= 1
        assert not (old & ~went).any() or not (went & ~old).any()  # while old ones are left, no other goes
        seen["forgot"] += int((old & went).sum())
    for age, went in evictions(conversation(compressor, protect_given=1), compressor):
        new = age == 0
        assert not (new & went).any() or not (~went & ~new).any()  # while others are left, no new one goes
        seen["protected"] += int((new & ~went).sum())
    both = list(evictions(conversation(compressor, protect_given=1, forget_given=2), compressor))
    for age, went in both:
        part = (age == 0).long() - (age >= 2).long()
        assert not went.any() or went.all() or part[went].max() <= part[~went].min()
    assert min(seen.values()) > 0
    plain = list(evictions(conversation(compressor), compressor))
    assert any((age >= 1)[~went].any() and (went & (age < 1)).any() for age, went in plain)  # else it shows nothing


def test_without_a_conversation_the_options_change_nothing():
    plain, other = (
        Engine(tiny("llama"), make("rkv", **options), budget=16, interval=4, rows=2).generate(prompts_of(9, 5), 2)
        for options in ({}, {"protect_given": 1, "forget_given": 2})
    )
    for a, b in zip(plain, other, strict=True):
        assert a.tokens.equal(b.tokens) and a.trace.evicted_at.equal(b.trace.evicted_at)


def test_options_that_mean_nothing_are_refused():
    for name in ("dense", "prompt-only"):
        with pytest.raises(SparseRLError, match=r"set both to 0|has no parameter"):
            make(name, forget_given=1)
    with pytest.raises(
        SparseRLError, match=r"protect_given 3 would keep .* forget_given 2 .* set protect_given to at most 2"
    ):
        make("rkv", protect_given=3, forget_given=2)
    with pytest.raises(SparseRLError, match="forget_given is -1"):
        make("rkv", forget_given=-1)
