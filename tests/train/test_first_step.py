"""benchmarks/first_step.py: what a first step's extra time consists of."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparse_rl.rollout.capture import Decoder
from sparse_rl.train.log import Clock
from sparse_rl.train.loop import Trainer

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import first_step
from first_step import Record, kernel_table, table
from step_peers import TINY, make_model


def test_the_extra_is_divided():
    """A first step of 10 s, later ones of 3 and 5: of 6 s more, 2 were compiling and 1 was a capture's own."""
    record = Record(step=1, stage="rollout")

    def capture(_):
        record.listen(metadata={"name": "_kernel"}, times=SimpleNamespace(total=2e6), cache_hit=False)

    record.captured(capture)(None)
    record.here.capturing = 1.0
    record.stage = "update"
    record.listen(metadata={"name": "_kernel"}, times=SimpleNamespace(total=5e5), cache_hit=True)
    record.step = 2
    record.listen(metadata={"name": "_late"}, times=SimpleNamespace(total=1e6), cache_hit=False)
    steps = [dict.fromkeys(first_step.STAGES, seconds) for seconds in (10.0, 3.0, 5.0)]
    rows = {line.split("|")[1].strip(): line for line in table(steps, record).splitlines()[2:]}
    assert rows["rollout"] == "| rollout | 10.00 s | 4.00 s | 6.00 s | 2.00 s | 1.00 s (1 graphs) | 3.00 s |"
    assert rows["score"] == "| score | 10.00 s | 4.00 s | 6.00 s | 0.00 s | 0.00 s | 6.00 s |"
    assert rows["step"] == "| step | 10.00 s | 4.00 s | 6.00 s | 2.50 s | 1.00 s (1 graphs) | 2.50 s |"
    assert kernel_table(record.kernels).splitlines()[2:] == [
        "| _kernel | 2 | 2.50 | 1 |",
        "| _late | 1 | 1.00 | 0 |",
        "| **sum** | 3 | 3.50 | 1 |",
    ]


def test_the_benchmark_runs_on_a_cpu(tmp_path, monkeypatch):
    for owner, name in ((Decoder, "capture"), (Clock, "__init__"), (Trainer, "step")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # what it replaces comes back
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    if first_step.torch.cuda.is_available():
        pytest.skip("the tiny mode is for a CPU")
    make_model(TINY, tmp_path)
    monkeypatch.setattr(sys, "argv", ["first_step.py", "--tiny", "--out", str(tmp_path)])
    try:
        first_step.main()
    finally:
        if first_step.has_triton():
            from triton import knobs

            knobs.compilation.listener = None
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:7]] == list(first_step.STAGES)
    assert lines[-1].startswith("tiny, sparse-rl, ") and ", CPU, torch " in f", {lines[-1]}"
    monkeypatch.setattr(sys, "argv", ["first_step.py", "--tiny", "--steps", "1", "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="there is no later step"):
        first_step.main()
