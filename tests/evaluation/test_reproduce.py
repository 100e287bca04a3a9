"""The reproduction kit: its commands name real recipes and options, and a tiny run goes through all of it."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "reproduce.py"


def reproduce(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, cwd=ROOT)


def test_every_documented_command_shows_its_four_runs(tmp_path: Path, monkeypatch, capsys):
    commands = re.findall(r"`python benchmarks/reproduce\.py ([^`]+)`", (ROOT / "docs/reproduce.md").read_text())
    assert len(commands) == 4
    for command in commands:
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *shlex.split(command), "--out", str(tmp_path / "x"), "--show"])
        runpy.run_path(str(SCRIPT), run_name="__main__")
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sparse-rl ")]
        assert [shlex.split(line)[1] for line in lines] == ["train"] * 4 + ["eval"]
        assert "--rollout.compressor dense" in lines[0] and "--learn.method shadow" in lines[3]
        assert "--compressors dense,rkv --budgets 512 --interval 128" in lines[4]
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_two_arms_train_and_are_compared_and_a_second_call_trains_nothing(tmp_path: Path):
    words = ["tiny-sums", "--bench", "sums", "--limit", "8", "--arms", "dense,sparse-rl-released"]
    for key, value in {"run.steps": "2", "eval.every": "0", "rollout.prompts": "4"}.items():
        words += ["--set", key, value]
    first = reproduce(*words, "--out", str(tmp_path))
    assert first.returncode == 0, first.stderr
    assert "| sparse-rl-released | 2 |" in first.stdout
    again = reproduce(*words, "--out", str(tmp_path))
    assert again.returncode == 0, again.stderr
    assert "sparse-rl train" not in again.stdout
    assert [line for line in again.stdout.splitlines() if line.startswith("| ")] == [
        line for line in first.stdout.splitlines() if line.startswith("| ")
    ]
