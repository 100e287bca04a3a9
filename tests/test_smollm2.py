"""The SmolLM2 benchmark: what it asks of warm-up, training and evaluation, and what it finds in their folders."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sparse_rl.cli.options import overrides
from sparse_rl.config import load_recipe
from sparse_rl.learn.correct import PRESETS

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import smollm2
from smollm2_report import asked_again, table


def block(task, *options):
    return smollm2.block_of(smollm2.parser().parse_args(["arms", "--task", task, "--budgets", "96", *options]))


@pytest.mark.parametrize("task", smollm2.PROBED)
def test_its_keys_are_keys_of_the_recipes(task):
    asked = block(task, "--data", "somewhere")
    recipe = load_recipe(f"smollm2-{task}", overrides(asked.keys(smollm2.train_keys(asked, 96, "shadow"))))
    assert recipe.rollout.compressor_options == {"protect_prompt": task != "gsm8k"} and recipe.rollout.budget == 96
    warm = load_recipe(f"smollm2-{task}-warmup", overrides(asked.keys(asked.problems_of(5))))
    assert {key: recipe.task.options[key] for key in recipe.task.options if key not in ("seed", "files")}.items() <= (
        warm.task.options.items()  # the same problems, prompts and held-out problems in warm-up and training
    )
    assert warm.rollout.max_new_tokens == recipe.rollout.max_new_tokens
    if task == "gsm8k":
        assert warm.task.options["files"] == recipe.task.options["files"] == "somewhere/train/gsm8k.jsonl"
        assert "seed" not in {**warm.task.options, **recipe.task.options} and warm.task.options["holdout"] == 256
    else:
        assert (warm.task.options["seed"], recipe.task.options["seed"]) == (5, 100)


def test_conversations_are_evaluated_under_the_limits_and_the_options_of_training():
    asked = block("notes", "--option", "forget_given", "1", "--option", "pool", "avg", "--set", "task.likes", "7")
    options = {"protect_prompt": True, "forget_given": 1, "pool": "avg"}
    assert json.loads(asked.cache(96)["rollout.compressor_options"]) == options
    command = smollm2.eval_arguments(asked, Path("model"), 96, Path("out"))
    given = dict(zip(command[2::2], command[3::2]))
    assert (given["--max-turns"], given["--max-given-tokens"], given["--notes.likes"]) == ("9", "512", "7")
    assert (given["--compressor.forget_given"], given["--compressor.pool"]) == ("1", "avg")
    assert given["--rows"] == "128" and block("notes", "--eval-rows", "64").eval_rows == 64


def test_an_arm_may_have_a_compressor_of_its_own_and_every_model_is_evaluated_under_all(tmp_path):
    asked = block("countdown", "--methods", "dense,shadow,snapkv:shadow", "--out", str(tmp_path))
    assert [arm.name for arm in asked.arms()] == ["dense", "shadow-96", "snapkv-shadow-96"]
    keys = smollm2.train_keys(asked, 96, "shadow", "snapkv")
    assert load_recipe("smollm2-countdown", overrides(asked.keys(keys))).rollout.compressor == "snapkv"
    for arm in asked.arms():
        (asked.folder / "runs" / arm.name / "checkpoints" / "step-000003").mkdir(parents=True)
    own, other = (96, None), (96, "snapkv")
    found = {name: (mine, others) for name, _, mine, others in smollm2.evaluated(asked)}
    assert found["warm"] == found["dense"] == ((own, other), ())
    assert found["shadow-96"] == ((own,), (other,)) and found["snapkv-shadow-96"] == ((other,), (own,))
    command = smollm2.eval_arguments(asked, Path("model"), 96, Path("out"), **smollm2.named("snapkv"))
    assert dict(zip(command[2::2], command[3::2]))["--compressor"] == "snapkv"
    for name, cache, accuracy in (("shadow-96", "snapkv-96", 0.25), ("snapkv-shadow-96", "snapkv-96", 0.5)):
        folder = asked.folder / "evals" / name / cache
        folder.mkdir(parents=True)
        bench = {"accuracy": accuracy, "low": 0.1, "high": 0.6}
        (folder / "summary.json").write_text(json.dumps({"benches": [bench]}))
    assert [arm.name for arm in asked.arms() if smollm2.is_evaluated(asked, arm)] == ["snapkv-shadow-96"]
    lines = table(asked.folder, asked.arms(), asked.budgets).splitlines()
    assert lines[0].startswith("| trained with | steps | on dense | on budget 96 | on snapkv-96 | last reward")
    assert "| shadow, budget 96 | 0 |  |  | 25.0% (10.0% to 60.0%) |" in lines[4]
    assert "| snapkv shadow, budget 96 | 0 |  |  | 50.0% (10.0% to 60.0%) |" in lines[5]


def test_methods_have_variants():
    asked = block("countdown", "--methods", "smd-forward,released-mask")
    distilled, masked = (
        load_recipe("smollm2-countdown", overrides(asked.keys(smollm2.train_keys(asked, 96, arm.method))))
        for arm in asked.arms()
    )
    assert (distilled.learn.method, distilled.learn.distill) == ("smd", "shadow-to-dense-forward")
    assert masked.learn.method == "sparse-rl-released"
    changed = masked.learn.resolve_method().correction
    assert changed == replace(PRESETS["sparse-rl-released"], mask_outside=None)


def test_evaluations_of_gsm8k_ask_all_of_its_test_problems():
    asked = block("gsm8k")
    assert [arm.name for arm in asked.arms()] == ["dense", "sparse-rl-released-96", "shadow-96"]
    command = smollm2.eval_arguments(asked, Path("model"), 96, Path("out"))
    given = dict(zip(command[2::2], command[3::2]))
    assert command[:2] == ["eval", "model"] and "--limit" not in given
    assert (given["--bench"], given["--data"], given["--samples"], given["--temperature"]) == (
        "gsm8k",
        "data",
        "2",
        "1",
    )
    assert given["--compressor.protect_prompt"] == "false" and not [
        name for name in given if name.startswith("--gsm8k")
    ]
    greedy = smollm2.eval_arguments(asked, Path("model"), None, Path("out"), temperature=0, samples=1)
    given = dict(zip(greedy[2::2], greedy[3::2]))
    assert (given["--temperature"], given["--samples"], given["--compressor"]) == ("0", "1", "dense")
    other = smollm2.eval_arguments(block("countdown"), Path("model"), None, Path("out"))
    assert "--countdown.seed" in other and other[other.index("--limit") + 1] == "1000" and "--data" not in other


def test_a_warm_up_that_was_stopped_is_found(tmp_path):
    warm = tmp_path / "warm-0"
    assert smollm2.model_of(warm) is None and smollm2.accuracy_of(warm, 4) is None
    (warm / "checkpoints" / "step-000003").mkdir(parents=True)
    lines = [{"step": 3, "eval/dense/accuracy": 0.5}, {"step": 4, "warmup/loss": 1.0}]
    (warm / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert smollm2.model_of(warm) == warm / "checkpoints" / "step-000003" and smollm2.accuracy_of(warm, 4) is None
    with (warm / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "eval/dense/accuracy": 0.25}\n')
    (warm / "config.json").write_text("{}")
    assert smollm2.model_of(warm) == warm and smollm2.accuracy_of(warm, 4) == 0.25


def test_the_best_round_on_a_file_is_the_warm_start_and_the_last_one_on_a_task():
    assert smollm2.chosen_round(block("gsm8k"), [0.03, 0.05, 0.04]) == 1
    assert smollm2.chosen_round(block("gsm8k"), [0.03, None]) == 0
    assert smollm2.chosen_round(block("countdown"), [0.1, 0.3]) == 1
    assert smollm2.chosen_round(block("countdown"), [0.25, 0.7]) == 0


def test_the_report_says_what_the_warm_start_answers_greedily_and_in_eight(tmp_path):
    assert asked_again(tmp_path) == []
    for what, accuracy in (("greedy", 0.05), ("avg8", 0.04)):
        folder = tmp_path / "evals" / "warm" / what
        folder.mkdir(parents=True)
        bench = {"accuracy": accuracy, "low": 0.03, "high": 0.06, "pass_at": {"1": 0.04, "8": 0.2}}
        (folder / "summary.json").write_text(json.dumps({"benches": [bench]}))
    said = "greedy 5.0% (3.0% to 6.0%), avg@8 4.0% (3.0% to 6.0%), pass@8 20.0%"
    assert asked_again(tmp_path) == ["", f"The warm start on the dense cache: {said}."]
