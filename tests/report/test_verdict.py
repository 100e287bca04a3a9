"""Verdicts: every rule changes its level at its thresholds, and knows its exceptions."""

import math
import re
from pathlib import Path

import numpy as np
import pytest

from sparse_rl.report.aim import UNKNOWN, Aim, aim_of
from sparse_rl.report.curves import Curve
from sparse_rl.report.thresholds import THRESHOLDS
from sparse_rl.report.verdict import verdict


def curves(**named):
    """Curves of 50 points: a number all along, or (first half, second half)."""
    found = {}
    for name, value in named.items():
        first, second = value if isinstance(value, tuple) else (value, value)
        values = np.array([first] * 25 + [second] * 25, dtype=np.float64)
        found[name.replace("__", "/")] = Curve(np.arange(1, 51), values)
    return found


ONE = {  # rule -> (curves whose number is x, its figure)
    "reject": (lambda x: curves(reject__trajectories__frac=x), "reject/trajectories/frac"),
    "rewarded": (
        lambda x: curves(reject__rewarded__frac=0.2 * x, reject__unrewarded__frac=0.2),
        "reject/rewarded/frac",
    ),
    "alpha": (lambda x: curves(gap__alpha__p05=x, old__entropy__mean=0.5), "gap/alpha/p05"),
    "xi_low": (lambda x: curves(gap__xi__p05=x), "gap/xi/p05"),
    "xi_high": (lambda x: curves(gap__xi__p95=x), "gap/xi/p95"),
    "ess": (lambda x: curves(gap__ess__frac=x), "gap/ess/frac"),
    "loops": (lambda x: curves(rollout__loops__frac=x), "rollout/loops/frac"),
    "truncated": (lambda x: curves(rollout__truncated__frac=x), "rollout/truncated/frac"),
    "collapse": (lambda x: curves(old__entropy__mean=(2.0, 2.0 * x)), "old/entropy/mean"),
    "explosion": (lambda x: curves(old__entropy__mean=(2.0, 2.0 * x)), "old/entropy/mean"),
    "clip": (lambda x: curves(update__clip__frac=x), "update/clip/frac"),
    "norm": (lambda x: curves(update__grad_norm=(0.1, 0.1 * x)), "update/grad_norm"),
    "skipped": (lambda x: curves(update__skipped__count=x), "update/skipped/count"),
    "empty": (lambda x: curves(update__empty__count=x), "update/empty/count"),
    "flat": (lambda x: curves(advantage__groups_without_variance__frac=x), "advantage/groups_without_variance/frac"),
    "gap": (lambda x: curves(eval__dense__accuracy=(0.5, 0.5 + x), eval__sparse__accuracy=0.5), "eval/sparse/accuracy"),
    "behind": (lambda x: curves(eval__dense__accuracy=0.5 + x, eval__sparse__accuracy=0.5), "eval/sparse/accuracy"),
    "held_out": (lambda x: curves(eval__dense__accuracy=(0.5, 0.5 - x)), "eval/dense/accuracy"),
    "held_out_reward": (
        lambda x: curves(eval__dense__reward=(-1 + x, -1.0), eval__dense__accuracy=0.5),
        "eval/dense/reward",
    ),
    "memory": (lambda x: curves(cache__bytes_saved__frac=x, cache__tokens_saved__frac=0.5), "cache/bytes_saved/frac"),
    "rollout": (lambda x: curves(time__rollout=2.0 * x, time__step=2.0), "time/rollout"),
    "waits": (lambda x: curves(talk__wait__seconds=2.0 * x, time__rollout=2.0), "talk/wait/seconds"),
    "ungraded": (
        lambda x: curves(grade__error__count=100.0 * x, rollout__trajectories__count=100.0),
        "grade/error/count",
    ),
    "student": (lambda x: curves(student__c8__kl=(0.5, 0.5 * x)), "student/c8/kl"),
}
AIMS = {"behind": Aim("shadow", small=True)}  # rule -> the runs that it is about


@pytest.mark.parametrize("rule", [rule for rule in THRESHOLDS if rule != "reward"])
def test_each_rule_turns_at_its_thresholds(rule):
    (make, figure), aim = ONE[rule], AIMS.get(rule, UNKNOWN)
    warn, fail = THRESHOLDS[rule]
    step = 1e-3 if fail > warn else -1e-3  # towards fail

    def said(x):
        return next((s["level"] for s in verdict(make(x), aim) if s["figure"] == figure), "good")

    assert said(warn - step) == "good" and said(warn + step) == "warn"
    if math.isfinite(fail):
        assert said(fail - step) == "warn" and said(fail + step) == "fail"
    worst = next(s for s in verdict(make(warn + step), aim) if s["figure"] == figure)
    assert math.isfinite(worst["value"]) and any(c.isdigit() for c in worst["text"])
    assert verdict({name: Curve(c.step, c.value * np.nan) for name, c in make(warn + step).items()}) == []
    for name in make(warn):
        verdict({other: c for other, c in make(warn).items() if other != name})


def test_reward_is_compared_with_its_noise():
    noise = np.random.default_rng(0).normal(size=50)
    noise[:10] = (noise[:10] - noise[:10].mean()) / noise[:10].std(ddof=1)
    noise[-10:] = (noise[-10:] - noise[-10:].mean()) / noise[-10:].std(ddof=1)
    error = math.sqrt(2 / 10)
    for times, expected in ((2.1, "good"), (1.9, "warn"), (-1.9, "warn"), (-2.1, "fail")):
        values = noise + np.where(np.arange(50) >= 40, times * error, 0.0)
        (said,) = verdict({"reward/mean": Curve(np.arange(50), values)})
        assert said["level"] == expected and said["value"] == pytest.approx(times * error, abs=1e-5)
    assert [s["level"] for s in verdict(curves(reward__mean=(0.0, 1.0)))] == ["good"]
    assert [s["level"] for s in verdict(curves(reward__mean=0.5))] == ["warn"]
    assert verdict({"reward/mean": Curve(np.arange(14), np.arange(14.0))}) == []


def test_exceptions_to_the_thresholds():
    sure = verdict(curves(gap__alpha__p05=0.99, old__entropy__mean=0.019))
    assert [s["level"] for s in sure if s["figure"] == "gap/alpha/p05"] == ["warn"] and "says nothing here" in sure[0][
        "text"
    ]
    assert all(s["level"] == "good" for s in verdict(curves(gap__alpha__p05=0.99, old__entropy__mean=0.021)))
    assert verdict(curves(cache__bytes_saved__frac=0.0, cache__tokens_saved__frac=0.0)) == []  # dense on purpose
    assert all(
        s["level"] == "good" for s in verdict(curves(old__entropy__mean=(0.05, 0.25)))
    )  # five times little is little
    assert verdict(curves(reject__rewarded__frac=0.04, reject__unrewarded__frac=0.0)) == []
    assert [s["level"] for s in verdict(curves(reject__rewarded__frac=0.06, reject__unrewarded__frac=0.0))] == ["warn"]
    hard = verdict(curves(advantage__groups_without_variance__frac=0.9, reward__right__frac=0.02))
    assert "too hard" in hard[0]["text"] and hard[0]["level"] == "fail"
    assert verdict({}) == []
    mixed = verdict(curves(reject__trajectories__frac=0.9, rollout__loops__frac=0.0, update__clip__frac=0.1))
    assert [s["level"] for s in mixed] == ["fail", "warn", "good"]


def test_conversations_are_told_of_their_turns_and_replies():
    cut = {"rollout__truncated__frac": 1.0, "grade__error__count": 2.0, "rollout__trajectories__count": 8.0}
    plain = " ".join(s["text"] for s in verdict(curves(**cut)))
    assert "max_turns" not in plain and "fix the grader" in plain
    said = " ".join(s["text"] for s in verdict(curves(**cut, talk__turns__mean=4.25, talk__error__count=2.0)))
    assert "100.0% of the conversations, of 4.2 turns, are cut by a limit" in said
    assert "raise rollout.max_new_tokens or rollout.max_turns" in said
    assert "100 of 400 completions could not be graded (error 100)" in said
    assert "in 100 of them the task's reply failed: fix it" in said and "fix the grader" not in said


def test_accuracies_that_say_nothing_are_not_called_good():
    (never,) = verdict(curves(eval__dense__accuracy=0.0, eval__sparse__accuracy=0.0, eval__dense__reward=0.0))
    assert never["level"] == "warn" and "Nothing is right in any of the 50 evaluations" in never["text"]
    said = [s["text"] for s in verdict(curves(eval__dense__accuracy=0.5, eval__sparse__accuracy=(0.5, 0.555)))]
    assert said == [
        "Held-out accuracy on the dense cache stayed at 0.500 between steps 1 and 50.",
        "Held-out accuracy on the small cache went from 0.500 to 0.555 between steps 1 and 50; it is 0.055 higher than "
        "on the dense cache (at the start the same).",
    ]


SMALL, DENSE = "eval/sparse/accuracy", "eval/dense/accuracy"


def held_out(dense, sparse, aim):
    """figure -> its sentence, of three evaluations on each cache."""
    steps = np.array([0, 10, 20])
    told = verdict({DENSE: Curve(steps, np.array(dense)), SMALL: Curve(steps, np.array(sparse))}, aim)
    assert len(told) == 2  # both caches, whatever became of them
    return {s["figure"]: s for s in told}


def test_a_run_is_judged_on_the_cache_that_it_is_for():
    fell, rose = (0.531, 0.4, 0.2), (0.2, 0.3, 0.4)
    for method in ("shadow", "smd"):
        aim = aim_of({"learn": {"method": method}, "eval": {"prompts": 200}})
        told = held_out(fell, rose, aim)
        assert told[SMALL]["level"] == "good" and told[DENSE]["level"] == "warn"  # never fail: it is not for this cache
        assert "trains the small cache" in told[DENSE]["text"]
        told = held_out(rose, fell, aim)
        assert told[SMALL]["level"] == "fail" and told[DENSE]["level"] == "good"
        assert "learn.method" not in told[SMALL]["text"]
        told = held_out((0.5, 0.5, 0.55), (0.06, 0.08, 0.09), aim)  # it rose, and is still useless
        assert told[SMALL]["level"] == "warn" and "0.460 lower than on the dense cache" in told[SMALL]["text"]
    for method in ("naive", "none", "tis", "sparse-rl"):
        aim = aim_of({"learn": {"method": method}, "eval": {"prompts": 200}})
        told = held_out(fell, rose, aim)
        assert told[DENSE]["level"] == "fail" and told[SMALL]["level"] == "good"
        assert ("sparse-rl" in told[DENSE]["text"]) == (method != "sparse-rl")
        assert "went from 0.200 to 0.400" in told[SMALL]["text"]
        told = held_out(fell, (0.5, 0.3, 0.2), aim)  # both fell
        assert [told[DENSE]["level"], told[SMALL]["level"]] == ["fail", "warn"]


@pytest.mark.parametrize("aim", [Aim("sparse-rl", problems=64), Aim("shadow", small=True, problems=64)])
def test_a_small_cache_that_the_dense_one_falls_to_is_not_good(aim):
    told = held_out((0.5, 0.3, 0.062), (0.062, 0.062, 0.062), aim)
    assert told[SMALL]["level"] == "warn" and told[DENSE]["level"] != "good"
    assert "which fell from 0.500 to 0.062" in told[SMALL]["text"]
    assert held_out((0.5, 0.5, 0.5), (0.45, 0.45, 0.45), aim)[SMALL]["level"] == "good"


def test_the_numbers_beside_a_metric_are_its_last_evaluation():
    for aim in (Aim("shadow", small=True), Aim("sparse-rl")):
        told = held_out((0.4, 0.5, 0.47), (0.25, 0.3, 0.46), aim)
        assert told[DENSE]["value"] == 0.47 and told[SMALL]["value"] == 0.46
        assert "went from 0.400 to 0.470 between steps 0 and 20" in told[DENSE]["text"]
        assert "went from 0.250 to 0.460 between steps 0 and 20" in told[SMALL]["text"]
    rewards = {
        f"eval/dense/{name}": Curve(np.arange(6), np.arange(6.0) / by) for name, by in (("reward", 5), ("accuracy", 9))
    }
    (said,) = [s for s in verdict(rewards) if s["figure"] == "eval/dense/reward"]
    assert "went from 0.100 to 0.900 (means of the first 2 and the last 2 evaluations)" in said["text"]


@pytest.mark.parametrize(("problems", "expected"), [(16, "good"), (64, "good"), (2000, "warn"), (None, "warn")])
def test_a_fall_that_may_be_chance_is_no_warning(problems, expected):
    told = held_out((0.531, 0.422, 0.453), (0.5, 0.5, 0.5), Aim("sparse-rl", problems=problems))
    assert told[DENSE]["level"] == expected
    assert (f"{problems:,} problems" if problems else "between steps 0 and 20:") in told[DENSE]["text"]


def test_chance_covers_what_two_evaluations_of_one_model_differ_by():
    draw = np.random.default_rng(0)
    for problems, share in ((32, 0.05), (64, 0.5), (500, 0.2)):
        pairs = draw.binomial(problems, share, size=(2000, 2)) / problems
        beyond = [abs(a - b) > Aim(problems=problems).chance((a, b)) for a, b in pairs.tolist()]
        assert np.mean(beyond) < 0.06


def test_no_method_is_advised_to_those_who_use_it():
    bad = curves(
        reject__trajectories__frac=0.9,
        reject__rewarded__frac=0.9,
        reject__unrewarded__frac=0.1,
        gap__alpha__p05=0.1,
        old__entropy__mean=0.5,
        eval__dense__accuracy=(0.6, 0.2),
        eval__sparse__accuracy=(0.6, 0.1),
    )
    for method in ("shadow", "smd", "tis", "mis", "naive", "sparse-rl", "sparse-rl-released"):
        for text in (s["text"] for s in verdict(bad, aim_of({"learn": {"method": method}}))):
            advised = text.partition("learn.method: ")[2].rstrip(".)").split(" or ")
            assert method not in advised, text
            assert not (method == "smd" and "shadow" in advised), text
    (alpha,) = [s for s in verdict(bad, Aim("shadow", small=True)) if s["figure"] == "gap/alpha/p05"]
    assert alpha["level"] == "warn"  # the learner sees what the sampler saw


def test_students_are_judged_on_their_own_evaluations():
    told = verdict(curves(eval__dense__accuracy=0.6, eval__c8__accuracy=(0.1, 0.3)), Aim(problems=100))
    (said,) = [s for s in told if s["figure"] == "eval/c8/accuracy"]
    assert said["level"] == "warn" and said["value"] == 0.3 and "of student c8 went from 0.100 to 0.300" in said["text"]
    told = verdict(curves(eval__dense__accuracy=0.6, eval__c8__accuracy=(0.6, 0.2)), Aim(problems=100))
    assert told[0]["level"] == "fail" and "lower student.lr" in told[0]["text"]


def test_the_aim_of_recipes_in_any_state():
    assert aim_of({}) == UNKNOWN
    learn = {"method": "none", "view": "shadow"}
    assert aim_of({"learn": learn, "eval": {"prompts": 64}, "task": {"holdout": 40}}) == Aim("none", True, 40)
    other = {"prompts": 64, "options": {"files": "test.jsonl"}}
    assert aim_of({"learn": learn, "eval": other, "task": {"holdout": 40}}).problems == 64
    assert aim_of({"learn": {"method": "shadow"}, "rollout": {"compressor": "dense"}}) == Aim("dense")
    assert aim_of({"learn": {"method": ["a"], "view": 3}, "eval": {"prompts": "many"}}).problems is None


def test_numbers_that_look_alike_are_not_called_a_range():
    def said(low, high):
        return verdict(curves(gap__xi__p05=low, gap__xi__p95=high))[-1]["text"]

    assert said(1.0, 1.0) == "xi of nine tokens in ten is 1: the learner agrees with the sampler."
    assert said(0.9995, 1.0003) == "xi of nine tokens in ten is 1 to within 0.0005."
    assert said(0.95, 1.02) == "xi of nine tokens in ten lies between 0.95 and 1.02, near 1."
    (still,) = verdict(curves(reward__mean=0.0, reward__right__frac=0.0))
    assert still["level"] == "warn" and "Reward is 0.000 in every step" in still["text"] and "warm" in still["text"]
    (solved,) = verdict(curves(reward__mean=1.0, reward__right__frac=1.0))
    assert "use harder problems" in solved["text"]
    assert verdict(curves(old__entropy__mean=0.5))[0]["text"] == "Entropy stayed at 0.500 nats."


def test_only_the_last_fifth_is_now():
    values = np.array([0.9] * 40 + [0.01] * 10)
    (said,) = verdict({"reject/trajectories/frac": Curve(np.arange(50), values)})
    assert said["level"] == "good" and said["value"] == 0.01


def test_alpha_is_healthy_where_the_page_of_metrics_says_so():
    page = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
    (healthy,) = re.findall(r"^\| `gap/alpha/p05`[^|]*\| above ([0-9.]+) \|", page, flags=re.MULTILINE)
    assert THRESHOLDS["alpha"][0] == float(healthy)


def test_every_rule_has_a_test():
    assert set(ONE) | {"reward"} == set(THRESHOLDS)
