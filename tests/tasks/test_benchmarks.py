r"""The seven benchmarks: templates, what is read from their files, and that every reference is right against itself.

The published files are read from the folder that SPARSE_RL_DATA names; without it, files of the same form are written.
"""

import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from sparse_rl.cli.list import LISTS
from sparse_rl.errors import SparseRLError
from sparse_rl.tasks import Prompt, make
from sparse_rl.tasks.benchmarks import BENCHMARKS, FOLDER, SOURCES
from sparse_rl.tasks.equality import how_graded, readings, tidy
from sparse_rl.tasks.templates import TEMPLATES, dress, template_of
from tests.helpers.benchmark_files import ROWS, STRING_ONLY, files
from tests.helpers.rows import write

DATA = os.environ.get(FOLDER)
needs_data = pytest.mark.skipif(not DATA, reason=f"{FOLDER} names no folder with the published files")

# ---------- templates

QUESTION = "Let $x = \\{1\\}$.\nWhat is <|im_start|>$x$?"
ASK = "Please reason step by step, and put your final answer within"
BY_HAND = {
    "plain": QUESTION,
    "chat": [{"role": "user", "content": f"{QUESTION}\n{ASK} \\boxed{{}}."}],
    "qwen-boxed": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    f"{QUESTION}\n{ASK} \\boxed{{{{}}}}.<|im_end|>\n<|im_start|>assistant\n",
    "abel": [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": f"{QUESTION}\n{ASK} \\boxed{{{{}}}}."},
    ],
}


def test_templates_by_hand():
    assert list(BY_HAND) == list(TEMPLATES)
    for name, prompt in BY_HAND.items():
        assert dress(QUESTION, name) == prompt
        assert template_of(prompt) == (None if name == "plain" else name)
    chat, abel = BY_HAND["chat"], BY_HAND["abel"]
    for other in (
        BY_HAND["qwen-boxed"].replace("{{}}", "{}"),
        BY_HAND["qwen-boxed"].removesuffix("\n"),
        [{"role": "assistant", **{"content": chat[0]["content"]}}],
        [*abel, {"role": "assistant", "content": "x"}],
        [{"role": "system", "content": "Be brief."}, abel[1]],
        [abel[1]],  # doubled braces without its system message
        [abel[0], chat[0]],
        dress("", "chat"),
    ):
        assert template_of(other) is None, other
    with pytest.raises(
        SparseRLError, match=re.escape("there is no template 'qwen'; did you mean 'qwen-boxed'? Known: plain, chat,")
    ):
        dress(QUESTION, "qwen")


def test_templates_and_benchmarks_are_listed():
    assert [name for name, _ in LISTS["templates"]()] == list(TEMPLATES)
    ideas = dict(LISTS["tasks"]())
    assert all(ideas[source.name] == source.idea for source in SOURCES)


def test_the_template_of_a_task(tmp_path):
    rows = [{"prompt": f"{i} + 1?", "label": str(i + 1)} for i in range(9)]
    plain = write(tmp_path / "plain.jsonl", rows)
    for name in TEMPLATES:
        task = make("math", files=plain, template=name)
        assert task.template == name
        assert [task[i].text for i in range(9)] == [dress(row["prompt"], name) for row in rows]
        ready = write(tmp_path / "ready.jsonl", [{**row, "prompt": dress(row["prompt"], name)} for row in rows])
        task = make("math", files=ready)
        assert task.template == (None if name == "plain" else name) and task[3].text == dress("3 + 1?", name)
        again = make("math", files=ready, template=name)  # not dressed twice
        assert [again[i] for i in range(9)] == [task[i] for i in range(9)]
    assert make("math", files=plain).template is None and make("sums").template is None
    assert make("math", files=plain, chat=True, suffix=TEMPLATES["chat"].after).template == "chat"
    mixed = write(
        tmp_path / "mixed.jsonl",
        [{**row, "prompt": dress(row["prompt"], "abel" if i else "chat")} for i, row in enumerate(rows)],
    )
    assert make("math", files=mixed).template is None
    abel = write(tmp_path / "abel.jsonl", [{**row, "prompt": dress(row["prompt"], "abel")} for row in rows])
    messages = write(tmp_path / "m.jsonl", [{"prompt": [{"role": "user", "content": "two?"}], "label": "2"}])
    for options, message in [
        (
            dict(files=plain, template="chat", chat=True),
            "template 'chat' sets the text around a question; omit chat and suffix",
        ),
        (dict(files=plain, template="chat", suffix="!"), "omit chat and suffix"),
        (dict(files=plain, template="chta"), "there is no template 'chta'; did you mean 'chat'"),
        (
            dict(files=abel, template="chat"),
            "the prompts have the form of the template 'abel', so they cannot be put in that of 'chat'",
        ),
        (dict(files=messages, template="chat"), "the prompts are chat messages of another form"),
    ]:
        with pytest.raises(SparseRLError, match=message):
            make("math", **options)


@needs_data
@pytest.mark.parametrize(
    "name, file", [("qwen-boxed", "simplerl_qwen_level3to5.jsonl"), ("abel", "simplerl_abel_level3to5.jsonl")]
)
def test_simplerl(name, file):
    """All usable rows load, in the form of their template: each prompt is its question dressed again, byte for byte."""
    path = Path(DATA) / "train" / file
    task = make("math", files=path)
    assert len(task) == 8521 and task.template == name and task.duplicates == 1
    assert task.skipped == {"label is empty": 2}
    assert task.skipped_rows == [f"{file}:5055 (label is empty)", f"{file}:5159 (label is empty)"]
    prompts = [json.loads(line)["prompt"] for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(prompts) == 8523
    for prompt in prompts:
        text = prompt if isinstance(prompt, str) else prompt[1]["content"]
        (question,) = re.fullmatch(
            r"(?:.*?<\|im_start\|>user\n)?(.*)\nPlease reason step by step.*?", text, flags=re.DOTALL
        ).groups()
        assert template_of(prompt) == name and dress(question, name) == prompt
    first, second = (json.dumps(prompts[i]) for i in (1769, 4007))
    texts = [json.dumps(p.text) for p in task._split.prompts]
    assert first == second and texts.count(first) == 2  # the duplicate is kept


# ---------- the files


def test_benchmarks_are_read_in_order(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    folder = files(tmp_path)
    for source in SOURCES:
        _, question, answer = ROWS[source.name]
        task = make(source.name, folder=folder)
        assert (len(task), task.num_prompts, task.name, task.template) == (
            source.rows,
            source.rows,
            source.name,
            "plain",
        )
        assert (
            task.sample(3, 2) == [Prompt(f"{i}: {question}", answer, i) for i in (3, 4)] == task.held_out().sample(3, 2)
        )
        assert [p.index for p in task.sample(source.rows - 1, 3)] == [source.rows - 1, 0, 1]
        chat = make(source.name, folder=folder, template="chat")
        assert chat.template == "chat" and chat[5].text == dress(f"5: {question}", "chat") and chat[5].answer == answer
        assert chat._pool is task._pool  # one set of grading processes for all
        assert (source.samples, source.new_tokens) == ((32, 16384) if source.name in ("aime24", "amc23") else (1, 8192))


def test_rows_of_olympiadbench(tmp_path):
    row, _, _ = ROWS["olympiadbench"]
    changes = [
        {"context": "Let $n=3$."},
        {"final_answer": ["4.2"], "unit": "%"},
        {"final_answer": ["$\\frac{41}{12}$"], "unit": "km"},
    ]
    path = write(tmp_path / "olympiadbench.jsonl", [{**row, **change} for change in changes])
    task = make("olympiadbench", folder=Path(path).parent, subset=True)
    assert [p.text for p in task.sample(0, 3)] == ["Let $n=3$.\nBoth?", "Both?", "Both?"]
    assert [p.answer for p in task.sample(0, 3)] == ["$1$,$2$", r"4.2\%", r"$\frac{41}{12}$"]


def test_where_the_files_are(tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(
        SparseRLError,
        match=r"gsm8k is read from gsm8k.jsonl; name its folder with --data FOLDER .* task.folder in a recipe",
    ):
        make("gsm8k")
    (tmp_path / "eval").mkdir()
    files(tmp_path / "eval")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert len(make("gsm8k")) == 1319
    monkeypatch.setenv(FOLDER, str(tmp_path / "eval"))
    assert len(make("minerva")) == 272
    (tmp_path / "eval" / "gsm8k.jsonl").unlink()
    said = (
        r"gsm8k: there is no file .*eval/gsm8k.jsonl, nor .*eval/eval/gsm8k.jsonl; put gsm8k.jsonl there .`sparse-rl "
    )
    with pytest.raises(SparseRLError, match=said):
        make("gsm8k")
    with pytest.raises(SparseRLError, match="the task gsm8k has no option 'flder'; did you mean 'folder'"):
        make("gsm8k", flder=tmp_path)


def test_another_number_of_rows_is_refused_unless_it_is_meant(tmp_path):
    folder = files(tmp_path, count=7)
    with pytest.raises(
        SparseRLError,
        match=r"gsm8k.jsonl has 7 rows, but gsm8k has 1,319; use the published file, or set subset=True",
    ):
        make("gsm8k", folder=folder)
    task = make("gsm8k", folder=folder, subset=True)
    assert len(task) == 7 and task.name == "gsm8k (7 of 1,319)"
    row, _, _ = ROWS["aime24"]
    write(folder / "aime24.jsonl", [row] * 31)
    for subset in (False, True):  # more rows than published are not a part
        with pytest.raises(SparseRLError, match=r"has 31 rows, but aime24 has 30"):
            make("aime24", folder=folder, subset=subset)
    write(folder / "aime24.jsonl", [row] * 28 + [{**row, "answer": ""}] * 2)
    task = make("aime24", folder=folder)  # all there: two without a reference are omitted and counted
    assert len(task) == 28 and task.skipped == {"answer is empty": 2} and task.name == "aime24"


def test_the_answer_of_a_completion():
    assert make("math", files=None).extracted(r"\boxed{1} no, $\boxed{\frac{1}{2}}$. \boxed{3") == r"\frac{1}{2}"
    assert make("math", files=None).extracted("answer: 3") is None
    assert make("recall").extracted("so\nanswer: 3 \n") == "3" and make("recall").extracted("3") is None
    assert make("sums").extracted("1+2=3;3+4=7") == "7" and make("sums").extracted("1+2=3;") is None


# ---------- references against themselves

HOW = {
    "gsm8k": {"mathematics": 1319},
    "math500": {"mathematics": 492, "words": 8},
    "gaokao2023en": {"mathematics": 378, "words": 4, "string only": 1},
    "minerva": {"mathematics": 272},
    "olympiadbench": {"mathematics": 674, "string only": 1},
    "aime24": {"mathematics": 30},
    "amc23": {"mathematics": 40},
}


@needs_data
def test_every_reference_is_right_against_itself():
    """Through the grading processes: by mathematics, as words or, for the two listed, only as an equal string."""
    listed = []
    for name, cls in BENCHMARKS.items():
        task = make(name, deadline=60)
        prompts = task.sample(0, len(task))
        assert len(task) == cls.source.rows - 2 * (name == "gaokao2023en")
        grades = task.grade(prompts, [rf"... so the answer is $\boxed{{{prompt.answer}}}$." for prompt in prompts])
        assert {(g.reward, g.verdict) for g in grades} == {(1.0, "right")} and task.last_error is None, name
        how = [how_graded(prompt.answer) for prompt in prompts]
        assert Counter(how) == HOW[name], name
        listed += [prompt.answer for prompt, kind in zip(prompts, how, strict=True) if kind == "string only"]
    task.close()
    assert listed == STRING_ONLY
    assert make("gaokao2023en").skipped == {"answer is empty": 2}


@needs_data
def test_no_other_reference_of_a_benchmark_is_right_by_accident():
    """Each reference is wrong as the answer to its neighbour's problem, unless both mean the same."""
    same = []
    for name in ("math500", "olympiadbench"):
        task = make(name, deadline=60)
        prompts = [p for p in task.sample(0, len(task)) if not re.fullmatch(r"\$?-?\d+\$?", p.answer)]
        turned = [*prompts[1:], prompts[0]]
        grades = task.grade(prompts, [rf"\boxed{{{p.answer}}}" for p in turned])
        same += [(p.answer, q.answer) for p, q, g in zip(prompts, turned, grades, strict=True) if g.reward]
        assert {g.verdict for g in grades} <= {"right", "wrong", "bad gold"}
    task.close()
    assert same == SAME


SAME: list[tuple[str, str]] = []


@pytest.mark.parametrize(
    "gold, value",
    [
        ("2,125", "2125"),
        ("1,450,000", "1450000"),
        ("6, 10", "{6, 10}"),
        ("$48$, $384$", "{48, 384}"),
        ("2500,7500", "{2500, 7500}"),
        ("$41352,42351,51342$", "{41352, 42351, 51342}"),
        ("$(312,123,231)$", "(312, 123, 231)"),
        ("(5,000)", "(5, 0)"),
        ("$221,$8$", "{8, 221}"),
        (r"11,\! 111,\! 111,\! 100", "11111111100"),
        (r"$0.05$ and $0.6$", "{0.05, 0.6}"),
        (r"\{1\pm\sqrt{5},-2\}", "{-2, 1 - sqrt(5), 1 + sqrt(5)}"),
        ("025", "25"),
    ],
)
def test_lists_are_no_numbers_and_numbers_no_lists(gold, value):
    assert [str(reading) for reading in readings(tidy(gold))] == [value]
