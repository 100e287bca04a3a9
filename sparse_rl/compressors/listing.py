"""The content of `sparse-rl list compressors`."""

from __future__ import annotations

import sys

from .base import COMPRESSORS, Compressor


def describe() -> list[tuple[str, str]]:
    """The names that `make` takes, and what is behind them; those that need an argument last."""
    rows = [(cls.usage or name, _idea(cls)) for name, cls in COMPRESSORS.items()]
    own = ("FILE.py[:CLASS]", "your own: a file with a subclass of ScoreCompressor that has a `score`")
    return [*sorted(rows, key=lambda row: ":" in row[0]), own]


def _idea(cls: type[Compressor]) -> str:
    """The first line of its module's docstring, or of its own."""
    text = sys.modules[cls.__module__].__doc__ or cls.__doc__ or ""
    return text.strip().partition("\n")[0].removeprefix(f"{cls.name}: ")
