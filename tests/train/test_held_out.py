"""How many entries a row held, and accuracy on held-out prompts."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_rl import Engine, Sampling, Trace, Trajectory, load_model, tasks
from sparse_rl.beacon import add_beacon
from sparse_rl.compressors import make
from sparse_rl.errors import SparseRLError
from sparse_rl.records import entries, mean_entries
from sparse_rl.train.held_out import accuracy, dense_engine
from tests.helpers.models import prompts_of, tiny

# ------------------------------------------------------------------------------------------------------------ entries


def each(t: Trajectory) -> list[float]:
    """Query by query, token by token, as the trace's definition says."""
    gone = [head for layer in t.trace.evicted_at.tolist() for head in layer]
    queries = range(t.num_prompt_tokens, len(t.tokens) - 1)
    return [sum(k <= q < head[k] for head in gone for k in range(len(head))) / len(gone) for q in queries] or [
        t.num_prompt_tokens
    ]


def counted(t: Trajectory) -> float:
    return sum(each(t)) / len(each(t))


COMPRESSORS = ["dense", "rkv", "prompt-only", "beacon:2", "beacon:5", "beacon:64"]


@pytest.mark.parametrize("name", COMPRESSORS)
def test_mean_entries_are_those_of_a_count_by_hand(name):
    model = add_beacon(copy.deepcopy(tiny("llama")))
    engine = Engine(model, make(name), budget=12, interval=4, rows=4)
    trajectories = engine.generate(prompts_of(5, 19, 3), 2, Sampling(max_new_tokens=33, stop_ids=(3, 7, 11)), seed=3)
    assert len({len(t.tokens) for t in trajectories}) > 1
    for t in trajectories:
        assert mean_entries(t) == pytest.approx(counted(t), abs=1e-12)
    (t,) = engine.generate(prompts_of(19), 1, Sampling(max_new_tokens=1))
    assert mean_entries(t) == counted(t) == 19


@given(st.integers(1, 5), st.integers(0, 12), st.randoms(use_true_random=False))
def test_mean_entries_of_any_trace(prompt, new, draw):
    tokens = prompt + new
    gone = torch.tensor(
        [[[draw.randint(k + 1, tokens + 2) for k in range(tokens)] for _ in range(2)] for _ in range(2)]
    )
    t = Trajectory(
        torch.zeros(tokens, dtype=torch.int64),
        prompt,
        torch.zeros(tokens),
        Trace(gone.to(torch.uint16)),
        "length",
        0,
        0,
    )
    assert mean_entries(t) == pytest.approx(counted(t), abs=1e-12)
    assert entries(t).tolist() == pytest.approx(each(t), abs=1e-12)


def test_mean_entries_where_they_are_known():
    model = add_beacon(copy.deepcopy(tiny("llama")))
    sampling = Sampling(max_new_tokens=10, stop_ids=())
    (dense,) = Engine(model, "dense").generate(prompts_of(7), 1, sampling)
    assert mean_entries(dense) == sum(range(8, 17)) / 9  # 9 of the 10 are fed
    (folded,) = Engine(model, "beacon:4").generate(prompts_of(7), 1, sampling)
    assert mean_entries(folded) == (8 + 9 + 10 + 11 + 12 + 9 + 10 + 11 + 12 + 13 + 10) / 11  # two beacons are


# ------------------------------------------------------------------------------------------------------------ accuracy


def test_accuracy_counts_entries():
    model, tokenizer = load_model("tiny-sums")
    task = tasks.make("sums").held_out()
    prompts, sampling = task.sample(0, 12), Sampling(max_new_tokens=64)
    engine = Engine(model, "rkv", budget=38, interval=4, rows=12)
    found = accuracy(engine, tokenizer, task, prompts, 2, sampling, 5)
    assert set(found) == {"accuracy", "reward", "length", "truncated", "loops", "ungraded", "entries"}
    trajectories = engine.generate([tokenizer.encode(p.text) for p in prompts], 2, sampling, 5)
    assert found["entries"] == pytest.approx(sum(map(counted, trajectories)) / 24)
    assert found["entries"] < 42  # what a row has room for


PARTLY = """
from sparse_rl.tasks import Prompt, Task
class Partly(Task):
    isolated = False
    def __getitem__(self, i):
        if i == 3:
            raise KeyError("three")
        return Prompt("1+1=", i, i)
    def reward(self, prompt, text):
        return 0.5 if prompt.index % 4 else 1.0
"""


def partly(folder) -> tasks.Task:
    (folder / "partly.py").write_text(PARTLY)
    return tasks.make(f"{folder / 'partly.py'}:Partly")


def test_accuracy_counts_full_rewards(tmp_path):
    model, tokenizer = load_model("tiny")
    engine, task = Engine(model, budget=16, interval=4, rows=4), partly(tmp_path)
    found = accuracy(engine, tokenizer, task, task.sample(4, 8), 1, Sampling(4), seed=0)
    assert found["accuracy"] == 0.25 and found["reward"] == 0.625


def test_a_prompt_that_cannot_be_made_gets_a_sentence(tmp_path):
    with pytest.raises(SparseRLError, match=r"could not make prompt 3 \(KeyError: 'three'\)"):
        partly(tmp_path).sample(0, 4)


def test_a_dense_engine_has_as_many_rows_as_fit_in_the_same_bytes():
    model, _ = load_model("tiny")
    engine = Engine(model, budget=16, interval=4, rows=4)
    dense = dense_engine(model, [[5] * 10], 50, rows=4, like=engine)
    assert dense.rows == 1 and dense.cache.capacity == 60  # 4 rows of 20 slots hold one dense row of 60
    assert dense_engine(model, [[5] * 4], 6, rows=4, like=engine).rows == 4
