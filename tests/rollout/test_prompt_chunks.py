"""Prompts compressed while they are read: the replay is exact, a large chunk changes nothing, rows stay short."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl import COMPRESSORS, Engine, Sampling
from sparse_rl.compressors import make
from sparse_rl.errors import SparseRLError
from sparse_rl.learn.batch import collate, score
from sparse_rl.learn.packing import pack_rows
from sparse_rl.learn.score import pad_traces, token_logprobs
from sparse_rl.models import ModelShape
from sparse_rl.planning.memory import make_plan
from sparse_rl.rollout.prefill import pieces
from sparse_rl.train.run import train
from tests.helpers.compressors import EVICTING
from tests.helpers.models import prompts_of, tiny
from tests.helpers.runs import recipe, run

CHOOSERS = [*EVICTING, *(f"prompt-only:{name}" for name in EVICTING)]


def engine_of(model, compressor, chunk, budget=14, interval=4, **options):
    return Engine(model, make(compressor, prompt_chunk=chunk), budget, interval, rows=4, **options)


def gap(model, t):
    """The largest difference between the sampler's log-probs and those under its trace."""
    shadow = token_logprobs(model, t.tokens, t.trace)[t.num_prompt_tokens :]
    return (shadow - t.sampler_logprobs[t.num_prompt_tokens :]).abs().max().item()


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("compressor", CHOOSERS)
def test_the_shadow_view_sees_what_the_sampler_saw(compressor, architecture):
    model = tiny(architecture)
    prompts = prompts_of(5, 14, 15, 18, 23, 70, seed=3)
    for rows in (1, 3):  # prompts read together, the shorter ones padded
        engine = engine_of(model, compressor, chunk=6, prefill_rows=rows)
        found = engine.generate(prompts, 1, Sampling(max_new_tokens=8), seed=1)
        assert max(gap(model, t) for t in found) < 1e-4
        assert engine.scratch.capacity <= 14 + 6 < 70
        moments = sorted({*found[-1].trace.evicted_at[..., :70].flatten().tolist()})
        assert {18, 24, 30, 36, 42, 48, 54, 60, 66, 70} <= {*moments}, "a prompt of 70 tokens is evicted at its chunks"
        seen = found[-1].trace.visible()[..., 69, :].sum(-1)  # before the last eviction
        assert (seen <= 14 + 6).all()


@given(
    compressor=st.sampled_from(CHOOSERS),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    budget=st.integers(12, 24),
    interval=st.integers(1, 9),
    chunk=st.integers(1, 40),
    together=st.integers(1, 64),
    rows=st.integers(1, 4),
)
@settings(max_examples=25, deadline=None)
def test_any_prompts_and_chunks_replay(compressor, lengths, budget, interval, chunk, together, rows):
    model = tiny("llama")
    engine = engine_of(model, compressor, chunk, budget, interval, prefill_chunk=together, prefill_rows=rows)
    found = engine.generate(prompts_of(*lengths, seed=chunk), 1, Sampling(max_new_tokens=6), seed=0)
    for t in found:
        assert gap(model, t) < 1e-4
        long = engine.compressor.evicts_prompt(t.num_prompt_tokens)
        of_prompt = t.trace.evicted_at.long()[..., : t.num_prompt_tokens]
        assert bool((of_prompt <= t.num_prompt_tokens).any()) == long
    assert engine.scratch.capacity == max(engine.compressor.scratch_capacity(max(lengths)), 1)


@pytest.mark.parametrize("compressor", CHOOSERS)
def test_a_chunk_as_long_as_the_prompt_changes_no_bit(compressor):
    model, prompts, sampling = tiny("qwen3"), prompts_of(9, 40, 33, seed=2), Sampling(max_new_tokens=16)
    plain = engine_of(model, compressor, 0).generate(prompts, 2, sampling, seed=5)
    for chunk in (40, 1000):
        for mine, theirs in zip(engine_of(model, compressor, chunk).generate(prompts, 2, sampling, seed=5), plain):
            assert torch.equal(mine.tokens, theirs.tokens)
            assert torch.equal(mine.sampler_logprobs, theirs.sampler_logprobs)
            assert torch.equal(mine.trace.evicted_at, theirs.trace.evicted_at)
    shorter = engine_of(model, compressor, 8).generate(prompts, 2, sampling, seed=5)
    assert torch.equal(shorter[0].sampler_logprobs, plain[0].sampler_logprobs)  # a short prompt is read as ever
    if compressor not in ("window", "prompt-only:window"):  # which keeps the newest, however often it is asked
        assert not torch.equal(shorter[2].trace.evicted_at[..., :40], plain[2].trace.evicted_at[..., :40])


def test_what_is_fed_at_a_time():
    assert pieces(10, 4, 0) == [(0, 4, False), (4, 8, False), (8, 10, True)]
    assert pieces(10, 4, 6) == [(0, 4, False), (4, 6, True), (6, 10, True)]
    assert pieces(3, 512, 2) == [(0, 2, True), (2, 3, True)]


@pytest.mark.parametrize("prompt", [8192, 32768])
def test_the_plan_counts_the_shorter_rows(prompt):
    from transformers import AutoConfig

    config = AutoConfig.for_model(
        "qwen2", num_hidden_layers=28, num_attention_heads=12, num_key_value_heads=2, hidden_size=1536
    )
    shape = ModelShape.of(config, torch.bfloat16)

    def plan(chunk: int):
        compressor = make("prompt-only", prompt_chunk=chunk).bind(512, 128)
        sizes = {"rows": 64, "prompt_tokens": prompt, "new_tokens": 1024, "weight_bytes": 0}
        return make_plan(shape, compressor, **sizes)

    whole, chunked = plan(0), plan(2048)
    assert whole.scratch_bytes > 0.95 * whole.prefill_rows * prompt * whole.slot_bytes
    assert chunked.scratch_capacity == 512 + 2048
    assert chunked.scratch_bytes / whole.scratch_bytes == pytest.approx(2560 / prompt, rel=0.02)
    assert whole.total_bytes - chunked.total_bytes >= whole.scratch_bytes - chunked.scratch_bytes
    assert plan(prompt).total_bytes == whole.total_bytes


@pytest.mark.parametrize("compressor", ["rkv", "prompt-only:snapkv", "prompt-only:h2o"])
def test_packed_rows_share_a_prompt_that_was_evicted_while_it_was_read(compressor):
    model = tiny("llama")
    found = engine_of(model, compressor, 6).generate(prompts_of(40, 33), 3, Sampling(max_new_tokens=20), seed=4)
    sampled = collate(found, 0)
    plain, packed = (score(model, sampled, 4096, view="shadow", packing=packing) for packing in (False, True))
    tokens = [t.tokens for t in found]
    packing = pack_rows(
        torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True),
        torch.tensor([len(row) for row in tokens]),
        pad_traces(model, [(t.tokens, t.trace) for t in found]),
        share=True,
    )
    assert packing.size < sum(map(len, tokens)) - 2 * 33, "prompts are shared"
    gaps = (packed.old_logprobs - sampled.sampler_logprobs)[sampled.mask]
    assert gaps.abs().max() < 1e-4
    torch.testing.assert_close(packed.old_logprobs, plain.old_logprobs, atol=1e-5, rtol=0)


def test_runs_and_plans_take_it_as_an_option_of_the_compressor(tmp_path):
    keys = {
        "task": {"name": "sums", "count": 14},
        "rollout": {
            "compressor": "prompt-only:snapkv",
            "budget": 16,
            "compressor_options": {"prompt_chunk": 6},
            "max_new_tokens": 12,
        },
        "learn": {"method": "shadow", "rescore": "always"},
        "eval": {"every": 0},
    }
    trainer = train(recipe(**keys, run={"steps": 2}), tmp_path / "parts", show=False)
    assert trainer.sampler.engine.scratch.capacity == 22
    train(recipe(**keys), tmp_path / "parts", resume=True, show=False)
    train(recipe(**keys), tmp_path / "whole", show=False)
    lines = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert (tmp_path / "parts" / "metrics.jsonl").read_bytes() == lines
    told = [run("plan", "--model", "qwen2.5-1.5b", "--compressor", "prompt-only", *more, "--prompt-tokens", 8192)
            for more in ([], ["--compressor.prompt_chunk", 1024])]  # fmt: skip
    assert [done.returncode for done in told] == [0, 0], told[1].stderr
    assert "of 1536 slots" in told[1].stdout and "of 1536 slots" not in told[0].stdout


def test_bad_chunks_get_a_sentence():
    with pytest.raises(SparseRLError, match="nothing of a prompt is evicted"):
        make("rkv", prompt_chunk=8, protect_prompt=True)
    with pytest.raises(SparseRLError, match="prompt_chunk is -1"):
        make("snapkv", prompt_chunk=-1)
    with pytest.raises(SparseRLError, match=r"prompt_chunk is 2\.5"):
        make("prompt-only", prompt_chunk=2.5)
    for name in [name for name, cls in COMPRESSORS.items() if not cls.has_budget]:
        with pytest.raises(SparseRLError, match="prompt_chunk"):
            make(f"{name}:8" if name == "beacon" else name, prompt_chunk=8)
