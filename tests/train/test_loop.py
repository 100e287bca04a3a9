"""What a step learns from: corrections, advantages, refills, references and the recipe's own settings."""

import json

import pytest
import torch

import sparse_rl.train.loop
import sparse_rl.train.worker
from sparse_rl.config import load_recipe, make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.learn import batch
from sparse_rl.models import load_model
from sparse_rl.records import read_trajectories
from sparse_rl.train.run import train
from tests.helpers.runs import BASE, recipe, weights


def test_everything_rejected_goes_on_without_an_update(tmp_path):
    settings = recipe(learn={"correction": {"reject_below": 1e9}}, run={"steps": 2}, eval={"every": 0})
    train(settings, tmp_path / "run", show=False)
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        assert line["reject/trajectories/frac"] == 1 and line["update/empty/count"] == 2
    start, end = load_model("tiny-sums")[0].state_dict(), weights(tmp_path / "run" / "checkpoints" / "step-000002")
    assert all(torch.equal(value, end[name]) for name, value in start.items())


def test_groups_without_variance_are_counted(tmp_path):
    (tmp_path / "flat.py").write_text(
        "def prompt(i):\n    return f'{i % 9}+1=', 0\ndef reward(answer, text):\n    return 1.0\n"
    )
    plain = {name: section for name, section in BASE.items() if name != "task"}
    settings = make_recipe(
        {**plain, "task": {"name": str(tmp_path / "flat.py")}, "run": {"steps": 1}, "eval": {"every": 0}}
    )
    train(settings, tmp_path / "run", show=False)
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["advantage/groups_without_variance/frac"] == 1 and line["update/empty/count"] == 2


def test_a_loss_that_is_never_finite_stops_the_run_and_keeps_its_weights(tmp_path, monkeypatch):
    def broken(*args):
        batches = original(*args)
        for each in batches:
            each.weights.fill_(float("nan"))
        return batches

    original = sparse_rl.train.loop.make_batches
    monkeypatch.setattr(sparse_rl.train.loop, "make_batches", broken)
    with pytest.raises(SparseRLError, match=r"4 optimizer steps in a row .* not finite"):
        train(recipe(run={"steps": 8, "max_skipped": 4}, eval={"every": 0}), tmp_path / "run", show=False)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert sum(line["update/skipped/count"] for line in lines) >= 2
    assert find_checkpoints(tmp_path / "run" / "checkpoints")
    first = True

    def once(*args):
        nonlocal first
        found, first = (broken if first else original)(*args), False
        return found

    monkeypatch.setattr(sparse_rl.train.loop, "make_batches", once)
    again = train(load_recipe(tmp_path / "run"), tmp_path / "run", resume=True, show=False)
    assert again.steps_done == 8  # the count began anew: two skipped updates did not end the resumed run


def test_refill_replaces_what_was_rejected(tmp_path):
    """The veto is so strict that much is rejected: groups fill up with accepted members, and every sample counts."""
    strict = {"correction": {"reject_below": 0.9}}
    for turns in (0, 3):
        settings = recipe(learn={**strict, "refill": turns}, run={"steps": 1, "samples": 16}, eval={"every": 0})
        train(settings, tmp_path / str(turns), show=False)
    (without,), (filled,) = (read_lines(tmp_path / str(turns) / "metrics.jsonl") for turns in (0, 3))
    assert 0 < without["reject/trajectories/frac"] < 1
    rejected = round(without["reject/trajectories/frac"] * 16)
    assert filled["rollout/trajectories/count"] > 16 and 0 < filled["reject/replaced/count"] <= rejected
    used = [json.loads(line) for line in (tmp_path / "3" / "samples" / "step-000001" / "trajectories.jsonl").open()]
    assert sum(not sample["accepted"] for sample in used) == rejected - filled["reject/replaced/count"]
    prompts = [sample["prompt"] for sample in used]
    assert prompts == [p for p in dict.fromkeys(prompts) for _ in range(4)]  # groups stay whole


def test_replacements_are_new_samples(tmp_path, monkeypatch):
    seeds, generate = [], sparse_rl.train.worker.Engine.generate

    def spy(self, prompts, group_size, sampling, seed, samples):
        seeds.append(seed)
        return generate(self, prompts, group_size, sampling, seed, samples=samples)

    monkeypatch.setattr(sparse_rl.train.worker.Engine, "generate", spy)
    learn = {"correction": {"reject_below": 0.9}, "refill": 3}
    train(recipe(learn=learn, run={"steps": 1, "samples": 16}, eval={"every": 0}), tmp_path / "run", show=False)
    assert len(seeds) == 4 and len(set(seeds)) == 4
    folder = tmp_path / "run" / "samples" / "step-000001"
    lines = [json.loads(line) for line in (folder / "trajectories.jsonl").open()]
    assert len({line["trace"] for line in lines}) == 16  # each with its own trace
    assert all(t.trace.num_tokens == len(t.tokens) for t in read_trajectories(folder))


def test_rebaseline_reaches_the_advantages(tmp_path):
    found = {}
    for rebaseline in (False, True):
        learn = {"rebaseline": rebaseline, "correction": {"reject_below": 0.5}}
        settings = recipe(learn=learn, run={"steps": 1, "samples": 16}, eval={"every": 0})
        folder = tmp_path / str(rebaseline)
        train(settings, folder, show=False)
        found[rebaseline] = [json.loads(line) for line in (folder / "samples/step-000001/trajectories.jsonl").open()]
    assert any(not s["accepted"] and s["advantage"] != 0 for s in found[False])
    assert all(s["accepted"] or s["advantage"] == 0 for s in found[True])


def test_a_step_computes_its_correction_once(tmp_path, monkeypatch):
    """With refilling, acceptance is found once for each round, and carried along."""
    calls = {"accept": [], "correct": []}
    accept, correct_rows = batch.accept, batch.correct_rows
    monkeypatch.setattr(batch, "accept", lambda gap, *a: calls["accept"].append(len(gap)) or accept(gap, *a))
    monkeypatch.setattr(
        batch, "correct_rows", lambda gap, *a: calls["correct"].append((len(gap), a[-1])) or correct_rows(gap, *a)
    )
    settings = recipe(run={"steps": 1}, eval={"every": 0})
    train(settings, tmp_path / "plain", show=False)
    assert calls == {"accept": [], "correct": [(16, None)]}
    settings = recipe(learn={"correction": {"reject_below": 0.9}, "refill": 2}, run={"steps": 1}, eval={"every": 0})
    train(settings, tmp_path / "refill", show=False)
    (sampled, accepted), rounds = calls["correct"][-1], calls["accept"]
    assert len(calls["correct"]) == 2 and rounds[0] == 16 and sum(rounds) == sampled == len(accepted) > 16


@pytest.mark.parametrize("rank", [0, 4])
def test_the_reference_is_where_the_run_started(tmp_path, rank):
    """The KL is 0 before the first update and positive after it, with and without adapters, also in a resumed run."""
    if rank:
        pytest.importorskip("peft")
    settings = {"loss": {"beta": 0.01}, "eval": {"every": 0}, "model": {"lora_rank": rank}, "optimizer": {"lr": 3e-3}}
    settings["learn"] = {"minibatches": 1}
    train(recipe(**settings, run={"steps": 2}), tmp_path / "run", show=False)
    train(recipe(**settings, run={"steps": 3}), tmp_path / "run", resume=True, show=False)
    kl = [line["update/kl/mean"] for line in read_lines(tmp_path / "run" / "metrics.jsonl")]
    assert abs(kl[0]) < 1e-6 and kl[1] > 1e-6 and kl[2] > 1e-6


def test_bf16_checkpointed_adapters_train_and_load(tmp_path):
    pytest.importorskip("peft")
    model = {"dtype": "bfloat16", "lora_rank": 4, "gradient_checkpointing": True}
    train(recipe(model=model, run={"steps": 2}, eval={"every": 0}), tmp_path / "run", show=False)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert all(line["update/grad_norm"] > 0 for line in lines)
    model, _ = load_model(str(tmp_path / "run" / "checkpoints" / "step-000002"))
    assert any("lora_" in name for name, _ in model.named_parameters())


def test_dense_rollouts_take_prompts_of_any_length(tmp_path):
    rollout = {"compressor": "dense", "compressor_options": {}, "max_new_tokens": 8}
    plain = {name: section for name, section in BASE.items() if name != "task"}
    settings = make_recipe(
        {**plain, "task": {"name": "linsys"}, "rollout": {**BASE["rollout"], **rollout}, "learn": {"method": "none"}}
    )
    train(settings, tmp_path / "run", show=False)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert max(line["gap/abs/mean"] for line in lines if "gap/abs/mean" in line) < 1e-5


def test_the_recipe_reaches_the_learner(tmp_path):
    trainer = sparse_rl.train.loop.Trainer(
        recipe(learn={"method": "sparse-rl-released"}, rollout={"temperature": 0.7}), tmp_path / "run", show=False
    )
    assert trainer.correction.clip_kl == 10.0 and trainer.loss.constant == 64 and trainer.learner.temperature == 0.7
    assert trainer.sampler.sampling.temperature == 0.7


def test_ratios_start_at_one_at_any_temperature(tmp_path):
    settings = recipe(
        rollout={"temperature": 0.7}, learn={"method": "none", "minibatches": 1}, run={"steps": 1}, eval={"every": 0}
    )
    train(settings, tmp_path / "run", show=False)
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert abs(line["update/drift/mean"]) < 1e-6 and line["update/grad_norm"] > 0


def test_naive_hides_the_gap_from_the_loss_but_not_from_the_metrics(tmp_path):
    for method in ("naive", "none"):
        settings = recipe(learn={"method": method, "minibatches": 1}, run={"steps": 1}, eval={"every": 0})
        train(settings, tmp_path / method, show=False)
    (naive,), (none,) = (read_lines(tmp_path / method / "metrics.jsonl") for method in ("naive", "none"))
    same = [key for key in none if key.startswith(("gap/", "reject/", "reward/"))]
    assert none["gap/abs/mean"] > 0.01 and all(naive[key] == none[key] for key in same)
    # The ratio of naive starts at learner / sampler.
    assert abs(none["update/drift/mean"]) < 1e-6 < 1e-3 < abs(naive["update/drift/mean"])


def test_a_prompt_that_does_not_fit_stops_a_run_before_it_begins(tmp_path):
    rows = [{"question": f"{i}+1=", "answer": i + 1} for i in range(12)]
    rows[7]["question"] = "1+" * 40 + "1="
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"name": "math", "files": str(tmp_path / "own.jsonl"), "prompt": "question", "answer": "answer"}
    settings = dict(
        task=task,
        eval={"every": 0},
        rollout={"budget": 16, "prompts": 2, "compressor_options": {"protect_prompt": True}},
    )
    from sparse_rl.train.worker import Sampler

    long_at, resumed = [], []
    check = Sampler.check_prompts_of_files
    with pytest.MonkeyPatch.context() as patch:

        def spy(self, steps_done):
            order = [prompt.text for prompt in self.task.sample(0, 24)]
            long_at.extend(place for place, text in enumerate(order) if len(text) > 40)
            with pytest.raises(SparseRLError) as error:  # as a run says that goes on after the first long prompt
                check(self, long_at[0] // 2 + 1)
            resumed.append(str(error.value))
            check(self, steps_done)

        patch.setattr(Sampler, "check_prompts_of_files", spy)
        with pytest.raises(SparseRLError, match="1 of the next 12 prompts cannot be sampled from") as refused:
            train(recipe(**settings, run={"steps": 18}), tmp_path / "run", show=False)
    assert f"the first in step {long_at[0] // 2 + 1}: " in str(refused.value)
    assert f"the first in step {long_at[1] // 2 + 1}: " in resumed[0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not read_lines(tmp_path / "run" / "metrics.jsonl")
