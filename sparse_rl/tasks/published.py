"""Published data as files that our tasks read: from the hub, or from files that were fetched by hand.

    sparse-rl data gsm8k --to data                    # data/train/gsm8k.jsonl and data/eval/gsm8k.jsonl
    sparse-rl data gsm8k --to data --from downloads   # the same from downloads/train.jsonl and downloads/test.jsonl

Rows keep the fields `question` and `answer` as published (marks such as <<48/2=24>> included); `math` and the benchmark
`gsm8k` read them as they are.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..errors import SparseRLError, nearest
from ..files import write_text
from .rows import HUB, Unusable, parse_row, rows_of


@dataclass(frozen=True)
class Part:
    """One file of a data set."""

    split: str  # on the hub
    file: str  # where we write it
    rows: int  # as published
    raw: tuple[str, ...]  # names that it has elsewhere; the first is the one that we ask for


@dataclass(frozen=True)
class Published:
    """A data set whose rows are questions and answers."""

    hub: str  # name and configuration
    elsewhere: str  # where its raw files can be found
    parts: tuple[Part, ...]


def _raw(split: str, file: str) -> tuple[str, ...]:
    parquet = f"{split}-00000-of-00001.parquet"
    return f"{split}.jsonl", parquet, f"main/{parquet}", file


PUBLISHED = {
    "gsm8k": Published(
        "openai/gsm8k:main",
        "the folder grade_school_math/data of github.com/openai/grade-school-math",
        (
            Part("train", "train/gsm8k.jsonl", 7473, _raw("train", "train/gsm8k.jsonl")),
            Part("test", "eval/gsm8k.jsonl", 1319, _raw("test", "eval/gsm8k.jsonl")),
        ),
    )
}


def obtain(name: str, to: Path, source: Path | None, say: Callable[[str], None]) -> list[Path]:
    """Write the files of a data set under `to`, those that are not there; `source`: a folder with its raw files."""
    if name not in PUBLISHED:
        raise SparseRLError(f"there is no data set {name!r}; {nearest(name, PUBLISHED)}")
    data, written = PUBLISHED[name], []
    for part in data.parts:
        path = to / part.file
        if path.is_file():
            rows, done = checked(path, part), "is there already"
        else:
            rows, done = checked(find(source, part), part) if source else from_hub(name, part, to), "written"
            write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        say(f"{path}: {len(rows):,} rows, {done}")
        written.append(path)
    return written


def command_for(path: Path) -> str | None:
    """The command that writes a file such as data/train/gsm8k.jsonl; None if there is none."""
    for name, data in PUBLISHED.items():
        if "/".join(path.parts[-2:]) in (part.file for part in data.parts):
            folder = path.parent.parent
            return f"sparse-rl data {name}" + ("" if folder == Path("data") else f" --to {folder}")
    return None


def find(folder: Path, part: Part) -> Path:
    for name in part.raw:
        if (folder / name).is_file():
            return folder / name
    raise SparseRLError(
        f"{folder} holds no {part.raw[0]} (nor {', '.join(part.raw[1:])}); put the {part.split} file of "
        f"{part.rows:,} rows there."
    )


def from_hub(name: str, part: Part, to: Path) -> list[dict[str, str]]:
    data = PUBLISHED[name]
    try:
        return checked(f"{HUB}{data.hub}:{part.split}", part)
    except SparseRLError as error:
        files = " and ".join(part.raw[0] for part in data.parts)
        raise SparseRLError(
            f"{name} cannot be fetched ({str(error).rstrip('.')}); without the hub, put {files} of {data.elsewhere} "
            f"into a FOLDER, and run: sparse-rl data {name} --from FOLDER --to {to}"
        ) from error


def checked(source: str | os.PathLike, part: Part) -> list[dict[str, str]]:
    """The rows of a source, if they are those that were published."""
    rows = []
    for number, line in rows_of(source):
        try:
            row = parse_row(line)
        except Unusable as reason:
            raise SparseRLError(f"{source}: row {number} cannot be used ({reason}); get the file again.") from reason
        question, answer = row.get("question"), row.get("answer")
        if not (isinstance(question, str) and isinstance(answer, str) and "####" in answer):
            raise SparseRLError(
                f"{source}: row {number} has no question and no answer that ends with #### (it has the fields "
                f"{', '.join(map(str, row))}); use the published file."
            )
        rows.append({"question": question, "answer": answer})
    if len(rows) != part.rows:
        raise SparseRLError(
            f"{source} has {len(rows):,} rows, but {part.rows:,} were published; get the file again, or remove it."
        )
    return rows
