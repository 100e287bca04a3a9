"""Imports point one way: which room may import which."""

import ast
from pathlib import Path

import pytest

import sparse_rl

PACKAGE = Path(sparse_rl.__file__).parent
LEAVES = {
    "errors",
    "files",
    "keys",
    "signals",
    "streams",
    "distributed",
}  # these import no room; anyone may import them
MAY_IMPORT = {
    "cache": "",
    "tasks": "",
    "beacon": "cache",
    "kernels": "cache",
    "records": "cache",
    "attention": "cache kernels",
    "compressors": "beacon cache kernels models",
    "models": "beacon cache",
    "planning": "cache compressors models",
    "pool": "",
    "learn": "attention beacon cache kernels models records",
    "rollout": "attention beacon cache compressors kernels models planning records",
    "chat": "models records rollout tasks",
    "config": "cache learn models",
    "export": "models",
    "evaluation": "chat compressors learn models planning records rollout tasks",
    "integrations": "cache compressors config learn models records rollout serve",
    "report": "cache config planning",
    "train": "attention beacon cache chat compressors config kernels learn models planning pool records rollout tasks",
    "scale": "compressors config learn models pool rollout train",
    "serve": "beacon cache chat learn models records rollout tasks",
}


def imports(path: Path) -> set[str]:
    """The rooms that a module imports, by relative or absolute names."""
    depth, found = len(path.relative_to(PACKAGE).parts), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level in (0, depth):
            package = ".".join([PACKAGE.name] * bool(node.level) + [node.module] * bool(node.module))
            named = [f"{package}.{name.name}" for name in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in named if name.startswith(f"{PACKAGE.name}.")}
    return found


def test_every_way_to_import_a_room_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.test_layout.PACKAGE", tmp_path / "sparse_rl")
    module = tmp_path / "sparse_rl" / "room" / "module.py"
    module.parent.mkdir(parents=True)
    rooms = ["from ..a import x", "from .. import b", "import sparse_rl.c.d", "from sparse_rl.e.f import x"]
    others = ["from . import other", "import os", "from torch import nn"]
    module.write_text("\n".join([*rooms, "from sparse_rl import g", *others]))
    assert imports(module) == {"a", "b", "c", "e", "g"}


@pytest.mark.parametrize("room", [*MAY_IMPORT, *sorted(LEAVES)])
def test_imports_point_one_way(room):
    allowed = LEAVES | set(MAY_IMPORT.get(room, "").split()) | {room}
    for path in list((PACKAGE / room).glob("*.py")) or [PACKAGE / f"{room}.py"]:
        assert imports(path) <= allowed, path


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_modules_are_short(path):
    assert len(path.read_text().splitlines()) <= 400


def test_the_hallway_is_short():
    assert len(list(PACKAGE.glob("*.py"))) <= 10
