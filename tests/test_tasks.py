"""Prompts that are the same every time, solutions that earn their reward, and graders that cannot be fooled by form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_rl.errors import SparseRLError
from sparse_rl.records import Prompt
from sparse_rl.tasks import TASKS, make
from sparse_rl.tasks.countdown import evaluate

HARDER = {
    "sums": dict(count=15),
    "countdown": dict(count=6, highest=50),
    "linsys": dict(unknowns=4, highest=9),
    "stargraph": dict(arms=6, length=5, nodes=99),
}


@pytest.mark.parametrize("name", TASKS)
def test_solutions_earn_the_reward_and_prompts_are_fixed(name):
    for options in ({}, HARDER[name]):
        task, again, held_out = make(name, **options), make(name, **options), make(name, split="held-out", **options)
        prompts = task.sample(0, 200)
        assert prompts == again.sample(0, 200)
        assert prompts[150:] == again.sample(150, 50)  # any position can be resumed
        assert len({p.text for p in prompts}) > 190
        assert {p.text for p in prompts} != {p.text for p in held_out.sample(0, 200)}
        assert make(name, seed=1, **options)[0].text != prompts[0].text
        solutions = [task.solution(p) for p in prompts]
        assert task.grade(prompts, solutions) == [1.0] * 200
        assert sum(task.grade(prompts, solutions[1:] + solutions[:1])) < 40  # other prompts' solutions
        for junk in ("", "answer:", "answer: ", "=", "answer: 1e999", "answer: __import__('os')", "answer: (" * 500, "\x00", "a" * 10_000):
            assert task.reward(prompts[0], junk) == 0.0


def test_sums_read_the_end_and_nothing_else():
    task, prompt = make("sums"), Prompt("3+4+1=", [3, 4, 1])
    assert task.solution(prompt) == "3+4=7;7+1=8"
    for text, worth in [("=8", 1), ("3+4=7;7+1=8", 1), ("8", 0), ("=8 ", 0), ("=8;", 0), ("=08", 0), ("=88", 0), ("=8\n", 0), ("=9;=8", 1)]:
        assert task.reward(prompt, text) == worth, text
    sums = make("sums")
    assert all(len(p.text) == 16 for p in sums.sample(0, 50))


def test_countdown_uses_every_number_once():
    task = make("countdown")
    prompt = Prompt("", {"numbers": [3, 7, 8, 2], "target": 34})
    for expression, worth in [
        ("(7-3)*8+2", 1),
        ("2+8*(7-3)", 1),
        ("(7-3)*8+2 ", 1),
        ("34", 0),
        ("(7-3)*8+1+1", 0),
        ("(7-3)*8+2+0", 0),
        ("(7-3)*8", 0),
        ("(7-3)**8+2", 0),
        ("(7-3)*8+2=34", 0),
        ("7/0", 0),
        ("-(3-7)*8+2", 0),
    ]:
        assert task.reward(prompt, f"thinking\nanswer: {expression}\n") == worth, expression
    assert task.reward(prompt, "answer: (7-3)*8+2\nanswer: 34") == 0  # the last answer counts
    assert task.reward(Prompt("", {"numbers": [6, 4, 3], "target": 2}), "answer: 6/3*4/4") == 0
    assert task.reward(Prompt("", {"numbers": [8, 3, 8, 3], "target": 24}), "answer: 8/(3-8/3)") == 1  # fractions on the way are exact


@given(st.text(max_size=60))
def test_evaluating_never_raises(text):
    evaluate(text)


def test_linsys_and_stargraph_want_the_whole_answer():
    linsys, prompt = make("linsys"), Prompt("", {"values": [2, -3], "rows": [[2, 1, 1], [1, -1, 5]]})
    for text, worth in [
        ("x=2 y=-3", 1),
        ("y=-3 x=2", 1),
        ("x=2", 0),
        ("x=2 y=3", 0),
        ("x=2 y=-3 z=1", 0),
        ("x=2, y=-3", 0),
        ("x=2 x=2 y=-3", 0),
    ]:
        assert linsys.reward(prompt, f"answer: {text}") == worth, text
    assert linsys.solution(prompt).endswith("answer: x=2 y=-3")
    star, prompt = make("stargraph"), Prompt("", [4, 1, 9])
    for text, worth in [("4 1 9", 1), ("4  1 9", 1), ("4 9", 0), ("9 1 4", 0), ("4 1 9 9", 0), ("04 1 9", 0)]:
        assert star.reward(prompt, f"answer: {text}") == worth, text


def test_bad_options_are_told():
    for name, options, message in [
        ("sums", dict(count=1), "count is 1"),
        ("countdown", dict(count=1), "count 1"),
        ("linsys", dict(unknowns=9), "unknowns 9 must be 2 to 6"),
        ("stargraph", dict(arms=10, length=10), "need 101 nodes, but nodes is 50"),
    ]:
        with pytest.raises(SparseRLError, match=message):
            make(name, **options)
    with pytest.raises(SparseRLError, match="'countdwon'; did you mean 'countdown'"):
        make("countdwon")
