"""Imports point one way, and no module grows beyond what fits in one's head."""

import ast
from pathlib import Path

import pytest

import sparse_rl

PACKAGE = Path(sparse_rl.__file__).parent
LEAVES = {"errors", "streams", "keys", "world", "stops", "logits"}  # anyone may import these
MAY_IMPORT = {
    "cache": set(),
    "beacon": {"cache"},
    "kernels": {"cache"},
    "attention": {"cache", "kernels"},
    "compressors": {"beacon", "cache", "kernels"},
    "records": {"cache"},
    "models": {"beacon", "cache"},
    "tasks": set(),
    "plan": {"cache", "compressors", "models"},
    "rollout": {"beacon", "cache", "kernels", "attention", "compressors", "records", "models", "plan"},
    "generation": {"beacon", "compressors", "models", "rollout"},
    "learn": {"beacon", "cache", "attention", "records", "models"},
    "adapt": set(),
    "config": {"learn", "adapt"},
    "control": {"adapt", "compressors", "config", "rollout"},
    "live": set(),
    "checkpoint": {"beacon", "learn", "models"},
    "metrics": {"checkpoint"},
    "statistics": set(),
    "held_out": {"compressors", "learn", "models", "records", "rollout", "tasks"},
    "samples": {"checkpoint", "learn", "records", "tasks"},
    "share": {"cache", "learn", "samples", "tasks"},
    "sampler": {"config", "control", "held_out", "learn", "metrics", "models", "records", "rollout", "samples", "share", "tasks"},
    "lengths": {"metrics"},
    "scale": {"compressors", "config", "control", "learn", "lengths", "models", "rollout", "share"},
    "ahead": {"metrics", "rollout", "samples"},
    "launch": set(),
    "report": {"cache", "checkpoint", "config", "plan"},
    "integrations": {"cache", "compressors", "config", "learn", "records", "rollout"},
    "evaluation": {"checkpoint", "compressors", "learn", "metrics", "models", "plan", "records", "rollout", "statistics", "tasks"},
}


def imports(path: Path) -> set[str]:
    """The parts of sparse_rl that a module imports, other than its own."""
    depth = len(path.relative_to(PACKAGE).parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.split(".")[0]} if node.module else {name.name for name in node.names}
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("sparse_rl."):
            found.add(node.module.split(".")[1])
    return found


@pytest.mark.parametrize("part", list(MAY_IMPORT))
def test_imports_point_one_way(part):
    files = list((PACKAGE / part).glob("*.py")) or [PACKAGE / f"{part}.py"]
    assert files[0].exists()
    for path in files:
        assert imports(path) - LEAVES - {part} <= MAY_IMPORT[part], path


def test_modules_stay_small():
    for path in PACKAGE.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path
