"""The frontier benchmark's own arithmetic: seeds in their order, newer points before older ones, the area."""

import json
import math
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import frontier
from frontier import read, still_improving
from frontier_report import area, at_equal_entries, newest, plot, table
from stay import Stay

from sparse_rl.config import load_recipe
from sparse_rl.train.warmup import warmup


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


def test_a_picture_has_room_for_more_curves_than_colours(tmp_path):
    rows = [point("teacher", "9", 0, 90, 0.8), *(point(f"curve {i}", "1", 0, 40 + i, 0.1) for i in range(25))]
    plot(rows, tmp_path / "frontier.png")
    assert (tmp_path / "frontier.png").stat().st_size > 1000


def test_what_no_more_entries_give():
    rows = [point("teacher", "9", 0, 90, 0.8), point("teacher", "4", 0, 40, 0.1), point("rkv", "30", 0, 45, 0.3)]
    rows += [point("late, any c", "c = 2", 0, 50, 0.6), point("random", "20", 0, 60, 0.9)]
    (line,) = [line for line in at_equal_entries(rows).splitlines() if line.startswith("| late")]
    assert line == "| late, any c, c = 2 | 50 | 0.60 | 75% | 0.10 (teacher 4) | 0.30 (rkv 30) |"


@pytest.mark.parametrize(
    "curve, patience, learning",
    [
        ([0.1], 2, True),
        ([0.1, 0.2, 0.3], 2, True),
        ([0.3, 0.2, 0.305], 2, False),
        ([0.3, 0.2, 0.31], 2, True),
        ([0.1, 0.5, 0.4, 0.4, 0.5], 3, False),
    ],
)
def test_a_student_stops_when_it_gains_nothing(curve, patience, learning):
    lines = [{"step": i, "eval/c8/accuracy": y, "eval/dense/accuracy": float(i)} for i, y in enumerate(curve)]
    assert still_improving(lines, patience) == (["c8"] if learning else [])


@pytest.mark.parametrize("study", ["linsys", "stargraph", "countdown"])
def test_studies_have_all_sizes_and_their_budgets_hold_the_prompts(study):
    from sparse_rl.tasks import make

    recipe = load_recipe(frontier.STUDIES[study].recipe, list(frontier.STUDIES[study].keys.items()))
    assert recipe.student.chunks == [2, 4, 8, 16, 32, [2, 4, 8, 16, 32]]
    task = make(recipe.task.name, **recipe.task.options).held_out()
    prompts = task.sample(0, 512)
    longest = max(len(prompt.text) for prompt in prompts)
    assert min(frontier.STUDIES[study].budgets) > longest + 8  # with the window of R-KV
    assert max(len(task.solution(prompt)) for prompt in prompts) < recipe.rollout.max_new_tokens
    assert max(frontier.STUDIES[study].caps) == recipe.rollout.max_new_tokens


def test_a_frontier_from_warm_up_to_its_table(tmp_path, monkeypatch, capsys):
    """Every part of it on LinSys, at the smallest size that runs."""
    small = {
        "model.dtype": "float32",
        "task.unknowns": "2",
        "rollout.rows": "4",
        "rollout.prompts": "2",
        "rollout.group_size": "2",
        "rollout.max_new_tokens": "12",
        "learn.micro_batch_tokens": "4096",
        "learn.minibatches": "1",
        "eval.every": "1",
        "eval.prompts": "2",
        "eval.samples": "1",
        "run.steps": "1",
    }
    more = {"model.name": "tiny:1x64", "warmup.steps": "1", "warmup.batch": "2", "warmup.workers": "0"}
    warmup(load_recipe("linsys-warmup", [*small.items(), *more.items()]), tmp_path / "warm", False, False, False)
    monkeypatch.setattr(frontier, "FREE", ("rkv",))
    monkeypatch.setattr(frontier, "THRESHOLDS", (0.5,))
    monkeypatch.setitem(frontier.STUDIES, "linsys", frontier.Study("linsys-beacons", {}, (40,), 4, (6, 12)))

    def call(*words: str) -> str:
        given = [word for key, value in small.items() for word in ("--set", key, value)]
        given += ["--set", "student.chunks", "[[2, 4]]", "--study", "linsys", "--out", str(tmp_path / "out")]
        monkeypatch.setattr(sys, "argv", ["frontier.py", *given, "--prompts", "2", "--samples", "1", *words])
        frontier.main()
        return capsys.readouterr().out

    told = call("--joint", str(tmp_path / "warm"), "--patience", "2")
    assert "nothing is left to train" in told and frontier.steps_of(tmp_path / "out" / "joint-0") >= 2
    call("--late")
    assert "nothing is left" in call("--rl", "4", "--of", "late")
    assert "nothing is left" in call("--rl", "4", "--of", "late")  # a command that is given again
    assert "nothing is left" in call("--rl", "4", "--of", "cold")  # of the teacher, with a new beacon
    teacher = frontier.last_checkpoint(tmp_path / "out" / "joint-0")
    teacher.rename(teacher.with_name("step-000099"))  # the teacher goes on, and its checkpoint gives way
    assert "nothing is left" in call("--late", "--rl", "4", "--of", "late")
    teacher.with_name("step-000099").rename(teacher)
    told = call("--points", "--table")
    for curve in (
        "joint, any c",
        "joint, any c, longer",
        "late, by surprise",
        "RL of late",
        "RL of cold",
        "teacher",
        "rkv",
    ):
        assert f"| {curve} |" in told, curve
    assert "| cold, c = 4 | 1 | 0.00 (0.00) | 0.00 (0.00) |" in told
    call("--plot", str(tmp_path / "pictures" / "frontier.png"))
    assert (tmp_path / "pictures" / "frontier.png").stat().st_size > 1000
    rows = read(tmp_path / "out" / "points.jsonl")
    assert call("--points") == "" and len(read(tmp_path / "out" / "points.jsonl")) == len(rows)


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "there is nothing to do"),
        (("--table",), "has no evaluation yet; make some with --points."),
        (("--points",), "joint-0 has no checkpoint yet; train it first"),
        (("--late",), "joint-0 has no checkpoint yet; train it first"),
        (("--rl", "8", "--of", "late"), "there is no late student for chunks of 8; train some first (--late)."),
    ],
)
def test_what_is_not_there_yet_is_a_sentence(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["frontier.py", "--out", str(tmp_path), *words])
    with pytest.raises(SystemExit) as stop:
        frontier.main()
    assert message in f"{stop.value.code} {capsys.readouterr().err}"


def test_a_student_of_one_size_ends_no_chunk_by_surprise(tmp_path, monkeypatch):
    """Its points would have the names of those of the student for all sizes."""
    from argparse import Namespace

    from sparse_rl.beacon import add_beacon, save_beacon
    from sparse_rl.models import load_model

    for name, sizes in (("c2", (2,)), ("c2-4", (2, 4))):
        folder = tmp_path / "joint-0" / "checkpoints" / "step-000003" / "students" / name
        model, tokenizer = load_model("tiny:1x64")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        save_beacon(folder, add_beacon(model, sizes))
    (tmp_path / "joint-0" / "checkpoints" / "step-000003" / "training.pt").touch()
    points = list(frontier.wanted(Namespace(out=tmp_path, seed=0, study="linsys")))
    assert [folder.name for curve, _, folder, _ in points if curve == "joint, by surprise"] == 3 * ["c2-4"]
    assert len({point[:2] for point in points}) == len(points)


def test_training_is_cut_in_time_for_what_follows():
    def forever() -> None:
        while True:
            time.sleep(0.01)

    stay, start = Stay(minutes=0.5, kept=0.5 - 0.2 / 60), time.perf_counter()
    stay.training_ends = start + 0.2
    assert not stay.train(forever) and not stay.is_over() and time.perf_counter() - start < 5
    assert not stay.train(forever)  # at once
    assert Stay(math.inf).train(lambda: None) and Stay(1.0, kept=9.0).training_ends > time.perf_counter() + 20

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # by the user
        Stay(1.0).train(interrupted)
