"""What a sequence samples does not depend on what runs beside it, when it was admitted, or how many rows there are."""

import pytest
import torch
from conftest import prompts_of, tiny

from sparse_rl import COMPRESSORS, Engine, Sampling

SAMPLING = Sampling(max_new_tokens=50, stop_ids=(7,))  # responses of different lengths


def assert_same(a, b):
    assert a.tokens.equal(b.tokens)
    assert a.trace.evicted_at.equal(b.trace.evicted_at)
    assert a.finish_reason == b.finish_reason
    torch.testing.assert_close(a.sampler_logprobs, b.sampler_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "smollm3"])
@pytest.mark.parametrize("compressor", list(COMPRESSORS))
def test_company_does_not_matter(compressor, architecture):
    model = tiny(architecture)
    prompt, *others = prompts_of(33, 4, 60, 12, 25, 9, 16)

    def run(prompts, rows, group_size=2):
        engine = Engine(model, compressor=compressor, budget=16, interval=8, rows=rows, max_tokens=120)
        by_prompt = {}
        for t in engine.generate(prompts, group_size=group_size, sampling=SAMPLING, seed=3):
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
    """Inside the prompt the choice is the prompt's own, so it can be made once and forked; after it, each sequence's."""
    engine = Engine(llama, compressor="random", budget=16, interval=8, rows=4)
    a, b = engine.generate(prompts_of(40), group_size=2, sampling=Sampling(40))
    at_prompt = [t.trace.evicted_at.long()[..., :40] == 40 for t in (a, b)]
    assert at_prompt[0].equal(at_prompt[1])
    assert at_prompt[0].sum(-1).eq(40 - 16).all()
    assert not a.trace.evicted_at.equal(b.trace.evicted_at)
    assert not at_prompt[0][0].equal(at_prompt[0][1])  # layers choose apart
    assert not at_prompt[0][0, 0].equal(at_prompt[0][0, 1])  # so do heads
