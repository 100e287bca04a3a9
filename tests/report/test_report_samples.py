"""Trajectories in a report: older, damaged and many samples."""

import json
import math
import os
import shutil

import numpy as np
import pytest
import torch

from sparse_rl.cache import Trace
from sparse_rl.report.document import document, dumped
from sparse_rl.report.trajectories import read_samples
from tests.helpers.planted_runs import LINE, STEPS, plant, sample


def test_older_samples_lack_keys_and_newer_ones_have_them(tmp_path):
    run = plant(tmp_path / "run", STEPS)
    sample(run, 1, [{"num_prompt_tokens": 1, "tokens": [3, 4, 5], "trace": None}])
    new = {
        "pieces": ["a", "b", "?"],
        "rank": [0, 1, 2],
        "weight": [0.0, 0.0, 1.25],
        "clipped": [False, True, None],
        "beacon_id": 5,
    }
    sample(run, 2, [{**LINE, **new, "accepted": False, "reward": math.nan}])
    (new_one, old_one), notes = read_samples(run)
    assert new_one["pieces"] == ["a", "b", "\u25c6"] and new_one["beacons"] == [2]
    assert new_one["sampler"] == [-1.0, None] and new_one["old"] == [-1.5, None]
    assert (new_one["rank"], new_one["weight"], new_one["clipped"]) == ([1, None], [0.0, None], [1, None])
    assert new_one["accepted"] is False and new_one["reward"] is None
    assert old_one["pieces"] == ["⟨3⟩", "⟨4⟩", "⟨5⟩"] and old_one["sampler"] == [None, None] and old_one["map"] is None
    assert all(
        old_one[name] is None
        for name in ("rank", "weight", "clipped", "verdict", "accepted", "advantage", "finish", "prompt_index")
    )
    assert any("no checkpoint" in note for note in notes) and any("names no trace" in note for note in notes)


TRACE, LINES = "traces/0.safetensors", "trajectories.jsonl"


def write_line(**changes):
    return lambda folder: (folder / LINES).write_text(json.dumps({**LINE, **changes}) + "\n")


def replace_by_pipe(name):
    return lambda folder: ((folder / name).unlink(), os.mkfifo(folder / name))


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda f: (f / TRACE).unlink(), "No such file"),
        (replace_by_pipe(TRACE), "is not a file"),
        (lambda f: ((f / TRACE).unlink(), (f / TRACE).symlink_to("0.safetensors")), "outside its"),
        (replace_by_pipe(LINES), "is not a file"),
        (lambda f: (f / TRACE).write_bytes(b"x"), "damaged"),
        (lambda f: Trace.dense(2, 2, 9).save(f / TRACE), "its trace has 9 tokens, but there are 3"),
        (lambda f: Trace(torch.full((1, 1, 3), 2**31 - 1, dtype=torch.int32)).save(f / TRACE), "too many"),
        (write_line(trace="../../../secret"), "outside its folder"),
        (write_line(trace="/etc/passwd"), "outside its folder"),
        (write_line(trace="a\0b"), "names no trace"),
        (write_line(tokens=[1, -1]), "not a list of token ids"),
        (write_line(num_prompt_tokens=4), "num_prompt_tokens is 4"),
        (lambda f: (f / LINES).write_text(json.dumps(LINE)), "was cut off"),
        (lambda f: (f / LINES).write_text("[]\n"), "not a JSON object"),
        (lambda f: (f / LINES).unlink(), "there is no samples/step-000001/trajectories.jsonl"),
    ],
)
def test_damaged_samples_become_notes(tmp_path, change, note):
    run = plant(tmp_path / "run", STEPS)
    change(sample(run, 1, [LINE]))
    shown, notes = read_samples(run)
    assert any(note in text for text in notes), notes
    assert all(t["map"] is None for t in shown)
    json.loads(dumped(document([run])))


def test_damaged_tokenizers_show_ids(tmp_path, real, monkeypatch):
    copy = tmp_path / "run"
    shutil.copytree(real, copy)
    for file in copy.glob("samples/*/trajectories.jsonl"):  # as an older run wrote them
        older = [{k: v for k, v in json.loads(line).items() if k != "pieces"} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(line) + "\n" for line in older))
    whole, _ = read_samples(copy)
    assert whole[0]["pieces"] == read_samples(real)[0][0]["pieces"]
    for file in copy.glob("checkpoints/*/tokenizer.json"):
        file.write_text("{}")
    shown, notes = read_samples(copy)
    tokens = json.loads((copy / "samples/step-000004/trajectories.jsonl").read_text().splitlines()[0])["tokens"]
    assert shown[0]["pieces"] == [f"⟨{token}⟩" for token in tokens] != whole[0]["pieces"]
    assert any("tokenizer of step-000004 cannot be loaded" in note for note in notes)
    for folder in copy.glob("checkpoints/*"):  # one that brings code along: nobody is asked, and nothing runs
        own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
        (folder / "tokenizer_config.json").write_text(json.dumps(own))
        (folder / "own.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    read_samples(copy)
    assert not (tmp_path / "ran").exists()


def test_newest_samples_come_first_and_what_is_omitted_is_told(tmp_path):
    run = plant(tmp_path / "run", STEPS)
    for step in (9, 10, 200):
        sample(run, step, [{**LINE, "sample_index": i} for i in range(3)])
    everything, _ = read_samples(run)
    assert [(t["step"], t["sample_index"]) for t in everything] == [(s, i) for s in (200, 10, 9) for i in range(3)]
    few, notes = read_samples(run, most=4)
    assert (
        few == everything[:4]
        and "trajectories are omitted, 2 of step 10 and those of 1 older steps: 4 are shown" in notes
    )
    few, notes = read_samples(run, most=3)
    assert few == everything[:3] and "trajectories are omitted, those of 2 older steps: 3 are shown" in notes
    bare = [{**t, "map": None} for t in everything]
    texts, maps = sum(len(json.dumps(t)) for t in bare), [len(json.dumps(t["map"])) for t in everything]
    assert read_samples(run, space=2 * texts)[0] == everything
    assert sum(maps) < texts  # so half of the space is what counts for the texts
    fewer, notes = read_samples(run, space=2 * texts - 2)
    assert fewer == everything[:8] and any("omitted, 1 of step 9: their text would take more" in note for note in notes)
    none, notes = read_samples(run, space=9)
    assert none == [] and any("3 of step 200 and those of 2 older steps" in note for note in notes)


def test_maps_take_what_is_left(tmp_path):
    run = plant(tmp_path / "run", STEPS)
    samples = sample(run, 1, [LINE] * 4)
    for i in range(4):
        gone = np.random.default_rng(i).integers(3, 60_000, (20, 20, 3)).astype(np.uint16)
        Trace(torch.from_numpy(gone)).save(samples / "traces" / f"{i}.safetensors")
    everything, notes = read_samples(run)
    assert all(t["map"] for t in everything) and not any("omitted" in note for note in notes)
    size = sum(len(json.dumps({**t, "map": None})) for t in everything) + sum(
        len(json.dumps(t["map"])) for t in everything[:2]
    )
    tight, notes = read_samples(run, space=size)
    assert tight == [*everything[:2], *({**t, "map": None} for t in everything[2:])]
    assert any("the maps of 2 of 4 trajectories are omitted" in note for note in notes)
