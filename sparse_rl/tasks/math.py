r"""math: problems from JSONL files, rewarded when the last \boxed{...} equals the reference answer.

A row is an object with a prompt and an answer. The prompt is a string or a list of chat messages; the answer is a number, a string, or a
list of strings that are all wanted. `... #### 18` means 18, and `... \boxed{18} ...` means what is in the last box.

Rows that cannot be used are skipped and counted (`skipped`, `skipped_rows`); a file of which more than a tenth cannot be used is refused.
Rows that repeat a prompt are kept and counted (`duplicates`).
Only the box is sent to the grading processes, so the length of a completion costs nothing. Omits partial credit and worked solutions.
"""

from __future__ import annotations

import copy
import json
import math
import os
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import SparseRLError, require_int
from .base import Grade, Prompt, Task, register
from .equality import last_boxed, tidy, verdict
from .templates import dress, find, template_of
from .verify import Limits

TOLERATED = 0.1  # of a file's rows that may be unusable
NAMED = 5  # unusable rows that are named
FIRST = 5  # prompts that must agree in their template


class Unusable(Exception):
    """A row that cannot be used; the message is the reason."""


@register
class Math(Task):
    name = "math"
    isolated = True
    grading_limits = Limits(memory=4.0)  # 10^{10^{10}} must not take the run's memory before its deadline

    def __init__(
        self,
        files: str | os.PathLike | Sequence[str | os.PathLike] | None,  # None: no rows, to grade only
        prompt: str = "prompt",
        answer: str = "label",
        answer_in_box: bool = False,
        chat: bool = False,
        suffix: str = "",
        template: str
        | None = None,  # a name in TEMPLATES; None: prompts stay as the file has them, but for chat and suffix
        holdout: int | str = 0,  # rows kept for held_out(), or "all"
        split: str = "train",
        seed: int = 0,
    ):
        if holdout != "all":
            require_int(0, holdout=holdout)
        if split not in ("train", "held-out"):
            raise SparseRLError(f"math: split is {split!r}; it must be 'train' or 'held-out'.")
        if template is not None and (chat or suffix):
            raise SparseRLError(
                f"math: template {template!r} says what surrounds a question; leave chat and suffix away, or the template."
            )
        self.seed, self.holdout = seed, holdout
        self._fields = prompt, answer, answer_in_box
        self.skipped: Counter[str] = Counter()  # reason -> rows
        self.skipped_rows: list[str] = []  # the first few, "file:line (reason)"
        rows = []
        for path in [] if files is None else [files] if isinstance(files, (str, os.PathLike)) else list(files):
            rows += self._read(Path(path))
        if files is not None and not rows:
            raise SparseRLError("math: files names no file; give at least one.")
        if template is None:
            rows = [(extended(text, suffix, chat), gold) for text, gold in rows]
        else:
            rows = [(dressed(text, template), gold) for text, gold in rows]
        self.template = template or shared_template([text for text, _ in rows[:FIRST]])
        self.duplicates = len(rows) - len({json.dumps(text) for text, _ in rows})
        self._splits = divide(rows, holdout, seed)
        self._prompts = self._splits["train"]
        if split == "held-out":
            self._prompts = self.held_out()._prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, i: int) -> Prompt:
        return self._prompts[i]

    def span(self) -> tuple[int, int]:
        return 0, len(self)

    def held_out(self) -> Math:
        if self.holdout == 0:
            raise SparseRLError(
                f"math: holdout is 0, so none of the {len(self):,} problems is held out; set it to a number or 'all'."
            )
        other = copy.copy(self)
        other._prompts = self._splits["held-out"]
        return other

    def grade(self, prompts: Sequence[Prompt], texts: Sequence[str]) -> list[Grade]:
        """Equal answers to a prompt are compared once: the members of a group often agree."""
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
        verdict(r"\frac{1}{2}", r"\{1, 2\}")  # imports math-verify and builds its parser

    def spec(self) -> tuple[str, dict]:
        return ("math", {"files": None}) if type(self) is Math else super().spec()  # prompts bring their answers along

    def problem(self, row: dict) -> tuple[str | list[dict], str]:
        """Prompt and reference answer of a row; Unusable says why it has none."""
        prompt, answer, answer_in_box = self._fields
        return prompt_of(row, prompt), gold_of(row, answer, answer_in_box)

    def _read(self, path: Path) -> list[tuple[Any, str]]:
        """The usable rows of a file, as (prompt, reference answer)."""
        usable, reasons, names = [], Counter(), Counter()
        for number, line in _lines(path):
            try:
                row = parse_row(line)
                names.update(list(row))
                usable.append(self.problem(row))
            except Unusable as reason:
                reasons[str(reason)] += 1
                if len(self.skipped_rows) < NAMED:
                    self.skipped_rows.append(f"{path.name}:{number} ({reason})")
        count, bad = len(usable) + reasons.total(), reasons.total()
        if not usable or bad > TOLERATED * count:
            said = ", ".join(f"{reason}: {rows}" for reason, rows in reasons.most_common(3)) or "it is empty"
            fields = ", ".join(name for name, _ in names.most_common(12))
            remedy = (
                f"its rows have the fields {fields}; name two of them with prompt=... and answer=..., or mend the file."
            )
            raise SparseRLError(
                f"{path}: {bad:,} of {count:,} rows cannot be used ({said}); {remedy if names else 'each line must be one JSON object.'}"
            )
        self.skipped.update(reasons)
        return usable


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, counted from 1."""
    if not path.is_file():
        raise SparseRLError(
            f"there is no file {path}; give the path of a JSONL file, from the root or from {Path.cwd()}."
        )
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.removeprefix(b"\xef\xbb\xbf")


def parse_row(line: bytes) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # not UTF-8 is a ValueError, too
        raise Unusable("not JSON") from None
    if not isinstance(row, dict):
        raise Unusable("not an object")
    return row


def _field(row: dict, name: str) -> Any:
    if name not in row:
        raise Unusable(f"no field {name!r}")
    return row[name]


def prompt_of(row: dict, name: str) -> str | list[dict]:
    value = _field(row, name)
    if isinstance(value, list):
        if not value or not all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        ):
            raise Unusable(f"{name} is no list of chat messages")
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


def dressed(text: str | list[dict], template: str) -> str | list[dict]:
    """The prompt in the form of a template: a question is dressed, a prompt that has this form already stays as it is."""
    find(template)
    form = template_of(text)
    if form == template:
        return text
    if form is not None or isinstance(text, list):
        has = f"have the form of the template {form!r}" if form else "are chat messages of another form"
        raise SparseRLError(
            f"math: the prompts {has}, so they cannot be put in that of {template!r}; leave the option template away."
        )
    return dress(text, template)


def shared_template(prompts: list[str | list[dict]]) -> str | None:
    """The template that all of them have the form of."""
    names = {template_of(prompt) for prompt in prompts}
    return names.pop() if len(names) == 1 else None


def extended(text: str | list[dict], suffix: str, chat: bool) -> str | list[dict]:
    """The prompt as the model gets it: with the suffix, and as a chat message if asked for."""
    if isinstance(text, list):
        *before, last = text
        return [*before, {**last, "content": last["content"] + suffix}]
    return [{"role": "user", "content": text + suffix}] if chat else text + suffix


def divide(rows: list[tuple[Any, str]], holdout: int | str, seed: int) -> dict[str, list[Prompt]]:
    """`holdout` rows chosen at random, and the others; a copy of a held-out problem is not among the others."""
    count = len(rows) if holdout == "all" else holdout
    if holdout != "all" and 0 < len(rows) <= count:
        raise SparseRLError(
            f"math: holdout {count:,} leaves nothing of {len(rows):,} usable rows; lower it, or say 'all' to only evaluate."
        )
    chosen = set(random.Random(f"holdout|{seed}").sample(range(len(rows)), count))
    seen = {json.dumps(rows[i][0]) for i in chosen}
    kept = [i for i in range(len(rows)) if i not in chosen and (not seen or json.dumps(rows[i][0]) not in seen)]
    return {
        "train": [Prompt(*rows[i], index=place) for place, i in enumerate(kept)],
        "held-out": [Prompt(*rows[i], index=place) for place, i in enumerate(sorted(chosen))],
    }
