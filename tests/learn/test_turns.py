"""Conversations: of what stands after the prompt, sampled tokens alone carry loss, entropy, ratios and lengths."""

import copy
import dataclasses
import json
import math

import pytest
import torch

from sparse_rl import Engine, Sampling
from sparse_rl.errors import SparseRLError
from sparse_rl.learn import packing as packing_module
from sparse_rl.learn import score as scoring
from sparse_rl.learn.batch import apply_correction, collate, make_batches, score
from sparse_rl.learn.correct import PRESETS, changed
from sparse_rl.learn.diagnose import gap_metrics, rollout_metrics
from sparse_rl.learn.dpo import DPO, choose_pairs
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.method import METHODS
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.learn.overlap import overlap
from sparse_rl.learn.ppo import gae, terminal_rewards
from sparse_rl.learn.student import Student, Students, StudentSettings, teacher_states
from sparse_rl.records import TrajectoryWriter, entries, kv_tokens_saved, read_trajectories
from sparse_rl.report.trajectories import invalid, trajectory
from sparse_rl.scale.lengths import lengths_of_run
from tests.helpers.compressors import STANDALONE
from tests.helpers.learning import batches_of, moved
from tests.helpers.models import prompts_of, tiny
from tests.helpers.turns import with_given
from tests.learn.test_shadow_learning import assert_close, explicit_logits, fp64_logits, gradients, masters_gradients

__all__ = ["fp64_logits"]  # for all tests here

STEADY = OptimizerSettings(lr=1e-3)
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.0, 1.0])


def conversations(model, compressor="rkv", lengths=(5, 30, 14), new=40):
    engine = Engine(model, compressor=compressor, budget=12, interval=6, rows=6)
    done = with_given(engine.generate(prompts_of(*lengths), 2, Sampling(new, stop_ids=(7,))))
    assert all(t.given.any() for t in done) and max(len(t.turns) for t in done) > 3
    return done


def explicit_logprobs(model, t, shadow: bool) -> torch.Tensor:
    """fp64 [T]; 0 for the first token"""
    logits = explicit_logits(model, t, shadow)
    found = logits.log_softmax(-1)[:-1].gather(1, t.tokens[1:, None])[:, 0]
    return torch.cat([found.new_zeros(1), found])


@pytest.mark.parametrize("compressor", STANDALONE)
def test_gradients_of_sampled_tokens_are_those_of_an_explicit_mask(compressor):
    done = conversations(tiny("llama"), compressor)
    model = copy.deepcopy(tiny("llama")).double()
    sampled = collate(done)
    g = torch.Generator().manual_seed(0)
    weights = torch.randn(sampled.tokens.shape, dtype=torch.float64, generator=g)
    replay = scoring.replay_of(model, [(t.tokens, t.trace) for t in done])
    logprobs = scoring.batch_logprobs(model, sampled.tokens, sampled.mask, 1.0, replay)
    (logprobs * weights).sum().backward()  # off the mask log-probs are 0, without a gradient
    mine, loss = gradients(model), 0.0
    for i, t in enumerate(done):
        theirs = explicit_logprobs(model, t, shadow=True)
        for k in range(t.num_prompt_tokens, len(t.tokens)):
            if not t.given[k]:
                loss = loss + weights[i, k] * theirs[k]
                torch.testing.assert_close(logprobs[i, k], theirs[k], rtol=1e-9, atol=1e-9)
            else:
                assert logprobs[i, k] == 0
    loss.backward()
    assert_close(mine, gradients(model))


LOSSES = {
    "grpo": Loss(),
    "token-mean": Loss(mean="token-mean", clip_high=0.05),
    "dr-grpo": Loss(mean="dr-grpo", constant=20),
    "gspo": Loss(level="sequence", clip_low=0.02, clip_high=0.02),
    "cispo": Loss(clip="weight", clip_low=0.05, clip_high=0.05),
}


@pytest.mark.parametrize("view", ["dense", "shadow"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_is_that_of_the_equations_over_sampled_tokens(name, view):
    loss, start = LOSSES[name], copy.deepcopy(tiny("llama"))
    done, old_model = conversations(start), copy.deepcopy(start).double()
    correction = PRESETS["none"] if view == "shadow" else changed(PRESETS["sparse-rl"], reject_below=0.1, cap=1.2)
    scored, advantages = score(start, collate(done), 64, view=view), REWARDS - REWARDS.mean()
    (batch,) = batches_of(scored, advantages, correction, loss)
    model = moved(start, 4).double()
    learner = Learner(model, STEADY, loss, micro_batch_tokens=64)
    total, weight, counted, accepted = torch.zeros((), dtype=torch.float64), {}, 0, 0
    old = [explicit_logprobs(old_model, t, view == "shadow").detach() for t in done]
    for t, before, a in zip(done, old, advantages, strict=True):
        places = [k for k in range(t.num_prompt_tokens, len(t.tokens)) if not t.given[k]]
        xi = [math.exp(before[k] - t.sampler_logprobs[k]) for k in places]
        if correction.reject_below is not None and min(xi) < correction.reject_below:
            continue
        accepted += 1
        logprobs = explicit_logprobs(model, t, view == "shadow")
        drift = [logprobs[k] - before[k] for k in places]
        for k, x, d in zip(places, xi, drift, strict=True):
            d = sum(drift) / len(places) if loss.level == "sequence" else d
            r, w = d.exp(), 1.0 if correction.cap is None else min(x, correction.cap)
            clipped = r.clamp(1 - loss.clip_low, 1 + loss.clip_high)
            term = -clipped.detach() * a * logprobs[k] if name == "cispo" else -torch.minimum(r * a, clipped * a)
            share = {"sequence-mean": 1 / (6 * len(places)), "dr-grpo": 1 / (6 * 20), "token-mean": 1}[loss.mean]
            weight[counted] = share * w * term
            counted += 1
    total = sum(weight.values()) / (counted if loss.mean == "token-mean" else 1)
    assert counted == int(batch.mask.sum()) and (view == "shadow" or 0 < accepted < 6)
    total.backward()
    expected = masters_gradients(learner)
    sums = [learner._backward(batch, rows)[0] for rows in learner._micro_batches(batch, learner._active_rows(batch))]
    assert float(sum(s["loss"] for s in sums)) == pytest.approx(total.item(), rel=1e-5)
    assert sum(int(s["tokens"]) for s in sums) == counted
    assert_close(masters_gradients(learner), expected, 1e-5)


def test_a_conversation_has_the_credit_of_its_sampled_tokens():
    """GAE goes from a turn's last token to the next turn's first: what others wrote is no step, and is not
    discounted.
    """
    done = conversations(tiny("llama"))
    mask = collate(done).mask
    values = torch.randn(mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * mask
    found = gae(terminal_rewards(REWARDS, mask), values, mask, 0.9, 0.8)
    for i, row in enumerate(mask):
        alone, own = values[i, row][None], torch.ones(1, int(row.sum()), dtype=torch.bool)
        expected = gae(terminal_rewards(REWARDS[i : i + 1], own), alone, own, 0.9, 0.8)
        torch.testing.assert_close(found[i, row], expected[0])
        assert not found[i, ~row].any()


def test_pairs_compare_the_sums_of_sampled_tokens():
    model = copy.deepcopy(tiny("llama"))
    done = conversations(model)
    reference, group, everyone = moved(model, 3), torch.tensor([0, 0, 1, 1, 2, 2]), torch.ones(6, dtype=torch.bool)
    pairs, _ = choose_pairs(REWARDS, group, everyone, everyone, "best-worst", 11)
    scored = score(model, collate(done), 64, 1.0, _Held(reference), "shadow", "shadow")
    corrected = apply_correction(scored, PRESETS["none"])
    (batch,) = make_batches(scored, corrected, torch.zeros(6), PRESETS["none"], Loss(), 1, pairs, 2)
    now = moved(model, 4, 0.005).double()
    learner = Learner(now, STEADY, DPO(), micro_batch_tokens=64)
    fixed, loss = copy.deepcopy(reference).double(), 0.0

    def total(network, t):
        return explicit_logprobs(network, t, shadow=True)[t.response_mask].sum()

    for i, j, weight in zip(pairs.chosen.tolist(), pairs.rejected.tolist(), pairs.weights.tolist(), strict=True):
        gains = [total(now, t) - total(fixed, t).detach() for t in (done[i], done[j])]
        loss = loss - weight * torch.nn.functional.logsigmoid(0.1 * (gains[0] - gains[1])) / float(pairs.weights.sum())
    loss.backward()
    expected = masters_gradients(learner)
    prepared, metrics = learner.objective.prepare(batch, learner._row_sums)
    assert metrics["update/loss"] == pytest.approx(loss.item(), rel=1e-5)
    for rows in learner._micro_batches(prepared, learner._active_rows(prepared)):
        learner._backward(prepared, rows)
    assert_close(masters_gradients(learner), expected, 1e-5)


class _Held:
    def __init__(self, value):
        self.value = value

    def __enter__(self):
        return self.value

    def __exit__(self, *exception):
        pass


@pytest.mark.parametrize("method", ["sparse-rl", "shadow", "smd"])
def test_packed_conversations_take_the_step_of_plain_ones(method, monkeypatch):
    monkeypatch.setattr(packing_module, "WORTH_PACKING", 2.0)
    start, chosen, results = tiny("llama"), METHODS[method], []
    done = conversations(start)
    for packing in (False, True):
        model = copy.deepcopy(start).double()
        scored = score(copy.deepcopy(start), collate(done), 90, view=chosen.view, packing=packing)
        (batch,) = batches_of(scored, REWARDS - REWARDS.mean(), chosen.correction, Loss())
        learner = Learner(
            model, STEADY, Loss(), micro_batch_tokens=90, packing=packing, distill=chosen.distill, distill_weight=0.5
        )
        results.append((learner.step(batch).metrics, [p.detach().clone() for p in model.parameters()]))
    (plain, weights), (packed, others) = results
    for name, value in plain.items():
        assert packed[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    assert all((a - b).abs().max() < 2e-4 for a, b in zip(weights, others, strict=True))


def test_distillation_and_students_compare_sampled_tokens_alone():
    done = conversations(tiny("llama"))
    sampled, whole = collate(done), collate([dataclasses.replace(t, given=None) for t in done])
    teacher = copy.deepcopy(tiny("llama")).double()
    student = Student(teacher, (3,), StudentSettings([3]), STEADY, seed=0)
    rows, prompts = torch.arange(6), torch.tensor([t.num_prompt_tokens for t in done])
    found = []
    for record in (sampled, whole):
        fed = student.insert_beacons(record.tokens, prompts, record.lengths, [0] * 6, record.mask)
        found.append(student.kl(fed, teacher_states(teacher, record, rows), 1.0))
    mine, all_of_them = found
    torch.testing.assert_close(mine, all_of_them[sampled.mask[whole.mask]])
    metrics = Students(tiny("llama"), StudentSettings([3], lr=1e-3), STEADY).learn(tiny("llama"), sampled, 1, 0)
    assert metrics["student/c3/kl"] == pytest.approx(mine.double().mean().item(), rel=1e-4)


def test_what_is_measured_is_measured_on_sampled_tokens():
    model = tiny("llama")
    done = conversations(model)
    plain = [dataclasses.replace(t, given=None) for t in done]
    scored = score(model, collate(done), 64, view="dense")
    corrected = apply_correction(scored, PRESETS["sparse-rl"])
    metrics = gap_metrics(scored.gap, scored.sampled.mask, corrected)
    gaps = torch.cat([scored.gap[i, : len(t.tokens)][t.response_mask] for i, t in enumerate(done)]).double()
    assert metrics["gap/abs/mean"] == pytest.approx(gaps.abs().mean().item()) and len(gaps) < 6 * 40
    assert not scored.gap[~scored.sampled.mask].any() and not scored.entropies[~scored.sampled.mask].any()
    lengths = [int((~t.given).sum()) - t.num_prompt_tokens for t in done]
    told = rollout_metrics(done, REWARDS, REWARDS > 0.5, torch.zeros(6, dtype=torch.bool))
    assert told["rollout/length/mean"] == sum(lengths) / 6 and told["rollout/length/max"] == max(lengths)
    # The cache does not care who wrote a token.
    assert kv_tokens_saved(done) == kv_tokens_saved(plain) and torch.equal(entries(done[0]), entries(plain[0]))
    for t, all_tokens in zip(done, plain, strict=True):
        here = t.response_mask[t.num_prompt_tokens :]
        torch.testing.assert_close(overlap(model, t), overlap(model, all_tokens)[here])


def test_turns_are_runs_of_sampled_tokens():
    (t,) = with_given(Engine(tiny("llama"), rows=1).generate(prompts_of(9), sampling=Sampling(30)))
    assert torch.cat([t.tokens[turn] for turn in t.turns]).equal(t.response_tokens)
    assert all(t.given[turn.stop] for turn in t.turns[:-1]) and t.turns[-1].stop == len(t.tokens)
    assert t.num_text_tokens == 39 == 9 + len(t.response_tokens) + t.num_given_tokens
    assert dataclasses.replace(t, given=None).turns == [slice(9, 39)]


def test_supports_and_files_know_who_wrote_a_token(tmp_path):
    """Top-p records nothing where nothing was sampled; a written conversation is read as it was, and shown so."""
    model = tiny("llama")
    done = conversations(model)
    with TrajectoryWriter(tmp_path / "samples" / "step-000001") as writer:
        for t in done:
            writer.write(t, "prompt", "text")
    again = list(read_trajectories(tmp_path / "samples" / "step-000001"))
    for mine, theirs in zip(again, done, strict=True):
        assert mine.given.equal(theirs.given) and mine.turns == theirs.turns
        assert mine.sampler_logprobs.equal(theirs.sampler_logprobs)
    line = json.loads((tmp_path / "samples" / "step-000001" / "trajectories.jsonl").read_text().splitlines()[0])
    shown = trajectory(1, line, lambda tokens: [str(token) for token in tokens])
    given = done[0].given[done[0].num_prompt_tokens :]
    assert [value is None for value in shown["sampler"]] == given.tolist()
    assert sum(end - begin for begin, end in shown["given"]) == int(given.sum())
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "rollout/length/mean": 10.0}) + "\n")
    counts = torch.tensor([len(t.response_tokens) for t in done], dtype=torch.float64)
    assert lengths_of_run(tmp_path).spread == pytest.approx((counts.std(unbiased=False) / counts.mean()).item())


@pytest.mark.parametrize(
    "given, why",
    [
        (3, "given is int, not a list"),
        ([[12]], r"given holds \[12\], not"),
        ([["a", 4]], "given holds .*, not .begin, end. with whole numbers"),
        ([[4, 12]], r"given holds \[4, 12\], but its runs follow one another after the 10 tokens"),
        ([[20, 20], [13, 15]], r"given holds \[20, 20\]"),
        ([[12, 12]], r"given holds \[12, 12\]"),
        ([[28, 31]], r"given holds \[28, 31\], .* within 30 tokens"),
        ([[12, 14]], "tokens 12 to 13 were given, but have log-probs"),
    ],
)
def test_lines_that_no_conversation_writes_are_refused(given, why, tmp_path):
    (done,) = Engine(tiny("llama"), rows=1).generate(prompts_of(10), sampling=Sampling(20))
    with TrajectoryWriter(tmp_path) as writer:
        writer.write(done)
    path = tmp_path / "trajectories.jsonl"
    line = json.loads(path.read_text()) | {"given": given}
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(SparseRLError, match=f"line 1 is not a trajectory .{why}"):
        list(read_trajectories(tmp_path))
    assert (invalid(line) is None) == (given == [[12, 14]])  # the report asks for less
