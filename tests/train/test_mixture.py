"""Runs on several tasks: metrics and evaluations of each, the same bytes after a resume, commands that read them."""

import json

import pytest

from sparse_rl.config import load_recipe_to_run
from sparse_rl.errors import SparseRLError
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.models import read_record
from sparse_rl.report import write as write_report
from sparse_rl.train.run import train
from sparse_rl.train.warmup import warmup
from tests.helpers.runs import recipe, run

OWN = """
def prompt(i): return f"{i % 9 + 1}+2=", i % 9 + 3
def reward(answer, text): return float(text.endswith(f"={answer}"))
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A run on sums, short sums and a file, whole; and one that was resumed."""
    folder = tmp_path_factory.mktemp("mixed")
    (folder / "own.py").write_text(OWN)
    tasks = ["sums", {"name": "sums", "label": "short", "count": 4, "weight": 2}]
    tasks.append({"name": str(folder / "own.py"), "workers": 1})
    given = {"task": {"name": "mixture", "tasks": tasks}, "eval": {"every": 2, "prompts": 8}}
    train(recipe(**given), folder / "whole", show=False)
    train(recipe(**given, run={"steps": 2}), folder / "parts", show=False)
    train(recipe(**given), folder / "parts", resume=True, show=False)
    return folder


def test_a_resumed_mixture_writes_the_same_bytes(mixed):
    assert (mixed / "parts" / "metrics.jsonl").read_bytes() == (mixed / "whole" / "metrics.jsonl").read_bytes()


def test_metrics_of_every_task_add_up(mixed):
    lines = read_lines(mixed / "whole" / "metrics.jsonl")
    steps = [line for line in lines if "reward/mean" in line]
    labels = ("own", "short", "sums")
    for line in steps:
        counts = {label: line.get(f"task/{label}/trajectories/count", 0.0) for label in labels}
        assert sum(counts.values()) == line["rollout/trajectories/count"] == 16
        for whole, part in (("reward/mean", "reward/mean"), ("reward/right/frac", "right/frac")):
            total = sum(counts[label] * line[f"task/{label}/{part}"] for label in labels if counts[label])
            assert line[whole] == pytest.approx(total / 16)
    assert sum(line.get("task/short/trajectories/count", 0.0) for line in steps) >= 24  # half of 64, nearly
    (last,) = [line for line in lines if line["step"] == 4 and "eval/dense/accuracy" in line]
    shares = {label: last[f"eval/sparse/task/{label}/accuracy"] for label in labels}
    assert all(0 <= share <= 1 for share in shares.values())
    assert all(last[f"eval/dense/task/{label}/reward"] == last[f"eval/dense/task/{label}/accuracy"] for label in labels)
    samples = [
        json.loads(x) for f in (mixed / "whole" / "samples").rglob("*.jsonl") for x in f.read_text().splitlines()
    ]
    assert samples and {sample["task"] for sample in samples} <= set(labels)
    page = write_report([mixed / "whole"], mixed / "report.html")
    assert "task/short/right/frac" in page.read_text()


def test_eval_has_a_table_of_every_task(mixed, tmp_path):
    record = read_record(str(find_checkpoints(mixed / "whole" / "checkpoints")[-1][1]))
    assert record is not None and record.task == "mixture"
    assert record.task_options["tasks"][2]["name"] == str(mixed / "own.py") == record.task_names[-1]
    refused = run("eval", mixed / "whole", "--limit", 2, "--out", tmp_path / "no")
    assert refused.returncode == 1 and "own.py" in refused.stderr and "--trust" in refused.stderr
    done = run("eval", mixed / "whole", "--limit", 2, "--out", tmp_path / "yes", "--trust", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [bench["bench"] for bench in found["benches"]] == ["sums", "short", "own"]
    assert all(bench["problems"] == 2 for bench in found["benches"])


def test_a_strangers_mixture_runs_no_file_unless_it_is_trusted(mixed):
    with pytest.raises(SparseRLError, match=r"names the Python file .*own\.py.*--trust"):
        load_recipe_to_run(mixed / "whole", [], trust=False)
    assert load_recipe_to_run(mixed / "whole", [], trust=True).task.name == "mixture"
    own_words = [("task.tasks", "[sums, {name: other.py}]")]
    assert load_recipe_to_run(mixed / "whole", own_words, trust=False).task.options["tasks"][1]["name"] == "other.py"


def test_a_mixture_warms_up_and_is_planned(tmp_path):
    tasks = [{"name": "sums", "count": 3}, {"name": "sums", "label": "long", "count": 5}]
    given = recipe(
        model={"name": "tiny:1x64"},
        task={"name": "mixture", "tasks": tasks},
        warmup={"steps": 2, "batch": 4, "lr": 1e-3},
        rollout={"max_new_tokens": 16},
    )
    found = warmup(given, tmp_path / "model", show=False)
    assert {"task/sums/accuracy", "task/long/accuracy"} <= set(found)
    path = tmp_path / "given.yaml"
    path.write_text(given.to_yaml())
    assert run("plan", "--recipe", path, "--prompt-tokens", 64).returncode == 0
    (tmp_path / "own.py").write_text(OWN)
    unsolved = {"name": "mixture", "tasks": [{"name": "sums", "weight": 99}, f"{tmp_path}/own.py"]}
    with pytest.raises(SparseRLError, match="the task own has no worked solutions"):
        warmup(recipe(task=unsolved), tmp_path / "no", show=False)
