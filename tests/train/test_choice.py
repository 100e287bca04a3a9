"""A run whose policy chooses its folds: metrics, the price of an entry, resuming to the byte, its folder."""

import copy
import shutil

import pytest
import torch
from safetensors.torch import load_file

from sparse_rl import SparseRLError
from sparse_rl.beacon import add_beacon, add_choice, beacon_of, choice_parameters, mean_chunk
from sparse_rl.config import missing_keys
from sparse_rl.files import read_lines
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.models import load_model
from sparse_rl.records import mean_entries, read_trajectories
from sparse_rl.tasks import Grade
from sparse_rl.train.checkpoint import save_model
from sparse_rl.train.rewards import PriceWatch, with_part
from sparse_rl.train.run import train
from tests.helpers.runs import recipe, run

PRICE = 0.01


@pytest.fixture(scope="module")
def student(tmp_path_factory):
    """The folder of a model with a beacon that has not learned to choose."""
    folder = tmp_path_factory.mktemp("student") / "m"
    model, tokenizer = load_model("tiny-sums")
    save_model(folder, add_beacon(copy.deepcopy(model), (2, 4, 8)), tokenizer)
    return folder


def settings(student, **sections):
    rollout = {"compressor": "beacon:2-8", "compressor_options": {}, "start_chunk": 3.0, "max_new_tokens": 40}
    more = {"model": {"name": str(student)}, "task": {"name": "sums", "entry_price": PRICE}}
    more |= {"rollout": {**rollout, **sections.pop("rollout", {})}, "learn": {"method": "shadow"}}
    return recipe(**{**more, "optimizer": {"lr": 1e-3}, **sections})


@pytest.fixture(scope="module")
def chosen(student, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chosen") / "run"
    train(settings(student), folder, show=False)
    return folder


def test_entries_folds_and_chunks_are_logged(chosen):
    steps = [line for line in read_lines(chosen / "metrics.jsonl") if "reward/mean" in line]
    for line in steps:
        assert line["reward/mean"] == pytest.approx(line["reward/task/mean"] - PRICE * line["reward/entries/mean"])
        assert line["fold/beacons/mean"] > 1 and 2 <= line["fold/chunk/mean"] <= 8
        assert 0.5 < line["fold/chosen/frac"] <= 1
        assert line["fold/entries/mean"] > line["reward/entries/mean"] > 2  # the prompt is not paid for
        assert line["gap/abs/mean"] < 1e-4
    assert steps[0]["fold/chunk/mean"] == pytest.approx(3.0, abs=0.6)
    evaluated = [line for line in read_lines(chosen / "metrics.jsonl") if "eval/sparse/entries" in line]
    assert evaluated and all(line["eval/sparse/entries"] < line["eval/dense/entries"] for line in evaluated)


def test_the_samples_of_a_run_hold_its_choices(chosen, tmp_path):
    found = list(read_trajectories(chosen / "samples" / "step-000001"))
    assert found
    for t in found:
        assert t.choices is not None and (t.sampler_logprobs[t.choices] < 0).all()
        assert mean_entries(t) > t.num_prompt_tokens
    assert run("report", chosen, "--out", tmp_path / "report.html").returncode == 0


def test_a_run_that_was_cut_off_goes_on_to_the_byte(chosen, student, tmp_path):
    shutil.copytree(chosen, tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    train(settings(student), tmp_path / "run", resume=True, show=False)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == (chosen / "metrics.jsonl").read_bytes()
    ours, theirs = (load_file(run / "checkpoints/step-000004/beacon.safetensors") for run in (tmp_path / "run", chosen))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_the_choice_is_learned_and_travels_with_the_model(chosen, tmp_path):
    folder = chosen / "checkpoints" / "step-000004"
    model, _ = load_model(str(folder))
    beacon = beacon_of(model)
    assert beacon.choice == (2, 8) and beacon.choice_weight.abs().max() > 1e-4
    assert mean_chunk(2, 8, beacon.choice_bias.item()) != pytest.approx(3.0, abs=1e-3)
    done = run("export", folder, "--to", tmp_path / "exported")
    assert done.returncode == 0, done.stderr
    again, _ = load_model(str(tmp_path / "exported"))
    assert torch.equal(beacon_of(again).choice_weight, beacon.choice_weight)
    done = run("eval", tmp_path / "exported", "--limit", 4, "--out", tmp_path / "eval")
    assert done.returncode == 0 and "beacon:2-8" in done.stdout, done.stdout + done.stderr
    options = ["--prompts", tmp_path / "prompts.jsonl", "--out", tmp_path / "rolled", "--max-new-tokens", 12]
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+2+3="}\n')
    done = run("rollout", tmp_path / "exported", *options)  # on the cache that it was trained for
    assert done.returncode == 0, done.stderr
    assert all(t.choices is not None for t in read_trajectories(tmp_path / "rolled"))
    plan = run("plan", "--model", "qwen2.5-1.5b", "--compressor", "beacon:4-16", "--gpu-memory", 80).stdout
    assert "prompt + a beacon per 4 to 16 tokens + a chunk" in plan


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"rollout": {"start_chunk": 9.0}},
            "chunks cannot have 9.0 tokens on average, because each has from 2 to 8",
        ),
        ({"rollout": {"compressor": "beacon:2-16"}}, "this student was trained with 2 to 8"),
        ({"learn": {"method": "none"}}, "rollouts with beacons need the shadow view"),
        (
            {"learn": {"method": "shadow", "algorithm": "online-dpo"}, "dpo": {"reference": "dense"}},
            "dpo.reference is dense, but rollouts with beacons have no dense view",
        ),
        ({"model": {"name": "tiny-sums"}}, "this model has no beacon"),
    ],
)
def test_what_cannot_be_chosen_ends_a_run_before_it_begins(student, tmp_path, sections, words):
    with pytest.raises(SparseRLError, match=words):
        train(settings(student, **sections), tmp_path / "run", show=False)


@pytest.mark.parametrize(
    "sections", [{"rollout": {"start_chunk": 1.0}}, {"task": {"name": "sums", "entry_price": -1.0}}]
)
def test_settings_without_a_meaning_are_refused(student, sections):
    with pytest.raises(SparseRLError, match=r"start_chunk is 1.0|entry_price is -1.0"):
        settings(student, **sections)


def test_ppo_and_online_dpo_learn_choices_too(student, tmp_path):
    for algorithm, more in (("ppo", {"ppo": {"critic": "separate"}}), ("online-dpo", {})):
        learn = {"method": "shadow", "algorithm": algorithm}
        short = {"stop": ["5"]}  # so that responses end by themselves, which pairs ask for
        small = {"rollout": short, "run": {"steps": 1, "samples": 0}, "eval": {"every": 0}}
        given = settings(student, learn=learn, **small, **more)
        train(given, tmp_path / algorithm, show=False)
        line = read_lines(tmp_path / algorithm / "metrics.jsonl")[-1]
        assert line["update/grad_norm"] > 0
        beacon = beacon_of(load_model(str(tmp_path / algorithm / "checkpoints" / "step-000001"))[0])
        assert beacon.choice_weight.abs().max() > 0


def test_a_policy_that_chooses_its_folds_draws_from_all_tokens(student, tmp_path):
    with pytest.raises(SparseRLError, match=r"top_p 0.9, but with beacon:2-8 the policy chooses its folds"):
        train(settings(student, rollout={"top_p": 0.9}), tmp_path / "run", show=False)


def test_the_head_of_folds_learns_faster_but_not_in_runs_of_earlier_versions(student):
    model = add_choice(load_model(str(student))[0], 2, 8, 3.0)
    head = choice_parameters(model)
    assert head == [beacon_of(model).choice_weight, beacon_of(model).choice_bias]
    for scale, rates in ((50.0, {1.0, 50.0}), (1.0, {1.0})):
        optimizer = Learner(model, OptimizerSettings(lr=1e-4, choice_scale=scale), Loss()).optimizer
        assert {group["rate"] for group in optimizer.adamw.param_groups} == rates
        before = [p.detach().clone() for p in (*head, model.model.norm.weight)]
        for p in model.parameters():
            p.grad = torch.ones_like(p) * 1e-6  # Adam's first step has the size of the learning rate
        optimizer.step(0)
        moved = [(p - old).abs().max().item() for p, old in zip((*head, model.model.norm.weight), before, strict=True)]
        assert moved == pytest.approx([scale * 1e-4, scale * 1e-4, 1e-4], rel=0.02)
    plain, _ = load_model("tiny-sums")
    assert choice_parameters(plain) == []
    assert missing_keys({"optimizer": {"lr": 1e-4}})["optimizer.choice_scale"][0] == 1.0


def priced(verdict, price, held=5.0, **parts):
    """The grade of a completion with these named rewards and a price on its entries; overlong is the run's."""
    overlong = parts.pop("overlong", None)
    grade = Grade(sum(parts.values()), verdict, parts if len(parts) > 1 else {})
    grade = grade if overlong is None else with_part(grade, "overlong", overlong)
    return with_part(grade, "entries", held, -price)


def said_of(price, *grades, overlong=False):
    return PriceWatch({"entries": -price} | ({"overlong": 1.0} if overlong else {})).after(grades * 4)


@pytest.mark.parametrize(
    "wrong, price, limit", [(0.0, 0.01, None), (0.0, 0.1, None), (0.0, 0.5, 0.2), (-2.0, 0.5, None)]
)
def test_a_price_above_what_a_right_answer_earns_gets_a_sentence(wrong, price, limit):
    """An empty completion is wrong: it gets the least that wrong ones get before they pay."""
    right, better = priced("right", price, task=1.0), priced("wrong", price, task=0.5)
    found = said_of(price, right, priced("wrong", price, task=wrong), better)
    assert (found is None) == (limit is None)
    if limit:
        assert "hold 5.0 cache entries on average and pay 2.50 for them, so their reward is -1.50" in found
        assert "an empty completion, which pays nothing, gets about 0.00" in found
        assert f"set task.entry_price (now 0.5) well below {limit}." in found
    assert said_of(price, better) is None  # nothing is right
    assert (said_of(price, right) is None) == (price < 0.2)  # nothing is wrong


@pytest.mark.parametrize("held", [5.0, 0.0, -100.0])
def test_a_price_that_is_not_the_cause_gets_no_sentence(held):
    """Wrong ones earn more than right ones whatever the price is; or entries cost nothing, or pay."""
    right, wrong = priced("right", 0.01, held, task=0.2), priced("wrong", 0.01, held, task=0.5)
    assert said_of(0.01, right, wrong) is None
    assert said_of(0.01, priced("right", 0.01, held, task=-3.0)) is None
    assert said_of(0.0, priced("right", 0.0, held, task=0.0)) is None


def test_an_empty_completion_gets_nothing_for_its_format_and_no_punishment_for_its_length():
    named = [priced("right", 0.25, correct=1.0, form=0.3), priced("wrong", 0.25, correct=0.0, form=0.3)]
    assert said_of(0.25, *named) is None  # 1.3 - 1.25 is more than 0
    named = [priced("right", 0.5, correct=1.0, form=0.3), priced("wrong", 0.5, correct=0.0, form=0.3)]
    found = said_of(0.5, *named)
    assert "gets about 0.00" in found and "well below 0.26." in found
    long = [priced("right", 0.25, task=1.0, overlong=-0.25), priced("wrong", 0.25, task=0.0, overlong=-1.0)]
    found = said_of(0.25, *long, overlong=True)
    assert "their reward is -0.50" in found and "gets about 0.00" in found and "well below 0.15." in found
    late = [priced("right", 0.01, task=1.0, overlong=-1.0), priced("wrong", 0.01, task=0.0, overlong=-1.0)]
    assert said_of(0.01, *late, overlong=True) is None  # the length costs all, the price nothing


def test_a_price_is_judged_by_several_right_completions():
    watch = PriceWatch({"entries": -0.1})
    dear, cheap, wrong = (priced(*one, task=float(one[0] == "right")) for one in (
        ("right", 0.1, 30.0), ("right", 0.1, 2.0), ("wrong", 0.1)
    ))  # fmt: skip
    said = [watch.after(step) for step in ([dear, wrong], [wrong], [cheap, cheap], [cheap], [dear] * 3, [dear, wrong])]
    assert said[:-1] == [None] * 5  # the first four hold 9 on average, and were judged together
    assert "hold 30.0 cache entries on average" in said[-1]


def test_a_run_says_once_that_its_price_is_too_dear(student, tmp_path, capsys):
    (tmp_path / "all_right.py").write_text(
        "def prompt(i): return f'{i % 9}?', i\ndef reward(answer, text): return 1.0\n"
    )
    task = {"name": str(tmp_path / "all_right.py"), "entry_price": 5.0}
    train(settings(student, task=task, run={"steps": 3, "samples": 0}, eval={"every": 0}), tmp_path / "run", show=False)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("after step 1: right completions hold") == said.count("set task.entry_price (now 5)") == 1
