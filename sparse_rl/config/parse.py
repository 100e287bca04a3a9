"""Read recipes: YAML files, run folders and recipes by name, with overrides from the command line.

    sparse-rl train recipe.yaml --rollout.budget 44 --lr 1e-4

The last part of a key is enough if only one section has it. An unknown key is refused, with the nearest known one. If
the command line names another task or compressor than the file does, options of the file's that this one lacks are left
out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SparseRLError, nearest, shown
from ..files import refuse_foreign_code
from .migrate import REMOVED_KEYS, RENAMED_KEYS, migrate, refuse_old_names
from .read import read_yaml, read_yaml_file
from .recipe import RECIPES, SECTIONS, Recipe
from .values import names_of, plain, settings_of, types_of

Takes = Callable[[str, str, str], bool]  # (task or rollout, name of a task or compressor, option): has it the option?


def load_recipe(
    path: str | Path,
    overrides: Sequence[tuple[str, str]] = (),
    takes: Takes | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Recipe:
    """A recipe from a YAML file or a run folder, or one of the package's recipes by name.

    `overrides` are pairs of a dotted key and its value as text. takes: decides which options are left out; None: none
    """
    path = recipe_file(path)
    data = read_yaml_file(path)
    if _in_run_folder(path) and isinstance(data, Mapping):
        data, _ = migrate(data)  # train/run.py says what was translated
    if takes is not None and isinstance(data, Mapping):
        data, left_out = fitting(data, overrides, takes)
        for line in left_out:
            say(line)
    return make_recipe(data or {}, overrides, where=str(path))


def fitting(data: Mapping, overrides: Sequence[tuple[str, str]], takes: Takes) -> tuple[dict, list[str]]:
    """The content of a file without the options that its task or compressor has and that of the command line lacks, and
    sentences that name these. What neither has is a mistake, and stays.
    """
    named = {(section, *path): parse_value(value) for section, path, value in _found(overrides)}
    kept, sentences = dict(data), []
    for section, key, inner in (("task", "name", None), ("rollout", "compressor", "compressor_options")):
        content, new = data.get(section), named.get((section, key))
        options = content.get(inner, {}) if inner and isinstance(content, Mapping) else content
        if not isinstance(content, Mapping) or not isinstance(options, Mapping):
            continue
        old = content.get(key, vars(SECTIONS[section]).get(key))  # else the default
        if new in (None, old):
            continue
        own = [] if inner else names_of(SECTIONS[section])
        fits = {name: takes(section, str(new), str(name)) for name in options if name not in own}
        lost = [name for name, fit in fits.items() if not fit and takes(section, str(old), str(name))]
        if lost:
            left = {name: value for name, value in options.items() if name not in lost}
            kept[section] = {**content, inner: left} if inner else left
            sentences.append(f"{new} has no {' and no '.join(map(str, lost))}: what the recipe sets there is left out.")
    return kept, sentences


def _found(overrides: Sequence[tuple[str, str]]) -> list[tuple[str, list[str], str]]:
    return [(*_find(dotted), value) for dotted, value in overrides]


def load_recipe_to_run(
    path: str | Path,
    overrides: Sequence[tuple[str, str]],
    trust: bool,
    takes: Takes | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Recipe:
    """`load_recipe`, for a command that runs the code that a recipe names.

    A recipe is the user's own, but a run folder may come from someone else: a file or package that it names only runs
    with `trust` (--trust), or if an override names it.
    """
    recipe = load_recipe(path, overrides, takes, say)
    own_words = [_find(dotted) for dotted, _ in overrides]
    if Path(path).is_dir() or _in_run_folder(recipe_file(path)):
        named = {key: name for key, name in recipe.may_name_code().items() if not _is_in(key, own_words)}
        refuse_foreign_code(Path(path), {f"--{key}": name for key, name in named.items()}, trust)
    return recipe


def _is_in(key: str, own_words: Sequence[tuple[str, list[str]]]) -> bool:
    """Whether an override set a key or something that contains it: --task.tasks also sets task.tasks.0.name."""
    section, path = _find(key)
    return any(section == name and path[: len(given)] == given for name, given in own_words)


def recipe_file(path: str | Path) -> Path:
    """The YAML file behind a path, a run folder or the name of one of the package's recipes."""
    path = Path(path)
    shipped = {file.stem: file for file in RECIPES.glob("*.yaml")}
    if str(path) in shipped and not path.is_file() and not (path / "recipe.yaml").exists():
        path = shipped[str(path)]
    if path.is_dir():
        path = path / "recipe.yaml"
    if path.suffix == ".py":
        raise SparseRLError(
            f"{path} is Python, but a recipe is YAML; name the file in a recipe, as `task: {{name: {path.name}}}`."
        )
    if not path.is_file():
        known = nearest(path.stem, sorted(shipped), listed_by="sparse-rl list recipes")
        raise SparseRLError(f"there is no recipe, file or folder {path}; {known}")
    return path


def _in_run_folder(path: Path) -> bool:
    beside = ("metrics.jsonl", ".lock", "checkpoints")
    return path.name == "recipe.yaml" and any((path.parent / name).exists() for name in beside)


def make_recipe(data: Mapping, overrides: Sequence[tuple[str, str]] = (), where: str = "the recipe") -> Recipe:
    """A recipe from the content of a YAML file; `where` names its source in error messages."""
    if not isinstance(data, Mapping):
        raise SparseRLError(
            f"{where} holds {type(data).__name__}; a recipe is sections with keys, "
            "such as `model: {name: tiny-sums}`."
        )
    sections: dict[str, dict] = {}
    for name, content in data.items():
        if name not in SECTIONS:
            raise SparseRLError(f"{where} has a section {shown(name)}; {nearest(str(name), SECTIONS)}")
        if not isinstance(content, Mapping):
            example = f"{{{names_of(SECTIONS[name])[0]}: ...}}"
            raise SparseRLError(
                f"{where}: section {name!r} holds {shown(content)}; it must hold keys, such as {example}."
            )
        sections[name] = dict(content)
    for dotted, value in overrides:
        section, path = _find(dotted)
        target = sections.setdefault(section, {})
        for part in path[:-1]:
            inner = target.get(part) or {}
            holds_keys = section == "task" or inner or types_of(SECTIONS[section]).get(part) is dict
            if not (isinstance(inner, Mapping) and holds_keys):
                raise SparseRLError(
                    f"--{dotted} names a key inside {section}.{part}, which has no keys; write --{section}.{part} "
                    "VALUE."
                )
            target[part] = dict(inner)
            target = target[part]
        target[path[-1]] = parse_value(value)
    refuse_old_names(sections)
    missing = [name for name in ("model", "task") if name not in sections]
    if missing:
        raise SparseRLError(f"{where} has no section {missing[0]!r}; add `{missing[0]}: {{name: ...}}`.")
    return Recipe(**{name: _section(name, content) for name, content in sections.items()})


def _section(name: str, content: dict):
    if name == "task":  # every other key is an option of the task
        ours = [key for key in names_of(SECTIONS[name]) if key != "options"]
        own = {key: value for key, value in content.items() if key not in ours}
        content = {"name": None} | {key: content[key] for key in ours if key in content} | {"options": own}
    return settings_of(SECTIONS[name], content, name)


def _find(dotted: str) -> tuple[str, list[str]]:
    """The section that an override names, and the path inside it.

    The last part alone is enough if only one section has it; the sections `student`, `scorer` and `warmup` do not.
    """
    first, *rest = dotted.replace("-", "_").split(".")
    if rest:
        if first == "compressor":  # as eval and rollout write the options of a compressor
            if rest in (["slots"], ["slots_kept"], ["layer_budgets"]):
                return "rollout", rest
            return "rollout", ["compressor_options", *rest]
        if first not in SECTIONS:
            raise SparseRLError(f"there is no section {first!r} for --{dotted}; {nearest(first, SECTIONS)}")
        return first, rest
    aside = ("student", "scorer", "warmup")
    holders = [name for name, kind in SECTIONS.items() if first in names_of(kind) and name not in aside]
    if len(holders) != 1:
        if holders:
            full_names = " or ".join(f"--{section}.{first}" for section in holders)
            raise SparseRLError(f"--{dotted} could be any of several keys; write {full_names}.")
        old = [key for key in (*RENAMED_KEYS, *REMOVED_KEYS) if key.rpartition(".")[2] == first]
        if old:
            refuse_old_names({old[0].partition(".")[0]: {first: "VALUE"}})
        every = [f"{name}.{k}" for name, kind in SECTIONS.items() for k in names_of(kind)]
        known = nearest(first, every, by_last=True, listed_by="sparse-rl list keys")
        raise SparseRLError(f"--{dotted} is not a key; {known}")
    return holders[0], [first]


def parse_value(text: str) -> Any:
    """A value on the command line, read as YAML."""
    return read_yaml(text, f"the value {shown(text)}")


def table_of_keys() -> list[tuple[str, str, str]]:
    """(section.key, default, help) of every key."""
    rows = []
    for name, kind in SECTIONS.items():
        for field in dataclasses.fields(kind):
            default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            rows.append((f"{name}.{field.name}", _shown(default), field.metadata["help"]))
    return rows


def _shown(default: Any) -> str:
    """A default as YAML writes it."""
    if default is dataclasses.MISSING:
        return "required"
    if default is None:
        return "null"
    return str(default).lower() if isinstance(default, bool) else str(plain(default))
