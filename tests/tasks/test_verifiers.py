"""Environments of verifiers as tasks: they reply and grade as they are; we sample, under one trace.

`make others` runs them: the extra `test` leaves verifiers out, because it pins openai below 3.
"""

import importlib.util
import json
import os
import re
import subprocess
import time
import weakref

import psutil
import pytest

from sparse_rl import Engine, Sampling, token_logprobs
from sparse_rl.chat import Chats, Turns, converse, graded_texts, with_faults
from sparse_rl.config import make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.evaluation import Exam, Results, ask
from sparse_rl.models import load_model
from sparse_rl.tasks import make, may_converse
from sparse_rl.tasks.conversing import called, said
from sparse_rl.tasks.environment import Environment, wire_message
from sparse_rl.tasks.replies import Replies
from sparse_rl.train.run import train
from tests.helpers.counting import ASKING, COUNTING, FORGETFUL

installed = pytest.mark.skipif(importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed")
CHAT = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
DIGITS = tuple(range(2, 12))  # of the tiny tokenizer: they end a turn, since a random model rarely ends one


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the environments are; processes that are started find them, too."""
    path = tmp_path_factory.mktemp("environments")
    (path / "counting_env.py").write_text(COUNTING)
    (path / "asking_env.py").write_text(ASKING)
    (path / "forgetful.py").write_text(FORGETFUL)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        patch.setenv("PYTHONPATH", str(path), prepend=":")  # of tool servers
        yield path


def test_without_the_package_a_sentence_says_so(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SparseRLError, match=r"need verifiers: install the extra with `pip install 'sparse-rl\[verif"):
        make("verifiers:anything")
    assert may_converse("verifiers:anything", {})


def test_what_the_model_said_goes_out_in_openai_s_form():
    bad = {"type": "function", "function": {"name": None, "arguments": None}}
    message = {"role": "assistant", "content": "x", "tool_calls": [*called("add", a=1)["tool_calls"], bad]}
    first, second = wire_message(message, 3)["tool_calls"]
    assert first == {"id": "call_3_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert second["function"] == {"name": "no_tool", "arguments": "{}"} and second["id"] != first["id"]
    assert wire_message(said("x"), 1) == {"role": "assistant", "content": "x"}


@pytest.mark.parametrize("age, ends", [(0.0, False), (60.0, True)])
def test_signs_of_life_count_from_when_they_were_given(age, ends):
    """Nobody reads them between two rollouts: old ones must not pass for new ones when the next rollout begins."""
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    os.write(writes, b"".join(json.dumps({"at": time.monotonic() - age - i}).encode() + b"\n" for i in (2, 1, 0)))
    with subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, start_new_session=True) as process:
        service = object.__new__(Environment)
        vars(service).update(process=process, reads=reads, inbox=b"", outbox=b"", beat=time.monotonic() - 90.0)
        vars(service).update(deadline=60.0, open={}, last=set(), _finalizer=weakref.finalize(process, print))
        service._end_if_silent()
        assert (service.process is None) == ends == (process.poll() is not None)
        assert not ends or re.fullmatch(r"gave no sign of life for (59|60|61) s", service.ending)
        process.kill()
    os.close(reads), os.close(writes)


def held(task, turns, patience=90.0):
    """Replies to planted turns, by prompt: {index: [the model's messages]}."""
    found, messages = {i: [] for i in turns}, {i: list(task[i].text) for i in turns}
    until = time.monotonic() + patience
    with Replies(task) as replies:
        for i, planned in turns.items():
            messages[i].append(planned[0])
            replies.ask(i, task[i], messages[i])
        while replies.waiting and time.monotonic() < until:
            for i, reply in replies.ready(0.5):
                found[i].append(reply)
                done = sum(m["role"] == "assistant" for m in messages[i])
                if reply.messages is None:
                    continue
                messages[i] += reply.messages
                if done < len(turns[i]):
                    messages[i].append(turns[i][done])
                    replies.ask(i, task[i], messages[i])
                else:
                    replies.conclude(i, task[i])
    return found


@pytest.mark.others
@installed
def test_prompts_tools_replies_and_rewards_are_the_environment_s(folder):
    task = make("verifiers:counting-env", count=7, deadline=60.0)
    try:
        (tool,) = task.tools
        name, parameters = tool["function"]["name"], tool["function"]["parameters"]
        assert name == "adder_add" and set(parameters["properties"]) == {"a", "b"}
        assert len(task) == 7 and task.held_out().num_prompts == 1 and task.num_prompts == 6
        assert task[3].text == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+3="}]
        turns = {
            0: [said("it is 0")],
            1: [called(name, a=1, b=1), said("so 2")],
            2: [called(name, a="x"), called("other"), said("no idea")],
            3: [called(name, a=3, b=3)],  # no further turn
        }
        found = held(task, turns)
        ends = {i: json.loads(replies[-1].graded) for i, replies in found.items()}
        assert ends[0] == {"reward": 2.5, "parts": {"right": 1.0, "turns": 1.0}}
        assert ends[1] == {"reward": 3.0, "parts": {"right": 1.0, "turns": 2.0}}
        assert ends[2] == {"reward": 1.5, "parts": {"right": 0.0, "turns": 3.0}}
        assert ends[3] == {"reward": 0.5, "parts": {"right": 0.0, "turns": 1.0}}
        assert found[1][0].messages == [{"role": "tool", "content": "2", "tool_call_id": "call_3_0"}]
        wrong, other = found[2][0].messages[0]["content"], found[2][1].messages[0]["content"]
        assert "rror" in wrong and other == f"error: there is no tool other; there is {name}"
        (grade,) = task.grade([task[1]], [found[1][-1].graded])
        assert (grade.reward, grade.verdict, grade.parts) == (3.0, "right", {"right": 1.0, "turns": 2.0})
    finally:
        task.close()
    assert not [p for p in psutil.Process().children(recursive=True) if "counting_env" in " ".join(p.cmdline())]


def talk(model, tokenizer, task, rows=4, indices=(0, 1, 2), turns=None, new=60):
    engine = Engine(model, "rkv", budget=16, interval=4, rows=rows)
    prompts, chats = [task[i] for i in indices], Chats(tokenizer, task, 1)
    ids = [chats.of(prompt).start(prompt) for prompt in prompts]
    sampling, turns = Sampling(new, stop_ids=(1, *DIGITS)), turns or Turns(4, 60)
    return prompts, converse(engine, chats, task, prompts, ids, [range(2)] * len(prompts), sampling, 3, turns)


@pytest.fixture(scope="module")
def tiny_model():
    model, tokenizer = load_model("tiny", seed=0)
    tokenizer.chat_template = CHAT
    return model, tokenizer


@pytest.fixture(scope="module")
def asking(folder):
    task = make("verifiers:asking-env", deadline=5.0)
    yield task
    task.close()


@pytest.mark.others
@installed
def test_conversations_replay_and_do_not_depend_on_company(tiny_model, asking):
    prompts, several = talk(*tiny_model, asking)
    _, alone = talk(*tiny_model, asking, rows=1)
    for (a, talk_a), (b, talk_b) in zip(several, alone, strict=True):
        assert a.tokens.equal(b.tokens) and a.sampler_logprobs.equal(b.sampler_logprobs) and talk_a == talk_b
        logprobs = token_logprobs(tiny_model[0], a.tokens, a.trace)
        assert (logprobs - a.sampler_logprobs)[a.response_mask].abs().max() < 1e-4
    talks = [found for _, found in several]
    asked = [prompts[t.prompt_index] for t, _ in several]
    grades = with_faults(asking, asking.grade(asked, graded_texts(asking, asked, talks)), talks)
    for (trajectory, found), grade in zip(several, grades, strict=True):
        turns = [m["content"] for m in found.messages if m["role"] == "assistant"]
        assert grade.parts == {"length": float(len(turns[-1]) % 3), "turns": float(len(turns))}
        assert grade.reward == pytest.approx(grade.parts["length"] + grade.parts["turns"] / 4)
        assert trajectory.finish_reason == "length" or found.turns == 3
    assert {found.turns for _, found in several} >= {3}


@pytest.mark.others
@installed
def test_limits_end_a_conversation_and_it_is_graded(tiny_model, asking):
    for new, turns in ((60, Turns(2, 60)), (8, Turns(4, 60))):
        prompts, found = talk(*tiny_model, asking, turns=turns, new=new)
        talks = [it for _, it in found]
        assert all(it.fault is None and it.graded is not None for it in talks), talks
        grades = asking.grade([prompts[t.prompt_index] for t, _ in found], [it.graded for it in talks])
        assert [grade.parts["turns"] for grade in grades] == [it.turns for it in talks]
        assert any(t.finish_reason == "length" for t, _ in found)


@pytest.mark.others
@installed
@pytest.mark.slow  # it waits for deadlines
def test_what_breaks_costs_its_conversations(tiny_model, asking):
    """A reply that never comes, an error: theirs alone. A process that hangs or ends: all that it held; then a new one.

    Prompt 0 is asked again afterwards, and answers as before.
    """
    first = held(asking, {0: [said("a"), said("b"), said("cd")]})
    kinds = {
        3: ("timeout", "no reply to prompt 3 after 5 s"),
        4: ("error", "the environment broke"),
        5: ("timeout", "after 5 s|gave no sign of life for 5 s"),  # whichever is found first
        6: ("error", "ended with exit code 3"),
    }
    for kind, (fault, sentence) in kinds.items():
        found = held(asking, {kind: [said("a")], 1: [said("a"), said("b"), said("cd")]})
        assert found[kind][-1].fault == fault and re.search(sentence, found[kind][-1].problem), found[kind]
        if kind in (3, 4):
            assert found[1][-1].graded is not None
        assert held(asking, {0: [said("a"), said("b"), said("cd")]}) == first
    (lost,) = held(asking, {5: [said("a")]})[5]  # alone, so that it is the only one that finds out
    assert lost.fault == "timeout" and held(asking, {0: [said("a"), said("b"), said("cd")]}) == first
    assert json.loads(first[0][-1].graded) == {"reward": 2.75, "parts": {"length": 2.0, "turns": 3.0}}


@pytest.mark.others
@installed
def test_a_process_that_ends_between_two_turns_costs_its_conversations(asking):
    """Killed while a turn is sampled, or just before a limit ends the conversation: a fault, no error of ours."""
    first, second = said("a"), said("b")
    for end in ("ask", "stop", "last"):
        with Replies(asking) as replies:
            (service,) = replies.services.values()
            prompt, messages = asking[0], [*asking[0].text, first]
            replies.ask("key", prompt, messages)
            (found,) = replies.ready(30.0)
            messages += [*found[1].messages, second]
            if end == "last":  # it must not be written to once it is gone
                service.process.kill()
                replies.conclude("key", prompt, messages)
            else:
                service.ending = service.end(patience=0.0)
                service.open.clear()
                replies.ask("key", prompt, messages) if end == "ask" else replies.conclude("key", prompt)
            ((key, lost),) = replies.ready(30.0)
            assert (key, lost.fault) == ("key", "error") and re.match(
                "the process of verifiers:asking-env (was )?ended", lost.problem
            )
            assert not replies.waiting


@pytest.mark.others
@installed
def test_eval_holds_an_environment_s_conversations(asking, tiny_model, tmp_path):
    """Its own grades, which need no transcript."""
    model, tokenizer = tiny_model
    engine, task = Engine(model, "rkv", budget=16, interval=4, rows=4), asking
    prompts = [task[i] for i in range(3)]
    exam = Exam("asking", task, prompts, 2, Sampling(60, stop_ids=(1, *DIGITS)), turns=Turns(4, 60))
    with Results(tmp_path, {"benches": {"asking": exam.settings()}}) as results:
        (summary,) = ask(engine, tokenizer, [exam], 3, results)
    _, expected = talk(model, tokenizer, task)
    items = [results.items["asking", i, k] for i in range(3) for k in range(2)]
    for item, (trajectory, found) in zip(items, expected, strict=True):
        assert item.text == found.graded and item.turns == found.turns == item.rewards["turns"]
        assert item.given == trajectory.num_given_tokens and item.reward == json.loads(found.graded)["reward"]
    assert summary.turns > 1 and summary.rewards["turns"] == summary.turns and not summary.ungraded


@pytest.mark.others
@installed
def test_a_history_that_shrinks_is_a_fault(folder):
    task = make("verifiers:counting-env", harness="forgetful", count=2)
    (reply,) = held(task, {0: [said("a")]})[0]
    task.close()
    assert reply.fault == "error" and "it rewrote what the model had read" in reply.problem


@pytest.mark.others
@installed
def test_what_cannot_be_used_is_refused(folder):
    cases = {
        "verifiers:not-there": (dict(), "not found"),
        "verifiers:counting-env": (dict(cuont=3), "cuont"),
    }
    for name, (options, sentence) in cases.items():
        with pytest.raises(SparseRLError, match=rf"the environment {name} cannot be used: .*{sentence}"):
            make(name, **options)
    with pytest.raises(SparseRLError, match="runtime is 'moon'; it must be one of subprocess"):
        make("verifiers:counting-env", runtime="moon")
    with pytest.raises(SparseRLError, match="deadline is 0"):
        make("verifiers:counting-env", deadline=0)


@pytest.mark.others
@installed
@pytest.mark.slow
def test_a_run_trains_on_an_environment_and_resumes_to_the_byte(folder, tiny_model, tmp_path):
    model, tokenizer = tiny_model
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    def recipe(steps):
        rollout = {
            "compressor": "rkv", "budget": 16, "interval": 4, "rows": 4, "prompts": 2, "group_size": 2,
            "max_new_tokens": 60, "max_turns": 4, "max_given_tokens": 60, "stop": list("0123456789"),
        }  # fmt: skip
        return make_recipe(
            {
                "model": {"name": str(tmp_path / "model")},
                "task": {"name": "verifiers:asking-env", "size": 3, "deadline": 30.0},
                "rollout": rollout,
                "learn": {"method": "shadow"},
                "eval": {"every": 2, "prompts": 1},
                "run": {"steps": steps, "checkpoint_every": 1, "diagnose": 1},
            }
        )

    train(recipe(2), tmp_path / "straight", show=False)
    train(recipe(1), tmp_path / "halved", show=False)
    train(recipe(2), tmp_path / "halved", resume=True, show=False)
    lines = [
        [line for line in (tmp_path / f / "metrics.jsonl").read_text().splitlines() if "update/loss" in line]
        for f in ("straight", "halved")
    ]
    assert lines[0] == lines[1] and len(lines[0]) == 2
    last = json.loads(lines[0][-1])
    assert abs(last["gap/abs/mean"]) < 1e-4 and last["talk/turns/mean"] > 1 and last["talk/error/count"] == 0
    assert last["reward/turns/mean"] > 1 and last["reward/mean"] > 0
