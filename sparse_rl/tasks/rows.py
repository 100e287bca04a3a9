"""Rows of problems, from where people keep them.

    data/train.jsonl                                a JSON object per line
    data/train.json                                 the same, or one array of objects
    data/train.csv                                  a table whose first line names the fields
    train-00000-of-00001.parquet, train.arrow       files of `datasets`
    data/gsm8k/train                                a folder that `Dataset.save_to_disk` wrote
    hub:openai/gsm8k:main:train                     the hub; hub:NAME[@REVISION][:CONFIG][:SPLIT], split train if none

All but JSON and CSV need the package `datasets`, which is imported when the first such source is read.
"""

from __future__ import annotations

import csv
import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import SparseRLError
from ..files import first_line

HUB = "hub:"
SUFFIXES = (".parquet", ".arrow")
_MARK = b"\xef\xbb\xbf"  # with which some editors begin a file
_LONGEST = 2**24  # bytes of a field


class Unusable(Exception):
    """A row that cannot be used; the message is the reason."""


Row = bytes | dict | Unusable  # a line of JSON, or what was read already


def rows_of(source: str | os.PathLike) -> Iterator[tuple[int, Row]]:
    """The rows of a source with their numbers from 1, for `parse_row`; those of a JSONL file are its lines."""
    path = Path(source)
    kind = path.suffix.lower()
    if str(source).startswith(HUB):
        return enumerate(_from_hub(str(source)), 1)
    if path.is_dir() or (kind in SUFFIXES and path.is_file()):
        return enumerate(_from_disk(path), 1)
    if not path.is_file():
        from .published import command_for  # which reads rows, too

        made = command_for(path)
        write = f"write it with `{made}`, or " if made else ""
        raise SparseRLError(
            f"there is no file {path}; {write}give the path of a JSONL, JSON, CSV, parquet or arrow file, absolute or "
            f"relative to {Path.cwd()}, or a dataset of the hub as {HUB}NAME:SPLIT (task.files in a recipe, "
            "--task.files on the command line)."
        )
    if kind == ".csv":
        return _table(path)
    return _array(path) if _is_array(path) else _lines(path)


def short_name(source: str | os.PathLike) -> str:
    """A source in a few words, to name one of its rows."""
    return str(source) if str(source).startswith(HUB) else Path(source).name


def parse_row(line: Row) -> dict:
    if isinstance(line, dict):
        return line
    if isinstance(line, Unusable):
        raise line
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError
        raise Unusable("not JSON") from None
    if not isinstance(row, dict):
        raise Unusable("not an object")
    return row


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.removeprefix(_MARK)


def _is_array(path: Path) -> bool:
    """Whether a file is one JSON array, and not lines of which the first happens to be an array."""
    lines = itertools.islice(_lines(path), 2)
    first, *others = [line for _, line in lines] or [b""]
    return first.lstrip().startswith(b"[") and not (others and _is_json(first))


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _array(path: Path) -> Iterator[tuple[int, Row]]:
    """The elements of a JSON array."""
    try:
        found = json.loads(path.read_bytes().removeprefix(_MARK))
    except (ValueError, RecursionError) as error:
        raise SparseRLError(
            f"{path} begins like a JSON array, but is not one ({first_line(error)}); repair it, or give one JSON "
            "object per line."
        ) from error
    for number, row in enumerate(found, 1):
        yield number, row if isinstance(row, dict) else Unusable("not an object")


def _table(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of a CSV file; the lines that they begin in are not known, so they are counted."""
    csv.field_size_limit(_LONGEST)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = (cells for cells in csv.reader(file, strict=True) if cells)
            header = next(lines, [])
            if repeated := [name for name, count in Counter(header).items() if count > 1]:
                raise SparseRLError(f"{path} has two fields {repeated[0]!r}; give every field a name of its own.")
            for number, cells in enumerate(lines, 1):
                fits = len(cells) <= len(header)
                yield number, dict(zip(header, cells)) if fits else Unusable("more cells than fields")
    except (csv.Error, UnicodeDecodeError) as error:
        raise SparseRLError(
            f"{path} is not a CSV file in UTF-8 ({first_line(error)}); repair it, or write one JSON object per line."
        ) from error


def _from_disk(path: Path) -> Any:
    datasets = _datasets(path)
    try:
        if path.is_dir():
            found = datasets.load_from_disk(str(path))
        elif path.suffix.lower() == ".arrow":
            found = datasets.Dataset.from_file(str(path))
        else:
            found = datasets.Dataset.from_parquet(str(path))
    except Exception as error:  # of datasets, pyarrow or fsspec
        raise SparseRLError(
            f"{path} cannot be read by datasets ({_told(error)}); give a JSONL, JSON, CSV, parquet or "
            "arrow file, or a folder that save_to_disk wrote."
        ) from error
    return _one_split(found, str(path), "/")


def _from_hub(source: str) -> Any:
    datasets = _datasets(source)
    name, *parts = source.removeprefix(HUB).split(":")
    name, _, revision = name.partition("@")
    if not name or len(parts) > 2:
        raise SparseRLError(
            f"{source} does not name a dataset; write {HUB}NAME[@REVISION][:CONFIG][:SPLIT], such as "
            f"{HUB}openai/gsm8k:main:train."
        )
    split, config = (parts[-1] if parts else "train"), (parts[0] if len(parts) == 2 else None)
    try:
        with _quiet("huggingface_hub"):  # which announces every attempt
            found = datasets.load_dataset(name, config, split=split, revision=revision or None)
    except Exception as error:  # of datasets, the hub or the network
        raise SparseRLError(
            f"{source} cannot be loaded ({_told(error)}); check its name, configuration and split, and the network, or "
            "name a local JSONL, JSON, CSV, parquet or arrow file."
        ) from error
    return _one_split(found, source, ":")


def _one_split(found: Any, source: str, between: str) -> Any:
    if isinstance(found, dict):
        raise SparseRLError(
            f"{source} has the splits {', '.join(found)}; name one, such as {source}{between}{next(iter(found))}."
        )
    return found


def _datasets(source: object) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise SparseRLError(
            f"{source} is read by the package datasets ({error}); pip install 'sparse-rl[datasets]', or give JSONL "
            "files."
        ) from error
    return datasets


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """A package reports nothing below errors."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _told(error: Exception) -> str:
    """An error in one line of moderate length."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
