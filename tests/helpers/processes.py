"""What several processes must agree on. tests/distributed runs it under torch's launcher: processes.py FOLDER

Every process builds the same global batch by itself and takes an optimizer step on it alone; then all of them take it
together.
"""

import contextlib
import copy
import dataclasses
import shutil
import sys
import time
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

import sparse_rl.train.checkpoint
from sparse_rl.distributed.world import PeerFailed, World, is_lost, join_world, leave_world
from sparse_rl.errors import SparseRLError
from sparse_rl.files import find_checkpoints
from sparse_rl.learn.batch import apply_correction, collate, make_batches, score
from sparse_rl.learn.correct import only_rejection
from sparse_rl.learn.critic import Critic
from sparse_rl.learn.dpo import DPO, Pairs
from sparse_rl.learn.learner import Disagreement, Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.method import METHODS
from sparse_rl.learn.optimizer import MasterAdamW, OptimizerSettings
from sparse_rl.learn.ppo import PPO, ActorCritic
from sparse_rl.learn.shards import copy_weights, full, save_shards, shard
from sparse_rl.learn.student import Students, StudentSettings
from sparse_rl.models import tiny_tokenizer, with_lora
from sparse_rl.rollout import Engine, Sampling
from sparse_rl.train.checkpoint import load_state, save_checkpoint
from sparse_rl.train.loop import Trainer
from sparse_rl.train.saving import save_after
from tests.helpers.checkpointing import checkpoint
from tests.helpers.learning import batches_of
from tests.helpers.models import tiny
from tests.helpers.runs import recipe

OPTIMIZER = OptimizerSettings(lr=1e-3, max_grad_norm=0.5)


def batches(model, method, loss, world, minibatches=2, paired=False, critic=None):
    """The same on every process; rows belong to the processes in turn, but the first minibatch has none of the last
    one's. paired: the two completions of every prompt are compared. critic: it says what every token was worth.
    """
    engine = Engine(model, "rkv", budget=12, interval=4, rows=4)
    prompts = [[5, 6, 7, 8, 9 + i] for i in range(6)]
    done = engine.generate(prompts, 2, Sampling(24, for_correction=True, stop_ids=(3, 17, 40)), seed=1)
    reference = contextlib.nullcontext(copy.deepcopy(model)) if paired else None
    scored = score(model, collate(done), 64, reference=reference, view=method.view, critic=critic)
    first = len(done) // minibatches
    owner_rank = torch.arange(len(done)) % world.size
    owner_rank[:first] = torch.arange(first) % max(world.size - 1, 1)
    scored = dataclasses.replace(scored, sampled=dataclasses.replace(scored.sampled, owner_rank=owner_rank))
    advantages = torch.linspace(-1.5, 1.2, len(done))
    if critic is not None:
        corrected = apply_correction(scored, method.correction)
        credit = ActorCritic(PPO(), loss).credit(lambda: (advantages, {}), advantages, scored, corrected)
        return make_batches(
            scored, corrected, credit.advantages, method.correction, loss, minibatches, returns=credit.returns
        )
    if not paired:
        return batches_of(scored, advantages, method.correction, loss, minibatches)
    correction, chosen = only_rejection(method.correction, ""), torch.arange(0, len(done), 2)
    corrected = apply_correction(scored, correction, torch.ones(len(done), dtype=torch.bool))
    pairs = Pairs(chosen, chosen + 1, torch.ones(len(chosen), dtype=torch.float64))
    return make_batches(scored, corrected, advantages, correction, loss, minibatches, pairs, 2)


def recorded(learner):
    """Gradients as the optimizer finds them, whole, step by step."""
    found, step = [], learner.optimizer.step

    def spy(*args):
        found.append([full(g).clone() for g in learner.optimizer.gradients()])
        return step(*args)

    learner.optimizer.step = spy
    return found


def made_critic(model, ppo):
    """One that does not begin at 0; None without PPO."""
    if ppo is None:
        return None
    critic = Critic(model, copy.deepcopy(model) if ppo.critic == "separate" else None)
    with torch.no_grad():
        critic.weight.copy_(torch.linspace(-0.1, 0.1, len(critic.weight)))
    return critic


def step_alone_and_together(
    world, name, divided, lora=0, checkpointing=False, loss=None, dtype=torch.float32, dpo=None, ppo=None
):
    loss, method = loss or Loss(clip_high=0.28), METHODS[name]
    objective = dpo or (ActorCritic(ppo, loss) if ppo else loss)
    torch.manual_seed(0)
    model = copy.deepcopy(tiny("llama")).to(dtype)
    if lora:
        model = with_lora(model, lora, 16)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.05)
    if checkpointing:
        checkpoint(model, checkpointing, lora)
    critics = [made_critic(model, ppo) for _ in range(2)]
    every = batches(model, method, loss, world, paired=dpo is not None, critic=critics[0])
    assert len({int(o) for o in every[0].owner_rank}) < max(world.size, 2)  # somebody has nothing to do there
    options = dict(micro_batch_tokens=64, distill=method.distill)
    alone_model = copy.deepcopy(model)
    rates = dict(critic_lr=3e-3, critic_warmup=1 if ppo and divided else 0)
    alone = Learner(alone_model, OPTIMIZER, objective, critic=critics[0], **rates, **options)
    whole = copy.deepcopy(model)  # what a sampler would have
    sharded = shard(model, world.size) if divided else None
    if divided:
        assert all(
            isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.parameters() if p.dim() == 2
        )
    together = Learner(model, OPTIMIZER, objective, world=world, sharded=sharded, critic=critics[1], **rates, **options)
    ours, theirs = recorded(alone), recorded(together)
    everybody = [dataclasses.replace(b, owner_rank=torch.zeros_like(b.owner_rank)) for b in every]
    exact = dtype == torch.float32

    def same(theirs, mine):
        if dpo:  # the second step's margins follow from the first step's rounding
            assert (theirs - mine).norm() <= 1e-4 * mine.norm() + 1e-6
        elif exact:
            torch.testing.assert_close(theirs, mine, rtol=1e-5, atol=1e-6)
        else:  # micro-batches are cut elsewhere, and bfloat16 rounds each
            assert (theirs.float() - mine.float()).norm() <= 0.03 * mine.float().norm() + 1e-3

    for one, all_ in zip(everybody, every):
        found, expected = together.step(all_).metrics, alone.step(one).metrics
        assert found.keys() == expected.keys()
        for key in expected:
            assert (
                abs(found[key] - expected[key]) <= (1e-4 if dpo else 1e-5) * max(1, abs(expected[key]))
                if exact
                else True
            ), (
                key,
                found[key],
                expected[key],
            )
    assert len(ours) == len(theirs) == len(every) and any(g.abs().max() > 1e-4 for g in ours[0])
    for mine, all_of_us in zip(ours, theirs):
        for one, other in zip(mine, all_of_us, strict=True):
            same(other, one)
    for one, other in zip(alone.optimizer.masters, together.optimizer.masters):
        assert other.dtype == torch.float32
        same(full(other).detach(), one.detach())
    if divided:
        copy_weights(model, whole)
        for one, other, master in zip(alone_model.parameters(), whole.parameters(), model.parameters()):
            assert other.dtype == dtype and other.equal(full(master).to(dtype))
            same(other, one)
    else:
        together.check_agreement()


def check_steps(world, folder):
    for divided in (False, True):
        step_alone_and_together(world, "sparse-rl", divided)
        step_alone_and_together(world, "shadow", divided, loss=Loss(mean="token-mean"))
        # Of sparse-rl-released the weights are normalised over all processes.
        step_alone_and_together(world, "sparse-rl-released", divided, loss=Loss(mean="dr-grpo", constant=24))
        # The members of a pair are on different processes, which a run avoids but the learner does not need.
        step_alone_and_together(world, "shadow", divided, dpo=DPO(beta=0.05))
        step_alone_and_together(world, "sparse-rl", divided, dpo=DPO(loss="ipo", per_token=True))
        step_alone_and_together(world, "shadow", divided, ppo=PPO())
    step_alone_and_together(world, "smd", True)
    step_alone_and_together(world, "shadow", True, lora=4, checkpointing=True)
    step_alone_and_together(world, "sparse-rl", True, checkpointing=True)
    step_alone_and_together(world, "shadow", True, lora=4, checkpointing="selective")
    step_alone_and_together(world, "shadow", True, dtype=torch.bfloat16, checkpointing="selective")
    step_alone_and_together(world, "sparse-rl", False, checkpointing="selective")
    step_alone_and_together(world, "shadow", True, dtype=torch.bfloat16)
    step_alone_and_together(world, "shadow", False, lora=4, checkpointing=True, dtype=torch.bfloat16)
    step_alone_and_together(world, "sparse-rl", False, ppo=PPO(critic="separate"))


def check_students(world, folder):
    """A student on several processes is the student on one."""
    model = copy.deepcopy(tiny("llama"))
    method = METHODS["none"]
    engine = Engine(model, "dense", rows=4)
    done = engine.generate([[5, 6, 7 + i] for i in range(4)], 2, Sampling(16, for_correction=True), seed=1)
    sampled = score(model, collate(done), 64, view=method.view).sampled
    settings = StudentSettings(chunks=[4], lr=1e-3)
    alone, together = Students(model, settings, OPTIMIZER, 64), Students(model, settings, OPTIMIZER, 64, world=world)
    owner_rank = torch.arange(len(done)) % world.size
    expected = alone.learn(model, sampled, 2, step=0)
    found = together.learn(model, dataclasses.replace(sampled, owner_rank=owner_rank), 2, step=0)
    for key in expected:
        assert abs(found[key] - expected[key]) <= 1e-5 * max(1, abs(expected[key]))
    for one, other in zip(alone.members[0].model.parameters(), together.members[0].model.parameters()):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def check_meetings(world, folder):
    """A failure or a stop of one is every one's, and afterwards they can meet again."""
    assert world.run_on_all(lambda: world.rank) == list(range(world.size))
    odd = (torch.arange(3) + world.rank).to(torch.uint16)
    assert [t.tolist() for t in world.run_on_all(lambda: odd)] == [[r, r + 1, r + 2] for r in range(world.size)]

    def fails():
        if world.rank == 1:
            raise SparseRLError("rank 1 has had enough.")
        return 1

    try:
        world.run_on_all(fails)
    except SparseRLError as error:
        assert isinstance(error, PeerFailed) == (world.rank != 1) and "has had enough" in str(error)
    else:
        raise AssertionError("nobody was told")

    def all_fail():
        raise SparseRLError("this recipe is no good.")

    try:
        world.run_on_all(all_fail)
    except SparseRLError as error:
        assert isinstance(error, PeerFailed) == (not world.first)  # the first one says it, and nobody else
    else:
        raise AssertionError("nobody failed")

    def stops():
        if world.rank == 0:
            raise KeyboardInterrupt

    for _ in range(2):
        try:
            world.run_on_all(stops)
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("nobody stopped")
    assert world.run_on_first(lambda: world.rank) == 0
    numbers = world.add_numbers({"a": 1.0, "b": float(world.rank)})
    assert numbers == {"a": world.size, "b": sum(range(world.size))}
    tensors = [torch.full((3,), float(world.rank + 1)), torch.ones(2, 2)]
    world.add(tensors)
    assert tensors[0].tolist() == [sum(range(1, world.size + 1))] * 3 and tensors[1].tolist() == [[world.size] * 2] * 2


def check_disagreement(world, folder):
    model = copy.deepcopy(tiny("llama"))
    learner = Learner(model, OPTIMIZER, Loss(), world=world)
    learner.check_agreement()
    if world.rank == 1:
        with torch.no_grad():
            next(model.parameters())[0] += 1e-3
    try:
        learner.check_agreement()
    except SparseRLError as error:
        assert "are not the same" in str(error)
    else:
        raise AssertionError("nobody noticed")


def check_stopping(world, folder):
    """Who is stopped stays until the checkpoint is there, even if asked twice; weights that differ are not saved."""
    made = Trainer(recipe(eval={"every": 0}), Path(folder) / "run", show=False, world=world)
    made.progress.steps = 1
    save_after(made, Disagreement("planted"))
    world.run_on_all(lambda: None)
    assert not find_checkpoints(Path(folder) / "run" / "checkpoints")
    original = sparse_rl.train.checkpoint.save_model

    def slowly(*given):
        time.sleep(1)
        original(*given)

    sparse_rl.train.checkpoint.save_model = slowly
    world.stop = True  # Ctrl-C again, after the meeting that stopped the run
    save_after(made, KeyboardInterrupt())
    sparse_rl.train.checkpoint.save_model = original
    assert [step for step, _ in find_checkpoints(Path(folder) / "run" / "checkpoints")] == [1]


def check_shards(world, folder):
    """State that shards wrote is read back by any number of processes, divided or whole."""

    def made(seed):
        torch.manual_seed(seed)
        model = copy.deepcopy(tiny("llama"))
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
        return model

    def learner_of(model, divided):
        return Learner(model, OPTIMIZER, Loss(), world=world, sharded=shard(model, world.size) if divided else None)

    model = made(1)
    expected = [p.detach().clone() for p in model.parameters()]
    learner = learner_of(model, True)
    for i, master in enumerate(learner.optimizer.masters):
        master.grad = torch.zeros_like(master) + i
    learner.optimizer.step(0)
    expected = [full(p).detach() for p in model.parameters()]
    state = {"learner": learner.state_dict()}
    path = save_checkpoint(Path(folder), 3, made(2), tiny_tokenizer(), state, 2, world=world)
    assert (path / "shards").is_dir() and not list(Path(folder).glob(".*"))
    moments = [full(t).clone() for t in learner.state_dict()["optimizer"]["exp_avg"]]
    for divided in (True, False):
        other = learner_of(made(5), divided)
        loaded = load_state(path, {"learner": other.state_dict()})
        assert loaded["step"] == 3
        other.load_state_dict(loaded["learner"])
        for parameter, value in zip(other.model.parameters(), expected):
            assert full(parameter).equal(value)
        for moment, value in zip(other.optimizer.state_dict()["exp_avg"], moments):
            assert full(moment).equal(value)
        assert all(float(step) == 1 for step in other.optimizer.state_dict()["step"])
    torch.save({"weights": expected, "moments": moments}, Path(folder) / f"expected-{world.rank}.pt")
    try:
        save_shards({"x": learner.optimizer.masters[0].detach()}, path / "training.pt" / "shards")
    except OSError as error:
        assert "Not a directory" in str(error)
    else:
        raise AssertionError("a file is not a folder")


def read_shards_alone(folder):
    """Called by the test itself, in one process that knows nothing of others."""
    (path,) = Path(folder).glob("step-*")
    optimizer = MasterAdamW(copy.deepcopy(tiny("llama")).parameters(), OPTIMIZER)
    state = load_state(path, {"learner": {"optimizer": optimizer.state_dict()}})
    optimizer.load_state_dict(state["learner"]["optimizer"])
    expected = torch.load(Path(folder) / "expected-0.pt")
    for master, value in zip(optimizer.masters, expected["weights"], strict=True):
        assert master.detach().equal(value)
    for moment, value in zip(optimizer.state_dict()["exp_avg"], expected["moments"], strict=True):
        assert moment.equal(value)
    (path / "shards" / "process-00001.safetensors").unlink()
    for _ in range(2):  # a file of them is gone; all are
        try:
            load_state(path, {"learner": {"optimizer": optimizer.state_dict()}})
        except SparseRLError as error:
            assert "shards is damaged" in str(error) and "continue from the checkpoint before" in str(error)
        else:
            raise AssertionError("half the weights are gone")
        shutil.rmtree(path / "shards", ignore_errors=True)


def check_leaving(world, folder):
    """Comes last. Who learns with shards says in a sentence that another has left."""
    model = copy.deepcopy(tiny("llama"))
    sharded = shard(model, world.size)
    world.run_on_all(lambda: None)
    if world.rank == 1:
        leave_world(world, failed=True)
        return
    try:
        sharded(lambda whole: whole(input_ids=torch.tensor([[1, 2]])))
    except RuntimeError as error:
        assert is_lost(error)
    else:
        raise AssertionError("nobody noticed")
    assert not is_lost(RuntimeError("CUDA out of memory"))


if __name__ == "__main__":
    here: World = join_world()
    for check in (
        check_meetings,
        check_disagreement,
        check_students,
        check_shards,
        check_stopping,
        check_steps,
        check_leaving,
    ):
        check(here, sys.argv[1])
        print(f"{check.__name__} {here.rank}", flush=True)
    leave_world(here)
