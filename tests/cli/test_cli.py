"""Help, lists, and mistakes in the arguments of train and warmup."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.compressors import BY_NAME
from tests.helpers.runs import run

RECIPE = Path(__file__).parent.parent.parent / "recipes" / "tiny-sums.yaml"


def test_help_does_not_import_torch():
    code = """
import sys
from sparse_rl.cli import main
try:
    main()
finally:
    assert not {"torch", "transformers"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "rollout" in done.stdout, done.stderr


def test_list_compressors():
    done = run("list", "compressors")
    assert done.returncode == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == [*BY_NAME, "beacon:N", "kvpress:NAME", "FILE.py[:CLASS]"]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("beacon:N"))
    assert line.split(maxsplit=1)[1].startswith("after every chunk of the response the model reads a learned beacon")


@pytest.mark.parametrize(
    "what, shown",
    [
        ("tasks", "countdown"),
        ("tasks", "gym:NAME"),
        ("presets", "reject_below 0.0001, cap 2.0"),
        ("keys", "rollout.budget"),
        ("recipes", "tiny-sums "),
        ("templates", "chat"),
    ],
)
def test_lists_name_what_there_is(what, shown):
    done = run("list", what)
    assert done.returncode == 0 and shown in done.stdout


def test_a_list_that_does_not_exist():
    misspelt = run("list", "compresors")
    assert misspelt.returncode == 1 and "did you mean 'compressors'" in misspelt.stderr
    nothing = run("list")
    assert nothing.returncode == 1 and "sparse-rl list compressors | tasks | " in nothing.stderr


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["train", "none.yaml"], "there is no recipe"),
        (["train", RECIPE, "budget"], "'budget' is not a key"),
        (["train", RECIPE, "--budget"], "--budget has no value"),
        (["train", RECIPE, "--bugdet", 3], "did you mean 'rollout.budget'"),
        (["train", RECIPE, "--task.cuont", 3], "the task sums has no option 'cuont'; did you mean 'count'"),
        (["train", RECIPE, "--task.count", '"8"'], "the task sums cannot use the options"),
        (["train", RECIPE, "--rollout.compressor_options.window", "a"], "rkv"),
        (
            ["train", RECIPE, "--rollout.compressor_options.snks", 3],
            "rkv has no parameter 'snks'; did you mean 'sinks'",
        ),
        (["train", RECIPE, "--compressor", "rvk"], "did you mean 'rkv'"),
        (["train", RECIPE, "--model.name", "tinny-sums"], "there is no model 'tinny-sums'; did you mean 'tiny-sums'?"),
        (["train", RECIPE, "--stop", "[<end>]"], "'<end>', which is not a token"),
        (["warmup", RECIPE, "--out", "."], "exists already"),
        (["train", RECIPE, "--resume", "--out", "no"], "there is no recipe"),
    ],
)
def test_training_mistakes_get_a_sentence(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    done = run(*arguments, *([] if "--out" in arguments else ["--out", "out"]))
    assert done.returncode == 1 and message in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not Path("out").exists()
