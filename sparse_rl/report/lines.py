"""Read files of metrics into tables of numbers. Of a file that has grown, only the new lines are parsed.

Every line is one JSON object, and its numbers are exactly those of `json.loads`. N lines of a table, K names.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

MAX_STEP = 2**53  # JavaScript represents whole numbers exactly up to here
BEYOND = 1e100  # no metric is this large, and larger numbers overflow in sums and plots
_BLOCK = 1 << 20  # bytes of lines that are parsed together, which bounds memory


@dataclass(frozen=True)
class Table:
    """Lines that have the same names, apart from `step`."""

    names: tuple[str, ...]
    line: np.ndarray  # int64 [N], their numbers in the file, in any order
    step: np.ndarray  # int64 [N]; -1: the line has no whole step
    value: np.ndarray  # fp64 [N, K]; NaN: null, not finite, beyond BEYOND, or odd
    odd: np.ndarray  # bool [N, K]: neither a number nor null


@dataclass
class Reading:
    """What was read of a file so far."""

    size: int = 0  # bytes of its complete lines
    digest: bytes = hashlib.sha256().digest()  # of these bytes
    lines: int = 0
    torn: bool = False  # the file ends with an incomplete line
    wrong: list[int] = field(default_factory=list)  # numbers of lines that are not JSON objects
    tables: dict[tuple[str, ...], Table] = field(default_factory=dict)


def contents(path: Path) -> bytes:
    """The bytes of a regular file. Anything else raises OSError, so that we never wait for a pipe or a device."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(0, "it is not a file")
    return path.read_bytes()


def read_on(path: Path, before: Reading) -> Reading:
    """Read a file of which `before` was read already; parse everything again if the file no longer begins with that."""
    data = contents(path)
    begins = len(data) >= before.size and hashlib.sha256(memoryview(data)[: before.size]).digest() == before.digest
    known = before if begins else Reading()
    whole = data.rfind(b"\n") + 1
    if begins and whole == before.size:
        return replace(before, torn=whole < len(data))
    tables, wrong = list(known.tables.values()), list(known.wrong)
    lines, start = known.lines, known.size
    while start < whole:
        end = data.find(b"\n", min(start + _BLOCK, whole - 1)) + 1
        texts = data[start : end - 1].split(b"\n")
        found, damaged = parse(texts, lines + 1)
        tables += found
        wrong += damaged
        lines, start = lines + len(texts), end
    digest = hashlib.sha256(memoryview(data)[:whole]).digest()
    return Reading(whole, digest, lines, whole < len(data), wrong, joined(tables))


def parse(texts: list[bytes], first: int) -> tuple[list[Table], list[int]]:
    """Tables of these lines, and the numbers of lines that are not JSON objects. `first`: the first line's number."""
    rows: dict[tuple[str, ...], list[tuple[int, int, list[Any]]]] = {}  # names -> (line number, step, values)
    wrong = []
    for number, text in enumerate(texts, first):
        line = json_object(text)
        if line is None:
            wrong.append(number)
            continue
        step = line.pop("step", None)
        if type(step) is not int or not 0 <= step < MAX_STEP:
            step = -1
        rows.setdefault(tuple(line), []).append((number, step, list(line.values())))
    return [_table(names, same) for names, same in rows.items()], wrong


def json_object(text: bytes) -> dict[str, Any] | None:
    """The object that a line holds; None if it is not UTF-8, not JSON, nested too deeply, or not an object."""
    try:
        line = json.loads(text.decode())
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def _table(names: tuple[str, ...], rows: list[tuple[int, int, list[Any]]]) -> Table:
    line, step, values = zip(*rows)
    shape = len(rows), len(names)
    numbers = [_number(value) for row in values for value in row]
    value = np.array(numbers, dtype=np.float64).reshape(shape)
    value[np.abs(value) > BEYOND] = np.nan
    odd = np.array([number is None for number in numbers], dtype=bool).reshape(shape)
    return Table(names, np.array(line), np.array(step, dtype=np.int64), value, odd)


def _number(value: Any) -> float | None:
    """NaN for null; None for anything else that is not a number, or is an integer that no float can hold."""
    if type(value) is float:
        return value
    if value is None:
        return math.nan
    try:
        return float(value) if type(value) is int else None
    except OverflowError:
        return None


def joined(tables: Iterable[Table]) -> dict[tuple[str, ...], Table]:
    """One table for each tuple of names, in the order of their first appearance."""
    found: dict[tuple[str, ...], list[Table]] = {}
    for table in tables:
        found.setdefault(table.names, []).append(table)
    return {names: same[0] if len(same) == 1 else _stacked(same) for names, same in found.items()}


def _stacked(tables: list[Table]) -> Table:
    columns = ("line", "step", "value", "odd")
    return Table(tables[0].names, *(np.concatenate([getattr(table, name) for table in tables]) for name in columns))
