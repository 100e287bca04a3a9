"""Graders that fail and data that cannot be used cost their own completions only."""

import json

from sparse_rl.config import make_recipe
from sparse_rl.files import read_lines
from sparse_rl.train.run import train
from tests.helpers.runs import BASE

GRADER = """
import os, time
def prompt(i):
    return f"{i % 9 + 1}+2=", i
def reward(answer, text):
    if answer % 4 == 1:
        raise RuntimeError("no idea")
    if answer % 4 == 2:
        time.sleep(600)
    if answer % 4 == 3:
        os._exit(3)
    return float(len(text) % 2)
"""


def test_graders_that_raise_hang_or_die_cost_their_completions_only(tmp_path, capsys, impatient):
    (tmp_path / "grader.py").write_text(GRADER)
    task = {"name": str(tmp_path / "grader.py"), "deadline": 60, "workers": 2}
    impatient(0.5, lambda prompt, _: prompt.answer % 4 == 2)
    plain = {name: section for name, section in BASE.items() if name != "task"}
    settings = make_recipe({**plain, "task": task, "run": {"steps": 2, "checkpoint_every": 2}, "eval": {"every": 0}})
    train(settings, tmp_path / "run", show=False)
    for line in read_lines(tmp_path / "run" / "metrics.jsonl"):
        # One prompt hangs, one raises, one kills its process.
        assert line["grade/timeout/count"] == 4 and line["grade/error/count"] == 8
        assert line.get("grade/right/count", 0) + line.get("grade/wrong/count", 0) == 4
    assert "grading failed" in capsys.readouterr().err


def test_unreadable_rows_and_empty_labels_are_counted(tmp_path, capsys):
    rows = [{"prompt": f"{i}+1=", "label": str(i + 1)} for i in range(30)]
    rows[5]["label"] = ""
    rows[7] = rows[8]
    lines = [json.dumps(row) for row in rows]
    lines[9] = '{"prompt": "3+'
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n")
    plain = {name: section for name, section in BASE.items() if name != "task"}
    task = {"name": "math", "files": str(tmp_path / "data.jsonl"), "holdout": 4}
    settings = make_recipe(
        {**plain, "task": task, "run": {"steps": 1, "checkpoint_every": 1}, "eval": {"every": 1, "prompts": 4}}
    )
    train(settings, tmp_path / "run", show=False)
    evaluated, learned, _ = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert (
        learned["data/skipped/count"] == 2
        and evaluated["eval/dense/accuracy"] == 0
        and evaluated["eval/dense/ungraded"] == 0
    )
    said = capsys.readouterr().err
    assert "2 rows were omitted" in said and "1 rows repeat an earlier prompt" in said
