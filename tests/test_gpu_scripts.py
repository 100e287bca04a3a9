"""What scripts for a GPU do when something fails or time is over: what was measured before stays."""

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import ahead
import compressors
import new_models_gpu
import rollout_gpu
import serve_gpu
import stay
import step_peers


def test_a_column_that_fails_keeps_no_other_from_being_measured(tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise AssertionError("the server did not start: no device")

    monkeypatch.setattr(serve_gpu, "model_in_a_process", lambda folder, shape: 256)
    monkeypatch.setattr(serve_gpu, "serve", fails)
    monkeypatch.setattr(serve_gpu, "rollout", lambda args: {"tokens_per_s": 10.0})
    monkeypatch.setattr(sys, "argv", ["serve_gpu.py", "--out", str(tmp_path), "--columns", "serve,rollout"])
    with pytest.raises(SystemExit, match="failed: serve"):
        serve_gpu.main()
    assert json.loads((tmp_path / "rollout.json").read_text())["torch"] and not (tmp_path / "serve.json").exists()
    said = capsys.readouterr().out
    assert "serve failed: AssertionError: the server did not start: no device" in said and "| rollout | 10 |" in said


def test_a_server_that_ends_at_once_is_named_by_its_last_line(tmp_path):
    command = [sys.executable, "-c", "raise SystemExit('no device')"]
    with (
        pytest.raises(AssertionError, match="did not start: no device"),
        serve_gpu.running(command, serve_gpu.free_port(), tmp_path / "serve.log", patience=30),
    ):
        pass


@pytest.mark.parametrize("late", [True, False])
def test_a_model_that_is_cut_keeps_its_first_step(late, tmp_path, monkeypatch):
    line = json.dumps({"model": "gemma-3-4b", "steps": 1, "first": {"step": 9.0}})
    said = f"something else\n{line}\n"

    def run(command, **options):
        if late:
            raise subprocess.TimeoutExpired(command, 1, output=said.encode())
        return subprocess.CompletedProcess(command, 1, said, "no memory\n")

    monkeypatch.setattr(new_models_gpu.subprocess, "run", run)
    lines = tmp_path / "lines.jsonl"
    monkeypatch.setattr(sys, "argv", ["new_models_gpu.py", "gemma-3-4b", "--minutes", "1", "--lines", str(lines)])
    with pytest.raises(SystemExit, match="failed: gemma-3-4b"):
        new_models_gpu.main()
    found = json.loads(lines.read_text())
    assert found["first"] == {"step": 9.0} and found["error"] == ("took more than 1 minutes" if late else "no memory")
    assert new_models_gpu.measured(lines, vllm=False) == set()  # and it is tried again


def test_a_rollout_that_fails_keeps_no_other_from_being_measured(tmp_path, monkeypatch, capsys):
    def bench(setting, model):
        if setting.slots == "fp8":
            raise RuntimeError("no such slots")
        return {"tokens_per_s": 1.0}

    monkeypatch.setattr(rollout_gpu, "bench_rollout", bench)
    failed = rollout_gpu.run(tmp_path, ["slots"], Namespace(tiny=True))
    assert failed == ["rollout tiny rkv 16+8 rows 4 fp8 new 24"] and "no such slots" in capsys.readouterr().err
    assert len(rollout_gpu.read(tmp_path / "results.jsonl")) == 2


def test_a_point_that_fails_keeps_no_other_from_being_made(tmp_path, monkeypatch):
    class Bench:
        def __init__(self, args):
            pass

        def online(self, point):
            if point["rule"] == "rkv":
                raise RuntimeError("no memory")
            return {"accuracy": 1.0, "entries": 2.0}

    monkeypatch.setattr(compressors, "Bench", Bench)
    options = ["--rules", "rkv", "window", "--budgets", "30", "--seeds", "1", "--no-offline"]
    monkeypatch.setattr(sys, "argv", ["compressors.py", "--out", str(tmp_path), *options])
    with pytest.raises(SystemExit, match="2 points failed"):
        compressors.main()
    rows = [json.loads(line) for line in (tmp_path / "points.jsonl").open()]
    assert [row["rule"] for row in rows] == ["dense", "window", "window"]


def test_folders_share_the_weights_that_one_of_them_made(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        step_peers.share_model(step_peers.TINY, tmp_path / name, tmp_path / "gone")
        shutil.rmtree(tmp_path / "gone")
        step_peers.share_model(step_peers.TINY, tmp_path / name, tmp_path / "models")
    assert not step_peers.is_made(tmp_path / "b")
    step_peers.make_model(step_peers.TINY, tmp_path / "a")
    assert step_peers.is_made(tmp_path / "b") and (tmp_path / "models" / "tiny-float32").is_dir()


def test_an_arm_has_a_row_before_its_time_is_read():
    result = {"arm": "pool", "seed": 0, "mps": True, "step": 1.0, "wait": 0.0, "rollout": 1.0, "update": 1.0}
    result |= {"steps": 3, "peak": 0, "used": None, "idle": None, "curve": [], "clip": []}
    assert "| pool (MPS) | 0 | 1.00 |" in ahead.table([result])


def test_a_result_says_where_it_was_made(monkeypatch):
    stay.provenance.cache_clear()
    found = stay.provenance()
    assert found["torch"] == torch.__version__ and "device" in found
    assert stay.sentence({"device": "H200, 570.1", "commit": "1234567", "torch": "2.11.0"}) == (
        "commit 1234567, H200, 570.1, torch 2.11.0"
    )

    def fails(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(stay.subprocess, "run", fails)
    stay.provenance.cache_clear()
    assert stay.provenance()["device"] == "CPU" and "commit" not in stay.provenance()
    stay.provenance.cache_clear()
