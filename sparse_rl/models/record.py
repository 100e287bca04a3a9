"""The record of a model's training: its cache, its task and its stop tokens, so that it can later be run the same way.

    config.json       {..., "sparse_rl": {"compressor": "rkv", "budget": 512, ...}}
    sparse_rl.json    the same beside adapters, which have no config.json

The record is part of the model's config, so `from_pretrained` and `save_pretrained` keep it, and so does merging.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import SparseRLError
from ..files import BEST, find_checkpoints, tasks_in, with_file, with_tasks
from .folder import read_object
from .logits import check_logits
from .names import file_on_hub
from .quantize import check_quantize

FILE = "sparse_rl.json"
_KEY, _OLD_KEY = "sparse_rl", "sparse_rl_template"  # earlier versions kept the template alone
_KINDS = {  # type of a field -> (types that JSON may give it, in words)
    "str": ((str,), "text"),
    "str | None": ((str, type(None)), "text"),
    "int | None": ((int, type(None)), "a whole number"),
    "float | None": ((int, float, type(None)), "a number"),
    "dict[str, Any]": ((dict,), "keys"),
    "list[int]": ((list,), "a list of token ids"),
}

_LONGEST = 100_000  # characters of a text


@dataclass(frozen=True)
class Record:
    """What a checkpoint was trained for. None: not known, or the training did not have it."""

    start: str | None = None  # the starting model, as the recipe names it
    start_seed: int | None = None  # seed of its weights, if they were random
    method: str | None = None
    view: str | None = None
    step: int | None = None
    compressor: str | None = None  # None: no cache was set, as in a warm-up
    options: dict[str, Any] = field(default_factory=dict)  # those of the compressor
    budget: int | None = None  # at this step
    interval: int | None = None
    task: str | None = None
    task_options: dict[str, Any] = field(default_factory=dict)  # options of its held-out prompts
    template: str | None = None
    stop_ids: list[int] = field(default_factory=list)  # all tokens that end a response
    max_new_tokens: int | None = None
    temperature: float | None = None  # of evaluations
    max_turns: int | None = None  # of its conversations, if the task replies
    max_given_tokens: int | None = None  # of a reply
    logits: str = "float32"
    quantize: str | None = None  # of the base, where adapters were trained

    def options_at(self, budget: int) -> dict[str, Any]:
        """The compressor's options under this budget; layer_budgets only apply to the budget of training."""
        return {k: v for k, v in self.options.items() if k != "layer_budgets" or budget == self.budget}

    @property
    def task_names(self) -> list[str]:
        """The task and, if it is a mixture, the tasks in it."""
        return [name for name in (self.task, *tasks_in(self.task_options)) if name is not None]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as JSON holds them."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    @classmethod
    def from_dict(cls, values: Any, where: str) -> Record:
        """A record that any version has written; unknown keys are ignored.

        `where`: the file, for error messages; its content may be a stranger's
        """
        if not isinstance(values, Mapping):
            raise SparseRLError(f"the sparse_rl record of {where} is {values!r:.80}; it must hold keys.")
        kinds = {key.name: _KINDS[str(key.type)] for key in dataclasses.fields(cls)}
        known = {name: value for name, value in values.items() if name in kinds}
        for name, value in known.items():
            types, words = kinds[name]
            ids = value if types == (list,) and type(value) is list else ()
            if type(value) not in types or not all(type(i) is int and 0 <= i < 2**31 for i in ids):
                raise SparseRLError(
                    f"the sparse_rl record of {where} has {name} = {value!r:.80}, which is not {words}; correct it, or "
                    "remove the record."
                )
            if isinstance(value, str) and len(value) > _LONGEST:
                raise SparseRLError(
                    f"the sparse_rl record of {where} has {name} of {len(value):,} characters; at most {_LONGEST:,} "
                    "are read: correct it, or remove the record."
                )
        record = cls(**known)
        check_logits(record.logits, f"logits in the sparse_rl record of {where}")
        check_quantize(record.quantize, f"quantize in the sparse_rl record of {where}")
        return record


def set_record(model, record: Record | None) -> None:
    """Give a model a record, in place of any it has; `save_pretrained` writes it."""
    for key in (_KEY, _OLD_KEY):
        if hasattr(model.config, key):
            delattr(model.config, key)
    if record is not None:
        setattr(model.config, _KEY, record.to_dict())


def record_of(model) -> Record | None:
    """The record of a loaded model; None if it has none."""
    name = getattr(model.config, "_name_or_path", "") or "this model"
    return _from_config({key: getattr(model.config, key, None) for key in (_KEY, _OLD_KEY)}, name)


def read_record(source: str) -> Record | None:
    """The record of a folder or hub id, before its weights are loaded; None if it has none.

    A Python file that it names without a folder is one beside the model.
    """
    here = Path(source).exists()
    # The hub is first asked for the file that every model has.
    for name in (FILE, "config.json") if here else ("config.json", FILE):
        path = _find(source, name)
        if path is None or not path.is_file():
            continue
        values = read_object(path)
        record = Record.from_dict(values, str(path)) if name == FILE else _from_config(values, str(path))
        return None if record is None else _with_files_beside(source, record)
    return None


def find_model(name: str) -> str:
    """The model that a name stands for: a run folder for its newest checkpoint, a link for what it points to."""
    path = Path(name)
    if path.is_symlink() and path.name == BEST:
        return str(path.parent / path.readlink())
    if not (path / "checkpoints").is_dir() or (path / "config.json").exists():
        return name
    found = find_checkpoints(path / "checkpoints")
    if not found:
        raise SparseRLError(
            f"{name} is a run without a checkpoint; wait for its first one, or continue it with --resume."
        )
    return str(found[-1][1])


def _from_config(values: Mapping[str, Any], where: str) -> Record | None:
    if values.get(_KEY) is not None:
        return Record.from_dict(values[_KEY], where)
    old = values.get(_OLD_KEY)
    return None if old is None else Record.from_dict({"template": old}, where)


def _with_files_beside(source: str, record: Record) -> Record:
    """The record with the present places of Python files that were exported with the model."""

    def place(path: Path) -> str | Path:
        here = _find(source, path.name)
        return path.name if here is None or not here.is_file() else Path(os.path.abspath(here))

    def beside(name: str | None) -> str | None:
        return with_file(name, place) if isinstance(name, str) and "/" not in name else name

    return dataclasses.replace(
        record,
        task=beside(record.task),
        task_options=with_tasks(record.task_options, lambda entry: {**entry, "name": beside(entry.get("name"))}),
        compressor=beside(record.compressor),
    )


def _find(source: str, name: str) -> Path | None:
    """A file of a folder or of a model on the hub; None if it is not there."""
    if Path(source).exists():
        return Path(source) / name if Path(source).is_dir() else None
    if source.count("/") != 1:  # tiny, random:..., a path that does not exist
        return None
    return file_on_hub(source, name)
