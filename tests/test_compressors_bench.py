"""The benchmark of compressors: points are made once, and traces chosen offline are those of a full row."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import compressors
from compressors import chosen_trace, rule_named, table

from sparse_rl import Engine, Sampling, load_model
from sparse_rl.compressors import make
from sparse_rl.learn.regret import regret


def test_offline_traces_keep_the_budget_and_the_oracle_has_the_least_excess():
    model, tokenizer = load_model("tiny-sums")
    engine = Engine(model, compressor="dense", rows=1)
    done = engine.generate([tokenizer.encode("12+7+30+5=")], sampling=Sampling(50, stop_ids=()))[0]
    excess = {}
    for rule, oracle in (("snapkv", True), ("random", False), ("rkv", False)):
        compressor = make(rule).bind(24, 4)
        trace = chosen_trace(model, done, compressor, oracle)
        evicted_at = trace.evicted_at.long()
        for begin in range(max(done.num_prompt_tokens, 28), len(done.tokens) - 1, 4):
            present = (torch.arange(len(done.tokens)) < begin) & (evicted_at > begin)
            assert (present.sum(-1) == 24).all() and ((evicted_at == begin).sum(-1) > 0).all()
        excess[rule] = float(regret(model, done.tokens, trace, "dense").excess.nanmean())
    assert excess["snapkv"] < 0.3 * min(excess["random"], excess["rkv"])
    assert chosen_trace(model, done, make("rkv").bind(200, 4), False) is None


def test_rules_have_names():
    assert [rule_named(name) for name in ("rkv", "rkv+mass", "learned+nats")] == ["rkv", "rkv+mass", "learned+nats"]
    for name in ("knorm", "rkv+", "learned+money"):
        with pytest.raises(argparse.ArgumentTypeError, match="there is no rule"):
            rule_named(name)


@pytest.mark.slow
def test_a_point_is_made_once(tmp_path):
    few = ["--seeds", "1", "--budgets", "24", "--rules", "random", "--prompts", "2", "--no-offline", "--new", "30"]
    command = [sys.executable, compressors.__file__, "--out", str(tmp_path), *few]
    for _ in range(2):
        subprocess.run(command, check=True, capture_output=True)
        rows = [json.loads(line) for line in (tmp_path / "points.jsonl").open()]
        assert [row["rule"] for row in rows] == ["dense", "random", "random"]
    assert "| accuracy | prompt kept | 24 |" in table(rows) and "| random | yes | " in table(rows)


@pytest.mark.slow
def test_unequal_budgets_are_a_rule_and_are_noted(tmp_path):
    few = ["--seeds", "1", "--budgets", "28", "--rules", "knorm+mass", "--prompts", "2", "--no-offline", "--new", "40"]
    command = [sys.executable, compressors.__file__, "--out", str(tmp_path), "--train", "2"]
    assert b"there is no rule knorm+mass" in subprocess.run([*command, *few], capture_output=True).stderr
    few[5] = "window+mass"
    subprocess.run([*command, *few], check=True, capture_output=True)
    rows = [json.loads(line) for line in (tmp_path / "points.jsonl").open()]
    assert [sum(row["layers"]) for row in rows if row["rule"] == "window+mass" and not row["protect"]] == [3 * 28]
