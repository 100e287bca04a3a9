"""`sparse-rl rollout`: what it writes, and which files of prompts it refuses."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

from sparse_rl import load_model, read_trajectories, token_logprobs
from sparse_rl.beacon import add_beacon
from sparse_rl.train.checkpoint import save_model
from tests.helpers.runs import PATIENCE, command, run


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "3+4="}\n\n{"tokens": [5, 6, 7]}\n{"tokens": null, "prompt": "Zw\u00f6lf\u2028\\n"}\n',
        encoding="utf-8",
    )
    return path


def test_rollout_writes_text_and_traces_that_replay(tmp_path, prompts):
    out = tmp_path / "out"
    options = ["--budget", 16, "--interval", 8, "--group-size", 2, "--max-new-tokens", 40, "--rows", 3]
    done = run("rollout", "tiny", "--prompts", prompts, "--out", out, *options)
    assert done.returncode == 0, done.stderr
    assert "6 trajectories" in done.stdout and "KV bytes saved" in done.stdout
    lines = [json.loads(line) for line in (out / "trajectories.jsonl").read_text().splitlines()]
    first = next(line for line in lines if (line["prompt_index"], line["sample_index"]) == (0, 0))
    assert first["prompt"] == "3+4=" and isinstance(first["text"], str)
    model, tokenizer = load_model("tiny")
    assert tokenizer.decode(first["tokens"][:4]) == "3+4="
    trajectories = list(read_trajectories(out))
    assert len(trajectories) == 6
    with torch.no_grad():
        for t in trajectories:
            gap = token_logprobs(model, t.tokens, t.trace).cpu() - t.sampler_logprobs
            assert gap[t.num_prompt_tokens :].abs().max() < 1e-4


def test_rollout_does_not_overwrite_trajectories(tmp_path, prompts):
    out = tmp_path / "out"
    out.mkdir()
    (out / "trajectories.jsonl").write_text("")
    done = run("rollout", "tiny", "--prompts", prompts, "--out", out)
    assert done.returncode == 1 and "exists already" in done.stderr and "Traceback" not in done.stderr


def test_rollout_of_a_saved_model(tmp_path, prompts):
    model, tokenizer = load_model("tiny", seed=3)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    done = run("rollout", tmp_path / "model", "--prompts", prompts, "--out", tmp_path / "out", "--max-new-tokens", 5)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def student(tmp_path) -> Path:
    """The folder of a model with a beacon after 8 tokens."""
    model, tokenizer = load_model("tiny", seed=3)
    save_model(tmp_path / "student", add_beacon(model, (8,)), tokenizer)
    return tmp_path / "student"


def test_rollout_of_a_folder_with_a_beacon(tmp_path, student, prompts):
    options = ["--prompts", prompts, "--out", tmp_path / "out", "--group-size", 2, "--max-new-tokens", 40, "--rows", 3]
    done = run("rollout", student, "--compressor", "beacon:8", *options)
    assert done.returncode == 0 and "6 trajectories" in done.stdout, done.stderr
    model, _ = load_model(str(student))
    for t in read_trajectories(tmp_path / "out"):
        beacons = int((t.tokens == t.beacon_id).sum())
        assert beacons == max(0, len(t.response_tokens) - 2) // 8
        gap = (token_logprobs(model, t.tokens, t.trace) - t.sampler_logprobs)[t.response_mask]
        assert gap.abs().max() < 1e-4
    texts = [json.loads(line)["text"] for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()]
    assert len(texts) == 6 and all(isinstance(text, str) for text in texts)


def test_rollout_with_another_chunk_than_the_trained_one(tmp_path, student, prompts):
    out = tmp_path / "out"
    done = run("rollout", student, "--compressor", "beacon:4", "--prompts", prompts, "--out", out)
    assert done.returncode == 1 and "was trained with one after every 8; use that." in done.stderr
    assert not out.exists()


def test_an_interrupt_keeps_what_was_finished(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "1+1="}\n' * 2000)
    out = tmp_path / "out"
    options = ["--rows", "4", "--max-new-tokens", "64", "--budget", "16", "--interval", "8"]
    process = subprocess.Popen(
        command("rollout", "tiny", "--prompts", prompts, "--out", out, *options),
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE
    lines = out / "trajectories.jsonl"
    while not (lines.exists() and lines.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "finished trajectories are saved" in errors and "Traceback" not in errors, (
        errors
    )
    saved = list(read_trajectories(out))
    assert 3 <= len(saved) < 2000
    assert f"the {len(saved)} finished" in errors


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "holds no prompts"),
        ("{nonsense}\n", "line 1 is not JSON"),
        ('{"prompt": "a"}\n{"question": "b"}\n', r"line 2 has no text 'prompt'.*\(it has: question\).*--field"),
        ('{"tokens": ["x"]}\n', r"line 1 has no text 'prompt' and no list of token ids"),
        ("[1, 2]\n", "line 1 holds list, not an object"),
        ('{"tokens": [500]}\n', "token id 500, outside the vocabulary"),
    ],
)
def test_bad_prompt_files(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    done = run("rollout", "tiny", "--prompts", path, "--out", tmp_path / "out")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert re.search(message, done.stderr)
    assert not (tmp_path / "out").exists()  # a refused call leaves nothing behind


def test_a_missing_prompt_file(tmp_path):
    missing = run("rollout", "tiny", "--prompts", tmp_path / "none.jsonl")
    assert missing.returncode == 1 and "there is no file" in missing.stderr
