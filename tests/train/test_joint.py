"""`scorer.every`: the compressor `learned` is trained between steps, and a run with it is a run like any other."""

import json
import signal
import subprocess

import pytest
import torch
from safetensors.torch import load_file

import sparse_rl.train.pooled
from sparse_rl import SparseRLError
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.models import companions_of
from sparse_rl.train.loop import Trainer
from sparse_rl.train.run import train
from sparse_rl.train.saving import resume
from tests.helpers.pools import Threads
from tests.helpers.runs import PATIENCE, command_that_is_stopped, recipe, run, write_recipe


def sections(**others):
    """Small steps whose every row is evicted several times."""
    given = {
        "model": {"name": "tiny-sums"},
        "rollout": {"compressor": "learned", "budget": 38, "compressor_options": {}, "prompts": 3, "group_size": 3},
        "scorer": {"every": 1, "trajectories": 4, "steps": 4, "pairs": 4},
        "learn": {"method": "shadow", "minibatches": 1},
        "run": {"steps": 4, "samples": 0},
        "eval": {"every": 0},
    }
    return {name: {**given.get(name, {}), **others.get(name, {})} for name in {**given, **others}}


def small(**others):
    return recipe(**sections(**others))


def scorer_of(model):
    return {name: tensor.clone() for name, tensor in companions_of(model)["learned"].tensors.items()}


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(tensor.equal(theirs[name]) for name, tensor in ours.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("joint") / "whole"
    train(small(), folder, show=False)
    return folder


def test_a_run_resumes_to_the_byte_and_its_checkpoints_have_the_scorer(whole, tmp_path):
    train(small(run={"steps": 2}), tmp_path / "parts", show=False)
    trainer = train(small(), tmp_path / "parts", resume=True, show=False)
    assert (tmp_path / "parts/metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    files = [folder / "checkpoints/step-000004/learned.safetensors" for folder in (whole, tmp_path / "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert same(load_file(files[0]), scorer_of(trainer.model)) and trainer.scorer.version == 4
    moments = [trainer.scorer.trainer.optimizer.state_dict()["state"][0]["exp_avg"]]
    again = Trainer(small(), tmp_path / "parts", show=False)
    resume(again)
    moments.append(again.scorer.trainer.optimizer.state_dict()["state"][0]["exp_avg"])
    assert moments[0].any() and moments[0].equal(moments[1])
    done = run("export", tmp_path / "parts", "--to", tmp_path / "export")
    assert done.returncode == 0 and (tmp_path / "export/learned.safetensors").read_bytes() == files[0].read_bytes()


def test_it_begins_as_snapkv_learns_and_is_replayed(whole, tmp_path):
    train(
        small(scorer={"every": 0}, rollout={"compressor": "snapkv"}, run={"steps": 1}), tmp_path / "snapkv", show=False
    )
    lines = read_lines(whole / "metrics.jsonl")
    (first,) = read_lines(tmp_path / "snapkv/metrics.jsonl")
    assert first == {name: lines[0][name] for name in first}  # the same completions, evictions and updates
    assert set(lines[0]) - set(first) == {
        f"scorer/{n}" for n in ("loss/before", "loss/after", "lost/frac", "pairs/count")
    }
    for line in lines:
        assert line["gap/abs/mean"] < 1e-4 and 0 < line["scorer/lost/frac"] < 1 and line["scorer/pairs/count"] > 0
        assert line["scorer/loss/after"] < line["scorer/loss/before"]
    assert all(line["time/scorer"] > 0 for line in read_lines(whole / "timing.jsonl"))
    file = load_file(whole / "checkpoints/step-000004/learned.safetensors")
    assert file["outer"].any() and (file["slope"] != 1).any()


def test_it_learns_every_so_many_steps(tmp_path):
    train(small(scorer={"every": 2}), tmp_path / "run", show=False)
    assert ["scorer/lost/frac" in line for line in read_lines(tmp_path / "run/metrics.jsonl")] == [0, 1, 0, 1]


def test_a_step_that_fails_after_the_scorer_learned_is_done_again(whole, tmp_path, monkeypatch):
    """The scorer is then between two steps, though no weight may have moved: nothing is saved."""
    settings = small(run={"checkpoint_every": 10})
    (tmp_path / "run").mkdir()
    (tmp_path / "run/recipe.yaml").write_text(settings.to_yaml())
    trainer, finish = Trainer(settings, tmp_path / "run", show=False), Trainer.finish_update

    def fails(self, clock):
        if self.progress.steps == 2:
            raise SparseRLError("no")
        finish(self, clock)

    monkeypatch.setattr(Trainer, "finish_update", fails)
    monkeypatch.setattr(Trainer, "update", lambda self, batches, clock: [])  # nothing else moves
    with pytest.raises(SparseRLError, match="no"):
        trainer.run()
    assert trainer.scorer.version == 3 and not find_checkpoints(tmp_path / "run/checkpoints")
    monkeypatch.undo()
    train(settings, tmp_path / "run", resume=True, show=False)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_run_that_is_stopped_goes_on_to_the_byte(whole, tmp_path, monkeypatch):
    learn = Trainer.update

    def stopped(self, batches, clock):
        if self.progress.steps == 2:
            monkeypatch.setattr(Trainer, "update", learn)
            monkeypatch.setattr(Trainer, "collect", interrupted)  # the step under way is finished, the next one not
        return learn(self, batches, clock)

    def interrupted(self, clock):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "update", stopped)
    with pytest.raises(KeyboardInterrupt):
        train(small(), tmp_path / "run", show=False)
    assert find_checkpoints(tmp_path / "run/checkpoints")[-1][0] == 3
    monkeypatch.undo()
    train(small(), tmp_path / "run", resume=True, show=False)
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_to_the_byte(whole, tmp_path):
    given = write_recipe(tmp_path, **sections(run={"checkpoint_every": 1}))
    lines = tmp_path / "run/metrics.jsonl"
    killed = command_that_is_stopped(signal.SIGKILL, lines, 2, "train", given, "--out", tmp_path / "run", seconds=0.1)
    done = subprocess.run(killed, capture_output=True, timeout=PATIENCE, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    done = run("train", tmp_path / "run", "--resume")
    assert done.returncode == 0, done.stderr
    assert lines.read_bytes() == (whole / "metrics.jsonl").read_bytes()
    files = [folder / "checkpoints/step-000004/learned.safetensors" for folder in (whole, tmp_path / "run")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_ahead_of_the_learner_the_sampler_has_a_scorer_of_its_own(tmp_path):
    (tmp_path / "run").mkdir()
    trainer = Trainer(small(rollout={"ahead": 1}), tmp_path / "run", show=False)
    trainer.publish_weights()
    fresh = scorer_of(trainer.model)
    trainer.step()
    trainer.source.wait_idle()
    assert same(scorer_of(trainer.sampler.model), fresh) and not same(scorer_of(trainer.model), fresh)
    trainer.step()  # gives the sampler what the first step learned
    trainer.source.wait_idle()
    assert not same(scorer_of(trainer.sampler.model), fresh)
    trainer.publish_weights()
    assert same(scorer_of(trainer.sampler.model), scorer_of(trainer.model))
    assert trainer.sampler.engine.compressor.scorer.tensors is companions_of(trainer.sampler.model)["learned"].tensors
    trainer.source.close()
    trainer.task.close()


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_pool_gets_the_scorer_with_the_weights(whole, tmp_path, monkeypatch, ahead):
    """Also after steps that move no weight: in the shadow view a group of equal rewards does not."""
    monkeypatch.setattr(sparse_rl.train.pooled, "RayTransport", lambda _, make_hands, *__: Threads(make_hands, never))
    pool = {"pool": "ray", "samplers": 2, "ahead": ahead}
    train(small(rollout=pool), tmp_path / "pool", show=False)
    if not ahead:
        assert (tmp_path / "pool/metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
        return
    train(small(rollout=pool), tmp_path / "again", show=False)
    assert (tmp_path / "pool/metrics.jsonl").read_bytes() == (tmp_path / "again/metrics.jsonl").read_bytes()
    assert all("scorer/lost/frac" in line for line in read_lines(tmp_path / "pool/metrics.jsonl"))


def never(member, finished):
    return None


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True])
def test_several_processes_hold_one_scorer(whole, tmp_path, shard):
    given = write_recipe(tmp_path, **sections(model={"shard": shard}))
    done = run("train", given, "--out", tmp_path / "two", "--num-processes", 2)
    assert done.returncode == 0, done.stderr
    one, two = (read_lines(folder / "metrics.jsonl") for folder in (whole, tmp_path / "two"))
    for mine, theirs in zip(two, one, strict=True):
        names = [n for n in theirs if n.startswith("scorer/")]
        assert len(names) == 4
        for name in ("reward/mean", "gap/abs/mean", *names):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5), name
    files = [load_file(folder / "checkpoints/step-000004/learned.safetensors") for folder in (whole, tmp_path / "two")]
    for name, tensor in files[0].items():
        torch.testing.assert_close(files[1][name], tensor, atol=1e-3, rtol=1e-2)


def test_prompts_alone(tmp_path):
    rollout = {"compressor": "prompt-only:learned", "budget": 12, "max_new_tokens": 16}
    train(small(rollout=rollout, run={"steps": 2}), tmp_path / "run", show=False)
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert all(line["scorer/pairs/count"] > 0 and line["gap/abs/mean"] < 1e-4 for line in lines), json.dumps(lines)


def test_adapters_and_a_model_that_has_a_scorer(whole, tmp_path):
    """A run goes on with the scorer that its model brings."""
    start = whole / "checkpoints/step-000004"
    trainer = Trainer(small(model={"name": str(start), "lora_rank": 2}), tmp_path / "run", show=False)
    assert same(scorer_of(trainer.model), load_file(start / "learned.safetensors"))
    train(small(model={"name": str(start), "lora_rank": 2}, run={"steps": 1}), tmp_path / "run", show=False)
    file = load_file(tmp_path / "run/checkpoints/step-000001/learned.safetensors")
    assert not same(file, load_file(start / "learned.safetensors"))


def test_mistakes_get_a_sentence():
    for given, said in [
        ({"rollout": {"compressor": "rkv"}}, "scorer.every is 1, but rollout.compressor is rkv, which learns nothing"),
        ({"rollout": {"ahead": 1}, "model": {"shard": True}}, "model.shard and rollout.ahead 1 only the sampler"),
        ({"scorer": {"lr": 0.0}}, "scorer.lr is 0.0"),
        ({"scorer": {"every": -1}}, "scorer.every"),
        ({"scorer": {"pairs": 0}}, "scorer.pairs"),
    ]:
        with pytest.raises(SparseRLError, match=said):
            small(**given)
    assert small(scorer={"every": 0}, rollout={"compressor": "rkv"}).scorer.steps == 4
