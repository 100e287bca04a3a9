"""A model that cannot answer is told so, once, with what is missing and what to do."""

import pytest

from sparse_rl.config import load_recipe, make_recipe
from sparse_rl.tasks.answering import Answers, Names, cannot_answer
from sparse_rl.train.metrics import step_answers
from sparse_rl.train.run import train
from tests.helpers.runs import BASE, run, write_recipe

NAMES = Names("rollout.max_new_tokens", "task.template")
FINE = {"count": 64, "right": 0.3, "cut": 0.1, "no_answer": 0.2, "max_new_tokens": 128, "groups": 8, "flat": 0.5}


@pytest.mark.parametrize(
    ("change", "lacking", "words"),
    [
        ({}, None, ""),
        ({"cut": 0.97, "right": 0.0}, "stops", "97% of 64 completions did not stop within 128 tokens"),
        ({"cut": 0.97, "right": 0.0}, "stops", r"raise rollout.max_new_tokens, warm the model up .*\), or change the"),
        ({"cut": 0.97, "right": 0.6}, None, ""),  # it answers, and goes on talking
        ({"cut": 0.94, "right": 0.0}, None, ""),
        ({"no_answer": 0.96, "right": 0.0}, "answers", "96% of 64 completions give no answer"),
        ({"flat": 1.0, "right": 0.0}, "varies", "100% of 8 groups .* easier problems"),
        ({"flat": 1.0, "right": 1.0}, "varies", "too easy, use harder ones"),
        ({"flat": 1.0, "right": 0.0, "groups": 1}, None, ""),
        ({"flat": 0.9}, None, ""),
        ({"cut": 1.0, "no_answer": 1.0, "right": 0.0, "flat": 1.0}, "stops", "raise rollout.max_new_tokens"),
        ({"cut": 1.0, "no_answer": 1.0, "right": 0.0, "count": 7}, None, ""),
        ({"flat": 1.0, "cut": 1.0, "right": 0.0, "ungraded": {"error": 64}}, "grades", "the reward function fails"),
        ({"flat": 1.0, "right": 0.0, "ungraded": {"error": 1, "timeout": 62}}, "grades", "98% .* takes too long"),
        ({"ungraded": {"bad gold": 64}}, "grades", "100% of 64 completions .* reference answers cannot be read"),
        ({"flat": 1.0, "right": 0.0, "ungraded": {"error": 32}}, "varies", "easier problems"),
        (
            {"cut": 1.0, "right": 0.0, "turns": 4.25},
            "stops",
            r"conversations \(4.2 turns on average\) .* 128 tokens and the turns .*max_new_tokens or rollout.max_turns",
        ),
        ({"ungraded": {"timeout": 64}, "turns": 1.0}, "grades", "the task's reply or its reward function takes too"),
    ],
)
def test_each_thing_that_can_be_missing(change, lacking, words):
    import re

    found = cannot_answer(Answers(**{**FINE, **change}), NAMES)
    assert (found and found[0]) == lacking
    if found is not None:
        assert re.search(words, found[1]) and found[1].endswith(".") and found[1].count(". ") == 0


@pytest.mark.parametrize("returned", ["None", "float('nan')", "'1'"])
def test_a_reward_that_always_fails_is_named_not_the_problems(tmp_path, returned):
    (tmp_path / "mine.py").write_text(
        f"def prompt(i): return f'{{i}}+1=', i + 1\ndef reward(answer, text): return {returned}\n"
    )
    task = {"name": str(tmp_path / "mine.py")}
    few = {"steps": 1, "checkpoint_every": 1, "diagnose": 0, "samples": 0}
    short = {"max_new_tokens": 8, "budget": 24}
    given = write_recipe(tmp_path, task=task, rollout=short, run=few, eval={"every": 0})
    done = run("train", given, "--out", tmp_path / "run")
    told = " ".join(done.stderr.split())
    assert "100% of 16 completions could not be graded" in told and "the reward function fails" in told, told
    assert "grading failed (" in told and "such completions get reward 0 and are counted" in told
    assert "easier problems" not in told and "did not stop" not in told


def test_a_run_names_rewards_that_are_too_large(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def prompt(i): return f'{i}+1=', i + 1\ndef reward(answer, text): return 1e308 * (len(text) % 2 or -1)\n"
    )
    task = {"name": str(tmp_path / "mine.py")}
    given = write_recipe(tmp_path, task=task, rollout={"budget": 24, "temperature": 2.0}, eval={"every": 0})
    done = run("train", given, "--out", tmp_path / "run")
    assert done.returncode == 1 and "the rewards range from -1e+308 to 1e+308" in done.stderr, done.stderr


def test_the_prompts_are_a_remedy_only_where_they_have_a_template():
    cut = Answers(**{**FINE, "cut": 1.0, "right": 0.0})
    assert "change the prompts (task.template)" in cannot_answer(cut, NAMES)[1]
    assert "change the prompts" not in cannot_answer(cut, Names("--max-new-tokens", None))[1]


def test_a_run_and_an_evaluation_say_it_once(tmp_path, capsys):
    plain = {name: section for name, section in BASE.items() if name != "model"}
    few = {"steps": 2, "checkpoint_every": 2, "diagnose": 0, "samples": 0}
    rollout = {**BASE["rollout"], "max_new_tokens": 6}  # too few to finish a sum
    evaluated = {"every": 1, "prompts": 8}
    settings = make_recipe({**plain, "model": {"name": "tiny-sums"}, "rollout": rollout, "run": few, "eval": evaluated})
    train(settings, tmp_path / "run", show=False)
    told = " ".join(capsys.readouterr().err.split())
    assert told.count("did not stop within 6 tokens") == 1 and "after step 0: 100% of 8 completions" in told
    assert "raise rollout.max_new_tokens" in told
    asked = ("--bench", "sums", "--limit", 8, "--max-new-tokens", 6, "--rows", 4, "--out", tmp_path / "eval")
    done = run("eval", "tiny-sums", *asked, "--compressor", "dense")
    assert done.returncode == 0 and "sums, dense: 100% of 8 completions did not stop" in done.stderr
    assert "raise --max-new-tokens" in done.stderr


@pytest.mark.parametrize(
    "keys, said",
    [
        ([], True),
        ([("student.chunks", "[4]"), ("rollout.compressor", "dense"), ("learn.method", "none")], False),
        ([("learn.method", "smd")], False),
    ],
)
def test_where_something_is_distilled_equal_rewards_are_no_reason_to_stop(keys, said):
    recipe = load_recipe("tiny-sums", keys)
    shares = {"reward/right/frac": 1.0, "rollout/truncated/frac": 0.0, "advantage/groups_without_variance/frac": 1.0}
    metrics = {"rollout/trajectories/count": 128.0, **shares}
    found = cannot_answer(step_answers(metrics, recipe.rollout, recipe.distils), NAMES)
    assert (found is not None and found[0] == "varies") == said
