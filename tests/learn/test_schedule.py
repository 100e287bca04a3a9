"""Learning-rate schedules: those of transformers after our warm-up, and none that can end before it begins."""

import pytest
import torch
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from sparse_rl import SparseRLError
from sparse_rl.learn.optimizer import SCHEDULES, OptimizerSettings
from tests.helpers.runs import recipe


@pytest.mark.parametrize(
    ("schedule", "theirs"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_the_learning_rate_falls_as_in_transformers(schedule, theirs):
    ours = OptimizerSettings(lr=1e-3, warmup_steps=5, schedule=schedule, decay_steps=20)
    adamw = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    reference = theirs(adamw, 5, 20)
    for step in range(20):
        if step >= 5:
            assert ours.lr_after(step) == pytest.approx(reference.get_last_lr()[0], rel=1e-12, abs=1e-18)
        adamw.step()
        reference.step()
    assert [ours.lr_after(step) for step in range(5)] == [1e-3 * (step / 5) for step in range(1, 6)]
    assert ours.lr_after(20) == ours.lr_after(1000) == pytest.approx(0.0, abs=1e-18)


def test_constant_stays_and_every_schedule_begins_at_its_peak():
    assert {OptimizerSettings(lr=1e-3).lr_after(step) for step in range(9)} == {1e-3}
    for factor in SCHEDULES.values():
        assert factor(0.0) == 1.0


def test_a_run_fills_in_the_length_of_its_schedule():
    learn, run = {"minibatches": 3}, {"steps": 7}
    made = recipe(learn=learn, run=run, optimizer={"schedule": "linear", "warmup_steps": 2})
    assert made.optimizer.decay_steps is None and made.scheduled_optimizer().decay_steps == 21
    fixed = recipe(learn=learn, run=run, optimizer={"schedule": "linear", "decay_steps": 9})
    assert fixed.scheduled_optimizer().decay_steps == 9
    with pytest.raises(SparseRLError, match=r"21 optimizer steps .run.steps 7 x learn.minibatches 3. and the warm-up"):
        recipe(learn=learn, run=run, optimizer={"schedule": "cosine", "warmup_steps": 21})
    for mistake, said in (
        ({"schedule": "cosin"}, "cosine"),
        ({"decay_steps": 5}, "optimizer.schedule is constant"),
        ({"schedule": "linear", "decay_steps": 5, "warmup_steps": 5}, "set it above that"),
    ):
        with pytest.raises(SparseRLError, match=said):
            recipe(optimizer=mistake)
