"""Files of metrics: whatever is read at once or continued later equals what `json.loads` makes of every line."""

import json
import math
import os
import random

import pytest

from sparse_rl.report import lines as reader
from sparse_rl.report.curves import MAX_NAMES
from sparse_rl.report.document import document
from sparse_rl.report.figures import png
from sparse_rl.report.lines import Reading, read_on
from sparse_rl.report.read import MAX_NOTE, MAX_NOTES, read_run
from sparse_rl.train.log import Log
from tests.helpers.planted_runs import STEPS, plant


def by_hand(data: bytes) -> tuple[dict, list[int]]:
    """line -> (step, {name: number, None or "odd"}), read one by one; and the numbers of lines that are not objects."""
    found, wrong = {}, []
    for number, text in enumerate(data.split(b"\n")[:-1], 1):
        try:
            line = json.loads(text.decode())
            assert isinstance(line, dict)
        except (ValueError, AssertionError):
            wrong.append(number)
            continue
        step = line.pop("step", None)
        step = step if type(step) is int and 0 <= step < 2**53 else -1

        def seen(value):
            if value is None or type(value) not in (int, float):
                return None if value is None else "odd"
            if type(value) is int and abs(value) > 10**300:
                return "odd"
            return float(value) if abs(value) <= 1e100 else None

        found[number] = (step, {name: seen(value) for name, value in line.items()})
    return found, wrong


def as_read(reading: Reading) -> tuple[dict, list[int]]:
    found = {}
    for names, table in reading.tables.items():
        assert names == table.names
        for line, step, values, odd in zip(
            table.line.tolist(), table.step.tolist(), table.value.tolist(), table.odd.tolist()
        ):
            cells = ["odd" if o else None if math.isnan(v) else v for v, o in zip(values, odd)]
            found[line] = (step, dict(zip(names, cells)))
    return found, reading.wrong


PLANTED = [  # most are almost JSON
    b'{"step": 1, "a": 0.5, "b": 2}', b'{"step": 2, "a": null, "b": -1e-5}', b'{"step": 3, "a": NaN, "b": -Infinity}',
    b'{"step": 4, "a": true, "b": "x"}', b'{"step": 5, "a": [1], "b": {"c": 2}}', b'{"step": 6, "a": 1, 2, "b": 3}',
    b'{"step": 7, "a" "b": 3}', b'{"step": 7, "a""b": 3, : 4}', b'{"step": 8, "a": , "b": 3}', b'{"step": 9, "a": 1',
    b', "b": 2}', b'{"step": 1.0, "a": 1, "b": 2}', b'{"step": 1, "a": 0.5}"b', b'{"step": 1, "a": 0.5, 7, "b": 3}',
    b'{"step": 1,"a":1,"b":2}', b'{ "step": 1, "a": 1, "b": 2 }', b'{"a": 1, "step": 3, "b": 2}',
    b'{"step": 1, "a": 1, "a": 2}', b'{"step": 1, "\\u0061": 1, "b": 2}', b'{"step": 1, "a\\"b": 1}',
    b'{"step": 1, "a\\\\": 1}', b'{"step": -1, "a": 1, "b": 2}', b'{"step": true, "a": 1, "b": 2}',
    b'{"step": 1, "a": 1e999, "b": 1e101}', b'{"step": 1, "a": 01, "b": 2}', b'{"step": 1, "a": 1_0, "b": 2}',
    b'{"step": 1, "a": +1, "b": 2}', b'{"step": 1, "a": 1., "b": 2}',
    b'{"step": 1, "a": ' + b"9" * 400 + b', "b": 2}', b"{}", b"", b"null", b"\xff", b'{"step": 1, "\xff": 2}',
    b'{"step": 1}', b'{"step": 1, "a": 1, "b": 2},', b'{"step": 1, "a": 1, "b": 2}\r', b'["step", 1]', b'": "',
    b'{"step": 9007199254740992, "a": 1, "b": 2}', b'{"step": 1, "a": 1, "b": 2}}\t{',
]  # fmt: skip


def test_lines_read_together_are_those_read_one_by_one(tmp_path):
    draw = random.Random(0)
    for trial in range(300):
        chosen = [line for line in draw.choices(PLANTED, k=draw.randint(0, 12)) for _ in range(draw.choice((1, 1, 3)))]
        if trial % 3 == 0:  # and damage anywhere
            chosen = [
                line if draw.random() < 0.7 or not line else line[: (k := draw.randrange(len(line)))] + line[k + 1 :]
                for line in chosen
            ]
        data = b"".join(line + b"\n" for line in chosen)
        (tmp_path / "m.jsonl").write_bytes(data)
        assert as_read(read_on(tmp_path / "m.jsonl", Reading())) == by_hand(data), chosen


def test_every_digit_is_kept(tmp_path):
    draw = random.Random(1)
    rows = [
        {"step": s, **{f"n{i}": draw.uniform(-1, 1) * 10.0 ** draw.randint(-99, 99) for i in range(20)}}
        for s in range(400)
    ]
    path = plant(tmp_path / "run", rows) / "metrics.jsonl"
    (table,) = read_on(path, Reading()).tables.values()
    assert table.value.tolist() == [[row[name] for name in table.names] for row in rows]


@pytest.fixture
def texts(monkeypatch):
    """Every line that is parsed."""
    seen, parse = [], reader.parse
    monkeypatch.setattr(reader, "parse", lambda texts, first: seen.extend(texts) or parse(texts, first))
    return seen


def test_a_file_that_grows_is_parsed_once(tmp_path, texts, monkeypatch):
    monkeypatch.setattr(reader, "_BLOCK", 100)
    draw = random.Random(2)
    data = b"".join(line + b"\n" for line in draw.choices(PLANTED, k=120))
    path, reading, end = tmp_path / "m.jsonl", Reading(), 0
    while end < len(data):
        end = min(len(data), end + draw.randint(1, 200))
        path.write_bytes(data[:end])
        reading = read_on(path, reading)
        assert reading.torn == (data[end - 1 : end] != b"\n")
        assert as_read(reading) == by_hand(data[:end])
    assert texts == data.split(b"\n")[:-1]


def test_a_run_that_is_resumed_cut_rewritten_or_removed_is_read_anew(tmp_path, texts):
    def shown():
        return read_run(folder).curves["reward/mean"].value.tolist()

    folder = plant(tmp_path / "run", STEPS)
    path = folder / "metrics.jsonl"
    assert shown() == [0.1, 0.2, 0.3, 0.4]
    Log(folder, [], "", {}).cut(2)  # as a resumed run does
    assert shown() == [0.1, 0.2]
    with path.open("a") as file:
        file.write(
            json.dumps({"step": 3, "reward/mean": 7.0}) + "\n" + json.dumps({"step": 4, "reward/mean": 8.0}) + "\n"
        )
    texts.clear()
    assert shown() == [0.1, 0.2, 7.0, 8.0] and [json.loads(text)["step"] for text in texts] == [3, 4]
    whole = path.read_bytes()
    path.write_bytes(
        whole.replace(b"0.1", b"0.9") + json.dumps({"step": 5, "reward/mean": 9.0}).encode() + b"\n"
    )  # its beginning, as long as it was
    assert shown() == [0.9, 0.2, 7.0, 8.0, 9.0]
    os.truncate(path, whole.index(b"\n") + 1)
    assert shown() == [0.9]
    path.unlink()
    run = read_run(folder)
    assert "reward/mean" not in run.curves and "there is no metrics.jsonl" in run.notes
    path.write_bytes(whole)
    assert shown() == [0.1, 0.2, 7.0, 8.0]


# ---------- bounds


def test_notes_are_bounded_and_what_is_omitted_is_counted(tmp_path):
    folder = plant(tmp_path / "run", [{"step": 1, "learn": "?", **{f"{'n' * 180}{i}": "text" for i in range(9)}}])
    (folder / "samples" / "step-000001").mkdir(parents=True)
    (folder / "samples" / "step-000001" / "trajectories.jsonl").write_text('{"tokens": 1}\n' * 500)
    notes = document([folder])["runs"][0]["notes"]
    every = len(read_run(folder).notes) + 500
    assert len(notes) == MAX_NOTES + 1 and notes[-1] == f"{every - MAX_NOTES} more notes are omitted"
    (cut,) = [note for note in notes if len(note) > MAX_NOTE]
    whole = next(note for note in read_run(folder).notes if note.startswith(cut[:MAX_NOTE]))
    assert cut == f"{whole[:MAX_NOTE]} ... ({len(whole) - MAX_NOTE} more characters)"


def test_metrics_are_bounded(tmp_path):
    rows = [{"step": s, f"n{s}": 1.0, "x" * 201: 1.0} for s in range(MAX_NAMES)]
    run = read_run(plant(tmp_path / "run", [*rows, {"step": MAX_NAMES, "reward/mean": 0.5}]))
    assert len(run.curves) == MAX_NAMES and "reward/mean" in run.curves  # what every run writes comes first
    assert any(note.startswith("2 metrics of metrics.jsonl are omitted: beyond 1,000") for note in run.notes)


@pytest.mark.filterwarnings("error")
def test_numbers_beyond_sense_are_gaps(tmp_path):
    names = (
        "reward/mean",
        "gap/xi/p05",
        "gap/xi/p50",
        "gap/xi/p95",
        "old/entropy/mean",
        "time/step",
        "time/rollout",
        "cache/bytes/allocated",
    )
    rows = [{"step": s, **dict.fromkeys(names, (-1) ** s * 1.7e308)} for s in range(1, 700)]
    folder = plant(tmp_path / "run", [*rows, {"step": 700, **dict.fromkeys(names, 1e100)}])
    run = document([folder])["runs"][0]
    assert run["curves"]["reward/mean"]["last"] == 1e100 and run["curves"]["reward/mean"]["mean"][0] is None
    assert any("reward/mean (699 steps)" in note and "beyond 1e100" in note for note in run["notes"])
    png([read_run(folder)])


# ---------- links and pipes


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", "timing.jsonl", "pool.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "loop"])
def test_what_is_not_a_file_becomes_a_note(tmp_path, name, kind):
    folder = plant(tmp_path / "run", STEPS, [{"step": 1, "time/step": 1.0}])
    (folder / name).unlink(missing_ok=True)
    {"pipe": os.mkfifo, "folder": os.mkdir, "loop": lambda path: path.symlink_to(path.name)}[kind](folder / name)
    run = document([folder])["runs"][0]
    assert any(name in note and ("is not a file" in note or "not read" in note) for note in run["notes"]), run["notes"]
