"""The colours of runs and methods, in one place for all pictures and pages.

A method has the same colour everywhere. Of several runs with one method, the first has it and the others get colours
that no method shown here uses.
"""

from __future__ import annotations

from collections.abc import Sequence

COLOURS = (  # (on light, on dark); the first ten are strong, the others pale
    ("#2457c5", "#7aa5ff"),
    ("#d2541b", "#ff9a62"),
    ("#15803d", "#5fd08a"),
    ("#a8237f", "#f07cc8"),
    ("#8a6a00", "#e3c04a"),
    ("#0b7f96", "#55cfe6"),
    ("#6d3bd1", "#b898ff"),
    ("#b91c3c", "#ff8095"),
    ("#55730e", "#abc94a"),
    ("#5b6675", "#aab4c2"),
    ("#7d9fe8", "#3f68b8"),
    ("#eb9a72", "#b5602f"),
    ("#6dbb8a", "#2f8a55"),
    ("#d583bd", "#a3467f"),
    ("#c9ad4f", "#94781c"),
    ("#63b7c8", "#1f8799"),
    ("#ab8ee6", "#7754c4"),
    ("#e0788d", "#ad3a52"),
    ("#9db85e", "#6b8526"),
    ("#a3acb8", "#6d7683"),
)
METHODS = {  # method, or `dense`: rollouts on a dense cache -> its place among COLOURS
    "sparse-rl": 0,
    "none": 1,
    "shadow": 2,
    "smd": 3,
    "mis": 4,
    "tis": 5,
    "icepop": 6,
    "naive": 7,
    "geo": 8,
    "dense": 9,
    "sparse-rl-released": 10,
}


def places(methods: Sequence[str]) -> list[int]:
    """The colour of each run, as a place among COLOURS, from the runs' methods. The page does the same (runs.js)."""
    found: list[int] = []
    for method in methods:
        own, shown = METHODS.get(method), {METHODS[m] for m in methods if m in METHODS}
        free = [place for place in range(len(COLOURS)) if place not in found and place not in shown]
        if own is not None and own not in found:
            found.append(own)
        else:
            found.append(free[0] if free else len(found) % len(COLOURS))
    return found


def colours(methods: Sequence[str]) -> list[str]:
    """The colours of runs on white, from their methods."""
    return [COLOURS[place][0] for place in places(methods)]


def colour(method: str) -> str:
    """The colour of a method on white; black if it has none of its own."""
    return COLOURS[METHODS[method]][0] if method in METHODS else "#000000"


def css() -> str:
    """The colours as properties of a style sheet: --run0, --run1, ..."""
    return " ".join(f"--run{i}: light-dark({light}, {dark});" for i, (light, dark) in enumerate(COLOURS))
