"""The queue of measurements for a GPU: every part is a command that parses, and costs no more than its time."""

import argparse
import importlib.util
import json
import os
import runpy
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparse_rl.cli.options import overrides
from sparse_rl.config import load_recipe

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import gpu_queue
from gpu_queue import HERE, PARTS, Part

SCRIPT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
time.sleep(60)
"""
NAMES = {"out": "x/part", "queue": "x", "minutes": "5", "model": "m", "data": "d", "peers": "--peer-python p"}
COMMANDS = {
    tuple(shlex.split(one.format(**NAMES)))
    for part in PARTS
    for command in (part.command, part.tiny)
    for one in command.split(" && ")
    if command
}


class Parsed(BaseException):
    pass


@pytest.fixture
def parse(monkeypatch):
    """parse(command): what its script makes of its options; nothing is run."""
    whole = argparse.ArgumentParser.parse_args

    def parse_args(self, *given, **options):
        raise Parsed(whole(self, *given, **options))

    def parse(command):
        script, *arguments = command
        monkeypatch.setattr(sys, "argv", [str(HERE / script), *arguments])
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
        with pytest.raises(Parsed) as found:
            runpy.run_path(str(HERE / script), run_name="__main__")
        return found.value.args[0]

    return parse


def at_once(keys) -> None:
    """Keys of recipes exist."""
    load_recipe("tiny-sums", [pair for pair in keys if not pair[0].startswith("task.")])


@pytest.mark.parametrize("script", sorted({command[0] for command in COMMANDS if command[0] != "-m"}))
def test_every_command_is_one_that_its_script_knows(script, parse):
    for command in sorted(command for command in COMMANDS if command[0] == script):
        args = parse(command)
        at_once(map(tuple, getattr(args, "set", [])))
        if script == "learning_gpu.py":
            from learning_gpu import DENSE, STUDIES

            from sparse_rl.learn.method import METHODS

            study = STUDIES[args.study]
            assert set((args.settings or study.chosen[0]).split(",")) <= set(study.settings)
            assert set((args.methods or DENSE).split(",")) <= {DENSE, *METHODS, *study.variants}
        elif script == "rollout_gpu.py":
            from rollout_gpu import PARTS as ROLLOUTS
            from rollout_gpu import VLLM_PARTS

            assert set(args.only.split(",")) <= {"noise", "slots-kernel", *ROLLOUTS, *VLLM_PARTS}
        elif script == "step_peers.py":
            from step_peers import OURS, PEERS

            assert set(args.columns.split(",")) <= {*OURS, *PEERS}
        elif script == "smollm2.py":
            import smollm2

            block = smollm2.block_of(args)
            for arm in block.arms():
                keys = smollm2.train_keys(block, arm.budget, arm.method, arm.compressor)
                load_recipe(f"smollm2-{args.task}", overrides(block.keys(keys)))
        elif script in ("gradient_noise.py", "warm.py"):
            load_recipe(args.recipe, list(map(tuple, args.set)))
        elif script == "learned_fold.py" and args.only:
            import learned_fold

            assert any(args.only in arm for arm in learned_fold.arms_of(args))


def test_modules_that_it_runs_have_what_they_are_asked_for():
    for command in (command for command in COMMANDS if command[0] == "-m"):
        assert importlib.util.find_spec(command[1])
        assert command[1] == "pytest"
        folders = [part for part in command[2:] if part.startswith("tests/")]
        assert folders and all((HERE.parent / folder).exists() for folder in folders)


def test_names_differ_models_are_made_before_they_are_used_and_a_stay_is_enough():
    names = [part.name for part in PARTS]
    assert len(set(names)) == len(names)
    for number, part in enumerate(PARTS):
        assert part.minutes <= 25 and part.answers and (part.least or 0) <= part.minutes
        assert not part.after or part.after in names[:number]
        assert part.after or "-warm/" not in part.command  # of another part


def test_the_list_has_order_minutes_and_issue(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_queue.py", "--out", "x", "--list", "--only", "qlora*,joint-0"])
    gpu_queue.main()
    rows = capsys.readouterr().out.splitlines()[2:4]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert [row[1] for row in cells] == ["qlora-24gb", "joint-0"]
    assert cells[0][3].startswith("22: 7B QLoRA") and cells[0][4] == "--data, bitsandbytes"
    assert cells[1][2].endswith("(from 8)") and cells[1][4] == "part search-warm"
    monkeypatch.setattr(sys, "argv", ["gpu_queue.py", "--out", "x", "--only", "nothing"])
    with pytest.raises(SystemExit, match="there is no part nothing"):
        gpu_queue.main()


def test_a_part_that_takes_too_long_ends_with_all_that_it_started(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_queue, "HERE", tmp_path)
    (tmp_path / "slow.py").write_text(SCRIPT)
    assert gpu_queue.run(Part("slow", "slow.py", "", 0), "slow.py", tmp_path / "out", 3 / 60) is None
    child = int((tmp_path / "out" / "slow.log").read_text().splitlines()[-1])
    for _ in range(100):  # until init, or whoever adopts it, has noticed
        if not Path(f"/proc/{child}").exists() or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text():
            return
        time.sleep(0.1)
    os.kill(child, 0)
    pytest.fail("a child of the part is still running")


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """queue(parts, *options): a call of main, whose parts are made of scripts in `scripts`."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    monkeypatch.setattr(gpu_queue, "HERE", folder)

    def call(parts, *options):
        monkeypatch.setattr(gpu_queue, "PARTS", tuple(parts))
        monkeypatch.setattr(sys, "argv", ["gpu_queue.py", "--out", str(tmp_path / "out"), *options])
        gpu_queue.main()

    call.scripts, call.out = folder, tmp_path / "out"
    return call


def test_what_failed_is_run_again_after_the_others_and_what_is_done_is_not(queue, capsys):
    (queue.scripts / "good.py").write_text("print('once')")
    (queue.scripts / "bad.py").write_text("raise SystemExit(3)")
    bad, good, late = Part("bad", "bad.py", "", 1), Part("good", "good.py", "", 1), Part("late", "good.py 2", "", 1)
    with pytest.raises(SystemExit, match="not done: bad"):
        queue([bad, good])
    with pytest.raises(SystemExit, match="not done: bad"):
        queue([bad, good, late])
    where, *rest = (queue.out / "good.log").read_text().splitlines()
    assert where.startswith("# ") and "torch " in where and rest == [f"$ {queue.scripts / 'good.py'}", "once"]
    said = [line.split(",")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("===")]
    assert said == ["=== bad: failed", "=== good: done", "=== late: done", "=== bad: failed"]


def test_a_warm_up_that_is_cut_goes_on(tmp_path):
    """Two times with the same command; SIGTERM comes while it trains, and it keeps a checkpoint."""
    keys = {"model.name": "tiny:1x64", "warmup.steps": 400, "warmup.batch": 2, "warmup.workers": 0, "rollout.rows": 2}
    keys |= {"model.dtype": "float32", "eval.prompts": 2, "warmup.eval_every": 0, "rollout.max_new_tokens": 4}
    command = [sys.executable, str(HERE / "warm.py"), "tiny-sums-warmup", "--out", str(tmp_path / "warm")]
    command += [str(part) for key, value in keys.items() for part in ("--set", key, value)]
    first = subprocess.run([*command, "--minutes", "0.02"], capture_output=True, text=True, cwd=HERE.parent)
    assert first.returncode == 0 and gpu_queue.UNFINISHED in first.stderr, first.stderr
    assert not (tmp_path / "warm" / "config.json").exists()
    second = subprocess.run(command, capture_output=True, text=True, cwd=HERE.parent)
    assert second.stdout.endswith("is finished\n") and gpu_queue.UNFINISHED not in second.stderr, second.stderr
    assert (tmp_path / "warm" / "config.json").exists()


def test_tests_that_fail_are_a_measurement(queue):
    (queue.scripts / "tests.py").write_text("raise SystemExit(1)")
    queue([Part("tests", "tests.py", "", 1, finished=(0, 1))])
    (line,) = map(json.loads, (queue.out / "queue.jsonl").open())
    assert (line["status"], line["state"]) == (1, "done")


def test_what_can_go_on_goes_on_and_begins_with_less_time(queue, capsys):
    (queue.scripts / "study.py").write_text("print('not finished: a; give the same command again.')")
    part = Part("study", "study.py {minutes}", "", 24, least=8)
    queue([part], "--minutes", "10")
    queue([part], "--minutes", "5")
    assert "=== study: goes on, 0" in (said := capsys.readouterr().out) and "it needs 8" in said
    assert not (queue.out / "queue.jsonl").exists()
    (queue.scripts / "study.py").write_text("import sys; assert 8 < float(sys.argv[1]) < 9.1")
    queue([part], "--minutes", "10")
    assert "=== study: done, 0" in capsys.readouterr().out  # although its log has the older sentence


def test_a_part_whose_needs_are_absent_is_left_out_with_a_sentence(queue, tmp_path, capsys):
    (queue.scripts / "good.py").write_text("print('once')")
    parts = [
        Part("weights", "good.py {model}", "", 1),
        Part("file", "good.py {data}", "", 1),
        Part("module", "good.py 3", "", 1, modules=("no_such_module",)),
        Part("peer", "good.py 4", "", 1, peers=("no_such_module",)),
        Part("first", "good.py 5", "", 1, modules=("no_such_module",), makes="model/config.json"),
        Part("second", "good.py 6", "", 1, after="first"),
    ]
    queue(parts, "--data", str(tmp_path / "nowhere"))
    said = capsys.readouterr().out
    assert "weights is left out: it needs SmolLM2's weights; name with --model" in said
    assert f"file is left out: there is no {tmp_path / 'nowhere'}; it needs GSM8K" in said
    assert "module is left out: " in said and said.count("has no no_such_module") == 3
    assert "second is left out: it starts from what first makes, which is not there yet." in said
    (queue.out / "first" / "model").mkdir(parents=True)
    (queue.out / "first" / "model" / "config.json").write_text("{}")
    queue(parts, "--model", str(tmp_path), "--data", str(tmp_path))
    said = capsys.readouterr().out
    assert all(f"=== {name}: done" in said for name in ("weights", "file", "second")) and "=== first" not in said
    assert "first: its model is there already" in said


def test_a_model_that_is_half_made_is_not_started_from(queue, capsys):
    (queue.scripts / "warm.py").write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[1], 'model').touch()\nprint('give the same command again')\n"
    )
    (queue.scripts / "good.py").write_text("")
    parts = [Part("warm", "warm.py {out}", "", 1, makes="model"), Part("second", "good.py", "", 1, after="warm")]
    queue(parts)
    assert "second is left out: it starts from what warm makes, which is not there yet." in capsys.readouterr().out
    (queue.scripts / "warm.py").write_text("")
    queue(parts)
    assert "=== second: done" in capsys.readouterr().out


def test_commands_of_a_part_run_side_by_side_and_the_worst_counts(queue):
    """Each waits for the other's file."""
    (queue.scripts / "pair.py").write_text(
        "import pathlib, sys, time\n"
        "folder, own, other, code = sys.argv[1:]\n"
        "pathlib.Path(folder, own).touch()\n"
        "while not pathlib.Path(folder, other).exists(): time.sleep(0.01)\n"
        "sys.exit(int(code))\n"
    )
    both = "pair.py {out} a b 0 && pair.py {out} b a 4"
    with pytest.raises(SystemExit, match="not done: pair"):
        queue([Part("pair", both, "", 1)])
    (line,) = map(json.loads, (queue.out / "queue.jsonl").open())
    assert (line["status"], line["state"]) == (4, "failed")
