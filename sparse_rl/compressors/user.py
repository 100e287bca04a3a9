"""FILE.py and FILE.py:CLASS: a user's own compressor, named in recipes and on the command line.

The file defines a subclass of `ScoreCompressor` (or `Compressor`); with only one it need not be named:

    # mine.py
    from sparse_rl import ScoreCompressor

    class Oldest(ScoreCompressor):
        def score(self, view): return -view.feed.float()          # fp32 [B, H, S]; higher stays
"""

from __future__ import annotations

import inspect
from types import ModuleType

from ..errors import SparseRLError, nearest
from ..files import python_module, split_python_file
from .base import Compressor, ScoreCompressor, check_flags


def load(written: str) -> type[Compressor]:
    """The class that `FILE.py` or `FILE.py:CLASS` names."""
    path, name = split_python_file(written)
    classes = _classes(python_module(path, "compressor"))
    if not classes:
        raise SparseRLError(f"{path} defines no compressor; write a subclass of ScoreCompressor with a `score`.")
    if not name and len(classes) > 1:
        raise SparseRLError(f"{path} defines {', '.join(classes)}; name one: {path.name}:{next(iter(classes))}.")
    if name and name not in classes:
        raise SparseRLError(f"{path} has no compressor {name!r}; {nearest(name, classes)}")
    cls = classes[name] if name else next(iter(classes.values()))
    if issubclass(cls, ScoreCompressor) and ScoreCompressor.score is cls.score and ScoreCompressor.keep is cls.keep:
        raise SparseRLError(f"{path}: {cls.__name__} must define score(view).")
    check_flags(cls)
    cls.name = cls.name or cls.__name__
    return cls


def _classes(module: ModuleType) -> dict[str, type[Compressor]]:
    """The compressors that a file defines, without those that others of its classes are made from."""
    found = {
        name: it
        for name, it in vars(module).items()
        if inspect.isclass(it) and issubclass(it, Compressor) and it.__module__ == module.__name__
    }
    bases = {base for it in found.values() for base in it.__mro__[1:]}
    return {name: it for name, it in found.items() if it not in bases}
