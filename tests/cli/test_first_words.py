"""What a newcomer meets first: the version, lists that can be read, and a sentence for what is missing."""

import sys

import pytest

import sparse_rl
from sparse_rl.cli.list import first_sentence
from sparse_rl.config import RECIPES
from tests.helpers.runs import run, write_recipe


def test_the_version_is_printed():
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"sparse-rl {sparse_rl.__version__}\n")


def test_recipes_are_listed_with_a_whole_sentence():
    lines = run("list", "recipes").stdout.splitlines()
    assert len(lines) == len(list(RECIPES.glob("*.yaml")))
    for line in lines:
        assert line.endswith(".") and line.count("(") == line.count(")"), line
    assert first_sentence("# One: of\n# two lines. More.\n#   sparse-rl train x\nmodel: {}") == "One: of two lines."


def test_a_second_run_of_a_recipe_is_told_both_ways_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_recipe(tmp_path, run={"steps": 1}, eval={"every": 0})
    assert run("train", path).returncode == 0
    again = run("train", path)
    assert again.returncode == 1 and "sparse-rl train runs/given --resume" in again.stderr and "--out" in again.stderr


@pytest.mark.parametrize("command", [["plan", "--model"], ["eval", "--bench", "sums"]], ids=["plan", "eval"])
def test_a_gguf_file_without_its_extra_is_a_sentence(command, tmp_path, monkeypatch):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused = run(*command, "model.gguf")
    assert refused.returncode == 1 and "pip install 'sparse-rl[gguf]'" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_adapters_without_their_extra_are_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    path = write_recipe(tmp_path, model={"lora_rank": 4})
    refused = run("train", path, "--out", tmp_path / "run")
    assert refused.returncode == 1 and "pip install 'sparse-rl[lora]'" in refused.stderr


def test_a_missing_data_file_is_named_with_the_key_that_names_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = run("train", "qwen2.5-1.5b-simplerl")
    assert refused.returncode == 1 and "simplerl_qwen_level3to5.jsonl" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1 and "Traceback" not in refused.stderr
    assert "--task.files" in refused.stderr
