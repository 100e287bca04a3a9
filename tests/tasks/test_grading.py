"""Grading: verdicts, rewards that fail in any way, and child processes that leave nothing behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest

from sparse_rl.errors import SparseRLError
from sparse_rl.tasks import Grade, Prompt, Task, make
from tests.helpers.runs import PATIENCE
from tests.helpers.task_files import FUNCTIONS, write

RIGHT, WRONG, ERROR, TIMEOUT = Grade(1.0, "right"), Grade(0.0, "wrong"), Grade(0.0, "error"), Grade(0.0, "timeout")


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


def alive(pid):
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_reward_may_fail_in_every_way_and_the_others_are_graded(functions, capfd, impatient):
    task = make(functions, deadline=60, workers=2)
    impatient(0.5, lambda _, text: "hang" in text or text == "sleep in C")
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


def test_processes_may_start_before_there_is_anything_to_grade(functions):
    """Their report then waits for the first completion; starting them again starts no more."""
    task = make(functions, workers=2)
    task.start_grading(9)
    early = {child.process.pid for child in task._pool._children}
    assert len(early) == 2 and not any(child.outbox for child in task._pool._children)  # they know their task
    task.start_grading(9)
    assert {grade.reward for grade in task.grade(task.sample(0, 9), ["pid"] * 9)} <= early
    dead = task._pool._children[0].process
    os.kill(dead.pid, signal.SIGKILL)
    wait_until(lambda: dead.poll() is not None)
    task.start_grading(9)
    assert task.grade(task.sample(0, 2), ["0", "3"]) == [RIGHT, WRONG]
    assert dead.pid not in {child.process.pid for child in task._pool._children}
    task.close()
    Echo().start_grading(9)  # graded in this process: nothing to start


def test_a_process_that_does_not_read_cannot_block_the_parent(functions, impatient):
    task = make(functions, workers=1, deadline=60)
    assert task.grade([task[0]], ["1"]) == [WRONG]
    stopped = psutil.Process(task._pool._children[0].process.pid)
    stopped.suspend()
    impatient(0.5, lambda _, text: text.startswith("long"))
    wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED)
    assert task.grade(task.sample(0, 2), ["long" * 1_000_000, "2"]) == [TIMEOUT, RIGHT]
    task.close()


def test_what_a_reward_started_ends_with_it_and_memory_can_be_limited(functions, tmp_path, impatient):
    task = make(functions, workers=1, deadline=60, memory=2)
    impatient(3, lambda _, text: text.startswith("start"))  # a thousand times what it takes to start something
    assert task.grade(task.sample(0, 3), [f"start {tmp_path / 'pid'}", "eat", "4"]) == [TIMEOUT, ERROR, RIGHT]
    assert task.last_error.startswith("MemoryError")
    wait_until(lambda: not alive(int((tmp_path / "pid").read_text())))
    task.close()


def test_the_time_to_start_is_not_the_rewards(tmp_path):
    slow = write(
        tmp_path / "slow.py",
        f"import os, time\ntime.sleep(2.1 * (os.getpid() != {os.getpid()}))\n{FUNCTIONS}",
    )
    task = make(slow, workers=1, deadline=2)
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
        path = write(tmp_path / "child.py", f"import os\nif os.getpid() != {os.getpid()}:\n    {line}\n{FUNCTIONS}")
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
        with pytest.raises(SparseRLError, match=r"the task echo is graded in separate processes; create it with make"):
            Echo().grade([Echo()[0]], ["1"])
    finally:
        Echo.isolated = False


PARENT = """
import sys
from sparse_rl.tasks import make
task = make(sys.argv[1], deadline=float(sys.argv[2]), workers=2)
def pids():
    return [child.process.pid for child in task._pool._children]
print(task.grade([task[1]] * 4, ["2"] * 4)[0].verdict, *pids(), flush=True)
try:
    task.grade(task.sample(0, 2), [f"hang and tell {place}" for place in sys.argv[3:]])
except KeyboardInterrupt:
    print("interrupted", len(task._pool._children), flush=True)
    print(*(grade.verdict for grade in task.grade(task.sample(0, 2), ["0", "3"])), *pids())
"""


@pytest.fixture
def parent(functions, tmp_path):
    """A program that graded with this deadline, and now hangs in its rewards."""
    started, children = [], []

    def start(deadline):
        hanging = [tmp_path / "first", tmp_path / "second"]
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT, functions, str(deadline), *hanging],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        verdict, *pids = process.stdout.readline().split()
        children.extend(map(int, pids))
        assert verdict == "right" and len(pids) == 2 and all(alive(int(pid)) for pid in pids)
        wait_until(lambda: all(place.exists() for place in hanging))
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
    out, _ = process.communicate(timeout=PATIENCE)
    lines = [line.split() for line in out.splitlines()]
    assert process.returncode == 0 and lines[0] == ["interrupted", "0"] and lines[1][:2] == ["right", "wrong"]
    wait_until(lambda: not any(alive(int(pid)) for pid in [*pids, *lines[1][2:]]))


def test_nothing_is_left_when_the_parent_is_killed(parent):
    process, pids = parent(deadline=2)
    process.send_signal(signal.SIGSTOP)  # it will not kill them
    process.kill()
    process.wait()
    wait_until(lambda: not any(map(alive, pids)))  # they hang, and end themselves
