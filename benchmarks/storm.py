"""A storm: kills at random moments, bad inputs, grader bombs, run folders of strangers. What is lost, and what hangs?

    OMP_NUM_THREADS=1 python benchmarks/storm.py --out runs/storm --seconds 600      # repeat it: the counts add up
    python benchmarks/storm.py --out runs/storm --table
    python benchmarks/storm.py --out runs/storm --seconds 60 --only inputs folders

kills       SIGKILL of train, eval, rollout, warmup and train in two processes, up to three times each; then it goes on
            to its end, and its files are compared, byte by byte, with those of a run that was left alone
inputs      recipes and options with values that do not belong there, made from the recipe's own keys
bombs       answers that take very long to read as maths, each one another
folders     run folders that are damaged, or that a stranger made to run code, with train --resume, report and eval

Every case is one line of results.jsonl and is drawn from (kind, number) alone; --case KIND NUMBER repeats one. A child
is forked from this process, which has imported everything: starting Python would take longer than most cases.
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}

import torch
import yaml

from sparse_rl import tasks
from sparse_rl.cli import main
from sparse_rl.config import SECTIONS, load_recipe, make_recipe, table_of_keys
from sparse_rl.distributed.world import MEETING_FILE
from sparse_rl.files import append_line, find_checkpoints, read_lines
from sparse_rl.models import load_model

HANG = 20.0  # seconds after which an input or a folder is said to hang
STUCK = 180.0  # seconds after which a run that nobody kills is
MEMORY = 16 << 30  # bytes of address space of a child
BOMBS = 1000  # of a case: a step of completions that are all bombs
SMALL = {
    "model": {"name": "tiny"},
    "task": {"name": "sums", "count": 3},
    "rollout": {"budget": 24, "interval": 4, "rows": 4, "prompts": 2, "group_size": 2, "max_new_tokens": 12},
    "learn": {"minibatches": 1, "micro_batch_tokens": 200},
    "optimizer": {"lr": 1e-3},
    "eval": {"every": 2, "prompts": 2},
    "run": {"steps": 4, "checkpoint_every": 1, "keep": 2, "samples": 2, "diagnose": 1},
    "warmup": {"steps": 6, "batch": 4, "checkpoint_every": 2},
}
ACCIDENT = ("traceback", "hang", "differs", "lost", "left over", "code ran", "silent")  # verdicts that must not be


# ---------------------------------------------------------------------------------------------------------- children


def start(arguments: list, log: Path, environment: dict[str, str] | None = None) -> int:
    """`sparse-rl ARGUMENTS` in a forked process of its own session, with its output in a file; returns the pid."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        os.setsid()
        os.environ.update(environment or {})
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = sys.stderr = io.TextIOWrapper(os.fdopen(descriptor, "wb", 0), write_through=True, errors="replace")
        sys.argv = ["sparse-rl", *map(str, arguments)]
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def wait(pid: int, seconds: float) -> int | None:
    """The exit status (negative: the signal), or None if the process is still there after that time."""
    deadline, pause = time.monotonic() + seconds, 0.001
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(pause)
        pause = min(2 * pause, 0.05)


def kill(pid: int) -> None:
    """SIGKILL for a child and all that it started in its session."""
    with suppress(ProcessLookupError):  # it has no session yet
        os.killpg(pid, signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)  # still ours: nobody has waited for it
    os.waitpid(pid, 0)


def spoken(pid: int, log: Path, seconds: float) -> tuple[str, str]:
    """How a command that may refuse its input ended: (verdict, the last lines that it said)."""
    code = wait(pid, seconds)
    if code is None:
        kill(pid)
    said = log.read_text(errors="replace") if log.exists() else ""
    last = said[-600:]
    if code is None:
        return "hang", last
    if "Traceback (most recent call last)" in said or code < 0 or code == 70:
        return "traceback", last
    if code == 0:
        return "accepted", ""
    sentence = any(line.startswith(("sparse-rl: ", "Error", "Usage")) for line in said.splitlines())
    return ("refused" if sentence else "silent"), last


# ------------------------------------------------------------------------------------------------------------- kills


class Killed:
    """A command that is killed and goes on: what begins it, what continues it, and which files must be the same."""

    processes = 1

    def __init__(self, place: Path):
        self.place = place
        place.mkdir(parents=True, exist_ok=True)

    def commands(self, folder: Path) -> list:
        """The arguments that begin the work in a folder, or that continue it."""
        raise NotImplementedError

    def files(self, folder: Path) -> dict[str, bytes]:
        """What must not depend on kills."""
        raise NotImplementedError

    def check(self, folder: Path, reference: dict[str, bytes]) -> str | None:
        """What is wrong right after a kill."""
        return None

    def left_over(self, folder: Path) -> list[str]:
        return [str(p.relative_to(folder)) for p in folder.rglob(".*") if p.name != ".lock"]

    def start(self, folder: Path, log: Path) -> list[int]:
        if self.processes == 1:
            return [start(self.commands(folder), log)]
        meeting = folder.parent / f"{folder.name}.meeting"
        meeting.unlink(missing_ok=True)
        size = str(self.processes)
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.processes)]
        shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, MEETING_FILE: str(meeting)}
        return [start(self.commands(folder), log, {**shared, **place}) for place in places]


class Train(Killed):
    recipe = SMALL

    def commands(self, folder: Path) -> list:
        if (folder / "recipe.yaml").exists():
            return ["train", folder, "--resume"]
        path = self.place / "recipe.given.yaml"
        path.write_text(yaml.safe_dump(self.recipe))
        return ["train", path, "--out", folder]

    def files(self, folder: Path) -> dict[str, bytes]:
        newest = find_checkpoints(folder / "checkpoints")
        wanted = [folder / "metrics.jsonl", folder / "recipe.yaml", *sorted((folder / "samples").rglob("*.*"))]
        wanted += [path / "model.safetensors" for _, path in newest]
        return {str(path.relative_to(folder)): path.read_bytes() for path in wanted if path.is_file()}

    def check(self, folder: Path, reference: dict[str, bytes]) -> str | None:
        found = find_checkpoints(folder / "checkpoints")
        done = max((line["step"] for line in read_lines(folder / "metrics.jsonl")), default=0)
        if found and found[-1][0] > done:
            return "a checkpoint is ahead of the log"
        for _, path in found:
            torch.load(path / "training.pt", weights_only=True)
            load_model(str(path))
        return None


class TrainInTwo(Train):
    processes = 2


class Warmup(Killed):
    def commands(self, folder: Path) -> list:
        if (folder / "recipe.yaml").exists():
            return ["warmup", folder, "--resume"]
        shutil.rmtree(folder, ignore_errors=True)  # a folder without a recipe: nothing had begun
        path = self.place / "recipe.given.yaml"
        path.write_text(yaml.safe_dump(SMALL))
        return ["warmup", path, "--out", folder]

    def files(self, folder: Path) -> dict[str, bytes]:
        return {name: (folder / name).read_bytes() for name in ("metrics.jsonl", "recipe.yaml", "model.safetensors")}


class Eval(Killed):
    def commands(self, folder: Path) -> list:
        few = ["--limit", 4, "--samples", 2, "--max-new-tokens", 12, "--rows", 2]
        return ["eval", "tiny-sums", "--bench", "sums", *few, "--out", folder]

    def files(self, folder: Path) -> dict[str, bytes]:
        return {name: (folder / name).read_bytes() for name in ("items.jsonl",)}


class Rollout(Killed):
    """A rollout does not go on; what had finished must be whole, and the same as in a rollout left alone."""

    def commands(self, folder: Path) -> list:
        path = self.place / "prompts.jsonl"
        path.write_text("".join(json.dumps({"prompt": f"{i}+{i + 1}="}) + "\n" for i in range(6)))
        few = ["--budget", 12, "--interval", 4, "--rows", 2, "--group-size", 2, "--max-new-tokens", 12]
        if (folder / "trajectories.jsonl").exists():
            shutil.rmtree(folder)
        return ["rollout", "tiny", "--prompts", path, *few, "--out", folder]

    def lines(self, folder: Path) -> list[str]:
        path = folder / "trajectories.jsonl"
        text = path.read_text() if path.exists() else ""
        return text.split("\n")[:-1]

    def files(self, folder: Path) -> dict[str, bytes]:
        found = {"lines": "\n".join(sorted(self.lines(folder))).encode()}
        return found | {path.name: path.read_bytes() for path in sorted((folder / "traces").glob("*"))}

    def check(self, folder: Path, reference: dict[str, bytes]) -> str | None:
        for line in self.lines(folder):
            trace = Path(json.loads(line)["trace"])
            if line.encode() not in reference["lines"] or (folder / trace).read_bytes() != reference[trace.name]:
                return "a finished trajectory differs"
        return None


KILLED: dict[str, type[Killed]] = {
    "train": Train,
    "two processes": TrainInTwo,
    "warmup": Warmup,
    "eval": Eval,
    "rollout": Rollout,
}


def undisturbed(work: Killed) -> tuple[dict[str, bytes], float]:
    """The files of a run that is left alone, and the seconds that it takes; made once."""
    folder, clock = work.place / "undisturbed", work.place / "seconds.json"
    if not clock.exists():
        shutil.rmtree(folder, ignore_errors=True)
        began = time.monotonic()
        for pid in work.start(folder, work.place / "undisturbed.log"):
            code = wait(pid, STUCK)
            assert code == 0, (work.place / "undisturbed.log").read_text()
        clock.write_text(json.dumps(time.monotonic() - began))
    return work.files(folder), json.loads(clock.read_text())


def kills(name: str, number: int, place: Path) -> dict:
    """Kill a command one to three times, let it end, and compare."""
    draw, work = random.Random(f"{name} {number}"), KILLED[name](place / "kills" / name.replace(" ", "-"))
    reference, seconds = undisturbed(work)
    folder, log = work.place / f"case-{number}", work.place / f"case-{number}.log"
    shutil.rmtree(folder, ignore_errors=True)
    log.unlink(missing_ok=True)
    done = {"kills": 0, "after": []}
    for _ in range(draw.randint(1, 3)):
        pids = work.start(folder, log)
        time.sleep(draw.random() * seconds)
        victims = pids if draw.random() < 0.5 else pids[draw.randrange(len(pids)) :][:1]
        status = [wait(pid, 0) for pid in victims]
        for pid, ended in zip(victims, status):
            if ended is None:
                kill(pid)
        hit = any(ended is None for ended in status)
        done["kills"] += hit
        seconds *= 1.05 if hit else 0.8  # so that most kills hit, on a machine that is now faster, now slower
        done["after"].append(sorted(p.name for p in folder.glob("*")) if folder.exists() else [])
        for pid in set(pids) - set(victims):  # as the launcher ends them
            os.kill(pid, signal.SIGTERM)
            if wait(pid, 30) is None:
                kill(pid)
        if not hit:
            break
        try:
            if wrong := work.check(folder, reference):
                return done | {"verdict": "lost", "said": wrong}
        except Exception as error:
            return done | {"verdict": "lost", "said": f"{type(error).__name__}: {error}"[:600]}
    (work.place / "seconds.json").write_text(json.dumps(seconds))
    for pid in work.start(folder, log):
        code = wait(pid, STUCK)
        if code is None:
            kill(pid)
            return done | {"verdict": "hang", "said": log.read_text()[-600:]}
        if code != 0:
            kind = "traceback" if "Traceback" in log.read_text() else "lost"
            return done | {"verdict": kind, "said": log.read_text()[-600:]}
    found = work.files(folder)
    if different := sorted(k for k in {**reference, **found} if reference.get(k) != found.get(k)):
        return done | {"verdict": "differs", "said": f"{different}; {folder}"}
    if left := work.left_over(folder):
        return done | {"verdict": "left over", "said": str(left)}
    shutil.rmtree(folder)
    log.unlink(missing_ok=True)
    return done | {"verdict": "same"}


# ------------------------------------------------------------------------------------------------------------ inputs

VALUES = [  # as YAML writes them
    ".inf", "-.inf", ".nan", "1e999", "-1", "0", "0.5", "1000000000000", "9" * 30, "9" * 5000, "true", "null", "text",
    '""', "[]", "{}", "[1, two, [3]]", "{a: {b: 1}}", "2024-01-31", r'"\ud800"', r'"a\0b"', "x" * 100_000,
    "[" * 3000 + "]" * 3000, "&a [*a]", "!!python/object/apply:os.getcwd []", "../../../../etc/passwd", "/dev/zero",
]  # fmt: skip
WAYS = ("file", "option", "plan", "warmup")


def input_cases() -> list[tuple[str, str, str]]:
    """(key, value, way): every key with every value, in an order that visits all keys and values early."""
    keys = [key for key, _, _ in table_of_keys() if key != "task.options"] + ["task.count", "task.seed", "nothing.here"]
    cases = [(k, v, way) for k, v in itertools.product(keys, VALUES) for way in WAYS]
    random.Random(0).shuffle(cases)
    return cases


def inputs(number: int, place: Path) -> dict:
    key, value, way = input_cases()[number % len(input_cases())]
    place = place / "inputs"
    place.mkdir(parents=True, exist_ok=True)
    path, log, out = place / "given.yaml", place / "said.log", place / "out"
    shutil.rmtree(out, ignore_errors=True)
    log.unlink(missing_ok=True)
    small = {**SMALL, "run": {**SMALL["run"], "steps": 1}, "warmup": {**SMALL["warmup"], "steps": 1}}
    section, _, name = key.partition(".")
    others = {k: v for k, v in small.get(section, {}).items() if k != name}
    lines = yaml.safe_dump({s: v for s, v in small.items() if s != section})
    inside = "".join(f"  {k}: {json.dumps(v)}\n" for k, v in others.items())
    good = f"{lines}{section}:\n{inside}" if section in SECTIONS else yaml.safe_dump(small)
    path.write_text(yaml.safe_dump(small) if way == "option" else f"{good}  {name}: {value}\n")
    commands = {
        "file": ["train", path, "--out", out],
        "option": ["train", path, "--out", out, f"--{key}={value}"],
        "plan": ["plan", "--recipe", path],
        "warmup": ["warmup", path, "--out", out],
    }
    verdict, said = spoken(start(commands[way], log), log, HANG)
    if verdict == "refused" and out.exists() and any(p.name != ".lock" for p in out.rglob("*")):
        verdict = "left over"
    if len(log.read_text(errors="replace")) > 20_000:
        verdict, said = "silent", "a message of more than 20,000 characters"
    return {"verdict": verdict, "key": key, "value": value[:60], "way": way, "said": said}


# ------------------------------------------------------------------------------------------------------------- bombs


def bomb(draw: random.Random) -> str:
    """An answer that looks like maths and is very slow to read or compare."""
    a, b, n = draw.randint(2, 99), draw.randint(2, 99), draw.randint(50, 400)
    kinds: list[Callable[[], str]] = [
        lambda: f"{a}^{{{b}^{{{n}^{{{a}}}}}}}",
        lambda: "(" * n + f"{a}" + f"+{b})" * n,
        lambda: f"\\frac{{{a}}}{{" * n + f"{b}" + "}" * n,
        lambda: "\\sqrt{" * n + f"{a}x+{b}" + "}" * n,
        lambda: f"({a}x+{b}y+z)^{{{n * 10}}}",
        lambda: f"{n * 100}! + {a}",
        lambda: "+".join(f"\\sin({a}x^{{{i}}})" for i in range(n)),
        lambda: f"\\int_0^{{{a}}} e^{{x^{{{b}}}}} \\sin(x^{{{n}}}) dx",
        lambda: f"\\sum_{{k=1}}^{{10^{{{a}}}}} k^{{{b}}} + {n}",
        lambda: f"{'9' * n * 20}^{{{a}}}",
    ]
    return f"\\boxed{{{draw.choice(kinds)()}}}"


HONEST = [  # references and answers that are right, however many bombs stand around them
    ("x^2+2x+1", "(x+1)^2"),
    ("(x+1)^{10}", "x^{10}+10x^9+45x^8+120x^7+210x^6+252x^5+210x^4+120x^3+45x^2+10x+1"),
    (r"\sin(2x)", r"2\sin(x)\cos(x)"),
    ("1", "(" * 24 + "1" + ")" * 24),
    (r"\sqrt{3}+\sqrt{12}", r"3\sqrt{3}"),
    (r"\frac{1}{\sqrt{2}+\sqrt{3}+\sqrt{5}}", r"\frac{2\sqrt3+3\sqrt2-\sqrt{30}}{12}"),
    (r"[0,1)\cup(2,3]", r"(2,3]\cup[0,1)"),
    (r"1+\cfrac{1}{1+\cfrac{1}{1+1}}", r"\frac{5}{3}"),
    ("2^{100}", "1267650600228229401496703205376"),
    ("1", "(1+(1+(1+(1+(1+(1+(1+(1+(1-(1+(7)))))))))))"),
]


def bombs(number: int, place: Path) -> dict:
    """Grade some bombs in this process's own grading children; the seconds of all cases add up."""
    draw, path = random.Random(f"bombs {number}"), place / "bombs.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"question": "How much?", "answer": str(i)}) + "\n" for i in range(20)))
    task = tasks.make("math", files=str(path), prompt="question", answer="answer", workers=2)
    asked = [(task[i % 10], bomb(draw)) for i in range(BOMBS)]
    honest = [(replace(task[0], answer=gold), f"\\boxed{{{answer}}}") for gold, answer in HONEST]
    mixed = draw.sample([*asked, *honest], k=BOMBS + len(honest))
    prompts, texts = [prompt for prompt, _ in mixed], [text for _, text in mixed]
    began = time.monotonic()
    task.grade(prompts[:1], ["\\boxed{1}"])  # the children begin
    started = time.monotonic()
    grades = task.grade(prompts, texts)
    seconds = time.monotonic() - started
    task.close()
    graded = dict(zip(texts, grades, strict=True))
    misjudged = [f"{text} is {graded[text].verdict}" for _, text in honest if not graded[text].right]
    verdicts = Counter(graded[text].verdict for _, text in asked)
    verdict = "lost" if misjudged else "graded"
    return {
        "verdict": verdict,
        "said": "; ".join(misjudged),
        "bombs": BOMBS,
        "grading": seconds,
        "start": started - began,
        "verdicts": dict(verdicts),
    }


# ----------------------------------------------------------------------------------------------------------- folders


class Command:
    """Unpickling this writes a file."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self):
        return Path.touch, (self.proof,)


def damage(kind: int, run: Path, proof: Path) -> str:
    """Do one thing to a copy of a good run folder; returns what."""
    newest = find_checkpoints(run / "checkpoints")[-1][1]
    state, recipe = newest / "training.pt", run / "recipe.yaml"
    good = torch.load(state, weights_only=True)
    metrics = run / "metrics.jsonl"

    def set_key(section: str, key: str, value: object) -> None:
        data = yaml.safe_load(recipe.read_text())
        data[section][key] = value
        recipe.write_text(yaml.safe_dump(data))

    def shards_of_torch() -> None:
        (newest / "shards").mkdir()
        (newest / "shards" / ".metadata").write_bytes(pickle.dumps(Command(proof)))
        torch.save({**good, "shards": True}, state)

    def task_file() -> None:
        file = run / "task.py"
        file.write_text(f"open({str(proof)!r}, 'w')\ndef prompt(i): return '1', 1\ndef reward(a, t): return 0.0\n")
        set_key("task", "name", str(file))

    def alias_bomb() -> None:
        levels = ["a0: &a0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"]
        levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
        recipe.write_text("\n".join([*levels, "model: {name: *a11}", ""]))

    def weights_of(value: float) -> None:
        good["learner"]["optimizer"]["masters"][0].fill_(value)
        torch.save(good, state)

    def cut(path: Path, size: int) -> None:
        path.write_bytes(path.read_bytes()[:size])

    def config(content: str) -> None:
        (newest / "config.json").write_text(content)

    weights = newest / "model.safetensors"
    things: list[tuple[str, Callable[[], object]]] = [
        ("a pickle as the shards' metadata", shards_of_torch),
        ("a pickle as training.pt", lambda: state.write_bytes(pickle.dumps(Command(proof)))),
        ("a torch pickle in training.pt", lambda: torch.save({**good, "learner": Command(proof)}, state)),
        ("a task file", task_file),
        ("a compressor file", lambda: set_key("rollout", "compressor", str(run / "task.py"))),
        ("aliases that expand", alias_bomb),
        ("a recipe of bytes", lambda: recipe.write_bytes(bytes(range(256)) * 50)),
        ("a recipe that is deep", lambda: recipe.write_text("model: " + "[" * 20_000)),
        ("an empty recipe", lambda: recipe.write_text("")),
        ("a recipe that is a list", lambda: recipe.write_text("- 1\n- 2\n")),
        ("no recipe", recipe.unlink),
        ("empty training.pt", lambda: state.write_bytes(b"")),
        ("half of training.pt", lambda: cut(state, state.stat().st_size // 2)),
        ("another state", lambda: torch.save({"step": 3}, state)),
        ("a state that is a list", lambda: torch.save([1, 2], state)),
        ("a step that is text", lambda: torch.save({**good, "step": "x"}, state)),
        ("weights that are NaN", lambda: weights_of(math.nan)),
        ("weights that are infinite", lambda: weights_of(math.inf)),
        ("empty weights", lambda: weights.write_bytes(b"")),
        ("half of the weights", lambda: cut(weights, weights.stat().st_size // 2)),
        ("weights that are text", lambda: weights.write_text("hello" * 100)),
        ("no weights", weights.unlink),
        ("null in config.json", lambda: config("null")),
        ("a list in config.json", lambda: config("[1]")),
        ("wrong types in config.json", lambda: config('{"model_type": "llama", "hidden_size": "x"}')),
        ("half of config.json", lambda: cut(newest / "config.json", 100)),
        ("code of its own in config.json", lambda: config('{"model_type": "x", "auto_map": {"AutoConfig": "x.X"}}')),
        ("no tokenizer", (newest / "tokenizer.json").unlink),
        ("metrics that are bytes", lambda: metrics.write_bytes(b"\xff\x00" * 1000 + b"\n")),
        ("metrics without steps", lambda: metrics.write_text('{"a": 1}\n[]\nnull\n')),
        ("metrics with odd steps", lambda: metrics.write_text('{"step": 1e400}\n{"step": "x"}\n{"step": [1]}\n')),
        ("no metrics", metrics.unlink),
        ("a torn line", lambda: metrics.write_text(metrics.read_text() + '{"step": 3, "re')),
        ("a folder for metrics", lambda: (metrics.unlink(), metrics.mkdir())),
        ("a half-removed checkpoint", lambda: [p.unlink() for p in (newest / "training.pt", newest / "config.json")]),
        ("a checkpoint of a far step", lambda: newest.rename(newest.with_name("step-" + "9" * 40))),
        ("a loop of links", lambda: (run / "samples" / "loop").symlink_to(run)),
        ("samples that are bytes", lambda: [p.write_bytes(b"\xfe\xff\n") for p in run.glob("samples/*/*.jsonl")]),
        ("traces that are text", lambda: [p.write_text("no") for p in run.glob("samples/*/traces/*")]),
        ("a folder for the lock", lambda: ((run / ".lock").unlink(), (run / ".lock").mkdir())),
    ]
    name, act = things[kind % len(things)]
    act()
    return name


COMMANDS = ("train", "report", "eval")


def folders(number: int, place: Path) -> dict:
    kind, command = divmod(number, len(COMMANDS))
    work = Train(place / "kills" / "train")
    undisturbed(work)
    run, log, proof = place / "folders" / "run", place / "folders" / "said.log", place / "folders" / "proof"
    shutil.rmtree(place / "folders", ignore_errors=True)
    run.parent.mkdir(parents=True)
    shutil.copytree(work.place / "undisturbed", run)
    (run / ".lock").touch()
    newest = find_checkpoints(run / "checkpoints")[-1][1]
    thing = damage(kind, run, proof)
    few = ["--limit", 2, "--max-new-tokens", 4, "--rows", 2, "--out", run.parent / "eval"]
    words = {
        "train": ["train", run, "--resume", "--run.steps", 5],
        "report": ["report", run, "--out", run.parent / "report.html"],
        "eval": ["eval", newest, "--bench", "sums", *few],
    }
    verdict, said = spoken(start(words[COMMANDS[command]], log), log, HANG)
    if proof.exists():
        verdict = "code ran"
    return {"verdict": verdict, "damage": thing, "command": COMMANDS[command], "said": said}


# ---------------------------------------------------------------------------------------------------------- campaign

KINDS: dict[str, Callable[[int, Path], dict]] = {
    **{f"kills: {name}": lambda number, place, name=name: kills(name, number, place) for name in KILLED},
    "inputs": inputs,
    "bombs": bombs,
    "folders": folders,
}


GOALS = {"inputs": 300, "bombs": 1000 // BOMBS, "folders": 120}  # cases; of each kind of kills 100


def next_case(chosen: list[str], rows: list[dict]) -> tuple[str, int]:
    """The kind that is furthest from its goal, and the number of its next case."""

    def progress(kind: str) -> float:
        here = [row for row in rows if row["kind"] == kind]
        return len(here) / GOALS[kind] if kind in GOALS else sum(row["kills"] for row in here) / 100

    kind = min(chosen, key=progress)
    return kind, sum(row["kind"] == kind for row in rows)


def table(rows: list[dict]) -> str:
    heads = ("kind", "cases", "kills", "verdicts", "accidents", "longest case")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for kind in KINDS:
        here = [row for row in rows if row["kind"] == kind]
        if not here:
            continue
        verdicts = Counter(row["verdict"] for row in here)
        bad = sum(verdicts[name] for name in ACCIDENT)
        killed = sum(row.get("kills", 0) for row in here) or ""
        shown = ", ".join(f"{name} {count}" for name, count in verdicts.most_common())
        lines.append(f"| {kind} | {len(here)} | {killed} | {shown} | {bad} | {max(r['seconds'] for r in here):.1f} s |")
    graded = [row for row in rows if row["kind"] == "bombs"]
    total = sum(row["bombs"] for row in graded)
    notes = [f"kills: {sum(row.get('kills', 0) for row in rows)}; inputs: {sum(r['kind'] == 'inputs' for r in rows)}"]
    if total:
        seconds = sum(row["grading"] for row in graded)
        verdicts = sum((Counter(row["verdicts"]) for row in graded), Counter())
        notes.append(f"bombs: {total} in {seconds:.0f} s ({1000 * seconds / total:.0f} s per 1,000): {dict(verdicts)}")
    accidents = [row for row in rows if row["verdict"] in ACCIDENT]
    notes += [f"- {r['kind']} {r['case']}: {r['verdict']}: {_about(r)}" for r in accidents[:40]]
    return "\n".join([*lines, "", *notes])


def _about(row: dict) -> str:
    where = [str(row[k]) for k in ("key", "value", "way", "damage", "command") if k in row]
    return f"{' '.join(where)} | {' '.join(row.get('said', '').split())[-160:]}"


def run_case(kind: str, number: int, place: Path) -> dict:
    began = time.monotonic()
    found = KINDS[kind](number, place)
    return {"kind": kind, "case": number, "seconds": round(time.monotonic() - began, 2), **found}


def warm() -> None:
    """Import what commands import late, so that children have it."""

    torch.set_num_threads(1)
    load_model("tiny")
    make_recipe(SMALL)
    load_recipe("tiny-sums")


def campaign() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--only", nargs="*", default=[], help="kinds, or the beginnings of their names")
    parser.add_argument("--case", nargs=2, metavar=("KIND", "NUMBER"), help="one case again, without a line of results")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    args.out = args.out.resolve()
    results = args.out / "results.jsonl"
    if args.table:
        print(table(read_lines(results)))
        return
    args.out.mkdir(parents=True, exist_ok=True)
    warm()
    if args.case:
        print(json.dumps(run_case(args.case[0], int(args.case[1]), args.out), indent=1))
        return
    chosen = [kind for kind in KINDS if not args.only or any(kind.startswith(name) for name in args.only)]
    rows, deadline = read_lines(results), time.monotonic() + args.seconds
    while time.monotonic() < deadline:
        kind, number = next_case(chosen, rows)
        row = run_case(kind, number, args.out)
        append_line(results, row)
        rows.append(row)
        if row["verdict"] in ACCIDENT:
            print(f"{kind} {number}: {row['verdict']}: {_about(row)}", flush=True)
    print(table(read_lines(results)))


if __name__ == "__main__":
    campaign()
