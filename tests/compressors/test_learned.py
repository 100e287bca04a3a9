"""learned: its score against loops, what it learns from against what the engine showed, and its file."""

import math
from dataclasses import replace

import pytest
import torch

from sparse_rl import COMPRESSORS, Engine, Sampling, SparseRLError
from sparse_rl.compressors.learned import HIDDEN, Scorer, features, fresh, score_with
from sparse_rl.models import companions_of, load_model, set_companion
from sparse_rl.train.checkpoint import save_model
from sparse_rl.train.scorer import Pairs, ScorerTrainer, collect, slots_at, stacked
from tests.attention.test_replay import gaps
from tests.cli.test_cli import run
from tests.compressors.test_compressors import random_view
from tests.helpers.models import prompts_of, tiny


@pytest.fixture
def scored():
    """A function that gives a model a scorer; models are shared, so it is taken away afterwards."""
    models = []

    def give(model, kind="all", noise=0.3):
        models.append(model)
        companion = fresh(model, kind)
        generator = torch.Generator().manual_seed(5)
        for name in ("outer", "bias", "centre"):
            companion.tensors[name] += noise * torch.randn(companion.tensors[name].shape, generator=generator)
        set_companion(model, "learned", companion)
        return companion

    yield give
    for model in models:
        companions_of(model).clear()


def test_the_score_equals_the_loops():
    g = torch.Generator().manual_seed(0)
    heads, count, wide = 2, 5, 4
    x = torch.randn(1, heads, count, wide, generator=g)
    network = {
        name: torch.randn(1, heads, *shape, generator=g)
        for name, shape in {
            "centre": (wide,), "inner": (wide, HIDDEN), "bias": (HIDDEN,), "outer": (HIDDEN,), "slope": (),
        }.items()
    }  # fmt: skip
    network["scale"] = torch.rand(1, heads, wide, generator=g) + 0.5
    got = score_with(network, x)
    for head in range(heads):
        of = {name: tensor[0, head].tolist() for name, tensor in network.items()}
        for j in range(count):
            slot, total = x[0, head, j].tolist(), 0.0
            for n in range(HIDDEN):
                z = of["bias"][n]
                for f in range(wide):
                    z += (slot[f] - of["centre"][f]) / of["scale"][f] * of["inner"][f][n]
                total += of["outer"][n] * z / (1 + math.exp(-z))
            assert got[0, head, j].item() == pytest.approx(total + of["slope"] * slot[-1], rel=1e-4, abs=1e-4)


def test_features_are_what_their_names_say():
    view = random_view(used=20, dim=8)
    x = features(view, 8, "all")
    assert x.shape == (2, 2, 12, 2 * 8 + 7)
    for row, head, slot in ((0, 1, 3), (1, 0, 11), (0, 0, 1)):
        key, value = view.keys[row, head, slot], view.values[row, head, slot]
        numbers = [
            math.log(float(value.max() - value.min())), math.log(float(value.norm())), math.log(float(key.norm())),
            math.log(20 - slot), float(slot < 3),
        ]  # fmt: skip
        expected = torch.tensor([*key.tolist(), *value.tolist(), *numbers])
        torch.testing.assert_close(x[row, head, slot, :-2], expected, atol=1e-5, rtol=1e-5)
    snapkv = COMPRESSORS["snapkv"]()
    torch.testing.assert_close(x[..., -1].exp(), snapkv.score(view)[..., :12])
    assert features(view, 8, "position").shape == (2, 2, 12, 3)


def test_a_fresh_one_is_snapkv(llama, scored):
    scored(llama, noise=0.0)
    sampled = [
        Engine(llama, compressor=name, budget=14, interval=4, rows=2).generate(prompts_of(30), sampling=Sampling(50))[0]
        for name in ("learned", "snapkv")
    ]
    assert sampled[0].trace.evicted_at.equal(sampled[1].trace.evicted_at)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gpt-oss"])
def test_replay_is_exact(architecture, scored):
    model = tiny(architecture)
    for kind in ("all", "position"):
        scored(model, kind)
        engine = Engine(model, compressor="learned", budget=12, interval=4, rows=4)
        for trajectory in engine.generate(prompts_of(5, 16, 48), group_size=2, sampling=Sampling(40), seed=1):
            shadow, _ = gaps(model, trajectory)
            assert shadow < 1e-4


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_training_sees_what_the_engine_showed(architecture, scored, monkeypatch):
    """Slots rebuilt from a forward pass under the trace are those that the compressor looked at."""
    model = tiny(architecture)
    scored(model)
    shown = {}

    def record(self, view, budget):
        for row in range(len(view.keys)):
            one = {k: v[row : row + 1] for k, v in vars(view).items() if isinstance(v, torch.Tensor)}
            shown[int(view.layer[row]), int(view.feed[row, 0, -1]) + 1] = replace(view, **one)
        return keep(self, view, budget)

    keep = COMPRESSORS["learned"].keep
    monkeypatch.setattr(COMPRESSORS["learned"], "keep", record)
    engine = Engine(model, compressor="learned", budget=14, interval=4, rows=1)
    trajectory = engine.generate(prompts_of(25), sampling=Sampling(40))[0]
    from sparse_rl.learn.score import hidden_states, replay_of

    rebuilt = {}

    def observe(seen):
        evicted_at = trajectory.trace.evicted_at[seen.layer].long()
        for begin in evicted_at.unique().tolist():
            if begin < len(trajectory.tokens):
                rebuilt[seen.layer, begin] = slots_at(seen, evicted_at, [begin], engine.compressor, 25)
        full = [begin for begin in evicted_at.unique().tolist() if 25 < begin < len(trajectory.tokens)]
        together = slots_at(seen, evicted_at, full, engine.compressor, 25)  # they held equally many slots
        for row, begin in enumerate(full):
            for name, alone in vars(rebuilt[seen.layer, begin]).items():
                if isinstance(alone, torch.Tensor):
                    assert getattr(together, name)[row].equal(alone[0]), name

    replay = replay_of(model, [(trajectory.tokens, trajectory.trace)])
    replay.observe = observe
    with torch.no_grad():
        hidden_states(model, trajectory.tokens[None], replay)
    assert len(rebuilt) > 20 and set(rebuilt) <= set(shown)
    for place, view in rebuilt.items():
        theirs = shown[place]
        assert view.feed.equal(theirs.feed.long()) and int(view.layer) == place[0]
        reachable = slice(None) if theirs.unreachable is None else ~theirs.unreachable[0, 0, : view.feed.shape[2] - 8]
        ours, shown_features = (features(v, 8, "all")[:, :, reachable] for v in (view, theirs))
        torch.testing.assert_close(ours, shown_features, atol=1e-3, rtol=1e-3)


def test_pairs_follow_the_oracle_and_training_lowers_the_loss(scored):
    model, tokenizer = load_model("tiny-sums")
    companion = fresh(model)
    set_companion(model, "learned", companion)
    engine = Engine(model, compressor="learned", budget=24, interval=4, rows=8)
    ids = [tokenizer.encode(f"{a}+{b}+7+12+5=") for a, b in ((3, 4), (11, 2), (9, 9), (25, 6))]
    done = engine.generate(ids, sampling=Sampling(60, stop_ids=()), seed=3)
    found = collect(model, done, engine.compressor, 16, 0)
    assert set(found.pairs) == {0, 1, 2} and 0 < found.lost < 1
    for pairs in found.pairs.values():
        assert pairs.kept.shape == pairs.dropped.shape == (2, pairs.weight.shape[1], 2 * 24 + 7)
        assert (pairs.weight >= 0).all() and pairs.weight.mean() > 0
    scorer = engine.compressor.scorer
    outer = scorer.tensors["outer"]
    before, after = ScorerTrainer(companion).fit(found.pairs, 40)
    assert after < 0.7 * before
    assert outer is companion.tensors["outer"] and outer.any()  # in place: the engine samples with it
    assert collect(model, done, engine.compressor, 16, 0).pairs[0].kept.equal(found.pairs[0].kept)  # by its seed


def test_the_loss_equals_the_loops(llama, scored):
    companion = scored(llama)
    g = torch.Generator().manual_seed(2)
    kept, dropped = torch.randn(2, 2, 6, 23, generator=g).unbind()
    weight = torch.rand(2, 6, generator=g)
    trainer = ScorerTrainer(companion)
    got = trainer._loss([1], stacked([Pairs(kept, dropped, weight)])).item()
    network = {name: tensor[1][None] for name, tensor in companion.tensors.items()}
    first, second = (score_with(network, x[None])[0] for x in (kept, dropped))
    total = 0.0
    for head in range(2):
        mean = sum(weight[head].tolist()) / 6
        for n in range(6):
            total += float(weight[head, n]) / mean * math.log1p(math.exp(float(second[head, n] - first[head, n]))) / 12
    assert got == pytest.approx(total, rel=1e-4)
    both = trainer._loss([0, 1], stacked([Pairs(dropped, kept, weight), Pairs(kept, dropped, weight)]))
    alone = trainer._loss([0], stacked([Pairs(dropped, kept, weight)])).item()
    assert both.tolist() == pytest.approx([alone, got], rel=1e-5)  # layers that learn at once do not mix


def test_the_file_travels_and_strangers_are_refused(tmp_path, llama, scored):
    model, tokenizer = load_model("tiny-sums")
    with pytest.raises(SparseRLError, match="run `sparse-rl train-compressor"):
        Engine(model, compressor="learned", budget=16, interval=8)
    companion = fresh(model, "position")
    companion.tensors["outer"] += 0.25
    set_companion(model, "learned", companion)
    (tmp_path / "model").mkdir()
    save_model(tmp_path / "model", model, tokenizer)
    again = load_model(str(tmp_path / "model"))[0]
    assert Scorer.of(again).kind == "position"
    assert all(companions_of(again)["learned"].tensors[n].equal(t) for n, t in companion.tensors.items())
    scored(llama)
    set_companion(llama, "learned", fresh(model))
    with pytest.raises(SparseRLError, match="belongs to another model"):
        Engine(llama, compressor="learned", budget=16, interval=8)
    with pytest.raises(SparseRLError, match="features is 'keys'; it must be one of all, position"):
        fresh(llama, "keys")


def test_the_command_trains_it_and_others_use_it(tmp_path):
    folder = tmp_path / "learned"
    small = ["--budget", "24", "--interval", "4", "--max-new-tokens", "48"]
    learning = ["--rounds", "2", "--trajectories", "6", "--steps", "20", "--pairs", "8"]
    done = run("train-compressor", "tiny-sums", "--task", "sums", *small, *learning, "--out", str(folder))
    assert done.returncode == 0 and "round 2: 6 rollouts lost" in done.stdout, done.stderr
    assert (folder / "learned.safetensors").is_file()
    evaluated = run(
        "eval", str(folder), "--bench", "sums", "--limit", "2", "--compressor", "learned", "--budget", "24",
        "--interval", "4", "--max-new-tokens", "30",
    )  # fmt: skip
    assert evaluated.returncode == 0, evaluated.stderr
    refused = run("train-compressor", str(folder))
    assert "--task NAME or --prompts FILE" in refused.stderr
    high = run("train-compressor", str(folder), "--task", "sums", "--budget", "400", *learning, "--max-new-tokens", "8")
    assert "so nothing was evicted; lower --budget" in high.stderr
