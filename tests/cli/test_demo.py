"""The demo's table, words and picture, from planted curves; `make demo` itself takes minutes."""

import json

from rich.console import Console

from sparse_rl import demo
from sparse_rl.report.palette import METHODS


def planted():
    rise = {"dense": [(0, 0.4), (20, 0.5), (25, 0.6)], "sparse": [(0, 0.3), (20, 0.3), (25, 0.34)]}
    fall = {"dense": [(0, 0.4), (20, 0.2), (25, 0.1)], "sparse": [(0, 0.3), (20, 0.1), (25, 0.1)]}
    numbers = {"reward": [(1, 0.5)], "rejected": 0.1, "kv_bytes": 1e6, "tokens_per_s": 5.0}
    rows = {method: {"curves": fall if method == "naive" else rise, **numbers} for method in demo.METHODS}
    return rows | {demo.DENSE: json.loads(demo.REFERENCE.read_text())}


def test_the_demo_shows_our_methods_and_says_what_their_curves_do(tmp_path):
    rows, console = planted(), Console(width=200, record=True)
    assert list(demo.METHODS) == ["naive", "sparse-rl", "shadow"] and set(demo.METHODS) <= set(METHODS)
    demo.tell(console, rows)
    said = console.export_text()
    assert "Accuracy falls to 0.15 on the dense cache and falls to 0.10 on 38 + 4 slots." in said
    assert said.count("Accuracy rises to 0.55 on the dense cache and stays near 0.32 on 38 + 4 slots.") == 2
    assert demo.draw(rows, tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_the_demo_trains_each_of_its_methods():
    for method in demo.METHODS:
        assert demo.recipe(method).learn.method == method and demo.recipe(method).run.steps == 25
    assert demo.recipe("dense").rollout.compressor == "dense"
