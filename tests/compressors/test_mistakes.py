"""Budgets and compressors that cannot work are refused in one sentence with the numbers and the remedy."""

import pytest
import torch

from sparse_rl import COMPRESSORS, Engine, Sampling, SparseRLError
from sparse_rl.compressors import make
from tests.helpers.models import prompts_of


@pytest.mark.parametrize("compressor", ["rkv", "snapkv"])
def test_budget_not_above_sinks_and_window(llama, compressor):
    with pytest.raises(SparseRLError, match=r"budget 8 must be above sinks 0 \+ window 8 = 8.*at least 9"):
        Engine(llama, compressor=compressor, budget=8, interval=4)
    with pytest.raises(SparseRLError, match=r"budget 12.*sinks 4 \+ window 8.*13"):
        Engine(llama, compressor=COMPRESSORS[compressor](sinks=4), budget=12, interval=4)


def test_budget_of_the_window_compressor(llama):
    with pytest.raises(SparseRLError, match=r"budget 4 must be above sinks 4.*at least 5"):
        Engine(llama, compressor="window", budget=4, interval=4)


@pytest.mark.parametrize("budget, interval", [(0, 4), (16, 0), (-1, -1)])
def test_budget_and_interval_must_be_positive(llama, budget, interval):
    with pytest.raises(SparseRLError, match=r"(budget|interval) is (0|-1); it must be a whole number of at least 1"):
        Engine(llama, compressor="knorm", budget=budget, interval=interval)


@pytest.mark.parametrize("name", ["rkv", "prompt-only:rkv", "beacon:8", "window"])
@pytest.mark.parametrize("option", ["compressor", "cls", "self", "argument", "name"])
def test_an_option_may_be_called_like_a_parameter_of_ours(name, option):
    with pytest.raises(SparseRLError, match=f"has no parameter '{option}'"):
        make(name, **{option: "x"})


def test_unknown_compressor_names_the_nearest(llama):
    with pytest.raises(SparseRLError, match="'snapvk'; did you mean 'snapkv'"):
        Engine(llama, compressor="snapvk")
    with pytest.raises(SparseRLError, match="must be a name or a Compressor, not int"):
        Engine(llama, compressor=7)


@pytest.mark.parametrize("name, options", [("h2o", dict(sinks=4)), ("rkv", dict(sinks=3)), ("window", {})])
def test_the_budget_that_is_suggested_works(llama, name, options):
    compressor = COMPRESSORS[name](**options)
    too_small = max(budget for budget in range(1, 40) if not compressor.has_room(budget))
    with pytest.raises(SparseRLError) as caught:
        Engine(llama, compressor=compressor, budget=too_small, interval=4)
    suggested = int(str(caught.value).rsplit("at least ", 1)[1].rstrip("."))
    assert suggested > too_small
    assert Engine(llama, compressor=compressor, budget=suggested, interval=4).compressor.budget == suggested


@pytest.mark.parametrize("name, options", [("h2o", {}), ("h2o", dict(sinks=4)), ("rkv", dict(sinks=3)), ("knorm", {})])
def test_the_budget_that_is_suggested_protects_the_prompt(llama, name, options):
    protecting = COMPRESSORS[name](**options, protect_prompt=True)
    with pytest.raises(SparseRLError) as caught:
        Engine(llama, compressor=protecting, budget=48, interval=4).generate(prompts_of(60))
    suggested = int(str(caught.value).split("at least ")[1].split(",")[0])
    engine = Engine(llama, compressor=protecting, budget=suggested, interval=4)
    trajectory = engine.generate(prompts_of(60), sampling=Sampling(90))[0]
    assert not (trajectory.trace.evicted_at.long() < 150)[..., :60].any()


def test_a_compressor_that_returns_nonsense_is_told(llama):
    class Nonsense(COMPRESSORS["knorm"]):
        name = "nonsense"

        def keep(self, view, budget):
            return torch.zeros(view.keys.shape[0], view.keys.shape[1], budget, dtype=torch.int64)

    with pytest.raises(SparseRLError, match=r"nonsense\.keep must return distinct, ascending slot numbers below 30"):
        Engine(llama, compressor=Nonsense(), budget=16, interval=8).generate(prompts_of(30), sampling=Sampling(20))
