"""Folders that cannot be written, full disks, damaged states and odd paths: one sentence each, with the true reason."""

import errno
import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.helpers.runs import PATIENCE, command, run, write_recipe

SHORT = {"run": {"steps": 1, "samples": 0, "diagnose": 0}, "eval": {"every": 0}}


def sentence(found) -> str:
    """What a refused command said: one line."""
    assert found.returncode == 1 and found.stderr.startswith("sparse-rl: ") and found.stderr.count("\n") == 1
    return found.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    assert run("train", write_recipe(folder, **SHORT), "--out", folder / "run").returncode == 0
    return folder / "run"


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "1+2="}\n')
    return path


@contextmanager
def failing(monkeypatch, folder: Path, number: int):
    """Every attempt to make or write something under `folder` fails, as on a read-only or full disk."""
    originals = {"mkdir": Path.mkdir, "open": Path.open, "write_bytes": Path.write_bytes}

    def guarded(name):
        def call(self, *args, **options):
            writes = name != "open" or "r" not in (args[0] if args else options.get("mode", "r"))
            full = number == errno.ENOSPC and name == "mkdir"  # a folder still fits where no file does
            if writes and not full and self.is_relative_to(folder) and not (name == "mkdir" and self.exists()):
                raise OSError(number, os.strerror(number), str(self))
            return originals[name](self, *args, **options)

        return call

    really_open = os.open

    def guarded_open(path, flags, *args, **options):
        if flags & (os.O_WRONLY | os.O_RDWR) and Path(os.fsdecode(path)).is_relative_to(folder):
            raise OSError(number, os.strerror(number), path)
        return really_open(path, flags, *args, **options)

    with monkeypatch.context() as patch:
        for name in originals:
            patch.setattr(Path, name, guarded(name))
        patch.setattr(os, "open", guarded_open)
        yield


REASONS = {
    errno.EROFS: ("the file system is read-only", "Choose a folder in which you may write"),
    errno.EACCES: ("you may not write there", "Choose a folder in which you may write"),
    errno.ENOSPC: ("the disk is full: ", "Free some space or choose another place"),
}


@pytest.mark.parametrize("number", REASONS, ids=lambda number: errno.errorcode[number])
@pytest.mark.parametrize("what", ["train", "resume", "rollout", "eval", "report"])
def test_a_folder_that_cannot_be_written_is_told_with_the_reason(trained, prompts, tmp_path, monkeypatch, what, number):
    place = tmp_path / "place"
    place.mkdir()
    if what == "resume":
        shutil.copytree(trained, place / "run")
    commands = {
        "train": ["train", write_recipe(tmp_path, **SHORT), "--out", place / "run"],
        "resume": ["train", place / "run", "--resume", "--run.steps", 2],
        "rollout": ["rollout", "tiny-sums", "--prompts", prompts, "--out", place / "run", "--max-new-tokens", 2],
        "eval": ["eval", "tiny-sums", "--bench", "sums", "--limit", 1, "--max-new-tokens", 2, "--out", place / "run"],
        "report": ["report", trained, "--out", place / "page.html"],
    }
    with failing(monkeypatch, place, number):
        said = sentence(run(*commands[what]))
    why, remedy = REASONS[number]
    assert str(place) in said and f"could not be written ({why}" in said and remedy in said
    assert ("space" in said) is (number == errno.ENOSPC)
    if what != "resume":
        assert run(*commands[what]).returncode == 0  # nothing is in the way once the place can be written


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else for a moment")
def test_a_folder_of_somebody_else(prompts, tmp_path):
    for folder in (tmp_path, *tmp_path.parents[:-2]):  # up to, but without, /tmp
        folder.chmod(0o755)
    (tmp_path / "mine").mkdir(mode=0o555)
    run("rollout", "tiny-sums", "--prompts", prompts, "--out", tmp_path / "out", "--max-new-tokens", 1)  # imports
    os.seteuid(65534)
    try:
        found = run("rollout", "tiny-sums", "--prompts", prompts, "--out", tmp_path / "mine" / "x")
    finally:
        os.seteuid(0)
    assert "you may not write there" in sentence(found) and "space" not in found.stderr


@pytest.mark.parametrize("name", ["x" * 300, "/".join(["y" * 200] * 30)])
@pytest.mark.parametrize("what", ["recipe", "out", "prompts", "rollout", "model", "eval", "report", "plan", "task"])
def test_paths_that_are_too_long(prompts, tmp_path, what, name):
    given, path = write_recipe(tmp_path, **SHORT), tmp_path / name
    found = {
        "recipe": lambda: run("train", path),
        "out": lambda: run("train", given, "--out", path),
        "prompts": lambda: run("rollout", "tiny-sums", "--prompts", path),
        "rollout": lambda: run("rollout", "tiny-sums", "--prompts", prompts, "--out", path),
        "model": lambda: run("rollout", path, "--prompts", prompts),
        "eval": lambda: run("eval", "tiny-sums", "--bench", "sums", "--limit", 1, "--out", path),
        "report": lambda: run("report", path),
        "plan": lambda: run("plan", "--model", path),
        "task": lambda: run("train", given, "--task.name", f"{path}.py", "--out", tmp_path / "run"),
    }[what]()
    assert "too long" in sentence(found).lower()


@pytest.mark.parametrize("what", [["train"], ["rollout", "tiny-sums", "--prompts"], ["report"]])
def test_paths_that_are_not_utf8(what):
    assert r"b'runs/\xff' is not UTF-8 text" in sentence(run(*what, os.fsdecode(b"runs/\xff")))


def test_an_unreadable_file_is_named(prompts, monkeypatch):
    def refuse(self, *args, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))

    monkeypatch.setattr(Path, "read_text", refuse)
    assert f"{prompts} cannot be used: Permission denied." in sentence(run("rollout", "tiny", "--prompts", prompts))


def damaged(state: dict) -> dict:
    """Damages of a checkpoint's state by name: bytes to write, or what to save."""
    without = {
        f"without {key}": {k: v for k, v in state.items() if k != key} for key in ("step", "torch_rng", "learner")
    }
    learner = state["learner"]
    return without | {
        "list": [1],
        "nothing": None,
        "empty": {},
        "text": b"hello",
        "no bytes": b"",
        "another step": state | {"step": 7},
        "no number": state | {"step": "x"},
        "no optimizer": state | {"learner": {**learner, "optimizer": None}},
        "no version": state | {"learner": {**learner, "version": "x"}},
    }


def test_a_damaged_state_is_named_with_the_remedy(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    path = folder / "checkpoints" / "step-000001" / "training.pt"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    cases = damaged(torch.load(path, weights_only=True)) | {"half": whole[: len(whole) // 2], "flipped": bytes(flipped)}
    for name, content in cases.items():
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        said = sentence(run("train", folder, "--resume", "--run.steps", 2))
        assert f"{path} is damaged (" in said and f"remove {path.parent} to continue" in said, name
    shutil.rmtree(path.parent)
    assert run("train", folder, "--resume").returncode == 0  # the remedy works


@pytest.mark.parametrize(
    "line", [b"\xff", b"[]", b"{}", b"[" * 100_000, b'{"step": ' + b"9" * 5000 + b"}", b'{"step": null}']
)
def test_a_damaged_line_of_metrics_is_named(trained, tmp_path, line):
    folder = shutil.copytree(trained, tmp_path / "run")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert "metrics.jsonl" in sentence(run("train", folder, "--resume", "--run.steps", 2))


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": "\\ud800"}', "holds half of a surrogate pair"),
        ('{"tokens": [' + "9" * 5000 + "]}", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"tokens": [' + "9" * 30 + "]}", "token"),
        ('{"tokens": [-1]}', "token"),
        ("{" + ", ".join(f'"{i}": 0' for i in range(5000)) + "}", "name its field with --field"),
    ],
)
def test_odd_lines_of_prompts(prompts, tmp_path, line, message):
    prompts.write_text(line + "\n")
    said = sentence(run("rollout", "tiny-sums", "--prompts", prompts, "--out", tmp_path / "out"))
    assert message in said and len(said) < 1000 and not (tmp_path / "out").exists()


MANY = 10**12


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["rollout", "--group-size", MANY], f"{MANY} completions were requested; use at most 10,000,000"),
        (["rollout", "--stop-id", 10**30], "which is not a token id"),
        (["eval", "--samples", MANY], f"{MANY} samples of every problem were requested; use at most 100,000"),
        (["eval", "--limit", MANY], f"{MANY} prompts were requested"),
        (["train", "--rollout.prompts", MANY], "completions of a step were requested"),
        (["train", "--rollout.group_size", MANY], "completions of a step were requested"),
        (["train", "--eval.prompts", MANY], "completions of an evaluation were requested"),
        (["train", "--eval.samples", 10**15], "completions of an evaluation were requested"),
        (["train", "--model.lora_rank", 10**15], "model.lora_rank is 1000000000000000; it must be at most 65,536"),
        (["train", "--warmup.batch", MANY], "solutions per step were requested"),
        (["train", "--task.count", MANY], f"{MANY} numbers of a sum were requested; use at most 100,000"),
        (["train", "--learn.correction", "{1: 2}"], "learn.correction has a key 1"),
        (["plan", "--seed", -1], "--seed is -1"),
    ],
    ids=lambda value: " ".join(map(str, value[:2])) if isinstance(value, list) else "",
)
def test_absurd_counts_are_refused_before_they_are_made(prompts, tmp_path, arguments, message):
    first, *rest = arguments
    whole = {
        "rollout": lambda: ["tiny-sums", "--prompts", prompts, "--out", tmp_path / "out"],
        "eval": lambda: ["tiny-sums", "--bench", "sums", "--out", tmp_path / "out"],
        "train": lambda: [write_recipe(tmp_path, **SHORT), "--out", tmp_path / "out"],
        "plan": lambda: ["--model", "qwen2.5-1.5b", "--gpus", 8],
    }[first]()
    assert message in sentence(run(first, *whole, *rest)) and not (tmp_path / "out").exists()


def test_a_run_that_is_refused_late_leaves_a_folder_in_which_one_can_begin(tmp_path):
    given, folder = write_recipe(tmp_path, **SHORT), tmp_path / "run"
    found = run("train", given, "--out", folder, "--rollout.max_new_tokens", 10**13)  # of no machine
    assert found.returncode == 1 and "out of memory" in found.stderr and not folder.exists()
    assert run("train", given, "--out", folder).returncode == 0
    assert "holds a run already" in sentence(run("train", given, "--out", folder))


def test_rollout_says_that_it_was_stopped(prompts, tmp_path):
    prompts.write_text('{"prompt": "1+2="}\n' * 4000)
    arguments = ("--prompts", prompts, "--out", tmp_path / "out", "--max-new-tokens", 25, "--stop-id", 0)
    process = subprocess.Popen(command("rollout", "tiny", *arguments), stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out" / "trajectories.jsonl").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert told.splitlines()[-1].startswith("sparse-rl: interrupted; the ") and "are saved in" in told
