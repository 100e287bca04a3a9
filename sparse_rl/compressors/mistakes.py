"""Report mistakes in a user's own compressor in one sentence: which compressor, where, and what happened."""

from __future__ import annotations

import inspect
import traceback

from ..errors import SparseRLError, cut


def is_own(cls: type) -> bool:
    """Whether a user wrote this class."""
    return cls.__module__.partition(".")[0] != __name__.partition(".")[0]


def failed(compressor: object, error: Exception) -> SparseRLError:
    """What to raise for an error in the code of a user's compressor."""
    cls = type(compressor)
    happened = f"{type(error).__name__}: {cut(' '.join(str(error).split()))}".removesuffix(".")
    return SparseRLError(f"the compressor {named(compressor)}{place(cls, error)} failed: {happened}.")


def named(compressor: object) -> str:
    return getattr(compressor, "name", "") or type(compressor).__name__


def place(cls: type, error: Exception | None = None) -> str:
    """` (FILE, line N)`: where an error left the user's file, or where the class defines what it keeps."""
    methods = [vars(base).get(name) for base in cls.__mro__ if is_own(base) for name in ("score", "keep")]
    codes = [code for it in methods if it is not None and (code := getattr(inspect.unwrap(it), "__code__", None))]
    files = {code.co_filename for code in codes}
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    lines = [(frame.filename, frame.lineno) for frame in frames if frame.filename in files]
    lines = lines[-1:] or [(code.co_filename, code.co_firstlineno) for code in codes[:1]]
    return "".join(f" ({file}, line {line})" for file, line in lines)
