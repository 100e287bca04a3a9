"""Regret of a run's completions: computed with the run's weights, kept beside the traces, shown on the page."""

import base64
import json
import os
import shutil
import zlib

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from sparse_rl import SparseRLError, give_back, regret, token_logprobs
from sparse_rl.cache.hindsight import Hindsight
from sparse_rl.cli import app
from sparse_rl.config import load_recipe
from sparse_rl.files import names_python_file
from sparse_rl.models import load_model
from sparse_rl.records import read_trajectories
from sparse_rl.report.document import document
from sparse_rl.report.trajectories import _add_regret, _newest, read_map, read_samples
from sparse_rl.train.hindsight import _nearest, write_hindsights
from tests.helpers.planted_runs import LINE, STEPS, plant, sample


@pytest.fixture
def copied(real, tmp_path):
    return shutil.copytree(real, tmp_path / "run")


def stored(run):
    """(step, trajectory, its file) of all samples of a run."""
    for samples in sorted((run / "samples").iterdir()):
        for t in read_trajectories(samples):
            name = f"{t.prompt_index:06d}-{t.sample_index:03d}.safetensors"
            yield int(samples.name[-6:]), t, samples / "regret" / name


def test_every_stored_completion_has_the_regret_of_its_weights(copied):
    done = write_hindsights(copied)
    found = list(stored(copied))
    assert done.computed == len(found) > 0 and not done.there
    weights = {0: "tiny-sums"} | {int(path.name[-6:]): str(path) for path in (copied / "checkpoints").glob("step-*")}
    assert 4 in weights
    for step, t, path in found:
        kept = Hindsight.load(path)
        distance = {number: abs(number - (step - 1)) for number in weights}
        assert kept.step == min(number for number in weights if distance[number] == min(distance.values()))
        model, _ = load_model(weights[kept.step])
        mass = regret(model, t.tokens, t.trace).mass
        torch.testing.assert_close(kept.mass, mass, rtol=0, atol=0)
        total = mass.double().sum((0, 1))
        assert (total[kept.tokens.long()].diff() <= 0).all() and kept.tokens.unique().numel() == len(kept.tokens) <= 8
        rest = total.clone()
        rest[kept.tokens.long()] = 0
        assert not len(kept.tokens) or rest.max() <= total[kept.tokens.long()].min()
        for token, change in zip(kept.tokens.tolist(), kept.changes, strict=True):
            other = give_back(t.trace, torch.arange(len(t.tokens)) == token)
            after, before = (token_logprobs(model, t.tokens, trace) for trace in (other, t.trace))
            torch.testing.assert_close(change, (after - before).float(), rtol=0, atol=1e-5)
    assert any(len(Hindsight.load(path).tokens) for *_, path in found)  # something was evicted and missed


def test_what_is_there_is_not_computed_again_and_what_is_missing_is(copied):
    write_hindsights(copied)
    *_, (_, _, path) = stored(copied)
    kept, count = path.read_bytes(), sum(1 for _ in stored(copied))
    path.unlink()
    done = write_hindsights(copied)
    assert (done.computed, done.there) == (1, count - 1) and path.read_bytes() == kept
    assert f"{count - 1} had it already" in str(done)
    assert write_hindsights(copied, most=1).there == 1


def test_the_command_computes_and_the_page_has_it(copied, tmp_path):
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(copied), "--regret", "-o", str(out)])
    assert result.exit_code == 0 and "regret of" in result.output
    shown = document([copied])["runs"][0]["trajectories"]
    files = {(step, t.prompt_index, t.sample_index): path for step, t, path in stored(copied)}
    assert shown and len(shown) == len(files)
    for t in shown:
        kept = Hindsight.load(files[t["step"], t["prompt_index"], t["sample_index"]])
        it = t["map"]["regret"]
        levels = np.frombuffer(zlib.decompress(base64.b64decode(it["mass"]), -15), np.uint8).reshape(kept.mass.shape)
        back = np.expm1(levels / 254 * np.log1p(100 * it["top"])) / 100
        np.testing.assert_allclose(back, kept.mass, rtol=0.03, atol=2e-4)
        assert ((levels > 0) == (kept.mass.numpy() > 0)).all()
        changes = np.frombuffer(zlib.decompress(base64.b64decode(it["changes"]), -15), "<i2").reshape(
            kept.changes.shape
        )
        np.testing.assert_allclose(changes / 1000, kept.changes, atol=6e-4)
        assert it["tokens"] == kept.tokens.tolist() and it["step"] == kept.step


def test_a_run_without_completions_or_weights_is_told_so(tmp_path):
    run = plant(tmp_path / "run", STEPS, recipe="model: {name: somebody/model}\ntask: {name: sums}\n")
    with pytest.raises(SparseRLError, match=r"kept no completions; train with run.samples above 0"):
        write_hindsights(run)
    with pytest.raises(SparseRLError, match=r"has no checkpoint and its model somebody/model is not on this machine"):
        _nearest(run, load_recipe(str(run / "recipe.yaml")), 3)


def test_a_link_out_of_the_run_is_not_followed(copied, tmp_path):
    samples = next((copied / "samples").iterdir())
    (tmp_path / "elsewhere").mkdir()
    (samples / "regret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SparseRLError, match="links to a place outside the run's folder"):
        write_hindsights(copied)
    assert not list((tmp_path / "elsewhere").iterdir())
    (samples / "regret").unlink()
    shutil.move(copied / "recipe.yaml", tmp_path / "recipe.yaml")
    (copied / "recipe.yaml").symlink_to(tmp_path / "recipe.yaml")
    with pytest.raises(SparseRLError, match=r"recipe.yaml is a link"):
        write_hindsights(copied)


def test_a_file_that_cannot_be_written_is_one_sentence(copied):
    """A stranger's run may have any number as a prompt's."""
    for lines in copied.glob("samples/*/trajectories.jsonl"):
        lines.write_text(lines.read_text().replace('"prompt_index": ', '"prompt_index": ' + "9" * 300))
    with pytest.raises(SparseRLError, match="could not be written"):
        write_hindsights(copied)


GOOD = Hindsight(1, torch.rand(2, 2, 3), torch.tensor([0], dtype=torch.int32), torch.zeros(1, 3))


@pytest.mark.parametrize(
    ("write", "note"),
    [
        (lambda path: path.write_bytes(b"x"), "cannot be read"),
        (lambda path: path.symlink_to("/etc/passwd"), "a link out of its folder"),
        (lambda path: path.mkdir(), "is not a file"),
        (lambda path: (path.touch(), os.truncate(path, 2**40)), "has 1,099,511,627,776 bytes, too many for a map"),
        (lambda path: Hindsight(1, GOOD.mass[:1], GOOD.tokens, GOOD.changes).save(path), "of [1, 2, 3] layers"),
        (lambda path: Hindsight(1, -GOOD.mass, GOOD.tokens, GOOD.changes).save(path), "a negative mass"),
        (lambda path: Hindsight(1, GOOD.mass, GOOD.tokens + 3, GOOD.changes).save(path), "names token 3 of 3"),
        (lambda path: Hindsight(1, GOOD.mass, GOOD.tokens - 1, GOOD.changes).save(path), "names token"),
        (lambda path: Hindsight(1, GOOD.mass, GOOD.tokens, GOOD.changes[:, :2]).save(path), "its changes are [1, 2]"),
        (lambda path: Hindsight(1, GOOD.mass.double(), GOOD.tokens, GOOD.changes).save(path), "lacks mass"),
        (lambda path: Hindsight(-1, GOOD.mass, GOOD.tokens, GOOD.changes).save(path), "its step '-1'"),
    ],
)
def test_a_damaged_file_is_a_note_and_the_map_stays(tmp_path, write, note):
    run = plant(tmp_path / "run", STEPS)
    samples = sample(run, 1, [LINE])
    (samples / "regret").mkdir()
    write(samples / "regret" / "0.safetensors")
    (shown,), notes = read_samples(run)
    assert shown["map"] is not None and "regret" not in shown["map"]
    assert any("has no regret" in text and note in text for text in notes), notes
    assert str(tmp_path) not in json.dumps(notes)


def test_a_whole_file_is_shown_and_a_new_one_replaces_it(tmp_path):
    run = plant(tmp_path / "run", STEPS)
    samples = sample(run, 1, [LINE])
    (samples / "regret").mkdir()
    for top in (0.5, 2.0):
        Hindsight(7, GOOD.mass * 0 + top, GOOD.tokens, GOOD.changes).save(samples / "regret" / "0.safetensors")
        (shown,), notes = read_samples(run)
        assert (shown["map"]["regret"]["top"], shown["map"]["regret"]["step"]) == (top, 7)
        assert not any("regret" in note for note in notes)


def test_a_run_that_cannot_be_asked_does_not_keep_the_others_from_it(copied, tmp_path):
    bare = plant(tmp_path / "bare", STEPS, recipe="model: {name: tiny-sums}\ntask: {name: sums}\n")
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(bare), str(copied), "--regret", "-o", str(out)])
    assert result.exit_code == 0 and out.is_file()
    assert "bare: no regret" in result.output and "kept no completions" in result.output
    assert "completions computed" in result.output
    out.unlink()
    result = CliRunner().invoke(app, ["report", str(bare), "--regret", "-o", str(out)])
    assert isinstance(result.exception, SparseRLError) and not out.is_file()


def test_a_step_that_is_being_written_is_passed_over(copied):
    count = sum(1 for _ in stored(copied))
    (copied / "samples" / "step-000099" / "traces").mkdir(parents=True)
    assert write_hindsights(copied).computed == count


def test_a_foreign_run_runs_nothing(copied, tmp_path):
    """Its recipe names Python files for all that it may."""
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    recipe = copied / "recipe.yaml"
    data = yaml.safe_load(recipe.read_text())
    data["task"] = {"name": str(tmp_path / "evil.py")}
    data["rollout"]["compressor"] = str(tmp_path / "evil.py")
    recipe.write_text(yaml.safe_dump(data))
    assert names_python_file(next(iter(load_recipe(str(recipe)).may_name_code().values())))
    assert write_hindsights(copied).computed > 0
    assert not (tmp_path / "ran").exists()


def test_regret_takes_no_space_from_the_maps(copied):
    write_hindsights(copied)
    whole, _ = read_samples(copied)
    sizes = [len(json.dumps(t["map"]["regret"])) for t in whole]
    maps = [{**t["map"], "regret": None} for t in whole]
    for fit in (0, 1, len(sizes)):
        notes, (chosen, _) = [], _newest(copied, 64, 10**9, [])
        for _, samples, line, shown in chosen:
            shown["map"], _ = read_map(samples, line)
        _add_regret(chosen, sum(sizes[:fit]), notes)
        found = [shown["map"] for *_, shown in chosen]
        assert ["regret" in it for it in found] == [i < fit for i in range(len(sizes))]
        assert [{**it, "regret": None} for it in found] == maps
        omitted = f"the regret of {len(sizes) - fit} of {len(sizes)} trajectories is omitted"
        assert any(omitted in note for note in notes) == (fit < len(sizes))
