"""Files of metrics as tables of numbers. Lines with the same names are read together, and a file that grew only from where it ended.

N lines of a table, K names. Nothing is rounded: a number is the one that `json.loads` makes of its text.
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

LARGEST = 2**53  # whole numbers that JavaScript knows
BEYOND = 1e100  # no metric is so large, and neither sums nor pictures can be made of what is
_BLOCK = 1 << 20  # bytes of lines read together


@dataclass(frozen=True)
class Table:
    """Lines that have the same names beside their step."""

    names: tuple[str, ...]
    line: np.ndarray  # int64 [N], their numbers in the file, in any order
    step: np.ndarray  # int64 [N]; -1: the line has no whole step
    value: np.ndarray  # fp64 [N, K]; NaN: null, not finite, beyond BEYOND, or odd
    odd: np.ndarray  # bool [N, K]: neither a number nor null


@dataclass
class Reading:
    """What was read of a file so far."""

    size: int = 0  # bytes of its whole lines
    digest: bytes = hashlib.sha256().digest()  # of them
    lines: int = 0
    torn: bool = False  # more follows, without an end
    wrong: list[int] = field(default_factory=list)  # numbers of lines that are no JSON object
    tables: dict[tuple[str, ...], Table] = field(default_factory=dict)


def contents(path: Path) -> bytes:
    """The bytes of a file; OSError where it is none, so that no pipe or device is waited for."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(0, "it is no file")
    return path.read_bytes()


def read_on(path: Path, before: Reading) -> Reading:
    """A file as it is now, of which `before` was read: that is not parsed again, unless it is no longer how the file begins."""
    data = contents(path)
    begins = len(data) >= before.size and hashlib.sha256(memoryview(data)[: before.size]).digest() == before.digest
    known = before if begins else Reading()
    whole = data.rfind(b"\n") + 1
    if begins and whole == before.size:
        return replace(before, torn=whole < len(data))
    parts, wrong = [list(known.tables.values())], list(known.wrong)
    lines, start = known.lines, known.size
    while start < whole:
        end = data.find(b"\n", min(start + _BLOCK, whole - 1)) + 1
        texts = data[start : end - 1].split(b"\n")
        tables, damaged = parsed(texts, lines + 1)
        parts.append(tables)
        wrong += damaged
        lines, start = lines + len(texts), end
    digest = hashlib.sha256(memoryview(data)[:whole]).digest()
    return Reading(whole, digest, lines, whole < len(data), wrong, joined(table for part in parts for table in part))


def joined(tables: Iterable[Table]) -> dict[tuple[str, ...], Table]:
    """One table for each tuple of names, in the order in which they come."""
    found: dict[tuple[str, ...], list[Table]] = {}
    for table in tables:
        found.setdefault(table.names, []).append(table)
    columns = ("line", "step", "value", "odd")
    return {
        names: same[0]
        if len(same) == 1
        else Table(names, *(np.concatenate([getattr(table, c) for table in same]) for c in columns))
        for names, same in found.items()
    }


def parsed(texts: list[bytes], first: int) -> tuple[list[Table], list[int]]:
    """Lines, the first of which has this number, as tables in the order of their first lines; and numbers of those that are no objects."""
    alike: dict[
        tuple[bytes, ...] | None, tuple[list[int], list[bytes]]
    ] = {}  # names -> numbers, lines with a quote for every name
    for number, text in enumerate(texts, first):
        pieces = text.split(b'"')
        numbers, rests = alike.setdefault(tuple(pieces[1::2]) if len(pieces) % 2 else None, ([], []))
        numbers.append(number)
        rests.append(b'"'.join(pieces[::2]))
    tables, wrong = [], []
    for names, (numbers, rests) in alike.items():
        table = _together(names, numbers, rests) if names is not None else None
        if table is not None:
            tables.append(table)
            continue
        for number in numbers:
            found = _alone(number, texts[number - first])
            if found is None:
                wrong.append(number)
            else:
                tables.append(found)
    return sorted(tables, key=lambda table: int(table.line[0])), sorted(wrong)


def _together(quoted: tuple[bytes, ...], numbers: list[int], rests: list[bytes]) -> Table | None:
    """Lines `{"step": 1, "a": 0.5}` with nothing but numbers and nulls behind the same names; None where they are anything else.

    Their rests are `{": 1, ": 0.5}`. Between two values stands `, ": ` in a line, and from one line to the next `}`, its end, `{": `. With
    a comma for each they are one list. A quote that was part of neither makes it no list, or one that holds text; and as no name can then
    have fewer values than one, the count says that none has more.
    """
    text = b"\n".join(rests)
    if not (text.startswith(b'{": ') and text.endswith(b"}") and text.count(b'}\n{": ') == len(rests) - 1):
        return None
    text = text[4:-1].replace(b'}\n{": ', b",").replace(b', ": ', b",")
    try:
        names = [json.loads(f'"{name.decode()}"') for name in quoted]
        values = json.loads(f"[{text.decode()}]")
        if (
            len(values) != len(numbers) * len(names)
            or len(set(names)) < len(names)
            or not set(map(type, values)) <= {int, float, type(None)}
        ):
            return None
        value = np.array(values, dtype=np.float64).reshape(len(numbers), len(names))
    except (ValueError, OverflowError, RecursionError):
        return None
    place = names.index("step") if "step" in names else None
    steps = [-1] * len(numbers) if place is None else values[place :: len(names)]
    if not all(type(step) is int and -1 <= step < LARGEST for step in steps):
        return None
    others = [i for i in range(len(names)) if i != place]
    value = value[:, others]
    value[np.abs(value) > BEYOND] = np.nan
    return Table(
        tuple(names[i] for i in others),
        np.array(numbers),
        np.array(steps, dtype=np.int64),
        value,
        np.zeros(value.shape, dtype=bool),
    )


def _alone(number: int, text: bytes) -> Table | None:
    """One line, whatever is in it; None where it is no object."""
    try:
        line = json.loads(text.decode())
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested beyond sense
        return None
    if not isinstance(line, dict):
        return None
    step = line.pop("step", None)
    whole = type(step) is int and 0 <= step < LARGEST
    found = [None if value is None else _number(value) for value in line.values()]
    odd = np.array([[a is not None and b is None for a, b in zip(line.values(), found)]], dtype=bool)
    value = np.array([found], dtype=np.float64)
    value[np.abs(value) > BEYOND] = np.nan
    return Table(
        tuple(line),
        np.array([number]),
        np.array([step if whole else -1]),
        value,
        np.array([odd], dtype=bool).reshape(1, len(line)),
    )


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
