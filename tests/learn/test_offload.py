"""Masters and moments in host memory: the bits of AdamW on the device, in buckets of any size; the same checkpoints."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.config import load_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.learn import offload, optimizer
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.offload import BUCKET, LANES, Piece, buckets
from sparse_rl.learn.optimizer import MasterAdamW, OptimizerSettings
from sparse_rl.learn.scaler import LossScale
from sparse_rl.models import with_lora
from sparse_rl.planning.training import OFFLOADED
from sparse_rl.train.run import train
from tests.helpers.models import tiny
from tests.helpers.runs import recipe
from tests.learn.test_learner import make_batch

PLAIN = OptimizerSettings(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, warmup_steps=2)
HOST = OptimizerSettings(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, warmup_steps=2, offload=True)


def both(make, **options):
    """Two optimizers of equal parameters, on the device and offloaded."""
    models = [make(), make()]
    made = [MasterAdamW(m.parameters(), given, **options) for m, given in zip(models, (PLAIN, HOST), strict=True)]
    return models, made


def assert_equal_state(one: MasterAdamW, other: MasterAdamW) -> None:
    for kind, tensors in one.state_dict().items():
        for a, b in zip(tensors, other.state_dict()[kind], strict=True):
            assert a.equal(b), kind
    assert all(a.equal(b) for a, b in zip(one.parameters, other.parameters, strict=True))


@pytest.fixture(params=[257, BUCKET])
def bucket_size(request, monkeypatch):
    """Buckets smaller than a matrix, and of the usual size."""
    plain = offload.update_by_buckets
    monkeypatch.setattr(optimizer, "update_by_buckets", lambda *args: plain(*args, size=request.param))
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_offloading_changes_no_bit(dtype, bucket_size):
    scale = LossScale(1024.0) if dtype == torch.float16 else None
    models, made = both(lambda: copy.deepcopy(tiny("llama")).to(dtype), scale=scale)
    assert all(m.device.type == "cpu" for m in made[1].masters)
    for steps in range(3):
        for model, one in zip(models, made, strict=True):
            generator = torch.Generator().manual_seed(steps)
            for p in model.parameters():
                one.scaled((p.float() * torch.randn(p.shape, generator=generator)).sum()).backward()
        assert made[0].step(steps) == made[1].step(steps)
        assert_equal_state(*made)
        assert all(t.grad is None for t in (*made[1].parameters, *made[1].carriers))


def test_only_gradients_stay_on_the_device():
    """What hangs on the device beside the parameters has no storage."""
    model = copy.deepcopy(tiny("llama")).bfloat16()
    made = MasterAdamW(model.parameters(), HOST)
    assert all(carrier.untyped_storage().nbytes() <= 4 for carrier in made.carriers)
    blocks = {m.untyped_storage().data_ptr() for m in made.masters}
    assert len(blocks) == 1  # pinned blocks are rounded up, so there is one


def test_a_learner_with_adapters_a_critic_and_a_resumed_state(bucket_size):
    """A whole learner, through micro-batches: metrics, weights and checkpoints are the same, in either direction."""
    start = copy.deepcopy(tiny("llama")).bfloat16()
    (batch,), _, _ = make_batch(start)

    def learner(settings):
        torch.manual_seed(0)
        return Learner(with_lora(copy.deepcopy(start), 4, 8), settings, Loss(), micro_batch_tokens=64)

    plain, host = learner(PLAIN), learner(HOST)
    for _ in range(2):
        assert plain.step(batch).metrics == host.step(batch).metrics
    assert_equal_state(plain.optimizer, host.optimizer)
    swapped = learner(HOST), learner(PLAIN)
    for other, source in zip(swapped, (plain, host), strict=True):
        other.load_state_dict(copy.deepcopy(source.state_dict()))
    found = [one.step(batch).metrics for one in (plain, host, *swapped)]
    assert all(metrics == found[0] for metrics in found)
    for other in (host.optimizer, swapped[0].optimizer, swapped[1].optimizer):
        assert_equal_state(plain.optimizer, other)


def test_a_critic_that_learns_alone_leaves_the_others_on_the_host():
    def make():
        torch.manual_seed(0)
        return torch.nn.ModuleList([torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)]).bfloat16()

    found = []
    for settings_ in (PLAIN, HOST):
        policy, critic = make()
        one = MasterAdamW(policy.parameters(), settings_, critic.parameters(), 5e-3)
        for alone in (True, False):
            for p in (*policy.parameters(), *critic.parameters()):
                p.float().square().sum().backward()
            one.step(0, critic_only=alone)
        found.append(one)
    assert_equal_state(*found)
    assert [float(s) for s in found[1].state_dict()["step"]] == [1, 1, 2, 2]


def test_a_gradient_that_is_not_finite_changes_nothing_on_the_host():
    model = copy.deepcopy(tiny("llama")).bfloat16()
    made = MasterAdamW(model.parameters(), HOST)
    before = copy.deepcopy(made.state_dict())
    next(model.parameters()).float().sum().mul(torch.inf).backward()
    norm, _ = made.step(0)
    assert not norm < torch.inf
    assert all(a.equal(b) for kind in before for a, b in zip(before[kind], made.state_dict()[kind], strict=True))


@given(st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=6), st.integers(1, 40))
@settings(max_examples=60, deadline=None)
def test_buckets_hold_every_number_once(shapes, size):
    """Ragged shapes, a scalar among them: in order, none twice, and no more than fits unless one row alone is more."""
    wholes, next_number = [], 0
    for shape in shapes:
        count = int(torch.tensor(shape).prod()) if shape else 1
        master = torch.arange(next_number, next_number + count, dtype=torch.float32).view(shape)
        wholes.append(Piece(master, master, master, master, None, 0.0))
        next_number += count
    found = list(buckets(wholes, size))
    numbers = torch.cat([piece.master.flatten() for bucket in found for piece in bucket])
    assert numbers.equal(torch.arange(next_number, dtype=torch.float32))
    for bucket in found:
        held = sum(piece.master.numel() for piece in bucket)
        assert held <= size or (len(bucket) == 1 and (bucket[0].master.dim() == 0 or len(bucket[0].master) == 1))


def test_the_plan_counts_the_buckets_that_pass():
    assert OFFLOADED == LANES * BUCKET


def test_a_divided_learner_is_refused_in_a_sentence(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model: {name: tiny, shard: true}\ntask: {name: sums}\noptimizer: {offload: true}\n")
    with pytest.raises(
        SparseRLError, match=r"optimizer.offload and model.shard are both true.* set one of them to false"
    ):
        load_recipe(path)


def test_a_run_may_move_its_state_to_the_host_and_back(tmp_path):
    """Runs with and without write the same metrics, and go on from each other's checkpoints to the same bytes."""

    def ran(name: str, *ends: tuple[int, bool]):
        for steps, host in ends:
            given = recipe(
                model={"name": "tiny", "dtype": "bfloat16"},
                optimizer={"lr": 1e-3, "offload": host},
                eval={"every": 0},
                run={"steps": steps, "samples": 0, "diagnose": 0},
            )
            trainer = train(given, tmp_path / name, resume=(tmp_path / name).exists(), show=False)
        return trainer, (tmp_path / name / "metrics.jsonl").read_text()

    plain, lines = ran("plain", (2, False))
    for ends in [((2, True),), ((1, True), (2, False)), ((1, False), (2, True))]:
        other, found = ran(str(len(list(tmp_path.iterdir()))), *ends)
        assert found == lines
        assert_equal_state(plain.learner.optimizer, other.learner.optimizer)
