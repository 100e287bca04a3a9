"""`sparse-rl list`: the names that commands and recipes accept, each with one line about it."""

from __future__ import annotations

import itertools
import re
from typing import Annotated

import typer

from ..errors import SparseRLError, nearest


def compressors() -> list[tuple[str, ...]]:
    from ..compressors import describe

    return describe()


def tasks() -> list[tuple[str, ...]]:
    from ..tasks import describe

    return describe()


def templates() -> list[tuple[str, ...]]:
    from ..tasks.templates import TEMPLATES

    return [(name, template.idea) for name, template in TEMPLATES.items()]


def presets() -> list[tuple[str, ...]]:
    from dataclasses import fields

    from ..learn.method import METHODS, Method

    def parts(method: Method) -> str:
        values = {field: getattr(method.correction, field.name) for field in fields(method.correction)}
        found = [f"{field.name} {value}" for field, value in values.items() if value != field.default]
        found += ["the learner replays what the sampler's cache held"] if method.view == "shadow" else []
        found += [f"distillation {method.distill}"] if method.distill else []
        return ", ".join(found) or "old log-probs recomputed, nothing corrected"

    return [(name, parts(method)) for name, method in METHODS.items()]


def algorithms() -> list[tuple[str, ...]]:
    from ..learn.objective import ALGORITHMS, RELATIVES, settings_of

    relatives = [(name, f"{idea}: grpo with {settings_of(name)}") for name, (idea, _) in RELATIVES.items()]
    return [*ALGORITHMS.items(), *relatives]


def recipes() -> list[tuple[str, ...]]:
    from ..config import RECIPES

    return [(file.stem, first_sentence(file.read_text(encoding="utf-8"))) for file in sorted(RECIPES.glob("*.yaml"))]


def first_sentence(recipe: str) -> str:
    """The first sentence of a recipe's comment, over as many lines as it takes; commands are indented further."""
    comment = itertools.takewhile(lambda line: line.startswith("# ") and line[2] != " ", recipe.splitlines())
    return re.split(r"(?<=\.)\s", " ".join(line[2:] for line in comment))[0]


def keys() -> list[tuple[str, ...]]:
    from ..config import table_of_keys

    return table_of_keys()


LISTS = {
    "compressors": compressors,
    "tasks": tasks,
    "templates": templates,
    "presets": presets,
    "methods": presets,
    "algorithms": algorithms,
    "recipes": recipes,
    "keys": keys,
}

ADVICE = {  # conclusions from the tables of docs/methods.md
    "algorithms": "Start with grpo: neither online-dpo nor ppo was better in our tables, and both have more settings. "
    "online-dpo only needs rewards that can be compared; ppo can learn from a single completion per prompt.",
    "methods": "Use shadow for a model that will run on its compressed cache. Use sparse-rl for a model that will run "
    "on a dense cache, with a budget at which it rejects little. none and naive show what corrections are for.",
}


def list_(
    what: Annotated[
        str | None, typer.Argument(help="One of algorithms, methods, compressors, tasks, templates, recipes, keys.")
    ] = None,
) -> None:
    """List the names that commands and recipes accept."""
    known = [name for name in LISTS if name != "presets"]  # the old name of methods
    if what is None:
        raise SparseRLError(f"say what to list: sparse-rl list {' | '.join(known)}.")
    if what not in LISTS:
        raise SparseRLError(f"there is no list of {what!r}; {nearest(what, known)}")
    rows = LISTS[what]()
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    for *cells, last in rows:
        typer.echo("  ".join([*(f"{cell:<{width}}" for cell, width in zip(cells, widths)), last]))
    advice = ADVICE.get("methods" if what == "presets" else what)
    if advice is not None:  # on stderr, because scripts may read the names
        typer.echo(f"sparse-rl: {advice}", err=True)
