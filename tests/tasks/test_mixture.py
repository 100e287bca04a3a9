"""Mixtures: every task has its share, any position is known by itself, and each task grades its own completions."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.errors import SparseRLError
from sparse_rl.tasks import Grade, base, by_task, make
from sparse_rl.tasks.mixture import BLOCK, order_of, shares_of

THREE = [{"name": "sums", "count": 4, "weight": 2}, "countdown", {"name": "sums", "label": "long", "count": 9}]
OWN = """
SIZE = 7
def prompt(i): return f"say {i}", str(i)
def reward(answer, text): return {"said": float(text == answer)}
"""


def test_every_task_has_its_share_of_any_stretch():
    task = make("mixture", tasks=THREE)
    labels = [prompt.task for prompt in task.sample(0, 2 * BLOCK)]
    assert Counter(labels) == {"sums": 1000, "countdown": 500, "long": 500}
    for start in range(0, 1900, 50):  # a step of 64 prompts
        seen = Counter(labels[start : start + 64])
        assert abs(seen["sums"] - 32) <= 2 and abs(seen["countdown"] - 16) <= 2
    assert labels[:BLOCK] != labels[BLOCK:] and len({tuple(labels[i : i + 4]) for i in range(0, 400, 4)}) > 10
    texts = [prompt.text for prompt in task.sample(0, BLOCK) if prompt.task == "long"]
    assert texts == [prompt.text for prompt in make("sums", count=9).sample(0, 250)]  # each task goes through its own


@given(
    weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=100),
    seed=st.integers(0, 2**40),
    block=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_shares_and_orders_of_any_weights(weights, seed, block):
    shares, total = shares_of(weights), sum(weights)
    assert sum(shares) == BLOCK and min(shares) >= 1
    if min(weights) / total * BLOCK >= 1:
        assert all(abs(share - weight / total * BLOCK) < 1 for share, weight in zip(shares, weights))
    order = order_of(seed, tuple(shares), block)
    assert sorted(order) == [(which, turn) for which, share in enumerate(shares) for turn in range(share)]
    for which in range(len(shares)):
        assert [turn for w, turn in order if w == which] == list(range(shares[which]))


def test_many_tasks_of_files_take_turns_without_being_shuffled_again(tmp_path):
    tasks = []
    for size in range(20, 28):
        (tmp_path / f"own{size}.py").write_text(OWN.replace("7", str(size)))
        tasks.append(str(tmp_path / f"own{size}.py"))
    base.shuffled.cache_clear()
    task = make("mixture", tasks=tasks)
    prompts = task.sample(0, 100)
    task.close()
    assert base.shuffled.cache_info().misses == len(tasks)
    assert len({prompt.text for prompt in prompts if prompt.task == "own20"}) >= 12


def test_any_position_is_known_by_itself_and_held_out_prompts_are_others():
    task = make("mixture", tasks=THREE)
    prompts = task.sample(990, 30)
    assert prompts == [make("mixture", tasks=THREE).sample(i, 1)[0] for i in range(990, 1020)]
    assert prompts != make("mixture", tasks=THREE, seed=1).sample(990, 30)
    held_out = task.held_out()
    assert [p.task for p in held_out.sample(0, 50)] == [p.task for p in task.sample(0, 50)]
    assert not {p.text for p in held_out.sample(0, 50)} & {p.text for p in task.sample(0, 500) if p.task != "sums"}
    seeded = make("mixture", tasks=[{"name": "sums", "seed": 5}, "linsys"], seed=3)
    assert [part.seed for part in seeded.members] == [5, 3]


def test_each_task_grades_and_solves_its_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    task = make(
        "mixture", tasks=["sums", {"name": f"{tmp_path}/own.py", "workers": 1, "reward_weights": {"said": 2.0}}]
    )
    try:
        prompts = task.sample(0, 20)
        texts = [task.solution(p) if p.task == "sums" else p.answer for p in prompts]
        grades = task.grade(prompts, texts)
        assert [g.reward for g in grades] == [1.0 if p.task == "sums" else 2.0 for p in prompts]
        found = by_task(prompts, grades)
        assert set(found) == {"own", "sums"} and all(g.right for part in found.values() for g in part)
        assert task.of(prompts[0]).extracted("1+2=3") == ("3" if prompts[0].task == "sums" else None)
        assert task.num_prompts is None and task.positions_of_all(0) % BLOCK == 0 < task.positions_of_all(0)
        with pytest.raises(SparseRLError, match="own has no worked solutions"):
            task.solution(next(p for p in prompts if p.task == "own"))
    finally:
        task.close()
    assert by_task(make("sums").sample(0, 1), [Grade(1.0, "right")]) == {}  # one task alone has no label


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([], "tasks is 0 tasks; list 1 to 100"),
        ("sums", "tasks is 'sums'; list 1 to 100"),
        ([{"count": 3}], "task 1 is {'count': 3}; give a name, or keys such as {name: sums, weight: 2}"),
        (["sums", {"name": "linsys", "weight": 0}], "task 2 ('linsys') has the weight 0; use a number above 0"),
        ([{"name": "sums", "weight": "much"}], "has the weight 'much'"),
        ([{"name": "sums", "weight": True}], "has the weight True"),
        ([{"name": "sums", "weight": float("inf")}], "has the weight inf"),
        ([{"name": "sums", "weight": 1e308}, {"name": "linsys", "weight": 1e308}], "has the weight 1e+308"),
        ([{"name": "sums", "weight": 10**400}], "has the weight 1000"),
        (["sums", "sums"], "two tasks are called 'sums'; give each a label of its own"),
        ([{"name": "sums", "label": "a/b"}], "is called 'a/b'; a label is made of letters"),
        ([{"name": "mixture", "tasks": ["sums"]}], "task 1 is a mixture itself"),
        ([{"name": "sum"}], "there is no task 'sum'"),
        ([{"name": "sums", "counts": 3}], "the task sums has no option 'counts'"),
    ],
)
def test_bad_mixtures_get_a_sentence(tasks, said):
    with pytest.raises(SparseRLError) as error:
        make("mixture", tasks=tasks)
    assert said in str(error.value)


def test_a_seed_is_a_whole_number():
    with pytest.raises(SparseRLError, match=r"mixture: seed is \[1\]; it must be a whole number"):
        make("mixture", tasks=["sums"], seed=[1])


def test_weights_of_named_rewards_belong_to_the_tasks():
    with pytest.raises(SparseRLError, match="the task mixture has no option 'reward_weights'"):
        make("mixture", tasks=["sums"], reward_weights={"a": 1})
