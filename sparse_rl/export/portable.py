"""Make a checkpoint's record portable: Python files are exported with it, and paths of this machine become names."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import SparseRLError
from ..files import with_file
from ..models import Record
from ..models.record import FILE

_FOLDERS = re.compile(r"""(?<![\w.<>/-])~?(?:/[^\s/'",:()\[\]{}]+)+/""")  # the folders of a full path in a text
_PATH = re.compile(r"(?:~|/[^\s/]+)/[^\n]*")  # a value that is a full path and nothing else; `/no_think` is none


def text_without_folders(text: str) -> str:
    """A text in which full paths have become file names."""
    return _FOLDERS.sub("", text)


def without_folders(value: Any) -> Any:
    """A value, or values in lists and mappings, in which full paths have become file names."""
    if isinstance(value, Mapping):
        return {key: without_folders(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_folders(inner) for inner in value]
    return Path(value).name if isinstance(value, str) and _PATH.fullmatch(value) else value


def portable(record: Record) -> Record:
    """The record without folders of this machine; Python files are later found beside the model (models/record.py)."""
    return replace(
        record,
        start=without_folders(record.start),
        task=_file_name(record.task),
        task_options=without_folders(record.task_options),
        compressor=_file_name(record.compressor),
        options=without_folders(record.options),
    )


def _file_name(name: str | None) -> str | None:
    return None if name is None else with_file(name, lambda path: path.name)


def python_files(record: Record) -> list[Path]:
    """The Python files of the record's task and compressor that exist here."""
    found: dict[str, Path] = {}

    def note(path: Path) -> Path:
        if path.suffix == ".py" and path.is_file() and found.setdefault(path.name, path) != path:
            raise SparseRLError(
                f"{found[path.name]} and {path} would be exported to the same file; give them different names."
            )
        return path

    for name in (*record.task_names, record.compressor):
        with_file(name or "", note)
    return list(found.values())


def check_foreign(folder: Path, files: list[Path], trust: bool) -> None:
    """Refuse to publish a file of another folder only because a checkpoint, which may be a stranger's, names it."""
    for path in files:
        if path.resolve().parent != folder.resolve() and not trust:
            raise SparseRLError(
                f"{folder} names the Python file {str(path)!r:.300}, which would be exported with it; read that file, "
                "then repeat the command with --trust."
            )


def write_portable(folder: Path, record: Record, files: list[Path]) -> None:
    """Copy the Python files into an exported folder, and write the portable record into its files."""
    for path in files:
        shutil.copyfile(path, folder / path.name)
    for name in (FILE, "config.json"):
        if not (folder / name).is_file():
            continue
        values = json.loads((folder / name).read_text(encoding="utf-8"))
        holder = values if name == FILE else values.get("sparse_rl")
        if isinstance(holder, dict):
            holder |= {key: value for key, value in record.to_dict().items() if key in holder}
        if name == FILE and isinstance(values.get("base"), dict):  # adapter_config.json says where the base is
            values["base"] = {key: without_folders(values["base"].get(key)) for key in ("name", "seed")}
        (folder / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
