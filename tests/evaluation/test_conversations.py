"""Conversations in evaluations: those that training would hold, on any cache, resumable to the byte."""

import json

import pytest

from sparse_rl import Engine, Sampling, SparseRLError, load_model
from sparse_rl.chat import Turns
from sparse_rl.config import make_recipe
from sparse_rl.evaluation import Cache, Results
from sparse_rl.evaluation.run import Asked, evaluate
from sparse_rl.models import record_of, stop_ids
from sparse_rl.tasks import make
from sparse_rl.train.held_out import complete
from sparse_rl.train.run import train
from tests.helpers.evaluating import lines, run

TASK = """
import os
from sparse_rl.tasks import Prompt, Task

class Sums(Task):
    "Two or three sums, one after the other; the answers of all are graded."
    isolated = False
    name = "two-sums"

    def __getitem__(self, i):
        return Prompt(f"{i % 9 + 1}+{i % 4 + 1}=", i, index=i)

    def reply(self, prompt, messages):
        i = prompt.index % 1_000_000_000
        turns = sum(m["role"] == "assistant" for m in messages)
        return None if turns == 2 + i % 2 else [{"role": "user", "content": f"{turns}+{i % 9}="}]

    def transcript(self, messages):
        return " | ".join(m["content"] for m in messages if m["role"] == "assistant")

    def reward(self, prompt, text):
        return text.count("|")

class Broken(Sums):
    isolated = True

    def reply(self, prompt, messages):
        i = prompt.index % 1_000_000_000
        if i == 1:
            raise RuntimeError("no reply today")
        if i == 2:
            os._exit(3)
        return super().reply(prompt, messages)
"""
CACHES = [Cache("dense"), Cache("rkv", 16, 4, {"protect_prompt": False})]
WAY = {"limit": 4, "samples": 2, "max_new_tokens": 60, "rows": 4, "seed": 3, "max_turns": 3, "max_given_tokens": 12}


@pytest.fixture
def two_sums(tmp_path):
    path = tmp_path / "two_sums.py"
    path.write_text(TASK)
    return f"{path}:Sums"


def evaluated(task, folder, caches=CACHES, said=print, **changes):
    return list(evaluate("tiny-sums", caches, Asked([task], **{**WAY, **changes}), lambda c: folder / c.folder, said))


def test_they_are_those_that_training_holds(two_sums, tmp_path):
    model, tokenizer = load_model("tiny-sums", seed=3)
    task = make(two_sums).held_out()
    prompts, sampling = task.sample(0, 4), Sampling(60, 1.0, stop_ids=stop_ids(model, tokenizer))
    for cache, done in zip(CACHES, evaluated(two_sums, tmp_path / "x"), strict=True):
        engine = Engine(model, cache.make(), *cache.slots, 3)  # another number of rows
        found, grades, talks = complete(engine, tokenizer, task, prompts, 2, sampling, 3, turns=Turns(3, 12))
        assert len(done.items) == len(found) == 8 and max(talk.turns for talk in talks) == 3
        for item, trajectory, grade, talk in zip(done.items, found, grades, talks, strict=True):
            assert (item.tokens, item.given) == (len(trajectory.response_tokens), trajectory.num_given_tokens)
            assert (item.verdict, item.reward, item.turns) == (grade.verdict, grade.reward, talk.turns)
            assert item.messages == json.loads(json.dumps(talk.messages)) and item.text == task.transcript(
                talk.messages
            )
            assert item.prompt_tokens + item.tokens + item.given == len(trajectory.tokens)
        (summary,) = done.summaries
        assert summary.turns == sum(talk.turns for talk in talks) / 8 and summary.given > 0
        assert (summary.tokens_saved > 0.1) == (cache.compressor == "rkv") and summary.tokens_saved > -1e-9
    task.close()


def test_what_was_interrupted_goes_on_to_the_byte(two_sums, tmp_path, monkeypatch):
    evaluated(two_sums, tmp_path / "whole")
    add, added = Results.add, []

    def interrupted(self, completion):
        add(self, completion)
        added.append((self.folder, completion.key))
        if len(added) == 5:
            raise KeyboardInterrupt

    monkeypatch.setattr(Results, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluated(two_sums, tmp_path / "halved")
    evaluated(two_sums, tmp_path / "halved", rows=2)
    assert len(added) == len(set(added)) == 16
    for cache in CACHES:
        whole, halved = ((tmp_path / name / cache.folder / "items.jsonl") for name in ("whole", "halved"))
        assert whole.read_bytes() == halved.read_bytes()
    with pytest.raises(SparseRLError, match=r"holds an evaluation with .*max_turns = 3, not 2; choose another folder"):
        evaluated(two_sums, tmp_path / "whole", max_turns=2)


def test_replies_that_fail_are_counted(two_sums, tmp_path):
    said = []
    broken = two_sums.replace(":Sums", ":Broken")
    (done,) = evaluated(broken, tmp_path, CACHES[1:], said.append, limit=4, samples=1, max_new_tokens=200)
    items = {item.index: item for item in done.items}
    assert {i for i, item in items.items() if item.fault is not None} == {1, 2}
    assert items[1].verdict == items[2].verdict == "error" and done.summaries[0].errors == 2
    assert any("no reply today" in line or "ended with exit code 3" in line for line in said)


def test_limits_of_turns_need_a_task_that_replies(tmp_path):
    with pytest.raises(SparseRLError, match="--max-turns is for tasks that reply, but sums does not reply; omit it"):
        evaluated("sums", tmp_path, max_given_tokens=None)
    with pytest.raises(SparseRLError, match="max_turns"):
        Asked(["calculator"], max_turns=0)


def test_a_model_brings_the_bounds_of_its_conversations_along(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rollout = {"compressor": "rkv", "budget": 16, "interval": 4, "rows": 4, "prompts": 1, "group_size": 2}
    rollout |= {"max_new_tokens": 12, "max_turns": 3, "max_given_tokens": 16}
    recipe = {
        "model": {"name": "tiny"},
        "task": {"name": "calculator", "count": 3},
        "rollout": rollout,
        "learn": {"minibatches": 1},
    }
    train(
        make_recipe({**recipe, "eval": {"every": 0}, "run": {"steps": 1, "diagnose": 0}}), tmp_path / "run", show=False
    )
    model, _ = load_model(str(tmp_path / "run" / "checkpoints" / "step-000001"))
    assert (record_of(model).max_turns, record_of(model).max_given_tokens) == (3, 16)
    done = run("run", "--limit", 3, "--rows", 2, "--out", "x")
    assert done.exit_code == 0 and "max turns 3; max given tokens 16" in done.stderr, done.exception
    settings = json.loads((tmp_path / "x" / "evaluation.json").read_text())["benches"]["calculator"]
    assert (settings["max_turns"], settings["max_given_tokens"], settings["max_new_tokens"]) == (3, 16, 12)
    assert len(lines(tmp_path / "x" / "items.jsonl")) == 3
