"""A run folder may come from someone else: Python files that it names run only if the user says so."""

import shutil
from contextlib import nullcontext

import pytest

from sparse_rl.cli.inherit import Trained, of_their_task, tasks_of
from sparse_rl.config import load_recipe_to_run
from sparse_rl.errors import SparseRLError
from sparse_rl.files import refuse_foreign_code
from sparse_rl.models import Record
from tests.helpers.runs import run, write_recipe

TASK = """
import pathlib
pathlib.Path({proof!r}).write_text("ran")
def prompt(i): return f"{{i}}+{{i}}", 2 * i
def reward(answer, text): return float(str(answer) in text)
"""

COMPRESSOR = """
from sparse_rl import ScoreCompressor
class Newest(ScoreCompressor):
    def score(self, view): return view.feed.float()
"""


@pytest.fixture
def foreign(tmp_path):
    """A run folder whose task is a file that leaves a proof when it runs, and the recipe that began the run."""
    task, proof = tmp_path / "task.py", tmp_path / "proof"
    task.write_text(TASK.format(proof=str(proof)))
    small = {"steps": 1, "diagnose": 0, "samples": 0}
    given = write_recipe(tmp_path, task={"name": str(task)}, eval={"every": 0}, run=small)
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(given, folder / "recipe.yaml")
    return folder, given, task, proof


@pytest.mark.parametrize("command", ["train --resume", "train", "warmup", "train in folder"])
def test_a_folder_that_names_a_python_file_does_not_run_it(foreign, tmp_path, command):
    folder, _, task, proof = foreign
    name, _, option = command.partition(" ")
    if option == "in folder":
        (folder / "metrics.jsonl").write_text("")
    where = folder / "recipe.yaml" if option == "in folder" else folder
    done = run(name, where, *(["--resume"] if option == "--resume" else ["--out", tmp_path / "other"]))
    assert done.returncode == 1 and not proof.exists()
    assert f"{where} names the Python file '{task}'" in done.stderr and "--trust" in done.stderr
    assert not (tmp_path / "other").exists()


def test_the_user_can_trust_a_folder_name_the_file_or_use_the_recipe(foreign):
    folder, given, task, _ = foreign
    loaded = load_recipe_to_run(folder, [], trust=True)
    assert loaded == load_recipe_to_run(folder, [("task.name", str(task))], trust=False)
    assert loaded == load_recipe_to_run(given, [], trust=False)
    with pytest.raises(SparseRLError, match="--trust"):
        load_recipe_to_run(folder, [("task.seed", "1")], trust=False)


def test_a_folder_that_names_a_cluster_does_not_have_it_joined(tmp_path):
    """Ray runs what a cluster sends. ray and ray://auto are the user's own machine."""
    folder, pool = tmp_path / "run", "ray://elsewhere.example:6379"
    write_recipe(folder, rollout={"pool": pool}).rename(folder / "recipe.yaml")
    for command in (("train", folder, "--resume"), ("train", folder, "--out", tmp_path / "other")):
        done = run(*command)
        assert done.returncode == 1 and f"names the Ray cluster '{pool}', which could run code" in done.stderr
        assert "name it yourself with --rollout.pool." in " ".join(done.stderr.split())
    for own in (pool, "null", "ray", "ray://auto"):
        load_recipe_to_run(folder, [("rollout.pool", own)], trust=False)
    load_recipe_to_run(folder, [], trust=True)
    given = write_recipe(tmp_path, rollout={"pool": "ray://auto"})
    given.rename(folder / "recipe.yaml")
    load_recipe_to_run(folder, [], trust=False)


def test_a_trusted_folder_goes_on(foreign):
    folder, _, _, proof = foreign
    done = run("train", folder, "--resume", "--trust")
    assert done.returncode == 0 and proof.read_text() == "ran", done.stderr


@pytest.mark.parametrize("many", [[], ["--gpus", "2"]])
def test_a_plan_does_not_run_the_compressor_that_a_folder_names(tmp_path, many):
    """A plan asks the compressor for its slots, so it imports it."""
    file, proof, folder = tmp_path / "mine.py", tmp_path / "proof", tmp_path / "run"
    file.write_text(f"import pathlib\npathlib.Path({str(proof)!r}).write_text('ran')\n{COMPRESSOR}")
    given = write_recipe(folder, rollout={"compressor": str(file), "compressor_options": {}})
    given.rename(folder / "recipe.yaml")
    for where in (folder, folder / "recipe.yaml"):
        (folder / "metrics.jsonl").write_text("")
        done = run("plan", "--recipe", where, *many)
        assert done.returncode == 1 and not proof.exists()
        assert f"{where} names the Python file '{file}'" in done.stderr and "--trust" in done.stderr
    done = run("plan", "--recipe", folder, "--trust", *many)
    assert done.returncode == 0 and proof.read_text() == "ran", done.stderr


@pytest.mark.parametrize("name", ["task.py", "a/b.py:Task", "prompt-only:mine.py"])
def test_what_counts_as_a_python_file(tmp_path, name):
    with pytest.raises(SparseRLError, match=r"names the Python file .* with --rollout.compressor"):
        refuse_foreign_code(tmp_path, {"--rollout.compressor": name}, trust=False)
    refuse_foreign_code(tmp_path, {"--rollout.compressor": name}, trust=True)
    refuse_foreign_code(tmp_path, {"--rollout.compressor": "rkv", "--task.name": "gym:x.pyramid"}, trust=False)


@pytest.mark.parametrize(
    "task, option, said",
    [
        ({"name": "verifiers:this"}, "--task.name", "verifiers:this"),
        ({"name": "verifiers:this", "harness": "that"}, "--task.harness", "verifiers:that"),
        ({"name": "mixture", "tasks": ["sums", {"name": "verifiers:this"}]}, "--task.tasks.1.name", "verifiers:this"),
        (
            {"name": "mixture", "tasks": [{"name": "sums", "harness": "that"}]},
            "--task.tasks.0.harness",
            "verifiers:that",
        ),
    ],
)
def test_packages_that_verifiers_would_import_need_trust(tmp_path, task, option, said):
    """A recipe of one's own may name them; a folder's may not, whatever else the command names."""
    given = write_recipe(tmp_path, task=task)
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(given, folder / "recipe.yaml")
    own = [("task.name", task["name"])] if option == "--task.harness" else []
    with pytest.raises(
        SparseRLError, match=f"names the environment '{said}', .* name the package yourself with {option}"
    ):
        load_recipe_to_run(folder, own, trust=False)
    load_recipe_to_run(folder, own, trust=True)
    load_recipe_to_run(given, own, trust=False)


def test_a_model_that_names_a_package_does_not_have_it_imported():
    for record, bench in (
        (Record(task="verifiers:this"), None),
        (Record(task="verifiers:this", task_options={"harness": "that"}), "verifiers:this"),
        (Record(task="mixture", task_options={"tasks": ["verifiers:this", "sums"]}), "mixture"),
    ):
        trained = [Trained("model", record)]
        for trust in (False, True):
            with (
                nullcontext() if trust else pytest.raises(SparseRLError, match=r"model names the environment .*--trust")
            ):
                (name,) = tasks_of(trained, bench, trust)
                of_their_task(trained, name, set(), {}, trust)
