"""Online DPO: pairs by their definition, the two-pass gradient against autograd in fp64, TRL's loss, whole runs."""

import contextlib
import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl import Engine, Sampling, token_logprobs
from sparse_rl.config import make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.learn.batch import apply_correction, collate, make_batches, score
from sparse_rl.learn.correct import PRESETS, only_rejection
from sparse_rl.learn.dpo import DPO, Pairs, choose_pairs
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.models import load_model, tiny_tokenizer
from sparse_rl.tasks import make
from sparse_rl.train.log import Clock
from sparse_rl.train.run import train
from sparse_rl.train.worker import Sampler
from tests.helpers.learning import moved
from tests.helpers.models import prompts_of, tiny
from tests.helpers.processes import recorded
from tests.helpers.runs import recipe, weights

STEADY = OptimizerSettings(lr=1e-3)


# ------------------------------------------------------------------------------------------------ who is compared


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pairs_are_what_their_definition_says(data):
    groups, size = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 5))
    count = groups * size
    rewards = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=count, max_size=count)))
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    members, complete = torch.tensor(data.draw(flags)), torch.tensor(data.draw(flags))
    group = torch.arange(count) // size
    possible = {
        (i, j)
        for i in range(count)
        for j in range(count)
        if group[i] == group[j] and members[i] and members[j] and complete[i] and rewards[i] > rewards[j]
    }
    pairs, metrics = choose_pairs(rewards, group, members, complete, "all", 7)
    found = set(zip(pairs.chosen.tolist(), pairs.rejected.tolist()))
    assert found == possible and len(pairs.chosen) == len(found) == metrics["pairs/total/count"]
    one, _ = choose_pairs(rewards, group, members, complete, "best-worst", 7)
    assert sorted(group[one.chosen].tolist()) == sorted({int(group[i]) for i, _ in possible})
    for i, j in zip(one.chosen.tolist(), one.rejected.tolist()):
        rivals = [pair for pair in possible if group[pair[0]] == group[i]]
        assert (i, j) in possible
        assert rewards[i] == max(rewards[a] for a, _ in rivals) and rewards[j] == min(rewards[b] for _, b in rivals)
    for found_pairs in (pairs, one):
        for number in group[found_pairs.chosen].unique():
            assert found_pairs.weights[group[found_pairs.chosen] == number].sum().item() == pytest.approx(1)
    without = groups - len({int(group[i]) for i, _ in possible})
    assert metrics["pairs/groups_without/frac"] == without / groups


def test_of_equals_one_is_drawn_by_the_stream():
    rewards, group = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]), torch.zeros(5, dtype=torch.int64)
    all_ = torch.ones(5, dtype=torch.bool)
    drawn = [choose_pairs(rewards, group, all_, all_, "best-worst", stream)[0] for stream in range(60)]
    assert {int(p.chosen) for p in drawn} == {0, 1, 2} and {int(p.rejected) for p in drawn} == {3, 4}
    again = choose_pairs(rewards, group, all_, all_, "best-worst", 5)[0]
    assert (int(again.chosen), int(again.rejected)) == (int(drawn[5].chosen), int(drawn[5].rejected))


def test_a_group_stays_whole_in_one_optimizer_step():
    pairs = Pairs(torch.tensor([1, 4]), torch.tensor([0, 3]), torch.ones(2, dtype=torch.float64))
    second = pairs.rows(torch.tensor([3, 4, 5]))
    assert second.chosen.tolist() == [1] and second.rejected.tolist() == [0]
    with pytest.raises(AssertionError, match="divides a pair"):
        pairs.rows(torch.tensor([0, 2]))


# ---------------------------------------------------------------------------------------------------- the gradient


def hand_loss(h: torch.Tensor, dpo: DPO) -> torch.Tensor:
    if dpo.loss == "ipo":
        return (h - 0.5 / dpo.beta) ** 2
    right = torch.log(1 / (1 + torch.exp(-dpo.beta * h)))
    wrong = torch.log(1 / (1 + torch.exp(dpo.beta * h)))
    return -((1 - dpo.label_smoothing) * right + dpo.label_smoothing * wrong)


CASES = {
    "sigmoid": DPO(),
    "smoothed": DPO(beta=0.5, label_smoothing=0.1, pairs="all"),
    "ipo": DPO(loss="ipo", beta=0.2),
    "ipo-per-token": DPO(loss="ipo", beta=0.2, per_token=True, pairs="all"),
    "dense-reference": DPO(beta=0.3, reference="dense"),
}


@pytest.mark.parametrize("view", ["dense", "shadow"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_has_the_gradient_of_the_pairs_in_fp64(case, view):
    dpo, model = CASES[case], copy.deepcopy(tiny("llama"))
    reference = moved(model, 3)
    engine = Engine(model, "rkv", budget=12, interval=4, rows=6)
    done = engine.generate(prompts_of(5, 9, 14), 4, Sampling(20, stop_ids=(7, 30), for_correction=True), seed=1)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.25, 1.0, 1.0, 0.0])
    group, everyone = torch.tensor([t.prompt_index for t in done]), torch.ones(12, dtype=torch.bool)
    pairs, _ = choose_pairs(rewards, group, everyone, everyone, dpo.pairs, 11)
    scored = score(
        model, collate(done), 64, 1.0, contextlib.nullcontext(reference), view, dpo.reference.replace("view", view)
    )
    corrected, advantages = apply_correction(scored, PRESETS["none"]), torch.zeros(12)
    (batch,) = make_batches(scored, corrected, advantages, PRESETS["none"], Loss(), 1, pairs, 4)
    now = moved(model, 4, 0.005)  # the weights have moved since the rollout was scored

    def exact(network, t, trace) -> torch.Tensor:
        values = token_logprobs(network, t.tokens, trace)[t.num_prompt_tokens :].sum()
        return values / len(t.response_tokens) if dpo.per_token else values

    double, ref = copy.deepcopy(now).double(), copy.deepcopy(reference).double()
    loss, total = torch.zeros((), dtype=torch.float64), 0.0
    for i, j, weight in zip(pairs.chosen.tolist(), pairs.rejected.tolist(), pairs.weights.tolist()):
        gains = []
        for t in (done[i], done[j]):
            trace = t.trace if view == "shadow" else None
            fixed = exact(ref, t, trace if dpo.reference == "view" else None).detach()
            gains.append(exact(double, t, trace) - fixed)
        loss, total = loss + weight * hand_loss(gains[0] - gains[1], dpo), total + weight
    (loss / total).backward()

    learner = Learner(now, STEADY, dpo, micro_batch_tokens=64)
    found = recorded(learner)
    metrics = learner.step(batch).metrics
    assert metrics["update/loss"] == pytest.approx((loss / total).item(), rel=1e-4)
    size = math.sqrt(sum(p.grad.square().sum().item() for p in double.parameters()))
    assert size > 1e-3
    for mine, p in zip(found[0], double.parameters(), strict=True):
        torch.testing.assert_close(mine.double(), p.grad, rtol=2e-3, atol=2e-4 * size)


@pytest.mark.parametrize(("kind", "per_token"), [("sigmoid", False), ("ipo", True)])
def test_the_loss_is_that_of_trl(tmp_path, kind, per_token):
    """TRL's DPOTrainer on the same pairs; its ipo divides by the response's length."""
    trl, datasets = pytest.importorskip("trl", minversion="1.12"), pytest.importorskip("datasets")
    model = copy.deepcopy(tiny("llama", vocab_size=len(tiny_tokenizer())))
    reference, engine = moved(model, 3), Engine(model, budget=64, interval=8, rows=6)
    done = engine.generate(prompts_of(5, 9), 2, Sampling(12, stop_ids=(1,)), seed=1)
    pairs = Pairs(torch.tensor([0, 3]), torch.tensor([1, 2]), torch.ones(2, dtype=torch.float64))
    scored = score(model, collate(done), 64, 1.0, contextlib.nullcontext(reference))
    corrected = apply_correction(scored, PRESETS["none"])
    (batch,) = make_batches(scored, corrected, torch.zeros(4), PRESETS["none"], Loss(), 1, pairs, 2)
    now = moved(model, 4, 0.01)
    config = trl.DPOConfig(
        output_dir=str(tmp_path), report_to="none", use_cpu=True, bf16=False, loss_type=[kind], beta=0.3
    )
    row = {"prompt": "1", "chosen": "2", "rejected": "3"}
    trainer = trl.DPOTrainer(
        copy.deepcopy(now),
        copy.deepcopy(reference),
        config,
        train_dataset=datasets.Dataset.from_list([row]),
        processing_class=tiny_tokenizer(),
    )
    order = torch.cat([pairs.chosen, pairs.rejected])
    sampled = scored.sampled
    attention = torch.arange(sampled.tokens.shape[1]) < sampled.lengths[:, None]
    inputs = {
        "input_ids": sampled.tokens[order],
        "attention_mask": attention[order].long(),
        "completion_mask": sampled.mask[order].long(),
    }
    theirs = trainer._compute_loss(trainer.model, inputs, return_outputs=False)
    ours = Learner(now, STEADY, DPO(beta=0.3, loss=kind, per_token=per_token)).step(batch).metrics["update/loss"]
    assert ours == pytest.approx(theirs.item(), rel=1e-4)


# ------------------------------------------------------------------------------------------------------------ runs


@pytest.mark.parametrize("method", ["shadow", "sparse-rl"])
def test_a_run_goes_on_to_the_byte(method, tmp_path):
    settings = {"learn": {"algorithm": "online-dpo", "method": method}, "eval": {"every": 0}}
    train(recipe(**settings, run={"steps": 4}), tmp_path / "whole", show=False)
    train(recipe(**settings, run={"steps": 2}), tmp_path / "parts", show=False)
    train(recipe(**settings, run={"steps": 4}), tmp_path / "parts", resume=True, show=False)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert (parts / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    (_, end), (_, start) = find_checkpoints(whole / "checkpoints")[-1], find_checkpoints(parts / "checkpoints")[-1]
    assert all(torch.equal(value, weights(start)[name]) for name, value in weights(end).items())
    lines = read_lines(whole / "metrics.jsonl")
    assert all(line["pairs/total/count"] > 0 for line in lines)
    # At the first optimizer step of a run the policy is the reference, seen in the same view.
    assert lines[0]["update/margin/p50"] != 0 and abs(lines[0]["update/loss"] - math.log(2)) < 0.05
    assert ("reject/trajectories/frac" in lines[0]) and "update/clip/frac" not in lines[0]


def test_a_reward_that_never_varies_makes_no_pair(tmp_path):
    (tmp_path / "flat.py").write_text(
        "def prompt(i):\n    return f'{i % 9}+1=', 0\ndef reward(answer, text):\n    return 1.0\n"
    )
    flat = recipe(
        task={"name": str(tmp_path / "flat.py")}, learn={"algorithm": "online-dpo"}, run={"steps": 1}, eval={"every": 0}
    )
    train(flat, tmp_path / "run", show=False)
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["pairs/groups_without/frac"] == 1 and line["update/empty/count"] == 2


def test_what_makes_no_sense_is_refused():
    base = {"model": {"name": "tiny-sums"}, "task": {"name": "sums"}}
    cases = [
        ({"learn": {"algorithm": "dpo"}}, "did you mean 'online-dpo'. Known: grpo, online-dpo"),
        ({"learn": {"algorithm": "online-dpo", "method": "tis"}}, "tis only changes the weights of tokens"),
        ({"learn": {"algorithm": "online-dpo", "method": "naive"}}, "naive only changes the weights of tokens"),
        ({"learn": {"algorithm": "online-dpo"}, "loss": {"beta": 0.1}}, "set loss.beta to 0"),
        (
            {"learn": {"algorithm": "online-dpo"}, "loss": {"level": "sequence"}},
            "loss.level is sequence, but",
        ),
        ({"learn": {"algorithm": "online-dpo"}, "loss": {"clip": "weight"}}, "leave it at ratio"),
        ({"learn": {"algorithm": "online-dpo", "minibatches": 4}, "rollout": {"prompts": 3}}, "use at most 3"),
        ({"dpo": {"beta": 0}}, "dpo.beta is 0"),
        ({"dpo": {"label_smoothing": 0.5}}, "from 0 to below 0.5"),
        ({"dpo": {"label_smoothing": 0.1, "loss": "ipo"}}, "which does not use it"),
        ({"dpo": {"pairs": "best"}}, "best-worst"),
    ]
    for sections, said in cases:
        with pytest.raises(SparseRLError, match=said):
            make_recipe({**base, **sections})
    kept = only_rejection(PRESETS["sparse-rl-released"], "sparse-rl-released")
    assert kept.reject_below == 1e-4 and kept.cap is None and kept.mask_outside is None


@pytest.mark.parametrize("algorithm", ["grpo", "online-dpo"])
def test_only_online_dpo_has_a_dense_reference(algorithm):
    """At the start of a run the reference is the policy: GRPO's sees what the sampler saw, whatever `dpo` says."""
    model, tokenizer = load_model("tiny-sums")
    given_recipe = recipe(
        learn={"method": "shadow", "algorithm": algorithm, "rescore": "always"},
        loss={"beta": 0.0 if algorithm == "online-dpo" else 0.1},
        dpo={"reference": "dense"},
    )
    scored = Sampler(given_recipe, model, tokenizer, make("sums")).step(0, Clock()).scored
    apart = (scored.old_logprobs - scored.reference_logprobs).abs().max()
    assert apart > 1e-2 if algorithm == "online-dpo" else apart < 1e-4
