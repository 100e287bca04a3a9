"""The frontier benchmark's own arithmetic: seeds in their order, newer points before older ones, the area."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from frontier import area, newest, read, table


def point(curve, label, seed, entries, accuracy, **more) -> dict:
    return {"curve": curve, "label": label, "seed": seed, "entries": entries, "accuracy": accuracy, **more}


def test_the_table_names_seeds_in_their_order_and_newer_points_count(tmp_path):
    rows = [
        point("teacher", "9", 1, 90, 0.9),
        point("teacher", "9", 0, 70, 0.7),
        point("joint", "c = 2", 1, 50, 0.9, steps=5),
    ]
    rows += [point("joint", "c = 2", 0, 50, 0.2, steps=5), point("joint", "c = 2", 0, 50, 0.1, steps=9)]
    (tmp_path / "points.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = table(read(tmp_path / "points.jsonl"))
    assert "c = 2: 50, 0.50 (0.10, 0.90) | 0.50 (0.10, 0.90) |" in shown
    assert "9: 80, 0.80 (0.70, 0.90)" in shown and shown.index("| teacher |") < shown.index("| joint |")
    assert len(newest(rows)) == 4


@pytest.mark.parametrize(
    "points, found",
    [([(10, 0.5)], 0.5), ([(20, 1.0)], 0.5), ([(10, 0.2), (15, 0.1), (25, 0.6)], 0.3), ([(30, 1.0)], 0.0)],
)
def test_the_area_is_the_mean_of_the_best_that_no_more_entries_give(points, found):
    assert area(points, 10, 30) == pytest.approx(found)
    sizes = [10 + 20 * (i + 0.5) / 1000 for i in range(1000)]
    assert area(points, 10, 30) == pytest.approx(
        sum(max((y for x, y in points if x <= s), default=0) for s in sizes) / 1000, abs=1e-3
    )
