"""Rewards that are not 0 or 1: named ones are weighted and added, and a task says what counts as right."""

import pytest

from sparse_rl import SparseRLError
from sparse_rl.tasks import Grade, Prompt, Task, make, mean_parts
from tests.helpers.task_files import write

NAMED = """
REWARD_WEIGHTS = {"correct": 2.0}
def prompt(i): return f"{i}+{i}=", 2 * i
def reward(answer, text): return {"correct": float(text.startswith(str(answer))), "brief": -len(text) / 10}
def right(reward, parts): return parts["correct"] == 1
"""


@pytest.fixture
def named(tmp_path):
    return write(tmp_path / "named.py", NAMED)


def test_named_rewards_are_weighted_and_added(named):
    task = make(named, workers=1)
    grades = task.grade([task[2]] * 3, ["4", "4 it is so", "5"])
    assert grades[0] == Grade(2.0 - 0.1, "right", {"correct": 1.0, "brief": -0.1})
    assert grades[1].reward == pytest.approx(2.0 - 1.0) and grades[1].right
    assert grades[2] == Grade(-0.1, "wrong", {"correct": 0.0, "brief": -0.1}) and not grades[2].right
    assert mean_parts(grades) == pytest.approx({"brief": -0.4, "correct": 2 / 3})
    other = make(named, reward_weights={"brief": 0.5, "correct": 1}, workers=1)  # in the grading processes, too
    assert [g.reward for g in other.grade([task[2]] * 2, ["4", "5"])] == [1.0 - 0.05, -0.05]
    assert [g.reward for g in other.held_out().grade([task[2]], ["4"])] == [0.95]


def test_without_a_rule_of_its_own_right_is_a_reward_of_at_least_one(tmp_path):
    task = make(write(tmp_path / "graded.py", "def prompt(i): return 'p', i\ndef reward(a, text): return float(text)"))
    verdicts = [g.verdict for g in task.grade([task[0]] * 5, ["0.99", "1", "3.5", "0", "-2"])]
    assert verdicts == ["partly", "right", "right", "wrong", "wrong"]


def test_a_class_may_say_what_is_right():
    class Half(Task):
        def __getitem__(self, i):
            return Prompt("p", i)

        def reward(self, prompt, text):
            return float(text)

        def right(self, reward, parts):
            return reward >= 0.5

    grades = Half().grade([Prompt("p", 0)] * 3, ["0.5", "0.4", "0"])
    assert [(g.reward, g.verdict) for g in grades] == [(0.5, "right"), (0.4, "partly"), (0.0, "wrong")]


def test_a_part_that_is_missing_counts_as_nothing():
    assert mean_parts([Grade(1.0, "right", {"a": 1.0}), Grade(0.0, "error"), Grade(2.0, "right", {"b": 2.0})]) == {
        "a": 1 / 3,
        "b": 2 / 3,
    }


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "it must name at least one"),
        ({"a b": 1.0}, "use letters, digits, - and _"),
        ({"a": float("nan")}, "the reward 'a' is nan; it must be finite"),
        ({"a": "1"}, "the reward 'a' is '1'; it must be a number"),
        ({"a": 1.0}, "reward_weights has 'b', but the reward has 'a'"),
        (1.0, "reward_weights are for named ones"),
    ],
)
def test_rewards_that_cannot_be_used_cost_the_completion_and_say_why(given, problem):
    class Odd(Task):
        reward_weights = {"b": 1.0}  # noqa: RUF012

        def reward(self, prompt, text):
            return given

    task = Odd()
    assert task.grade([Prompt("p", 0)], ["t"]) == [Grade(0.0, "error")] and problem in task.last_error


def test_weights_that_cannot_be_used_are_refused(named):
    for weights in (3, {"correct": "much"}, {"correct": float("inf")}, {1: 1.0}, {"correct": True}):
        with pytest.raises(SparseRLError, match="reward_weights of the task"):
            make(named, reward_weights=weights)
