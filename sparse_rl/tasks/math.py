r"""math: problems from JSONL files or datasets, rewarded when the last \boxed{...} equals the reference answer.

A row is an object with a prompt and an answer. The prompt is a string or a list of chat messages. The answer is a
number, a string, or a list of strings, all of which are required. `... #### 18` means 18, and `... \boxed{18} ...`
means the content of the last box. rows.py says what files may be.

With the option `solution`, a field holds the worked solution, for warm-up. A solution must earn the reward, so one
without a box gets one: a last line `#### 18` becomes `The answer is \boxed{18}.`, and if there is no such line, one is
added. `remove_marks` removes GSM8K's calculator marks, such as <<48/2=24>>.

Rows that cannot be used are skipped and counted (`skipped`, `skipped_rows`); if more than a tenth of a file cannot be
used, it is refused. Rows that repeat a prompt are kept and counted (`duplicates`).

Only the box is sent to the grading processes, so long completions cost nothing. There is no partial credit.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import SparseRLError, require_int
from ..files import is_text
from .base import Task, register
from .equality import effort, last_boxed, tidy, verdict
from .problem import Grade, Prompt
from .rows import Unusable, parse_row, rows_of, short_name
from .templates import dress, find, template_of
from .verify import Limits

TOLERATED = 0.1  # share of a file's rows that may be unusable
NAMED = 5  # unusable rows that are listed
FAMILIAR = (  # comparisons after which the parser is built, and sympy has loaded what common answers need
    (r"\frac{1}{2}", r"\{1, 2\}"),
    ("x^2-2x+1", "(x-1)^2"),
    (r"\sin(2y)", r"2\sin(y)\cos(y)"),
    (r"\sqrt{8}+\frac{\pi}{3}", r"2\sqrt{2}+\arccos(\frac{1}{2})"),
    (r"[0,1)\cup(2,3]", "e^{2i}"),
    (r"\sqrt[3]{3}", r"2\times10^{3}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
    ("y=2x", r"\log_2 8"),
    (r"\sum_{k=1}^{3} k", r"\frac{1}{x+1}"),
)
FIRST = 5  # prompts from which the template is recognised
MARK = re.compile(r"<<[^<>\n]*>>")  # of GSM8K's calculator
ENDING = re.compile(r"(^|\n)[ \t]*####[^\n]*\Z")  # the last line, if it is `#### 18`


@dataclass(frozen=True)
class Fields:
    """Which fields of a row hold what."""

    prompt: str
    answer: str
    answer_in_box: bool
    solution: str | None
    remove_marks: bool


@dataclass(frozen=True)
class Problem:
    """A usable row."""

    prompt: str | list[dict]
    gold: str
    solution: str | None = None


@dataclass(frozen=True)
class Split:
    """Prompts, and their solutions in the same order."""

    prompts: list[Prompt]
    solutions: list[str | None]


@register
class Math(Task):
    name = "math"
    isolated = True
    keeps_spare = True
    grading_limits = Limits(memory=4.0)  # 10^{10^{10}} must not take all memory before its deadline

    def __init__(
        self,
        files: str | os.PathLike | Sequence[str | os.PathLike] | None,  # None: no rows, to grade only
        prompt: str = "prompt",
        answer: str = "label",
        answer_in_box: bool = False,
        chat: bool = False,
        suffix: str = "",
        template: str | None = None,  # a name in TEMPLATES; None: prompts as in the file, with chat and suffix applied
        holdout: int | str = 0,  # rows kept for held_out(), or "all"
        split: str = "train",
        seed: int = 0,
        solution: str | None = None,  # the field of the worked solutions; None: there are none
        remove_marks: bool = False,  # <<48/2=24>> in solutions
    ):
        if not isinstance(holdout, str):
            require_int(0, holdout=holdout)
        elif holdout != "all":
            raise SparseRLError(f"holdout is {holdout!r}; it must be a number of rows, or 'all'.")
        if split not in ("train", "held-out"):
            raise SparseRLError(f"math: split is {split!r}; it must be 'train' or 'held-out'.")
        if template is not None and (chat or suffix):
            raise SparseRLError(
                f"math: template {template!r} sets the text around a question; omit chat and suffix, or the template."
            )
        self.seed, self.holdout = seed, holdout
        self._fields = Fields(prompt, answer, answer_in_box, solution, remove_marks)
        skipped: Counter[str] = Counter()
        skipped_rows: list[str] = []  # "file:line (reason)"
        rows: list[Problem] = []
        for source in [] if files is None else [files] if isinstance(files, (str, os.PathLike)) else list(files):
            rows += self._read(source, skipped, skipped_rows)
        self.skipped, self.skipped_rows = skipped, skipped_rows
        if files is not None and not rows:
            raise SparseRLError("math: the option files is empty; name at least one file.")
        if template is None:
            rows = [replace(row, prompt=extended(row.prompt, suffix, chat)) for row in rows]
        else:
            rows = [replace(row, prompt=dressed(row.prompt, template)) for row in rows]
        self.template = template or shared_template([row.prompt for row in rows[:FIRST]])
        self.duplicates = len(rows) - len({json.dumps(row.prompt) for row in rows})
        self._splits = divide(rows, holdout, seed)
        self._split = self._splits["train"]
        if split == "held-out":
            self._split = self.held_out()._split

    def __len__(self) -> int:
        return len(self._split.prompts)

    def __getitem__(self, i: int) -> Prompt:
        return self._split.prompts[i]

    def solution(self, prompt: Prompt) -> str:
        """The worked solution of one of this task's own prompts (a held-out prompt belongs to `held_out()`)."""
        found = self._split.solutions[prompt.index]
        if found is None:
            raise SparseRLError(
                f"the task {self.name} has no worked solutions, because it does not know which field of a row holds "
                "them; set task.solution to the name of that field (answer for GSM8K)."
            )
        return found

    def span(self) -> tuple[int, int]:
        return 0, len(self)

    def held_out(self) -> Math:
        if self.holdout == 0:
            raise SparseRLError(
                f"math: holdout is 0, so none of the {len(self):,} problems is held out; set it to a number or 'all'."
            )
        other = copy.copy(self)
        other._split = self._splits["held-out"]
        return other

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Grade]:
        """Grade equal answers to a prompt once: the members of a group often agree."""
        asked = [(prompt.index, prompt.answer, self.excerpt(text)) for prompt, text in zip(prompts, texts, strict=True)]
        first: dict[tuple, int] = {}
        for i, question in enumerate(asked):
            first.setdefault(question, i)
        grades = super().grade([prompts[i] for i in first.values()], [text for _, _, text in first])
        found = dict(zip(first, grades, strict=True))
        return [found[question] for question in asked]

    def judge(self, prompt: Prompt, text: str) -> Grade:
        answer = last_boxed(text)
        if answer is None or not answer.strip("{} \n"):
            return Grade(0.0, "no answer")
        found = verdict(prompt.answer, answer)
        return Grade(float(found == "right"), found)

    def extracted(self, text: str) -> str | None:
        return last_boxed(text)

    def excerpt(self, text: str) -> str:
        answer = last_boxed(text)
        return "" if answer is None else rf"\boxed{{{answer}}}"

    def prepare(self) -> None:
        for gold, answer in FAMILIAR:
            verdict(gold, answer)

    def effort(self, excerpt: str) -> float:
        return effort(excerpt)

    def spec(self) -> tuple[str, dict]:
        return ("math", {"files": None}) if type(self) is Math else super().spec()  # prompts bring their answers along

    def problem(self, row: dict) -> Problem:
        """The problem that a row holds, or Unusable with the reason."""
        fields = self._fields
        prompt, gold = prompt_of(row, fields.prompt), gold_of(row, fields.answer, fields.answer_in_box)
        worked = None if fields.solution is None else worked_of(row, fields.solution, gold, fields.remove_marks)
        return Problem(prompt, gold, worked)

    def _read(self, source: str | os.PathLike, skipped: Counter[str], skipped_rows: list[str]) -> list[Problem]:
        """The usable rows of a source. Adds the others to `skipped` and `skipped_rows`."""
        usable, reasons, names = [], Counter(), Counter()
        for number, line in rows_of(source):
            try:
                row = parse_row(line)
                names.update(list(row))
                usable.append(self.problem(row))
            except Unusable as reason:
                reasons[str(reason)] += 1
                if len(skipped_rows) < NAMED:
                    skipped_rows.append(f"{short_name(source)}:{number} ({reason})")
        count, bad = len(usable) + reasons.total(), reasons.total()
        if not usable or bad > TOLERATED * count:
            if not count:
                raise SparseRLError(f"{source} has no rows; give one JSON object per line, or a table with a header.")
            said = ", ".join(f"{reason}: {rows}" for reason, rows in reasons.most_common(3))
            fields = ", ".join(name for name, _ in names.most_common(12))
            remedy = "each line must be one JSON object."
            if names:
                wanted = "prompt and answer" if self._fields.solution is None else "prompt, answer and solution"
                remedy = f"its rows have the fields {fields}; set the task's {wanted} to theirs, or fix the file."
            raise SparseRLError(f"{source}: {bad:,} of {count:,} rows cannot be used ({said}); {remedy}")
        skipped.update(reasons)
        return usable


def _field(row: dict, name: str) -> Any:
    if name not in row:
        raise Unusable(f"no field {name!r}")
    if not _is_text(row[name]):
        raise Unusable(f"{name} holds half of a surrogate pair, which is not text")
    return row[name]


def _is_text(value: Any) -> bool:
    """Whether the strings of a field, of a list in it, or of messages can be written, and so tokenized."""
    items = value if isinstance(value, list) else [value]
    strings = [text for item in items for text in (item.values() if isinstance(item, dict) else [item])]
    return all(is_text(text) for text in strings if isinstance(text, str))


def prompt_of(row: dict, name: str) -> str | list[dict]:
    value = _field(row, name)
    if isinstance(value, list):
        if not value or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        ):
            raise Unusable(f"{name} is not a list of chat messages")
        return value
    if not isinstance(value, str):
        raise Unusable(f"{name} is {type(value).__name__}, not text")
    if not value.strip():
        raise Unusable(f"{name} is empty")
    return value


def gold_of(row: dict, name: str, in_box: bool) -> str:
    """The reference answer as one string."""
    value = _field(row, name)
    values = value if isinstance(value, list) else [value]
    gold = ",".join(_one_gold(item, name, in_box) for item in values)
    if not tidy(gold):
        raise Unusable(f"{name} is empty")
    return gold


def _one_gold(value: Any, name: str, in_box: bool) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise Unusable(f"{name} is {type(value).__name__}, not text or a number")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise Unusable(f"{name} is not finite")
        return str(int(value)) if value.is_integer() else str(value)
    text = str(value)
    if in_box or "\\boxed" in text:
        box = last_boxed(text)
        if box is None:
            raise Unusable(f"{name} has no closed \\boxed{{}}")
        text = box
    return text.rpartition("####")[2].strip()


def worked_of(row: dict, name: str, gold: str, remove_marks: bool) -> str:
    """The worked solution as a model should write it: it ends with the answer in a box."""
    value = _field(row, name)
    if not isinstance(value, str):
        raise Unusable(f"{name} is {type(value).__name__}, not text")
    text = (MARK.sub("", value) if remove_marks else value).strip()
    if not text:
        raise Unusable(f"{name} is empty")
    if last_boxed(text) is not None:
        return text
    steps = ENDING.sub("", text).rstrip()
    return f"{steps}\nThe answer is \\boxed{{{gold}}}.".lstrip()


def dressed(text: str | list[dict], template: str) -> str | list[dict]:
    """The prompt in a template. A prompt that is in this template already stays as it is."""
    find(template)
    form = template_of(text)
    if form == template:
        return text
    if form is not None or isinstance(text, list):
        has = f"have the form of the template {form!r}" if form else "are chat messages of another form"
        raise SparseRLError(
            f"math: the prompts {has}, so they cannot be put in that of {template!r}; omit the option template."
        )
    return dress(text, template)


def shared_template(prompts: list[str | list[dict]]) -> str | None:
    """The template of all prompts, if they share one."""
    names = {template_of(prompt) for prompt in prompts}
    return names.pop() if len(names) == 1 else None


def extended(text: str | list[dict], suffix: str, chat: bool) -> str | list[dict]:
    """The prompt with the suffix, and as a chat message if `chat`."""
    if isinstance(text, list):
        *before, last = text
        return [*before, {**last, "content": last["content"] + suffix}]
    return [{"role": "user", "content": text + suffix}] if chat else text + suffix


def divide(rows: list[Problem], holdout: int | str, seed: int) -> dict[str, Split]:
    """`holdout` rows chosen at random, and the others, without copies of held-out problems."""
    count = len(rows) if isinstance(holdout, str) else holdout
    if not isinstance(holdout, str) and 0 < len(rows) <= count:
        raise SparseRLError(
            f"math: holdout {count:,} leaves none of {len(rows):,} usable rows; lower it, or use 'all' to evaluate."
        )
    chosen = set(random.Random(f"holdout|{seed}").sample(range(len(rows)), count))
    seen = {json.dumps(rows[i].prompt) for i in chosen}
    kept = [i for i in range(len(rows)) if i not in chosen and (not seen or json.dumps(rows[i].prompt) not in seen)]
    return {"train": _split([rows[i] for i in kept]), "held-out": _split([rows[i] for i in sorted(chosen)])}


def _split(rows: list[Problem]) -> Split:
    return Split(
        [Prompt(row.prompt, row.gold, index=place) for place, row in enumerate(rows)], [row.solution for row in rows]
    )
