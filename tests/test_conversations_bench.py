"""The benchmark of conversations samples the same tokens each way, and says which rows had nothing to do."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import conversations_gpu


def test_the_tiny_benchmark_samples_the_same_tokens_each_way(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["conversations_gpu.py", "--out", str(tmp_path), "--tiny"])
    conversations_gpu.main()
    lines = {line["arm"]: line for line in map(json.loads, (tmp_path / "results.jsonl").open())}
    assert list(lines) == ["one turn", "at once", "kept", "given away"]
    assert {round(line["tokens_per_s"] * line["seconds"]) for line in lines.values()} == {12 * 3 * 16}
    assert lines["at once"]["moved"] == 0 < lines["given away"]["moved"] <= 1
    assert 0 <= lines["kept"]["rows idle while all are needed"] <= lines["kept"]["rows idle"] < 1
    assert (tmp_path / "table.md").read_text() in capsys.readouterr().out
