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
    "compressors": "beacon cache kernels",
    "models": "beacon cache",
    "planning": "cache compressors models",
    "learn": "attention beacon cache models records",
    "rollout": "attention beacon cache compressors kernels models planning records",
    "config": "learn models",
    "evaluation": "compressors learn models planning records rollout tasks",
    "integrations": "cache compressors config learn models records rollout",
    "report": "cache config planning",
    "train": "attention beacon cache compressors config learn models planning records rollout tasks",
    "scale": "compressors config learn models rollout train",
}


def imports(path: Path) -> set[str]:
    """The rooms that a module imports, other than its own."""
    depth, found = len(path.relative_to(PACKAGE).parts), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.split(".")[0]} if node.module else {name.name for name in node.names}
    return found


@pytest.mark.parametrize("room", [*MAY_IMPORT, *sorted(LEAVES)])
def test_imports_point_one_way(room):
    allowed = LEAVES | set(MAY_IMPORT.get(room, "").split()) | {room}
    for path in list((PACKAGE / room).glob("*.py")) or [PACKAGE / f"{room}.py"]:
        assert imports(path) <= allowed, path


def test_the_hallway_is_short():
    assert len(list(PACKAGE.glob("*.py"))) <= 10
