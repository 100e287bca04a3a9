"""Reports: figures equal the numbers of metrics.jsonl, damage becomes notes, verdicts change at their limits, hostile text stays text."""

import base64
import json
import math
import os
import random
import shlex
import shutil
import zlib

import numpy as np
import pytest
import torch

from sparse_rl.cache import Trace
from sparse_rl.cli.options import overrides
from sparse_rl.config import load_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.records import read_trajectories
from sparse_rl.report.bins import ALL, MOST, binned, points_for, rounded
from sparse_rl.report.curves import Curve
from sparse_rl.report.document import document, dumped
from sparse_rl.report.figures import escaped, markdown, png
from sparse_rl.report.page import page
from sparse_rl.report.read import find_runs, read_run, read_runs
from sparse_rl.report.recipe import command, differences
from sparse_rl.report.trajectories import read_samples
from sparse_rl.report.verdict import LIMITS, verdict
from sparse_rl.train.run import train
from tests.helpers.planted_runs import STEPS, plant

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


def sample(folder, step, lines, layers=2, heads=2):
    """Samples of a step, each with a trace in which the first token is gone early."""
    samples = folder / "samples" / f"step-{step:06d}"
    (samples / "traces").mkdir(parents=True)
    for i, line in enumerate(lines):
        tokens = len(line["tokens"])
        evicted_at = torch.full((layers, heads, tokens), 65535, dtype=torch.int32)
        evicted_at[0, 0, 0] = min(2, tokens)
        Trace(evicted_at.to(torch.uint16)).save(samples / "traces" / f"{i}.safetensors")
    text = "".join(json.dumps({"trace": f"traces/{i}.safetensors", **line}) + "\n" for i, line in enumerate(lines))
    (samples / "trajectories.jsonl").write_text(text)
    return samples


LINE = {
    "num_prompt_tokens": 1,
    "tokens": [3, 4, 5],
    "sampler_logprobs": [0.0, -1.0, -2.0],
    "old_logprobs": [0.0, -1.5, -2.0],
}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "it's mine"
    changes = {
        "steps": "4",
        "rollout.prompts": "4",
        "eval.every": "2",
        "eval.prompts": "8",
        "run.samples": "3",
        "checkpoint_every": "4",
    }
    train(load_recipe("tiny-sums", list(changes.items())), folder, show=False)
    return folder


# ------------------------------------------------------------------------------------------------------------ a real run


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


# ------------------------------------------------------------------------------------------------------------ bins


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
    """10,000 steps, 20 runs, 60 curves, and trajectories."""
    draw, names = random.Random(0), [f"stage{i}/quantity/stat" for i in range(60)]
    first = plant(
        tmp_path / "run00", ({"step": s, **{n: draw.gauss(0, 1) for n in names}} for s in range(1, 10_001)), ()
    )
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


# ------------------------------------------------------------------------------------------------------------ damage

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
        ([*STEPS, b'{"step": 5, "rew'], "line 5 of metrics.jsonl was cut off and is left out", [0.1, 0.2, 0.3, 0.4]),
        ([A, B, b"garbage\n", C, D], "line 3 of metrics.jsonl is no JSON object and is left out", [0.1, 0.2, 0.3, 0.4]),
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
            "(2 steps) is no number: gaps",
            [0.1, None, None, 0.4],
        ),
        ([{**A, "reward/mean": 10**400}, B, C, D], "(1 step) is no number: gaps", [None, 0.2, 0.3, 0.4]),
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
        ("just text", "not one of this version"),
        (
            "learn: {method: tis, old_key: .nan, when: 2020-01-01}\nmodel: {name: x}\ntask: {name: sums}",
            "no key learn.old_key",
        ),
        ("learn: &a {method: tis, me: *a}", "not one of this version"),
        (f"model: {{name: x}}\ntask: {{name: x}}\noptimizer: {{lr: {10**400}}}", "not one of this version"),
        ("model: {name: [1]}\ntask: {name: {}}\nrollout: {budget: [], stop: {1: 2}}", "not one of this version"),
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
    assert notes == [f"1 of 3 folders in {tmp_path} are no runs and are left out: notes"]
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


# ------------------------------------------------------------------------------------------------------------ trajectories


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


@pytest.mark.parametrize(
    ("change", "note"),
    [
        (lambda f: (f / "traces/0.safetensors").unlink(), "No such file"),
        (lambda f: ((f / "traces/0.safetensors").unlink(), os.mkfifo(f / "traces/0.safetensors")), "is no file"),
        (lambda f: ((f / "traces/0.safetensors").unlink(), (f / "traces/0.safetensors").symlink_to("0.safetensors")), "outside of its"),
        (lambda f: ((f / "trajectories.jsonl").unlink(), os.mkfifo(f / "trajectories.jsonl")), "is no file"),
        (lambda f: (f / "traces/0.safetensors").write_bytes(b"x"), "damaged"),
        (lambda f: Trace.dense(2, 2, 9).save(f / "traces/0.safetensors"), "its trace has 9 tokens, but there are 3"),
        (lambda f: Trace(torch.full((1, 1, 3), 2**31 - 1, dtype=torch.int32)).save(f / "traces/0.safetensors"), "too many"),
        (lambda f: (f / "trajectories.jsonl").write_text(json.dumps({**LINE, "trace": "../../../secret"}) + "\n"), "outside of its folder"),
        (lambda f: (f / "trajectories.jsonl").write_text(json.dumps({**LINE, "trace": "/etc/passwd"}) + "\n"), "outside of its folder"),
        (lambda f: (f / "trajectories.jsonl").write_text(json.dumps({**LINE, "trace": "a\0b"}) + "\n"), "names no trace"),
        (lambda f: (f / "trajectories.jsonl").write_text(json.dumps({**LINE, "tokens": [1, -1]}) + "\n"), "no list of token ids"),
        (lambda f: (f / "trajectories.jsonl").write_text(json.dumps({**LINE, "num_prompt_tokens": 4}) + "\n"), "num_prompt_tokens is 4"),
        (lambda f: (f / "trajectories.jsonl").write_text(json.dumps(LINE)), "was cut off"),
        (lambda f: (f / "trajectories.jsonl").write_text("[]\n"), "no JSON object"),
        (lambda f: (f / "trajectories.jsonl").unlink(), "there is no samples/step-000001/trajectories.jsonl"),
    ],
)  # fmt: skip
def test_damaged_samples_become_notes(tmp_path, change, note):
    run = plant(tmp_path / "run", STEPS)
    change(sample(run, 1, [LINE]))
    shown, notes = read_samples(run)
    assert any(note in text for text in notes), notes
    assert all(t["map"] is None for t in shown)
    json.loads(dumped(document([run])))


def test_damaged_tokenizers_show_ids(tmp_path, real):
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


def test_newest_samples_come_first_and_what_is_left_out_is_told(tmp_path):
    run = plant(tmp_path / "run", STEPS)
    for step in (9, 10, 200):
        sample(run, step, [{**LINE, "sample_index": i} for i in range(3)])
    everything, _ = read_samples(run)
    assert [(t["step"], t["sample_index"]) for t in everything] == [(s, i) for s in (200, 10, 9) for i in range(3)]
    few, notes = read_samples(run, most=4)
    assert (
        few == everything[:4]
        and "trajectories are left out, 2 of step 10 and those of 1 older steps: 4 are shown" in notes
    )
    few, notes = read_samples(run, most=3)
    assert few == everything[:3] and "trajectories are left out, those of 2 older steps: 3 are shown" in notes
    bare = [{**t, "map": None} for t in everything]
    texts, maps = sum(len(json.dumps(t)) for t in bare), [len(json.dumps(t["map"])) for t in everything]
    assert read_samples(run, space=2 * texts)[0] == everything
    assert sum(maps) < texts  # so half of the space is what counts for the texts
    fewer, notes = read_samples(run, space=2 * texts - 2)
    assert fewer == everything[:8] and any(
        "left out, 1 of step 9: their text would take more" in note for note in notes
    )
    none, notes = read_samples(run, space=9)
    assert none == [] and any("3 of step 200 and those of 2 older steps" in note for note in notes)


def test_maps_take_what_is_left(tmp_path):
    run = plant(tmp_path / "run", STEPS)
    samples = sample(run, 1, [LINE] * 4)
    for i in range(4):
        gone = np.random.default_rng(i).integers(3, 60_000, (20, 20, 3)).astype(np.uint16)
        Trace(torch.from_numpy(gone)).save(samples / "traces" / f"{i}.safetensors")
    everything, notes = read_samples(run)
    assert all(t["map"] for t in everything) and not any("left out" in note for note in notes)
    size = sum(len(json.dumps({**t, "map": None})) for t in everything) + sum(
        len(json.dumps(t["map"])) for t in everything[:2]
    )
    tight, notes = read_samples(run, space=size)
    assert tight == [*everything[:2], *({**t, "map": None} for t in everything[2:])]
    assert any("the maps of 2 of 4 trajectories are left out" in note for note in notes)


# ------------------------------------------------------------------------------------------------------------ hostile text


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


# ------------------------------------------------------------------------------------------------------------ verdicts


def curves(**named):
    """Curves of 50 points: a number all along, or (first half, second half)."""
    found = {}
    for name, value in named.items():
        first, second = value if isinstance(value, tuple) else (value, value)
        values = np.array([first] * 25 + [second] * 25, dtype=np.float64)
        found[name.replace("__", "/")] = Curve(np.arange(1, 51), values)
    return found


ONE = {  # rule -> (curves whose number is x, its figure)
    "reject": (lambda x: curves(reject__trajectories__frac=x), "reject/trajectories/frac"),
    "rewarded": (
        lambda x: curves(reject__rewarded__frac=0.2 * x, reject__unrewarded__frac=0.2),
        "reject/rewarded/frac",
    ),
    "alpha": (lambda x: curves(gap__alpha__p05=x, old__entropy__mean=0.5), "gap/alpha/p05"),
    "xi_low": (lambda x: curves(gap__xi__p05=x), "gap/xi/p05"),
    "xi_high": (lambda x: curves(gap__xi__p95=x), "gap/xi/p95"),
    "ess": (lambda x: curves(gap__ess__frac=x), "gap/ess/frac"),
    "loops": (lambda x: curves(rollout__loops__frac=x), "rollout/loops/frac"),
    "truncated": (lambda x: curves(rollout__truncated__frac=x), "rollout/truncated/frac"),
    "collapse": (lambda x: curves(old__entropy__mean=(2.0, 2.0 * x)), "old/entropy/mean"),
    "explosion": (lambda x: curves(old__entropy__mean=(2.0, 2.0 * x)), "old/entropy/mean"),
    "clip": (lambda x: curves(update__clip__frac=x), "update/clip/frac"),
    "norm": (lambda x: curves(update__grad_norm=(0.1, 0.1 * x)), "update/grad_norm"),
    "skipped": (lambda x: curves(update__skipped__count=x), "update/skipped/count"),
    "empty": (lambda x: curves(update__empty__count=x), "update/empty/count"),
    "flat": (lambda x: curves(advantage__groups_without_variance__frac=x), "advantage/groups_without_variance/frac"),
    "gap": (lambda x: curves(eval__dense__accuracy=0.5, eval__sparse__accuracy=(0.5, 0.5 - x)), "eval/sparse/accuracy"),
    "held_out": (lambda x: curves(eval__dense__accuracy=(0.5, 0.5 - x)), "eval/dense/accuracy"),
    "memory": (lambda x: curves(cache__bytes_saved__frac=x, cache__tokens_saved__frac=0.5), "cache/bytes_saved/frac"),
    "rollout": (lambda x: curves(time__rollout=2.0 * x, time__step=2.0), "time/rollout"),
    "ungraded": (
        lambda x: curves(grade__error__count=100.0 * x, rollout__trajectories__count=100.0),
        "grade/error/count",
    ),
    "student": (lambda x: curves(student__c8__kl=(0.5, 0.5 * x)), "student/c8/kl"),
}


@pytest.mark.parametrize("rule", [rule for rule in LIMITS if rule != "reward"])
def test_each_rule_turns_at_its_limits(rule):
    make, figure = ONE[rule]
    look, bad = LIMITS[rule]
    step = 1e-3 if bad > look else -1e-3  # towards bad

    def said(x):
        return next((s["level"] for s in verdict(make(x)) if s["figure"] == figure), "good")

    assert said(look - step) == "good" and said(look + step) == "look"
    if math.isfinite(bad):
        assert said(bad - step) == "look" and said(bad + step) == "bad"
    worst = next(s for s in verdict(make(look + step)) if s["figure"] == figure)
    assert math.isfinite(worst["value"]) and any(c.isdigit() for c in worst["text"])
    assert verdict({name: Curve(c.step, c.value * np.nan) for name, c in make(look + step).items()}) == []
    for name in make(look):
        verdict({other: c for other, c in make(look).items() if other != name})


def test_reward_is_compared_with_its_noise():
    noise = np.random.default_rng(0).normal(size=50)
    noise[:10] = (noise[:10] - noise[:10].mean()) / noise[:10].std(ddof=1)
    noise[-10:] = (noise[-10:] - noise[-10:].mean()) / noise[-10:].std(ddof=1)
    error = math.sqrt(2 / 10)
    for times, expected in ((2.1, "good"), (1.9, "look"), (-1.9, "look"), (-2.1, "bad")):
        values = noise + np.where(np.arange(50) >= 40, times * error, 0.0)
        (said,) = verdict({"reward/mean": Curve(np.arange(50), values)})
        assert said["level"] == expected and said["value"] == pytest.approx(times * error, abs=1e-5)
    assert [s["level"] for s in verdict(curves(reward__mean=(0.0, 1.0)))] == ["good"]
    assert [s["level"] for s in verdict(curves(reward__mean=0.5))] == ["look"]
    assert verdict({"reward/mean": Curve(np.arange(14), np.arange(14.0))}) == []


def test_what_is_said_beside_a_limit():
    sure = verdict(curves(gap__alpha__p05=0.99, old__entropy__mean=0.019))
    assert [s["level"] for s in sure if s["figure"] == "gap/alpha/p05"] == ["look"] and "blind" in sure[0]["text"]
    assert all(s["level"] == "good" for s in verdict(curves(gap__alpha__p05=0.99, old__entropy__mean=0.021)))
    assert verdict(curves(cache__bytes_saved__frac=0.0, cache__tokens_saved__frac=0.0)) == []  # dense on purpose
    assert all(
        s["level"] == "good" for s in verdict(curves(old__entropy__mean=(0.05, 0.25)))
    )  # five times little is little
    assert verdict(curves(reject__rewarded__frac=0.04, reject__unrewarded__frac=0.0)) == []
    assert [s["level"] for s in verdict(curves(reject__rewarded__frac=0.06, reject__unrewarded__frac=0.0))] == ["look"]
    hard = verdict(curves(advantage__groups_without_variance__frac=0.9, reward__right__frac=0.02))
    assert "too hard" in hard[0]["text"] and hard[0]["level"] == "bad"
    assert verdict({}) == []
    mixed = verdict(curves(reject__trajectories__frac=0.9, rollout__loops__frac=0.0, update__clip__frac=0.1))
    assert [s["level"] for s in mixed] == ["bad", "look", "good"]


def test_only_the_last_fifth_is_now():
    values = np.array([0.9] * 40 + [0.01] * 10)
    (said,) = verdict({"reject/trajectories/frac": Curve(np.arange(50), values)})
    assert said["level"] == "good" and said["value"] == 0.01


def test_limits_are_those_of_the_docs():
    assert LIMITS["reject"] == (0.30, 0.60) and LIMITS["alpha"][0] == 0.86 and LIMITS["collapse"][1] == 0.10
    assert set(ONE) | {"reward"} == set(LIMITS)


# ------------------------------------------------------------------------------------------------------------ pictures and Markdown


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
