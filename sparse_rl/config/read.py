"""Read YAML from anyone within bounds, because a few lines with aliases can stand for gigabytes.

Recipes hold text, numbers, lists and keys. Dates stay text; other tags are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import SparseRLError, shown

LONGEST = 200_000  # characters of a file or an option
DEEPEST = 20  # lists and keys inside one another
LARGEST = 20_000  # values, where an alias counts as what it stands for and a long text counts several times
_LETTERS = 64  # characters of a text that count as one value


def read_yaml(text: str, where: str) -> Any:
    """The content of a YAML document; `where` names it in error messages."""
    import yaml

    if len(text) > LONGEST:
        raise SparseRLError(f"{where} has {len(text):,} characters, but a recipe may have at most {LONGEST:,}.")
    try:
        _check_size(text, where)
        return yaml.load(text, Loader=_loader())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        if isinstance(error, SparseRLError):
            raise
        raise SparseRLError(f"{where} is not YAML ({' '.join(str(error).split())[:500]}).") from error


def read_yaml_file(path: Path) -> Any:
    """The content of a YAML file."""
    with path.open("rb") as file:
        content = file.read(4 * LONGEST + 1)  # bytes
    try:
        return read_yaml(content.decode(), str(path))
    except UnicodeDecodeError as error:
        raise SparseRLError(f"{path} is not YAML ({error}).") from error


def _check_size(text: str, where: str) -> None:
    """Refuse what would be large or deep once it is built, from the parser's events alone."""
    import yaml

    sizes: dict[str, int] = {}  # size of what each anchor stands for
    opened: list[tuple[str | None, int]] = [(None, 0)]  # (anchor, size so far) of the lists and keys we are in
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        if isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, 1))
            if len(opened) > DEEPEST + 1:
                raise SparseRLError(f"{where} nests values more than {DEEPEST} levels deep; a recipe needs only 4.")
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, size = opened.pop()
        elif isinstance(event, yaml.ScalarEvent):
            anchor, size = event.anchor, 1 + len(event.value) // _LETTERS
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise SparseRLError(f"{where} has an alias *{shown(event.anchor)} that stands for nothing, or itself.")
            anchor, size = None, sizes[event.anchor]
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        outer, before = opened[-1]
        opened[-1] = outer, before + size
        if before + size > LARGEST:
            raise SparseRLError(f"{where} expands to more than {LARGEST:,} values; a recipe needs a few hundred.")


def _loader() -> type:
    """yaml's safe loader, without dates, sets, bytes and numbers that no setting can have."""
    import yaml

    class Loader(yaml.SafeLoader):
        yaml_implicit_resolvers = {  # noqa: RUF012 (yaml's own form)
            first: [(tag, pattern) for tag, pattern in known if tag != "tag:yaml.org,2002:timestamp"]
            for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }
        yaml_constructors = {  # noqa: RUF012
            tag: build
            for tag, build in yaml.SafeLoader.yaml_constructors.items()
            if tag is None or tag.rpartition(":")[2] in ("null", "bool", "int", "float", "str", "seq", "map")
        }

        def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
            number = super().construct_yaml_int(node)
            if abs(number) >= 2**64:
                raise yaml.constructor.ConstructorError(
                    None, None, f"a whole number of {len(node.value):,} characters is too large", node.start_mark
                )
            return number

        def construct_yaml_str(self, node: yaml.ScalarNode) -> str:
            text = super().construct_yaml_str(node)
            text.encode()  # a lone surrogate is no text; UnicodeEncodeError is a ValueError
            return text

    Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_yaml_int)
    Loader.add_constructor("tag:yaml.org,2002:str", Loader.construct_yaml_str)
    return Loader
