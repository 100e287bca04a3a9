"""A run whose samplers are a pool is the run of one process, to the byte, whatever happens to them.

Here they are threads of this process; tests/pool/test_ray.py has them as processes of a Ray cluster.
"""

import json
import math
import os
import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import sparse_rl.train.pooled
from sparse_rl.errors import SparseRLError
from sparse_rl.files import read_lines
from sparse_rl.pool.pieces import cut
from sparse_rl.pool.weights import Versions, bytes_of
from sparse_rl.train import remote, saving
from sparse_rl.train.ask import Done, closed, opened
from sparse_rl.train.run import train
from tests.helpers.pools import Threads, copied
from tests.helpers.runs import recipe


@pytest.fixture
def pools(monkeypatch):
    """The transports of runs that follow; `mishap` of the fixture is what happens to their members."""
    made = []

    def threads(address, make_hands, samplers, on_gpu, store_bytes, processes, patience):
        made.append(Threads(make_hands, threads.mishap))
        return made[-1]

    threads.mishap = lambda member, finished: None
    threads.made = made
    monkeypatch.setattr(sparse_rl.train.pooled, "RayTransport", threads)
    return threads


def losing(seed, most=6):
    draw, lost = random.Random(seed), []

    def mishap(member, finished):
        what = draw.choice([None, None, None, "lose", "late"]) if len(lost) < most else None
        lost.extend([what] if what else [])
        return what

    mishap.lost = lost
    return mishap


def small(**sections):
    """Half as many completions, and no evaluations."""
    rollout = {"prompts": 3, "group_size": 3, "max_new_tokens": 32, **sections.pop("rollout", {})}
    return recipe(**{"eval": {"every": 0}, **sections}, rollout=rollout)


def metrics(folder):
    return (folder / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {
            "rollout": {"budget": {"min": 36, "max": 42, "target": {"rejection": 0.1}}},
            "learn": {"method": "sparse-rl", "refill": 1},
        },
        {
            "rollout": {"top_p": 0.9, "slots": "int8", "slots_kept": [0]},
            "learn": {"method": "shadow"},
            "loss": {"beta": 0.01},
        },
        {"learn": {"dynamic": 1}},
        {"rollout": {"layer_budgets": [41, 45, 40]}, "learn": {"method": "shadow"}},
    ],
    ids=["plain", "refill", "top-p-int8", "dynamic", "layer-budgets"],
)
def test_a_pool_that_loses_samplers_trains_to_the_byte(pools, tmp_path, sections):
    def settings(**rollout):
        return small(**{**sections, "rollout": {**sections.get("rollout", {}), **rollout}}, run={"steps": 2})

    train(settings(), tmp_path / "one", show=False)
    pools.mishap = losing(3)
    train(settings(pool="ray", samplers=3, over_ask=0.3), tmp_path / "pool", show=False)
    assert metrics(tmp_path / "pool") == metrics(tmp_path / "one")
    for file in sorted((tmp_path / "one" / "samples").rglob("*.*")):
        assert (tmp_path / "pool" / file.relative_to(tmp_path / "one")).read_bytes() == file.read_bytes()
    last = next(line for line in reversed(read_lines(tmp_path / "pool" / "timing.jsonl")) if "pool/lost/count" in line)
    assert last["pool/lost/count"] == len(pools.mishap.lost) > 0 and last["pool/asked_again/count"] > 0
    assert last["pool/duplicates/different"] == 0 and last["pool/bytes/weights"] > 0
    assert last["cache/bytes/allocated"] > 0 and last["cache/bytes_saved/frac"] < 1
    found = json.loads((tmp_path / "pool" / "pool.json").read_text())
    assert found["step"] == 2 and sum(found["lost"].values()) == len(pools.mishap.lost) and found["samplers"]
    assert not (tmp_path / "one" / "pool.json").exists()


def test_every_piece_and_token_is_counted_once(pools, tmp_path):
    """Of a pool that loses nobody: samplers together have sampled the tokens that metrics.jsonl has."""
    train(small(run={"steps": 2}, rollout={"pool": "ray", "samplers": 2}), tmp_path / "run", show=False)
    found = json.loads((tmp_path / "run" / "pool.json").read_text())
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if "rollout/length/mean" in line]
    tokens = sum(round(9 * line["rollout/length/mean"]) for line in lines)
    assert sum(sampler["tokens"] for sampler in found["samplers"]) == tokens and not found["lost"]
    assert sum(sampler["pieces"] for sampler in found["samplers"]) == 2 * 3
    assert {sampler["node"] for sampler in found["samplers"]} == {"here"}
    assert all(sampler["seconds"] > 0 for sampler in found["samplers"] if sampler["tokens"])


def test_a_run_goes_on_with_a_pool_or_without(pools, tmp_path):
    """The learner is lost; the pool is attached again, and has the weights of the checkpoint."""
    train(small(run={"steps": 4}), tmp_path / "whole", show=False)
    train(small(run={"steps": 2}, rollout={"pool": "ray", "samplers": 2}), tmp_path / "run", show=False)
    train(small(run={"steps": 3}), tmp_path / "run", resume=True, show=False)
    train(small(run={"steps": 4}, rollout={"pool": "ray"}), tmp_path / "run", resume=True, show=False)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
    assert len(pools.made) == 2 and not any(transport.workers for transport in pools.made)


def test_samplers_that_run_ahead_and_are_lost_train_to_the_byte(pools, tmp_path):
    settings = small(
        run={"steps": 4}, rollout={"pool": "ray", "samplers": 2, "ahead": 2}, eval={"every": 2, "prompts": 2}
    )
    train(settings, tmp_path / "calm", show=False)
    pools.mishap = losing(4)
    train(settings, tmp_path / "stormy", show=False)
    assert metrics(tmp_path / "stormy") == metrics(tmp_path / "calm") and pools.mishap.lost
    lines = [line for line in read_lines(tmp_path / "calm" / "metrics.jsonl") if "reward/mean" in line]
    assert len(lines) == 4 and all("gap/alpha/p05" in line for line in lines)


def test_weights_are_handed_on_while_samplers_are_busy(pools, tmp_path, monkeypatch):
    """The second step is sampled until the weights are there with which the third one will be; the last two updates
    are of no use to anybody.
    """
    published, versions, waited = threading.Event(), [], []

    def publish(self, version, weights, oldest, publish=Threads.publish):
        versions.append(version)
        if version:
            published.set()
        return publish(self, version, weights, oldest)

    def mishap(member, finished):
        waited.extend(published.wait(60) for (request, _), _ in finished if request == 1)

    monkeypatch.setattr(Threads, "publish", publish)
    pools.mishap = mishap
    settings = recipe(eval={"every": 0}, rollout={"pool": "ray", "ahead": 1})
    train(settings, tmp_path / "run", show=False)
    assert waited and all(waited) and len(versions) == 3
    last = [line for line in read_lines(tmp_path / "run" / "timing.jsonl") if "time/publish" in line][-1]
    assert all(last[f"pool/{name}/seconds"] > 0 for name in ("fetch", "sample", "score", "pack"))


def test_one_step_ahead_is_what_a_thread_does(pools, tmp_path):
    """The same weights sample the same tokens; scores come in other micro-batches, so the last digits may differ."""
    same = {"run": {"steps": 3}}
    train(small(**same, rollout={"ahead": 1}), tmp_path / "thread", show=False)
    train(small(**same, rollout={"ahead": 1, "pool": "ray"}), tmp_path / "pool", show=False)
    ours, theirs = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("pool", "thread"))
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key, value in other.items():
            assert one[key] == pytest.approx(value, rel=1e-3, abs=1e-5), key


def test_results_are_opened_by_several_threads():
    """Several steps are under way; torch has one list of classes that may be loaded for all threads."""
    content = closed(Done([], diagnosed={(0, 1): (torch.ones(3), None)}))
    failed = []

    def open_many():
        try:
            for _ in range(150):
                assert opened(content).diagnosed[0, 1][0].tolist() == [1.0] * 3
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=open_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed[0]


def test_weights_travel_in_parts(monkeypatch):
    """To the bit, also where a model is tied; a critic's are left out where there is none; none may be missing."""
    monkeypatch.setattr(remote, "PART", 1000)
    made = [nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)).to(torch.bfloat16) for _ in range(2)]
    for model in made:
        model[1].weight = model[0].weight
    critic = nn.Linear(8, 1)
    parts = list(remote.weights_of(made[0], critic))
    assert len(parts) == 1 and remote.store_bytes(1, made[0], critic) == 2 * (2 * 400 + 4 * 9)
    monkeypatch.setattr(remote, "PART", 16)
    parts = list(remote.weights_of(made[0], critic))
    assert len(parts) == 3 and [len(part) for part in parts] == [1, 1, 1]
    remote.load_weights(parts, made[1], None)
    assert torch.equal(made[1][0].weight, made[0][0].weight)
    with pytest.raises(AssertionError, match="weights that did not come"):
        remote.load_weights(parts[1:], made[1])


def test_changes_give_the_same_bits_as_the_whole():
    """In bf16 and fp32, in a tied weight and in one that is a view with gaps; NaN and both zeros among them."""

    def made():
        model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False), nn.Linear(4, 3), nn.Linear(6, 5))
        model[1].weight = model[0].weight
        model[:2].to(torch.bfloat16)
        model[3].weight = nn.Parameter(torch.zeros(6, 5).t())  # not contiguous
        return model

    learner, member = made(), made()
    kept = Versions(lambda part, needed: copied(part), lambda part: part)
    whole = kept.publish(0, remote.weights_of(learner), 0, compare=True)
    remote.load_weights(kept.offer(0).refs(None), member)
    with torch.no_grad():
        learner[0].weight[3, 5], learner[0].weight[49, 7], learner[0].weight[0, 0] = math.nan, -0.0, 7.0
        learner[3].weight[1, 4] = 2.0
        learner[2].weight.add_(1.0)
    kept.publish(1, remote.weights_of(learner), 0, compare=True)
    parts = kept.offer(1).refs(0)
    assert sum(map(bytes_of, parts)) == 3 * 6 + 8 + 4 * 12 < whole / 2  # 3 of bf16, 1 of fp32, and all of 12
    remote.load_weights(parts, member)
    for (name, value), (_, wanted) in zip(remote.trained(member), remote.trained(learner), strict=True):
        found, expected = (tensor.detach().contiguous().view(torch.uint8) for tensor in (value, wanted))
        assert torch.equal(found, expected), name


def test_samplers_in_half_precision_fetch_only_what_changed(pools, tmp_path):
    def settings(**rollout):
        sections = {"model": {"dtype": "bfloat16"}, "optimizer": {"lr": 1e-5}, "run": {"steps": 3}}
        return small(**sections, rollout={"max_new_tokens": 64, "group_size": 6, **rollout})

    train(settings(), tmp_path / "one", show=False)
    train(settings(pool="ray", samplers=1), tmp_path / "pool", show=False)
    assert metrics(tmp_path / "pool") == metrics(tmp_path / "one")
    lines = [line for line in read_lines(tmp_path / "pool" / "timing.jsonl") if "pool/bytes/fetched" in line]
    whole, last = lines[0]["pool/bytes/fetched"], lines[-1]["pool/bytes/fetched"]
    assert lines[-1]["pool/bytes/weights"] >= 3 * whole  # with versions that nobody samples from
    assert whole < last < 1.5 * whole


def test_weights_that_are_lost_on_their_way_are_fetched_again(monkeypatch):
    """A node is lost in the middle of a transfer: nothing is sampled with weights of which some are old."""
    monkeypatch.setattr(remote, "PART", 1)
    made = remote.MakeHands(small(), torch.get_num_threads(), False)
    hands, other = made(), made()
    with torch.no_grad():
        for value in other.completer.model.parameters():
            value.mul_(1.01)
    parts = list(remote.weights_of(other.completer.model))
    assert len(parts) > 2
    work = [((0, i), piece) for i, piece in enumerate(cut([[5, 6, 7]], [[0, 1]], 3, version=4))]

    def torn(has):
        yield from parts[:2]
        raise OSError("the node is gone")

    found = []
    with pytest.raises(OSError, match="the node is gone"):
        hands.complete(work, torn, lambda place, payload: found.append(payload))
    assert not found and hands.version is None
    beats = hands.beats()
    hands.complete(work, lambda has: parts, lambda place, payload: found.append(payload))
    assert hands.version == 4 and hands.beats() > beats + len(parts) - 1 and hands.tokens() > 0
    other.version = other.completer.engine.version = 4
    other.complete(work, lambda has: [], lambda place, payload: found.append(payload))
    assert found[0] == found[1]


def test_paths_are_meant_from_where_the_learner_was_started(monkeypatch, tmp_path):
    """A cluster's processes begin where the cluster was started."""
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    made = remote.MakeHands(recipe(), 1, False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote, "load_for_training", lambda recipe: pytest.fail(os.getcwd()))
    with pytest.raises(pytest.fail.Exception, match=str(tmp_path / "project")):
        made()
    monkeypatch.setattr(remote, "load_for_training", lambda recipe: pytest.fail("here"))
    with pytest.raises(pytest.fail.Exception, match="here"):  # a machine that does not have the folder
        replace(made, folder=str(tmp_path / "elsewhere"))()


def test_a_sampler_has_the_learners_version():
    made = remote.MakeHands(recipe(), 1, False, code="0.0.9")
    with pytest.raises(SparseRLError, match=r"sparse-rl is \S+ on \S+ and 0.0.9 where the run learns; inst"):
        made()


def test_processes_share_samplers():
    def share(address, samplers, rank, size=2):
        return sparse_rl.train.pooled.share_of(address, samplers, SimpleNamespace(size=size, rank=rank))

    assert [share("ray://head:1", 5, rank) for rank in (0, 1)] == [3, 2]
    assert share("ray://head:1", 0, 0) == 0 and share("ray", 0, 0, size=1) == 0 and share("ray", 3, 0, size=1) == 3
    with pytest.raises(SparseRLError, match=r"each of 2 processes needs one; use at least 2"):
        share("ray://head:1", 1, 0)
    for samplers in (0, 4):  # two clusters of one machine would share its GPUs without knowing
        with pytest.raises(SparseRLError, match=r"rollout.pool is ray, a cluster of one process, but the run has 2"):
            share("ray", samplers, 0)


def test_mistakes():
    for given, said in [
        ({"pool": "slurm"}, "rollout.pool is 'slurm'; it must be ray"),
        ({"pool": "ray://local"}, "rollout.pool is 'ray://local'; it must be ray, ray://HOST:PORT"),
        ({"pool": "ray://head"}, "rollout.pool is 'ray://head'"),
        ({"pool": "ray://head:70000"}, "rollout.pool is 'ray://head:70000'"),
        ({"pool": "ray://ray://head:6379"}, "rollout.pool is 'ray://ray://head:6379'"),
        ({"samplers": 2}, "rollout.samplers is 2, but there is no pool"),
        ({"ahead": 2}, r"from 0 to 1 \(to 8 with rollout.pool\)"),
        ({"ahead": 9, "pool": "ray"}, "rollout.ahead is 9; .* from 0 to 8"),
        ({"over_ask": 0.5}, "rollout.over_ask is 0.5, but there is no pool"),
        ({"pool": "ray", "over_ask": 2.0}, "it must be a share from 0 to 1"),
        ({"pool": "ray", "patience": 0.0}, "rollout.patience is 0.0"),
    ]:
        with pytest.raises(SparseRLError, match=said):
            recipe(rollout=given)


def test_an_interrupt_of_a_divided_learner_ends_the_pool_before_what_waits_for_it(monkeypatch):
    order = []
    pool = SimpleNamespace(pool=SimpleNamespace(close=lambda: order.append("pool")))
    trainer = SimpleNamespace(
        progress=SimpleNamespace(steps=1, is_between_steps=lambda versions, refused: False), versions=None,
        world=SimpleNamespace(stop=True), learner=SimpleNamespace(sharded=object()), pool=pool,
        source=SimpleNamespace(close=lambda: order.append("sampled ahead")),
    )  # fmt: skip
    monkeypatch.setattr(saving, "save", lambda trainer: order.append("saved"))
    saving.save_after(trainer, KeyboardInterrupt())
    assert order == ["pool", "sampled ahead", "saved"] and not trainer.world.stop
