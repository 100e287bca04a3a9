"""Errors that users can fix: one sentence with the numbers and the remedy.

Every error raised on purpose is a `SparseRLError`; a broken invariant fails an assert; everything else propagates.
"""

import difflib
from collections.abc import Iterable
from numbers import Integral

LONGEST_MESSAGE = 6000  # characters


class SparseRLError(ValueError):
    """A mistake that the user can fix; the message says how. Its middle is cut if it is too long to read."""

    def __init__(self, message: str = ""):
        half = LONGEST_MESSAGE // 2
        if len(message) > LONGEST_MESSAGE:
            cut = len(message) - LONGEST_MESSAGE
            message = f"{message[:half]} ... ({cut:,} characters are not shown) ... {message[-half:]}"
        super().__init__(message)


class NonFiniteLogits(SparseRLError):
    """The model produced NaN or infinite logits; the message names the row and the step.

    `trajectories` holds the trajectories that had finished by then.
    """

    trajectories: list = []  # noqa: RUF012 (replaced, never mutated)


class OutOfMemory(SparseRLError):
    """Memory ran out; the message says what to change. An engine's also shows its memory plan and what fits.

    `trajectories` holds the trajectories that had finished by then.
    """

    trajectories: list = []  # noqa: RUF012 (replaced, never mutated)


class CannotWrite(SparseRLError):
    """A file could not be written; its previous content is untouched."""


class RolloutInterrupted(KeyboardInterrupt):
    """Ctrl-C during `Engine.generate`; `trajectories` holds the trajectories that had finished by then."""

    def __init__(self, trajectories: list):
        super().__init__(f"interrupted; {len(trajectories)} finished trajectories are in `.trajectories`")
        self.trajectories = trajectories


def require_int(at_least: int = 1, at_most: int | None = None, **numbers: int) -> None:
    """Check that the named settings are whole numbers of at least `at_least`, and at most `at_most`."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < at_least:
            raise SparseRLError(f"{name} is {shown(value)}; it must be a whole number of at least {at_least}.")
        if at_most is not None and value > at_most:
            raise SparseRLError(f"{name} is {shown(value)}; it must be at most {at_most:,}.")


def shown(value: object, longest: int = 300) -> str:
    """A value as an error message repeats it: cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # a whole number of thousands of digits
        return "a number too long to show"
    return cut(text, longest)


def cut(text: str, longest: int = 300) -> str:
    """The beginning of a text that is too long to show."""
    return text if len(text) <= longest else f"{text[:longest]} ... ({len(text):,} characters)"


def nearest(name: str, known: Iterable[str], by_last: bool = False, listed_by: str | None = None) -> str:
    """The remedy for a misspelt name: the closest known name, and the list of all known names.

    by_last: compare only the last part of dotted names, the key of section.key. listed_by: the command that prints the
    list, where the list is too long for a message
    """
    known = list(known)
    compared = {full.rpartition(".")[2] if by_last else full: full for full in reversed(known)}
    longer = [full for full in compared if len(name) > 2 and name in full]  # dpo: online-dpo
    close = longer if len(longer) == 1 else difflib.get_close_matches(name[:100], compared, n=1, cutoff=0.5)
    hint = f"did you mean {compared[close[0]]!r}? " if close else ""
    if listed_by is not None:
        return f"{hint}`{listed_by}` lists what there is."
    return f"{hint}Known: {', '.join(known)}." if hint else f"known: {', '.join(known)}."


def check_count(what: str, count: int, most: int = 10_000_000) -> None:
    """Refuse a number of things that would take days to make, before they are made."""
    if count > most:
        raise SparseRLError(f"{str(count)[:30]} {what} were requested; use at most {most:,}.")


def any_of(*remedies: str) -> str:
    """The remedies in one clause: `a, or b`; `a, b, or c`."""
    *others, last = remedies
    return f"{', '.join(others)}, or {last}"
