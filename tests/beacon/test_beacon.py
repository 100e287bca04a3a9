"""Beacons: what is fed, seen and kept. Everything runs through the engine and the learner's own functions."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_rl import Engine, Sampling, SparseRLError
from sparse_rl.attention import use_attention
from sparse_rl.beacon import add_beacon, beacon_of, beaconed, fixed_chunk_ends, insert_beacons
from sparse_rl.compressors import make
from sparse_rl.learn.batch import collate, score
from sparse_rl.learn.overlap import overlap
from sparse_rl.learn.score import hidden_states, replay_of, token_logprobs
from sparse_rl.records import kv_tokens_saved
from sparse_rl.rollout.fold import Chunks, begin
from tests.helpers.decoding import FAMILY, fuse_everywhere, same
from tests.helpers.models import VOCABULARY, prompts_of, tiny

SAMPLING = Sampling(max_new_tokens=37, stop_ids=())


def student(name: str = "llama", chunks=(), position="shared"):
    return add_beacon(copy.deepcopy(tiny(name)), chunks, position, seed=1)


def generate(model, chunk: int, rows: int = 4, sampling=SAMPLING, prompts=None, **options):
    engine = Engine(model, make("beacon", chunk=chunk, **options), rows=rows)
    return engine, engine.generate(prompts or prompts_of(5, 11, 3), 2, sampling, seed=3)


# ---------------------------------------------------------------------------------------- the engine


@pytest.mark.parametrize("position", ["shared", "own"])
@pytest.mark.parametrize("name", FAMILY)
@pytest.mark.parametrize("chunk", [2, 5, 16])
def test_the_learner_finds_the_samplers_logprobs_again(name, chunk, position):
    model = student(name, position=position)
    _, trajectories = generate(model, chunk)
    assert len(trajectories) == 6
    for t in trajectories:
        again = token_logprobs(model, t.tokens, t.trace)
        mask = t.response_mask
        assert mask.sum() == 37 == len(t.response_tokens) and t.response_tokens.max() < VOCABULARY
        assert int((t.tokens == beacon_of(model).id).sum()) == 35 // chunk  # the last token is never fed
        torch.testing.assert_close(again[mask], t.sampler_logprobs[mask], atol=1e-4, rtol=0)
        assert (t.sampler_logprobs[~mask] == 0).all()
    scored = score(model, collate(trajectories), 10_000, view="shadow")  # in one batch, padded
    torch.testing.assert_close(scored.old_logprobs, scored.sampled.sampler_logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [2, 3, 4, 8, 16, 32, 36, 50])
def test_rows_hold_the_prompt_the_beacons_and_a_chunk(chunk, monkeypatch):
    """After n response tokens a row has P + floor(n / c) + n mod c entries; every token is fed once."""
    from sparse_rl.rollout import fold as module

    seen, fed, original = [], [], module.fold

    def watch(cache, state, turn):
        original(cache, state, turn)
        n = state.count[0].item() - 1  # fed; the last one sampled waits
        closing = state.chunks.open[0].item() == chunk  # the chunk is complete, its beacon comes next
        seen.append((n, state.used[0].item(), closing))
        fed.append((turn.token[0].item(), turn.position[0].item()))

    monkeypatch.setattr(module, "fold", watch)
    model = student()
    prompt = prompts_of(7)
    engine = Engine(model, make("beacon", chunk=chunk), rows=1)
    (t,) = engine.generate(prompt, 1, SAMPLING, seed=9)
    for n, used, closing in seen:
        assert used == 7 + (n // chunk + n % chunk if not closing else n // chunk - 1 + chunk)
    assert max(used for _, used, _ in seen) <= engine.cache.capacity
    assert [token for token, _ in fed] == t.tokens[7:-1].tolist()  # all but the last, beacons among them, once each
    assert [position for _, position in fed] == t.positions[7:-1].tolist()
    assert engine.cache.capacity == 7 + 36 // chunk + min(chunk, 37)


def test_a_chunk_longer_than_the_response_leaves_the_model_dense():
    model = student()
    _, folded = generate(model, 64)
    dense = Engine(model, "dense", rows=4).generate(prompts_of(5, 11, 3), 2, SAMPLING, seed=3)
    for ours, theirs in zip(folded, dense, strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(
            token_logprobs(model, ours.tokens, ours.trace), token_logprobs(model, theirs.tokens, theirs.trace)
        )
        torch.testing.assert_close(ours.sampler_logprobs, theirs.sampler_logprobs, atol=1e-5, rtol=0)


def test_a_beacon_that_nobody_feeds_changes_no_logit():
    model, tokens = tiny("llama"), torch.tensor(prompts_of(9))
    with torch.no_grad():
        assert torch.equal(student()(tokens).logits, model(tokens).logits)


def test_sequences_do_not_depend_on_their_company():
    model = student()
    engine, together = generate(model, 4, rows=6)
    alone = [engine.generate([prompt], 2, SAMPLING, seed=3) for prompt in prompts_of(5, 11, 3)]
    for ours, theirs in zip(together, [t for pair in alone for t in pair], strict=True):
        assert torch.equal(ours.tokens, theirs.tokens)
        torch.testing.assert_close(ours.sampler_logprobs, theirs.sampler_logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("options", [{"chunk": 4}, {"chunk": 16, "threshold": 20.0}])
@pytest.mark.parametrize("name", FAMILY)
def test_fused_steps_and_long_rounds_change_nothing(name, options, monkeypatch):
    """The kernels' twins, and several steps between two looks at the device; `rounds` also without them, to the bit."""
    sampling, prompts = Sampling(50, stop_ids=(3,)), prompts_of(5, 40, 17, 9)

    def rolled(**more):
        return Engine(student(name), make("beacon", **options), rows=4, **more).generate(prompts, 2, sampling)

    expected = rolled()
    same(rolled(poll=(5, 40)), expected, tolerance=1e-9)
    taken = fuse_everywhere(monkeypatch)
    same(rolled(poll=(2, 5)), expected)
    assert taken == [True]


def test_rows_with_open_chunks_move_together_when_the_batch_drains():
    """Twelve rows that end at different times, with chunks of every fill: whole rows move, chunk ends included."""
    model, sampling = student(), Sampling(max_new_tokens=48, stop_ids=tuple(range(0, VOCABULARY, 9)))
    prompts = prompts_of(*range(3, 15))
    together = Engine(model, "beacon:5", rows=12).generate(prompts, 1, sampling)
    assert len({len(t.response_tokens) for t in together}) > 5
    for t in together:
        torch.testing.assert_close(
            token_logprobs(model, t.tokens, t.trace) * t.response_mask, t.sampler_logprobs, atol=1e-4, rtol=0
        )
        assert int((t.tokens == t.beacon_id).sum()) == max(0, len(t.response_tokens) - 2) // 5


def test_a_layers_own_window_counts_what_was_fed():
    """Feed indices move with their entries: a sliding window looks at them."""
    model = add_beacon(copy.deepcopy(tiny("mistral", sliding_window=12)), seed=1)
    _, trajectories = generate(model, 4)
    for t in trajectories:
        torch.testing.assert_close(
            token_logprobs(model, t.tokens, t.trace) * t.response_mask, t.sampler_logprobs, atol=1e-4, rtol=0
        )


def test_beacons_with_positions_of_their_own_need_room_for_them():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = add_beacon(tiny.__wrapped__("llama", rope_parameters=rope, max_position_embeddings=48), position="own")
    with pytest.raises(
        SparseRLError, match=r"has 8 tokens and 57 new ones may follow, but this model cannot go beyond 48 positions"
    ):
        Engine(model, "beacon:2").generate(prompts_of(8), 1, Sampling(39))
    beacon_of(model).position = "shared"
    Engine(model, "beacon:2").generate(prompts_of(8), 1, Sampling(39))


def test_stop_tokens_end_folded_rows_and_rows_are_used_again():
    model = student()
    sampling = Sampling(max_new_tokens=60, stop_ids=tuple(range(0, VOCABULARY, 7)))
    _, trajectories = generate(model, 3, rows=2, sampling=sampling, prompts=prompts_of(5, 11, 3, 8, 6))
    lengths = [len(t.response_tokens) for t in trajectories]
    assert len(trajectories) == 10 and len(set(lengths)) > 2
    for t, n in zip(trajectories, lengths, strict=True):
        assert int((t.tokens == t.beacon_id).sum()) == max(0, n - 2) // 3
        assert t.finish_reason == ("stop" if t.tokens[-1] % 7 == 0 else "length")
        torch.testing.assert_close(
            token_logprobs(model, t.tokens, t.trace) * t.response_mask, t.sampler_logprobs, atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("threshold", [0.5, 8.0, 1000.0])
def test_surprise_ends_chunks(threshold):
    """The rule of the docs, computed again from what the trajectory says."""
    model = student()
    with torch.no_grad():
        model.lm_head.weight *= 8  # sure of some tokens, not of others
    _, trajectories = generate(model, 16, threshold=threshold)
    sizes = []
    for t in trajectories:
        open_, surprise = 0, 0.0
        for token, logprob, after in zip(
            t.tokens[t.num_prompt_tokens :], t.sampler_logprobs[t.num_prompt_tokens :], range(1, 10_000)
        ):
            if token == t.beacon_id:
                assert open_ == 16 or (open_ in (2, 4, 8) and surprise > threshold - 1e-3)
                sizes.append(open_)
                open_, surprise = 0, 0.0
                continue
            due = open_ == 16 or (open_ in (2, 4, 8) and surprise > threshold + 1e-3)
            assert not due or after + t.num_prompt_tokens >= len(t.tokens)
            open_, surprise = open_ + 1, surprise - logprob.item()
        torch.testing.assert_close(
            token_logprobs(model, t.tokens, t.trace) * t.response_mask, t.sampler_logprobs, atol=1e-4, rtol=0
        )
    assert set(sizes) == ({16} if threshold == 1000.0 else set(sizes) & {2, 4, 8, 16}) and sizes
    assert threshold == 1000.0 or len(set(sizes)) > 1 or set(sizes) == {2}


# ---------------------------------------------------------------------------------------- the mask


def visible_by_hand(tokens: list[int], prompt: int, beacon: int) -> torch.Tensor:
    """A query of chunk w sees the prompt, b_1 .. b_{w-1} and its own chunk up to itself; b_w sees its whole chunk."""
    chunk_of, chunk = [], 0
    for i, token in enumerate(tokens):
        chunk_of.append(-1 if i < prompt else chunk)
        chunk += i >= prompt and token == beacon
    mask = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for q in range(len(tokens)):
        for k in range(q + 1):
            mask[q, k] = k < prompt or chunk_of[k] == chunk_of[q] or tokens[k] == beacon
    return mask


@given(st.integers(1, 6), st.lists(st.booleans(), min_size=1, max_size=20))
def test_the_trace_says_what_the_paper_says(prompt, ends):
    tokens, ends = torch.arange(prompt + len(ends)), [False] * prompt + ends
    half = prompt + len(ends[prompt:]) // 2  # the same cut off, in one batch with it
    both = insert_beacons(
        torch.stack([tokens, tokens * (tokens < half)]),
        torch.tensor([prompt, min(prompt, half)]),
        torch.tensor([len(tokens), half]),
        torch.tensor([ends, [end and i < half for i, end in enumerate(ends)]]),
        99,
        65535,
    )
    for row, length in enumerate((len(tokens), half)):
        fed, gone = both.tokens[row, : both.lengths[row]], both.evicted_at[row, : both.lengths[row]]
        assert fed[fed != 99].tolist() == tokens[:length].tolist() and (fed == 99).sum() == sum(ends[:length])
        index = torch.arange(len(fed))
        assert torch.equal(both.sampled[row, : len(fed)], (index >= prompt) & (fed != 99))
        assert not both.sampled[row, len(fed) :].any() and (both.evicted_at[row, len(fed) :] == 65535).all()
        visible = (index[None] <= index[:, None]) & (index[:, None] < gone[None])
        assert torch.equal(visible, visible_by_hand(fed.tolist(), prompt, 99))


@pytest.mark.parametrize("name", FAMILY)
def test_distributions_and_gradients_are_those_of_an_explicit_mask_in_fp64(name):
    """A reference without traces: one forward pass of the stock model under the paper's mask, positions by hand."""
    model = student(name).double()
    model.requires_grad_(True)
    beacon, tokens, prompt = beacon_of(model), torch.tensor(prompts_of(26)[0]), 6
    rows = torch.tensor([prompt]), torch.tensor([26])
    ends = fixed_chunk_ends(4, *rows, 26)
    assert ends[0].nonzero()[:, 0].tolist() == [9, 13, 17, 21]  # the last two of the 20 are followed by none
    (fed,) = beaconed(
        beacon, tokens[None], *rows, ends, model.config.num_hidden_layers, model.config.num_key_value_heads
    )
    mask = fed.sampled
    states = hidden_states(model, fed.tokens[None], replay_of(model, [(fed.tokens, fed.trace)])).last_hidden_state[0]
    ours = model.lm_head(states[:-1][mask[1:]]).log_softmax(-1)  # what predicts each token stands one place before it
    weights = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (ours * weights).sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()

    embedded, positions, place, previous = [], [], -1, []
    for i, token in enumerate(fed.tokens.tolist()):
        place += token != beacon.id
        positions.append(place)
        embedded.append(beacon.beacon if token == beacon.id else beacon.weight[token])
        previous.append(max(k for k in range(-1, i) if k < 0 or fed.tokens[k] != beacon.id))
    bias = torch.zeros(len(positions), len(positions), dtype=torch.float64)
    bias.masked_fill_(~visible_by_hand(fed.tokens.tolist(), prompt, beacon.id), -torch.inf)
    model.set_attn_implementation("sdpa")
    logits = model(
        inputs_embeds=torch.stack(embedded)[None],
        position_ids=torch.tensor([positions]),
        attention_mask=bias[None, None],
        use_cache=False,
    ).logits[0]
    theirs = torch.stack([logits[previous[i]].log_softmax(-1) for i in range(len(mask)) if mask[i]])
    torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=0)
    assert positions == fed.positions.tolist()
    (theirs * weights).sum().backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(found[n], p.grad, atol=1e-8, rtol=1e-6)
    assert found["model.embed_tokens.beacon"].abs().max() > 1e-4  # the vector learns


def test_the_overlap_of_views_leaves_beacons_out():
    model = student()
    _, (t, *_) = generate(model, 4)
    alpha = overlap(model, t)
    assert alpha.shape == (37,) and (alpha <= 1 + 1e-6).all() and alpha.min() < 0.999
    torch.testing.assert_close(alpha[:4], torch.ones(4))  # nothing is gone before the first beacon


def test_saved_tokens_count_beacons_as_entries():
    model = student()
    _, trajectories = generate(model, 4)
    slots = sum(t.num_prompt_tokens + 35 // 4 + 37 - 4 * (35 // 4) for t in trajectories)
    tokens = sum(t.num_prompt_tokens + 37 for t in trajectories)
    assert kv_tokens_saved(trajectories) == pytest.approx(1 - slots / tokens)


def test_rows_at_rest_are_left_alone():
    """A step changes nothing of rows that do not run, whatever the state of their chunks."""
    model = student()
    engine, _ = generate(model, 4)
    engine.reserve(8, 16)
    state = engine.state
    assert isinstance(state.chunks, Chunks)
    state.chunks.open.fill_(4)
    before = [t.clone() for t in state.by_row]
    live = torch.zeros(4, dtype=torch.bool)
    turn = begin(state, 4, live, beacon_of(model), engine.compressor)
    assert not turn.folding.any() and torch.equal(turn.token, state.token)
    assert all(torch.equal(a, b) for a, b in zip(before, state.by_row, strict=True))


def test_the_model_leaves_generation_with_its_own_attention():
    model = student()
    before = model.config._attn_implementation
    generate(model, 4)
    with use_attention(model, "slots"):
        pass
    assert model.config._attn_implementation == before
