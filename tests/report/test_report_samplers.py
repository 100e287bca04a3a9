"""The samplers of a pool in a report: what a run writes, and what a stranger may have written."""

import json

import pytest

from sparse_rl.report.document import document, dumped
from sparse_rl.report.figures import markdown
from sparse_rl.report.read import read_run
from sparse_rl.report.samplers import MAX_NAME, MOST
from sparse_rl.report.serve import status_of
from tests.helpers.planted_runs import STEPS, plant

SAMPLER = {"sampler": 3, "node": "gpu7 ab12cd", "pieces": 12, "tokens": 4000, "seconds": 8.0}


def shown(tmp_path, text):
    folder = plant(tmp_path / "run", STEPS, [{"step": 1, "time/step": 1.0}])
    (folder / "pool.json").write_text(text if isinstance(text, str) else json.dumps(text))
    run = document([folder])["runs"][0]
    return run["samplers"], [note for note in run["notes"] if "pool.json" in note]


def test_where_samplers_are_and_what_they_did(tmp_path):
    lost = {"gpu7 ab12cd": 2, "gpu9 000000": 1}
    found, notes = shown(tmp_path, {"step": 9, "samplers": [SAMPLER], "lost": lost})
    assert not notes and found["step"] == 9 and found["lost"] == 3 and found["gone"] == [["gpu9 000000", 1]]
    (sampler,) = found["samplers"]
    assert sampler | {"seconds": 8.0} == SAMPLER | {"tokens_per_s": 500.0, "lost": 2}
    text = markdown([read_run(tmp_path / "run")])
    assert "samplers: 1 on 1 node when step 9 ended, 500 tokens/s while they work; 3 lost since the start" in text


def test_a_run_without_a_pool_has_no_samplers(tmp_path):
    run = document([plant(tmp_path / "run", STEPS, [{"step": 1, "time/step": 1.0}])])["runs"][0]
    assert run["samplers"] is None and not any("pool.json" in note for note in run["notes"])


@pytest.mark.parametrize(
    "text", ["", "[1]", "{", "{}", '{"samplers": 3, "lost": {}}', '{"samplers": [], "lost": [1]}', "\ud800", "null"]
)
def test_what_is_no_pool_becomes_a_note(tmp_path, text):
    folder = plant(tmp_path / "run", STEPS)
    (folder / "pool.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    run = document([folder])["runs"][0]
    assert run["samplers"] is None and any("pool.json does not say" in note for note in run["notes"])


@pytest.mark.parametrize(
    "wrong",
    [
        *({"node": node} for node in (None, 3, ["a"])),
        *({"pieces": count} for count in (-1, 1.5, True, None, 2**60, "3")),
        *({"seconds": seconds} for seconds in (-1.0, float("nan"), float("inf"), "3", True, None)),
        {"seconds": 5e-324, "tokens": 2**52},
    ],
    ids=str,
)
def test_odd_samplers_are_left_out(tmp_path, wrong):
    found, notes = shown(tmp_path, {"step": "x", "samplers": [SAMPLER, SAMPLER | wrong, 7], "lost": {"a": -3}})
    assert len(found["samplers"]) == 1 and found["step"] is None and found["lost"] == 0
    assert notes == ["pool.json holds 3 entries that are left out"]
    dumped(found)  # no NaN


def test_long_names_and_many_samplers_are_cut(tmp_path):
    many = [SAMPLER | {"sampler": i, "node": "</script>" * 50} for i in range(MOST + 7)]
    found, notes = shown(tmp_path, {"step": 1, "samplers": many, "lost": {f"n{i}": 1 for i in range(MOST + 9)}})
    assert (len(found["samplers"]), found["hidden"], len(found["gone"]), found["lost"]) == (MOST, 7, MOST, MOST + 9)
    assert not notes and len(found["samplers"][0]["node"]) == MAX_NAME and "</script>" not in dumped(found)
    assert f"the first {MOST} of {MOST + 7}" in markdown([read_run(tmp_path / "run")])


def test_a_live_page_sees_that_samplers_changed(tmp_path):
    folder = plant(tmp_path / "run", STEPS)
    before = status_of(folder)
    (folder / "pool.json").write_text("{}")
    assert status_of(folder) != before
