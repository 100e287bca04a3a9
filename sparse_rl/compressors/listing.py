"""What can be said of a compressor by its name: the content of `sparse-rl list compressors`, and its options."""

from __future__ import annotations

import sys

from .base import COMPRESSORS, STORING, Compressor, parameters_of
from .prompt_only import PromptOnly


def describe() -> list[tuple[str, str]]:
    """The names that `make` takes, and what is behind them; those that need an argument last."""
    rows = [(cls.usage or name, _idea(cls)) for name, cls in COMPRESSORS.items()]
    own = ("FILE.py[:CLASS]", "your own: a file with a subclass of ScoreCompressor that has a `score`")
    return [*sorted(rows, key=lambda row: ":" in row[0]), own]


def _idea(cls: type[Compressor]) -> str:
    """The first line of its module's docstring, or of its own."""
    text = sys.modules[cls.__module__].__doc__ or cls.__doc__ or ""
    return text.strip().partition("\n")[0].removeprefix(f"{cls.name}: ")


def takes_option(written: str, option: str) -> bool:
    """Whether `make` takes an option for a built-in compressor; of others, whose code decides, True."""
    name, _, argument = written.partition(":")
    if name not in COMPRESSORS or option in STORING:
        return True
    if COMPRESSORS[name] is PromptOnly:
        return takes_option(argument or "snapkv", option)
    return option in parameters_of(COMPRESSORS[name])
