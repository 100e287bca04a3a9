r"""Is this boxed answer the reference answer? Strings first, then mathematics.

1. `last_boxed`: the last `\boxed{...}` of a completion whose braces balance.
2. Tidied strings that are equal are right; so are words that differ in case, spacing or punctuation only.
3. Otherwise math-verify reads both and compares their values: fractions, sets, intervals, matrices, percentages, units left out.

Where a string ends in something like a unit (`3t` may be three tonnes), it is read both with and without it, and one agreement is enough.
A reference that is neither words nor readable is a "bad gold": then only an equal string can be right.

Omits answers longer than 1,000 characters, which are wrong unread; times of day, which are read as ratios; tolerance: numbers must agree to
6 decimals.
"""

from __future__ import annotations

import logging
import re
from functools import lru_cache

from ..errors import SparseRLError

LONGEST = 1000  # characters of an answer that is read; the longest reference in the usual data has about 200

_WORD_STYLE = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox)\s*"
_WHOLE = re.compile(r"-?(?:0|[1-9]\d*)")
_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", flags=re.DOTALL)
_ENDING = re.compile(r"(?<!\\right)(?:\\[,;:! ]|[.,;:\s])+\Z")
_TEXT = re.compile(_WORD_STYLE + r"\{([^{}]*)\}")


def last_boxed(text: str) -> str | None:
    r"""What is in the last `\boxed{...}` that is closed; None where there is none. An escaped brace does not count."""
    before = text.partition("\\boxed")[0]  # nothing in it can close a box; it may end in backslashes that belong together
    opened: list[tuple[bool, int]] = []  # (is it a box, where its content starts) of every brace not yet closed
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


def tidy(expression: str) -> str:
    r"""The expression without what does not change its value: dollar signs, `\text` around all of it, full stops."""
    expression = expression.replace("\\$", "").replace("$", "").replace("\n", " ").strip()
    expression = re.sub(r",\s*\\!\s*", "", expression)  # 29,\!322
    expression = _ENDING.sub("", expression)
    if wholly := _TEXT.fullmatch(expression):
        expression = _ENDING.sub("", wholly[1].strip())
    expression = re.sub(r"^(\\approx|≈|=)\s*", "", expression)
    expression = re.sub(r"(\d)\.(?!\d)", r"\1", expression)  # 1./3
    expression = re.sub(r"\\([dt]?frac)\s*(\\[a-zA-Z]+)\s*(\d)", r"\\\1{\2}{\3}", expression)  # \frac\pi2
    return re.sub(r"(?<![\w}])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)", r"\1 \\times 10^{\2}", expression)  # 4.5e33


def verdict(gold: str, answer: str) -> str:
    """right, wrong, or bad gold."""
    if len(answer) > max(LONGEST, 2 * len(gold)):
        return "wrong"
    expected, given = tidy(gold), tidy(answer)
    if _bare(expected) == _bare(given):
        return "right"
    if _only_letters(expected) and _no_algebra(given) and _letters(expected) == _letters(given):
        return "right"
    if _is_words(gold, expected) or (_WHOLE.fullmatch(expected) and _WHOLE.fullmatch(given)):
        return "wrong"  # whole numbers, the commonest case, need no mathematics
    values = readings(expected)
    if not values:
        return "bad gold"
    return "right" if _math_verify().verify(list(values), list(readings(given)), timeout_seconds=None) else "wrong"


@lru_cache(maxsize=4096)
def readings(expression: str) -> tuple:
    """The expression as sympy objects: with a unit at its end removed, and as it stands. Empty where it cannot be read."""
    math_verify = _math_verify()
    found = []
    for units in (True, False) if re.search(r"[A-Za-z}]\s*\Z", expression) else (True,):
        for value in math_verify.parse(f"${expression}$", [_reader(units)], fallback_mode="no_fallback", parsing_timeout=None):
            if value not in found:
                found.append(value)
    return tuple(found)


@lru_cache
def _reader(units: bool):
    from latex2sympy2_extended import NormalizationConfig

    style = NormalizationConfig(basic_latex=True, units=units, malformed_operators=True, nits=True, boxed="none", equations=False)
    return _math_verify().LatexExtractionConfig(boxed_match_priority=-1, normalization_config=style)


@lru_cache
def _math_verify():
    try:
        import math_verify
    except ImportError as error:
        raise SparseRLError(f"grading mathematics needs math-verify ({error}); pip install 'math-verify[antlr4_13_2]'.") from error
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own timeouts are off; the deadline is the pool's
    return math_verify


def _bare(expression: str) -> str:
    r"""Without `\text` and without spaces, other than between digits."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", _TEXT.sub(r"\1", expression))


def _only_letters(expression: str) -> bool:
    """Words and choices, not algebra: a hyphen only between words of two letters or more (`p - q` is a difference)."""
    return re.fullmatch(r"[A-Za-z]([A-Za-z ,.'()]|(?<=[A-Za-z]{2})-(?=[A-Za-z]{2}))*|\([A-Za-z]\)", expression) is not None


def _no_algebra(expression: str) -> bool:
    """Whether only letters, digits and the punctuation of words are there: `n!`, `-x` and `x/y` are not, `(two~lines!)` is."""
    plain = re.sub(r"\\[ ,;:]|[~{}\"'`,.()]", " ", re.sub(_WORD_STYLE, "", expression))
    plain = re.sub(r"(?<=[A-Za-z]{2})(!|-(?=[A-Za-z]{2}))", " ", plain)
    return re.fullmatch(r"[A-Za-z0-9\s]*", plain) is not None


def _is_words(gold: str, expected: str) -> bool:
    r"""Words are compared as such: as mathematics `Friday` is a product of letters. `ab` may be one, `\text{ab}` is not, nor `even`."""
    styled = "".join(gold.split()).strip("$.,") != "".join(expected.split())
    runs = re.findall(r"[A-Za-z]+", expected)
    return _only_letters(expected) and (max(map(len, runs)) >= 4 or (styled and (len(runs) == 1 or max(map(len, runs)) >= 2)))


def _letters(expression: str) -> str:
    """What is left of words when case, spacing and punctuation do not matter."""
    return re.sub(r"[^a-z0-9]", "", re.sub(_WORD_STYLE, "", expression).lower())
