"""Models with recurrent layers: rows keep their states, the attention layers evict, and the learner replays both."""

import copy

import pytest
import torch

from sparse_rl import Engine, Sampling, SparseRLError, token_logprobs
from sparse_rl.beacon import add_beacon
from sparse_rl.compressors import make
from sparse_rl.compressors.learned import fresh
from sparse_rl.learn.calibrate import calibrate
from sparse_rl.learn.packing import packs
from sparse_rl.learn.score import batch_logprobs, replay_of
from sparse_rl.models import ModelShape, companions_of, recurrent_kernels, set_companion
from tests.helpers.compressors import BY_NAME, STANDALONE
from tests.helpers.hybrids import HYBRIDS, hybrid
from tests.helpers.models import prompts_of

ONE_OF_EACH_KIND = ["qwen3_5_text", "falcon_h1", "jamba", "lfm2"]


def rollout(model, compressor="rkv", lengths=(9, 1, 30, 9), group=2, rows=4, new=22, **options):
    engine = Engine(model, compressor, budget=16, interval=8, rows=rows, max_tokens=120, **options)
    return engine.generate(prompts_of(*lengths), group, Sampling(new, stop_ids=(3,)), seed=5)


def same(found, expected, tolerance=1e-4):
    for a, b in zip(found, expected, strict=True):
        assert a.tokens.equal(b.tokens) and a.trace.evicted_at.equal(b.trace.evicted_at)
        torch.testing.assert_close(a.sampler_logprobs, b.sampler_logprobs, atol=tolerance, rtol=0)


def gap(model, trajectory, trace):
    with torch.no_grad():
        logprobs = token_logprobs(model, trajectory.tokens, trace)
    return (logprobs - trajectory.sampler_logprobs)[trajectory.num_prompt_tokens :].abs().max().item()


@pytest.mark.parametrize("name", HYBRIDS)
def test_greedy_rollouts_on_a_dense_cache_are_those_of_generate(name):
    """Prompts of several lengths, one of them a single token, in rows side by side."""
    model, new = hybrid(name), 12
    prompts = prompts_of(12, 1)
    found = Engine(model, "dense", rows=4).generate(prompts, sampling=Sampling(new, temperature=0.0, stop_ids=()))
    for prompt, trajectory in zip(prompts, found, strict=True):
        with torch.no_grad():
            done = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64), do_sample=False,
                max_new_tokens=new, output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        expected = done.sequences[0, len(prompt) :]
        assert trajectory.response_tokens.equal(expected)
        logprobs = torch.stack(done.logits)[:, 0].log_softmax(-1).gather(1, expected[:, None])[:, 0]
        torch.testing.assert_close(trajectory.sampler_logprobs[len(prompt) :], logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("compressor", STANDALONE)
@pytest.mark.parametrize("name", HYBRIDS)
def test_replay_is_exact_through_recurrent_layers(name, compressor):
    model = hybrid(name)
    shape, evicted = ModelShape.of(model.config), 0
    for trajectory in rollout(model, compressor, lengths=(9, 30), new=24):
        assert trajectory.trace.evicted_at.shape[0] == shape.slot_layers
        assert gap(model, trajectory, trajectory.trace) < 1e-4
        evicted += int((trajectory.trace.evicted_at.long() < len(trajectory.tokens)).sum())
    assert (evicted > 0) == (compressor != "dense")


@pytest.mark.parametrize("compressor", [name for name in BY_NAME if name not in STANDALONE])
@pytest.mark.parametrize("name", HYBRIDS)
def test_replay_is_exact_under_compressors_that_know_a_model(name, compressor):
    model = hybrid(name)
    try:
        if compressor == "learned":
            companion = fresh(model, "all")
            for key in ("outer", "bias", "centre"):
                companion.tensors[key] += 0.3 * torch.randn(companion.tensors[key].shape)
            set_companion(model, "learned", companion)
        else:
            calibrate(model, prompts_of(60), tokens=60)
        done = rollout(model, compressor, lengths=(9, 30), new=24)
        assert any((t.trace.evicted_at.long() < len(t.tokens)).any() for t in done)
        assert all(gap(model, t, t.trace) < 1e-4 for t in done)
    finally:
        companions_of(model).clear()


@pytest.mark.parametrize("name", ONE_OF_EACH_KIND)
def test_rows_of_a_round_keep_their_states(name):
    """Rows that wait in a round, prompts fed together and by chunks, other rows, other company: the same trajectories.

    Rows are moved together when the batch drains, and used again by other prompts.
    """
    model = hybrid(name)
    expected = rollout(model)
    same(rollout(model, rows=3, poll=(3, 7)), expected)
    same(rollout(model, rows=6, prefill_rows=3, prefill_chunk=7), expected)


def test_a_row_that_waits_keeps_its_state_to_the_bit():
    model = hybrid("qwen3_5_text")
    engine = Engine(model, "rkv", budget=16, interval=8, rows=4, poll=(2, 2))
    engine.generate(prompts_of(9, 9), 2, Sampling(8, stop_ids=()))
    engine.reserve(9, 8)
    state, (decoder, *_) = engine.state, (engine.decoder(Sampling(8, stop_ids=(3,))),)
    state.begin(8, engine.capacity)
    state.done[:2] = False
    state.used[:4] = torch.tensor([5, engine.capacity, 5, 5])  # row 1 is full, rows 2 and 3 are done
    before = [t.clone() for t in engine.cache.states.tensors]
    with engine._switched():
        decoder.run(4, 1, engine.capacity)
    for old, new in zip(before, engine.cache.states.tensors, strict=True):
        assert new[1:].equal(old[1:]) and not new[0].equal(old[0])


def test_a_paused_stream_keeps_its_states():
    model, prompt = hybrid("falcon_h1"), prompts_of(20)[0]
    sampling = Sampling(30, stop_ids=())
    expected = Engine(model, budget=16, interval=8, rows=1).generate([prompt], sampling=sampling)[0]
    pieces = []
    for piece in Engine(model, budget=16, interval=8, rows=1).stream(prompt, sampling):
        pieces += piece
        model(torch.tensor([prompt]))  # the model may be used in between
    assert pieces == expected.response_tokens.tolist()


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_plan_counts_states_as_they_are_allocated(name):
    model = hybrid(name)
    engine = Engine(model, "rkv", budget=16, interval=8, rows=3)
    engine.reserve(11, 37)
    plan, states = engine.plan(11, 37), engine.cache.states
    assert plan.cache_bytes == engine.cache.nbytes and plan.scratch_bytes == engine.scratch.nbytes
    assert 3 * plan.state_bytes == sum(t.nbytes for t in states.tensors) > 0
    assert plan.dense_row_bytes == 48 * plan.kv_bytes_per_token + plan.state_bytes
    assert "states of recurrent layers" in plan.text()
    state = engine.state
    assert plan.record_bytes == sum(t.nbytes for t in (state.tokens, state.logprobs, state.trace))


def test_states_in_half_precision_are_allocated_as_planned():
    engine = Engine(copy.deepcopy(hybrid("qwen3_5_text")).bfloat16(), "rkv", budget=16, interval=8, rows=2)
    done = engine.generate(prompts_of(9, 30), 2, Sampling(20))
    states = engine.cache.states
    assert {t.dtype for t in states.conv.values()} == {torch.bfloat16}
    assert {t.dtype for t in states.recurrent.values()} == {torch.float32}
    assert engine.plan(30, 20).cache_bytes == engine.cache.nbytes and len(done) == 4


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1"])
def test_gradients_under_a_trace_are_those_of_an_explicit_mask(name):
    """Stock attention under a mask per layer is the reference; recurrent layers see every token in both."""
    model = hybrid(name)
    trajectory = rollout(model, lengths=(30,), group=1, new=30)[0]
    tokens, response = trajectory.tokens[None], trajectory.response_mask[None]
    replay = replay_of(model, [(trajectory.tokens, trajectory.trace)])
    ours = batch_logprobs(model, tokens, response, replay=replay).sum()
    parameters = list(model.parameters())
    found = torch.autograd.grad(ours, parameters, allow_unused=True)

    attentions = [m for m in model.modules() if hasattr(m, "o_proj") and hasattr(m, "k_proj") and hasattr(m, "scaling")]
    assert len(attentions) == trajectory.trace.evicted_at.shape[0]
    hooks = []
    for visible, attention in zip(trajectory.trace.visible(), attentions, strict=True):
        mask = torch.where(visible.repeat_interleave(2, 0)[None], 0.0, -torch.inf)  # two query heads per KV head

        def give(module, args, kwargs, mask=mask):
            return args, {**kwargs, "attention_mask": mask}

        hooks.append(attention.register_forward_pre_hook(give, with_kwargs=True))
    try:
        logits = model(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
    finally:
        for hook in hooks:
            hook.remove()
    theirs = logits.gather(1, tokens[0, 1:, None])[response[0, 1:]].sum()
    expected = torch.autograd.grad(theirs, parameters, allow_unused=True)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)
    assert sum(g is not None for g in expected) > 10
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a, b, atol=2e-3 * b.abs().max().item() + 1e-6, rtol=0)


def test_padding_at_the_end_changes_nothing():
    model = hybrid("qwen3_5_text")
    trajectories = rollout(model, lengths=(5, 30), group=1)
    items = [(t.tokens, t.trace) for t in trajectories]
    tokens = torch.nn.utils.rnn.pad_sequence([t.tokens for t in trajectories], batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([t.response_mask for t in trajectories], batch_first=True)
    with torch.no_grad():
        together = batch_logprobs(model, tokens, mask, replay=replay_of(model, items))
    for row, t in zip(together, trajectories, strict=True):
        torch.testing.assert_close(row[: len(t.tokens)], t.sampler_logprobs, atol=1e-4, rtol=0)


def test_what_recurrent_layers_cannot_do_is_refused():
    model = hybrid("qwen3_5_text")
    assert not packs(model, "auto")
    with pytest.raises(SparseRLError, match="qwen3_5_text models, which have recurrent layers, cannot be packed"):
        packs(model, "always")
    with pytest.raises(SparseRLError, match="states would keep both a beacon"):
        add_beacon(copy.deepcopy(model))
    with pytest.raises(SparseRLError, match=r"limits its time steps to 0.001 .. inf .* set time_step_min .* to 1e-09"):
        Engine(hybrid("nemotron_h", time_step_min=0.001))
    alone = copy.deepcopy(hybrid("lfm2").config)
    alone.layer_types = ["conv"] * 3
    with pytest.raises(SparseRLError, match="lfm2 has recurrent layers alone"):
        ModelShape.of(alone)


def test_prompts_by_chunks_where_states_go_on_and_where_they_cannot():
    """A scan that cannot go on from a state takes a prompt whole; that is said before anything is sampled."""
    with pytest.raises(
        SparseRLError, match="prompt_chunk is 8, but the recurrent layers of jamba can only read a prompt"
    ):
        Engine(hybrid("jamba"), make("rkv", prompt_chunk=8), budget=16, interval=6)
    model = hybrid("lfm2")
    engine = Engine(model, make("rkv", prompt_chunk=8), budget=16, interval=6, rows=4)
    for t in engine.generate(prompts_of(40, 33, 40), 2, Sampling(20, stop_ids=()), seed=1):
        assert (t.trace.evicted_at[..., :16].long() < t.num_prompt_tokens).any()  # while the prompt was read
        with torch.no_grad():
            gap = (token_logprobs(model, t.tokens, t.trace) - t.sampler_logprobs)[t.num_prompt_tokens :]
        assert gap.abs().max() < 1e-4


def test_a_state_of_another_size_than_planned_is_refused():
    model = copy.deepcopy(hybrid("lfm2"))
    engine = Engine(model, "rkv", budget=16, interval=8)
    for module in model.modules():
        if type(module).__name__ == "Lfm2ShortConv":
            module.conv_kernel_size = 5
    with pytest.raises(
        SparseRLError, match=r"layer 0 keeps a state of shape \(32, 5\) where the config says \(32, 3\)"
    ):
        engine.generate(prompts_of(9))


def test_which_kernels_run_is_said():
    assert recurrent_kernels(hybrid("qwen3_5_text").config) in (
        "gated delta net by the torch operations of transformers (flash-linear-attention is not installed)",
        "gated delta net by flash-linear-attention",
    )
