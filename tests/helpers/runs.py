"""Small recipes, the command line in a child process, and the weights of a checkpoint."""

import contextlib
import io
import signal
import subprocess
import sys
from pathlib import Path

import torch

from sparse_rl.cli import main
from sparse_rl.config import make_recipe
from sparse_rl.models import load_model

PATIENCE = 600  # seconds until a process that does not answer is given up, on however busy a machine

BASE = {
    "model": {"name": "tiny-sums"},
    "task": {"name": "sums"},
    "rollout": {
        "budget": 42,
        "interval": 4,
        "compressor_options": {"protect_prompt": True},
        "rows": 16,
        "prompts": 4,
        "group_size": 4,
        "max_new_tokens": 64,
    },
    "learn": {"minibatches": 2, "micro_batch_tokens": 400},
    "optimizer": {"lr": 1e-4},
    "eval": {"every": 3, "prompts": 4},
    "run": {"steps": 4, "checkpoint_every": 2, "diagnose": 2, "samples": 2},
}


def recipe(**sections):
    return make_recipe({name: {**BASE.get(name, {}), **sections.get(name, {})} for name in {**BASE, **sections}})


def write_recipe(folder: Path, **sections) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "given.yaml"
    path.write_text(recipe(**sections).to_yaml())
    return path


def command(*args: object) -> list[str]:
    return [sys.executable, "-c", "from sparse_rl.cli import main; main()", *map(str, args)]


_STOPS = """
import os, sys, threading, time
from pathlib import Path
path, lines, seconds, number, *sys.argv[1:] = sys.argv[1:]

def stop():
    while not Path(path).exists() or Path(path).read_bytes().count(b"\\n") < int(lines):
        time.sleep(0.01)
    time.sleep(float(seconds))
    os.kill(os.getpid(), int(number))

threading.Thread(target=stop, daemon=True).start()
from sparse_rl.cli import main
main()
"""


def command_that_is_stopped(
    number: signal.Signals, file: Path, lines: int, *args: object, seconds: float = 0.0
) -> list[str]:
    """A command that gets a signal once a file has so many lines, some seconds later. It sends it to itself: on a busy
    machine another process may see the lines when the command has ended.
    """
    return [sys.executable, "-c", _STOPS, *map(str, (file, lines, seconds, int(number), *args))]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_model(str(folder))[0].state_dict()


def run(*arguments) -> subprocess.CompletedProcess:
    """A command as a shell would run it, but in this process: starting one takes longer than most commands."""
    said, told, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["sparse-rl", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(told):
            main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = before
    if isinstance(code, str):  # what Python prints for it
        told.write(f"{code}\n")
        code = 1
    return subprocess.CompletedProcess(sys.argv, code, said.getvalue(), told.getvalue())
