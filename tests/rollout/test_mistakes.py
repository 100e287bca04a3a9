"""Calls that cannot work are refused in one sentence with the numbers and the remedy."""

import copy

import pytest

from sparse_rl import Engine, OutOfMemory, Sampling, SparseRLError
from tests.helpers.models import prompts_of


def test_empty_prompt(engine):
    with pytest.raises(SparseRLError, match="prompt 1 is empty"):
        engine.generate([[1], []])


def test_prompt_beyond_the_context(engine):
    with pytest.raises(
        SparseRLError, match="prompt 0 has 4100 tokens, beyond the model's context of 4096; shorten it by 4"
    ):
        engine.generate(prompts_of(4100))


def test_token_outside_the_vocabulary(engine):
    with pytest.raises(SparseRLError, match="prompt 0 holds token id 61, outside the vocabulary of 61"):
        engine.generate([[1, 61]])
    with pytest.raises(SparseRLError, match="token id -1"):
        engine.generate([[1, -1]])


def test_prompts_are_token_ids(engine):
    with pytest.raises(SparseRLError, match=r"not 'hello'; encode text"):
        engine.generate(["hello"])
    with pytest.raises(SparseRLError, match=r"a prompt is a list of token ids, not 5"):
        engine.generate([5, 6, 7])


def test_group_size_and_rows(engine, llama):
    with pytest.raises(SparseRLError, match="group_size is 0"):
        engine.generate([[1]], group_size=0)
    with pytest.raises(SparseRLError, match="rows is 0"):
        Engine(llama, rows=0)


def test_no_prompts_give_no_trajectories(engine):
    assert engine.generate([]) == []


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(max_new_tokens=0), "max_new_tokens is 0"),
        (dict(temperature=-1.0), "temperature is -1.0"),
        (dict(temperature=float("nan")), "temperature is nan"),
        (dict(top_p=0.0), "top_p is 0.0"),
        (dict(top_k=-2), "top_k is -2"),
        (dict(max_new_tokens=1.5), "max_new_tokens is 1.5"),
        (dict(top_p=0.9, for_correction=True), "top_p 0.9 cannot be combined with a correction.*biased.*top_p=1"),
        (dict(top_k=5, for_correction=True), "top_k 5.*cannot be combined with a correction"),
    ],
)
def test_sampling_is_checked(options, message):
    with pytest.raises(SparseRLError, match=message):
        Sampling(**options)


def test_dense_says_when_a_later_call_needs_more(llama):
    growing = Engine(llama, compressor="dense", rows=2)
    growing.generate(prompts_of(10), sampling=Sampling(20))
    assert len(growing.generate(prompts_of(10), sampling=Sampling(40))[0].tokens) == 50 and growing.cache.capacity == 50
    engine = Engine(llama, compressor="dense", rows=2, max_tokens=30)
    with pytest.raises(
        SparseRLError, match=r"hold 30 tokens, but the call needs 50 \(10 prompt \+ 40 new\).*max_tokens=50"
    ):
        engine.generate(prompts_of(10), sampling=Sampling(40))
    assert len(engine.generate(prompts_of(10), sampling=Sampling(15))[0].tokens) == 25
    roomy = Engine(llama, compressor="dense", rows=2, max_tokens=50)
    assert len(roomy.generate(prompts_of(10), sampling=Sampling(40))[0].tokens) == 50


def test_out_of_memory_shows_the_plan_and_what_fits(llama):
    with pytest.raises(OutOfMemory) as caught:
        Engine(llama, compressor="rkv", budget=512, interval=128, rows=10**9)
    message = str(caught.value)
    assert "weights" in message and "cache, 1000000000 rows" in message and "use rows=" in message
    rows = int(message.rsplit("use rows=", 1)[1].rstrip("."))
    assert 1 < rows < 10**9


def test_a_changed_model_needs_a_new_engine(llama):
    model = copy.deepcopy(llama)
    engine = Engine(model, budget=16, interval=8)
    model.double()
    with pytest.raises(SparseRLError, match=r"now torch.float64 on cpu.*make a new Engine"):
        engine.generate(prompts_of(5))
