"""`learn.rescore`: in the shadow view the old log-probs are the sampler's, and what nobody scored is checked."""

import copy
import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch

import sparse_rl.train.complete
import sparse_rl.train.worker
from sparse_rl import Engine, Sampling, Trace
from sparse_rl.config import make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.files import read_lines
from sparse_rl.learn.advantage import advantage
from sparse_rl.learn.batch import collate, minibatch_rows, score
from sparse_rl.learn.correct import PRESETS
from sparse_rl.learn.dpo import DPO, choose_pairs
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.models import load_model
from sparse_rl.train.run import train
from tests.helpers.learning import batches_of
from tests.helpers.models import prompts_of, tiny
from tests.helpers.runs import recipe, run, weights, write_recipe

STEADY = OptimizerSettings(lr=1e-3)
SHADOW = {"method": "shadow"}


def rollouts(model, lengths=(5, 30, 14), new=40, group=2):
    engine = Engine(model, compressor="rkv", budget=12, interval=6, rows=6)
    return engine.generate(prompts_of(*lengths), group, Sampling(new, stop_ids=(7,)))


def unscored(model, done, minibatches=1, loss=None):
    """Batches whose old log-probs are the sampler's; some rows have no advantage."""
    rewards = torch.tensor([1.0, 0.0] * (len(done) // 2))
    rewards[:2] = 1.0
    advantages, _ = advantage(rewards, torch.tensor([t.prompt_index for t in done]))
    scored = score(model, collate(done), 64, view="shadow", only=torch.tensor([0]))
    return scored, batches_of(scored, advantages, PRESETS["none"], loss or Loss(), minibatches)


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("only", [[], [1], [5, 0, 3]])
def test_some_rows_are_scored_and_the_others_keep_the_samplers(only):
    model = tiny("llama")
    done = rollouts(model)
    whole = score(model, collate(done), 64, view="shadow")
    some = score(model, collate(done), 64, view="shadow", only=torch.tensor(only, dtype=torch.int64))
    assert whole.seen is None and some.seen.nonzero()[:, 0].tolist() == sorted(only)
    for row in range(len(done)):
        if row in only:
            torch.testing.assert_close(some.old_logprobs[row], whole.old_logprobs[row], rtol=1e-4, atol=2e-5)
            assert some.ranks[row].equal(whole.ranks[row])
        else:
            assert some.old_logprobs[row].equal(some.sampled.sampler_logprobs[row]) and not some.ranks[row].any()
    with pytest.raises(AssertionError):
        score(model, collate(done), 64, view="dense", only=torch.tensor([0]))


@pytest.mark.parametrize("limit", [64, 10_000])
def test_what_the_update_sees_is_what_scoring_finds_and_its_gradient_is_the_same(limit):
    model = copy.deepcopy(tiny("llama"))
    done = rollouts(model)
    whole = score(model, collate(done), limit, view="shadow")
    _, (batch,) = unscored(model, done)
    assert batch.old_logprobs.equal(collate(done).sampler_logprobs)
    checked, plain = (Learner(copy.deepcopy(model), STEADY, Loss(), micro_batch_tokens=limit) for _ in range(2))
    found, without = checked.step(batch, check=True), plain.step(batch)
    assert without.seen is None and found.metrics == without.metrics
    assert all(map(torch.equal, parameters(checked.model), parameters(plain.model)))  # to the bit
    rows = found.seen.rows
    assert rows.tolist() == [2, 3, 4, 5]  # the first two have no advantage
    for mine, theirs in ((found.seen.logprobs, whole.old_logprobs), (found.seen.entropies, whole.entropies)):
        torch.testing.assert_close(mine, theirs[rows], rtol=1e-4, atol=2e-5)
    assert (found.seen.entropies[whole.sampled.mask[rows]] > 0).all()


@pytest.mark.parametrize("algorithm", ["grpo", "online-dpo"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_trace_of_another_trajectory_stops_the_first_update_with_the_weights_untouched(algorithm, dtype):
    model = copy.deepcopy(tiny("llama")).to(dtype)
    done = [t for t in rollouts(model, lengths=(30, 30, 30), new=60)]
    _, (batch,) = unscored(model, done)
    loss = Loss()
    if algorithm == "online-dpo":
        loss, group = DPO(), torch.tensor([t.prompt_index for t in done])
        everyone = torch.ones(len(done), dtype=torch.bool)
        pairs, _ = choose_pairs(torch.tensor([1.0, 0.0] * 3), group, everyone, everyone, "all", 0)
        batch = dataclasses.replace(batch, pairs=pairs, reference_logprobs=batch.old_logprobs.clone())
    learner = Learner(model, STEADY, loss, micro_batch_tokens=200)
    before = parameters(model)
    gone = [Trace(torch.arange(1, len(t.tokens) + 1).expand_as(t.trace.evicted_at).int()) for t in done]
    wrong = dataclasses.replace(batch, traces=(*batch.traces[:3], gone[3], *batch.traces[4:]))
    with pytest.raises(SparseRLError, match=r"log-probs of 1 of \d trajectories .* sample the trajectories again"):
        learner.step(wrong, check=True)
    assert all(map(torch.equal, before, parameters(model))) and learner.version == 0
    assert all(t.grad is None for t in (*learner.optimizer.masters, *learner.optimizer.parameters))
    assert learner.step(batch, check=True).seen is not None and learner.version == 1


def test_a_whole_run_is_that_of_rescoring_up_to_rounding(tmp_path):
    """Sampled tokens, rewards and lengths are the same for some steps in fp32; what differs is rounding."""
    for rescore in ("auto", "always"):
        settings = recipe(learn={**SHADOW, "rescore": rescore}, loss={"beta": 0.01}, eval={"every": 0})
        train(settings, tmp_path / rescore, show=False)
    auto, always = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("auto", "always"))
    assert len(auto) == len(always) == 4
    for mine, theirs in zip(auto, always, strict=True):
        same = [name for name in theirs if name.split("/")[0] in ("reward", "rollout", "grade", "advantage", "cache")]
        same = [name for name in same if not name.startswith("cache/regret/")]  # of attention, which rounding moves
        assert len(same) > 8 and all(mine[name] == theirs[name] for name in same)
        assert mine["gap/alpha/p05"] == pytest.approx(theirs["gap/alpha/p05"], rel=1e-4)
        assert mine["update/grad_norm"] == pytest.approx(theirs["update/grad_norm"], rel=1e-3)
        assert mine["old/kl/mean"] == pytest.approx(theirs["old/kl/mean"], abs=1e-6)
        assert set(mine) == {*theirs, "replay/checked/frac"}
        # The KL term takes every trajectory of the first of two minibatches through the model.
        assert 0.5 < mine["replay/checked/frac"] < 1 and 0 < mine["gap/abs/mean"] < 1e-4
        assert mine["old/entropy/mean"] == pytest.approx(theirs["old/entropy/mean"], rel=0.5)
    one, two = (weights(tmp_path / name / "checkpoints" / "step-000004") for name in ("auto", "always"))
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=1e-4, atol=1e-5)


def test_few_trajectories_go_through_the_model_before_the_update(tmp_path, monkeypatch):
    tokens, scored = [], sparse_rl.train.complete.score

    def spy(model, sampled, *args, only=None, **options):
        *args, last = args if only is None else (*args, only)
        tokens.append(len(sampled.lengths) if last is None else len(last))
        return scored(model, sampled, *args, only=last, **options)

    monkeypatch.setattr(sparse_rl.train.complete, "score", spy)
    settings = recipe(learn={**SHADOW, "minibatches": 2}, run={"steps": 2, "samples": 5}, eval={"every": 0})
    train(settings, tmp_path / "run", show=False)
    assert tokens == [2, 5, 2, 5]  # of 16: one of each minibatch, and those of samples/
    for sample in map(json.loads, (tmp_path / "run/samples/step-000001/trajectories.jsonl").open()):
        first = sample["num_prompt_tokens"]
        assert min(sample["rank"][first:]) >= 1
        assert sample["old_logprobs"][first:] == pytest.approx(sample["sampler_logprobs"][first:], abs=1e-3)


@pytest.mark.parametrize("place", ["first", "drawn"])
def test_a_run_stops_at_a_trace_that_does_not_belong(place, tmp_path, monkeypatch):
    """In step 2, of a row of the first minibatch that is learned from; or of the row that is drawn from the second."""
    original, drawn, calls = sparse_rl.train.worker.collate, sparse_rl.train.worker.Sampler._drawn, []

    def damaged(trajectories, rank):
        calls.append(len(trajectories))
        sampled = original(trajectories, rank)
        if len(calls) < 2:
            return sampled
        row = drawn(found[0], 1)[1] if place == "drawn" else next(i for i in range(8) if i != drawn(found[0], 1)[0])
        gone = sampled.traces[row].evicted_at.clone().int()
        gone[:] = torch.arange(1, gone.shape[-1] + 1)  # nothing but itself is seen
        return dataclasses.replace(sampled, traces=(*sampled.traces[:row], Trace(gone), *sampled.traces[row + 1 :]))

    found = []
    monkeypatch.setattr(sparse_rl.train.worker.Sampler, "_drawn", lambda self, n: found.append(self) or drawn(self, n))
    monkeypatch.setattr(sparse_rl.train.worker, "collate", damaged)
    settings = recipe(
        learn=SHADOW, loss={"beta": 0.01}, run={"steps": 2, "samples": 0, "diagnose": 0}, eval={"every": 0}
    )
    with pytest.raises(SparseRLError, match="in the shadow view the learner's log-probs of 1 of"):
        train(settings, tmp_path / "run", show=False)
    assert [line["step"] for line in read_lines(tmp_path / "run/metrics.jsonl")] == [1]
    monkeypatch.undo()
    train(settings, tmp_path / "run", resume=True, show=False)  # step 1 was saved, and step 2 left nothing behind
    train(settings, tmp_path / "straight", show=False)
    assert (tmp_path / "run/metrics.jsonl").read_text() == (tmp_path / "straight/metrics.jsonl").read_text()


def test_a_first_minibatch_without_advantage_leaves_the_check_to_the_next(tmp_path, monkeypatch):
    checks, step = [], Learner.step

    def spy(self, batch, check):
        result = step(self, batch, check)
        checks.append((check, "update/empty/count" in result.metrics, result.seen is not None))
        return result

    def flat(self, rollout, accepted):
        values, metrics = advantages(self, rollout, accepted)
        values[:4] = 0.0
        return values, metrics

    from sparse_rl.train.loop import Trainer

    advantages = Trainer.advantages
    monkeypatch.setattr(Trainer, "advantages", flat)
    monkeypatch.setattr(Learner, "step", spy)
    settings = recipe(learn={**SHADOW, "minibatches": 4}, run={"steps": 1}, eval={"every": 0})
    train(settings, tmp_path / "run", show=False)
    moved = [i for i, (_, empty, _) in enumerate(checks) if not empty]
    assert moved and moved[0] > 0
    assert [check for check, *_ in checks] == [i <= moved[0] for i in range(4)]
    assert [i for i, (*_, seen) in enumerate(checks) if seen] == [moved[0]]
    (line,) = read_lines(tmp_path / "run/metrics.jsonl")
    assert math.isfinite(line["old/entropy/mean"]) and line["gap/xi/p05"] == pytest.approx(1, abs=1e-3)


def test_who_is_scored():
    base = {"model": {"name": "tiny-sums"}, "task": {"name": "sums"}, "rollout": {"prompts": 4, "group_size": 4}}

    def scores_all(**sections):
        return make_recipe({k: {**base.get(k, {}), **sections.get(k, {})} for k in {**base, **sections}}).scores_all

    assert not scores_all(learn=SHADOW) and not scores_all(learn={"method": "smd"})
    assert not scores_all(learn={"method": "none", "view": "shadow"}, loss={"beta": 0.1})
    assert not scores_all(learn={**SHADOW, "algorithm": "online-dpo"})
    assert scores_all(learn={**SHADOW, "rescore": "always"})
    assert all(scores_all(learn={"method": name}) for name in ("naive", "none", "sparse-rl"))  # the dense view
    assert scores_all(learn={"method": "tis", "view": "shadow"})  # which weights tokens by what is left of the gap
    assert scores_all(learn={**SHADOW, "correction": {"reject_below": 0.5}, "refill": 1})
    assert scores_all(learn=SHADOW, rollout={"ahead": 1})  # the learner's weights are newer than the sampler's
    assert scores_all(learn=SHADOW, student={"chunks": [4]})  # students learn before the update
    assert scores_all(learn={**SHADOW, "dynamic": 2})  # whose groups may come from later rounds
    assert scores_all(learn=SHADOW, loss={"level": "sequence"})  # clips of GSPO are within rounding
    with pytest.raises(SparseRLError, match=r"learn.rescore is 'never'; it must be auto or always"):
        scores_all(learn={"rescore": "never"})


def test_minibatches_hold_every_row_once():
    for count, minibatches, group in ((16, 4, 1), (10, 3, 1), (12, 3, 4), (8, 8, 1)):
        parts = minibatch_rows(count, minibatches, group)
        assert torch.cat(parts).tolist() == list(range(count)) and len(parts) == minibatches
        assert all(len(part) % group == 0 for part in parts)


@pytest.mark.slow
def test_two_processes_check_what_one_does(tmp_path):
    given = write_recipe(tmp_path, learn=SHADOW, run={"steps": 2, "samples": 0}, eval={"every": 0})
    done = run("train", given, "--out", tmp_path / "two", "--num-processes", 2)
    assert done.returncode == 0, done.stderr
    train(recipe(learn=SHADOW, run={"steps": 2, "samples": 0}, eval={"every": 0}), tmp_path / "one", show=False)
    one, two = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for mine, theirs in zip(two, one, strict=True):
        assert mine["replay/checked/frac"] == theirs["replay/checked/frac"] > 0
        for name in ("reward/mean", "old/entropy/mean", "update/grad_norm", "update/drift/mean"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6), name
    assert load_model(str(tmp_path / "two/checkpoints/step-000002"))


def test_over_many_steps_every_position_is_drawn():
    settings = recipe(learn={**SHADOW, "minibatches": 4})
    positions = settings.rollout.prompts * settings.rollout.group_size
    sampler = SimpleNamespace(recipe=settings, _positions=positions)
    drawn = [sparse_rl.train.worker.Sampler._drawn(sampler, number) for number in range(50)]
    quarter = positions // 4
    assert all([place // quarter for place in step] == [0, 1, 2, 3] for step in drawn)
    assert {place for step in drawn for place in step} == set(range(positions))
