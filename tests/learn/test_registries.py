"""An estimator or a method of one's own: registered once, known to recipes, runs and `sparse-rl list methods`."""

import pytest
import torch

from sparse_rl.config import make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.files import read_lines
from sparse_rl.learn.advantage import GroupRewards, advantage, estimator
from sparse_rl.learn.correct import PRESETS, Correction, correction
from sparse_rl.learn.method import Method, register_method
from sparse_rl.train.run import train
from tests.helpers.runs import recipe, run

SMALL = {"model": {"name": "tiny"}, "task": {"name": "sums"}}


def test_an_estimator_of_ones_own_sets_the_advantages_of_a_run(tmp_path):
    @estimator("own")
    def own(group: GroupRewards, eps: float) -> torch.Tensor:
        return 2 * group.centred

    rewards, group = torch.tensor([1.0, 0.0, 3.0, 3.0]), torch.tensor([0, 0, 1, 1])
    assert advantage(rewards, group, "own")[0].tolist() == [1.0, -1.0, 0.0, 0.0]
    found = {}
    for name in ("dr-grpo", "own"):
        train(recipe(learn={"advantage": name}, run={"steps": 1}, eval={"every": 0}), tmp_path / name, show=False)
        (found[name],) = read_lines(tmp_path / name / "metrics.jsonl")
    assert found["own"]["advantage/abs/mean"] == pytest.approx(2 * found["dr-grpo"]["advantage/abs/mean"]) != 0


def test_a_method_of_ones_own_is_known_by_its_name():
    register_method("own", Method(Correction(cap=5.0)))
    register_method("own-shadow", Method(view="shadow", distill="shadow-to-dense-forward", distill_weight=0.5))
    assert make_recipe({**SMALL, "learn": {"method": "own"}}).learn.resolve_method().correction.cap == 5.0
    assert make_recipe({**SMALL, "learn": {"method": "own-shadow"}}).learn.resolve_method().distill_weight == 0.5
    assert correction("own").cap == 5.0 and "own-shadow" not in PRESETS
    listed = dict(line.split(maxsplit=1) for line in run("list", "presets").stdout.splitlines())
    assert listed["own"] == "cap 5.0" and "distillation shadow-to-dense-forward" in listed["own-shadow"]


def test_unknown_names_are_refused_with_the_nearest_one():
    with pytest.raises(SparseRLError, match=r"learn.advantage is 'rlo'; did you mean 'rloo'"):
        make_recipe({**SMALL, "learn": {"advantage": "rlo"}})
    with pytest.raises(SparseRLError, match="there is no method 'shaddow'; did you mean 'shadow'"):
        make_recipe({**SMALL, "learn": {"method": "shaddow"}})
