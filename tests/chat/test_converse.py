"""Conversations on an open engine, and runs that learn from them: nothing depends on when replies come, and whatever an
environment does is counted and said.
"""

import json
import textwrap

import pytest

from sparse_rl import Engine, Sampling, token_logprobs
from sparse_rl.chat import Chats, Turns, converse
from sparse_rl.chat.converse import fitted
from sparse_rl.config import make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.models import load_model
from sparse_rl.records import read_trajectories
from sparse_rl.tasks import make
from sparse_rl.train.run import train

DIGITS = tuple(range(2, 12))  # of the tiny tokenizer: they end a turn here, since a random model rarely ends one
ENVIRONMENT = """
    import os, random, time
    from sparse_rl.tasks import Prompt, Task

    class Echo(Task):
        "Answers every turn but the third with some text; the delay depends on nothing."
        isolated = False
        delay = 0.0

        def __getitem__(self, i):
            return Prompt(f"problem {i % 3} " + "x" * (i % 5), i, index=i)

        def reply(self, prompt, messages):
            time.sleep(self.delay * random.random())
            turns = sum(m["role"] == "assistant" for m in messages)
            text = f"{turns}:" + "abcdefgh" * (turns + prompt.index % 3)
            return None if turns == 3 else [{"role": "user", "content": text}]

        def reward(self, prompt, text):
            return len(text) % 2

    class Slow(Echo):
        isolated = True
        delay = 0.05

    class Broken(Echo):
        isolated = True

        def reply(self, prompt, messages):
            kind = prompt.index % 6
            if kind == 0:
                time.sleep(60)
            if kind == 1:
                raise RuntimeError("the environment broke")
            if kind == 2:
                os._exit(3)
            if kind == 3:
                return "nonsense"
            if kind == 4:
                return [{"role": "tool", "content": "y" * 10**6}]
            return super().reply(prompt, messages)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("echo") / "echo.py"
    path.write_text(textwrap.dedent(ENVIRONMENT))
    return path


@pytest.fixture(scope="module")
def tiny_model():
    return load_model("tiny", seed=0)


def talk(tiny_model, task, rows=4, compressor="rkv", turns=None, new=40, members=2, count=4):
    model, tokenizer = tiny_model
    engine = Engine(model, compressor, budget=16, interval=4, rows=rows)
    prompts, chats = task.sample(0, count), Chats(tokenizer, task, 1)
    ids = [chats.of(prompt).start(prompt) for prompt in prompts]
    sampling = Sampling(new, stop_ids=(1, *DIGITS))
    return converse(engine, chats, task, prompts, ids, [range(members)] * count, sampling, 3, turns or Turns(4, 40))


def same(one, other):
    for (a, talk_a), (b, talk_b) in zip(one, other, strict=True):
        assert a.tokens.equal(b.tokens) and a.sampler_logprobs.equal(b.sampler_logprobs)
        assert a.trace.evicted_at.equal(b.trace.evicted_at) and a.given.equal(b.given)
        assert talk_a == talk_b and (a.prompt_index, a.sample_index) == (b.prompt_index, b.sample_index)


def test_conversations_do_not_depend_on_replies_or_company(tiny_model, file):
    """Slow replies of two processes in any order, few rows or many: the same to the bit; and the trace replays them."""
    at_once = talk(tiny_model, make(f"{file}:Echo"))
    same(at_once, talk(tiny_model, make(f"{file}:Echo"), rows=16))
    same(at_once, talk(tiny_model, make(f"{file}:Slow", workers=2), rows=2))
    assert [(t.prompt_index, t.sample_index) for t, _ in at_once] == [(i, j) for i in range(4) for j in range(2)]
    assert max(len(t.turns) for t, _ in at_once) == 3 and {talk.turns for _, talk in at_once} >= {3}
    tokenizer = tiny_model[1]
    for t, found in at_once:
        logprobs = token_logprobs(tiny_model[0], t.tokens, t.trace)
        assert (logprobs - t.sampler_logprobs)[t.response_mask].abs().max() < 1e-4
        assert not t.sampler_logprobs[~t.response_mask].any()
        said = [m["content"] for m in found.messages if m["role"] == "assistant"]
        assert said == [tokenizer.decode(t.tokens[turn], skip_special_tokens=True) for turn in t.turns]
        given = "".join(m["content"] + "\n" for m in found.messages[1:] if m["role"] == "user")
        assert tokenizer.decode(t.tokens[t.given]) == given
    assert any((t.trace.evicted_at.long() < len(t.tokens)).any() for t, _ in at_once)
    equal_prompts = [t.tokens[t.num_prompt_tokens :].tolist() for t, _ in talk(tiny_model, make("guess"), count=3)]
    assert len(set(map(tuple, equal_prompts))) == 6  # each has random numbers of its own


def test_limits_end_a_conversation(tiny_model, file):
    task = make(f"{file}:Echo")
    for t, found in talk(tiny_model, task, turns=Turns(2, 40)):
        assert found.turns <= 2 and found.at_limit == (t.finish_reason == "length" and found.turns == 2)
    short = talk(tiny_model, task, new=12)
    assert all(len(t.response_tokens) <= 12 for t, _ in short)
    assert {t.finish_reason for t, _ in short} == {"length", "stop"} or {t.finish_reason for t, _ in short} == {
        "length"
    }
    for t, found in talk(tiny_model, task, turns=Turns(4, 9)):
        assert found.cut == found.turns - 1 and t.num_given_tokens <= 9 * (found.turns - 1)
        assert all(m["content"].endswith("[cut]") for m in found.messages[1:] if m["role"] == "user")
    chat = Chats(tiny_model[1], task, 1).of(task[0])
    with pytest.raises(SparseRLError, match=r"takes 3 tokens without their contents, but .*max_given_tokens is 2"):
        fitted(chat, [], [{"role": "user", "content": "abc"}] * 3, 2)


def recipe(file, name="Echo", **keys):
    rollout = {
        "compressor": "rkv", "budget": 16, "interval": 4, "rows": 6, "prompts": 4, "group_size": 2,
        "max_new_tokens": 40, "max_turns": 4, "max_given_tokens": 40, "stop": list("0123456789"),
        "slots": keys.pop("slots", "model"),
    }  # fmt: skip
    run = {"steps": keys.pop("steps", 2), "checkpoint_every": 1, "diagnose": 2}
    options = keys.pop("options", {})
    return make_recipe(
        {
            "model": {"name": "tiny"},
            "task": {"name": f"{file}:{name}", **options},
            "rollout": rollout,
            "eval": {"every": keys.pop("every", 2), "prompts": 4},
            "run": run,
            **keys,
        }
    )


@pytest.mark.parametrize(
    "learn, slots",
    [({"method": "shadow", "algorithm": "ppo"}, "model"), ({"method": "sparse-rl", "minibatches": 2}, "fp8")],
)
def test_a_run_of_conversations_goes_on_to_the_byte(learn, slots, file, tmp_path):
    train(recipe(file, learn=learn, slots=slots), tmp_path / "straight", show=False)
    train(recipe(file, learn=learn, slots=slots, steps=1), tmp_path / "halved", show=False)
    train(recipe(file, learn=learn, slots=slots, steps=2), tmp_path / "halved", resume=True, show=False)
    straight, halved = ((tmp_path / f / "metrics.jsonl").read_text().splitlines() for f in ("straight", "halved"))
    steps = [[line for line in lines if "update/loss" in line] for lines in (straight, halved)]
    assert steps[0] == steps[1] and len(steps[0]) == 2
    first, last = map(json.loads, steps[0])
    assert 1 < first["talk/turns/mean"] <= 3 and first["talk/given/mean"] > 5
    assert first["rollout/length/mean"] < 40 and first["talk/error/count"] == 0
    if learn["method"] == "shadow":
        assert abs(last["gap/abs/mean"]) < 1e-4
    evaluated = json.loads(straight[-1])
    assert evaluated["eval/sparse/talk/turns/mean"] > 1 and evaluated["eval/dense/talk/given/mean"] > 0
    written = list(read_trajectories(tmp_path / "straight" / "samples" / "step-000001"))
    assert any(t.given is not None for t in written)
    assert all((t.trace.slots is None) == (slots == "model") for t in written)
    line = json.loads((tmp_path / "straight/samples/step-000001/trajectories.jsonl").read_text().splitlines()[0])
    assert "abcdefgh" in line["text"] and line["given"]


def test_what_an_environment_does_is_counted_and_said(file, tmp_path, capsys):
    """It hangs, raises, dies, returns nonsense, a megabyte: each costs its conversations and not the run."""
    broken = recipe(
        file, "Broken", steps=1, every=0, options={"deadline": 1.0, "workers": 2}, learn={"method": "shadow"}
    )
    broken = make_recipe({**broken.to_dict(), "rollout": {**broken.to_dict()["rollout"], "prompts": 6}})
    train(broken, tmp_path / "run", show=False)
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    faults = line["talk/timeout/count"], line["talk/error/count"]
    assert 1 <= faults[0] <= 2 and 3 <= faults[1] <= 6  # two conversations of each kind, if their first turn stopped
    assert line["grade/timeout/count"] == faults[0] and line["grade/error/count"] == faults[1]
    assert line["talk/cut/count"] >= 1
    timing = json.loads((tmp_path / "run" / "timing.jsonl").read_text().splitlines()[0])
    assert 0.5 < timing["talk/wait/seconds"] < timing["time/rollout"]  # at the end all wait for the one that hangs
    assert "grading failed (in the task's reply, " in " ".join(capsys.readouterr().err.split())
