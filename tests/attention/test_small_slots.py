"""Slots of 8 bits are replayed: the learner rounds keys and values as the sampler's slots did.

Rounding is not continuous: where sampler and learner differ by the last bit of fp32, one number in 100,000 lies so
close to the middle of two codes that it would be rounded the other way. In fp32 the trace says which way it went; in
fp64 no number lies so close.
"""

import copy
import dataclasses

import pytest
import torch

from sparse_rl import Engine, Sampling, SparseRLError, counterfactuals, give_back, regret, token_logprobs
from sparse_rl.attention import shadow, slots
from sparse_rl.beacon import add_beacon
from sparse_rl.cache import SlotFormat
from sparse_rl.cache.formats import MARGIN, as_stored, quantize
from sparse_rl.compressors import make
from sparse_rl.learn.batch import collate, seen_by
from sparse_rl.learn.score import batch_logprobs
from sparse_rl.models import with_lora
from tests.helpers.compressors import STANDALONE
from tests.helpers.explicit import explicit_logprobs
from tests.helpers.formats import stored
from tests.helpers.hybrids import hybrid
from tests.helpers.models import MIXTURES, prompts_of, tiny
from tests.survey import tiny_model

KINDS = ["fp8", "int8"]


@pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def dtype(request):
    return request.param


def double(model):
    return cast(model, torch.float64)


def cast(model, dtype):
    model = copy.deepcopy(model).to(dtype)
    if model.config.model_type in ("qwen3_moe", "mixtral", "gpt_oss"):
        model.set_experts_implementation("eager")  # torch has no grouped product in fp64
    return model


def rollouts(model, compressor="rkv", slots="fp8", kept=(), lengths=(5, 16, 40), new=30, **options):
    made = make(compressor, slots=slots, slots_kept=kept, **options)
    engine = Engine(model, made, budget=12, interval=4, rows=4)
    trajectories = engine.generate(prompts_of(*lengths, seed=3), 2, Sampling(new, stop_ids=()), seed=1)
    assert engine.plan(max(lengths), new).cache_bytes == engine.cache.nbytes
    assert engine.plan(max(lengths), new).scratch_bytes == engine.scratch.nbytes
    return trajectories


def gaps(model, trajectory, trace):
    with torch.no_grad():
        found = token_logprobs(model, trajectory.tokens, trace)
    return (found - trajectory.sampler_logprobs)[trajectory.num_prompt_tokens :].abs()


def check(model, trajectories):
    """The trace with the format of its slots gives the sampler's log-probs; without it, it does not."""
    off = 0.0
    for t in trajectories:
        assert (t.trace.ties is not None) == (model.dtype == torch.float32)
        assert gaps(model, t, t.trace).max() < 1e-4
        off = max(off, gaps(model, t, type(t.trace)(t.trace.evicted_at, t.trace.routes)).max().item())
    assert off > 1e-3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compressor", STANDALONE)
def test_every_compressor_is_replayed(compressor, kind, dtype):
    model = cast(tiny("llama"), dtype)
    trajectories = rollouts(model, compressor, kind, kept=[0] if compressor == "tova" else ())
    assert trajectories[0].trace.slots == SlotFormat(kind, (0,) if compressor == "tova" else ())
    check(model, trajectories)


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2-sliding", "gemma2", "gpt-oss", "qwen3-moe", "smollm3"])
def test_every_kind_of_attention_is_replayed(architecture, dtype):
    kind = KINDS[len(architecture) % 2]
    model = cast(tiny(architecture), dtype)
    if architecture in MIXTURES:
        engine = Engine(model, make("rkv", slots=kind), budget=12, interval=4, rows=4, record_routes=True)
        check(model, engine.generate(prompts_of(20, seed=3), 2, Sampling(30, stop_ids=()), seed=1))
    else:
        check(model, rollouts(model, "rkv", kind))


class Rounded:
    """What sampler and learner round, of one row: keys and values by layer, in the order of tokens."""

    def __init__(self, monkeypatch):
        self.sampled: dict[int, list] = {}  # by layer, [2, H, tokens fed at once, D]
        self.learned: list = []  # the keys of layer 0, its values, the keys of layer 1, ...
        self.given: list | None = None  # in place of the learner's own numbers, likewise
        self.noise: torch.Generator | None = None  # moves the learner's numbers by half a margin at most
        attend = slots.feed_and_attend

        def fed(module, query, key, value, *more):
            self.sampled.setdefault(slots.layer_of(module), []).append(torch.stack([key[0], value[0]]).detach())
            return attend(module, query, key, value, *more)

        def rounded(x, kind, ties=None):
            self.learned.append(x[0])
            if self.noise is not None:
                noise = torch.rand(x.shape, generator=self.noise) * 2 - 1
                x = x + MARGIN / 2 * noise * x.abs().amax(-1, keepdim=True)
            if self.given is None:
                return as_stored(x, kind, ties)
            theirs = self.given[len(self.learned) - 1]
            rest = x[:, :, theirs.shape[1] :]  # the last token is fed to nobody
            return torch.cat([as_stored(theirs[None], kind), as_stored(rest, kind)], 2)

        monkeypatch.setattr(slots, "feed_and_attend", fed)
        monkeypatch.setattr(shadow, "as_stored", rounded)

    def of_sampler(self, tokens):
        """[H, T, D] of keys and values, layer by layer"""
        both = (torch.cat(self.sampled[layer], 2)[:, :, :tokens] for layer in sorted(self.sampled))
        return [x for pair in both for x in pair]

    def replay(self, model, t, given=None):
        self.given, self.learned = given, []
        return gaps(model, t, t.trace).max().item()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_fp32_the_ties_are_all_that_rounding_decides(kind, architecture, monkeypatch):
    """With the ties of the trace the learner has the sampler's log-probs, whether its numbers are as equal as fp32 has
    them or differ by several times as much. Without them it has not as soon as a number is rounded the other way.
    """
    model, seen, flips, numbers, lost = tiny(architecture), Rounded(monkeypatch), 0, 0, 0
    noise = torch.Generator().manual_seed(0)
    for seed in range(10):
        seen.sampled.clear()
        engine = Engine(model, make("rkv", slots=kind), budget=12, interval=4, rows=1)
        (t,) = engine.generate(prompts_of(20, seed=seed), sampling=Sampling(50, stop_ids=()), seed=seed)
        without = dataclasses.replace(t, trace=dataclasses.replace(t.trace, ties=None))
        theirs = seen.of_sampler(len(t.tokens))
        assert seen.replay(model, without, theirs) < 1e-4
        assert seen.replay(model, t) < 1e-4
        mine = [x[:, : y.shape[1]] for x, y in zip(seen.learned, theirs, strict=True)]
        for x, y in zip(mine, theirs, strict=True):
            most = y.abs().amax(-1, keepdim=True)
            assert ((x - y).abs() <= MARGIN / 2 * most).all()
            flips += (quantize(x, kind)[0] != quantize(y, kind)[0]).sum().item()
            numbers += x.numel()
        seen.noise = noise
        assert seen.replay(model, t) < 1e-4
        lost += seen.replay(model, without) > 1e-4
        seen.noise = None
    assert flips / numbers < 2e-4 and lost >= 5
    wrong = [x.clone() for x in theirs]
    wrong[0][0, 30:] *= 1.1  # an error of one code or so, in one layer and head, is seen
    assert seen.replay(model, without, wrong) > 1e-3


@pytest.mark.parametrize("kept", [(), (0, -1)])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_eviction_and_rounding_written_out(kind, kept):
    model = double(tiny("qwen3"))
    other = copy.deepcopy(model)
    t = rollouts(model, "snapkv", kind, kept)[-1]
    assert (t.trace.evicted_at.long() < len(t.tokens)).any()
    layers = {i % 3 for i in kept}
    mine = token_logprobs(model, t.tokens, t.trace)[t.num_prompt_tokens :].double()
    theirs = explicit_logprobs(
        other, t, [0, 1, 2], stored=lambda x, layer: x if layer in layers else stored(x, kind)
    )  # fmt: skip
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-5)
    weights = torch.randn(len(mine), generator=torch.Generator().manual_seed(0)).double()
    (mine * weights).sum().backward()
    (theirs * weights).sum().backward()
    for (name, here), there in zip(model.named_parameters(), other.parameters(), strict=True):
        scale = max(1.0, there.grad.abs().max().item())
        torch.testing.assert_close(here.grad, there.grad, rtol=1e-5, atol=1e-5 * scale, msg=name)
    assert any(p.grad.any() for p in model.parameters())


def test_checkpointed_layers_round_again(dtype):
    model = cast(tiny("llama"), dtype)
    t = rollouts(model, "rkv", "int8", lengths=(20,))[0]

    def gradients():
        model.zero_grad()
        token_logprobs(model, t.tokens, t.trace).sum().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    plain = gradients()
    model.gradient_checkpointing_enable()
    model.train()
    torch.testing.assert_close(gradients(), plain)


def test_packed_rows_that_share_their_prompt_are_rounded_alike(dtype, monkeypatch):
    """In fp32 also where the learner's numbers differ by several times as much as fp32 makes them."""
    model = cast(tiny("llama"), dtype)
    sampled = collate(rollouts(model, "rkv", "fp8", kept=[1], lengths=(9, 10)))
    rows = torch.arange(4)
    seen = seen_by(model, sampled, rows, True, True)
    assert seen.packing is not None and seen.packing.first.any() and seen.slots == SlotFormat("fp8", (1,))
    if dtype == torch.float32:
        Rounded(monkeypatch).noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        found = batch_logprobs(model, sampled.tokens, sampled.mask, 1.0, seen)
    off = (found - sampled.sampler_logprobs)[sampled.mask]
    assert off.abs().max() < 1e-4


def test_prompts_in_chunks_and_adapters(dtype):
    model = with_lora(cast(tiny("llama"), dtype), 4, 8)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    check(model, rollouts(model, "rkv", "fp8", prompt_chunk=7))


def test_entries_of_beacons_are_stored_and_moved(dtype):
    model = cast(add_beacon(copy.deepcopy(tiny("llama")), (4,), "shared", 0), dtype)
    engine = Engine(model, make("beacon:4", slots="int8", slots_kept=[1]), rows=4)
    check(model, engine.generate(prompts_of(5, 9, seed=3), 2, Sampling(30, stop_ids=()), seed=1))


def test_states_of_recurrent_layers_stay_as_they_are(dtype):
    model = cast(hybrid("qwen3_5_text"), dtype)
    engine = Engine(model, make("rkv", slots="int8"), budget=12, interval=4, rows=4)
    check(model, engine.generate(prompts_of(20, 5, seed=3), 2, Sampling(30, stop_ids=()), seed=1))
    assert engine.plan(20, 30).cache_bytes == engine.cache.nbytes


def test_layers_that_read_the_slots_of_another(dtype):
    model = cast(tiny_model("gemma3n_text"), dtype)
    check(model, rollouts(model, "rkv", "int8"))


@pytest.mark.parametrize("name", ["bloom", "gptj"])
def test_models_that_write_their_attention_out(name, dtype):
    """Bloom with ALiBi"""
    model = cast(tiny_model(name), dtype)
    check(model, rollouts(model, "rkv", "int8", kept=[0]))


def test_regret_and_counterfactuals_read_what_was_stored():
    model = double(tiny("llama"))
    t = rollouts(model, "rkv", "fp8", kept=[1], lengths=(20,))[0]
    everything = give_back(t.trace, torch.tensor(True))
    assert everything.slots == t.trace.slots
    (change,) = counterfactuals(model, t.tokens, t.trace, [everything])
    with torch.no_grad():
        changed = token_logprobs(model, t.tokens, everything) - token_logprobs(model, t.tokens, t.trace)
    torch.testing.assert_close(change, changed, atol=1e-6, rtol=0)
    found, dense = regret(model, t.tokens, t.trace), regret(model, t.tokens, t.trace, "dense")
    assert (found.mass > 0).any() and ((found.lost >= 0) & (found.lost <= 1 + 1e-5)).all()
    plain = regret(model, t.tokens, type(t.trace)(t.trace.evicted_at), "dense")
    assert dense.received.equal(plain.received)  # a dense pass rounds nothing
    rounded = regret(model, t.tokens, type(t.trace)(t.trace.evicted_at))
    assert not found.received[0].equal(rounded.received[0])


def test_latents_are_refused():
    with pytest.raises(SparseRLError, match="slots are fp8, but those of minicpm3 hold latents"):
        Engine(tiny_model("minicpm3"), make("rkv", slots="fp8"), budget=12, interval=4)


def test_a_layer_that_is_not_there_is_refused():
    with pytest.raises(SparseRLError, match="slots_kept names layer 3, but 3 layers have slots"):
        Engine(tiny("llama"), make("rkv", slots="fp8", slots_kept=[3]), budget=12, interval=4)
