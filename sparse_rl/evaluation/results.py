"""What an evaluation writes down, so that one that was killed goes on and one that is done can be read.

    evaluation.json      what was asked, and of whom: model, cache, sampling, seed
    completions.jsonl    as they finish, not graded yet
    items.jsonl          graded: prompt, completion, extracted answer, verdict, tokens, KV entries
    calls.jsonl          of every engine run: tokens, seconds, bytes

A completion is in one of the two files from the moment it is finished, and is never sampled again. More samples, more problems and other
benchmarks may be asked for later; another model, cache, way of sampling or seed needs another folder. One evaluation at a time has it.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import SparseRLError
from ..files import append_line, read_lines, write_text, writing
from ..keys import flat
from ..tasks import Grade

Key = tuple[str, int, int]  # benchmark, problem, sample


@dataclass(frozen=True)
class Completion:
    """What was sampled. Entries are of the KV cache, see `records.entries`."""

    bench: str
    index: int  # the problem's place in the benchmark
    sample: int
    prompt: str
    text: str
    finish: str  # stop or length
    prompt_tokens: int
    tokens: int  # sampled
    loop: bool  # whether it ends by repeating itself
    entries: float  # mean
    peak_entries: float
    last_entries: float

    @property
    def key(self) -> Key:
        return self.bench, self.index, self.sample


@dataclass(frozen=True)
class Item(Completion):
    """A completion and what became of it."""

    gold: Any
    answer: str | None  # extracted from the text
    verdict: str
    reward: float

    @property
    def right(self) -> bool:
        return self.reward >= 1


class Results:
    """A folder of results. `question` is what all of it must have in common, and `benches`, whose own settings may be added to."""

    def __init__(self, folder: Path, question: Mapping[str, Any]):
        self.folder = folder
        if folder.exists() and not folder.is_dir():
            raise SparseRLError(f"{folder} is a file; results need a folder: choose another with --out.")
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SparseRLError(
                f"another evaluation is writing to {folder}; wait for it, or choose another folder with --out."
            ) from None
        for name in ("completions", "items", "calls"):
            _drop_torn_line(folder / f"{name}.jsonl")
        self.items: dict[Key, Item] = {item.key: item for item in read(Item, folder / "items.jsonl")}
        found = read(Completion, folder / "completions.jsonl")
        self.ungraded: dict[Key, Completion] = {c.key: c for c in found if c.key not in self.items}
        self.prompts = {(c.bench, c.index): c.prompt for c in [*self.items.values(), *self.ungraded.values()]}
        self._settle(json.loads(json.dumps(question)))

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def has(self, key: Key) -> bool:
        return key in self.items or key in self.ungraded

    def check_prompt(self, bench: str, index: int, prompt: str) -> None:
        """Whether what is known of a problem was sampled for this prompt."""
        known = self.prompts.setdefault((bench, index), prompt)
        if known != prompt:
            raise SparseRLError(
                f"{self.folder} holds completions of another problem {index} of {bench} ({known[-60:]!r}, not {prompt[-60:]!r}); "
                "choose another folder with --out."
            )

    def add(self, completion: Completion) -> None:
        append_line(self.folder / "completions.jsonl", asdict(completion))
        self.ungraded[completion.key] = completion

    def reopen(self, key: Key) -> None:
        """An item whose reference answer is another now has to be graded again."""
        names = Completion.__dataclass_fields__
        self.ungraded[key] = Completion(
            **{name: value for name, value in vars(self.items.pop(key)).items() if name in names}
        )

    def grade(self, golds: Mapping[Key, Any], answers: Mapping[Key, str | None], grades: Mapping[Key, Grade]) -> None:
        """Completions become items, all at once."""
        for key, grade in grades.items():
            fields = asdict(self.ungraded.pop(key))
            self.items[key] = Item(
                **fields, gold=golds[key], answer=answers[key], verdict=grade.verdict, reward=grade.reward
            )
        lines = [json.dumps(asdict(self.items[key]), ensure_ascii=False) for key in sorted(self.items)]
        write_text(self.folder / "items.jsonl", "".join(line + "\n" for line in lines))
        if not self.ungraded:
            (self.folder / "completions.jsonl").unlink(missing_ok=True)

    def called(self, **numbers: float) -> None:
        append_line(self.folder / "calls.jsonl", numbers)

    def calls(self) -> list[dict]:
        return read_lines(self.folder / "calls.jsonl")

    def _settle(self, question: dict[str, Any]) -> None:
        """Take the folder for this question, or refuse where it holds another."""
        path, nothing = self.folder / "evaluation.json", {**question, "benches": {}}
        try:
            known = (
                json.loads(path.read_text()) if path.exists() and self.prompts else nothing
            )  # without a completion nothing is settled
            if not isinstance(known["benches"], dict):
                raise TypeError("its benches are no object")
        except (ValueError, KeyError, TypeError) as error:
            raise SparseRLError(
                f"{path} cannot be read ({error}); remove the folder, or choose another with --out."
            ) from error
        there, asked = flat({**known, "benches": {}}), flat({**question, "benches": {}})
        for name, settings in question["benches"].items():
            if name in known["benches"]:
                there |= flat({name: known["benches"][name]})
                asked |= flat({name: settings})
        for key in [*asked, *there]:
            if there.get(key) != asked.get(key):
                was, now = there.get(key), asked.get(key)
                raise SparseRLError(
                    f"{self.folder} holds an evaluation with {key} = {was}, not {now}; choose another folder with --out."
                )
        write_text(
            path, json.dumps({**question, "benches": {**known["benches"], **question["benches"]}}, indent=1) + "\n"
        )


def read(kind: type[Completion], path: Path) -> list:
    try:
        return [kind(**line) for line in read_lines(path)]
    except (TypeError, UnicodeDecodeError) as error:
        raise SparseRLError(
            f"{path} cannot be read ({error}); remove the folder, or choose another with --out."
        ) from error


def _drop_torn_line(path: Path) -> None:
    """What a kill left of a line that was being written: without its end, the next one would be lost with it."""
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(text.rfind(b"\n") + 1)


def shares(items: Sequence[Item]) -> dict[tuple[str, int], float]:
    """Of every problem, the share of its completions that are right."""
    right: dict[tuple[str, int], list[bool]] = {}
    for item in items:
        right.setdefault((item.bench, item.index), []).append(item.right)
    return {problem: sum(found) / len(found) for problem, found in sorted(right.items())}


def tokens_saved(items: Sequence[Item]) -> float:
    """1 - entries in use at the end / tokens: `records.kv_tokens_saved`, of items."""
    return 1 - sum(item.last_entries for item in items) / sum(item.prompt_tokens + item.tokens for item in items)
