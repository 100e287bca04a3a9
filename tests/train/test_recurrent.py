"""A training run of a model with recurrent layers, under a trace: exact, and resumed to the byte."""

import torch

from sparse_rl.files import read_lines
from sparse_rl.models import load_model, tiny_tokenizer
from sparse_rl.train.run import train
from tests.helpers.hybrids import hybrid
from tests.helpers.runs import recipe
from tests.helpers.task_files import write

SEVENS = """
def prompt(i):
    return f"{i % 90 + 10}+{i % 70 + 11}", None

def reward(answer, text):
    return text.count("7") / 10
"""
SMALL = {
    "rollout": {"budget": 32, "rows": 4, "prompts": 2, "group_size": 4, "max_new_tokens": 24},
    "learn": {"method": "shadow", "rescore": "always", "minibatches": 1},
    "eval": {"every": 0},
    "optimizer": {"lr": 1e-3},
}


def test_a_run_resumes_to_the_byte(tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    model = hybrid("qwen3_5_text", vocab_size=len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    task = {"name": write(tmp_path / "sevens.py", SEVENS)}
    settings = {**SMALL, "model": {"name": str(tmp_path / "model")}, "task": task}
    train(recipe(**settings, run={"steps": 3, "checkpoint_every": 1}), tmp_path / "whole", show=False)
    assert "recurrent layers: gated delta net by" in capsys.readouterr().err
    train(recipe(**settings, run={"steps": 1, "checkpoint_every": 1}), tmp_path / "parts", show=False)
    train(recipe(**settings, run={"steps": 3, "checkpoint_every": 1}), tmp_path / "parts", resume=True, show=False)
    assert (tmp_path / "parts" / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    lines = [line for line in read_lines(tmp_path / "whole" / "metrics.jsonl") if "reward/mean" in line]
    assert len(lines) == 3
    ends = [load_model(str(tmp_path / name / "checkpoints" / "step-000003"))[0] for name in ("whole", "parts")]
    moved = 0
    for before, a, b in zip(model.parameters(), *(end.parameters() for end in ends), strict=True):
        assert a.equal(b)
        moved += not torch.equal(before, a)
    assert moved > 0
