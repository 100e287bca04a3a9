"""The queue of measurements for a GPU: every part can be found, and costs no more than its time."""

import os
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import gpu_queue
from gpu_queue import PARTS, Part

SCRIPT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""


def test_its_scripts_exist_and_its_names_differ():
    commands = [
        command.format(out="x").split()[0] for part in PARTS for command in (part.command, part.tiny) if command
    ]
    assert all((gpu_queue.HERE / script).is_file() for script in commands)
    assert len({part.name for part in PARTS}) == len(PARTS)


def test_a_part_that_takes_too_long_ends_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_queue, "HERE", tmp_path)
    (tmp_path / "slow.py").write_text(SCRIPT)
    assert gpu_queue.run(Part("slow", "slow.py", "", 0), "slow.py", tmp_path / "out", 3 / 60) is None
    child = int((tmp_path / "out" / "slow.log").read_text())
    for _ in range(100):  # until init, or whoever adopts it, has noticed
        if not Path(f"/proc/{child}").exists() or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text():
            return
        time.sleep(0.1)
    os.kill(child, 0)
    pytest.fail("a child of the part is still running")


def test_what_failed_is_run_again_and_what_is_done_is_not(tmp_path, monkeypatch, capsys):
    (tmp_path / "good.py").write_text("print('once')")
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    monkeypatch.setattr(gpu_queue, "HERE", tmp_path)
    monkeypatch.setattr(gpu_queue, "PARTS", (Part("good", "good.py", "", 1), Part("bad", "bad.py", "", 1)))
    monkeypatch.setattr(sys, "argv", ["gpu_queue.py", "--out", str(tmp_path / "out")])
    for _ in range(2):
        with pytest.raises(SystemExit, match="not done: bad"):
            gpu_queue.main()
    assert (tmp_path / "out" / "good.log").read_text() == "once\n"
    assert capsys.readouterr().out.count("=== bad: 3") == 2
