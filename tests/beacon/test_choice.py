"""Folds that the policy chooses: what is drawn, what is written down, and that the learner finds all of it again."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import logsigmoid

from sparse_rl import Engine, Sampling, SparseRLError
from sparse_rl.beacon import (
    FILE,
    add_beacon,
    add_choice,
    beacon_of,
    chosen_before,
    mean_chunk,
    place_choices,
    start_logit,
)
from sparse_rl.compressors import default_compressor, make
from sparse_rl.learn.advantage import advantage
from sparse_rl.learn.batch import collate, join, score
from sparse_rl.learn.correct import PRESETS
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.learn.score import token_logprobs
from sparse_rl.models import load_model, tiny_tokenizer
from sparse_rl.records import TrajectoryWriter, read_trajectories
from sparse_rl.rollout.storage import Storage
from sparse_rl.streams import choice_numbers, uniform
from sparse_rl.train.checkpoint import save_model
from tests.beacon.test_beacon import visible_by_hand
from tests.helpers.decoding import FAMILY, fuse_everywhere, same
from tests.helpers.learning import batches_of, moved
from tests.helpers.models import VOCABULARY, prompts_of, tiny

SAMPLING = Sampling(max_new_tokens=37, stop_ids=(3,))


def chooser(name: str = "llama", least=2, most=8, mean=4.0, spread=0.3, chunks=(), position="shared"):
    """A model whose choices depend on its states."""
    model = add_choice(add_beacon(copy.deepcopy(tiny(name)), chunks, position, seed=1), least, most, mean)
    with torch.no_grad():
        beacon_of(model).choice_weight.normal_(0, spread, generator=torch.Generator().manual_seed(2))
    return model


def generate(model, least=2, most=8, sampling=SAMPLING, prompts=None, group=2, **more):
    engine = Engine(model, f"beacon:{least}-{most}", rows=4, **more)
    return engine.generate(prompts or prompts_of(5, 11, 3), group, sampling, seed=3)


def choices_by_hand(t, least: int, most: int) -> tuple[list[int], list[int]]:
    """(places of choices, sizes of folded chunks), by walking through what was fed."""
    places, sizes, open_ = [], [], 0
    for i in range(t.num_prompt_tokens, len(t.tokens)):
        beacon = int(t.tokens[i]) == t.beacon_id
        if least <= open_ < most and i < len(t.tokens) - 1:
            places.append(i)
        assert beacon or open_ < most or i == len(t.tokens) - 1  # at `most` a beacon is due
        if beacon:
            sizes.append(open_)
        open_ = 0 if beacon else open_ + 1
    return places, sizes


# ------------------------------------------------------------------------------------------------ rollout and replay


@pytest.mark.parametrize("position", ["shared", "own"])
@pytest.mark.parametrize("name", FAMILY)
def test_the_learner_finds_tokens_and_choices_again(name, position):
    model = chooser(name, position=position)
    trajectories = generate(model)
    sizes = []
    for t in trajectories:
        places, folded = choices_by_hand(t, 2, 8)
        sizes += folded
        assert t.choices.nonzero()[:, 0].tolist() == places
        again = token_logprobs(model, t.tokens, t.trace, choices=t.choices)
        torch.testing.assert_close(again * t.action_mask, t.sampler_logprobs, atol=1e-4, rtol=0)
        folds = t.choices & (t.tokens == t.beacon_id)
        assert (t.sampler_logprobs[folds] < 0).all() and t.response_tokens.max() < VOCABULARY
        assert torch.equal(t.action_mask, t.response_mask | folds)
    assert len(set(sizes)) > 3 and min(sizes) >= 2 and max(sizes) <= 8
    scored = score(model, collate(trajectories), 10_000, view="shadow")  # in one batch, padded
    torch.testing.assert_close(scored.old_logprobs, scored.sampled.sampler_logprobs, atol=1e-4, rtol=0)
    assert (scored.ranks[scored.sampled.mask] >= 1).all() and (scored.entropies[scored.sampled.mask] > 0).all()
    again = join(scored, scored)
    assert torch.equal(again.sampled.choices, scored.sampled.choices.repeat(2, 1))


def test_choices_are_drawn_with_the_probability_that_is_written_down():
    """Every choice again: its number from the stream, its z from the model; and the share of folds is their mean."""
    model = chooser(least=2, most=6, spread=0.5)
    prompts = prompts_of(5, 9)
    seen, original = [], Storage.drop_state

    def watch(self):
        seen.append(self.state and self.state.stream.clone())
        original(self)

    folded, expected, total = 0, 0.0, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "drop_state", watch)
        trajectories = Engine(model, "beacon:2-6", rows=2).generate(prompts, 1, Sampling(200, stop_ids=()), seed=5)
    streams = next(s for s in seen if s is not None)
    for row, t in enumerate(trajectories):
        tokens_alone = token_logprobs(model, t.tokens, t.trace).detach()
        for i in t.choices.nonzero()[:, 0].tolist():
            fold = bool(t.tokens[i] == t.beacon_id)
            logprob = (t.sampler_logprobs[i] - (0 if fold else tokens_alone[i])).double()
            p = logprob.exp() if fold else 1 - logprob.exp()
            nth = int(t.response_mask[:i].sum())  # the token that waits
            u = choice_numbers(streams[row], torch.tensor(nth))
            if abs(u - p) > 1e-4:
                assert fold == bool(u < p)
            folded, expected, total = folded + fold, expected + float(p), total + 1
    assert abs(folded - expected) < 4 * (total / 4) ** 0.5 and 20 < folded < total - 20
    stream = torch.tensor([5, -(2**63), 2**63 - 1])
    assert (choice_numbers(stream, torch.tensor(3)) != uniform(stream, torch.tensor(3))).all()


@pytest.mark.parametrize("name", FAMILY)
def test_fused_steps_and_long_rounds_change_nothing(name, monkeypatch):
    sampling, prompts = Sampling(50, stop_ids=(3,)), prompts_of(5, 40, 17, 9)

    def rolled(**more):
        return generate(chooser(name), sampling=sampling, prompts=prompts, **more)

    expected = rolled()
    again = rolled(poll=(5, 40))
    same(again, expected, tolerance=1e-9)
    taken = fuse_everywhere(monkeypatch)
    fused = rolled(poll=(2, 5))
    same(fused, expected)
    assert taken == [True]
    for a, b, c in zip(expected, again, fused, strict=True):
        assert torch.equal(a.choices, b.choices) and torch.equal(a.choices, c.choices)


def test_sequences_do_not_depend_on_their_company():
    model, prompts = chooser(), prompts_of(5, 11, 3, 8, 6)
    together = Engine(model, "beacon:2-8", rows=8).generate(prompts, 2, SAMPLING, seed=3)
    engine = Engine(model, "beacon:2-8", rows=2)
    alone = [t for prompt in prompts for t in engine.generate([prompt], 2, SAMPLING, seed=3)]
    for a, b in zip(together, alone, strict=True):
        assert torch.equal(a.tokens, b.tokens) and torch.equal(a.choices, b.choices)
        torch.testing.assert_close(a.sampler_logprobs, b.sampler_logprobs, atol=1e-5, rtol=0)


def test_temperature_is_about_text_alone():
    """Greedy text, chosen folds: a policy that folds one time in four would never fold if it were greedy."""
    model = chooser(mean=4.0, spread=0.0)
    for temperature in (0.0, 0.5):
        sampling = Sampling(120, temperature, stop_ids=())
        trajectories = generate(model, sampling=sampling)
        sizes = [size for t in trajectories for size in choices_by_hand(t, 2, 8)[1]]
        assert abs(sum(sizes) / len(sizes) - 4) < 0.7
        for t in trajectories:
            again = token_logprobs(model, t.tokens, t.trace, temperature, choices=t.choices)
            torch.testing.assert_close(again * t.action_mask, t.sampler_logprobs, atol=1e-4, rtol=0)


def test_a_policy_that_always_or_never_folds_is_one_with_equal_chunks():
    model, prompts = chooser(spread=0.0), prompts_of(5, 11)
    for bias, chunk in ((60.0, 3), (-60.0, 7)):
        with torch.no_grad():
            beacon_of(model).choice_bias.fill_(bias)
        chosen = Engine(model, "beacon:3-7", rows=4).generate(prompts, 1, SAMPLING)
        equal = Engine(model, f"beacon:{chunk}", rows=4).generate(prompts, 1, SAMPLING)
        same(chosen, equal)
        assert all(t.choices.any() for t in chosen) and all(t.choices is None for t in equal)


@given(st.integers(2, 5), st.integers(1, 4), st.lists(st.booleans(), min_size=1, max_size=25))
def test_choices_stand_before_what_is_fed_next(least, more, ends):
    """By walking: a choice before a token that is not the last, if from least to most - 1 tokens are open."""
    n, most = len(ends), least + more
    expected, places, sampled, open_ = [], [], [], 0
    for j in range(n):
        asked = j < n - 1 and least <= open_ < most
        expected.append(asked)
        if asked:
            places.append(len(sampled) - 1 if j and ends[j - 1] else len(sampled))
        if j and ends[j - 1]:
            open_ = 0
        sampled.append(True)
        open_ += 1
        if ends[j]:
            sampled.append(False)
    found = chosen_before(torch.tensor([ends]), torch.tensor([n]), least, most)
    assert found[0].tolist() == expected
    assert place_choices(torch.tensor(sampled), torch.tensor(ends), found[0]).tolist() == places


# -------------------------------------------------------------------------------------------------------- learning


def reference_logprobs(model, t) -> torch.Tensor:
    """fp64 [T]: tokens and choices by a stock forward pass under the paper's mask; positions, states, z by hand."""
    beacon, tokens = beacon_of(model), t.tokens.tolist()
    embedded, positions, place = [], [], -1
    for token in tokens:
        place += token != beacon.id
        positions.append(place)
        vector = beacon.beacon if token == beacon.id else beacon.weight[token]
        embedded.append(vector.detach() if token == beacon.padding_idx else vector)  # which is never trained
    bias = torch.zeros(len(tokens), len(tokens), dtype=torch.float64)
    bias.masked_fill_(~visible_by_hand(tokens, t.num_prompt_tokens, beacon.id), -torch.inf)
    before = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    states = model.model(
        inputs_embeds=torch.stack(embedded)[None],
        position_ids=torch.tensor([positions]),
        attention_mask=bias[None, None],
        use_cache=False,
    ).last_hidden_state[0]
    model.set_attn_implementation(before)
    found = []
    for i, token in enumerate(tokens):
        if not t.action_mask[i]:
            found.append(torch.zeros((), dtype=torch.float64))
            continue
        h = states[max(k for k in range(i) if tokens[k] != beacon.id)]
        z = h @ beacon.choice_weight + beacon.choice_bias[0]
        if token == beacon.id:
            found.append(logsigmoid(z))
            continue
        said = (model.lm_head.weight @ h).log_softmax(0)[token]
        found.append(said + logsigmoid(-z) if t.choices[i] else said)
    return torch.stack(found)


@pytest.mark.parametrize("mean", ["sequence-mean", "token-mean"])
def test_the_surrogates_gradient_is_that_of_an_independent_reference_in_fp64(mean):
    """min(r A, clip(r) A) over tokens and folds, after other weights have sampled, so that ratios are clipped."""
    sampler = chooser().double()
    trajectories = generate(sampler, group=3)
    rewards = torch.tensor([1.0, 0, 0, 0, 1, 1, 1, 0, 1], dtype=torch.float64)
    advantages, _ = advantage(rewards, torch.arange(9) // 3, "grpo")
    model = moved(sampler, 7, 0.03).requires_grad_(True)
    loss = Loss(clip_low=0.1, clip_high=0.1, mean=mean)
    scored = score(sampler, collate(trajectories), 10_000, view="shadow")
    (batch,) = batches_of(scored, advantages, PRESETS["none"], loss)
    learner = Learner(model, OptimizerSettings(lr=1e-3), loss, micro_batch_tokens=200)
    sums = learner._accumulate_gradients(batch, torch.arange(9), torch.zeros_like(batch.mask))
    found = {n: m.grad.clone() for (n, _), m in zip(model.named_parameters(), learner.optimizer.masters, strict=True)}

    total, clipped, counted = (
        torch.zeros((), dtype=torch.float64),
        0,
        sum(int(t.action_mask.sum()) for t in trajectories),
    )
    for row, (t, a) in enumerate(zip(trajectories, advantages, strict=True)):
        now, old = reference_logprobs(model, t), scored.sampled.sampler_logprobs[row, : len(t.tokens)]
        r = (now - old.double()).exp()
        gain = torch.minimum(r * a, r.clamp(0.9, 1.1) * a)
        clipped += int(((r.clamp(0.9, 1.1) * a < r * a) & t.action_mask).sum())
        weight = 1 / counted if mean == "token-mean" else 1 / (9 * t.action_mask.sum())
        total = total - (gain * t.action_mask).sum() * weight
    expected = torch.autograd.grad(total, list(model.parameters()))  # past the hooks that feed the masters
    assert clipped > 10 and sums["clipped"] == pytest.approx(clipped, abs=2)  # old log-probs are fp32
    for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(found[name].double(), gradient, atol=2e-6, rtol=1e-4)
    assert found["model.embed_tokens.choice_weight"].abs().max() > 1e-5
    assert found["model.embed_tokens.choice_bias"].abs().max() > 1e-5


def test_an_update_makes_rewarded_choices_likelier():
    model = chooser(mean=3.0, spread=0.0)
    trajectories = generate(model, prompts=prompts_of(6), group=8)
    folds = torch.tensor([float((t.tokens == t.beacon_id).sum()) / len(t.tokens) for t in trajectories])
    advantages, _ = advantage(-folds.double(), torch.zeros(8, dtype=torch.int64), "grpo")  # fewer folds are better
    scored = score(model, collate(trajectories), 10_000, view="shadow")
    (batch,) = batches_of(scored, advantages, PRESETS["none"], Loss())
    before = beacon_of(model).choice_bias.item()
    result = Learner(model, OptimizerSettings(lr=1e-2), Loss()).step(batch, check=True)
    assert result.metrics["update/grad_norm"] > 0 and beacon_of(model).choice_bias.item() < before


# ---------------------------------------------------------------------------------------------- start, files, refusals


@pytest.mark.parametrize(
    ("least", "most", "mean"), [(2, 8, 4.0), (2, 16, 9.0), (4, 5, 4.5), (2, 64, 63.9), (2, 64, 2.01)]
)
def test_the_start_has_the_mean_that_was_asked_for(least, most, mean):
    assert mean_chunk(least, most, start_logit(least, most, mean)) == pytest.approx(mean, abs=1e-9)


@pytest.mark.parametrize("mean", [2.0, 8.0, 9.0, float("nan")])
def test_a_mean_outside_the_bounds_is_refused(mean):
    with pytest.raises(SparseRLError, match="from 2 to 8; choose a number between"):
        start_logit(2, 8, mean)


def test_a_model_that_chooses_is_saved_and_read_back(tmp_path):
    model = chooser("qwen3", chunks=(2, 4, 8))
    save_model(tmp_path / "m", model, tiny_tokenizer())
    loaded, _ = load_model(str(tmp_path / "m"))
    assert beacon_of(loaded).choice == (2, 8) and default_compressor(loaded) == "beacon:2-8"
    ours, theirs = generate(model), generate(loaded)
    same(ours, theirs, tolerance=1e-9)
    with TrajectoryWriter(tmp_path / "out") as writer:
        for t in ours:
            writer.write(t)
    for a, b in zip(ours, read_trajectories(tmp_path / "out"), strict=True):
        assert torch.equal(a.choices, b.choices) and torch.equal(a.action_mask, b.action_mask)


def test_a_damaged_choice_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    save_model(tmp_path / "m", chooser(), tiny_tokenizer())
    tensors = load_file(tmp_path / "m" / FILE)
    about = {"chunks": "[]", "position": "shared", "vocabulary": str(VOCABULARY), "choice": "[2, 8]"}
    for broken, meta in (
        ({**tensors, "choice_weight": torch.zeros(3)}, about),
        ({"beacon": tensors["beacon"]}, about),
        (tensors, about | {"choice": "[8, 2]"}),
        (tensors, about | {"choice": "7"}),
    ):
        save_file(broken, tmp_path / "m" / FILE, metadata=meta)
        with pytest.raises(SparseRLError, match="is damaged"):
            load_model(str(tmp_path / "m"))


def test_choices_that_are_not_places_of_the_response_are_refused(tmp_path):
    (t, *_) = generate(chooser())
    with TrajectoryWriter(tmp_path / "out") as writer:
        writer.write(t)
    path = tmp_path / "out" / "trajectories.jsonl"
    path.write_text(path.read_text().replace('"choices": [', '"choices": [0, '))
    with pytest.raises(SparseRLError, match="choices are not places of its response"):
        list(read_trajectories(tmp_path / "out"))


def test_what_cannot_be_chosen_is_refused():
    plain = add_beacon(copy.deepcopy(tiny("llama")), (4,))
    with pytest.raises(SparseRLError, match=r"has not learned to choose its folds, so it cannot use beacon:2-8"):
        Engine(plain, "beacon:2-8")
    with pytest.raises(SparseRLError, match=r"chunks of 2 to 16 tokens were requested, but .* trained with 2 to 8"):
        Engine(chooser(chunks=(2, 8)), "beacon:2-16")
    for name, words in (
        ("beacon:8-8", "leave the model nothing to choose"),
        ("beacon:1-8", "from 2 on"),
        ("beacon:2-", "beacon:2-16 to let the model choose"),
        ("beacon:2-4-8", "beacon:2-16 to let the model choose"),
    ):
        with pytest.raises(SparseRLError, match=words):
            make(name)
    with pytest.raises(SparseRLError, match="least=3 was given too"):
        make("beacon:2-8", least=3)
    with pytest.raises(SparseRLError, match="chunks end either where the policy chooses or where"):
        make("beacon:2-8", threshold=1.0)
    (t, *_) = generate(chooser())
    with pytest.raises(SparseRLError, match="this model cannot make such choices; use the model that"):
        token_logprobs(plain, t.tokens, t.trace, choices=t.choices)
