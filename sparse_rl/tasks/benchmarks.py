r"""Seven benchmarks of mathematics, read from the published files in their order, and graded like training data.

A folder holds the files, under the names below. `held_out()` is the benchmark itself.

A score under a benchmark's name is comparable only if all of its problems were asked. So a file with another number of
rows is refused, unless `subset=True` asks for a part; then the name says so: `gsm8k (100 of 1,319)`. Rows without a
reference answer are omitted and counted in `skipped`: gaokao2023en has two.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ..errors import SparseRLError
from .base import register
from .math import Math, Problem, gold_of, prompt_of
from .problem import Prompt
from .published import command_for

FOLDER = "SPARSE_RL_DATA"  # the environment variable that names the folder if the user names none


@dataclass(frozen=True)
class Source:
    """A benchmark's file, the fields of its rows, and its published protocol."""

    name: str
    file: str
    rows: int
    question: str
    answer: str
    idea: str
    answer_in_box: bool = False
    samples: int = 1  # completions of each problem
    new_tokens: int = 8192


SOURCES = (
    Source("gsm8k", "gsm8k.jsonl", 1319, "question", "answer", "grade-school word problems; whole numbers after ####"),
    Source("math500", "math500.jsonl", 500, "problem", "answer", "500 problems of the MATH test set; LaTeX"),
    Source(
        "gaokao2023en",
        "gaokao2023en.jsonl",
        385,
        "question",
        "answer",
        "Chinese and American exams of 2023; LaTeX, choices, units",
    ),
    Source(
        "minerva",
        "minerva_math.jsonl",
        272,
        "problem",
        "solution",
        "university science; the box of a solution",
        answer_in_box=True,
    ),
    Source(
        "olympiadbench",
        "olympiadbench.jsonl",
        675,
        "question",
        "final_answer",
        "olympiad problems; lists, tuples, intervals",
    ),
    Source(
        "aime24",
        "aime24.jsonl",
        30,
        "problem",
        "answer",
        "AIME 2024; 0 to 999, 32 completions each",
        samples=32,
        new_tokens=16384,
    ),
    Source(
        "amc23",
        "amc23.jsonl",
        40,
        "problem",
        "answer",
        "AMC 2023; numbers, 32 completions each",
        samples=32,
        new_tokens=16384,
    ),
)


class Benchmark(Math):
    source: ClassVar[Source]

    def __init__(self, folder: str | os.PathLike | None = None, template: str | None = None, subset: bool = False):
        path = find_file(self.source, folder)
        super().__init__(path, template=template)
        self.template = template or "plain"
        count, published = len(self) + sum(self.skipped.values()), self.source.rows
        if count != published and not (subset and count < published):
            raise SparseRLError(
                f"{path} has {count:,} rows, but {self.name} has {published:,}; use the published file, or set "
                "subset=True for a part of it."
            )
        if count != published:
            self.name = f"{self.name} ({count:,} of {published:,})"

    def problem(self, row: dict) -> Problem:
        question = prompt_of(row, self.source.question)
        gold = gold_of(row, self.source.answer, self.source.answer_in_box)
        if row.get("context"):
            question = f"{row['context']}\n{question}"
        percent = r"\%" if row.get("unit") == "%" else ""  # other units do not change the number
        return Problem(question, gold + percent)

    def solution(self, prompt: Prompt) -> str:
        raise SparseRLError(
            f"{self.name} is a benchmark, which is only for evaluation; warm up on the task math with another file."
        )

    def sample(self, start: int, count: int) -> list[Prompt]:
        return [self[i % len(self)] for i in range(start, start + count)]

    def held_out(self) -> Benchmark:
        return self

    def spec(self) -> tuple[str, dict]:
        return "math", {"files": None}  # one set of grading processes for all benchmarks


def find_file(source: Source, folder: str | os.PathLike | None) -> Path:
    """The benchmark's file in this folder, or else in the environment variable's; or in the eval/ inside it."""
    given = folder or os.environ.get(FOLDER)
    if not given:
        raise SparseRLError(
            f"{source.name} is read from {source.file}; name its folder with --data FOLDER on the command line, "
            f"task.folder in a recipe or the environment variable {FOLDER}."
        )
    paths = [Path(given).expanduser() / place / source.file for place in ("", "eval")]
    for path in paths:
        if path.is_file():
            return path
    made = command_for(paths[1])
    raise SparseRLError(
        f"{source.name}: there is no file {paths[0]}, nor {paths[1]}; put {source.file} there"
        f"{f' (`{made}` does)' if made else ''}, or name another folder."
    )


BENCHMARKS: dict[str, type[Benchmark]] = {
    source.name: register(
        type(source.name, (Benchmark,), {"name": source.name, "source": source, "__doc__": source.idea})
    )
    for source in SOURCES
}
