"""Files written whole or not at all, files of JSON lines, and one sentence for a failed write."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import Any

from safetensors import SafetensorError

from .errors import CannotWrite, SparseRLError

STATE = "training.pt"  # beside a checkpoint's model: the state that --resume loads
BEST = "best"  # beside a run's checkpoints: a link to the best one
VERIFIERS, OWN_HARNESS = "verifiers:", "chat"  # how tasks of verifiers are named; their harness that is ours


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write of `path` into a `CannotWrite` of one sentence."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not re.search(
            "PytorchStreamWriter|inline_container|No space|unexpected pos", str(error)
        ):
            raise  # torch reports failed writes as RuntimeError, but many other failures as well
        why, remedy = why_not(error, path)
        raise CannotWrite(
            f"{path} could not be written ({why}); nothing half-written was left there. {remedy}, and repeat the "
            "command; a run continues with --resume."
        ) from error


_FORBIDDEN = (errno.EROFS, errno.EACCES, errno.EPERM)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def why_not(error: Exception, path: Path) -> tuple[str, str]:
    """Why a file could not be written, and what to do about it."""
    found = re.search(r"\(os error (\d+)\)", str(error))  # safetensors tells the number in its text
    number = getattr(error, "errno", None) or (int(found[1]) if found else None)
    if number in _FORBIDDEN:
        read_only = "the file system is read-only" if number == errno.EROFS else "you may not write there"
        return read_only, "Choose a folder in which you may write"
    if number == errno.ELOOP:
        return "it is a link", "Put a file in its place"
    if number == errno.ENAMETOOLONG:
        return "its name is too long", "Choose a shorter one"
    if number in _FULL or "No space left" in str(error):
        return f"the disk is full: {_free(path)}", "Free some space or choose another place"
    said = getattr(error, "strerror", None) or first_line(error)
    return f"{said}; {_free(path)}", "Choose another place, or repair this one"


def _free(path: Path) -> str:
    there = next(folder for folder in path.absolute().parents if folder.exists())
    return f"{shutil.disk_usage(there).free / 2**20:,.0f} MiB free"


def replace_file(path: Path, content: bytes) -> None:
    """Write or replace a file, whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.unlink(missing_ok=True)
            with open(partial, "xb", opener=not_through_links) as file:
                file.write(content)
            os.replace(partial, path)
        except OSError:
            if partial.is_file():
                partial.unlink()
            raise


def not_through_links(path: str, flags: int) -> int:
    """An opener for files of folders that may be a stranger's, whose links could lead to any file of the user."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def lies_in(path: Path, folder: Path) -> bool:
    """Whether a path is inside a folder once links are followed. A link that leads to itself is inside no folder."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):
        return False


def refuse_links_out(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder, which may be a stranger's, where one of these would be read or written somewhere else."""
    for name in names:
        if not lies_in(folder / name, folder):
            raise SparseRLError(
                f"{folder / name} is a link to a place outside {folder}, which could be any file of yours; replace "
                "the link by what it points to, or remove it."
            )


def remove(path: Path) -> None:
    """Remove a folder with all it holds, a file, or a link but not what it links to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def write_text(path: Path, text: str) -> None:
    """Write or replace a text file, whole or not at all."""
    replace_file(path, text.encode())


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if it has no message."""
    return (str(error) or type(error).__name__).splitlines()[0]


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8; JSON and YAML can name halves of surrogate pairs, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def append_line(path: Path, values: Mapping) -> None:
    """Append one line of JSON."""
    with writing(path), open(path, "a", encoding="utf-8", opener=not_through_links) as file:
        file.write(line_of(values))


def read_lines(path: Path) -> list[dict]:
    """The complete lines of a file of JSON lines; an empty list if there is no file."""
    if not path.exists():
        return []
    if not path.is_file():  # a device or a pipe may never end
        raise SparseRLError(f"{path} is not a file; remove it, then continue.")
    found = []
    with path.open("rb") as lines:
        for number, line in enumerate((line for line in lines if line.endswith(b"\n")), 1):
            try:
                values = json.loads(line)
            except (ValueError, RecursionError) as error:  # also: not UTF-8, or a number of thousands of digits
                raise SparseRLError(
                    f"{path}, line {number} is not JSON ({first_line(error)}); remove the line or the file, then "
                    "continue."
                ) from error
            if not isinstance(values, dict):
                raise SparseRLError(
                    f"{path}, line {number} is not an object; remove the line or the file, then continue."
                )
            found.append(values)
    return found


def line_of(values: Mapping) -> str:
    """One line of JSON. JSON has no NaN and no infinity: they become null."""
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(plain) + "\n"


def names_python_file(name: str) -> bool:
    """Whether the name of a task or a compressor is `FILE.py` or `FILE.py:CLASS`."""
    return re.search(r"\.py(:|$)", name) is not None


def split_python_file(name: str) -> tuple[Path, str]:
    """`FILE.py:CLASS` as the whole path of the file and the name in it, which is empty for `FILE.py`."""
    file, _, inside = name.rpartition(":") if ".py:" in name else (name, "", "")
    return Path(os.path.abspath(Path(file).expanduser())), inside  # the hub's cache has links to files without .py


def with_file(name: str, place: Callable[[Path], str | Path]) -> str:
    """The name of a task or a compressor (FILE.py, FILE.py:CLASS, prompt-only:FILE.py) with its file at another place.

    place: the whole path of the file -> what stands in its stead
    """
    if not names_python_file(name):
        return name
    outer, colon, inner = name.partition(":")
    if colon and names_python_file(inner):
        return f"{outer}:{with_file(inner, place)}"
    path, cls = split_python_file(name)
    return f"{place(path)}:{cls}" if cls else str(place(path))


def python_module(path: Path, what: str) -> ModuleType:
    """A user's file as a module. Its name is the same in every process, because data may be of its classes.

    what: the file holds, such as a task, for the message if there is no such file
    """
    if not path.is_file():
        raise SparseRLError(f"there is no file {path}; name your own {what} by the path of its file.")
    version = hashlib.sha256(f"{path}|{path.stat().st_mtime_ns}".encode()).hexdigest()[:12]  # new if the file changes
    name = f"sparse_rl_file_{path.stem}_{version}"
    if name in sys.modules:
        return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # so that it can import its neighbours
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if isinstance(error, Exception):
            lines = [frame.lineno for frame in extract_tb(error.__traceback__) if frame.filename == str(path)]
            place = f" (line {lines[-1]})" if lines else ""
            raise SparseRLError(f"{path} cannot be loaded: {type(error).__name__}: {error}{place}") from error
        raise
    return module


def names_code(name: str) -> bool:
    """Whether a name makes a run execute what it names: a Python file, a package that verifiers imports, or what others
    send, who have the Ray cluster of that address.
    """
    return names_python_file(name) or name.startswith(VERIFIERS) or names_cluster(name)


def names_cluster(name: str) -> bool:
    """ray://auto is the cluster of this machine."""
    return name.startswith("ray://") and name != "ray://auto"


def refuse_foreign_code(source: Path, named: Mapping[str, str], trust: bool) -> None:
    """Refuse to run code that a run folder or a checkpoint names: it may come from someone else.

    named: option on the command line -> the name that `source` holds for it; trust: the user gave --trust
    """
    for option, name in named.items():
        if not names_code(name) or trust:
            continue
        if names_cluster(name):
            raise SparseRLError(
                f"{source} names the Ray cluster {name!r:.300}, which could run code with your rights; if you trust "
                f"it, repeat the command with --trust, or name it yourself with {option}."
            )
        what, it = ("Python file", "file") if names_python_file(name) else ("environment", "package")
        raise SparseRLError(
            f"{source} names the {what} {name!r:.300}, which would run with your rights; read that {it}, "
            f"then repeat the command with --trust, or name the {it} yourself with {option}."
        )


def code_in(options: Mapping[str, Any]) -> dict[str, str]:
    """What a task's options may name that runs, by option: tasks of a mixture, and harnesses of verifiers."""
    listed = options.get("tasks")
    entries = listed if isinstance(listed, (list, tuple)) else []
    found: dict[str, str] = {}
    for i, entry in enumerate(entries):
        own = {"name": entry} if isinstance(entry, str) else entry if isinstance(entry, Mapping) else {}
        inside = code_in(own) | ({"name": own["name"]} if isinstance(own.get("name"), str) else {})
        found |= {f"tasks.{i}.{key}": name for key, name in inside.items()}
    harness = options.get("harness")
    if isinstance(harness, str) and harness != OWN_HARNESS:  # an option of nothing else is called so
        found["harness"] = VERIFIERS + harness
    return found


def tasks_in(options: Mapping[str, Any]) -> list[str]:
    """The names of the tasks that a task's options list, as those of a mixture do; anything else is left out."""
    listed = options.get("tasks")
    entries = listed if isinstance(listed, (list, tuple)) else []
    names = [entry.get("name") if isinstance(entry, Mapping) else entry for entry in entries]
    return [name for name in names if isinstance(name, str)]


def with_tasks(options: Mapping[str, Any], change: Callable[[Mapping[str, Any]], Mapping[str, Any]]) -> dict[str, Any]:
    """A task's options, in which every task that they list is changed; each is given as keys, `name` among them."""
    listed = options.get("tasks")
    if not isinstance(listed, (list, tuple)):
        return dict(options)
    entries = [{"name": entry} if isinstance(entry, str) else entry for entry in listed]
    return {**options, "tasks": [change(entry) if isinstance(entry, Mapping) else entry for entry in entries]}


def find_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, oldest first."""
    found = [p for p in folder.glob("step-*") if p.name.removeprefix("step-").isdecimal() and (p / STATE).is_file()]
    return sorted((int(p.name.removeprefix("step-")), p) for p in found)
