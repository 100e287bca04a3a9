"""Runs that sample with top-k and top-p: every algorithm, resumed to the byte, in several processes."""

import pytest

from sparse_rl import SparseRLError, read_trajectories
from sparse_rl.config import make_recipe
from sparse_rl.files import read_lines
from sparse_rl.train.run import plan_run, train
from tests.helpers.runs import BASE, recipe, run, write_recipe

SMALL = {"eval": {"every": 0}, "run": {"steps": 1, "samples": 2, "diagnose": 2, "checkpoint_every": 1}}


def with_top_p(**sections):
    limits = {"top_p": 0.9, "top_k": 12, **sections.pop("rollout", {})}
    return recipe(**{**SMALL, **sections}, rollout={**BASE["rollout"], **limits})


@pytest.mark.parametrize(
    "sections",
    [
        dict(learn={"method": "shadow"}),
        dict(learn={"method": "sparse-rl"}, loss={"beta": 0.01}),
        dict(learn={"method": "shadow", "packing": "always"}, model={"name": "tiny-sums", "lora_rank": 2}),
        dict(learn={"method": "smd"}),
        dict(learn={"method": "shadow", "algorithm": "ppo"}, loss={"beta": 0.01}),
        dict(learn={"method": "none", "algorithm": "online-dpo"}),
        dict(learn={"method": "shadow", "algorithm": "online-dpo"}, dpo={"reference": "dense"}),
        dict(learn={"method": "shadow", "dynamic": 1}),
        dict(learn={"method": "shadow"}, rollout={"ahead": 1}),
        dict(learn={"method": "none"}, student={"chunks": [8]}),
    ],
    ids=lambda sections: "-".join(str(v) for part in sections.values() for v in part.values()),
)
def test_every_algorithm_learns_over_the_support(sections, tmp_path):
    sections["learn"] = {**BASE["learn"], **sections["learn"]}
    given = with_top_p(**sections)
    assert given.scores_all
    train(given, tmp_path / "run", show=False)
    (line,) = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert line["update/grad_norm"] > 0 and 1 <= line["support/tokens/mean"] <= 12
    assert 0 < line["support/single/frac"] < 1
    if given.learn.resolve_method().view == "shadow":
        assert line["gap/abs/mean"] < 1e-5 and line["support/changed/frac"] < 0.01
    shown = list(read_trajectories(tmp_path / "run" / "samples" / "step-000001"))
    assert shown and all((t.support.ids is None) == (given.records_support == "margins") for t in shown)


@pytest.mark.parametrize("method", ["shadow", "sparse-rl"])
def test_a_resumed_run_writes_the_same_bytes(method, tmp_path):
    learn = {**BASE["learn"], "method": method}
    sections = {"learn": learn, "run": {"steps": 2, "samples": 1, "diagnose": 0, "checkpoint_every": 1}}
    train(with_top_p(**sections), tmp_path / "whole", show=False)
    train(with_top_p(**{**sections, "run": {**sections["run"], "steps": 1}}), tmp_path / "parts", show=False)
    train(with_top_p(**sections), tmp_path / "parts", resume=True, show=False)
    assert (tmp_path / "whole/metrics.jsonl").read_bytes() == (tmp_path / "parts/metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path):
    learn = {**BASE["learn"], "method": "shadow"}
    given = write_recipe(tmp_path, **SMALL, learn=learn, rollout={"top_p": 0.9})
    done = run("train", given, "--out", tmp_path / "two", "--num-processes", 2)
    assert done.returncode == 0, done.stderr
    train(recipe(**SMALL, learn=learn, rollout={"top_p": 0.9}), tmp_path / "one", show=False)
    (one,), (two,) = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for name in ("support/tokens/mean", "support/single/frac", "reward/mean", "update/grad_norm", "update/loss"):
        assert two[name] == pytest.approx(one[name], rel=1e-4), name


def test_settings_that_cannot_be_get_a_sentence():
    for key, value, sentence in (
        ("top_k", 513, "rollout.top_k is 513"),
        ("top_p", 0.0, "rollout.top_p is 0.0; it must be above 0 and at most 1"),
        ("top_p", 1.5, "rollout.top_p is 1.5"),
    ):
        with pytest.raises(SparseRLError, match=sentence):
            make_recipe({**BASE, "rollout": {**BASE["rollout"], key: value}})


def test_the_plan_counts_what_is_recorded():
    whole, margins, ids = (
        plan_run(recipe(learn={**BASE["learn"], "method": method}, rollout=limits), 40).rollout.record_bytes
        for method, limits in (("shadow", {}), ("shadow", {"top_p": 0.9}), ("none", {"top_p": 0.9}))
    )
    tokens = BASE["rollout"]["rows"] * BASE["rollout"]["max_new_tokens"]
    assert margins == whole + 8 * tokens and ids > margins and (ids - margins) % (4 * tokens) == 0
