"""Reports: figures equal the numbers of metrics.jsonl, damage becomes notes, hostile text stays text."""

import base64
import json
import math
import random
import shlex
import shutil
import zlib

import numpy as np
import pytest

from sparse_rl.cli.options import overrides
from sparse_rl.config import load_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.records import read_trajectories
from sparse_rl.report.document import document, dumped
from sparse_rl.report.figures import escaped, markdown, png
from sparse_rl.report.page import page
from sparse_rl.report.read import find_runs, read_run, read_runs
from sparse_rl.report.recipe import command, differences
from tests.helpers.planted_runs import LINE, STEPS, plant, sample

HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\u202egnp.exe",
    "nul\0here",
    "\u2028\u2029",
    "\ud800",
    "a|b`c`$d$_e_",
    "'; rm -rf ~; '",
]


# ---------- a real run


def test_curves_equal_the_files(real):
    run = document([real])["runs"][0]
    expected = {}
    for name in ("metrics.jsonl", "timing.jsonl"):
        for line in map(json.loads, (real / name).read_text().splitlines()):
            for key, value in line.items():
                if key != "step":
                    expected.setdefault(key, {})[line["step"]] = value
    assert run["curves"].keys() == expected.keys()
    for name, points in expected.items():
        curve = run["curves"][name]
        assert curve.keys() == {"step", "mean"}
        found = {step: value for step, value in zip(curve["step"], curve["mean"]) if value is not None}
        assert found == {step: float(f"{value:.6g}") for step, value in points.items() if value is not None}, name
    seconds = sum(value for name in ("time/step", "time/eval") for value in expected[name].values())
    assert run["steps"] == 4 and run["notes"] == []
    assert run["seconds"] == pytest.approx(seconds, rel=1e-5) and run["clock"]["step"] == [0, 1, 2, 3, 4]
    assert run["clock"]["seconds"][0] == pytest.approx(expected["time/eval"][0], rel=1e-5)


def test_trajectories_equal_the_samples(real):
    shown = document([real])["runs"][0]["trajectories"]
    steps = sorted((int(p.name[5:]) for p in (real / "samples").iterdir()), reverse=True)
    assert [t["step"] for t in shown] == [step for step in steps for _ in range(3)]
    for step in steps:
        folder = real / "samples" / f"step-{step:06d}"
        lines = [json.loads(line) for line in (folder / "trajectories.jsonl").read_text().splitlines()]
        for t, line, kept in zip(
            [t for t in shown if t["step"] == step], lines, read_trajectories(folder), strict=True
        ):
            first = line["num_prompt_tokens"]
            assert "".join(t["pieces"][:first]) == line["prompt"]
            assert "".join(t["pieces"][first:]).startswith(line["text"])
            assert t["sampler"] == [round(v, 5) + 0.0 for v in line["sampler_logprobs"][first:]]
            assert t["old"] == [round(v, 5) + 0.0 for v in line["old_logprobs"][first:]]
            assert (t["reward"], t["verdict"], t["accepted"], t["finish"]) == tuple(
                line[k] for k in ("reward", "verdict", "accepted", "finish_reason")
            )
            data = zlib.decompress(base64.b64decode(t["map"]["data"]), wbits=-15)
            shape = (t["map"]["layers"], t["map"]["heads"], t["map"]["tokens"])
            assert np.array_equal(np.frombuffer(data, dtype="<u2").reshape(shape), kept.trace.evicted_at.numpy())


def test_the_command_makes_the_recipe_again(real):
    run = document([real])["runs"][0]
    program, action, name, *rest = shlex.split(run["command"])
    assert (program, action, name, rest[-2:]) == (
        "sparse-rl",
        "train",
        "tiny-sums",
        ["--out", f"{real}-again"],
    )
    assert {key for key, _ in overrides(rest[:-2])} == {
        "run.steps",
        "run.samples",
        "run.checkpoint_every",
        "rollout.prompts",
        "eval.every",
        "eval.prompts",
    }
    assert load_recipe(name, overrides(rest[:-2])) == load_recipe(real)
    assert run["method"] == "sparse-rl" and run["recipe"]["rollout.compressor_options.protect_prompt"] is True


def test_the_command_of_a_recipe_far_from_ours_names_its_file(tmp_path):
    recipe = load_recipe("tiny-sums", [("model.name", "other"), ("task.name", "file.py")])
    assert (
        command(recipe.to_dict(), True, "runs/a b") == "sparse-rl train 'runs/a b/recipe.yaml' --out 'runs/a b-again'"
    )
    hostile = load_recipe(
        "tiny-sums",
        [
            ("rollout.stop", json.dumps(["$(touch x)", "-x", "é"])),
            ("run.project", json.dumps("'; rm x")),
            ("task.seed", "-1"),
        ],
    )
    words = shlex.split(command(hostile.to_dict(), True, "-"))
    assert "--task.seed=-1" in words  # -1 alone would look like an option
    assert load_recipe(words[2], overrides(words[3:-2])) == hostile


def test_differences_are_those_of_recipes_alone():
    one, other = (load_recipe("tiny-sums", [("budget", budget)]).to_dict() for budget in ("38", "44"))
    other["rollout"]["compressor_options"]["window"] = 8
    assert differences([one, {}, other]) == [
        {"key": "rollout.budget", "values": [38, None, 44]},
        {"key": "rollout.compressor_options.window", "values": [None, None, 8]},
    ]
    assert differences([one, {}, one]) == [] and differences([]) == []


# ---------- damage

A, B, C, D = STEPS
NOT_FINITE = [
    {"step": 1},
    b'{"step": 1, "reward/mean": NaN}\n',
    {"step": 2, "reward/mean": None},
    b'{"step": 3, "reward/mean": -Infinity}\n',
    D,
]
STEPLESS = [{"reward/mean": 9}, {"step": "2"}, {"step": True}, {"step": -1}, {"step": 1e9}, {"step": 2**60}]


@pytest.mark.parametrize(
    ("lines", "note", "mean"),  # of steps 1, 2, ...
    [
        ([*STEPS, b'{"step": 5, "rew'], "line 5 of metrics.jsonl was cut off and is omitted", [0.1, 0.2, 0.3, 0.4]),
        (
            [A, B, b"garbage\n", C, D],
            "line 3 of metrics.jsonl is not a JSON object and is omitted",
            [0.1, 0.2, 0.3, 0.4],
        ),
        (
            [b"[1]\n", b"7\n", b"\xff\n", b"\n", b"[" * 99999 + b"\n", *STEPS],
            "5 lines (1, 2, 3, 4, 5)",
            [0.1, 0.2, 0.3, 0.4],
        ),
        ([*STEPLESS, *STEPS], "6 lines (1, 2, 3, 4, 5, ...) of metrics.jsonl have no whole step", [0.1, 0.2, 0.3, 0.4]),
        (NOT_FINITE, "reward/mean (3 steps) is null, not finite or beyond 1e100: gaps", [None, None, None, 0.4]),
        ([A, {"step": 2, "x": 1.0}, C, D], "reward/mean (1 step) is missing: gaps", [0.1, None, 0.3, 0.4]),
        (
            [A, {**B, "reward/mean": "high"}, {**C, "reward/mean": True}, D],
            "(2 steps) is not a number: gaps",
            [0.1, None, None, 0.4],
        ),
        ([{**A, "reward/mean": 10**400}, B, C, D], "(1 step) is not a number: gaps", [None, 0.2, 0.3, 0.4]),
        (
            [*STEPS, {**C, "reward/mean": 1}, {**D, "reward/mean": 1}],
            "has 2 steps more than once (3, 4): the later",
            [0.1, 0.2, 1.0, 1.0],
        ),
        ([C, A, B], "line 2 of metrics.jsonl goes back to an earlier step", [0.1, 0.2, 0.3]),
        ([A, B, D], "1 step between 1 and 4 is missing in metrics.jsonl: gaps", [0.1, 0.2, None, 0.4]),
        ([{"step": 1, "x": 1.0}], "metrics.jsonl has no reward/mean", None),
        ([], "metrics.jsonl is empty", None),
        (None, "there is no metrics.jsonl", None),
    ],
)
def test_damage_becomes_notes(tmp_path, lines, note, mean):
    folder = plant(tmp_path / "run", lines, None)
    run = document([folder])["runs"][0]
    assert any(note in text for text in run["notes"]), run["notes"]
    assert (
        "there is no timing.jsonl" in run["notes"]
        and run["seconds"] == 0.0
        and run["clock"] == {"step": [], "seconds": []}
    )
    assert run["curves"].get("reward/mean") == (
        None if mean is None else {"step": list(range(1, len(mean) + 1)), "mean": mean}
    )
    json.loads(dumped(run))
    png([read_run(folder)])
    assert markdown([read_run(folder)]).startswith("# Report")


def test_lines_cut_anywhere_never_fail(tmp_path, real):
    """A run killed at any byte of its files is shown."""
    data = {name: (real / name).read_bytes() for name in ("metrics.jsonl", "timing.jsonl", "recipe.yaml")}
    draw = random.Random(1)
    for number in range(25):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, whole in data.items():
            (folder / name).write_bytes(whole[: draw.randrange(len(whole))])
        run = document([folder])["runs"][0]
        complete = (folder / "metrics.jsonl").read_bytes().rpartition(b"\n")[0]
        steps = [json.loads(line)["step"] for line in complete.splitlines() if b"reward/mean" in line]
        assert run["curves"].get("reward/mean", {"step": []})["step"] == steps


def test_evaluations_and_steps_share_a_number(tmp_path):
    lines = [{"step": 0, "eval/dense/accuracy": 0.1}, *STEPS[:2], {"step": 2, "eval/dense/accuracy": 0.5}]
    run = document([plant(tmp_path / "run", lines)])["runs"][0]
    assert run["curves"]["eval/dense/accuracy"] == {"step": [0, 2], "mean": [0.1, 0.5]}
    assert run["curves"]["reward/mean"] == {"step": [1, 2], "mean": [0.1, 0.2]}
    assert not any("more than once" in note or "missing" in note for note in run["notes"])


@pytest.mark.parametrize(
    ("recipe", "note"),
    [
        (None, "there is no recipe.yaml"),
        ("a: [", "recipe.yaml cannot be read"),
        ("just text", "does not fit this version"),
        (
            "learn: {method: tis, old_key: .nan, when: 2020-01-01}\nmodel: {name: x}\ntask: {name: sums}",
            "no key learn.old_key",
        ),
        ("learn: &a {method: none, me: *a}", "recipe.yaml cannot be read"),
        (f"model: {{name: x}}\ntask: {{name: x}}\noptimizer: {{lr: {10**400}}}", "recipe.yaml cannot be read"),
        ("model: {name: [1]}\ntask: {name: {}}\nrollout: {budget: [], stop: {1: 2}}", "does not fit this version"),
    ],
)
def test_recipes_of_other_versions_are_shown_as_they_are(tmp_path, recipe, note):
    run = document([plant(tmp_path / "run", STEPS, (), recipe), plant(tmp_path / "other", STEPS)])["runs"][0]
    assert any(note in text for text in run["notes"]), run["notes"]
    assert run["method"] == ("tis" if recipe and "tis" in recipe else "unknown")
    if recipe and "old_key" in recipe:
        assert run["recipe"] == {
            "learn.method": "tis",
            "learn.old_key": "nan",
            "learn.when": "2020-01-01",
            "model.name": "x",
            "task.name": "sums",
        }
        assert run["command"].startswith("sparse-rl train ") and "recipe.yaml" in run["command"]


def test_finding_runs(tmp_path):
    for name in ("b", "a"):
        plant(tmp_path / name, STEPS)
    (tmp_path / "notes").mkdir()
    (tmp_path / ".hidden").mkdir()
    (tmp_path / "file").write_text("")
    found, notes = find_runs([tmp_path, tmp_path / "a", tmp_path / "b" / ".." / "b"])
    assert found == [tmp_path / "a", tmp_path / "b"]
    assert notes == [f"1 of 3 folders in {tmp_path} is not a run and is omitted: notes"]
    for path in (tmp_path / "notes", tmp_path / "file", tmp_path / "absent"):
        with pytest.raises(SparseRLError, match="give a folder with"):
            document([tmp_path, path])
    with pytest.raises(SparseRLError, match="neither"):
        read_run(tmp_path / "notes")
    shutil.rmtree(tmp_path / "a")
    watched = document([tmp_path / "a", tmp_path / "b"], live=0.5)
    assert watched["live"] == {"every": 0.5} and [run["name"] for run in watched["runs"]] == [str(tmp_path / "b")]
    assert watched["notes"] == [f"{tmp_path / 'a'} holds no run at the moment"]


def test_a_growing_file_is_read_again(tmp_path):
    folder = plant(tmp_path / "run", STEPS[:2])
    assert read_run(folder).steps == 2
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(STEPS[2]) + "\n")
    assert read_run(folder).steps == 3


# ---------- hostile text


def test_hostile_text_is_text(tmp_path):
    line = {**LINE, "pieces": HOSTILE[:3], "verdict": HOSTILE[0], "finish_reason": HOSTILE[3]}
    recipe = json.dumps({"learn": {"method": HOSTILE[0], HOSTILE[6]: HOSTILE[2]}, "model": {"name": HOSTILE[4]}})
    folder = plant(tmp_path / HOSTILE[6], [{"step": 1, **{text: 0.5 for text in HOSTILE}}], (), recipe)
    sample(folder, 1, [line, {**LINE, "pieces": HOSTILE[3:6]}])
    found = document([folder])
    whole, empty = page(found), page({**found, "runs": [], "differences": [], "notes": []})
    data = whole.split('id="data">')[1].split("</script>")[0]
    assert whole.count("</") == empty.count("</")
    assert "<" not in data and data.isascii() and "NaN" not in data
    assert json.loads(data) == json.loads(json.dumps(found))
    shown = json.loads(data)["runs"][0]
    assert shown["trajectories"][0]["pieces"] + shown["trajectories"][1]["pieces"] == HOSTILE[:6]
    assert set(HOSTILE) == set(shown["curves"]) and shown["method"] == HOSTILE[0]
    assert shlex.split(shown["command"])[2] == f"{folder}/recipe.yaml"
    run = read_run(folder)
    png([run, run])
    text = markdown([run], HOSTILE)
    assert "<script" not in text.replace("\\<script", "") and not set(text) & set("\0\u202e\u2028\ud800")


def test_nan_never_reaches_the_page():
    with pytest.raises(ValueError):
        page({"live": None, "value": math.nan})


# ---------- pictures and Markdown


def test_the_picture_is_one(real):
    picture = png(read_runs([real, real])[0])
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    import io

    from matplotlib import image

    pixels = image.imread(io.BytesIO(picture))
    assert pixels.shape[:2] == (1000, 1700) and pixels[..., :3].std() > 0.05


def test_markdown_says_last_and_best(tmp_path):
    rows = [{"step": s, "reward/mean": r} for s, r in enumerate((0.1, 0.75, 0.25), 1)]
    recipes = [load_recipe("tiny-sums", [("budget", b)]).to_yaml() for b in ("38", "44")]
    runs = [read_run(plant(tmp_path / name, rows, (), recipe)) for name, recipe in zip(("a_b", "c|d"), recipes)]
    text = markdown(runs, ["a *note*"])
    assert "0.250 (0.750)" in text and "| rollout.budget | 38 | 44 |" in text and "a \\*note\\*" in text
    assert "a\\_b" in text and "c\\|d" in text
    commands = text.split("```sh\n")[1].split("\n```")[0].splitlines()
    assert commands == [
        f"sparse-rl train tiny-sums --out {runs[0].folder}-again",
        f"sparse-rl train tiny-sums --rollout.budget 44 --out '{runs[1].folder}-again'",
    ]
    assert escaped("[x](javascript:1)\n# y") == "\\[x\\](javascript:1) \\# y"
