"""A budget that moves: the engine keeps less of the same rows, the controller says how much, and a run obeys."""

import math
import random
import signal
import statistics
import subprocess
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_rl import Engine, Sampling
from sparse_rl.config import METRICS, Adaptive, Target, load_recipe, make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.train.budget import STEP, Dial, move, start
from sparse_rl.train.checkpoint import load_state
from sparse_rl.train.run import plan_run, train
from tests.helpers.compressors import EVICTING
from tests.helpers.models import prompts_of, tiny
from tests.helpers.runs import command, recipe, weights, write_recipe

SAMPLING = Sampling(max_new_tokens=32, stop_ids=(7,))  # responses of different lengths


def rollout(engine: Engine, seed: int = 0) -> list:
    return engine.generate(prompts_of(33, 4, 60, 12), group_size=2, sampling=SAMPLING, seed=seed)


def assert_same(mine: list, theirs: list) -> None:
    """To the bit: tokens, log-probs, traces."""
    for a, b in zip(mine, theirs, strict=True):
        assert a.tokens.equal(b.tokens) and a.trace.evicted_at.equal(b.trace.evicted_at)
        assert a.sampler_logprobs.equal(b.sampler_logprobs)


# ------------------------------------------------------------------------------------------------------------ the
# engine


EVERY = [(name, "llama") for name in EVICTING]


@pytest.mark.parametrize(("compressor", "architecture"), [*EVERY, ("rkv", "gemma3")])
def test_an_engine_set_to_a_budget_is_an_engine_made_with_it(compressor, architecture):
    model = tiny(architecture)
    engine = Engine(model, compressor=compressor, budget=32, interval=8, rows=4)
    cache, nbytes = engine.cache, engine.cache.nbytes
    for step, budget in enumerate((20, 12, 32)):  # down and up again, after what the one before left in the rows
        engine.set_budget(budget)
        mine = rollout(engine, seed=step)
        assert_same(mine, rollout(Engine(model, compressor=compressor, budget=budget, interval=8, rows=4), seed=step))
        assert max(t.trace.visible()[:, :, t.num_prompt_tokens :].sum(-1).max() for t in mine) <= budget + 8
    assert engine.cache is cache and cache.nbytes == nbytes == engine.plan(60, 32).cache_bytes


def test_prompts_alone_are_evicted_to_the_budget_that_was_set(llama):
    """Rows that hold whole responses were made for the largest budget, and stay."""
    engine = Engine(llama, compressor="prompt-only", budget=32, interval=8, rows=4)
    engine.reserve(60, 32)
    cache = engine.cache
    for step, budget in enumerate((20, 12, 32)):
        engine.set_budget(budget)
        mine = rollout(engine, seed=step)
        theirs = rollout(Engine(llama, compressor="prompt-only", budget=budget, interval=8, rows=4), seed=step)
        for a, b in zip(mine, theirs, strict=True):
            assert a.tokens.equal(b.tokens) and a.trace.evicted_at.equal(b.trace.evicted_at)
            # A longer row is summed in another order.
            torch.testing.assert_close(a.sampler_logprobs, b.sampler_logprobs, rtol=0, atol=1e-5)
        expected = [min(t.num_prompt_tokens, budget) + len(t.response_tokens) for t in mine]
        assert [int(t.trace.slots_in_use().max()) for t in mine] == expected
    assert engine.cache is cache and cache.nbytes == engine.plan(60, 32).cache_bytes


def test_rows_wait_at_the_budget_that_was_set(llama):
    """Rounds of several steps: a row stops at budget + interval, not at the end of its memory, and waits there."""
    prompts, sampling = prompts_of(33, 4, 60, 12, 45), Sampling(330)
    engine = Engine(llama, budget=40, interval=128, rows=4, poll=(8, 16))
    engine.set_budget(16)
    mine = engine.generate(prompts, 1, sampling)
    assert engine.waited > 0
    assert_same(mine, Engine(llama, budget=16, interval=128, rows=4, poll=(1, 1)).generate(prompts, 1, sampling))


def test_budgets_that_cannot_be_set(llama):
    engine = Engine(llama, budget=32, interval=8, rows=2)
    for budget, message in ((33, "cannot be set to 33, because the rows of this engine were made for 32; .*budget=33"),
                            (8, "budget 8 must be above sinks 0 . window 8"), (0, "budget is 0")):  # fmt: skip
        with pytest.raises(SparseRLError, match=message):
            engine.set_budget(budget)
    assert engine.compressor.budget == 32  # refused: nothing changed
    with pytest.raises(SparseRLError, match="dense has no budget that could be set to 16"):
        Engine(llama, compressor="dense", rows=2, max_tokens=80).set_budget(16)


def test_the_plan_counts_the_largest_budget(llama):
    engine = Engine(llama, budget=32, interval=8, rows=2)
    before = engine.plan(10, 20)
    engine.set_budget(16)
    assert engine.plan(10, 20) == before
    assert any("budget 32 + interval 8 = 40 slots" in label for label, _ in before.lines())


# ------------------------------------------------------------------------------------------------------------ the
# controller

shares = st.floats(0, 1)
targets = st.one_of(
    st.floats(0.01, 0.99).map(lambda x: Target(alpha_5=x)),
    st.floats(0.01, 0.99).map(lambda x: Target(rejection=x)),
)


@st.composite
def settings_and_dials(draw) -> tuple[Adaptive, Dial]:
    low = draw(st.integers(1, 2000))
    settings = Adaptive(low, low + draw(st.integers(1, 2000)), draw(targets))
    return settings, Dial(draw(st.floats(settings.min, settings.max)), draw(st.none() | shares))


@given(settings_and_dials(), st.lists(st.none() | shares | st.just(float("nan")), max_size=50))
def test_the_budget_stays_in_its_bounds(given, measurements):
    settings, dial = given
    for measured in measurements:
        after = move(dial, measured, settings)
        assert settings.min <= after.budget <= settings.max and settings.min <= after.slots <= settings.max
        assert abs(after.budget / dial.budget - 1) <= STEP * 1.03  # exp(STEP) - 1, rounded
        if measured is None or measured != measured:
            assert after == dial
        dial = after


@given(settings_and_dials(), shares)
def test_it_moves_against_the_error(given, measured):
    settings, dial = given
    fresh = Dial(dial.budget)  # no past: the measurement is the statistic
    after, target = move(fresh, measured, settings).budget, settings.target
    harmed = measured < target.value if target.statistic == "alpha_5" else measured > target.value
    fine = measured > target.value if target.statistic == "alpha_5" else measured < target.value
    if harmed:
        assert after > fresh.budget or after == settings.max or abs(measured - target.value) < 1e-9
    if fine:
        assert after < fresh.budget or after == settings.min or abs(measured - target.value) < 1e-9
    if measured == target.value:
        assert after == pytest.approx(fresh.budget)


@given(settings_and_dials(), shares, shares)
def test_more_harm_never_gets_fewer_slots(given, a, b):
    settings, dial = given
    less, more = sorted((a, b), key=settings.target.harm)
    assert move(dial, less, settings).budget <= move(dial, more, settings).budget


def test_a_step_is_what_the_docstring_says():
    settings = Adaptive(10, 1000, Target(alpha_5=0.9))
    assert move(Dial(100), 1.0, settings).budget == pytest.approx(100 * math.exp(-STEP))  # no harm: error -1
    assert move(Dial(100), 0.85, settings).budget == pytest.approx(
        100 * math.exp(STEP / 2)
    )  # half more harm: error 0.5
    assert move(Dial(100), 0.1, settings).budget == pytest.approx(100 * math.exp(STEP))  # bounded
    assert move(Dial(100, 0.5), 1.0, settings).smoothed == pytest.approx(0.7 * 0.5 + 0.3)
    assert start(settings) == Dial(1000.0)
    saved = {"budget": 2000.0, "smoothed": 0.8, "statistic": "alpha_5"}
    assert start(settings, saved) == Dial(1000.0, 0.8)  # resumed with other bounds,
    assert start(Adaptive(10, 1000, Target(rejection=0.1)), saved) == Dial(1000.0)  # or another statistic


@pytest.mark.parametrize("statistic", ["alpha_5", "rejection"])
@pytest.mark.parametrize("steepness", [1, 4, 12])  # harm ~ budget ** -steepness
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_it_settles_where_the_target_is_met(statistic, steepness, noise):
    """A plant unknown to the controller: harm is 0.1 at 300 slots, more below, less above, and measured with noise."""
    settings = Adaptive(64, 1024, Target(**{statistic: 0.9 if statistic == "alpha_5" else 0.1}))
    draw, dial, path = random.Random(0), start(settings), []
    for _ in range(400):
        harm = min(1.0, 0.1 * (300 / dial.slots) ** steepness) * (1 + draw.uniform(-noise, noise))
        dial = move(dial, min(1.0, harm) if statistic == "rejection" else 1 - min(1.0, harm), settings)
        path.append(dial.budget)
    assert statistics.mean(path[-200:]) == pytest.approx(300, rel=0.05)
    assert max(path[-200:]) / min(path[-200:]) < (1.02 if noise == 0 else 1.3)


def test_targets_out_of_reach_end_at_a_bound_and_leave_it_at_once():
    settings = Adaptive(32, 64, Target(rejection=0.1))
    dial = start(settings)
    for _ in range(500):
        dial = move(dial, 0.0, settings)
    assert dial.budget == 32
    steps = 0
    while dial.budget == 32:
        dial, steps = move(dial, 1.0, settings), steps + 1
    assert steps == 1  # nothing was wound up


# ------------------------------------------------------------------------------------------------------------ recipes

ADAPTIVE = {"min": 30, "max": 46, "target": {"alpha_5": 0.9}}
REJECTION = {**ADAPTIVE, "target": {"rejection": 0.1}}
SUMS = {"model": {"name": "tiny-sums"}, "task": {"name": "sums"}}


def test_the_recipe_keeps_the_dict(tmp_path):
    given = make_recipe(SUMS, [("rollout.budget", "{min: 32, max: 64, target: {alpha_5: 9e-1}}")])
    assert given.rollout.budget == Adaptive(32, 64, Target(alpha_5=0.9)) and given.rollout.max_budget == 64
    assert given.to_dict()["rollout"]["budget"] == {"min": 32, "max": 64, "target": {"alpha_5": 0.9}}
    (tmp_path / "recipe.yaml").write_text(given.to_yaml())
    assert load_recipe(tmp_path) == given
    assert load_recipe(
        tmp_path, [("rollout.budget.target.alpha_5", "0.95"), ("rollout.budget.max", "70")]
    ).rollout.budget == Adaptive(32, 70, Target(alpha_5=0.95))
    assert load_recipe(tmp_path, [("budget", "40")]).rollout.budget == 40


@pytest.mark.parametrize(
    ("budget", "more", "message"),
    [
        ({"mni": 3}, {}, r"no key rollout.budget.mni; did you mean 'min'"),
        ({"min": 3, "max": 5}, {}, r"rollout.budget.target is not given: \{alpha_5: 0.9\} or"),
        ({**ADAPTIVE, "min": 46}, {}, "min is 46 and max 46; min must be below max"),
        ({**ADAPTIVE, "min": 0}, {}, "rollout.budget.min is 0; it must be a whole number"),
        ({**ADAPTIVE, "max": 46.5}, {}, "rollout.budget.max is 46.5; it must be a whole number"),
        ({**ADAPTIVE, "target": 0.9}, {}, "rollout.budget.target is 0.9; it must be keys"),
        ({**ADAPTIVE, "target": {}}, {}, "must name one of alpha_5 or rejection, not none"),
        ({**ADAPTIVE, "target": {"alpha_5": 0.9, "rejection": 0.1}}, {}, "not alpha_5 and rejection"),
        ({**ADAPTIVE, "target": {"alpha5": 0.9}}, {}, "no key rollout.budget.target.alpha5; did you mean 'alpha_5'"),
        ({**ADAPTIVE, "target": {"alpha_5": 1}}, {}, "target.alpha_5 is 1.0; it must be between 0 and 1"),
        ({**ADAPTIVE, "target": {"rejection": "few"}}, {}, "target.rejection is 'few'; it must be a number"),
        (ADAPTIVE, {"run": {"diagnose": 0}}, "follows alpha_5, but run.diagnose is 0"),
        (REJECTION, {"learn": {"method": "shadow"}}, "in the shadow view the gap is 0, .* use alpha_5"),
        (REJECTION, {"learn": {"method": "tis"}}, "tis rejects no trajectories; use alpha_5"),
        (
            REJECTION,
            {"learn": {"method": "naive", "correction": {"reject_below": 1e-4}}},
            "naive rejects no trajectories",
        ),
        ([30, 46], {}, r"rollout.budget is \[30, 46\]; it must be a whole number"),
    ],
)
def test_mistakes_get_a_sentence(budget, more, message):
    with pytest.raises(SparseRLError, match=message):
        make_recipe({**SUMS, **more, "rollout": {"budget": budget}})


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"compressor": "dense"}, "rollout.budget is adaptive, but dense has no budget; give a number"),
        ({"budget": {**ADAPTIVE, "min": 8}}, "rkv: budget 8 must be above sinks 0 . window 8"),
    ],
)
def test_budgets_the_compressor_cannot_have(rollout, message, tmp_path):
    given = make_recipe({**SUMS, "rollout": {"budget": ADAPTIVE, **rollout}})
    with pytest.raises(SparseRLError, match=message):
        plan_run(given, 20)
    with pytest.raises(SparseRLError, match=message):
        train(given, tmp_path / "run", show=False)
    assert not (tmp_path / "run").exists()


def test_the_plan_of_a_recipe_counts_the_largest_budget():
    plans = [plan_run(make_recipe({**SUMS, "rollout": {"budget": budget}}), 20) for budget in (ADAPTIVE, 46)]
    assert plans[0] == plans[1]


# ------------------------------------------------------------------------------------------------------------ runs


def adaptive(target: dict, **sections):
    rollout = {"budget": {"min": 30, "max": 46, "target": target}, **sections.pop("rollout", {})}
    return recipe(rollout=rollout, **sections)


def budgets(folder) -> list[float]:
    return [line["rollout/budget"] for line in read_lines(folder / "metrics.jsonl") if "rollout/budget" in line]


def test_a_run_moves_its_budget_and_its_rollouts_obey(tmp_path, monkeypatch):
    """A lenient target lets it fall from the largest; resumed with a strict one, it rises again."""
    seen, plain = [], Engine.generate

    def watched(self, *args, **kwargs):
        done = plain(self, *args, **kwargs)
        if self.compressor.evicts:
            seen.append((self.compressor.budget, self.cache.nbytes, done))
        return done

    monkeypatch.setattr(Engine, "generate", watched)
    folder = tmp_path / "run"
    train(adaptive({"alpha_5": 0.3}, run={"steps": 6}, eval={"every": 3}), folder, show=False)
    down = budgets(folder)
    assert down[0] == 46 and down[-1] < 40 and down == sorted(down, reverse=True)
    trainer = train(adaptive({"alpha_5": 0.995}, run={"steps": 12}, eval={"every": 3}), folder, resume=True, show=False)
    up = budgets(folder)[6:]
    assert up[0] < 40 and up[-1] > 40 and up == sorted(up)
    lines = read_lines(folder / "metrics.jsonl")
    evaluated = {line["step"]: line["eval/sparse/budget"] for line in lines if "eval/sparse/accuracy" in line}
    following = {line["step"] - 1: line["rollout/budget"] for line in lines if "rollout/budget" in line}
    # An evaluation has the weights, and the budget, of the step that follows.
    assert all(evaluated[step] == following[step] for step in (0, 3, 9))
    saved = load_state(find_checkpoints(folder / "checkpoints")[-1][1])["budget"]
    assert trainer.sampler.engine.compressor.budget == round(saved["budget"])
    assert len({nbytes for _, nbytes, _ in seen}) == 1  # the same memory all along
    fullest = {}
    for budget, _, done in seen:
        slots = max(t.trace.visible()[:, :, t.num_prompt_tokens :].sum(-1).max().item() for t in done)
        fullest[budget] = max(slots, fullest.get(budget, 0))
    assert len(fullest) > 4 and fullest == {budget: budget + 4 for budget in fullest}


def test_a_rejection_target(tmp_path):
    settings = adaptive({"rejection": 0.9}, run={"steps": 3, "diagnose": 0}, eval={"every": 0})
    train(settings, tmp_path / "run", show=False)
    first, *_, last = budgets(tmp_path / "run")
    assert first == 46 and last < 46  # less is rejected than the target allows


def test_resumed_it_ends_the_same(tmp_path):
    target = {"alpha_5": 0.7}
    expected, folder = tmp_path / "alone", tmp_path / "run"
    train(adaptive(target, run={"steps": 5}), expected, show=False)
    assert len(set(budgets(expected))) > 2
    for steps in (2, 5):
        train(adaptive(target, run={"steps": steps}, eval={"every": 0}), folder, resume=steps > 2, show=False)
    theirs = [line for line in read_lines(expected / "metrics.jsonl") if "reward/mean" in line]
    assert read_lines(folder / "metrics.jsonl") == theirs


@pytest.mark.slow
def test_killed_and_resumed_it_ends_the_same(tmp_path):
    target = {"alpha_5": 0.7}
    expected, folder = tmp_path / "alone", tmp_path / "run"
    train(adaptive(target, run={"steps": 8}), expected, show=False)
    assert len(set(budgets(expected))) > 3
    given = write_recipe(tmp_path, rollout={"budget": {"min": 30, "max": 46, "target": target}}, run={"steps": 8})
    process = subprocess.Popen(command("train", given, "--out", folder), stderr=subprocess.DEVNULL)
    while len(budgets(folder)) < 5:  # beyond the checkpoints of steps 2 and 4
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    train(adaptive(target, run={"steps": 8}), folder, resume=True, show=False)
    assert (folder / "metrics.jsonl").read_bytes() == (expected / "metrics.jsonl").read_bytes()
    theirs = weights(expected / "checkpoints" / "step-000008")
    assert all(
        torch.equal(value, theirs[name]) for name, value in weights(folder / "checkpoints" / "step-000008").items()
    )


def test_a_plain_number_logs_and_moves_nothing(tmp_path):
    trainer = train(recipe(run={"steps": 2}, eval={"every": 1}), tmp_path / "run", show=False)
    assert not any("budget" in key for line in read_lines(tmp_path / "run" / "metrics.jsonl") for key in line)
    assert trainer.sampler.engine.compressor.budget == 42


def test_prompts_the_smallest_budget_cannot_protect_are_refused_at_once(tmp_path):
    """The first step runs at the largest budget, where they would fit."""
    with pytest.raises(
        SparseRLError, match=r"protects the prompt, but \d+ prompt tokens . window 8 leave nothing of budget 12"
    ):
        train(adaptive({"alpha_5": 0.9}, rollout={"budget": {**ADAPTIVE, "min": 12}}), tmp_path / "run", show=False)


def test_what_is_held_is_the_tail_that_was_named():
    """The names in a target are those of docs/methods.md: the 5th percentile, and the share of trajectories."""
    assert METRICS == {"alpha_5": "gap/alpha/p05", "rejection": "reject/trajectories/frac"}


def test_a_run_resumed_with_other_bounds_starts_inside_them():
    settings = Adaptive(40, 60, Target(alpha_5=0.9))
    for budget, inside in ((20.0, 40.0), (50.5, 50.5), (99.0, 60.0)):
        assert start(settings, {"budget": budget, "smoothed": 0.8, "statistic": "alpha_5"}) == Dial(inside, 0.8)
