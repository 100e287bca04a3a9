"""Generated tasks: prompts are the same every time, solutions earn the reward, and graders cannot be fooled by form."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_rl.errors import SparseRLError
from sparse_rl.tasks import TASKS, GeneratedTask, Grade, Prompt, describe, make
from sparse_rl.tasks.countdown import evaluate, search

RIGHT, WRONG, ERROR, TIMEOUT = Grade(1.0, "right"), Grade(0.0, "wrong"), Grade(0.0, "error"), Grade(0.0, "timeout")
CONVERSATIONS = ("calculator", "guess", "notes")  # in test_conversing.py
GENERATED = [name for name, cls in TASKS.items() if issubclass(cls, GeneratedTask) and name not in CONVERSATIONS]

HARDER = {
    "sums": dict(count=15),
    "countdown": dict(count=6, highest=50),
    "linsys": dict(unknowns=4, highest=9),
    "stargraph": dict(arms=6, length=5, nodes=99),
    "recall": dict(count=[40, 1400], queries=8, filler=16, letters=3, depth=[0.0, 0.25], lookalikes=4),
    "stories": dict(people=5, things=3, steps=12, highest=40),
}


@pytest.mark.parametrize("name", GENERATED)
def test_solutions_earn_the_reward_and_prompts_are_fixed(name):
    for options in ({}, HARDER[name]):
        task, again, held_out = make(name, **options), make(name, **options), make(name, split="held-out", **options)
        prompts = task.sample(0, 200)
        assert prompts == again.sample(0, 200)
        assert prompts[150:] == again.sample(150, 50)  # any position can be resumed
        assert len({p.text for p in prompts}) > 190
        assert {p.text for p in prompts} != {p.text for p in held_out.sample(0, 200)}
        assert (
            task.held_out().sample(0, 200) == held_out.sample(0, 200) == type(task)(**options).held_out().sample(0, 200)
        )
        assert make(name, seed=1, **options)[0].text != prompts[0].text
        solutions = [task.solution(p) for p in prompts]
        assert task.grade(prompts, solutions) == [RIGHT] * 200
        assert (
            sum(grade.reward for grade in task.grade(prompts, solutions[1:] + solutions[:1])) < 40
        )  # other prompts' solutions
        for junk in (
            "",
            "answer:",
            "answer: ",
            "=",
            "answer: 1e999",
            "answer: __import__('os')",
            "answer: (" * 500,
            "\x00",
            "a" * 10_000,
        ):
            assert task.reward(prompts[0], junk) == 0.0


def test_sums_read_the_end_and_nothing_else():
    task, prompt = make("sums"), Prompt("3+4+1=", [3, 4, 1])
    assert task.solution(prompt) == "3+4=7;7+1=8"
    for text, worth in [
        ("=8", 1),
        ("3+4=7;7+1=8", 1),
        ("8", 0),
        ("=8 ", 0),
        ("=8;", 0),
        ("=08", 0),
        ("=88", 0),
        ("=8\n", 0),
        ("=9;=8", 1),
    ]:
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
    assert (
        task.reward(Prompt("", {"numbers": [8, 3, 8, 3], "target": 24}), "answer: 8/(3-8/3)") == 1
    )  # fractions on the way are exact


def test_a_countdown_search_shows_its_dead_ends_in_a_fixed_order():
    assert search([4, 9, 2], 10).splitlines() == [
        *("9+4=13 left 2 13", "13+2=15 no", "13-2=11 no", "13*2=26 no"),
        *("9-4=5 left 2 5", "5+2=7 no", "5-2=3 no", "5*2=10 yes"),
        "answer: ((9-4)*2)",
    ]
    assert search([1, 23, 2], 20).splitlines() == [
        *("23+1=24 left 2 24", "24+2=26 no", "24-2=22 no", "24/2=12 no"),  # above 20 nothing is multiplied
        *("23-1=22 left 2 22", "22+2=24 no", "22-2=20 yes"),
        "answer: ((23-1)-2)",
    ]
    assert "\n6/3=2 left 12 2\n12+2=14 no\n12-2=10 no\n12*2=24 yes\nanswer: (12*(6/3))" in search([6, 3, 12], 24)


def test_countdown_searches_are_long():
    """Of three results the one that is found last is asked for: twice what one drawn first would take."""
    task = make("countdown", count=3, highest=25, search=640)
    lengths = [len(task.solution(prompt)) for prompt in task.sample(0, 300)]
    assert 260 < sum(lengths) / 300 < 330


@pytest.mark.parametrize(
    "options",
    [
        dict(count=3, highest=25, search=640),
        dict(count=3, highest=9, search=200),
        dict(count=4, highest=6, search=3000),
    ],
)
def test_countdown_searches_find_their_target_within_the_limit(options):
    task, again = make("countdown", **options), make("countdown", **options)
    prompts, held_out = task.sample(0, 500), task.held_out().sample(0, 500)
    assert prompts == again.sample(0, 500) and prompts[300:] == again.sample(300, 200)
    solutions = [task.solution(p) for p in prompts]
    assert task.grade(prompts, solutions) == [RIGHT] * 500
    assert len({len(p.text) for p in prompts}) == 1
    assert options["search"] // 2 < max(map(len, solutions)) <= options["search"]
    for prompt, solution in zip(prompts, solutions):
        lines = re.findall(r"(\d+)(.)(\d+)=(\d+) (left|no|yes)", solution)
        assert len(lines) == len(solution.splitlines()) - 1 and [line[4] for line in lines].count("yes") == 1
        for x, operation, y, value, end in lines:
            assert evaluate(f"{x}{operation}{y}")[0] == int(value)
            assert end == "left" or (int(value) == prompt.answer["target"]) == (end == "yes")
    seen, asked = ({tuple(sorted(p.answer["numbers"])) for p in some} for some in (prompts, held_out))
    assert (
        len(seen) > 50 and len(asked) > 10 and not seen & asked
    )  # numbers held out never come in training, in any order


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


def test_recall_asks_for_pairs_that_are_there():
    """The question, read back from the prompt's text, is answered by the pairs listed there."""
    task = make("recall")
    for prompt in task.sample(0, 20):
        listed, question, rest = prompt.text.split("\n")
        pairs = {pair[:2]: pair[2:] for pair in listed.split()}
        assert len(pairs) == 200 and len(prompt.text) == 5 * 200 + 3 * 4 and rest == ""
        assert {key: pairs[key] for key in question.split()} == prompt.answer
    assert (
        len({position for p in task.sample(0, 200) for position in [p.text.index(next(iter(p.answer)))]}) > 100
    )  # anywhere in the list
    prompt = Prompt("Qk58 Bt10 Xm99\nXm Qk\n", {"Xm": "99", "Qk": "58"})
    assert task.solution(prompt) == "Xm99 Qk58\nanswer: 99 58"
    for text, worth in [
        ("99 58", 1),
        ("99  58 ", 1),
        ("58 99", 0),
        ("99", 0),
        ("99 58 10", 0),
        ("9958", 0),
        ("Xm99 Qk58", 0),
    ]:
        assert task.reward(prompt, f"Xm99 Qk58\nanswer: {text}") == worth, text


def test_recall_draws_short_prompts_as_often_as_long_ones():
    lengths = [prompt.text.count(" ") - 7 + 1 for prompt in make("recall", count=[8, 128], queries=8).sample(0, 800)]
    assert min(lengths) >= 8 and max(lengths) <= 128
    assert 340 < sum(length < 32 for length in lengths) < 460  # two doublings of four
    assert all(p.text.endswith("\n...") for p in make("recall", filler=3).sample(0, 5))


def test_recall_puts_answers_far_from_the_question_among_lookalikes():
    task = make("recall", count=1400, queries=2, letters=3, depth=[0, 0.25], lookalikes=4)
    for prompt in task.sample(0, 10):
        listed, question, _ = prompt.text.split("\n")
        pairs = {pair[:3]: pair[3:] for pair in listed.split()}
        assert len(pairs) == 1400 and len(prompt.text) > 8400
        assert {key: pairs[key] for key in question.split()} == prompt.answer
        for key in prompt.answer:
            assert prompt.text.index(key) < 0.25 * len(listed) + 7, "in the first quarter"
            alike = [k for k in pairs if k != key and (k[:2] == key[:2] or k[1:] == key[1:])]
            assert len(alike) >= 4
    plain, old = make("recall", count=50), make("recall", count=50, letters=2, depth=(0, 1), lookalikes=0)
    assert plain.sample(0, 5) == old.sample(0, 5)


def test_recall_uses_characters_of_the_tiny_model():
    from sparse_rl.models import tiny_tokenizer

    task, tokenizer = make("recall", count=40, filler=2), tiny_tokenizer()
    for prompt in task.sample(0, 20):
        for text in (prompt.text, task.solution(prompt)):
            tokens = tokenizer.encode(text)
            assert len(tokens) == len(text) and tokenizer.decode(tokens) == text


def test_bad_options_are_told():
    for name, options, message in [
        ("sums", dict(count=1), "count is 1"),
        ("countdown", dict(count=1), "count is 1"),
        ("countdown", dict(search=-1), "search is -1"),
        ("linsys", dict(unknowns=9), "unknowns 9 must be 2 to 6"),
        ("stargraph", dict(arms=10, length=10), "need 101 nodes, but nodes is 50"),
        ("recall", dict(count=3), "4 queries among 3 to 3 pairs"),
        ("recall", dict(count=[50, 20]), "4 queries among 50 to 20 pairs"),
        ("recall", dict(count=700), "at most 676 pairs"),
        ("recall", dict(count=[5, 6, 7]), r"the task recall cannot use the options \{'count': \[5, 6, 7\]\}"),
        ("recall", dict(filler=-1), "filler is -1"),
        ("recall", dict(letters=4), "letters is 4; it must be 2 or 3"),
        ("recall", dict(depth=[0.5, 0.2]), r"depth is \[0.5, 0.2\]"),
        ("recall", dict(count=20, depth=[0, 0.1]), "only 2 of 20 pairs lie at depth"),
        ("recall", dict(count=20, lookalikes=5), "with 5 lookalikes each"),
        ("recall", dict(count=[4.5, 10]), "least count is 4.5"),
        ("countdown", dict(search=640.5), "search is 640.5"),
        ("countdown", dict(count=10**8), "count is 100000000; it must be at most 1,000"),
        ("recall", dict(filler=10**9), "filler is 1000000000; it must be at most 100,000"),
        ("stories", dict(steps=10**8), "steps is 100000000; it must be at most 10,000"),
        ("stargraph", dict(arms=10**8, length=1, nodes=10**9), "at most 100,000"),
    ]:
        with pytest.raises(SparseRLError, match=message):
            make(name, **options)
    with pytest.raises(
        SparseRLError, match="none of 1000 problems with 4 numbers up to 20 had a search of at most 20 characters"
    ):
        make("countdown", search=20).sample(0, 1)
    with pytest.raises(SparseRLError, match="'countdwon'; did you mean 'countdown'"):
        make("countdwon")
    with pytest.raises(SparseRLError, match="the task sums has no option 'cuont'; did you mean 'count'"):
        make("sums", cuont=3)
    for option in ("name", "self", "cls"):
        with pytest.raises(SparseRLError, match=f"the task sums has no option '{option}'"):
            make("sums", **{option: "x"})
    with pytest.raises(SparseRLError, match="the task sums has no option 'deadline'"):  # it is graded in this process
        make("sums", deadline=3)


def test_every_task_is_described():
    described = dict(describe())
    assert [*TASKS, "gym:NAME", "verifiers:NAME", "FILE.py", "FILE.py:CLASS"] == list(described)
    assert described["sums"].startswith("add up a row of digits") and described["math"].startswith(
        "problems from JSONL files"
    )
    assert all(len(line) > 20 and "\n" not in line for line in described.values())
