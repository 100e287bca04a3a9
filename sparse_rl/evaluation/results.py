"""The folder that an evaluation writes, in which an interrupted one continues.

    evaluation.json      what was evaluated: model, cache, sampling, seed
    completions.jsonl    finished completions that are not graded yet
    items.jsonl          graded completions: prompt, text, extracted answer, verdict, tokens, KV entries; for
                         conversations also their messages, and the graded text as text
    calls.jsonl          tokens, seconds and bytes of every engine run

A finished completion is in one of the two files and is never sampled again. More samples, more problems and other
benchmarks may be added later; another model, cache, sampling setting or seed needs another folder. Only one evaluation
at a time may use a folder.
"""

from __future__ import annotations

import fcntl
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SparseRLError
from ..files import append_line, read_lines, write_text, writing
from ..keys import flat
from ..tasks import Grade

Key = tuple[str, int, int]  # benchmark, problem, sample


@dataclass(frozen=True)
class Completion:
    """A sampled completion. Entries are those of the KV cache; see `records.entries`."""

    bench: str
    index: int  # of the problem in the benchmark
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
    turns: int = field(default=1, kw_only=True)  # of the model; the following fields are only for conversations
    given: int = field(default=0, kw_only=True)  # tokens of replies
    fault: str | None = field(default=None, kw_only=True)  # why a reply is missing: `timeout` or `error`
    messages: list[dict[str, Any]] = field(default_factory=list, kw_only=True)  # all messages

    @property
    def key(self) -> Key:
        return self.bench, self.index, self.sample


@dataclass(frozen=True)
class Item(Completion):
    """A graded completion."""

    gold: Any
    answer: str | None  # extracted from the text
    verdict: str
    reward: float
    rewards: dict[str, float] = field(default_factory=dict)  # its parts, by name

    @property
    def right(self) -> bool:
        return self.verdict == "right"


class Results:
    """A folder of results for one `question`, of which only the `benches` may grow."""

    def __init__(self, folder: Path, question: Mapping[str, Any]):
        self.folder = folder
        if folder.exists() and not folder.is_dir():
            raise SparseRLError(f"{folder} is a file; results need a folder: choose another path with --out.")
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
        self._claim(json.loads(json.dumps(question)))

    def close(self) -> None:
        self._lock.close()

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def has(self, key: Key) -> bool:
        return key in self.items or key in self.ungraded

    def check_prompt(self, bench: str, index: int, prompt: str) -> None:
        """Refuse a folder whose completions of this problem were sampled for another prompt."""
        known = self.prompts.setdefault((bench, index), prompt)
        if known != prompt:
            raise SparseRLError(
                f"{self.folder} holds completions of another problem {index} of {bench} ({known[-60:]!r}, not "
                f"{prompt[-60:]!r}); choose another folder with --out."
            )

    def add(self, completion: Completion) -> None:
        append_line(self.folder / "completions.jsonl", written(completion))
        self.ungraded[completion.key] = completion

    def reopen(self, key: Key) -> None:
        """Let an item be graded again, because its reference answer changed."""
        names = Completion.__dataclass_fields__
        self.ungraded[key] = Completion(
            **{name: value for name, value in vars(self.items.pop(key)).items() if name in names}
        )

    def grade(self, golds: Mapping[Key, Any], answers: Mapping[Key, str | None], grades: Mapping[Key, Grade]) -> None:
        """Turn completions into items, all at once."""
        for key, grade in grades.items():
            fields = asdict(self.ungraded.pop(key))
            self.items[key] = Item(
                **fields,
                gold=golds[key],
                answer=answers[key],
                verdict=grade.verdict,
                reward=grade.reward,
                rewards=dict(grade.parts),
            )
        lines = [json.dumps(written(self.items[key]), ensure_ascii=False) for key in sorted(self.items)]
        write_text(self.folder / "items.jsonl", "".join(line + "\n" for line in lines))
        if not self.ungraded:
            (self.folder / "completions.jsonl").unlink(missing_ok=True)

    def add_call(self, **numbers: float) -> None:
        append_line(self.folder / "calls.jsonl", numbers)

    def calls(self) -> list[dict]:
        return read_lines(self.folder / "calls.jsonl")

    def _claim(self, question: dict[str, Any]) -> None:
        """Use the folder for this question, or refuse a folder that holds another one."""
        path, known = self.folder / "evaluation.json", {**question, "benches": {}}
        try:
            if path.exists() and self.prompts:  # a folder without completions may be used for any question
                known = json.loads(path.read_text())
            if not isinstance(known["benches"], dict):
                raise TypeError("its benches are not an object")
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
                    f"{self.folder} holds an evaluation with {key} = {was}, not {now}; choose another folder "
                    "with --out."
                )
        whole = {**question, "benches": {**known["benches"], **question["benches"]}}
        write_text(path, json.dumps(whole, indent=1) + "\n")


def written(found: Completion) -> dict[str, Any]:
    """A completion or an item as a line of its file, without fields that it does not use: rewards, conversation."""
    usual = {"turns": 1, "given": 0, "fault": None, "messages": [], "rewards": {}}
    return {name: value for name, value in asdict(found).items() if name not in usual or value != usual[name]}


def read(kind: type[Completion], path: Path) -> list:
    try:
        return [kind(**line) for line in read_lines(path)]
    except (TypeError, UnicodeDecodeError) as error:
        raise SparseRLError(
            f"{path} cannot be read ({error}); remove the folder, or choose another with --out."
        ) from error


def _drop_torn_line(path: Path) -> None:
    """Remove a last line that a kill cut off; otherwise the next line would be appended to it and lost."""
    if path.exists() and (text := path.read_bytes()) and not text.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(text.rfind(b"\n") + 1)


def shares(items: Sequence[Item]) -> dict[tuple[str, int], float]:
    """For every problem, the share of its completions that are right."""
    right: dict[tuple[str, int], list[bool]] = {}
    for item in items:
        right.setdefault((item.bench, item.index), []).append(item.right)
    return {problem: sum(found) / len(found) for problem, found in sorted(right.items())}


def mean_rewards(items: Sequence[Item]) -> dict[tuple[str, int], float]:
    """For every problem, the mean reward of its completions."""
    found: dict[tuple[str, int], list[float]] = {}
    for item in items:
        found.setdefault((item.bench, item.index), []).append(item.reward)
    return {problem: statistics.fmean(rewards) for problem, rewards in sorted(found.items())}


def tokens_saved(items: Sequence[Item]) -> float:
    """1 - entries in use at the end / tokens: `records.kv_tokens_saved` for items."""
    tokens = sum(item.prompt_tokens + item.tokens + item.given for item in items)
    return 1 - sum(item.last_entries for item in items) / tokens
