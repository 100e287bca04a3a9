"""Prompts that are the same every time, solutions that earn their reward, graders that cannot be fooled by form, rewards that may fail."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_rl.errors import SparseRLError
from sparse_rl.tasks import TASKS, GeneratedTask, Grade, Prompt, Task, describe, make
from sparse_rl.tasks.countdown import evaluate, search

RIGHT, WRONG, ERROR, TIMEOUT = Grade(1.0, "right"), Grade(0.0, "wrong"), Grade(0.0, "error"), Grade(0.0, "timeout")
GENERATED = [name for name, cls in TASKS.items() if issubclass(cls, GeneratedTask)]

HARDER = {
    "sums": dict(count=15),
    "countdown": dict(count=6, highest=50),
    "linsys": dict(unknowns=4, highest=9),
    "stargraph": dict(arms=6, length=5, nodes=99),
    "recall": dict(count=[8, 300], queries=8, filler=16),
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
        ("recall", dict(count=700), "at most 676 of them"),
        ("recall", dict(count=[5, 6, 7]), r"the task recall cannot use the options \{'count': \[5, 6, 7\]\}"),
        ("recall", dict(filler=-1), "filler is -1"),
        ("recall", dict(count=[4.5, 10]), "least count is 4.5"),
        ("countdown", dict(search=640.5), "search is 640.5"),
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
    with pytest.raises(SparseRLError, match="the task sums has no option 'deadline'"):  # it is graded in this process
        make("sums", deadline=3)


def test_every_task_is_described():
    described = dict(describe())
    assert [*TASKS, "gym:NAME", "FILE.py", "FILE.py:CLASS"] == list(described)
    assert described["sums"].startswith("add up a row of digits") and described["math"].startswith(
        "problems from JSONL files"
    )
    assert all(len(line) > 20 and "\n" not in line for line in described.values())


def test_a_grading_process_need_not_wait_for_torch():
    modules = "sparse_rl.tasks.worker, sparse_rl.tasks.user, sparse_rl.tasks.gym"
    code = f"import sys, {modules}; print({{'torch', 'numpy', 'sympy'}} & set(sys.modules))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "set()"
    )


class Echo(Task):
    """The reward is whatever the text says in Python."""

    name = "echo"

    def __getitem__(self, i):
        return Prompt(str(i), None, i)

    def reward(self, prompt, text):
        return eval(text)


def test_verdicts_and_rewards_that_fail_in_this_process():
    task = Echo()
    texts = ["1", "2.5", "0.25", "0", "-1", "True", "np.float32(0.5)", "np.array(1.0)"]
    grades = [
        (1, "right"),
        (2.5, "right"),
        (0.25, "partly"),
        (0, "wrong"),
        (-1, "wrong"),
        (1, "right"),
        (0.5, "partly"),
        (1, "right"),
    ]
    Echo.reward.__globals__["np"] = np
    assert task.grade(task.sample(0, 8), texts) == [Grade(*grade) for grade in grades]
    assert (
        all(type(grade.reward) is float for grade in task.grade(task.sample(0, 8), texts)) and task.last_error is None
    )
    failing = ["1", "float('nan')", "1 / 0", "float('inf')", "None", "'1'", "1j", "np.ones(2)", "exit(3)", "0"]
    assert task.grade(task.sample(0, 10), failing) == [RIGHT, *[ERROR] * 8, WRONG]
    assert task.grade([task[5]] * 2, ["None", "1"]) == [ERROR, RIGHT]
    assert task.last_error == "ValueError: the reward is nan; it must be finite (prompt 1)"  # the first, still
    for text, message in [
        ("1/0", "ZeroDivisionError: division by zero \\(prompt 0, .*line 1"),
        ("None", "TypeError: the reward is None"),
    ]:
        again = Echo()
        again.grade([again[0]], [text])
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(again.last_error)
    with pytest.raises(KeyboardInterrupt):
        task.grade([task[0]], ["(_ for _ in ()).throw(KeyboardInterrupt)"])
    with pytest.raises(ValueError, match="shorter"):
        task.grade(task.sample(0, 2), ["1"])


def test_a_judge_can_say_more_than_the_reward():
    class Judged(Echo):
        def judge(self, prompt, text):
            return Grade(0.0, "no answer") if not text else eval(text)

    task = Judged()
    grades = task.grade(task.sample(0, 4), ["", "Grade(1.0, 'right')", "1.0", "Grade(float('nan'), 'right')"])
    assert grades == [Grade(0.0, "no answer"), RIGHT, ERROR, ERROR] and "judge returned 1.0" in task.last_error


FUNCTIONS = """
import ctypes, faulthandler, os, signal, subprocess, sys, threading, time

def prompt(i):
    return f"What is {i} + {i}?", 2 * i

def solution(answer):
    return f"It is {answer}"

def reward(answer, text):
    if text == "hang":
        while True:
            pass
    if text == "hang hard":
        faulthandler.cancel_dump_traceback_later()  # so it does not end itself
        time.sleep(1000)
    if text == "stop":
        threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGSTOP)).start()
    if text == "sleep in C":
        time.sleep(1000)
    if text == "raise":
        raise KeyError("oh")
    if text == "exit":
        os._exit(7)
    if text == "crash":
        ctypes.string_at(0)
    if text == "quit":
        sys.exit("bye")
    if text == "print":
        print("noise", flush=True)
        os.write(1, b"more noise" * 10000)
    if text == "read":
        return float(input())
    if text == "nan":
        return float("nan")
    if text == "pid":
        return os.getpid()
    if text.startswith("long"):
        return len(text)
    if text.startswith("start "):
        pid = subprocess.Popen(["sleep", "1000"]).pid
        open(text[6:], "w").write(str(pid))
        time.sleep(1000)
    if text == "eat":
        return float(len(bytearray(4 << 30)))
    return float(text.split()[-1] == str(answer))
"""


@pytest.fixture
def functions(tmp_path):
    return write(tmp_path / "doubling.py", FUNCTIONS)


def write(path, source):
    path.write_text(textwrap.dedent(source))
    return str(path)


def alive(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_reward_may_fail_in_every_way_and_the_others_are_graded(functions, capfd):
    task = make(functions, deadline=1.0, workers=2)
    expected = {
        "hang": TIMEOUT,
        "sleep in C": TIMEOUT,
        "hang hard": TIMEOUT,
        "raise": ERROR,
        "exit": ERROR,
        "crash": ERROR,
        "quit": ERROR,
        "print": WRONG,
        "read": ERROR,
        "nan": ERROR,
        "0": WRONG,
    }
    prompts, texts = task.sample(0, 40), [f"It is {2 * i}" for i in range(40)]
    grades = [RIGHT] * 40
    for k, (text, grade) in enumerate(expected.items()):
        texts[3 * k + 1], grades[3 * k + 1] = text, grade
    assert task.grade(prompts, texts) == grades
    assert (
        task.last_error.startswith("KeyError: 'oh' (prompt 10, ") and "doubling.py, line " in task.last_error
    )  # the first by order
    assert task.grade(prompts[30:], texts[30:]) == grades[30:]
    out, err = capfd.readouterr()
    assert out == "" and "more noise" in err
    pids = {child.process.pid for child in task._pool._children}
    assert len(pids) == 2
    task.close()
    assert not any(map(alive, pids))


@pytest.mark.parametrize(
    "text, message",
    [("exit", "ended with exit code 7"), ("crash", "was ended by SIGSEGV"), ("quit", "SystemExit: bye")],
)
def test_how_a_grading_process_ended_is_told(functions, text, message):
    task = make(functions, workers=1)
    assert task.grade([task[0]], [text]) == [ERROR] and message in task.last_error
    task.close()


def test_processes_are_kept_and_long_texts_arrive(functions):
    task = make(functions, workers=2)
    assert task._pool._children == []  # none before the first completion
    first = [task.grade([task[0]], ["pid"])[0].reward for _ in range(5)]
    assert len(set(first)) == 1 and first[0] != os.getpid()  # one completion needs one process
    texts = ["long" + "x" * size for size in (0, 10, 100_000, 3_000_000)]
    assert [grade.reward for grade in task.grade(task.sample(0, 4), texts)] == list(map(len, texts))
    pids = {child.process.pid for child in task._pool._children}
    assert len(pids) == 2 and first[0] in pids
    wait_until(
        lambda task=task: {grade.reward for grade in task.grade(task.sample(0, 9), ["pid"] * 9)} == pids
    )  # both are ready
    for pid in pids:
        os.kill(pid, signal.SIGINT)  # Ctrl-C is not theirs
    assert {grade.reward for grade in task.grade(task.sample(0, 9), ["pid"] * 9)} <= pids
    for pid in pids:  # should they die while idle, no completion pays for it
        os.kill(pid, signal.SIGKILL)
    processes = [child.process for child in task._pool._children]
    wait_until(lambda: all(process.poll() is not None for process in processes))
    assert task.grade(task.sample(0, 6), [str(2 * i) for i in range(6)]) == [RIGHT] * 6
    task.close()
    assert task.grade(task.sample(0, 2), ["0", "3"]) == [RIGHT, WRONG]  # it starts again
    pids = {child.process.pid for child in task._pool._children}
    del task
    assert not any(map(alive, pids))


def test_a_process_that_does_not_read_cannot_block_the_parent(functions):
    task = make(functions, workers=1, deadline=1.0)
    assert task.grade([task[0]], ["stop"]) == [WRONG]
    stopped = psutil.Process(task._pool._children[0].process.pid)
    wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED)
    assert task.grade(task.sample(0, 2), ["long" * 1_000_000, "2"]) == [TIMEOUT, RIGHT]
    task.close()


def test_what_a_reward_started_ends_with_it_and_memory_can_be_limited(functions, tmp_path):
    task = make(functions, workers=1, deadline=1.0, memory=2)
    assert task.grade(task.sample(0, 3), [f"start {tmp_path / 'pid'}", "eat", "4"]) == [TIMEOUT, ERROR, RIGHT]
    assert task.last_error.startswith("MemoryError")
    wait_until(lambda: not alive(int((tmp_path / "pid").read_text())))
    task.close()


def test_the_time_to_start_is_not_the_rewards(tmp_path):
    slow = write(
        tmp_path / "slow.py",
        "import sys, time\ntime.sleep(1.2 * ('sparse_rl.tasks.worker' in sys.modules))\n" + FUNCTIONS,
    )
    task = make(slow, workers=1, deadline=0.6)
    assert task.grade([task[1]], ["2"]) == [RIGHT]
    task.close()


def test_processes_that_cannot_start_are_told(tmp_path):
    for line, message in [
        (
            "import nonesuch",
            "cannot be graded: .*child.py cannot be loaded: ModuleNotFoundError: No module named 'nonesuch'",
        ),
        ("import os; os._exit(5)", "ended with exit code 5 before it was ready, 3 times"),
    ]:
        path = write(
            tmp_path / "child.py", f"import sys\nif 'sparse_rl.tasks.worker' in sys.modules:\n    {line}\n{FUNCTIONS}"
        )
        task = make(path, workers=2)
        with pytest.raises(SparseRLError, match=message):
            task.grade(task.sample(0, 4), ["0"] * 4)
        assert task._pool._children == []
    odd = make(
        write(tmp_path / "odd.py", "def prompt(i): return 'x', lambda: i\ndef reward(answer, text): return 1"),
        workers=1,
    )
    with pytest.raises(SparseRLError, match="the answer of prompt 3 cannot be sent to a grading process"):
        odd.grade([odd[3]], ["x"])
    Echo.isolated = True
    try:
        with pytest.raises(
            SparseRLError, match=r"the task echo is graded in processes of its own; create it with make"
        ):
            Echo().grade([Echo()[0]], ["1"])
    finally:
        Echo.isolated = False


PARENT = """
import sys
from sparse_rl.tasks import make
task = make(sys.argv[1], deadline=float(sys.argv[2]), workers=2)
print(task.grade([task[1]] * 4, ["2"] * 4)[0].verdict, *(child.process.pid for child in task._pool._children), flush=True)
try:
    task.grade(task.sample(0, 2), ["hang"] * 2)
except KeyboardInterrupt:
    print("interrupted", len(task._pool._children), flush=True)
    print(*(grade.verdict for grade in task.grade(task.sample(0, 2), ["0", "3"])), *(child.process.pid for child in task._pool._children))
"""


@pytest.fixture
def parent(functions):
    """A program that grades, and then hangs in its rewards; it is told to do so with a deadline."""
    started, children = [], []

    def start(deadline):
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT, functions, str(deadline)],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        verdict, *pids = process.stdout.readline().split()
        children.extend(map(int, pids))
        assert verdict == "right" and len(pids) == 2 and all(alive(int(pid)) for pid in pids)
        time.sleep(0.3)  # into the hanging rewards
        return process, [int(pid) for pid in pids]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for pid in filter(alive, children):  # only where a test failed
        os.kill(pid, signal.SIGKILL)


def test_an_interrupt_reaches_the_parent_and_the_pool_can_be_used_again(parent):
    process, pids = parent(deadline=60)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, _ = process.communicate(timeout=20)
    lines = [line.split() for line in out.splitlines()]
    assert process.returncode == 0 and lines[0] == ["interrupted", "0"] and lines[1][:2] == ["right", "wrong"]
    wait_until(lambda: not any(alive(int(pid)) for pid in [*pids, *lines[1][2:]]))


def test_nothing_is_left_when_the_parent_is_killed(parent):
    process, pids = parent(deadline=0.5)
    process.send_signal(signal.SIGSTOP)  # it will not kill them
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(alive, pids)), seconds=10)  # they hang, and end themselves


def test_function_files(tmp_path, functions):
    task = make(functions)
    assert (task[4], task.num_prompts, task.name, task.isolated) == (
        Prompt("What is 4 + 4?", 8, 4),
        None,
        "doubling",
        True,
    )
    assert task.solution(task[4]) == "It is 8" and [p.index for p in task.sample(5, 3)] == [5, 6, 7]
    assert [p.index for p in task.held_out().sample(0, 2)] == [1_000_000_000, 1_000_000_001]
    finite = make(write(tmp_path / "finite.py", f"SIZE = 45\n{FUNCTIONS}"))
    held_out = finite.held_out()
    assert (finite.num_prompts, held_out.num_prompts) == (41, 4)
    assert sorted(p.index for p in finite.sample(41, 41)) == list(range(41)) != [p.index for p in finite.sample(41, 41)]
    assert (
        sorted(p.index for p in held_out.sample(0, 4))
        == list(range(41, 45))
        == sorted(p.index for p in held_out.held_out().sample(0, 4))
    )
    assert make(write(tmp_path / "called.py", f"def SIZE(): return 10\n{FUNCTIONS}")).num_prompts == 9
    with pytest.raises(SparseRLError, match="too few prompts to hold one out"):
        make(write(tmp_path / "one.py", f"SIZE = 1\n{FUNCTIONS}")).held_out()
    with pytest.raises(SparseRLError, match="SIZE is 0"):
        make(write(tmp_path / "none.py", f"SIZE = 0\n{FUNCTIONS}"))
    (tmp_path / "helper_beside.py").write_text("WORTH = 0.5")
    beside = make(
        write(
            tmp_path / "beside.py",
            "from helper_beside import WORTH\ndef prompt(i): return 'x', None\ndef reward(a, t): return WORTH",
        )
    )
    assert beside.grade([beside[0]], ["x"]) == [Grade(0.5, "partly")]
    with pytest.raises(SparseRLError, match="has no worked solutions"):
        beside.solution(beside[0])
    beside.close()


CLASSES = """
from dataclasses import dataclass
from sparse_rl.tasks import GeneratedTask, Prompt, Task

@dataclass
class Wanted:
    number: int

class Parity(Task):
    def __init__(self, modulus, offset=0):
        self.modulus, self.offset = modulus, offset
    def __getitem__(self, i):
        return Prompt(f"{i}?", Wanted((i + self.offset) % self.modulus), i)
    def reward(self, prompt, text):
        return float(int(text) == prompt.answer.number)

class Listed(Parity):
    def __len__(self):
        return 20

class Splits(GeneratedTask):
    isolated = False
    def __getitem__(self, i):
        return Prompt(f"{self.split} {i}", None, i)
    def reward(self, prompt, text):
        return 1.0

class Broken(Task):
    def __getitem__(self, i):
        return f"{i}?"
    def reward(self, prompt, text):
        return 1.0

class Unfinished(Task):
    pass
"""


def test_classes_of_a_file(tmp_path, monkeypatch):
    path = write(tmp_path / "classes.py", CLASSES)
    monkeypatch.chdir(tmp_path)
    task = make("classes.py:Parity", modulus=3, offset=1, workers=1, deadline=5)
    monkeypatch.chdir("/")  # the processes find it all the same
    assert task.isolated and task.name == "Parity" and task._pool.limits.deadline == 5
    assert task.grade(task.sample(0, 3), ["1", "2", "2"]) == [
        RIGHT,
        RIGHT,
        WRONG,
    ]  # options and answers of its own class travel
    assert task.grade(task.held_out().sample(0, 1), [str((10**9 + 1) % 3)]) == [RIGHT]
    task.close()
    listed = make(f"{path}:Listed", modulus=2)
    assert (len(listed), listed.num_prompts, listed.held_out().num_prompts) == (20, 18, 2)
    assert not {p.index for p in listed.sample(0, 100)} & {p.index for p in listed.held_out().sample(0, 100)}
    splits = make(f"{path}:Splits", seed=3)
    assert not splits.isolated and splits.held_out()[5].text == "held-out 5" and splits.held_out().seed == 3
    with pytest.raises(SparseRLError, match=r"gave '0\?'; its \[i\] must return a Prompt"):
        make(f"{path}:Broken").sample(0, 1)
    for name, options, message in [
        (f"{path}:Parity", {}, "needs the option 'modulus'"),
        (f"{path}:Parity", dict(moduls=2), "has no option 'moduls'; did you mean 'modulus'"),
        (f"{path}:Prity", {}, "has no task class 'Prity'; did you mean 'Parity'"),
        (f"{path}:Wanted", {}, "has no task class 'Wanted'"),
        (f"{path}:Unfinished", {}, "Unfinished must define __getitem__"),
        (f"{path}", {}, "has no function prompt; name its class: classes.py:Parity"),
        ("nowhere.py", {}, "there is no file .*nowhere.py"),
        ("nowhere.py:Parity", {}, "there is no file .*nowhere.py"),
        (write(tmp_path / "half.py", "def prompt(i): return 'x', 1"), {}, "has no function reward; define prompt"),
        (write(tmp_path / "wrong.py", "def prompt(i:"), {}, "cannot be loaded: SyntaxError"),
        (write(tmp_path / "fine.py", FUNCTIONS), dict(size=3), "has no option 'size'"),
    ]:
        with pytest.raises(SparseRLError, match=message):
            make(name, **options)
    with pytest.raises(SparseRLError, match=r"prompt\(2\) gave 'x'; it must return"):
        make(write(tmp_path / "bare.py", "def prompt(i): return 'x'\ndef reward(a, t): return 1")).sample(2, 1)


def test_gym():
    pytest.importorskip("reasoning_gym")
    task = make("gym:spell_backward", workers=1, min_word_len=3, max_word_len=5)
    prompts = task.sample(0, 600)
    assert prompts[590:] == make("gym:spell_backward", min_word_len=3, max_word_len=5).sample(590, 10)
    assert len({p.text for p in prompts}) > 300 and "answer: ..." in prompts[0].text
    assert not {p.text for p in prompts[:20]} & {
        p.text for p in prompts[500:520]
    }  # the next dataset object goes on, not back
    held_out = task.held_out()
    assert held_out.config == task.config
    sums, later = make("gym:chain_sum", seed=0), make("gym:chain_sum", seed=1)
    asked = [{p.text for p in t.sample(0, 300)} for t in (sums, sums.held_out(), later, later.held_out())]
    assert all(
        len(a & b) < 15 for k, a in enumerate(asked) for b in asked[k + 1 :]
    )  # neighbouring seeds would share 299
    right = f"thinking\nanswer: {prompts[0].answer['answer']}"
    grades = task.grade([prompts[0]] * 3, [right, "no idea", "answer: " + prompts[0].answer["answer"] + "zzzzzzzz"])
    assert grades[:2] == [RIGHT, Grade(0.0, "no answer")] and 0 <= grades[2].reward < 1
    task.close()
    finite = make("gym:chain_sum", size=10)
    assert finite.num_prompts == 10 and sorted(p.index for p in finite.sample(10, 10)) == list(range(10))
    for name, options, message in [
        ("gym:chain_sums", {}, "no dataset 'chain_sums'; did you mean 'chain_sum'"),
        ("gym:chain_sum", dict(min_term=3), "no option 'min_term'; did you mean 'min_terms'"),
        ("gym:chain_sum", dict(min_terms=-3), "refuses the options of gym:chain_sum"),
        ("gym:chain_sum", dict(split="test"), "split is 'test'"),
    ]:
        with pytest.raises(SparseRLError, match=message):
            make(name, **options)


def test_gym_grids_have_answers_of_several_lines():
    pytest.importorskip("reasoning_gym")
    task = make("gym:mini_sudoku")
    prompt = task[0]
    assert "\n" in prompt.answer["answer"]
    assert task.judge(prompt, f"so\nanswer:\n{prompt.answer['answer']}") == RIGHT


def test_gym_without_reasoning_gym(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(SparseRLError, match="pip install reasoning-gym"):
        make("gym:chain_sum")
