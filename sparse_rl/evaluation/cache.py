"""The cache on which an evaluation runs, and its name in folders, tables and pictures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..compressors import STORING, Compressor, make, parameters_of
from ..errors import SparseRLError
from ..files import names_python_file


@dataclass(frozen=True)
class Cache:
    compressor: str
    budget: int | None = None  # None: the compressor has no budget
    interval: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, compressor: str, budget: int, interval: int, options: Mapping[str, Any] | None = None) -> Cache:
        """A cache with only those numbers that its compressor uses."""
        made = make(compressor, **(options or {}))
        return cls(
            compressor,
            budget if made.has_budget else None,
            interval if made.evicts_response else None,
            dict(options or {}),
        )

    def make(self) -> Compressor:
        return make(self.compressor, **self.options)

    @property
    def slots(self) -> tuple[int, int]:
        """(budget, interval) for an engine; arbitrary for a compressor that uses none"""
        return 512 if self.budget is None else self.budget, 128 if self.interval is None else self.interval

    @property
    def label(self) -> str:
        """dense, rkv 512, beacon:16, mine.py:Oldest 512, ..."""
        options = [f"{key}={value}" for key, value in self.options.items()]
        return " ".join([short(self.compressor), *([] if self.budget is None else [str(self.budget)]), *options])

    @property
    def folder(self) -> str:
        return "".join(c if c.isalnum() or c in "-_.=" else "-" for c in self.label)

    def to_dict(self) -> dict[str, Any]:
        return {
            "compressor": self.compressor,
            "budget": self.budget,
            "interval": self.interval,
            "options": dict(self.options),
        }


def short(compressor: str) -> str:
    """A compressor's name without the folders of its file, and without spaces."""
    before, _, file = compressor.rpartition("/") if names_python_file(compressor) else ("", "", compressor)
    wrapped = "prompt-only:" if before.startswith("prompt-only:") else ""
    return (wrapped + file).replace(" ", "_")


def caches(
    compressors: Sequence[str],
    budgets: Sequence[int],
    interval: int,
    options: Mapping[str, Any],
    inherited: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Cache]:
    """Every compressor at every budget, or once if it has no budget; dense comes first, as others are compared with it.

    An option goes to the compressors that have it; an option that none has is refused. inherited: options by
    compressor, which `options` override
    """
    if "dense" not in compressors:
        raise SparseRLError(f"--compressors {','.join(compressors)} has no dense cache to compare with; add dense.")
    ordered = sorted(dict.fromkeys(compressors), key=lambda name: name != "dense")
    taken = {name: [*parameters_of(type(make(name))), *STORING] if make(name).evicts else [] for name in ordered}
    for key in options:
        if not any(key in names for names in taken.values()):
            raise SparseRLError(
                f"none of the compressors {', '.join(ordered)} has a parameter {key!r}; correct or omit it."
            )
    known = {
        name: dict((inherited or {}).get(name, {})) | {k: v for k, v in options.items() if k in taken[name]}
        for name in ordered
    }
    chosen = [(name, budget, dict(known[name])) for name, budget in itertools.product(ordered, budgets)]
    for _, budget, own in chosen:
        if "layer_budgets" not in options and sum(layers := own.get("layer_budgets", [])) != budget * len(layers):
            del own["layer_budgets"]  # inherited ones, which belong to another budget
    found = [Cache.of(name, budget, interval, own) for name, budget, own in chosen]
    return [cache for i, cache in enumerate(found) if cache not in found[:i]]
