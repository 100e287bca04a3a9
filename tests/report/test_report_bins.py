"""Bins: long curves as few points keep their means, their extremes and their gaps."""

import json
import math
import os
import random
import shutil

import numpy as np
import pytest
import torch

from sparse_rl.cache import Trace
from sparse_rl.report.bins import ALL, MOST, binned, points_for, rounded
from sparse_rl.report.curves import Curve
from sparse_rl.report.document import document
from sparse_rl.report.page import page
from tests.helpers.planted_runs import LINE, plant, sample


def by_hand(step, value, ends):
    """(mean, low, high) of what lies between one end and the next, without numpy."""
    rows, before = [], -1
    for end in ends:
        inside = [v for s, v in zip(step, value) if before < s <= end and math.isfinite(v)]
        rows.append((math.fsum(inside) / len(inside), min(inside), max(inside)) if inside else (None, None, None))
        before = end
    return rows


@pytest.mark.parametrize("regular", [True, False])
@pytest.mark.parametrize("count", [499, 500, 501, 1234, 10_000])
def test_bins_keep_extremes_means_and_gaps(count, regular):
    draw = random.Random(count)
    step = [s for s in range(1, count + 1) if not (regular and 600 <= s < 700)]
    value = [
        math.nan if draw.random() < 0.1 or 300 <= s < 360 else draw.gauss(0, 1) * 10 ** draw.randint(-9, 9)
        for s in step
    ]
    curve = binned(Curve(np.array(step), np.array(value)), regular=regular)
    assert len(curve["step"]) <= MOST and curve["step"] == sorted(set(curve["step"])) and curve["step"][-1] == count
    if len(step) <= MOST:
        assert curve.keys() == {"step", "mean"} and curve["step"] == step
        assert curve["mean"] == [None if math.isnan(v) else float(f"{v:.6g}") for v in value]
        return
    for found, expected in zip(
        zip(curve["mean"], curve["low"], curve["high"]), by_hand(step, value, curve["step"]), strict=True
    ):
        assert found[1:] == tuple(None if v is None else float(f"{v:.6g}") for v in expected[1:])
        assert found[0] == (None if expected[0] is None else pytest.approx(expected[0], rel=1e-5, abs=1e-12))
    finite = [v for v in value if math.isfinite(v)]
    assert max(v for v in curve["high"] if v is not None) == float(f"{max(finite):.6g}")
    assert min(v for v in curve["low"] if v is not None) == float(f"{min(finite):.6g}")
    if count == 10_000:
        gaps = [end for end, mean in zip(curve["step"], curve["mean"]) if mean is None]
        assert {320, 340} <= set(gaps) and (not regular or {620, 640, 660, 680} <= set(gaps))


def test_missing_steps_are_gaps_and_evaluations_are_rare():
    steps = np.array([1, 2, 3, 7, 8, 9])
    values = steps / 10
    assert binned(Curve(steps, values)) == {"step": [1, 2, 3, 4, 7, 8, 9], "mean": [0.1, 0.2, 0.3, None, 0.7, 0.8, 0.9]}
    assert binned(Curve(steps, values), regular=False) == {"step": steps.tolist(), "mean": values.tolist()}
    assert binned(Curve(steps * 10, values))["step"] == [10, 20, 30, 40, 70, 80, 90]


def test_bins_say_how_many_points_are_in_one():
    steps = np.arange(1, 1001)
    assert binned(Curve(steps, steps / 1.0), 100)["each"] == 10
    assert binned(Curve(5 * steps, steps / 1.0), 100)["each"] == 10
    assert binned(Curve(5 * steps, steps / 1.0), 100, regular=False)["each"] == 10


def test_numbers_are_rounded_to_six_digits():
    draw = random.Random(0)
    values = [draw.uniform(-1, 1) * 10.0 ** draw.randint(-300, 300) for _ in range(3000)]
    values += [0.0, -0.0, 1.0, 123456.5, 999999.5, 0.1 + 0.2, 1e308, 5e-324, 2**53, 1e22, 1e-22]
    for value, found in zip(values, rounded(np.array(values))):
        assert (
            found == pytest.approx(value, rel=5.01e-6)
            and len(repr(found).lstrip("-").split("e")[0].replace(".", "").strip("0")) <= 6
        )
    assert rounded(np.array([math.nan, math.inf, 0.5])) == [None, None, 0.5]


def test_big_runs_stay_small(tmp_path):
    """3,000 steps, 20 runs, 60 curves, and trajectories."""
    draw, names = random.Random(0), [f"stage{i}/quantity/stat" for i in range(60)]
    first = plant(tmp_path / "run00", ({"step": s, **{n: draw.gauss(0, 1) for n in names}} for s in range(1, 3001)), ())
    samples = sample(
        first,
        10,
        [{**LINE, "tokens": [7] * 2000, "pieces": ["piece"] * 2000, "sampler_logprobs": [-1.0] * 2000}],
        28,
        8,
    )
    gone = np.random.default_rng(0).integers(2000, 2100, (28, 8, 2000)).astype(np.uint16)
    Trace(torch.from_numpy(gone)).save(samples / "traces" / "0.safetensors")
    for number in range(1, 20):
        shutil.copytree(first, tmp_path / f"run{number:02d}", copy_function=os.link)
    found = document([tmp_path])
    assert len(page(found)) < 15_000_000 and len(found["runs"]) == 20
    for run in found["runs"]:
        assert len(run["curves"]) == 60 and all(
            len(curve["step"]) >= ALL // 1200 * 0.9 for curve in run["curves"].values()
        )
        assert len(run["trajectories"]) == 1
        assert run["trajectories"][0]["map"] is not None or any("maps of 1 of 1" in note for note in run["notes"])
    lowest = min(json.loads(line)[names[0]] for line in (first / "metrics.jsonl").read_text().splitlines())
    assert min(found["runs"][7]["curves"][names[0]]["low"]) == float(f"{lowest:.6g}")
    assert points_for(60) == MOST and points_for(1200) * 1200 <= ALL
