"""Tasks that answer: tools, replies in processes of their own, and every way in which these can fail."""

import re
import textwrap

import pytest

from sparse_rl.chat import Chats, first_messages
from sparse_rl.errors import SparseRLError
from sparse_rl.models.tiny import tiny_tokenizer
from sparse_rl.tasks import make
from sparse_rl.tasks.conversing import MOST_CALLS, MOST_CHARACTERS, answered, called, said
from sparse_rl.tasks.replies import Replies

END = 1
SHIPPED = [
    ("calculator", {}),
    ("calculator", {"count": 7, "highest": 5, "operations": "*"}),
    ("guess", {"highest": 1000}),
    ("notes", {"hops": 4, "people": 30}),
]


@pytest.mark.parametrize("name, options", SHIPPED)
def test_worked_solutions_earn_the_reward_as_a_model_would_say_them(name, options):
    """What the model would write is read back by its tokens; the task answers as in the solution; then it ends."""
    task, held_out = make(name, **options), make(name, **options).held_out()
    chats = Chats(tiny_tokenizer(), task, END)
    assert task.converses and not make("sums").converses
    for owner, prompt in [(t, prompt) for t in (task, held_out) for prompt in t.sample(0, 10)]:
        chat, messages, worked = chats.of(prompt), first_messages(prompt), owner.solution(prompt)
        for turn, message in enumerate(worked):
            if message["role"] != "assistant":
                continue
            tokens = chat.said(messages, message)
            assert tokens[-1] == END
            messages.append(chat.heard(tokens))
            reply = answered(owner, prompt, messages)
            assert reply.fault is None and reply.tool_errors == 0
            if turn + 1 < len(worked):
                assert [m["content"] for m in reply.messages] == [worked[turn + 1]["content"]]
                messages += reply.messages
            else:
                assert reply.messages is None
        (grade,) = owner.grade([prompt], [owner.transcript(messages)])
        assert grade.right


def test_a_calculation_without_its_tool_is_a_solution_too():
    task = make("calculator", direct=0.5)
    lengths = [len(task.solution(prompt)) for prompt in task.sample(0, 200)]
    assert {1, 7} == set(lengths) and 60 < lengths.count(1) < 140


def test_what_is_not_asked_for_is_not_rewarded():
    calculator, guess, notes = make("calculator"), make("guess"), make("notes")
    (sum_,), (number,), (question,) = (task.sample(0, 1) for task in (calculator, guess, notes))
    right = sum_.answer["result"]
    for text, reward in ((f"={right}", 1), (f"{right}", 0), (f"={right}0", 0), (f"calc({right})", 0), ("", 0)):
        assert calculator.reward(sum_, text) == reward
    assert guess.reward(number, "\n".join(["1"] * 20 + [str(number.answer)])) == 0  # too many guesses
    assert guess.reply(number, [said("what?")]) is None and guess.reward(number, "what?") == 0
    assert (
        notes.reward(question, f"answer: {question.answer['place']}") == 1 and notes.reward(question, "answer: X") == 0
    )


def add(a: int, b: int = 1) -> int:
    """Add."""
    return a + b


def fails(text: str) -> str:
    raise ValueError("not today")


def slow(seconds: float) -> dict:
    return {"slept": seconds}


@pytest.mark.parametrize(
    "call, says, wrong",
    [
        ({"name": "add", "arguments": {"a": 2, "b": 3}}, "5", False),
        ({"name": "add", "arguments": '{"a": "2"}'}, "3", False),
        ({"name": "add", "arguments": "2, 5"}, "7", False),
        ({"name": "slow", "arguments": {"seconds": 2}}, '{"slept": 2}', False),
        ({"name": "add", "arguments": {"a": "two"}}, "a of add is 'two', not of type int", True),
        ({"name": "add", "arguments": {"a": True}}, "not of type int", True),
        ({"name": "add", "arguments": {"c": 2}}, "add takes a, b, not c", True),
        ({"name": "add", "arguments": {}}, "add needs a", True),
        ({"name": "add", "arguments": "1, 2, 3"}, "3 arguments, but there are 2", True),
        ({"name": "add", "arguments": "(("}, "cannot be read", True),
        ({"name": "add", "arguments": None}, "arguments of add are missing", True),
        ({"name": "fails", "arguments": "x"}, "not today", True),
        ({"name": "divide", "arguments": {}}, "there is no tool divide; there is add, fails, slow", True),
        ({"name": None, "arguments": {}}, "this is no call of a tool", True),
        ("nonsense", "this is no call of a tool", True),
    ],
)
def test_a_call_that_cannot_be_made_is_told_to_the_model(call, says, wrong):
    task = make("calculator")
    task.tools = (add, fails, slow)
    message = {"role": "assistant", "content": "", "tool_calls": [call if call == "nonsense" else {"function": call}]}
    reply = answered(task, task[0], [message])
    assert reply.fault is None and reply.tool_errors == wrong
    (content,) = [m["content"] for m in reply.messages]
    assert content.startswith("error: ") == wrong and says in content


def test_many_calls_in_one_turn_are_bounded():
    task = make("calculator")
    calls = called("calc", expression="1+1")["tool_calls"] * 100
    reply = answered(task, task[0], [{"role": "assistant", "content": "", "tool_calls": calls}])
    assert len(reply.messages) == MOST_CALLS and "at most 16 are made" in reply.messages[-1]["content"]


FILE = """
    import asyncio, os, time

    def prompt(i):
        return f"problem {i}", i

    def reward(answer, text):
        return float(text == "done")

    async def reply(answer, messages):
        last = messages[-1]["content"]
        if last == "hang":
            time.sleep(60)
        if last == "wait":
            await asyncio.sleep(60)
        if last == "raise":
            raise RuntimeError("the environment broke")
        if last == "exit":
            raise SystemExit("enough")
        if last == "die":
            os._exit(3)
        if last == "nonsense":
            return {"role": "user"}
        if last == "empty":
            return []
        if last == "numbers":
            return [{"role": "user", "content": 7}]
        if last == "role":
            return [{"role": "assistant", "content": "I am you"}]
        if last == "many":
            return [{"role": "user", "content": "x"}] * 1000
        if last == "megabyte":
            return [{"role": "tool", "content": "x" * 10**6}]
        if last == "surrogate":
            return [{"role": "tool", "content": "\\ud800", "secret": object()}]
        if last == "slow":
            await asyncio.sleep(0.3)
        return None if last == "done" else [{"role": "user", "content": f"{answer}: {last}"}]
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    path = tmp_path_factory.mktemp("environment") / "environment.py"
    path.write_text(textwrap.dedent(FILE))
    return make(str(path), deadline=1.5, workers=2)


def all_replies(task, *said_):
    """The replies to one message each, in the order asked."""
    prompts, found = task.sample(0, len(said_)), {}
    with Replies(task) as replies:
        for prompt, text in zip(prompts, said_, strict=True):
            replies.ask(prompt.index, prompt, [*first_messages(prompt), said(text)])
        while replies.waiting:
            found |= dict(replies.ready(30.0))
        assert replies.ready(0.0) == []
    return [found[prompt.index] for prompt in prompts]


FAULTS = {
    "hang": ("timeout", "no reply to prompt 0 after 1.5 s"),
    "wait": ("timeout", "no reply to prompt 1 after 1.5 s"),
    "raise": ("error", r"RuntimeError: the environment broke \(prompt 2, .*environment.py, line 1"),
    "exit": ("error", "SystemExit: enough"),
    "die": ("error", "the process that replies to prompt 4 ended with exit code 3"),
    "nonsense": ("error", "reply returned {'role': 'user'}; it must return a list of messages, or None to end"),
    "empty": ("error", r"reply returned \[\]; it must return a list"),
    "numbers": ("error", r"a message has a role \(tool, user, system\) and a content of text"),
    "role": ("error", "'assistant'.*a message has a role"),
    "many": ("error", "reply returned 1000 messages; at most 64 are read"),
}


def test_whatever_an_environment_does_costs_its_own_conversation(environment):
    names = [*FAULTS, "megabyte", "surrogate", "slow", "hello", "done"]
    replies = dict(zip(names, all_replies(environment, *names), strict=True))
    for name, (fault, problem) in FAULTS.items():
        assert replies[name].fault == fault and replies[name].messages is None, name
        assert re.search(problem, replies[name].problem), replies[name].problem
    for name in ("megabyte", "surrogate", "slow", "hello", "done"):
        assert replies[name].fault is None and replies[name].problem is None
    (long,) = replies["megabyte"].messages
    assert replies["megabyte"].cut == 1 and len(long["content"]) == MOST_CHARACTERS + len("\n[cut]")
    assert replies["surrogate"].messages == [{"role": "tool", "content": "?"}]
    assert replies["hello"].messages == [{"role": "user", "content": "13: hello"}]
    assert replies["done"].messages is None


def test_a_slow_reply_does_not_keep_others(environment):
    prompts = environment.sample(0, 2)
    with Replies(environment) as replies:
        for prompt, text in zip(prompts, ("hello", "slow")):  # both children are ready after this
            replies.ask(prompt.index, prompt, [said(text)])
        while replies.waiting:
            replies.ready(30.0)
        replies.ask("slow", prompts[0], [said("slow")])
        replies.ask("fast", prompts[1], [said("hello")])
        order = []
        while replies.waiting:
            order += [key for key, _ in replies.ready(30.0)]
    assert order == ["fast", "slow"]


def test_processes_stay_from_rollout_to_rollout_and_grade(environment):
    """Those that were busy when a rollout ended do not, and one that died meanwhile costs nothing."""

    def pids():
        return {child.process.pid for child in environment._pool._children}

    environment.close()
    prompts = environment.sample(0, 3)
    all_replies(environment, "hello", "hello", "done")
    first = pids()
    assert len(first) == 2 and [grade.reward for grade in environment.grade(prompts, ["done"] * 3)] == [1.0] * 3
    all_replies(environment, "hello", "hello")
    assert pids() == first
    with Replies(environment) as replies:
        replies.ask(0, prompts[0], [said("hang")])
        (service,) = replies.services.values()
        (busy,) = (child.process.pid for child in service.running)
    assert pids() == first - {busy}
    environment._pool._children[0].process.kill()
    environment._pool._children[0].process.wait()
    replies = all_replies(environment, "hello", "hello")
    assert all(reply.fault is None for reply in replies) and not pids() & first
    with Replies(environment) as replies:  # one that dies idle, in the middle
        (service,) = replies.services.values()
        service.children[0].process.kill()
        service.children[0].process.wait()
        replies.ask(0, prompts[0], [said("hello")])
        replies.ask(1, prompts[1], [said("hello")])
        found = dict(replies.ready(30.0))
        while replies.waiting:
            found |= dict(replies.ready(30.0))
    assert [found[i].fault for i in (0, 1)] == [None, None]


def test_a_task_that_cannot_be_made_in_a_new_process_says_so(tmp_path):
    path = tmp_path / "fragile.py"
    path.write_text(
        "import os\nif 'CHILD_FAILS' in os.environ: raise OSError('no licence')\n"
        "def prompt(i): return 'x', i\ndef reward(answer, text): return 0.0\ndef reply(answer, messages): return None\n"
    )
    task = make(str(path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CHILD_FAILS", "1")
        with Replies(task) as replies, pytest.raises(SparseRLError, match=r"cannot reply: .*no licence"):
            replies.ask(0, task[0], [said("x")])
            replies.ready(60.0)


def test_a_mixture_asks_the_task_of_the_prompt(environment):
    mixture = make("mixture", tasks=[{"name": environment.full_name}, "guess", "sums"])
    assert mixture.converses
    with Replies(mixture) as replies:
        for i, prompt in enumerate(mixture.sample(0, 12)):
            replies.ask((i, prompt.task), prompt, [said("1000000")])
        found = {}
        while replies.waiting:
            found |= dict(replies.ready(30.0))
    says = {label: reply.messages and reply.messages[0]["content"] for (_, label), reply in found.items()}
    assert says["guess"] == "lower" and says["environment"].endswith(": 1000000") and says["sums"] is None
