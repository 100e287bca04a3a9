"""Models that write their attention out, that have ALiBi, or that count positions themselves."""

import copy
import importlib

import pytest
import torch

from sparse_rl import Engine, Sampling, SparseRLError, token_logprobs
from sparse_rl.attention.alibi import Alibi
from sparse_rl.beacon import add_beacon
from sparse_rl.cache.trace import visible
from sparse_rl.learn.packing import packed_replay
from sparse_rl.learn.regret import regret
from sparse_rl.learn.score import batch_logprobs, replay_of
from tests import survey
from tests.helpers.compressors import STANDALONE
from tests.helpers.explicit import compare_gradients
from tests.helpers.models import prompts_of

# GPT-J and Falcon have methods or whole forward functions replaced, Bloom and MPT have ALiBi, Bart counts positions.
TYPES = ["gptj", "falcon", "bloom", "mpt", "bart"]


@pytest.fixture(scope="module")
def models():
    return {name: survey.tiny_model(name) for name in TYPES}


def rollouts(model, compressor, new=30):
    engine = Engine(model, compressor=compressor, budget=16, interval=6, rows=4)
    return engine.generate(prompts_of(5, 22), 2, Sampling(new, stop_ids=()), seed=1)


@pytest.mark.parametrize("compressor", STANDALONE)
@pytest.mark.parametrize("name", ["gptj", "bloom"])
def test_the_learner_sees_what_the_sampler_saw(name, compressor, models):
    for t in rollouts(models[name], compressor):
        with torch.no_grad():
            gap = (token_logprobs(models[name], t.tokens, t.trace) - t.sampler_logprobs)[t.num_prompt_tokens :]
        assert gap.abs().max() < 1e-4


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_logprobs_and_gradients_are_those_of_an_explicit_mask(name, checkpointed, models, monkeypatch):
    """The model's own attention, under a mask of our making; `window` evicts the same everywhere."""
    own, other = copy.deepcopy(models[name]), copy.deepcopy(models[name])
    t = rollouts(own, "window")[-1]
    seen = visible(t.trace.evicted_at[:1, :1].int())[None, 0]  # [1, 1, T, T]
    assert not seen.equal(seen.new_ones(seen.shape).tril())
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    if checkpointed:
        own.gradient_checkpointing_enable()
        own.train()
        for module in own.modules():
            vars(module).update({key: 0.0 for key in ("p", "dropout", "activation_dropout") if key in vars(module)})
    mine = token_logprobs(own, t.tokens, t.trace)[t.num_prompt_tokens :]
    own.eval()
    kind = importlib.import_module(type(other).__module__)
    monkeypatch.setattr(kind, "create_causal_mask", lambda **_: mask)
    logits = other(t.tokens[None], use_cache=False).logits[0, :-1].float()
    explicit = logits.log_softmax(-1).gather(1, t.tokens[1:, None])[:, 0][t.num_prompt_tokens - 1 :]
    compare_gradients(own, other, mine, explicit)


@pytest.mark.parametrize("name", ["bloom", "bart"])
def test_packed_rows_have_the_positions_of_their_tokens(name, models):
    """Several trajectories in one row: biases and positions are those within a trajectory."""
    model = models[name]
    found = rollouts(model, "rkv")[2:]
    items = [(t.tokens, t.trace) for t in found]
    tokens = torch.nn.utils.rnn.pad_sequence([t.tokens for t in found], batch_first=True)
    lengths = torch.tensor([len(t.tokens) for t in found])
    mask = (torch.arange(tokens.shape[1]) < lengths[:, None]) & (torch.arange(tokens.shape[1]) > 0)
    together = packed_replay(model, tokens, lengths, [t.trace for t in found])
    with torch.no_grad():
        apart = batch_logprobs(model, tokens, mask, replay=replay_of(model, items))
        packed = batch_logprobs(model, tokens, mask, replay=together)
    torch.testing.assert_close(packed, apart, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", TYPES)
def test_the_model_is_left_as_found(name, models):
    model = models[name]
    before = [dict(vars(module)) for module in model.modules()]
    rollouts(model, "window", new=4)
    with pytest.raises(ZeroDivisionError):
        Engine(model, budget=16, rows=1).generate(prompts_of(5), on_tokens=lambda *_: 1 / 0)
    after = [vars(module) for module in model.modules()]
    assert [sorted(a) for a in after] == [sorted(b) for b in before]
    assert all(a[key] is b[key] for a, b in zip(after, before, strict=True) for key in a if callable(a[key]))


@pytest.mark.parametrize("own", [{"alibi": True}, {"new_decoder_architecture": True, "num_kv_heads": 2}])
def test_other_falcons(own, monkeypatch):
    monkeypatch.setitem(survey.OWN, "falcon", own)
    found = survey.examine("falcon")
    assert found.kind == "exact", found


def test_alibi_rounds_as_its_model_does():
    """Bloom in bf16 cannot tell positions apart that are far away, and neither may the sampler."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 3000), 6, torch.bfloat16).view(6, 3000)
    slopes = build_alibi_tensor(torch.ones(1, 2), 6, torch.float32).view(6, 2)[:, 1]
    position = torch.arange(3000)
    query, key = position[None, None, -1:, None], position[None, None, None]
    ours = Alibi(slopes, torch.bfloat16).bias(query, key, torch.bfloat16)
    assert ours[0, :, 0].equal(theirs)
    grouped = Alibi(slopes).bias(query, key.expand(1, 3, -1, -1), torch.float32)  # of three KV heads
    torch.testing.assert_close(grouped[0, :, 0], slopes[:, None] * (position - 2999))


def test_regret_counts_biases(models):
    """What the last query gave to every token, of the first layer: against the model's own attention."""
    model = copy.deepcopy(models["bloom"])
    t = rollouts(model, "window")[-1]
    found = regret(model, t.tokens, t.trace, view="dense").received[0, :, :, -1]  # [H, T], sums over the last queries
    model.set_attn_implementation("eager")
    with torch.no_grad():
        probs = model(t.tokens[None], use_cache=False, output_attentions=True).attentions[0][0]  # [H, T, T]
    begin = int(t.trace.evicted_at[t.trace.evicted_at.long() < len(t.tokens) - 1].long().max())
    torch.testing.assert_close(found, probs[:, begin:-1].sum(1), rtol=1e-4, atol=1e-5)


def test_bloom_cannot_fold(models):
    with pytest.raises(SparseRLError, match="bloom has no positions that a beacon could take"):
        Engine(add_beacon(copy.deepcopy(models["bloom"])), "beacon:4", rows=1)


def test_llama_4_ends_with_its_first_chunk(monkeypatch):
    monkeypatch.setitem(survey.OWN, "llama4_text", {"attention_chunk_size": 24})
    engine = Engine(survey.tiny_model("llama4_text"), "window", budget=16, interval=6, rows=1)
    engine.generate(prompts_of(12), 1, Sampling(12, stop_ids=()))
    with pytest.raises(SparseRLError, match=r"cannot go beyond 24 positions .*its attention changes there"):
        engine.generate(prompts_of(12), 1, Sampling(13, stop_ids=()))
