"""Convert values between YAML and the types of keys: `convert` and `settings_of` check them, `plain` converts back."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from ..errors import SparseRLError, nearest, shown


def settings_of(kind: type, content: Mapping, name: str):
    """The dataclass `kind` from the keys of a section; `name` is the section's name in error messages."""
    known, hints = names_of(kind), types_of(kind)
    for k in content:
        if k not in known:
            raise SparseRLError(f"there is no key {name}.{k!s:.300}; {nearest(str(k), known)}")
    for field in dataclasses.fields(kind):
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and content.get(field.name) is None:
            raise SparseRLError(f"{name}.{field.name} is not given: {field.metadata['help']}.")
    return kind(**{k: convert(v, hints[k], f"{name}.{k}") for k, v in content.items()})


def convert(value: Any, kind: Any, where: str) -> Any:
    """A YAML value as the type of the key `where`. YAML reads 1e-4 as text; here it is a float."""
    if kind is Any:
        return value
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in args:
            return None
        kinds = [a for a in args if a is not type(None)]
        if isinstance(value, str) and str in kinds:
            return value
        with_keys = [a for a in kinds if dataclasses.is_dataclass(a)] if isinstance(value, Mapping) else []
        return convert(value, (with_keys or kinds)[0], where)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return settings_of(kind, value, where)
    if origin is tuple and isinstance(value, (list, tuple)) and len(value) == len(args):
        return tuple(convert(v, a, where) for v, a in zip(value, args))
    if origin is list:
        values = [value] if isinstance(value, str) else value
        if isinstance(values, (list, tuple)):
            return [convert(v, args[0], where) for v in values]
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if kind is float and isinstance(value, (int, float, str)) and not isinstance(value, bool):
        number = _float(value)
        if math.isfinite(number) or (number == math.inf and where.startswith("learn.correction")):  # bounds may be open
            return number
    if kind is str and isinstance(value, str):
        return value
    if kind is dict and isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise SparseRLError(f"{where} has a key {shown(name)}; its keys are names, such as window or files.")
        return dict(value)
    expected = "a finite number" if kind is float and isinstance(value, float) else _expected(kind)
    raise SparseRLError(f"{where} is {shown(value)}; it must be {expected}.")


def _float(value: float | str) -> float:
    try:
        return float(value)
    except (ValueError, OverflowError):  # whole numbers beyond all floats
        return math.nan


def _expected(kind: Any) -> str:
    """A type in words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return f"a list of {len(args)} numbers"
    if dataclasses.is_dataclass(kind):
        return "keys"
    words = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        dict: "keys",
        list: "a list",
    }
    return words.get(origin or kind, str(kind))


def plain(value: Any) -> Any:
    """A key's value as YAML holds it."""
    if isinstance(value, tuple):
        return list(value)
    if dataclasses.is_dataclass(value):
        return {k: plain(v) for k, v in vars(value).items() if v is not None}
    return dict(value) if isinstance(value, Mapping) else value


def names_of(kind: type) -> list[str]:
    """The keys of a section."""
    return [field.name for field in dataclasses.fields(kind)]


def types_of(kind: type) -> dict[str, Any]:
    """The types of a section's keys."""
    return typing.get_type_hints(kind)
