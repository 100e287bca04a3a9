"""Named rewards and schedules in a run: each is logged, and a resumed run writes the same bytes."""

import json
import shutil

import pytest

from sparse_rl.config import load_recipe
from sparse_rl.files import read_lines
from sparse_rl.report import write as write_report
from sparse_rl.train.run import train
from sparse_rl.train.terminal import TerminalTable
from tests.helpers.runs import recipe, run

NAMED = """
def prompt(i): return f"{i % 9 + 1}+2=", i
def reward(answer, text): return {"short": 2.0 - len(text) / 32, "even": float(len(text) % 2 == 0)}
def right(reward, parts): return parts["even"] == 1
"""
SCHEDULE = {"schedule": "cosine", "warmup_steps": 2, "lr": 1e-4}


@pytest.fixture(scope="module")
def graded(tmp_path_factory):
    """A run of four steps with two named rewards and a schedule, and its recipe."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "named.py").write_text(NAMED)
    task = {"name": str(folder / "named.py"), "reward_weights": {"even": 0.5}, "workers": 1}
    settings = recipe(task=task, optimizer=SCHEDULE, eval={"every": 2, "prompts": 4})
    train(settings, folder / "run", show=False)
    return folder / "run", settings


def test_named_rewards_are_logged_and_add_up(graded):
    folder, _ = graded
    lines = read_lines(folder / "metrics.jsonl")
    steps = [line for line in lines if "reward/mean" in line]
    for line in steps:
        total = line["reward/short/mean"] + 0.5 * line["reward/even/mean"]
        assert line["reward/mean"] == pytest.approx(total) and line["reward/right/frac"] == line["reward/even/mean"]
    for line in (line for line in lines if "eval/dense/accuracy" in line):
        for cache in ("dense", "sparse"):
            named = {name: line[f"eval/{cache}/reward/{name}"] for name in ("short", "even")}
            assert line[f"eval/{cache}/reward"] == pytest.approx(named["short"] + 0.5 * named["even"])
            assert line[f"eval/{cache}/accuracy"] == named["even"]
    (first,) = (folder / "samples" / "step-000001").glob("*.jsonl")
    sample = json.loads(first.read_text().splitlines()[0])
    assert sample["reward"] == pytest.approx(sample["rewards"]["short"] + 0.5 * sample["rewards"]["even"])


def test_the_schedule_is_logged_and_resumed_to_the_byte(graded, tmp_path, capsys):
    folder, settings = graded
    shutil.copytree(folder, tmp_path / "run", symlinks=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    train(settings, tmp_path / "run", resume=True, show=False)
    whole = (folder / "metrics.jsonl").read_bytes()
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == whole
    rates = [line["update/lr"] for line in read_lines(folder / "metrics.jsonl") if "update/lr" in line]
    expected = [settings.scheduled_optimizer().lr_after(step) for step in range(8)]
    assert rates == pytest.approx([sum(expected[i : i + 2]) / 2 for i in range(0, 8, 2)], rel=1e-12)
    longer = load_recipe(folder, [("steps", "5")])
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-000004")
    train(longer, tmp_path / "run", resume=True, show=False)
    assert "falls to 0 at optimizer step 10 instead of 8" in " ".join(capsys.readouterr().err.split())


def test_training_lines_show_rewards_beside_accuracy_where_they_differ(capsys):
    zero_one = {"reward/mean": 0.5, "reward/right/frac": 0.5, "eval/dense/accuracy": 0.25, "eval/dense/reward": 0.25}
    plain, more = TerminalTable("t", 3), TerminalTable("t", 3)
    plain.show(1, zero_one)
    assert {"right", "dense reward"}.isdisjoint(plain.columns())
    more.show(1, {**zero_one, "reward/mean": 1.5, "reward/brief/mean": 0.75, "eval/dense/reward": -1.0})
    said = capsys.readouterr().err.splitlines()[-1]
    assert "reward 1.500, right 50.0%" in said and "dense 0.250, dense reward -1.000" in said and "brief 0.750" in said


def test_eval_and_report_tell_rewards(graded, tmp_path):
    folder, settings = graded
    task = settings.task.name
    small = ("--limit", 6, "--max-new-tokens", 24, "--rows", 4, "--task.workers", 1, "--bench", task)
    told = run("eval", "tiny-sums", *small, "--budget", 24, "--interval", 4, "--out", tmp_path / "one")
    assert told.returncode == 0 and "reward (95 %)" in told.stdout and "even " in told.stdout, told.stderr
    (summary,) = json.loads((tmp_path / "one" / "summary.json").read_text())["benches"]
    assert summary["reward"] == pytest.approx(sum(summary["rewards"].values()))
    both = ("--compare", "--compressors", "dense,rkv", "--budgets", 12, "--interval", 4, "--out", tmp_path / "two")
    told = run("eval", "tiny-sums", *small, *both)
    assert told.returncode == 0 and "reward against dense" in told.stdout, told.stderr
    page = write_report([folder], tmp_path / "report.html").read_text()
    assert "Held-out reward on the dense cache" in page
    told = run("report", folder, "--format", "md", "--out", tmp_path / "report.md")
    assert told.returncode == 0, told.stderr
    assert "share right, last (best) | dense reward, last (best)" in (tmp_path / "report.md").read_text()


def test_a_cache_that_never_evicts_is_told_once(tmp_path, capsys):
    idle = {"rollout": {"budget": 200}, "run": {"steps": 2}, "eval": {"every": 0}}
    train(recipe(**idle), tmp_path / "idle", show=False)
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("nothing was evicted") == 1 and "a row has 200 + 4 slots; lower rollout.budget" in said
    train(recipe(run={"steps": 1}, eval={"every": 0}), tmp_path / "busy", show=False)
    assert "nothing was evicted" not in capsys.readouterr().err
