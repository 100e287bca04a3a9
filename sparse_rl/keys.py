"""A setting of a recipe: a dataclass field with its default and one line of help, so that the table of all keys writes itself."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def key(help: str, default: Any = MISSING) -> Any:
    """`default` left out: the recipe must say it."""
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})
