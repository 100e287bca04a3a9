"""Recipes in a report: as flat settings, compared with one another, and as the command that runs them again."""

from __future__ import annotations

import functools
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ..config import RECIPES, load_recipe, make_recipe, parse_value
from ..keys import flat

_DEPTH = 4  # of lists and keys inside a value
LONGEST = 100  # entries of a list or mapping that are shown
TEXT = 10_000  # characters of a text


def plain(value: Any, depth: int = _DEPTH) -> Any:
    """A value of a YAML file as JSON can hold it: anything else becomes text, and large values are cut."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value if len(value) <= TEXT else f"{value[:TEXT]} ... ({len(value) - TEXT:,} more characters)"
    if isinstance(value, int):
        return value if abs(value) < 2**53 else str(value) if abs(value) < 2**256 else "a number too long to show"
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        if depth == 0 or len(value) > LONGEST:
            return "..."
        return {str(k): plain(v, depth - 1 if len(value) < 10 else 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, depth - 1 if len(value) < 10 else 0) for v in value[:LONGEST]] if depth else "..."
    return str(value)


def settings(recipe: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """section.key (and .key inside it) -> value; empty keys are omitted."""
    return flat({section: plain(keys) for section, keys in recipe.items()})


def differences(recipes: Sequence[Mapping[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Keys in which recipes differ, with every recipe's value: None if it lacks the key. Empty recipes do not count."""
    every = [settings(recipe) for recipe in recipes]
    known = [recipe for recipe in every if recipe]
    keys = dict.fromkeys(key for recipe in known for key in recipe)
    return [
        {"key": key, "values": [recipe.get(key) for recipe in every]}
        for key in keys
        if any((key in recipe) != (key in known[0]) or recipe.get(key) != known[0].get(key) for recipe in known[1:])
    ]


def command(recipe: Mapping[str, Mapping[str, Any]], complete: bool, folder: str) -> str:
    """The shell command that repeats a run: the nearest recipe we ship with overrides, or else the run's own recipe."""
    nearest = min(shipped().items(), key=lambda item: len(_changes(item[1], recipe))) if complete else None
    if nearest is not None:
        name, base = nearest
        changes = _changes(base, recipe)
        overrides = [(key, _yaml(value)) for key, value in changes.items()]
        if not {"model.name", "task.name"} <= changes.keys() and _makes(base, overrides, recipe):
            options = [
                part
                for key, value in overrides
                for part in ((f"--{key}={value}",) if value[:1] == "-" else (f"--{key}", value))
            ]
            return shlex.join(["sparse-rl", "train", name, *options, "--out", f"{folder}-again"])
    return shlex.join(["sparse-rl", "train", f"{folder}/recipe.yaml", "--out", f"{folder}-again"])


@functools.cache
def shipped() -> dict[str, dict[str, dict[str, Any]]]:
    """The recipes we ship, by name, with every key."""
    return {
        file.stem: load_recipe(file).to_dict()
        for file in sorted(RECIPES.glob("*.yaml"))
        if not file.stem.endswith("-warmup")
    }


def _changes(base: Mapping, recipe: Mapping) -> dict[str, Any]:
    """section.key -> value, for the keys in which a recipe differs from another."""
    return {f"{s}.{k}": v for s, keys in recipe.items() for k, v in keys.items() if k not in base[s] or base[s][k] != v}


def _makes(base: Mapping, overrides: Sequence[tuple[str, str]], recipe: Mapping) -> bool:
    """Whether these options turn `base` into exactly this recipe. No option removes a key that a task of `base` has."""
    try:
        return make_recipe(base, overrides).to_dict() == recipe
    except ValueError:  # SparseRLError: the key cannot be written as an option
        return False


def _yaml(value: Any) -> str:
    """A value as it is written in an option."""
    import yaml

    if isinstance(value, str) and _reads_as(value, value):
        return value
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf, allow_unicode=True)
    return text.removesuffix("...\n").strip()


def _reads_as(text: str, value: Any) -> bool:
    try:
        return parse_value(text) == value
    except ValueError:
        return False
