"""Packed micro-batches: the log-probs, gradients and next weights of rows one by one, in fp64."""

import copy
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl import Engine, Sampling
from sparse_rl.cache.segments import Packing, Replay
from sparse_rl.errors import SparseRLError
from sparse_rl.kernels import segments as kernel
from sparse_rl.kernels import twins
from sparse_rl.learn import packing as packing_module
from sparse_rl.learn.batch import collate, micro_batches_of, score, seen_by
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.method import METHODS
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.learn.packing import WORTH_SHARING, pack_groups, pack_rows, packs, shared_prefixes
from sparse_rl.learn.score import batch_logprobs
from sparse_rl.models import with_lora
from tests.helpers.learning import batches_of, moved
from tests.helpers.models import ARCHITECTURES, MIXTURES, prompts_of, tiny

NEVER = torch.iinfo(torch.int32).max
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def double(name, **changes):
    model = copy.deepcopy(tiny(name, **changes)).double()
    if name in MIXTURES:
        model.set_experts_implementation("eager")  # torch has no grouped product in fp64
    return model


def rollouts(model, prompts=(30, 9, 20), group=3, new=24, compressor="rkv"):
    engine = Engine(model, compressor=compressor, budget=12, interval=6, rows=9)
    return engine.generate(prompts_of(*prompts), group, Sampling(new, 1.0, stop_ids=(7,)))


@st.composite
def groups(draw):
    """Tokens and lengths of rows of which neighbours begin alike."""
    rows = []
    for group in range(draw(st.integers(1, 4))):
        prompt = [100 + group] + [group % 2] * draw(st.integers(0, 20))
        for _ in range(draw(st.integers(1, 4))):
            rows.append(prompt + draw(st.lists(st.integers(2, 4), min_size=1, max_size=12)))
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for tensor, row in zip(tokens, rows, strict=True):
        tensor[: len(row)] = torch.tensor(row)
    return tokens, lengths


@given(groups())
@settings(max_examples=150, deadline=None)
def test_what_a_group_shares_is_what_all_of_it_has_in_common(drawn):
    tokens, lengths = drawn
    leader, shared = shared_prefixes(tokens, lengths)
    rows = [row[:n].tolist() for row, n in zip(tokens, lengths.tolist(), strict=True)]
    for i, (mine, count) in enumerate(zip(leader.tolist(), shared.tolist(), strict=True)):
        assert leader[mine] == mine and rows[i][:count] == rows[mine][:count]
        assert (count == 0) == (mine == i) and count in (0, *range(WORTH_SHARING, len(rows[i]) + 1))
        if i:
            alike = 0
            while alike < min(len(rows[i]), len(rows[i - 1])) and rows[i][alike] == rows[i - 1][alike]:
                alike += 1
            assert (mine == i) == (alike < WORTH_SHARING)
    for group in set(leader.tolist()):
        members = [rows[i] for i in (leader == group).nonzero()[:, 0].tolist()]
        if len(members) > 1:
            count = int(shared[leader == group].max())
            beyond = {tuple(row[: count + 1]) for row in members}
            assert len(beyond) > 1 or min(map(len, members)) == count  # one more token would be too many


@given(groups(), st.integers(1, 120))
@settings(max_examples=150, deadline=None)
def test_micro_batches_hold_every_row_once_and_no_more_tokens_than_allowed(drawn, limit):
    tokens, lengths = drawn
    parts = pack_groups(tokens, lengths, limit)
    assert sorted(torch.cat(parts).tolist()) == list(range(len(tokens)))
    for rows in parts:
        width = int(lengths[rows].max())
        evicted_at = torch.full((len(rows), 1, 1, width), NEVER, dtype=torch.int32)
        packing = pack_rows(tokens[rows, :width], lengths[rows], evicted_at, share=True)
        assert len(rows) == 1 or packing.size <= limit
        assert len(rows) == 1 or len(rows) * width <= 4 * limit
        there = torch.arange(width) < lengths[rows][:, None]
        assert set(packing.place[there].tolist()) == set(range(packing.size))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("view", ["dense", "shadow"])
def test_packed_rows_have_the_logprobs_and_gradients_of_rows_one_by_one(architecture, view, monkeypatch):
    monkeypatch.setattr(packing_module, "WORTH_PACKING", 2.0)
    model = double(architecture)
    sampled = collate(rollouts(tiny(architecture)))
    assert packs(model, "always")
    found = {}
    for packing in (False, True):
        model.zero_grad()
        rows = torch.arange(len(sampled.tokens))
        seen = seen_by(model, sampled, rows, view == "shadow", packing)
        if packing:
            without_windows = ("qwen2", "qwen3", "llama", "olmo2", "smollm3", "qwen3-moe", "mixtral")
            shares = architecture in without_windows
            assert (seen.packing.size < int(sampled.lengths.sum())) == shares
        logprobs = batch_logprobs(model, sampled.tokens, sampled.mask, replay=seen)
        (logprobs * torch.linspace(-1, 1, logprobs.numel(), dtype=torch.float64).view_as(logprobs)).sum().backward()
        found[packing] = logprobs.detach(), [p.grad.clone() for p in model.parameters()]
    assert (found[True][0] - found[False][0]).abs().max() < 1e-5  # logits are fp32
    for ours, theirs in zip(found[True][1], found[False][1], strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * (1 + theirs.abs().max())


def test_rows_whose_prompt_was_evicted_otherwise_bring_their_own():
    tokens = torch.tensor([[*range(1, 15), 30, 31], [*range(1, 15), 40, 41], [*range(1, 15), 50, 51]])
    lengths = torch.full((3,), 16)
    evicted_at = torch.full((3, 2, 1, 16), NEVER, dtype=torch.int32)
    evicted_at[:, :, :, 3] = 9
    evicted_at[1, 0, 0, 4] = 15  # after the shared tokens: it does not matter
    evicted_at[2, 1, 0, 4] = 12  # among them
    packing = pack_rows(tokens, lengths, evicted_at, share=True)
    assert packing.first.tolist() == [0, 14, 0] and packing.size == 16 + 2 + 16
    assert packing.place[1].tolist() == [*range(14), 16, 17]
    assert packing.place[2].tolist() == list(range(18, 34))


@pytest.mark.parametrize("layers", [1, 2])  # 1: all layers and heads share their lists, as in the dense view
@pytest.mark.parametrize("window", [None, 9])
def test_the_kernel_attends_in_a_packed_row_as_the_mask_says(layers, window):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([50, 41, 33, 50, 20])
    heads, width, prompt = 2, 50, 20
    evicted_at = torch.full((5, layers, heads if layers > 1 else 1, width), NEVER, dtype=torch.int32)
    if layers > 1:
        moments = torch.tensor([12, 24, 36, 48])
        evicted_at[..., ::2] = moments[torch.randint(0, 4, evicted_at[..., ::2].shape, generator=generator)].int()
        evicted_at = torch.where(evicted_at > torch.arange(width), evicted_at, NEVER)
        evicted_at[1:3, ..., :prompt] = torch.where(
            evicted_at[0, ..., :prompt] < prompt, evicted_at[0, ..., :prompt],
            evicted_at[1:3, ..., :prompt].clamp(min=prompt),
        )  # fmt: skip
    tokens = torch.randint(1, 9, (5, width), generator=generator)
    tokens[1:3, :prompt] = tokens[0, :prompt]
    tokens[0, prompt], tokens[1, prompt], tokens[2, prompt] = 9, 10, 11
    packing = pack_rows(tokens, lengths, evicted_at, share=window is None)
    assert packing.first.tolist() == ([0, prompt, prompt, 0, 0] if window is None else [0] * 5)
    packing = Packing(packing.place.to(DEVICE), packing.first.to(DEVICE), packing.size)
    replay = Replay(evicted_at.to(DEVICE), lengths.to(DEVICE), packing)
    shape = [(1, 2 * heads, packing.size, 16), (1, heads, packing.size, 16), (1, heads, packing.size, 16)]
    mine = [torch.randn(s, generator=generator).to(DEVICE).requires_grad_() for s in shape]
    upstream = torch.randn(1, packing.size, 2 * heads, 16, generator=generator).to(DEVICE)
    out = kernel.trace_attention(*mine, replay, 0, 0.3, window, None, 0.0)
    out.backward(upstream)
    theirs = [x.detach().double().requires_grad_() for x in mine]
    expected = twins.trace_attention(*theirs, replay, 0, 0.3, window, None, 0.0)
    expected.backward(upstream.double())
    assert (out - expected).abs().max() < 1e-5
    for a, b in zip(mine, theirs, strict=True):
        assert (a.grad - b.grad).abs().max() < 2e-5


@pytest.mark.parametrize("method", ["sparse-rl", "shadow", "smd"])
@pytest.mark.parametrize("kind", ["plain", "checkpointed", "lora"])
def test_a_packed_learner_takes_the_step_of_a_plain_one(method, kind, monkeypatch):
    monkeypatch.setattr(packing_module, "WORTH_PACKING", 2.0)
    start = copy.deepcopy(tiny("llama"))
    if kind == "lora":
        torch.manual_seed(0)
        start = with_lora(start, 2, 4)
        for name, parameter in start.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    trajectories = rollouts(start)
    weights = {}
    for packing in (False, True):
        model = copy.deepcopy(start).double()
        if kind == "checkpointed":
            model.gradient_checkpointing_enable()
        chosen = METHODS[method]
        scored = score(model, collate(trajectories), 90, view=chosen.view)
        advantages = torch.linspace(-1, 1, len(trajectories), dtype=torch.float64)
        (batch,) = batches_of(scored, advantages, chosen.correction, Loss())
        learner = Learner(
            model, OptimizerSettings(lr=1e-2), Loss(), micro_batch_tokens=90, packing=packing, distill=chosen.distill
        )
        result = learner.step(batch)
        weights[packing] = result.metrics, [p.detach().clone() for p in model.parameters()]
    for name, value in weights[False][0].items():
        assert weights[True][0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for ours, theirs in zip(weights[True][1], weights[False][1], strict=True):
        assert (ours - theirs).abs().max() < 2e-4


@pytest.mark.parametrize("view", ["dense", "shadow"])
def test_scoring_packed_rows_is_scoring_rows(view, monkeypatch):
    monkeypatch.setattr(packing_module, "WORTH_PACKING", 2.0)
    model, sampled = tiny("qwen2"), collate(rollouts(tiny("qwen2")))
    other = moved(model, seed=1)
    for reference_view in ("dense", "shadow"):
        references = [
            score(model, sampled, 100, 1.0, nullcontext(other), view, reference_view, packing).reference_logprobs
            for packing in (False, True)
        ]
        assert (references[0] - references[1]).abs().max() < 1e-4 and (references[0] != 0).any()
    plain, packed = (score(model, sampled, 100, view=view, packing=packing) for packing in (False, True))
    assert (plain.old_logprobs - packed.old_logprobs).abs().max() < 1e-4
    assert (plain.entropies - packed.entropies).abs().max() < 1e-4
    fewer = [len(micro_batches_of(model, sampled.tokens, sampled.lengths, 100, packing)) for packing in (False, True)]
    assert fewer[1] < fewer[0]


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "mistral"])
def test_micro_batches_hold_what_the_model_reads(architecture, monkeypatch):
    """Models with windows share nothing, and their micro-batches are cut accordingly."""
    monkeypatch.setattr(packing_module, "WORTH_PACKING", 2.0)
    model, limit = tiny(architecture), 128
    sampled = collate(rollouts(model, prompts=(60, 60), group=6, new=8))
    for rows in micro_batches_of(model, sampled.tokens, sampled.lengths, limit, packing=True):
        assert seen_by(model, sampled, rows, shadow=True, packing=True).packing.size <= limit


def test_who_is_packed(monkeypatch):
    model = tiny("llama")
    assert not packs(model, "auto") or DEVICE == "cuda"  # on a CPU a run keeps its bits
    assert not packs(model, "never") and packs(model, "always")
    monkeypatch.setattr(packing_module, "_KNOWN", set())
    with pytest.raises(SparseRLError, match="micro-batches of llama models cannot be packed; use auto or never"):
        packs(model, "always")
