"""A run that an earlier version began goes on: its recipe is translated, its checkpoint is loaded, its metrics
continue.

old_run/half is the folder of a run of 2 steps, and old_run/whole/metrics.jsonl are the metrics of 4 steps without a
stop. Both were written by the version before the package was divided into rooms, with `learn.distill: b`.
"""

import shutil
from pathlib import Path

import pytest
import yaml

from sparse_rl.config import load_recipe, make_recipe, migrate
from sparse_rl.errors import SparseRLError
from sparse_rl.files import read_lines
from tests.helpers.runs import run

OLD = Path(__file__).parent / "old_run"
SMALL = {"model": {"name": "tiny"}, "task": {"name": "sums"}}


def test_an_old_run_goes_on_to_the_same_metrics(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(OLD / "half", folder)
    done = run("train", folder, "--resume", "--run.steps", 4)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert (
        "recipe.yaml was written by an earlier version: student.late is now student.freeze_teacher (here false)."
        in said
    )
    assert "learn.distill: b is now learn.distill: shadow-to-dense-forward." in said
    assert "learn.shuffle_advantages was dropped: there is no such key any more, and false was its default." in said
    assert "model.logits is a new key; this run keeps model: earlier versions rounded logits" in said
    assert "learn.rescore is a new key; this run keeps always: earlier versions scored every trajectory." in said
    found, expected = (read_lines(f / "metrics.jsonl") for f in (folder, OLD / "whole"))
    assert [line["step"] for line in found] == [line["step"] for line in expected] == [0, 1, 2, 2, 3, 4, 4]
    for line, old in zip(found, expected, strict=True):
        assert [name for name in line if not name.startswith("cache/regret/")] == list(old)  # those came later
        assert {name: line[name] for name in old} == pytest.approx(old, rel=1e-6)
    regrets = [line["cache/regret/lost/mean"] for line in found[-3:] if "cache/regret/lost/mean" in line]
    assert regrets and all(0 < share < 1 for share in regrets)
    written = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert written["learn"]["distill"] == "shadow-to-dense-forward" and "shuffle_advantages" not in written["learn"]
    assert written["model"]["logits"] == "model"
    again = run("train", folder, "--resume")
    assert again.returncode == 0 and "earlier version" not in again.stderr  # translated once and for all


def test_an_old_run_is_resumed_by_its_recipe_file_too(tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(OLD / "half", folder)
    data, _ = migrate(yaml.safe_load((folder / "recipe.yaml").read_text()))
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(data))
    done = run("train", tmp_path / "mine.yaml", "--out", folder, "--resume", "--run.steps", 3)
    assert done.returncode == 0, done.stderr
    assert "model.logits is a new key; this run keeps model" in " ".join(done.stderr.split())
    again = run(
        "train", tmp_path / "mine.yaml", "--out", folder, "--resume", "--run.steps", 4
    )  # it is written down now
    assert again.returncode == 0, again.stderr
    found, expected = (read_lines(f / "metrics.jsonl") for f in (folder, OLD / "whole"))
    assert {name: found[-1][name] for name in expected[-1]} == pytest.approx(expected[-1], rel=1e-6)
    other = run("train", tmp_path / "mine.yaml", "--out", folder, "--resume", "--optimizer.choice_scale", 7)
    assert other.returncode != 0 and "optimizer.choice_scale is 7.0 but" in other.stderr


def test_a_new_run_from_an_old_folder_has_todays_defaults():
    assert load_recipe(OLD / "half").model.logits == "float32"


def test_migration_leaves_the_rest_of_a_recipe_alone():
    old = yaml.safe_load((OLD / "half" / "recipe.yaml").read_text())
    new, notes = migrate(old)
    assert len(notes) == 3 and old["learn"]["distill"] == "b"  # the given data does not change
    assert make_recipe(new) == load_recipe(OLD / "half")
    assert migrate(new) == (new, [])
    expected = {**old, "student": {**old["student"], "freeze_teacher": False}}
    expected["learn"] = {**old["learn"], "distill": "shadow-to-dense-forward"}
    del expected["student"]["late"], expected["learn"]["shuffle_advantages"]
    assert new == expected


def test_a_removed_key_that_mattered_is_refused():
    with pytest.raises(SparseRLError, match=r"learn.shuffle_advantages: true, but this version has no such key"):
        migrate({**SMALL, "learn": {"shuffle_advantages": True}})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"student": {"late": True}},
            "student.late is now called student.freeze_teacher; write student.freeze_teacher: true",
        ),
        (
            {"learn": {"distill": "a"}},
            "learn.distill is 'a', which is now called dense-to-shadow; write learn.distill: dense-",
        ),
        (
            {"learn": {"shuffle_advantages": False}},
            "the key learn.shuffle_advantages does not exist any more .benchmarks/learning_cpu",
        ),
    ],
)
def test_an_old_name_in_a_recipe_gets_a_sentence_with_the_new_one(section, message, tmp_path):
    with pytest.raises(SparseRLError, match=message):
        make_recipe({**SMALL, **section})
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **section}))
    with pytest.raises(SparseRLError, match=message):
        load_recipe(path)


def test_an_old_name_as_an_override_gets_a_sentence_too():
    with pytest.raises(SparseRLError, match="which is now called shadow-to-dense-reverse"):
        make_recipe(SMALL, [("learn.method", "smd"), ("learn.distill", "c")])
