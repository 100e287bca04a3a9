"""Take settings from the records of a model's training, and say so in one line.

An option of the command line overrides the model's record, which overrides the default. A record may be a stranger's,
so code that it names is only imported with --trust.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SparseRLError, cut
from ..files import code_in, names_python_file, refuse_foreign_code, split_python_file
from ..models import Record, check_folder, find_model, read_record

if TYPE_CHECKING:
    from ..evaluation.cache import Cache

BUDGET, INTERVAL = 512, 128  # if neither the command nor a record says otherwise


@dataclass(frozen=True)
class Trained:
    """A model and the record of its training; an empty one if it has none."""

    model: str  # for a run folder, its newest checkpoint
    record: Record

    @classmethod
    def of(cls, name: str) -> Trained:
        model = find_model(name)
        check_folder(model)
        return cls(model, read_record(model) or Record())


@dataclass(frozen=True)
class CacheSettings:
    compressor: str
    budget: int
    interval: int
    options: dict[str, Any]


def cache_of(
    trained: Trained, given: Mapping[str, Any], own: Mapping[str, Any], default: str, trust: bool
) -> tuple[CacheSettings, dict[str, Any]]:
    """The cache that a model runs on, and the settings that were inherited.

    given: compressor, budget and interval from the command line, None if not given; own: the compressor's options from
    there. If the compressor is another one than in training, it inherits budget and interval, but of the options only
    protect_prompt, the slot format and the layer budgets. A dense cache, with which others are compared, inherits none.
    """
    from ..compressors import find

    record = trained.record
    if given["compressor"] is None and record.compressor is not None:
        refuse_foreign_code(Path(trained.model), {"--compressor": record.compressor}, trust)
    taken = {
        name: value
        for name in ("compressor", "budget", "interval")
        if given[name] is None and (value := getattr(record, name)) is not None
    }
    chosen = {"compressor": default, "budget": BUDGET, "interval": INTERVAL}
    chosen |= taken | {name: value for name, value in given.items() if value is not None}
    name = chosen["compressor"]
    if not find(name)[0].has_budget:
        taken = {key: value for key, value in taken.items() if key == "compressor"}
    known = options_for(name, record, chosen["budget"])
    options = {key: value for key, value in known.items() if key not in own}
    return CacheSettings(**chosen, options={**options, **own}), taken | options


def options_for(compressor: str, record: Record, budget: int | None = None) -> dict[str, Any]:
    """The options of training that this compressor inherits. budget: None: that of training"""
    known = record.options if budget is None else record.options_at(budget)
    if compressor == record.compressor:
        return dict(known)
    from ..compressors import find, parameters_of

    kind, _ = find(compressor)
    protects = "protect_prompt" in record.options and kind.evicts_response and "protect_prompt" in parameters_of(kind)
    inherits = [*(["protect_prompt"] if protects else []), *(["slots", "slots_kept"] if compressor != "dense" else [])]
    inherits += ["layer_budgets"] if kind.has_budget else []
    return {name: known[name] for name in inherits if name in known}


def caches_of(
    trained: Sequence[Trained],
    compressors: list[str] | None,
    budgets: list[int] | None,
    interval: int | None,
    own: Mapping[str, Any],
    trust: bool,
) -> tuple[list[Cache], dict[str, Any]]:
    """The caches of a comparison, and the settings that were inherited.

    Compressors and budgets are those of all models together; interval and options must be the same in all of them.
    """
    from ..evaluation.cache import caches

    sparse = [t for t in trained if t.record.compressor not in (None, "dense")]
    taken: dict[str, Any] = {}
    if compressors is None and sparse:
        for t in sparse:
            refuse_foreign_code(Path(t.model), {"--compressors": str(t.record.compressor)}, trust)
        taken["compressors"] = compressors = ["dense", *dict.fromkeys(str(t.record.compressor) for t in sparse)]
    if budgets is None and (found := {t.record.budget for t in sparse if t.record.budget is not None}):
        taken["budgets"] = budgets = sorted(found)
    if interval is None and (known := {t.model: t.record.interval for t in sparse if t.record.interval is not None}):
        taken["interval"] = interval = agreed(known, "interval", "--interval")
    compressors = compressors or ["dense", "rkv"]
    inherited: dict[str, dict[str, Any]] = {}
    for name in compressors:
        options = {t.model: options_for(name, t.record) for t in sparse}
        keys = dict.fromkeys(key for found in options.values() for key in found if key not in own)
        inherited[name] = {
            key: agreed({model: found.get(key) for model, found in options.items()}, key, f"--compressor.{key}")
            for key in keys
        }
        taken |= inherited[name]
    return caches(compressors, budgets or [BUDGET], interval or INTERVAL, own, inherited), taken


def tasks_of(trained: Sequence[Trained], bench: str | None, trust: bool) -> list[str]:
    """The benchmarks that --bench names, or the task that the models were trained on."""
    if bench is not None:
        names = [name.strip() for name in bench.split(",") if name.strip()]
        if not names:
            raise SparseRLError(f"--bench is {bench!r}; name at least one benchmark or task.")
        return names
    known = {t.model: t.record.task for t in trained if t.record.task is not None}
    if not known:
        raise SparseRLError(
            f"{', '.join(t.model for t in trained)} does not record the task it was trained on; choose one with "
            "--bench, such as --bench gsm8k."
        )
    for model, task in known.items():
        refuse_foreign_code(Path(model), {"--bench": str(task)}, trust)
    return [agreed(known, "task", "--bench")]


def of_their_task(
    trained: Sequence[Trained], bench: str, given: set[str], said: Mapping[str, Any], trust: bool
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(task options, sampling settings) that models bring along for a benchmark that is the task of their training.

    given: the task's options from the command line; said: sampling settings from there, None if not given
    """
    known = [t for t in trained if t.record.task is not None and same_task(t.record.task, bench)]
    keys = dict.fromkeys(key for t in known for key in t.record.task_options if key not in given)
    for t in known:
        inherited = {key: value for key, value in t.record.task_options.items() if key in keys}
        for key, name in code_in(inherited).items():
            refuse_foreign_code(Path(t.model), {f"--{bench}.{key.partition('.')[0]}": name}, trust)
    options = {
        key: agreed({t.model: t.record.task_options.get(key) for t in known}, f"the task's {key}", f"--{bench}.{key}")
        for key in keys
    }
    sampling = {}
    for name in [name for name, value in said.items() if known and value is None]:
        value = agreed({t.model: getattr(t.record, name) for t in known}, name, f"--{name.replace('_', '-')}")
        sampling |= {} if value is None else {name: value}
    return options, sampling


def same_task(first: str, second: str) -> bool:
    """Whether two names stand for the same task; a file may be named by any path to it."""
    if not (names_python_file(first) and names_python_file(second)):
        return first == second
    return split_python_file(first) == split_python_file(second)


def agreed(values: Mapping[str, Any], what: str, option: str) -> Any:
    """The value that all models have. All are asked the same, so if they differ, an option must choose."""
    (first, value), *others = values.items()
    for model, other in others:
        if other != value:
            raise SparseRLError(
                f"{first} was trained with {what} {value}, but {model} with {other}; choose one of them with {option}."
            )
    return value


def always(trained: Sequence[Trained], template: str | None) -> dict[str, Any]:
    """Settings that models always bring along when loaded: template (unless one is given), stop ids and logits."""
    found: dict[str, Any] = {}
    for record in (t.record for t in trained):
        if record.template is not None and template is None:
            found["template"] = record.template
        if record.stop_ids:
            found["stop_ids"] = sorted({*found.get("stop_ids", []), *record.stop_ids})
        if record.logits != "float32":
            found["logits"] = record.logits
    return found


def line_about(models: Sequence[str], taken: Iterable[tuple[str, Any]]) -> str | None:
    """One line that names the inherited settings; None if there are none."""
    parts = [f"{name.replace('_', ' ')} {_shown(value)}" for name, value in taken]
    return f"taken from {', '.join(models)}: {'; '.join(parts)}. Options override this." if parts else None


def _shown(value: Any) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return cut(text if text.isprintable() else repr(text))  # a stranger's text could steer the terminal
