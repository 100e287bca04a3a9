"""The GPU benchmark's plumbing at the smallest size: arms of the distillation grid train, and their table is made."""

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from learning_gpu import STUDIES, Arm, Plan, all_rows, finished_rows, reached, read_run, run, table, warm

from sparse_rl.config import load_recipe
from sparse_rl.train.warmup import warmup

SMALL = {
    "model.dtype": "float32",
    "rollout.rows": "4",
    "rollout.prompts": "2",
    "rollout.group_size": "2",
    "rollout.max_new_tokens": "12",
    "learn.micro_batch_tokens": "4096",
    "learn.minibatches": "1",
    "eval.prompts": "2",
    "eval.samples": "1",
    "run.steps": "1",
    "run.diagnose": "1",
}
TASKS = {"distill": {}, "algorithms": {}, "joint": {}, "checks": {}, "recall-long": {"task.count": "40"}}


def plan_of(study: str, out: Path) -> Plan:
    chosen, more = STUDIES[study], tuple((SMALL | TASKS[study]).items())
    return Plan(chosen, out, chosen.chosen, chosen.methods, 1, 1, 1.0, 0.5, 0.0, more)


def make_warm(plan: Plan, study: str) -> None:
    small = [*SMALL.items(), *TASKS[study].items(), ("model.name", "tiny:1x64@16384"), ("warmup.workers", "0")]
    small += [("warmup.steps", "1"), ("warmup.batch", "2"), ("eval.options", "{}")]
    warmup(load_recipe(plan.study.warmup, small), plan.out / "warm", evaluate=False, show=False)


@pytest.mark.parametrize("study", TASKS)
def test_every_arm_is_a_recipe(study, tmp_path):
    plan = plan_of(study, tmp_path)
    for arm in [Arm(m, s, 0) for m in ("dense", *plan.study.methods) for s in plan.study.settings]:
        recipe = plan.recipe(plan.study.recipe, plan.setting(arm.setting).keys() | plan.study.method(arm.method))
        if study == "algorithms" and arm.method != "dense":
            assert arm.method.split() == [recipe.learn.algorithm, recipe.learn.method] and recipe.rollout.budget == 96
        elif study == "checks" and arm.method in plan.study.variants:
            scored = "always" if arm.method == "rescored" else "auto"
            reference = "dense" if arm.method == "dense-reference" else "view"
            assert (recipe.learn.rescore, recipe.dpo.reference) == (scored, reference)
        elif study == "joint" and arm.method != "dense":
            name, method = arm.method.split()[0], arm.method.split()[-1]
            assert (recipe.rollout.compressor, recipe.learn.method, recipe.rollout.budget) == (name, method, 96)
            assert recipe.scorer.every == (name == "learned") and recipe.rollout.compressor_options["protect_prompt"]
        elif arm.method in plan.study.variants:
            direction, weight = arm.method.rsplit(" ", 1)
            assert (recipe.learn.method, recipe.learn.distill) == ("smd", direction)
            assert recipe.learn.distill_weight == float(weight)
    if study == "distill":
        assert len(plan.arms()) == 11 and recipe.rollout.budget == 96


@pytest.mark.parametrize(
    "study, method",
    [("distill", "shadow-to-dense-reverse 0.01"), ("recall-long", "shadow"), ("joint", "learned shadow")],
)
def test_an_arm_trains_and_is_in_the_table(study, method, tmp_path):
    plan = plan_of(study, tmp_path)
    make_warm(plan, study)
    arm = Arm(method, plan.settings[0], 0)
    run(plan, arm)
    run(plan, arm)  # a run that is over already
    row = read_run(tmp_path / "runs" / arm.name, arm)
    assert row["finished"] and row["steps"] == 1
    assert {"eval/dense/accuracy", "reward/mean"} <= {name for name, curve in row["curves"].items() if curve}
    shown = [r for r in all_rows(Plan(**{**vars(plan), "methods": (method,)}))]
    assert len(shown) == 1 and method in table(shown) and finished_rows(tmp_path) == []


@pytest.mark.parametrize("method", ["dense", "ppo shadow", "online-dpo sparse-rl"])
def test_a_run_that_is_stopped_evaluates_what_it_has_reached_and_goes_on(method, tmp_path, monkeypatch):
    from sparse_rl.train.loop import Trainer

    plan = plan_of("algorithms", tmp_path)
    plan = dataclasses.replace(plan, more=(*plan.more, ("run.steps", "3"), ("eval.every", "3")))
    make_warm(plan, "algorithms")
    arm, step = Arm(method, "dense" if method == "dense" else "rkv 96", 0), Trainer.step

    def stopped(trainer: Trainer) -> None:
        step(trainer)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    try:
        with monkeypatch.context() as patched, pytest.raises(SystemExit) as stop:
            patched.setattr(Trainer, "step", stopped)
            run(plan, arm)
        row = read_run(tmp_path / "runs" / arm.name, arm)
        assert stop.value.code == 130 and not row["finished"] and row["steps"] == 1
        assert [step for step, _ in row["curves"]["eval/dense/accuracy"]] == [0, 1]
        assert list(row["under"]) == (["rkv 96"] if method == "dense" else [])
        run(plan, arm)
    finally:
        signal.signal(signal.SIGTERM, before)
    row = read_run(tmp_path / "runs" / arm.name, arm)
    assert row["finished"] and [step for step, _ in row["curves"]["eval/dense/accuracy"]] == [0, 1, 3]


def test_a_warm_start_that_is_good_enough_is_not_trained_again(tmp_path, capsys):
    plan = dataclasses.replace(plan_of("algorithms", tmp_path), until=0.5)
    (tmp_path / "warm").mkdir()
    assert reached(tmp_path / "warm") == 0.0
    lines = [{"step": 5, "warmup/loss": 1.0}, {"step": 5, "eval/dense/accuracy": 0.6}]
    (tmp_path / "warm" / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    warm(plan)
    assert "a held-out accuracy of 0.600 already" in capsys.readouterr().out
