"""Every measurement that waits for a GPU, one after the other, each with a limit on its time.

    python benchmarks/gpu_queue.py --out runs/queue --list             # what there is, how long, and what for
    python benchmarks/gpu_queue.py --out runs/queue --minutes 25       # a stay of 25 minutes; repeat it to continue
    python benchmarks/gpu_queue.py --out runs/queue --only gpu-tests,steps --model models/smollm2 --data data
    python benchmarks/gpu_queue.py --out runs/tiny --tiny              # that all work: two CPU cores, 40 minutes

gpu_parts.py has the parts in their order: tests, the study of SmolLM2, whole steps, then the rest. Every part is a
command in a process group of its own; its output is in OUT/NAME.log, its files are in OUT/NAME. One that fails or takes
too long costs its own time and nothing else, and comes after all others the next time. What has ended well is a line of
OUT/queue.jsonl and is not run again; what says "give the same command again" goes on the next time. A part begins only
if its limit fits into what is left of --minutes; parts that can go on begin with less.

Some parts need what is not here: SmolLM2's weights (--model: a folder that `smollm2.py prepare` wrote), GSM8K (--data:
where `sparse-rl data gsm8k --to` put it), bitsandbytes, or vLLM and TRL (--peer-python, --peer-path), or the model of
another part. A part whose needs are absent is left out with a sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import peers
from gpu_parts import PARTS, Part
from stay import provenance, sentence, shared_device

HERE = Path(__file__).resolve().parent
UNFINISHED = "give the same command again"  # as benchmarks say that they can go on


# ------------------------------------------------------------------------------------------ one part


def run(part: Part, command: str, out: Path, minutes: float, **names: str) -> int | None:
    """-> its exit status, of several the largest; None: it was ended because it took too long"""
    folder = out / part.name
    folder.mkdir(parents=True, exist_ok=True)
    known = {"out": folder, "queue": out, "minutes": f"{max(0.5, minutes - 1):.1f}", **names}
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    until = time.monotonic() + 60 * minutes
    with (out / f"{part.name}.log").open("a") as log, contextlib.ExitStack() as ended:
        print("#", sentence(provenance()), file=log)
        children = []
        for one in command.split(" && "):
            arguments = shlex.split(one.format(**known))
            arguments = arguments if arguments[0] == "-m" else [str(HERE / arguments[0]), *arguments[1:]]
            child = subprocess.Popen(
                [sys.executable, *arguments], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                start_new_session=True, env=environment, cwd=HERE.parent,
            )  # fmt: skip
            ended.callback(end, child)
            children.append(child)
            print("$", shlex.join(child.args[1:]), file=log, flush=True)
        try:
            return max((child.wait(max(0.0, until - time.monotonic())) for child in children), key=abs)
        except subprocess.TimeoutExpired:
            return None


def end(child: subprocess.Popen, grace: float = 15.0) -> None:
    """The whole process group, gently first."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + grace
        try:
            os.killpg(child.pid, kind)
            while time.monotonic() < until:
                child.poll()
                os.killpg(child.pid, 0)  # is anybody left?
                time.sleep(0.05)
        except ProcessLookupError:
            return


def tail(log: Path, lines: int = 30, begin: int = 0) -> str:
    """The last lines of what was written from a place on."""
    with log.open("rb") as file:
        file.seek(begin)
        return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])


# ------------------------------------------------------------------------------------------ what a part needs

FILES = {
    "{model}": "it needs SmolLM2's weights; name with --model the folder that `benchmarks/smollm2.py prepare` wrote",
    "{data}": "it needs GSM8K; name with --data the folder where `sparse-rl data gsm8k --to` put it",
}


def lacks(part: Part, command: str, args: argparse.Namespace, done: set[str]) -> str | None:
    """Why a part cannot be run here and now, in a sentence."""
    for place, given in (("{model}", args.model), ("{data}", args.data)):
        if place in command and given is None:
            return f"{FILES[place]}."
        if place in command and not given.exists():
            return f"there is no {given}; {FILES[place]}."
    absent = [name for name in part.modules if importlib.util.find_spec(name) is None]
    if absent and not (args.tiny and absent == ["bitsandbytes"]):  # its rehearsal goes without
        return f"{sys.executable} has no {absent[0]}."
    if part.peers and not args.tiny and (why := peers.left_out(args.peer_python, args.peer_path, part.peers)):
        return why
    earlier = next((other for other in PARTS if other.name == part.after), None)
    if earlier is not None and not is_there(earlier, args, done):
        return f"it starts from what {earlier.name} makes, which is not there yet."
    return None


def is_there(part: Part, args: argparse.Namespace, done: set[str]) -> bool:
    """Whether a part has ended well, or the model that it makes was brought along: it is there, and no log of it."""
    made = Path(os.path.normpath(args.out / part.name / part.makes))
    brought = part.makes != "" and made.exists() and not (args.out / f"{part.name}.log").exists()
    return command_of(part, args) in done or brought


def command_of(part: Part, args: argparse.Namespace) -> str:
    return part.tiny if args.tiny else part.command


# ------------------------------------------------------------------------------------------ all of them


class Queue:
    """What is done, in OUT/queue.jsonl, and how long this stay has been."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.record = args, args.out / "queue.jsonl"
        self.began = time.monotonic()
        self.failed: list[str] = []
        lines = [json.loads(line) for line in self.record.open()] if self.record.exists() else []
        self.done = {line["command"] for line in lines if line.get("state", "done") == "done"}
        self.failed_before = {line["command"] for line in lines} - self.done

    @property
    def left(self) -> float:
        """Minutes."""
        return self.args.minutes - (time.monotonic() - self.began) / 60

    def waiting(self, wanted: set[str] | None) -> list[Part]:
        """What is not done, in its order; what has failed before comes last."""
        named = [part for part in PARTS if command_of(part, self.args) and (wanted is None or part.name in wanted)]
        todo = [part for part in named if command_of(part, self.args) not in self.done]
        return sorted(todo, key=lambda part: command_of(part, self.args) in self.failed_before)

    def work(self, parts: Sequence[Part]) -> None:
        for part in parts:
            command = command_of(part, self.args)
            if command in self.done:  # parts may share a rehearsal
                continue
            least = part.minutes if part.least is None else part.least
            if is_there(part, self.args, self.done):
                print(f"{part.name}: its model is there already", flush=True)
            elif self.left < least:
                print(f"{part.name}: {self.left:.1f} minutes are left, it needs {least:.0f}", flush=True)
            elif why := lacks(part, command, self.args, self.done):
                print(f"{part.name} is left out: {why}", flush=True)
            else:
                self.measure(part, command)

    def measure(self, part: Part, command: str) -> None:
        args, log = self.args, self.args.out / f"{part.name}.log"
        before, start = log.stat().st_size if log.exists() else 0, time.monotonic()
        where = f"--peer-python {shlex.quote(args.peer_python)}"
        where += f" --peer-path {shlex.quote(str(args.peer_path))}" if args.peer_path else ""
        with shared_device() if part.shares else contextlib.nullcontext():
            status = run(
                part, command, args.out, min(part.minutes, self.left),
                model=str(args.model), data=str(args.data), peers=where,
            )  # fmt: skip
        seconds = round(time.monotonic() - start)
        goes_on = UNFINISHED in tail(log, 100_000, before)
        ended_well = status in part.finished
        state = "done" if ended_well and not goes_on else "goes on" if ended_well else "failed"
        print(f"=== {part.name}: {state}, {'too long' if status is None else status}, {seconds} s", flush=True)
        print(tail(log, begin=before), flush=True)
        if state != "goes on":
            line = {"name": part.name, "command": command, "seconds": seconds, "status": status, "state": state}
            line |= provenance()
            with self.record.open("a") as file:
                file.write(json.dumps(line) + "\n")
        self.done |= {command} if state == "done" else set()
        self.failed += [part.name] if state == "failed" else []


def listed(parts: Sequence[Part]) -> str:
    """A table: the order, the most minutes (the fewest with which a part begins), what for, and what it needs."""
    lines = ["| | part | minutes | issue, and what of it | needs |", "|---|---|---|---|---|"]
    for number, part in enumerate(parts, 1):
        least = "" if part.least is None else f" (from {part.least:.0f})"
        places = [f"--{place[1:-1]}" for place in FILES if place in part.command]
        needs = [*places, *(name for name in part.modules if name == "bitsandbytes"), *part.peers]
        needs += [f"part {part.after}"] if part.after else []
        lines.append(f"| {number} | {part.name} | {part.minutes:.0f}{least} | {part.answers} | {', '.join(needs)} |")
    total = sum(part.minutes for part in parts)
    return "\n".join([*lines, "", f"{len(parts)} parts, at most {total / 60:.1f} hours"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--only", help="names of parts, with commas; a name with * at its end: all that begin so")
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct, from `benchmarks/smollm2.py prepare`")
    parser.add_argument("--data", type=Path, help="where `sparse-rl data gsm8k --to` put GSM8K")
    peers.add_options(parser)
    parser.add_argument("--list", action="store_true", help="the parts in their order; with --only some of them")
    parser.add_argument("--tiny", action="store_true", help="rehearse every part on a CPU")
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.model, args.data = (path and path.resolve() for path in (args.model, args.data))
    wanted = None if args.only is None else named(args.only)
    if args.list:
        print(listed([part for part in PARTS if wanted is None or part.name in wanted]))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs ends with this
    queue = Queue(args)
    queue.work(queue.waiting(wanted))
    if queue.failed:
        sys.exit(f"gpu_queue: not done: {', '.join(queue.failed)}")


def named(text: str) -> set[str]:
    found: set[str] = set()
    for name in filter(None, text.split(",")):
        here = {
            part.name for part in PARTS if part.name == name or (name[-1] == "*" and part.name.startswith(name[:-1]))
        }
        if not here:
            sys.exit(f"gpu_queue: there is no part {name}; --list says what there is.")
        found |= here
    return found


if __name__ == "__main__":
    main()
