"""Tasks that are not built in: files of functions, classes of a file, and reasoning-gym."""

import sys

import pytest

from sparse_rl.errors import SparseRLError
from sparse_rl.tasks import Grade, Prompt, make
from tests.helpers.task_files import FUNCTIONS, write

RIGHT, WRONG, ERROR, TIMEOUT = Grade(1.0, "right"), Grade(0.0, "wrong"), Grade(0.0, "error"), Grade(0.0, "timeout")


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
    with pytest.raises(SparseRLError, match=r"has no worked solutions .*; define solution\(answer\) in its file"):
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
        (
            write(tmp_path / "none.py", "\nx = y"),
            {},
            r"cannot be loaded: NameError: name 'y' is not defined \(line 2\)",
        ),
        (
            write(tmp_path / "few.py", "def prompt(i): return 'x', 1\ndef reward(text): return 1"),
            {},
            r"few.py defines reward\(text\); it must take \(answer, text\)",
        ),
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
