r"""Normalise how an answer is written: functions from string to string that do not change its meaning.

`tidy` is for every comparison, `without_unit` and `legible` are for strings that math-verify reads. A word after a
number is a unit and is omitted, unless it may change the value: numbers (`2 hours 30 min`), `or more`, a function.
`5 million` and `6 dozen` are products.
"""

from __future__ import annotations

import re

WORD_STYLE = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox)\s*"
TEXT = re.compile(WORD_STYLE + r"\{([^{}]*)\}")

_ENDING = re.compile(r"(?<!\\right)(?:\\[,;:! ]|[.,;:\s])+\Z")
_SYMBOLS = {
    "√": r"\sqrt ",
    "π": r"\pi ",
    "\u2212": "-",
    "\u00d7": r"\times ",
    "·": r"\cdot ",
    "∞": r"\infty ",
    "\u222a": r"\cup ",
    "°": r"^\circ ",
}
_GREATER = re.compile(r">|\\gt(?![a-z])|\\g(?:eqslant|eq|e)(?![a-z])|≥")
_SIGN = re.compile(r"(\\[lg](?:t|eqslant|eq|e)(?![a-z])|[<>]=?|[≤≥])")
_OR = re.compile(r"\\text\s*\{\s*or\s*\}|\bor\b")

_SCALES = {
    "hundred": "10^{2}",
    "thousand": "10^{3}",
    "million": "10^{6}",
    "billion": "10^{9}",
    "trillion": "10^{12}",
    "dozen": "12",
}
_NUMBERS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"),
    *("thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty"),
)
_CHANGING = re.compile(  # words that change the value; but `ten-dollar bills` are bills
    rf"\b(?:{'|'.join((*_NUMBERS, *_SCALES))}|thirty|forty|fifty|sixty|seventy|eighty|ninety"
    r"|half|halves|double|twice|triple|thirds|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million)ths"
    r"|or|least|most|plus|minus|times|percent|base|mod|sin|cos|tan|cot|sec|log|exp|sqrt"
    r"|alpha|beta|gamma|delta|theta|lambda|omega|infinity|e|i)\b(?!-)|\d|\A\W*(?:squared|cubed|factorial)\b"
)
_SHORT = re.compile(  # units that are too short, or have no vowel, to be recognised as words
    r"[mshgtldc]|(?i:[mcdkn]m|[mk]?g|gm|m[li]|ft|in|yd|hrs?|lbs?|oz|sq|sqft|cu|cc|hz|ev|k[wj]|pa|[ap]m|rs|st|nd|rd|th"
    r"|[mk]ph|kmh|yrs|pts)"
)
_SMALL_WORD = re.compile("an?|of|to|at|on|by")  # within a phrase
_GAP = r"(?:\s|~|\\[,;: ])*"
_PLAIN_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mbox)\s*\{[^{}]*\}"
# _WORD and _UNIT match a text in one way only; otherwise a search may hang
_WORD = r"(?<![A-Za-z\\'.-])[A-Za-z]+(?![A-Za-z])(?:['.-][A-Za-z]+(?![A-Za-z]))*\.?"
_POWER = r"(?:\^\s*(?:[23]|\{-?[123]\}))?"
_UNIT = re.compile(
    rf"(?<=[^\s~_^{{(,;:+*/=-])({_GAP}(?:\\[dt]?frac\{{{_PLAIN_TEXT}\}}\{{{_PLAIN_TEXT}{_POWER}\}}"
    rf"|{_PLAIN_TEXT}{_POWER}|(?<=[\d}})\s~;:,]){_WORD}{_POWER})"
    rf"(?:{_GAP}(?:(?:/|\\cdot(?![a-z])){_GAP})?(?:{_PLAIN_TEXT}|{_WORD}){_POWER})*)\Z"
)
_SCALE = re.compile(rf"(?<=[\d}}]){_GAP}(?:\\text\s*\{{\s*)?\b({'|'.join(_SCALES)})\b(?!-)\s*(\}})?")
_DERIVATIVE = re.compile(
    r"\\[dt]?frac\s*\{\s*(?:d|\\partial)\s*(?:\^\s*\{?(\d)\}?)?\s*(\\?[A-Za-z]+(?:_(?:\w|\{\s*\w+\s*\}))?)\s*\}"
    r"\s*\{\s*(?:d|\\partial)\s*(\\?[A-Za-z]+)\s*(?:\^\s*\{?\d\}?)?\s*\}"
)
_PRIMES = re.compile(r"(?<![A-Za-z\\])([A-Za-z])('+|\^\s*\{?\s*\\prime\s*\}?)(?!\s*\()")
_DOTS = re.compile(
    r"\\(d?)dot(?![a-z])\s*(?:\{\s*(\\?[A-Za-z]+)\s*\}|\s(\\?[A-Za-z])|(\\[A-Za-z]+))(_(?:\w|\{\s*\w+\s*\}))?"
)


def tidy(expression: str) -> str:
    r"""The expression without dollar signs, `\text` around all of it, full stops and the like."""
    thousands = r"(\\?\$\s*[\d.,]+)\s*(?:\\text\s*\{\s*)?([KMB])(?:\s*\})?(?=\$?\Z)"  # $18K
    expression = re.sub(thousands, _in_full, expression)
    expression = re.sub(r"(?<=[\w}])\$\s*([A-Za-z]{3,})\W*\Z", r"$\\text{ \1}", expression)  # $145$ dollars:
    expression = expression.replace("\\$", "").replace("$", "").replace("\n", " ").strip()
    expression = re.sub(r"\A(?:\\q?quad\s*)+", "", expression)
    expression = re.sub(r",\s*\\!\s*", "", expression).replace("\\!", "")  # 29,\!322
    spaced = r"(?<![\d.])\d{1,3}(?:(?:\\[,;: ]|~)\d{3})+(?!\d)"  # 70\,000
    expression = re.sub(spaced, lambda x: re.sub(r"\D", "", x[0]), expression)
    expression = _ENDING.sub("", expression)
    if wholly := TEXT.fullmatch(expression):
        expression = _ENDING.sub("", wholly[1].strip())
    expression = re.sub(r"√\s*(?:(\d+)|\(([^()]*)\))", r"\\sqrt{\1\2}", expression)
    for symbol, command in _SYMBOLS.items():
        expression = expression.replace(symbol, command)
    expression = re.sub(r"(\^\s*(?:\\circ|\{\\circ\}))\s*(?:[CF]|\\(?:text|mathrm)\{[CF]\})?\s*\Z", r"\1", expression)
    expression = re.sub(r"^(\\approx|≈|=)\s*", "", expression)
    expression = re.sub(r"(\d)\.(?!\d|\\(?:overline|bar)\b)", r"\1", expression)  # 1./3
    expression = re.sub(r"(\d+)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}", _recurring, expression)
    expression = re.sub(r"(?<![\w.}])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\w.])", _mixed, expression)
    expression = re.sub(r"\\([dt]?frac)\s*(\\[a-zA-Z]+)\s*(\d)", r"\\\1{\2}{\3}", expression)  # \frac\pi2
    expression = re.sub(r"(?<![\w}])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)", r"\1 \\times 10^{\2}", expression)  # 4.5e33
    expression = re.sub(r"\\text\s*\{\s*percent\s*\}|\bpercent\b", r"\\%", expression)
    return _with_base(expression)


def _in_full(found: re.Match) -> str:
    return found[1] + r"\times 10^{" + {"K": "3", "M": "6", "B": "9"}[found[2]] + "}"


def _recurring(found: re.Match) -> str:
    r"""`1.2\overline{3}` as a fraction."""
    whole, once, again = found.groups()
    return rf"\frac{{{int(whole + once + again) - int(whole + once)}}}{{{10 ** len(once) * (10 ** len(again) - 1)}}}"


def _mixed(found: re.Match) -> str:
    """`1 1/2` as one and a half."""
    return rf"{found[1]}\frac{{{found[2]}}}{{{found[3]}}}" if int(found[2]) < int(found[3]) else found[0]


def _with_base(expression: str) -> str:
    """A base in words as an index: `20 base 8`, `20 (base eight)`."""
    numbers = "|".join(_NUMBERS)
    plain = TEXT.sub(r"\1", expression)
    if found := re.fullmatch(
        rf"([0-9A-Fa-f]+)(?:\s*\(?\s*(?:in\s+)?base[\s-]*|_\{{?\s*)(\d+|{numbers})\s*[)}}]?", plain
    ):
        return f"{found[1]}_{{{_NUMBERS.index(found[2]) if found[2] in _NUMBERS else found[2]}}}"
    return expression


def without_unit(expression: str) -> str:
    """The expression without the unit at its end: words that do not change the value. `5 million` is a product."""
    if found := _SCALE.search(expression):
        rest = r"\text{" if "{" in found[0] and not found[2] else " "  # \text{ million years}: the years stay in it
        expression = (
            expression[: found.start()] + rf"\times {_SCALES[found[1]]}" + rest + expression[found.end() :]
        ).strip()
    found = _UNIT.search(expression)
    if found is None or _CHANGING.search(re.sub(_POWER, "", TEXT.sub(r" \1 ", found[1])).lower()):
        return expression
    spaced = re.match(r"\s|~|\\", found[1]) is not None
    bare = re.findall(_WORD, TEXT.sub(" ", found[1]))
    return (
        expression[: found.start()].strip()
        if all(_is_unit(word, i > 0, spaced) for i, word in enumerate(bare))
        else expression
    )


def _is_unit(word: str, follows: bool, spaced: bool) -> bool:
    r"""Whether a word outside `\text` is part of a unit: `18 eggs` are eggs, but `18xy` is a product of letters."""
    if _SHORT.fullmatch(word.strip(".")) or (follows and _SMALL_WORD.fullmatch(word)):
        return True
    return (spaced or follows) and len(word) >= 3 and re.search("[aeiouy]", word.lower()) is not None


def legible(expression: str) -> str:
    r"""The expression as math-verify can read it."""
    expression = re.sub(r"\b(?:np|math)\.(?=[a-z])", r"\\", expression)  # np.arcsin(x)
    expression = re.sub(r"_\{\\(max|min|odot|oplus)\s*\}", r"_{\1}", expression)
    expression = _single_brackets(_derivatives(expression))
    # math-verify reads E as Euler's number, but E_k is an energy; and \gamma as Euler's constant, but it is a variable
    expression = re.sub(r"(?<![A-Za-z\\])E_(?:\{(\w+)\}|(\w))", r"W_{E\1\2}", expression)
    expression = re.sub(r"\\gamma(?![A-Za-z])", r"\\varrho", expression)
    expression = re.sub(r"\bC_(?:\{(\d+)\}|(\d))\^(?:\{(\d+)\}|(\d))", r"\\binom{\1\2}{\3\4}", expression)
    neighbours = r"(\\[dt]?binom\{[^{}]*\}\{[^{}]*\})\s*(?=\\[dt]?binom)"  # math-verify would add them
    expression = re.sub(neighbours, r"\1 \\cdot ", expression)
    expression = re.sub(r"\A[A-Za-z]\s*(?=\([^()\[\]]*\]\Z)", "", expression)  # t(0,4]
    expression = re.sub(
        r"\^\s*\{\s*(-?)(\d*)\.(\d+)\s*\}",
        lambda x: rf"^{{{x[1]}\frac{{{x[2]}{x[3]}}}{{{10 ** len(x[3])}}}}}",
        expression,
    )
    if found := re.fullmatch(r"\\\{\s*\w\s*(?:\||:|\\mid(?![a-z]))([^,;|]*(?:[<>]|\\[lg]e)[^,;|]*)\\\}", expression):
        expression = found[1]  # {x | -2 <= x < 1}: the condition
    return _union(expression) or _forwards(expression)


def _single_brackets(expression: str) -> str:
    """((x)) as (x): math-verify takes a tenth of a second for every bracket inside another."""
    partner, opened = {}, []
    for i, c in enumerate(expression):
        if c == "(":
            opened.append(i)
        elif c == ")" and opened:
            partner[opened.pop()] = i
    doubled = {place for i, j in partner.items() if partner.get(i + 1) == j - 1 for place in (i, j)}
    return "".join(c for i, c in enumerate(expression) if i not in doubled)


def _derivatives(expression: str) -> str:
    r"""Derivatives as symbols, which math-verify reads as 0. `\frac{dv}{dt}`, `dv/dt` and `\dot{v}` share one."""

    def symbol(order: str, name: str, by: str) -> str:
        return "Y_{d" + re.sub(r"\W|_", "", f"{order}{name}d{by}") + "}"

    expression = re.sub(r"(?<![A-Za-z\\])d([A-Za-z](?:_\w)?)/d([a-z])(?![A-Za-z])", r"\\frac{d \1}{d \2}", expression)
    expression = re.sub(r"\\(?:mathrm|text)\{d\}", "d ", expression)
    expression = re.sub(
        r"(\\[dt]?frac\s*\{\s*d\s*)(\}\s*\{\s*d\s*[a-z]\s*\})\s*(\\?[A-Za-z]+(?:_\w)?)(?![\w^(\[])",
        r"\1 \3\2",
        expression,
    )
    expression = _PRIMES.sub(lambda found: symbol("i" * max(1, found[2].count("'")), found[1], ""), expression)
    expression = _DERIVATIVE.sub(lambda found: symbol(*found.groups("")), expression)
    return _DOTS.sub(lambda x: symbol("2" if x[1] else "", (x[2] or x[3] or x[4]) + (x[5] or ""), "t"), expression)


def _union(expression: str) -> str | None:
    """Inequalities of one letter with `or` between them as a union of intervals; None for anything else."""
    parts = _OR.split(expression)
    found = [interval for part in parts if (interval := _interval(part)) is not None]
    if len(parts) < 2 or len(found) < len(parts) or len({letter for letter, _ in found}) > 1:
        return None
    return r" \cup ".join(interval for _, interval in found)


def _interval(inequality: str) -> tuple[str, str] | None:
    r"""The letter and its interval: `x > 1` is (1, \infty)."""
    terms = [term.strip() for term in _SIGN.split(_forwards(inequality))]  # term, sign, term, ...
    if len(terms) == 3 and re.fullmatch("[A-Za-z]", terms[2]):  # 1 < x
        turned = (
            terms[1].translate(str.maketrans("<>≤≥lg", "><≥≤gl"))
            if terms[1] not in (r"\leqslant", r"\geqslant")
            else None
        )
        terms = [terms[2], turned or {"l": r"\geq", "g": r"\leq"}[terms[1][1]], terms[0]]
    if len(terms) == 3 and re.fullmatch("[A-Za-z]", terms[0]):
        letter, sign, bound = terms
        closed = sign not in ("<", ">", r"\lt", r"\gt")
        if _GREATER.match(sign):
            return letter, ("[" if closed else "(") + bound + r", \infty)"
        return letter, r"(-\infty, " + bound + ("]" if closed else ")")
    if len(terms) == 5 and re.fullmatch("[A-Za-z]", terms[2]) and not any(map(_GREATER.match, terms[1::2])):
        closed = [sign not in ("<", r"\lt") for sign in terms[1::2]]
        return terms[2], ("[" if closed[0] else "(") + terms[0] + ", " + terms[4] + ("]" if closed[1] else ")")
    return None


def _forwards(expression: str) -> str:
    """A chain `b > a > c` as `c < a < b`."""
    links = _GREATER.findall(expression)
    if len(links) < 2 or re.search(r"<|\\l(?:e|eq|eqslant|t)(?![a-z])|≤", expression):
        return expression
    signs = ["<" if link in (">", r"\gt") else r"\leq " for link in reversed(links)]
    terms = [term.strip() for term in reversed(_GREATER.split(expression))]
    return "".join(f"{term} {sign} " for term, sign in zip(terms, [*signs, ""], strict=True)).strip()
