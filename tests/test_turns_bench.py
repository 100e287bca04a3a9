"""The benchmark of conversations runs: the same tokens in turns and in one."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import turns_gpu


def test_the_tiny_benchmark_samples_the_same_tokens_each_way(tmp_path):
    told = turns_gpu.main(["--out", str(tmp_path), "--tiny"])
    runs = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert [len(one) for one in runs.values()] == [1, 1, 1]
    assert {one[0]["sampled"] for one in runs.values()} == {4 * 3 * 4}
    assert 0 < runs["turns"][0]["rows"] <= 1 and runs["turns"][0]["waiting"] > runs["at once"][0]["waiting"]
    assert len(told.splitlines()) == 5 and "| one turn |" in told
