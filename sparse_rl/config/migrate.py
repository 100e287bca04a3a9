"""Translate recipes of earlier versions, so that their runs can be resumed; elsewhere an old name gets a sentence.

RENAMED_KEYS      old key -> new key
RENAMED_VALUES    key -> {old value: new value}
REMOVED_KEYS      old key -> (its default, what replaces it)
ADDED_KEYS        new key -> (the value that does what earlier versions did, why); a run folder spells out every key
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SparseRLError

RENAMED_KEYS = {"student.late": "student.freeze_teacher"}
RENAMED_VALUES = {
    "learn.distill": {
        "a": "dense-to-shadow",
        "b": "shadow-to-dense-forward",
        "c": "shadow-to-dense-reverse",
    }
}
REMOVED_KEYS = {
    "learn.shuffle_advantages": (False, "benchmarks/learning_cpu.py --methods shuffled trains with shuffled advantages")
}
ADDED_KEYS = {
    "model.logits": ("model", "earlier versions rounded logits to the dtype of the model"),
    "learn.rescore": ("always", "earlier versions scored every trajectory"),
    "learn.packing": ("never", "earlier versions fed the learner one row per trajectory"),
    "optimizer.choice_scale": (1.0, "earlier versions let the head that chooses folds learn with optimizer.lr"),
    "learn.replay_routing": (False, "earlier versions let the learner choose experts anew"),
}


def migrate(data: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The recipe of a run folder as this version writes it, and a sentence for every key that was changed.

    Renamed keys and values are translated; a removed key is dropped if it has its default, and refused otherwise. All
    else in the recipe stays as it is, mistakes included.
    """
    new = {name: dict(section) if isinstance(section, Mapping) else section for name, section in data.items()}
    notes = []
    for old_key, new_key in RENAMED_KEYS.items():
        if _has(new, old_key):
            value = _pop(new, old_key)
            section, _, name = new_key.partition(".")
            new.setdefault(section, {})[name] = value
            notes.append(f"{old_key} is now {new_key} (here {_yaml(value)}).")
    for key, names in RENAMED_VALUES.items():
        if _has(new, key) and _get(new, key) in names:
            section, _, name = key.partition(".")
            old_value = _get(new, key)
            new[section][name] = names[old_value]
            notes.append(f"{key}: {old_value} is now {key}: {names[old_value]}.")
    for key, (default, instead) in REMOVED_KEYS.items():
        if _has(new, key):
            value = _pop(new, key)
            if value != default:
                raise SparseRLError(
                    f"the recipe says {key}: {_yaml(value)}, but this version has no such key ({instead}); continue "
                    "with the version that wrote it, or remove the key."
                )
            notes.append(f"{key} was dropped: there is no such key any more, and {_yaml(value)} was its default.")
    return new, notes


def missing_keys(data: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """The ADDED_KEYS that the recipe of a run folder lacks, with the value that resuming it needs and the reason."""
    return {key: found for key, found in ADDED_KEYS.items() if not _has(data, key)}


def earlier_values(data: Mapping[str, Any]) -> dict[str, Any]:
    """The values of ADDED_KEYS that a run of an earlier version keeps, also once a resume has written them down."""
    return {key: old for key, (old, _) in ADDED_KEYS.items() if not _has(data, key) or _get(data, key) == old}


def refuse_old_names(sections: Mapping[str, Any]) -> None:
    """Refuse a key or value of an earlier version, and say what it is called now."""
    for old_key, new_key in RENAMED_KEYS.items():
        if _has(sections, old_key):
            raise SparseRLError(
                f"{old_key} is now called {new_key}; write {new_key}: {_yaml(_get(sections, old_key))}."
            )
    for key, names in RENAMED_VALUES.items():
        if _has(sections, key) and (value := _get(sections, key)) in names:
            raise SparseRLError(f"{key} is {value!r}, which is now called {names[value]}; write {key}: {names[value]}.")
    for key, (_, instead) in REMOVED_KEYS.items():
        if _has(sections, key):
            raise SparseRLError(f"the key {key} does not exist any more ({instead}); remove it from the recipe.")


def _has(data: Mapping[str, Any], key: str) -> bool:
    section, _, name = key.partition(".")
    return isinstance(data.get(section), Mapping) and name in data[section]


def _get(data: Mapping[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    value = data[section][name]
    return value if isinstance(value, (str, bool, int, float)) else repr(value)


def _pop(data: dict[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return data[section].pop(name)


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
