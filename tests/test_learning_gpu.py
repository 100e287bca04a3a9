"""The GPU benchmark's plumbing at the smallest size: arms of the distillation grid train, and their table is made."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from learning_gpu import STUDIES, Arm, Plan, all_rows, finished_rows, read_run, run, table

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
TASKS = {"distill": {}, "recall-long": {"task.count": "40"}}


def plan_of(study: str, out: Path) -> Plan:
    chosen, more = STUDIES[study], tuple((SMALL | TASKS[study]).items())
    return Plan(chosen, out, chosen.chosen, chosen.methods, 1, 1, 1.0, 0.0, more)


@pytest.mark.parametrize("study", ["distill", "recall-long"])
def test_every_arm_is_a_recipe(study, tmp_path):
    plan = plan_of(study, tmp_path)
    for arm in [Arm(m, s, 0) for m in ("dense", *plan.study.methods) for s in plan.study.settings]:
        recipe = plan.recipe(plan.study.recipe, plan.setting(arm.setting).keys() | plan.study.method(arm.method))
        if arm.method in plan.study.variants:
            direction, weight = arm.method.rsplit(" ", 1)
            assert (recipe.learn.method, recipe.learn.distill) == ("smd", direction)
            assert recipe.learn.distill_weight == float(weight)
    if study == "distill":
        assert len(plan.arms()) == 11 and recipe.rollout.budget == 96


@pytest.mark.parametrize("study, method", [("distill", "shadow-to-dense-reverse 0.01"), ("recall-long", "shadow")])
def test_an_arm_trains_and_is_in_the_table(study, method, tmp_path):
    plan = plan_of(study, tmp_path)
    small = [*SMALL.items(), *TASKS[study].items(), ("model.name", "tiny:1x64@16384"), ("warmup.workers", "0")]
    small += [("warmup.steps", "1"), ("warmup.batch", "2"), ("eval.options", "{}")]
    warmup(load_recipe(plan.study.warmup, small), tmp_path / "warm", evaluate=False, show=False)
    arm = Arm(method, plan.settings[0], 0)
    run(plan, arm)
    run(plan, arm)  # a run that is over already
    row = read_run(tmp_path / "runs" / arm.name, arm)
    assert row["finished"] and row["steps"] == 1
    assert {"eval/dense/accuracy", "reward/mean"} <= {name for name, curve in row["curves"].items() if curve}
    shown = [r for r in all_rows(Plan(**{**vars(plan), "methods": (method,)}))]
    assert len(shown) == 1 and method in table(shown) and finished_rows(tmp_path) == []
