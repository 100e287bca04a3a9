"""Evictions as actions: their log-probs against enumeration, the gradient against loops, and what is drawn again."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

import sparse_rl.train.pooled
from sparse_rl import COMPRESSORS, Engine, Sampling, SparseRLError
from sparse_rl.compressors.learned import HIDDEN, gumbel
from sparse_rl.files import read_lines
from sparse_rl.train.actions import CLIP, Actions, log_prob, policy_loss
from sparse_rl.train.run import train
from sparse_rl.train.scorer import Drawn, Pairs, ScorerTrainer, collect_from
from tests.attention.test_replay import gaps
from tests.compressors.test_compressors import random_view
from tests.compressors.test_learned import scored  # noqa: F401 (a fixture)
from tests.helpers.models import prompts_of, tiny
from tests.helpers.pools import Threads
from tests.helpers.runs import run
from tests.train.test_joint import never, sections, small

Learned = COMPRESSORS["learned"]


def in_order(scores, order):
    """Scores [C] in the order of a draw: what was drawn, then the others."""
    return scores[[*order, *(i for i in range(len(scores)) if i not in order)]]


def enumerated(scores, temperature, drawn):
    """{order: probability} of all ways to draw so many, one after the other, slots of low scores first."""
    weights, found = [math.exp(-s / temperature) for s in scores], {}
    for order in itertools.permutations(range(len(scores)), drawn):
        left, p = sum(weights), 1.0
        for i in order:
            p, left = p * weights[i] / left, left - weights[i]
        found[order] = p
    return found


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@pytest.mark.parametrize("drawn", [1, 2, 4])
def test_the_log_prob_is_that_of_an_enumeration(temperature, drawn):
    scores = torch.randn(5, generator=torch.Generator().manual_seed(drawn), dtype=torch.float64)
    every = enumerated(scores.tolist(), temperature, drawn)
    assert sum(every.values()) == pytest.approx(1)
    for order, p in every.items():
        given = torch.cat([in_order(scores, order), torch.tensor([50.0, -50.0])])[None, None]  # two cannot be drawn
        possible = torch.arange(7)[None, None] < 5
        got = log_prob(given, temperature, possible, torch.tensor([[drawn]]))
        assert got.dtype == torch.float64 and got.item() == pytest.approx(math.log(p), abs=1e-12)


def test_the_compressor_evicts_with_these_probabilities():
    """Over many streams: the noise is Gumbel's, and its sign is right."""
    streams, count, drawn, temperature = 40_000, 4, 2, 0.7
    view = random_view(used=8)
    feed = torch.arange(8).expand(streams, 1, 8)
    keys = torch.arange(streams)[:, None] * 7919
    noise = gumbel(replace(view, feed=feed, streams=keys), count)[:, 0]
    scores = torch.tensor([0.3, -0.5, 1.2, 0.0])
    order = (scores - temperature * noise).argsort(-1)[:, :drawn]  # lowest first: as ScoreCompressor drops them
    seen = Counter(map(tuple, order.tolist()))
    for which, p in enumerated(scores.tolist(), temperature, drawn).items():
        assert abs(seen[which] / streams - p) < 5 * math.sqrt(p * (1 - p) / streams), which


def actions_of(count, heads, candidates, wide, seed=0, advantage=(1.0, -0.5)):
    g = torch.Generator().manual_seed(seed)
    possible = torch.ones(count, heads, candidates, dtype=torch.bool)
    possible[..., -1] = False
    return Actions(
        torch.randn(count, heads, candidates, wide, generator=g), possible,
        torch.randint(1, candidates - 2, (count, heads), generator=g), torch.zeros(count, heads),
        torch.ones(count, heads), torch.tensor(advantage)[:count],
    )  # fmt: skip


def test_its_gradient_is_that_of_loops_in_fp64(llama, scored):  # noqa: F811
    """The policy gradient, of a network written out, where the scorer is still the one that drew."""
    companion, temperature, layer = scored(llama), 0.8, 1
    trainer = ScorerTrainer(companion, advantage=1.0, temperature=temperature)
    actions = actions_of(2, 2, 6, companion.tensors["centre"].shape[-1])
    with torch.no_grad():
        actions = replace(actions, old=trainer.log_probs(layer, actions))
    policy_loss(trainer.log_probs(layer, actions), actions).backward()
    of = {name: tensor[layer].double().requires_grad_() for name, tensor in companion.tensors.items()}
    total = torch.zeros((), dtype=torch.float64)
    for n, head in itertools.product(range(2), range(2)):
        weights = []
        for slot in range(5):  # the last cannot be drawn
            x = actions.x[n, head, slot].double()
            score = of["slope"][head] * x[-1]
            for unit in range(HIDDEN):
                z = ((x - of["centre"][head]) / of["scale"][head] * of["inner"][head, :, unit]).sum() + of["bias"][
                    head, unit
                ]
                score = score + of["outer"][head, unit] * z * torch.sigmoid(z)
            weights.append((-score / temperature).exp())
        for j in range(int(actions.count[n, head])):
            total = total - actions.advantage[n].double() * (weights[j] / sum(weights[j:])).log() / 4
    total.backward()
    for name, parameter in trainer.parameters.items():
        torch.testing.assert_close(parameter.grad[layer].double(), of[name].grad, atol=1e-5, rtol=1e-4)
        assert parameter.grad[layer].any() and not parameter.grad[0].any(), name


def test_the_ratio_is_clipped():
    actions = actions_of(2, 1, 6, 3)
    for moved, expected in ((0.0, (1 - 0.5) / 2), (1.0, (1 + CLIP - 0.5 * math.e) / 2)):
        got = policy_loss(torch.full((2, 1), moved), actions).item()
        assert got == pytest.approx(-expected, rel=1e-5)


def test_advantages_make_evictions_likelier_or_less_likely(llama, scored):  # noqa: F811
    companion = scored(llama)
    wide = companion.tensors["centre"].shape[-1]
    trainer = ScorerTrainer(companion, lr=1e-2, advantage=1.0, temperature=1.0)
    actions = actions_of(2, 2, 8, wide)
    nothing = Pairs(torch.zeros(2, 1, wide), torch.zeros(2, 1, wide), torch.zeros(2, 1))
    companion.tensors["scale"] += 0.5  # normalised before
    with torch.no_grad():
        actions = replace(actions, old=trainer.log_probs(0, actions))
    trainer.fit({0: nothing}, 3, actions={0: actions})
    moved = (trainer.log_probs(0, actions) - actions.old).mean(1)
    assert moved[0] > 0.01 and moved[1] < -0.005


def trajectories(model, temperature, rows=4, samples=2, **options):
    engine = Engine(model, compressor=Learned(temperature=temperature, **options), budget=14, interval=4, rows=rows)
    return engine, engine.generate(prompts_of(5, 9, 30), group_size=samples, sampling=Sampling(40), seed=3)


def test_at_temperature_0_it_is_learned_to_the_bit(llama, scored):  # noqa: F811
    scored(llama)
    plain = Engine(llama, compressor="learned", budget=14, interval=4, rows=4)
    plain = plain.generate(prompts_of(5, 9, 30), group_size=2, sampling=Sampling(40), seed=3)
    same, drawn = (trajectories(llama, temperature)[1] for temperature in (0.0, 1.0))
    for one, other in zip(plain, same, strict=True):
        assert one.trace.evicted_at.equal(other.trace.evicted_at)
        assert one.sampler_logprobs.equal(other.sampler_logprobs)
    assert not all(a.trace.evicted_at.equal(b.trace.evicted_at) for a, b in zip(plain, drawn, strict=True))


def test_what_is_drawn_depends_on_the_sequence_alone_and_is_replayed(llama, scored):  # noqa: F811
    scored(llama)
    _, together = trajectories(llama, 1.0)
    for number, prompt in enumerate(prompts_of(5, 9, 30)):
        alone = Engine(llama, compressor=Learned(temperature=1.0), budget=14, interval=4, rows=1)
        for sample in range(2):
            (one,) = alone.generate([prompt], 2, Sampling(40), seed=3, samples=[[sample]])
            other = together[2 * number + sample]
            assert one.trace.evicted_at.equal(other.trace.evicted_at) and one.stream == other.stream is not None
    assert len({t.stream for t in together}) == 6
    assert all(gaps(llama, t)[0] < 1e-4 for t in together)


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
@pytest.mark.parametrize("options", [{}, {"protect_prompt": True}], ids=["plain", "prompt"])
def test_rebuilt_evictions_are_those_of_the_trace(architecture, options, scored):  # noqa: F811
    """With slots beyond a sliding window, too. A wrong stream draws others."""
    model = tiny(architecture)
    scored(model)
    engine = Engine(model, compressor=Learned(temperature=1.0, **options), budget=24, interval=4, rows=4)
    agreed, others = [], []
    for trajectory in engine.generate(prompts_of(5, 9, 12), sampling=Sampling(60, stop_ids=()), seed=3):
        found, wrong = (
            collect_from(model, t, engine.compressor, 2, 0, Drawn(0.5, 3)).actions
            for t in (trajectory, replace(trajectory, stream=trajectory.stream + 1))
        )
        assert set(found) == set(range(trajectory.trace.evicted_at.shape[0]))
        for layer, acted in found.items():
            assert acted.x.shape[:3] == (3, 2, 20) and (acted.advantage == 0.5).all()
            agreed.append(acted.agreed[acted.count > 0])
            others.append(wrong[layer].agreed[acted.count > 0])
            assert (acted.count <= 4).all() and acted.possible.sum(-1).ge(acted.count).all()
    assert torch.cat(agreed).mean() > 0.999 and torch.cat(others).mean() < 0.9


def acting(**others):
    options = {"temperature": 0.5, "protect_prompt": True}
    given = sections(rollout={"compressor_options": options, **others.pop("rollout", {})}, **others)
    return small(**{**given, "scorer": {**given["scorer"], "advantage": 1.0, "evictions": 2}})


def test_a_run_learns_from_them_and_resumes_to_the_byte(tmp_path):
    train(acting(), tmp_path / "whole", show=False)
    train(acting(run={"steps": 2}), tmp_path / "parts", show=False)
    train(acting(), tmp_path / "parts", resume=True, show=False)
    lines = read_lines(tmp_path / "whole/metrics.jsonl")
    assert (tmp_path / "parts/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()
    for line in lines:
        assert line["scorer/actions/count"] == 4 * 2 * 3 * 2  # trajectories, evictions, layers, KV heads
        assert line["scorer/actions/agree/frac"] > 0.999 and line["scorer/actions/drift/mean"] > 0


@pytest.mark.slow
def test_what_a_pool_draws_is_drawn_again(tmp_path, monkeypatch):
    train(acting(), tmp_path / "whole", show=False)
    monkeypatch.setattr(sparse_rl.train.pooled, "RayTransport", lambda _, make_hands, *__: Threads(make_hands, never))
    train(acting(rollout={"pool": "ray", "samplers": 2}), tmp_path / "pool", show=False)
    assert (tmp_path / "pool/metrics.jsonl").read_bytes() == (tmp_path / "whole/metrics.jsonl").read_bytes()


def test_mistakes_get_a_sentence():
    hot = {"compressor_options": {"temperature": 1.0}}
    for given, said in [
        ({"scorer": {"every": 0}}, "scorer.every is 0"),
        ({}, "without a temperature they are not drawn"),
        ({"rollout": {**hot, "compressor": "prompt-only:learned"}}, "only evicts prompts"),
        ({"rollout": {**hot, "ahead": 1}}, "rollout.ahead 1 another scorer drew"),
        ({"rollout": hot, "learn": {"algorithm": "ppo"}}, "ppo has no advantage per trajectory"),
        ({"rollout": {"compressor_options": {"temperature": 1, "forget_given": 1}}}, "forget_given orders slots"),
        ({"rollout": {**hot, "budget": 32, "layer_budgets": [30, 34]}}, "the layers evict different numbers of slots"),
        ({"scorer": {"advantage": -1.0}}, "scorer.advantage is -1.0"),
    ]:
        with pytest.raises(SparseRLError, match=said):
            small(**{**given, "scorer": {"advantage": 1.0, **given.get("scorer", {})}})
    with pytest.raises(SparseRLError, match="temperature -1 must be 0"):
        Learned(temperature=-1)


@pytest.mark.slow
def test_several_processes_draw_and_learn_alike(tmp_path):
    train(acting(run={"steps": 2}), tmp_path / "one", show=False)
    (tmp_path / "given.yaml").write_text(acting(run={"steps": 2}).to_yaml())
    done = run("train", tmp_path / "given.yaml", "--out", tmp_path / "two", "--num-processes", 2)
    assert done.returncode == 0, done.stderr
    for mine, theirs in zip(*(read_lines(tmp_path / name / "metrics.jsonl") for name in ("two", "one")), strict=True):
        for name in (n for n in theirs if n.startswith("scorer/")):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-4), name
