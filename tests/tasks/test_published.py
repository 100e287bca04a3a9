"""`sparse-rl data`: GSM8K from the hub or from raw files, as files that our tasks read."""

import dataclasses
import json
import sys

import pytest

from sparse_rl.errors import SparseRLError
from sparse_rl.tasks import make
from sparse_rl.tasks import published as module
from sparse_rl.tasks.rows import rows_of
from tests.helpers.rows import write
from tests.helpers.runs import run

TRAIN = [{"question": f"{i}?", "answer": f"Zwölf ½ <<{i}>>{i}\n#### {i}"} for i in range(7)]
TEST = [{"question": f"{i}?", "answer": f"It is {i}.\n#### {i}", "idx": i} for i in range(7, 10)]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """GSM8K with seven and three rows."""
    data = module.PUBLISHED["gsm8k"]
    parts = [dataclasses.replace(part, rows=rows) for part, rows in zip(data.parts, (7, 3))]
    monkeypatch.setitem(module.PUBLISHED, "gsm8k", dataclasses.replace(data, parts=tuple(parts)))


def written(folder):
    files = [folder / "train" / "gsm8k.jsonl", folder / "eval" / "gsm8k.jsonl"]
    assert sorted(path for path in folder.rglob("*") if path.is_file()) == sorted(files)
    return [[json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] for path in files]


EXPECTED = [TRAIN, [{key: row[key] for key in ("question", "answer")} for row in TEST]]


def test_raw_files_become_ours(tmp_path, monkeypatch):
    (tmp_path / "raw").mkdir()
    write(tmp_path / "raw" / "train.jsonl", TRAIN)
    lone = run("data", "gsm8k", "--from", tmp_path / "raw", "--to", tmp_path / "data")
    assert lone.returncode == 1 and "holds no test.jsonl" in lone.stderr and "file of 3 rows there" in lone.stderr
    write(tmp_path / "raw" / "test.jsonl", TEST)
    done = run("data", "gsm8k", "--from", tmp_path / "raw", "--to", tmp_path / "data")
    assert done.returncode == 0 and "7 rows, is there already" in done.stdout and "3 rows, written" in done.stdout
    assert written(tmp_path / "data") == EXPECTED
    again = run("data", "gsm8k", "--to", tmp_path / "data")  # asks nobody
    assert again.returncode == 0 and again.stdout.count("is there already") == 2
    fields = dict(prompt="question", answer="answer", solution="answer", remove_marks=True)
    task = make("math", files=tmp_path / "data" / "train" / "gsm8k.jsonl", **fields)
    assert task.solution(task[2]) == "Zwölf ½ 2\nThe answer is \\boxed{2}."
    again = run("data", "gsm8k", "--from", tmp_path / "data", "--to", tmp_path / "copy")  # our own names are known, too
    assert again.returncode == 0 and written(tmp_path / "copy") == EXPECTED
    assert "there is no data set 'gsmk'; did you mean 'gsm8k'" in run("data", "gsmk").stderr


def test_parquet_and_the_hub(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    sets = {"train": datasets.Dataset.from_list(TRAIN), "test": datasets.Dataset.from_list(TEST)}
    for split, data in sets.items():
        data.to_parquet(str(tmp_path / "raw" / "main" / f"{split}-00000-of-00001.parquet"))
    done = run("data", "gsm8k", "--from", tmp_path / "raw", "--to", tmp_path / "data")
    assert done.returncode == 0 and written(tmp_path / "data") == EXPECTED, done.stderr
    asked = []
    load = lambda name, config, split, revision: asked.append((name, config, split)) or sets[split]  # noqa: E731
    monkeypatch.setattr(datasets, "load_dataset", load)
    done = run("data", "gsm8k", "--to", tmp_path / "fetched")
    assert done.returncode == 0 and written(tmp_path / "fetched") == EXPECTED, done.stderr
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]


@pytest.mark.parametrize("away", ["network", "package"])
def test_without_a_network_or_the_package_the_two_files_are_named(tmp_path, monkeypatch, away):
    if away == "network":
        datasets = pytest.importorskip("datasets")

        def unreachable(*args, **options):
            raise ConnectionError("Couldn't reach the Hub")

        monkeypatch.setattr(datasets, "load_dataset", unreachable)
    else:
        monkeypatch.setitem(sys.modules, "datasets", None)
    done = run("data", "gsm8k", "--to", tmp_path / "data")
    assert done.returncode == 1 and "Traceback" not in done.stderr and not (tmp_path / "data").exists()
    assert ("Couldn't reach the Hub" if away == "network" else "pip install 'sparse-rl[datasets]'") in done.stderr
    assert "put train.jsonl and test.jsonl of the folder grade_school_math/data" in done.stderr
    assert f"run: sparse-rl data gsm8k --from FOLDER --to {tmp_path / 'data'}" in done.stderr


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (TRAIN[:6], "has 6 rows, but 7 were published"),
        ([*TRAIN[:3], "{", *TRAIN[4:]], "row 4 cannot be used (not JSON)"),
        (
            [{"question": "?", "label": "3"}],
            "row 1 has no question and no answer that ends with #### (it has the fields",
        ),
        ([{"question": "?", "answer": 3}], "row 1 has no question and no answer"),
    ],
)
def test_files_that_are_not_gsm8k_are_refused(tmp_path, rows, message):
    write(tmp_path / "train.jsonl", rows)
    done = run("data", "gsm8k", "--from", tmp_path, "--to", tmp_path / "data")
    assert done.returncode == 1 and message in done.stderr and not (tmp_path / "data").exists()


def test_a_missing_file_that_the_command_writes_is_named_with_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("train", "qwen2.5-0.5b-gsm8k-24gb", "--model.name", "tiny", "--model.lora_rank", 0)
    said = "there is no file data/train/gsm8k.jsonl; write it with `sparse-rl data gsm8k`, or "
    assert done.returncode == 1 and said in done.stderr, done.stderr
    with pytest.raises(SparseRLError, match="with `sparse-rl data gsm8k --to /other`"):
        list(rows_of("/other/eval/gsm8k.jsonl"))
    with pytest.raises(SparseRLError, match=r"other.jsonl; give the path"):
        list(rows_of("data/train/other.jsonl"))
