"""Versions of the weights, whole and as what changed since the version before.

An update with a small learning rate moves few bf16 weights as far as their next value; all others keep their bits. So
a member that has an earlier version fetches what changed since then, and one that has none fetches the whole. Both give
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np

Ref = TypeVar("Ref")  # where a part is


@dataclass(frozen=True)
class Changes:
    """New values for some numbers of an array."""

    places: np.ndarray  # [n], in the flattened array
    values: np.ndarray  # [n]

    @property
    def nbytes(self) -> int:
        return self.places.nbytes + self.values.nbytes


Part = Mapping[str, "np.ndarray | Changes"]  # of the weights: arrays by name


def bytes_of(part: Part) -> int:
    return sum(content.nbytes for content in part.values())


def changes_of(new: np.ndarray, old: np.ndarray) -> np.ndarray | Changes:
    """What must be sent to one who has `old`: the new array itself where that takes fewer bytes. Arrays of integers."""
    if not new.ndim or new.shape != old.shape or new.dtype != old.dtype:
        return new
    place = np.dtype(np.uint32 if new.size <= 2**32 else np.int64)
    differs = (new != old).reshape(-1)
    if np.count_nonzero(differs) * (place.itemsize + new.itemsize) >= new.nbytes:
        return new
    places = np.flatnonzero(differs)
    return Changes(places.astype(place), new.reshape(-1)[places])


def changed_part(new: Mapping[str, np.ndarray], old: Part) -> Part:
    """old: a part of a whole version"""
    found = dict[str, np.ndarray | Changes]()
    for name, array in new.items():
        known = old.get(name)
        found[name] = changes_of(array, known) if isinstance(known, np.ndarray) else array
    return found


@dataclass(frozen=True)
class Version(Generic[Ref]):
    whole: list[Ref]
    whole_bytes: int
    before: int | None = None  # the version that `changes` start from
    changes: list[Ref] = field(default_factory=list)
    changes_bytes: int = 0


@dataclass(frozen=True)
class Offer(Generic[Ref]):
    """How a member can get a version: whole, or from an earlier version that it has."""

    whole: list[Ref]
    since: dict[int, list[Ref]]

    def refs(self, has: int | None) -> list[Ref]:
        """has: the version of the member's weights, if it has any."""
        return self.whole if has is None else self.since.get(has, self.whole)


class Versions(Generic[Ref]):
    def __init__(self, put: Callable[[Part, int], Ref], get: Callable[[Ref], Part]):
        """put: stores a part; it is told how many bytes the version has needed so far"""
        self.put, self.get = put, get
        self.kept: dict[int, Version[Ref]] = {}

    def publish(self, version: int, parts: Iterable[dict[str, np.ndarray]], oldest: int, compare: bool) -> int:
        """Store a version, and forget those before `oldest`. Returns the bytes of the whole.

        compare: whether to store what changed since the version before, too
        """
        self.kept = {known: found for known, found in self.kept.items() if oldest <= known < version}
        before = max(self.kept, default=None) if compare else None
        old = [] if before is None else self.kept[before].whole
        whole, changes, whole_bytes, changes_bytes = list[Ref](), list[Ref](), 0, 0
        for number, part in enumerate(parts):
            whole_bytes += bytes_of(part)
            whole.append(self.put(part, whole_bytes + changes_bytes))
            if before is None:
                continue
            changed = changed_part(part, self.get(old[number]) if number < len(old) else {})
            if bytes_of(changed) > bytes_of(part) / 2:  # the whole is there already
                changed, ref = part, whole[-1]
            else:
                ref = self.put(changed, whole_bytes + changes_bytes + bytes_of(changed))
            changes_bytes += bytes_of(changed)
            changes.append(ref)
        self.kept[version] = Version(whole, whole_bytes, before, changes, changes_bytes)
        return whole_bytes

    def offer(self, wanted: int) -> Offer[Ref]:
        """Changes of several versions follow one another, as long as they take fewer bytes than the whole."""
        newest = self.kept[wanted]
        since: dict[int, list[Ref]] = {}
        refs, size, step = list[Ref](), 0, newest
        while step is not None and step.before is not None:
            refs, size = [*step.changes, *refs], size + step.changes_bytes
            if size >= newest.whole_bytes:
                break
            since[step.before] = refs
            step = self.kept.get(step.before)
        return Offer(newest.whole, since)
