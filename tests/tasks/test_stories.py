"""Stories: solutions earn the reward, nothing else does, the splits share no story, and every equation holds."""

import re

import pytest

from sparse_rl.errors import SparseRLError
from sparse_rl.tasks import Prompt, make
from sparse_rl.tasks.stories import is_held_out, listed, running_sum

SIZES = [dict(), dict(people=2, things=1, steps=1), dict(people=6, things=3, steps=15, highest=50)]


@pytest.mark.parametrize("options", SIZES)
def test_solutions_are_right_and_wrong_answers_are_not(options):
    task = make("stories", **options)
    for prompt in task.sample(0, 200):
        solution, number = task.solution(prompt), prompt.answer["number"]
        assert task.reward(prompt, solution) == 1.0
        assert task.reward(prompt, solution.replace(f"answer: {number}", f"answer: {number + 1}")) == 0.0
        assert task.reward(prompt, solution + "\nanswer: 1000") == 0.0  # the last answer counts
        assert task.reward(prompt, solution.rsplit("\n", 1)[0]) == 0.0  # without an answer there is none


def test_an_answer_is_a_plain_number():
    task, prompt = make("stories"), Prompt("", {"number": 7})
    for text, worth in [
        ("answer: 7", 1),
        ("so\nanswer: 7 \n", 1),
        ("7", 0),
        ("answer: 07", 0),
        ("answer: 7.", 0),
        ("answer: 7 pens", 0),
    ]:
        assert task.reward(prompt, text) == worth, text


@pytest.mark.parametrize("options", SIZES)
def test_every_equation_of_a_solution_holds(options):
    task = make("stories", **options)
    for prompt in task.sample(0, 100):
        solution = task.solution(prompt)
        equations = re.findall(r"(\d+) ([+-]) (\d+) = (\d+)", solution)
        assert len(equations) >= len(prompt.answer["events"])
        assert all(int(a) + (1 if sign == "+" else -1) * int(b) == int(c) for a, sign, b, c in equations)
        assert all(0 <= int(c) <= 99 for *_, c in equations[: len(prompt.answer["events"])])
        assert all(event["text"] in prompt.text and event["text"] in solution for event in prompt.answer["events"])


def test_a_solution_reads_like_this():
    story = {
        "start": [["Nora", "pens", 12], ["Nora", "books", 5], ["Omar", "pens", 7], ["Omar", "books", 9]],
        "events": [
            {
                "text": "Nora gives 4 pens to Omar.",
                "changes": [["Nora", "pens", -4], ["Omar", "pens", 4]],
                "looks_at": None,
            },
            {
                "text": "Omar buys as many books as Nora has.",
                "changes": [["Omar", "books", 5]],
                "looks_at": ["Nora", "books"],
            },
        ],
        "wanted": [["Nora", "books"], ["Omar", "books"]],
        "ones": {"pens": "pen", "books": "book"},
        "number": 19,
    }
    assert make("stories").solution(Prompt("", story)).splitlines() == [
        "Step 1: Nora gives 4 pens to Omar. Nora had 12 pens and now has 12 - 4 = 8. "
        "Omar had 7 pens and now has 7 + 4 = 11.",
        "Step 2: Omar buys as many books as Nora has. Nora has 5 books. Omar had 9 books and now has 9 + 5 = 14.",
        "In the end Nora has 5 books and Omar has 14 books. 5 + 14 = 19.",
        "answer: 19",
    ]
    assert (
        listed(["a"]) == "a"
        and listed(["a", "b", "c"]) == "a, b and c"
        and running_sum([1, 2, 3]) == "1 + 2 = 3, 3 + 3 = 6"
    )


def test_splits_share_no_story_and_are_the_same_every_time():
    task, again = make("stories"), make("stories")
    train, held_out = task.sample(0, 1000), task.held_out().sample(0, 1000)
    assert train == again.sample(0, 1000) and train[700:] == again.sample(700, 300)
    assert held_out == again.held_out().sample(0, 1000)
    for prompts, held in ((train, False), (held_out, True)):
        assert all(is_held_out([count for *_, count in p.answer["start"]]) == held for p in prompts)
    assert len({p.text for p in train}) == len({p.text for p in held_out}) == 1000
    assert not {p.text for p in train} & {p.text for p in held_out}


def test_sizes_that_are_not_known_are_refused():
    for options in (dict(people=1), dict(people=7), dict(things=4), dict(things=0), dict(steps=0), dict(highest=80)):
        with pytest.raises(SparseRLError, match="stories"):
            make("stories", **options)
    with pytest.raises(SparseRLError, match="too few stories"):
        for split in ("train", "held-out"):
            make("stories", people=2, things=1, highest=2, split=split)[0]
