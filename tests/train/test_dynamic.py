"""DAPO's two additions: groups that teach nothing are replaced, and long responses are punished softly."""

import json

import pytest
import torch

from sparse_rl.config import make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.files import read_lines
from sparse_rl.learn.advantage import advantage, without_variance
from sparse_rl.tasks import Grade, make
from sparse_rl.train.rewards import overlong, with_part
from sparse_rl.train.run import train
from sparse_rl.train.worker import SPARE
from tests.helpers.runs import recipe

# Of prompts 0, 3, 6, ... every completion has the same reward; of the others nearly no two have.
THIRDS = """
import zlib
def prompt(i): return f"{i % 9 + 1}+{i % 7 + 1}=", i
def reward(answer, text): return 0.5 if answer % 3 == 0 else zlib.crc32(text.encode()) / 2**32
"""


@pytest.fixture
def thirds(tmp_path):
    (tmp_path / "thirds.py").write_text(THIRDS)
    return {"name": str(tmp_path / "thirds.py"), "workers": 1}


def samples(folder):
    return [json.loads(line) for line in (folder / "samples/step-000001/trajectories.jsonl").open()]


def test_groups_without_variance_are_replaced(thirds, tmp_path):
    small = {"eval": {"every": 0}, "run": {"steps": 1, "samples": 16, "diagnose": 0}, "rollout": {"max_new_tokens": 24}}
    for rounds in (0, 2):
        train(recipe(task=thirds, learn={"dynamic": rounds}, **small), tmp_path / str(rounds), show=False)
    plain, line = (read_lines(tmp_path / str(rounds) / "metrics.jsonl")[0] for rounds in (0, 2))
    before, used = (samples(tmp_path / str(rounds)) for rounds in (0, 2))
    # Prompts 0 and 3 of the first four teach nothing. Of the four that the first round has, the second does not.
    task = make(thirds["name"], workers=1)
    others = task.sample(SPARE, 4)
    task.close()
    assert [other.index % 3 != 0 for other in others] == [True, False, True, True]
    assert "dynamic/sampled/count" not in plain and plain["advantage/groups_without_variance/frac"] == 0.5
    assert line["advantage/groups_without_variance/frac"] == 0
    assert line["dynamic/sampled/count"] == line["dynamic/replaced/count"] == 8  # one round was enough
    assert line["rollout/trajectories/count"] == 24
    assert [s["prompt"] for s in used[4:12]] == [s["prompt"] for s in before[4:12]]  # these stay
    assert {s["prompt"] for s in used[:4]} == {others[0].text}
    assert {s["prompt"] for s in used[12:]} == {others[3].text}
    assert all(s["advantage"] != 0 for s in used)


def test_a_group_that_no_round_can_replace_stays(tmp_path):
    """Its rewards are equal but for the punishment of their length, from which it still learns."""
    (tmp_path / "flat.py").write_text("def prompt(i): return '1+1=', i\ndef reward(answer, text): return 1.0\n")
    small = {"rollout": {"max_new_tokens": 8, "prompts": 2}, "run": {"steps": 1, "samples": 2}, "eval": {"every": 0}}
    for share in (0.0, 1.0):
        task = {"name": str(tmp_path / "flat.py"), "workers": 1, "overlong": share}
        settings = recipe(model={"name": "tiny"}, task=task, learn={"dynamic": 2}, **small)
        train(settings, tmp_path / str(share), show=False)
    plain, shaped = (read_lines(tmp_path / name / "metrics.jsonl")[0] for name in ("0.0", "1.0"))
    for line in (plain, shaped):
        assert (line["dynamic/sampled/count"], line["dynamic/replaced/count"]) == (16, 0)
    assert plain["advantage/groups_without_variance/frac"] == 1 and plain["update/empty/count"] == 2
    assert shaped["advantage/groups_without_variance/frac"] < 1


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_with_all_of_dapo_goes_on_to_the_byte(thirds, ahead, tmp_path):
    """Rollouts that run ahead are sampled again after a stop, with newer weights; so there, two runs are compared."""
    settings = {
        "task": {**thirds, "overlong": 0.25},
        "learn": {"dynamic": 2},
        "loss": {"mean": "token-mean", "clip_high": 0.28},
        "rollout": {"max_new_tokens": 24, "ahead": ahead},
        "eval": {"every": 0},
    }
    both = recipe(**settings, run={"steps": 2, "diagnose": 0})
    train(both, tmp_path / "whole", show=False)
    if not ahead:
        train(recipe(**settings, run={"steps": 1, "diagnose": 0}), tmp_path / "parts", show=False)
    train(both, tmp_path / "parts", resume=not ahead, show=False)
    whole, parts = (tmp_path / name / "metrics.jsonl" for name in ("whole", "parts"))
    assert whole.read_bytes() == parts.read_bytes()
    lines = read_lines(whole)
    for line in lines:
        assert line["reward/mean"] == pytest.approx(line["reward/task/mean"] + line["reward/overlong/mean"])
        assert line["reward/overlong/mean"] < 0 and line["dynamic/replaced/count"] <= line["dynamic/sampled/count"]
    assert sum(line["dynamic/replaced/count"] for line in lines) > 0


def test_held_out_rewards_are_the_same_sums(tmp_path):
    evaluated = {"eval": {"every": 1, "prompts": 4}, "run": {"steps": 1, "diagnose": 0}}
    train(recipe(**evaluated, task={"overlong": 0.9}), tmp_path / "run", show=False)
    found = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "eval/dense/reward" in line]
    for line in found:
        parts = line["eval/dense/reward/task"] + line["eval/dense/reward/overlong"]
        assert line["eval/dense/reward"] == pytest.approx(parts)
        assert line["eval/dense/reward"] < line["eval/dense/accuracy"] == line["eval/dense/reward/task"]
    assert len(found) == 2


def test_without_variance_is_what_advantages_call_so():
    g = torch.Generator().manual_seed(0)
    rewards = torch.randint(0, 2, (60, 3), generator=g).double() * 0.1 + 0.2
    group = torch.arange(60).repeat_interleave(3)
    _, metrics = advantage(rewards.flatten(), group)
    assert 0 < metrics["advantage/groups_without_variance/frac"] < 1
    assert without_variance(rewards).double().mean().item() == metrics["advantage/groups_without_variance/frac"]


def test_the_soft_punishment_is_that_of_the_paper_and_of_trl():
    longest, buffer = 40, 12
    for tokens in range(1, longest + 1):
        expected = 0.0 if tokens <= longest - buffer else ((longest - buffer) - tokens) / buffer
        assert overlong(tokens, longest, buffer) == pytest.approx(expected)
    rewards = pytest.importorskip("trl.rewards")
    theirs = rewards.get_soft_overlong_punishment(longest, buffer)([[0] * tokens for tokens in range(1, longest + 1)])
    assert theirs == pytest.approx([overlong(tokens, longest, buffer) for tokens in range(1, longest + 1)])


def test_added_rewards_leave_the_verdict_to_the_task():
    plain = with_part(with_part(Grade(1.0, "right"), "overlong", -0.5), "other", 2.0, 0.25)
    assert plain == Grade(1.0, "right", {"task": 1.0, "overlong": -0.5, "other": 2.0})
    named = with_part(Grade(0.5, "partly", {"brief": 0.5}), "overlong", -1.0)
    assert named == Grade(-0.5, "partly", {"brief": 0.5, "overlong": -1.0})
    assert with_part(Grade(0.0, "error"), "overlong", -1.0) == Grade(-1.0, "error", {"overlong": -1.0})
    with pytest.raises(SparseRLError, match="a reward called 'brief', which the run adds, too"):
        with_part(named, "brief", 0.0)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"learn": {"dynamic": -1}}, "learn.dynamic is -1"),
        ({"learn": {"dynamic": 2, "refill": 1}}, "learn.refill is 1 and learn.dynamic is 2"),
        (
            {"learn": {"dynamic": 2, "algorithm": "ppo"}},
            "learn.dynamic is 2, which replaces .* ppo learns from those, too",
        ),
        ({"task": {"name": "sums", "overlong": 1.5}}, "task.overlong is 1.5; it must be a share of max_new_tokens"),
        ({"task": {"name": "sums", "overlong": "much"}}, "task.overlong"),
    ],
)
def test_what_makes_no_sense_is_refused(sections, said):
    with pytest.raises(SparseRLError, match=said):
        make_recipe({"model": {"name": "tiny"}, "task": {"name": "sums"}, **sections})
