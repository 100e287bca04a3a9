r"""Is this boxed answer the reference answer? Compare strings first, then mathematics.

1. `last_boxed`: the last `\boxed{...}` of a completion whose braces balance.
2. Tidied strings that are equal are right; so are words that differ only in case, spacing or punctuation, and equal
   times of day.
3. Otherwise math-verify reads both and compares their values: fractions, sets, intervals, matrices, percentages,
   without units.

If a string ends in something like a unit (`3t` may be three tonnes; notation.py), it is read with and without it, and
one agreement is enough; but a letter at the end of a reference (`6m`) is algebra. A reference that is neither words nor
readable is a "bad gold": then only an equal string is right. `how_graded` says which of the three a reference is.

math-verify alone would accept a tuple in any order, `-2` for `-2,-2`, 52 in base 9 for 52 in base 8, and 5e-24 for
4.6e-24; these are checked here. A reference with a base agrees with an answer without one, because its question asks
for the base, but not vice versa.

Not checked: answers longer than 1,000 characters or with more than 25 brackets inside each other, which are wrong;
which unit it is; the case of letters (`R` is `r`).
Numbers must agree to 6 decimals, small ones also to 3 digits.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache
from itertools import accumulate
from typing import Any

from ..errors import SparseRLError
from .notation import TEXT, WORD_STYLE, legible, tidy, without_unit

LONGEST = 1000  # characters of an answer that is read; the longest reference in common data has about 200
DEEPEST = 25  # brackets inside each other; references in common data have at most 4
SMALL = 0.01  # below this, 6 decimals are too coarse

_HEAVY = re.compile(r"\^\s*\{?\s*\d{3}|\^\s*\{[^{}]*\^|\d{3}\s*!|!\s*!|\\(?:sum|prod|int|binom)\b")
_WHOLE = re.compile(r"-?(?:0|[1-9]\d*)")
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", flags=re.DOTALL)
_BASE = re.compile(r"([0-9A-Fa-f]+)_\{?(\d+)\}?")
_THOUSANDS = re.compile(r"-?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_LIST = re.compile(r"\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b|\\.|.", flags=re.DOTALL)
_TIME = re.compile(r"(0?[1-9]|1[0-2])(?::([0-5]\d))?\s*(?:([ap])\.?\s*m\.?)?", flags=re.IGNORECASE)


def last_boxed(text: str) -> str | None:
    r"""The content of the last closed `\boxed{...}`, or None. An escaped brace does not count."""
    before = text.partition("\\boxed")[0]  # it cannot close a box, but may end in backslashes that belong to the first
    opened: list[tuple[bool, int]] = []  # of every open brace: whether it is a box, and where its content starts
    last: tuple[int, int] | None = None
    for token in _BRACES.finditer(text, len(before.rstrip("\\"))):
        if token[0] == "}":
            if opened:
                is_box, start = opened.pop()
                if is_box and (last is None or start > last[0]):
                    last = (start, token.start())
        elif token[0].endswith("{") and token[0] != r"\{":
            opened.append((len(token[0]) > 1, token.end()))
    return text[slice(*last)] if last else None


def verdict(gold: str, answer: str) -> str:
    """right, wrong, or bad gold."""
    if len(answer) > max(LONGEST, 2 * len(gold)) or depth(answer) > max(DEEPEST, 2 * depth(gold)):
        return "wrong"
    expected, given = tidy(gold), tidy(answer)
    if _bare(expected) == _bare(given):
        return "right"
    if _only_letters(expected) and _no_algebra(given) and _letters(expected) == _letters(given):
        return "right"
    if _is_words(gold, expected) or (_WHOLE.fullmatch(expected) and _WHOLE.fullmatch(given)):
        return "wrong"  # whole numbers, the commonest case, need no mathematics
    moment = time_of_day(expected)
    if moment is not None and moment[2] is not None:
        return "right" if time_of_day(given) in (moment, (*moment[:2], None)) else "wrong"
    if not readings(expected):
        return "bad gold"
    return "right" if _same(expected, given) else "wrong"


def effort(answer: str) -> int:
    """How long it looks to take to read: large powers, towers and factorials first, then length."""
    return 10 * LONGEST * len(_HEAVY.findall(answer)) + len(answer)


def depth(expression: str) -> int:
    """How many brackets are open at most."""
    return max(accumulate((c in "([{") - (c in ")]}") for c in expression), default=0)


def how_graded(gold: str) -> str:
    """How a reference is compared: mathematics, words, or string only (unreadable, or unequal to itself)."""
    expected = tidy(gold)
    if _is_words(gold, expected) or _is_time(expected):
        return "words"
    return "mathematics" if readings(expected) and _same(expected, expected) else "string only"


def _same(expected: str, given: str) -> bool:
    """Whether two expressions have the same value. Tuples are ordered, lists of answers are not; repetitions count."""
    ours, theirs = parts(expected), parts(given)
    ordered = len(ours) == 1 and len(parts(_inside(expected, "()", "[]", "[)", "(]") or "")) > 1  # tuple or interval
    if not ordered and (_repeats(ours) or _repeats(theirs)):
        theirs = theirs if len(theirs) > 1 else parts(_inside(given, "()") or given)
        return len(ours) == len(theirs) and _one_to_one(ours, theirs)
    our_base, their_base = _BASE.fullmatch(expected), _BASE.fullmatch(given)
    if our_base and their_base:
        return our_base.groups() == their_base.groups()
    if their_base and expected.isdecimal():
        return False
    if ordered:
        if len(parts(_inside(given.replace("\\{", "{").replace("\\}", "}"), "{}") or "")) > 1:
            return False  # a set is not ordered
        given = f"({given})" if len(theirs) > 1 else given
    return _equal(expected, given)


def _equal(expected: str, given: str) -> bool:
    verify = _math_verify().verify
    letter = re.search(r"(?<![A-Za-z\\~;,:])[A-Za-z](?:\^\s*\{?\d\}?)?\Z", expected) is not None  # not a unit here
    golds, values = readings(expected, units=not letter), readings(given)
    if percent := re.fullmatch(r"(.*\d)\s*\\?%", expected):
        golds += readings(percent[1])  # the sign is omitted like a unit
    scales = (1, 0.01, 100) if "%" in expected + given else (1,)
    return any(
        verify([gold], [value], timeout_seconds=None, allow_set_relation_comp=True) and _close(gold, value, scales)
        for gold in golds
        for value in values
    )


def _close(gold: Any, value: Any, scales: tuple[float, ...]) -> bool:
    """Whether small numbers, for which 6 decimals are too coarse, agree up to a scale; also inside tuples and sets."""
    if not (_is_real(gold) and _is_real(value)):
        ours, theirs = (_members(thing) for thing in (gold, value))
        return len(ours) != len(theirs) or all(_close(a, b, scales) for a, b in zip(ours, theirs, strict=True))
    size = abs(gold.evalf())  # not float(gold): 2^{2016} is too large
    return bool(size >= SMALL) or any(
        bool(abs(value.evalf() * scale - gold.evalf()) <= 5e-4 * size) for scale in scales
    )


def _is_real(value: Any) -> bool:
    return bool(getattr(value, "is_number", False) and value.is_real)


def _members(thing: Any) -> list:
    import sympy

    if isinstance(thing, sympy.FiniteSet):
        numbers: list[Any] = list(thing)
        return sorted(numbers, key=lambda number: number.evalf()) if all(map(_is_real, numbers)) else []
    return list(thing.args) if isinstance(thing, (sympy.Tuple, sympy.Interval, sympy.Eq)) else []


def _one_to_one(ours: list[str], theirs: list[str]) -> bool:
    """Whether every part of one list has its own partner in the other; of equations, the right sides are compared."""
    left = [part.rpartition("=")[2] for part in theirs]
    for part in ours:
        partner = next((other for other in left if _equal(part.rpartition("=")[2], other)), None)
        if partner is None:
            return False
        left.remove(partner)
    return True


def _repeats(listed: list[str]) -> bool:
    values = [readings(part.rpartition("=")[2]) for part in listed]
    return any(value and value in values[:i] for i, value in enumerate(values))


def parts(expression: str) -> list[str]:
    r"""The members of a list of answers: split at commas, `and` and `or` outside brackets. `10,010` is one number."""
    if _THOUSANDS.fullmatch(expression):
        return [expression]
    found, depth = [""], 0
    for token in _LIST.findall(expression):
        depth += (token[-1] in "([{") - (token[-1] in ")]}") if len(token) <= 2 else 0
        if depth == 0 and (token == "," or len(token) > 2):
            found.append("")
        else:
            found[-1] += token
    return [part.strip() for part in found if part.strip()]


def _inside(expression: str, *brackets: str) -> str | None:
    """The expression inside brackets, such as "()", that enclose all of it; None if there are none."""
    plain = re.sub(r"\\(left|right)\s*", "", expression)
    depths = list(accumulate((c in "([{") - (c in ")]}") for c in plain))
    return plain[1:-1] if plain[:1] + plain[-1:] in brackets and 0 not in depths[:-1] else None


def time_of_day(expression: str) -> tuple[int, int, str | None] | None:
    """Hour, minute and half of the day of `1:58 am`, `5 p.m.` or, without a half, `1:58`."""
    found = _TIME.fullmatch(TEXT.sub(r"\1", expression).replace("\\ ", " ").replace("~", " ").strip())
    return (int(found[1]), int(found[2] or 0), found[3] and found[3].lower()) if found else None


def _is_time(expression: str) -> bool:
    """Whether it is a time that names the half of the day; `1:58` alone may be a ratio."""
    moment = time_of_day(expression)
    return moment is not None and moment[2] is not None


@lru_cache(maxsize=4096)
def readings(expression: str, units: bool = True) -> tuple:
    """The expression as sympy objects: without the unit at its end, if `units`, and as it is. Empty if unreadable."""
    math_verify = _math_verify()
    found = []
    for written in dict.fromkeys((without_unit(expression) if units else expression, expression)):
        style: Any = {"fallback_mode": "no_fallback", "parsing_timeout": None}  # the pool has a deadline of its own
        for value in math_verify.parse(f"${legible(written)}$", [_reader()], **style):
            if value not in found and not _undefined(value):
                found.append(value)
    return tuple(found)


def _undefined(value: Any) -> bool:
    """Whether it contains a division by zero: then it was misread, and equals nothing."""
    import sympy

    return value.has(sympy.zoo, sympy.nan) if hasattr(value, "has") else False


@lru_cache
def _reader():
    from latex2sympy2_extended import NormalizationConfig

    style = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
    )
    return _math_verify().LatexExtractionConfig(boxed_match_priority=-1, normalization_config=style)


@lru_cache
def _math_verify():
    try:
        import math_verify
    except ImportError as error:
        raise SparseRLError(
            f"grading mathematics needs math-verify ({error}); pip install 'math-verify[antlr4-13-2]'."
        ) from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off; the pool has one
    return math_verify


def _bare(expression: str) -> str:
    r"""Without `\text`, and without spaces except between digits."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", TEXT.sub(r"\1", expression))


def _only_letters(expression: str) -> bool:
    """Words and choices, not algebra: a hyphen only between words of two letters or more (`p - q` is a difference)."""
    return (
        re.fullmatch(r"[A-Za-z]([A-Za-z ,.'()]|(?<=[A-Za-z]{2})-(?=[A-Za-z]{2}))*|\([A-Za-z]\)", expression) is not None
    )


def _no_algebra(expression: str) -> bool:
    """Whether it has only letters, digits and punctuation of words: not `n!`, `-x` or `x/y`, but `(two~lines!)`."""
    plain = re.sub(r"\\[ ,;:]|[~{}\"'`,.()]", " ", re.sub(WORD_STYLE, "", expression))
    plain = re.sub(r"(?<=[A-Za-z]{2})(!|-(?=[A-Za-z]{2}))", " ", plain)
    return re.fullmatch(r"[A-Za-z0-9\s]*", plain) is not None


def _is_words(gold: str, expected: str) -> bool:
    r"""Whether to compare as words: `even` and `\text{ab}` are not products of letters, but `ab` may be one."""
    styled = "".join(gold.split()).strip("$.,") != "".join(expected.split())
    runs = re.findall(r"[A-Za-z]+", expected)
    return _only_letters(expected) and (
        max(map(len, runs)) >= 4 or (styled and (len(runs) == 1 or max(map(len, runs)) >= 2))
    )


def _letters(expression: str) -> str:
    """Words without case, spacing and punctuation."""
    plain = re.sub(r"\band\s+(?=[({]*[A-Z]\b)", "", re.sub(WORD_STYLE, "", expression))  # A, B, and D
    return re.sub(r"[^a-z0-9]", "", plain.lower())
