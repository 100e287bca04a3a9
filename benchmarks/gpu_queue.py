"""Every measurement that waits for a GPU, one after the other, each with a limit on its time.

    python benchmarks/gpu_queue.py --out runs/queue --minutes 25       # repeat it to continue
    python benchmarks/gpu_queue.py --out runs/queue --only conversations,serve
    python benchmarks/gpu_queue.py --out runs/queue --list             # what there is, and how long it may take
    python benchmarks/gpu_queue.py --out runs/tiny --tiny              # that all of them work: a CPU, some minutes

Every part is a command in a process group of its own; its output is in OUT/NAME.log, its files are in OUT/NAME. One
that fails or takes too long costs its own time and nothing else. What has ended well is a line of OUT/queue.jsonl and
is not run again. A part begins only if its limit fits into what is left of --minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Part:
    """A measurement: what is run on a GPU, what rehearses it on a CPU, and how long the first may take."""

    name: str
    command: str  # {out}: its folder
    tiny: str
    minutes: float


SMALL = "--device cpu --rows 4 --prompts 2 --group 2 --new 12 --budget 16 --interval 8 --repeats 1"
PARTS = (
    Part("conversations", "conversations_gpu.py --out {out}", "conversations_gpu.py --out {out} --tiny", 4),
    Part("serve", "serve_gpu.py --out {out} --columns rollout,serve", "serve_gpu.py --out {out} --tiny "
         "--columns rollout,serve", 4),
    Part("pool", "ahead.py --preset 1.5b --arms ahead pool --limit 170 --out {out}", "ahead.py --tiny --arms ahead "
         "pool --out {out}", 7),
    Part("learner", "learner_gpu.py --out {out} --quick", "learner_gpu.py --out {out} --quick --model tiny "
         "--device cpu", 3),
    Part("steps", "step_peers.py --out {out} --columns sparse-rl,shadow", "step_peers.py --out {out} --tiny "
         "--columns sparse-rl,shadow", 5),
    Part("first-step", "first_step.py --out {out}", "first_step.py --out {out} --tiny", 3),
    Part("half", "half_precision.py random:qwen2.5-1.5b --out {out}/half.json", "half_precision.py tiny:2x64 "
         f"--out {{out}}/half.json {SMALL}", 3),
    Part("slots-kernel", "rollout_gpu.py --out {out} --only slots-kernel,noise", "", 3),
    Part("slots", "rollout_gpu.py --out {out} --only slots", "", 8),
    Part("new-models", "new_models_gpu.py --minutes 3.5 --lines {out}/lines.jsonl", "new_models_gpu.py --tiny "
         "--lines {out}/lines.jsonl", 15),
    Part("long", "long_learner.py --gpu-memory 80 --lengths 65536 --views shadow --out {out}", "long_learner.py --out "
         "{out} --model tiny:2x64 --device cpu --lengths 96 --prompt 16 --budget 24 --interval 8 --sampled 16", 6),
)  # fmt: skip


def run(part: Part, command: str, out: Path, minutes: float) -> int | None:
    """-> its exit status; None: it was ended because it took too long"""
    folder = out / part.name
    folder.mkdir(parents=True, exist_ok=True)
    script, *arguments = command.format(out=folder).split()
    with (out / f"{part.name}.log").open("a") as log:
        child = subprocess.Popen(
            [sys.executable, str(HERE / script), *arguments],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        try:
            return child.wait(60 * minutes)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(child)


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


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=math.inf)
    parser.add_argument("--only", help=f"some of {','.join(part.name for part in PARTS)}")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    wanted = None if args.only is None else set(args.only.split(","))
    if unknown := (wanted or set()) - {part.name for part in PARTS}:
        sys.exit(f"gpu_queue: there is no part {', '.join(sorted(unknown))}; --list says what there is.")
    if args.list:
        for part in PARTS:
            print(
                f"{part.name:14} {part.minutes:3.0f} minutes at most   {part.command.format(out=args.out / part.name)}"
            )
        return
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what runs ends with this
    record, began, failed = args.out / "queue.jsonl", time.monotonic(), []
    done = {json.loads(line)["command"] for line in record.open()} if record.exists() else set()
    for part in PARTS:
        command = part.tiny if args.tiny else part.command
        if command in done or not command or (wanted is not None and part.name not in wanted):
            continue
        left = args.minutes - (time.monotonic() - began) / 60
        if left < part.minutes:
            print(f"{part.name}: {left:.1f} minutes are left, it may take {part.minutes:.0f}", flush=True)
            continue
        start = time.monotonic()
        status = run(part, command, args.out, part.minutes)
        seconds = time.monotonic() - start
        print(f"=== {part.name}: {'too long' if status is None else status}, {seconds:.0f} s", flush=True)
        print(tail(args.out / f"{part.name}.log"), flush=True)
        if status == 0:
            with record.open("a") as file:
                file.write(json.dumps({"name": part.name, "command": command, "seconds": round(seconds)}) + "\n")
        else:
            failed.append(part.name)
    if failed:
        sys.exit(f"gpu_queue: not done: {', '.join(failed)}")


if __name__ == "__main__":
    main()
