r"""Worked solutions of `math`, and rows from JSON, CSV, parquet, arrow and the hub."""

import csv
import json
import sys

import pytest

from sparse_rl.errors import SparseRLError
from sparse_rl.tasks import Prompt, make
from tests.helpers.rows import write

GSM8K = {
    "question": "Natalia sold clips to 48 friends, and half as many in May. How many?",
    "answer": "She sold 48/2 = <<48/2=24>>24 in May.\nTogether 48+24 = $<<48+24=72>>72.\n#### 72",
}
FIELDS = dict(prompt="question", answer="answer", solution="answer")


@pytest.mark.parametrize(
    ("options", "row", "solution"),
    [
        (FIELDS, GSM8K, "She sold 48/2 = <<48/2=24>>24 in May.\nTogether 48+24 = $<<48+24=72>>72."),
        (FIELDS | {"remove_marks": True}, GSM8K, "She sold 48/2 = 24 in May.\nTogether 48+24 = $72."),
        (FIELDS, {"question": "?", "answer": "#### 72"}, ""),
        (dict(solution="work"), {"prompt": "?", "label": 72.0, "work": " Add.\n"}, "Add."),
        (dict(solution="work"), {"prompt": "?", "label": "72", "work": "#### is a word\nAdd."}, "#### is a word\nAdd."),
    ],
)
def test_a_solution_without_a_box_ends_with_one(tmp_path, options, row, solution):
    task = make("math", files=write(tmp_path / "rows.jsonl", [row]), **options)
    ending = r"The answer is \boxed{72}."
    assert task.solution(task[0]) == (f"{solution}\n{ending}" if solution else ending)
    assert task.judge(task[0], task.solution(task[0])).verdict == "right"


def test_a_solution_with_a_box_stays_as_it_is(tmp_path):
    row = {"problem": "?", "answer": r"\frac{1}{2}", "solution": "Halve: $\\boxed{\\frac12}$.\n\nDone <<a < b>>."}
    options = dict(prompt="problem", solution="solution", answer="answer", remove_marks=True)
    task = make("math", files=write(tmp_path / "rows.jsonl", [row]), **options)
    assert task.solution(task[0]) == row["solution"]


def test_every_split_has_its_own_solutions(tmp_path):
    rows = [{"prompt": f"{i}?", "label": i, "work": f"it is {i}"} for i in range(30)]
    options = dict(files=write(tmp_path / "rows.jsonl", rows), solution="work", holdout=10)
    for task in (
        make("math", **options),
        make("math", **options).held_out(),
        make("math", **options, split="held-out"),
    ):
        for prompt in task.sample(0, len(task)):
            assert task.solution(prompt) == f"it is {prompt.text[:-1]}\nThe answer is \\boxed{{{prompt.answer}}}."


def test_missing_solutions_are_told_in_a_sentence(tmp_path):
    rows = [{"prompt": f"{i}?", "label": i, "work": f"{i}"} for i in range(30)]
    path = write(tmp_path / "rows.jsonl", rows)
    with pytest.raises(SparseRLError, match=r"does not know which field of a row holds them; set task.solution"):
        make("math", files=path).solution(Prompt("0?", 0))
    with pytest.raises(
        SparseRLError,
        match=r"30 of 30 rows cannot be used \(no field 'steps': 30\); its rows have the fields prompt, label, work; "
        r"set the task's prompt, answer and solution to theirs",
    ):
        make("math", files=path, solution="steps")
    some = [*rows, {"prompt": "x", "label": 1, "work": " "}, {"prompt": "x", "label": 1, "work": 3}]
    task = make("math", files=write(tmp_path / "some.jsonl", some), solution="work")
    assert task.skipped == {"work is empty": 1, "work is int, not text": 1} and len(task) == 30


def same(task, expected):
    assert len(task) == len(expected)
    for got, wanted in zip(task.sample(0, len(task)), expected.sample(0, len(expected))):
        assert got == wanted and task.solution(got) == expected.solution(wanted)


def test_parquet_arrow_and_folders_are_read_like_jsonl(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    messages = [{"role": "user", "content": "x"}]
    rows = [
        {"question": [{**messages[0], "content": f"{i}?"}], "answer": f"it is <<{i}>>{i}\n#### {i}"} for i in range(20)
    ]
    options = FIELDS | {"remove_marks": True, "holdout": 5}
    plain = make("math", files=write(tmp_path / "rows.jsonl", rows), **options)
    data = datasets.Dataset.from_list(rows)
    data.to_parquet(str(tmp_path / "rows.parquet"))
    datasets.DatasetDict(train=data).save_to_disk(str(tmp_path / "saved"))
    (arrow,) = (tmp_path / "saved" / "train").glob("*.arrow")
    for source in (tmp_path / "rows.parquet", arrow, tmp_path / "saved" / "train", [str(tmp_path / "rows.parquet")]):
        same(make("math", files=source, **options), plain)
    with pytest.raises(SparseRLError, match=r"saved has the splits train; name one, such as .*saved/train\."):
        make("math", files=tmp_path / "saved", **options)
    (tmp_path / "bad.parquet").write_bytes(b"nonsense")
    with pytest.raises(SparseRLError, match=r"bad.parquet cannot be read by datasets \("):
        make("math", files=tmp_path / "bad.parquet", **options)
    with pytest.raises(SparseRLError, match=r"20 of 20 rows cannot be used \(no field 'prompt': 20\)"):
        make("math", files=tmp_path / "rows.parquet")


def test_arrays_and_tables_are_read_like_jsonl(tmp_path):
    rows = [{"question": f'{i}, "or"\n{i + 1}?', "answer": f"it is {i}\n#### {i}"} for i in range(20)]
    plain = make("math", files=write(tmp_path / "rows.jsonl", rows), **FIELDS, holdout=5)
    for mark in ("", "\ufeff"):
        (tmp_path / "rows.json").write_text(mark + json.dumps(rows, indent=1))
        same(make("math", files=tmp_path / "rows.json", **FIELDS, holdout=5), plain)
        with (tmp_path / "rows.csv").open("w", newline="") as file:
            file.write(mark)
            table = csv.DictWriter(file, ["question", "answer"])
            table.writeheader()
            table.writerows(rows)
        same(make("math", files=tmp_path / "rows.csv", **FIELDS, holdout=5), plain)
    (tmp_path / "some.json").write_text(json.dumps([*rows, 7]))
    assert make("math", files=tmp_path / "some.json", **FIELDS).skipped == {"not an object": 1}
    (tmp_path / "some.CSV").write_text("\n\nquestion,answer\nx,1\n\ny\nHow much is 1,200?,1200\n" + "z,3\n" * 60)
    assert make("math", files=tmp_path / "some.CSV", **FIELDS).skipped == {
        "no field 'answer'": 1,
        "more cells than fields": 1,
    }
    first = [[1, 2], *rows, *rows]  # lines, of which one is an array
    assert make("math", files=write(tmp_path / "lines.jsonl", first), **FIELDS).skipped == {"not an object": 1}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b'[{"question": 1,', r"a.json begins like a JSON array, but is not one \("),
        ("a.csv", b"question,answer\n\xff,1\n", r"a.csv is not a CSV file in UTF-8 \("),
        ("a.csv", b'question,answer\n"x,1\n', r"a.csv is not a CSV file in UTF-8 \(unexpected end of data"),
        ("a.json", b"[]", "a.json has no rows"),
        ("a.csv", b"", "a.csv has no rows"),
        ("a.csv", b"question,answer\n", "a.csv has no rows"),
        ("a.csv", b"question,answer,answer\n1,2,3\n", "a.csv has two fields 'answer'"),
    ],
)
def test_broken_arrays_and_tables_get_a_sentence(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SparseRLError, match=said):
        make("math", files=tmp_path / name, **FIELDS)


def test_datasets_of_the_hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked, data = [], datasets.Dataset.from_list([GSM8K])

    def load(name, config, split, revision):
        asked.append((name, config, split, revision))
        if name == "away":
            raise ConnectionError("Couldn't reach 'away'\non the Hub")
        return data

    monkeypatch.setattr(datasets, "load_dataset", load)
    expected = make("math", files=write(tmp_path / "rows.jsonl", [GSM8K]), **FIELDS)
    for source in ("hub:openai/gsm8k:main:test", "hub:some/data@v2:test", "hub:some/data"):
        same(make("math", files=source, **FIELDS), expected)
    assert asked == [
        ("openai/gsm8k", "main", "test", None),
        ("some/data", None, "test", "v2"),
        ("some/data", None, "train", None),
    ]
    with pytest.raises(
        SparseRLError, match=r"hub:away cannot be loaded \(ConnectionError: Couldn't reach 'away' on the Hub\); check"
    ):
        make("math", files="hub:away")
    with pytest.raises(SparseRLError, match=r"hub:a:b:c:d does not name a dataset; write hub:NAME"):
        make("math", files="hub:a:b:c:d")


@pytest.mark.parametrize("source", ["hub:openai/gsm8k:main:train", "rows.parquet"])
def test_a_missing_package_is_told_in_a_sentence(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(SparseRLError, match=r"pip install 'sparse-rl\[datasets\]', or give JSONL files"):
        make("math", files=source)
    assert len(make("math", files=write(tmp_path / "a.jsonl", [json.dumps({"prompt": "x", "label": 1})]))) == 1
