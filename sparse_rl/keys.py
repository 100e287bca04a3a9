"""A key of a recipe: a dataclass field with a default and one line of help; the table of keys is made from these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, field
from typing import Any


def key(help: str, default: Any = MISSING) -> Any:
    """A dataclass field with its help; a key without a default must be in every recipe."""
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    found = {}
    for key, value in values.items():
        found |= flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {before + key: value}
    return found
