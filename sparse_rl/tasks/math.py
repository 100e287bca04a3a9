r"""math: problems from JSONL files, rewarded when the last \boxed{...} equals the reference answer.

A row is an object with a prompt and an answer. The prompt is a string or a list of chat messages. The answer is a
number, a string, or a list of strings, all of which are required. `... #### 18` means 18, and `... \boxed{18} ...`
means the content of the last box.

Rows that cannot be used are skipped and counted (`skipped`, `skipped_rows`); if more than a tenth of a file cannot be
used, it is refused. Rows that repeat a prompt are kept and counted (`duplicates`).

Only the box is sent to the grading processes, so long completions cost nothing. There is no partial credit, and there
are no worked solutions.
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

TOLERATED = 0.1  # share of a file's rows that may be unusable
NAMED = 5  # unusable rows that are listed
FIRST = 5  # prompts from which the template is recognised


class Unusable(Exception):
    """A row that cannot be used; the message is the reason."""


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
    ):
        if not isinstance(holdout, str):
            require_int(0, holdout=holdout)
        elif holdout != "all":
            raise SparseRLError(f"holdout is {holdout!r}; it must be a number of rows, or 'all'.")
        if split not in ("train", "held-out"):
            raise SparseRLError(f"math: split is {split!r}; it must be 'train' or 'held-out'.")
        if template is not None and (chat or suffix):
            raise SparseRLError(
                f"math: template {template!r} says what surrounds a question; omit chat and suffix, or the template."
            )
        self.seed, self.holdout = seed, holdout
        self._fields = prompt, answer, answer_in_box
        skipped: Counter[str] = Counter()
        skipped_rows: list[str] = []  # "file:line (reason)"
        rows = []
        for path in [] if files is None else [files] if isinstance(files, (str, os.PathLike)) else list(files):
            rows += self._read(Path(path), skipped, skipped_rows)
        self.skipped, self.skipped_rows = skipped, skipped_rows
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
        verdict(r"\frac{1}{2}", r"\{1, 2\}")  # imports math-verify and builds its parser

    def spec(self) -> tuple[str, dict]:
        return ("math", {"files": None}) if type(self) is Math else super().spec()  # prompts bring their answers along

    def problem(self, row: dict) -> tuple[str | list[dict], str]:
        """Prompt and reference answer of a row, or Unusable with the reason."""
        prompt, answer, answer_in_box = self._fields
        return prompt_of(row, prompt), gold_of(row, answer, answer_in_box)

    def _read(self, path: Path, skipped: Counter[str], skipped_rows: list[str]) -> list[tuple[Any, str]]:
        """The usable rows of a file, as (prompt, reference answer). Adds the others to `skipped` and `skipped_rows`."""
        usable, reasons, names = [], Counter(), Counter()
        for number, line in _lines(path):
            try:
                row = parse_row(line)
                names.update(list(row))
                usable.append(self.problem(row))
            except Unusable as reason:
                reasons[str(reason)] += 1
                if len(skipped_rows) < NAMED:
                    skipped_rows.append(f"{path.name}:{number} ({reason})")
        count, bad = len(usable) + reasons.total(), reasons.total()
        if not usable or bad > TOLERATED * count:
            said = ", ".join(f"{reason}: {rows}" for reason, rows in reasons.most_common(3)) or "it is empty"
            fields = ", ".join(name for name, _ in names.most_common(12))
            remedy = "each line must be one JSON object."
            if names:
                remedy = f"its rows have the fields {fields}; name two with prompt=... and answer=..., or fix the file."
            raise SparseRLError(f"{path}: {bad:,} of {count:,} rows cannot be used ({said}); {remedy}")
        skipped.update(reasons)
        return usable


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers from 1."""
    if not path.is_file():
        raise SparseRLError(
            f"there is no file {path}; give the path of a JSONL file, absolute or relative to {Path.cwd()}."
        )
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line.removeprefix(b"\xef\xbb\xbf")


def parse_row(line: bytes) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # a UnicodeDecodeError is a ValueError
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


def divide(rows: list[tuple[Any, str]], holdout: int | str, seed: int) -> dict[str, list[Prompt]]:
    """`holdout` rows chosen at random, and the others, without copies of held-out problems."""
    count = len(rows) if isinstance(holdout, str) else holdout
    if not isinstance(holdout, str) and 0 < len(rows) <= count:
        raise SparseRLError(
            f"math: holdout {count:,} leaves nothing of {len(rows):,} usable rows; lower it, or use 'all' to evaluate."
        )
    chosen = set(random.Random(f"holdout|{seed}").sample(range(len(rows)), count))
    seen = {json.dumps(rows[i][0]) for i in chosen}
    kept = [i for i in range(len(rows)) if i not in chosen and (not seen or json.dumps(rows[i][0]) not in seen)]
    return {
        "train": [Prompt(*rows[i], index=place) for place, i in enumerate(kept)],
        "held-out": [Prompt(*rows[i], index=place) for place, i in enumerate(sorted(chosen))],
    }
