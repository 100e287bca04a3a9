"""PPO: GAE and the value loss by loops, a whole optimizer step against autograd in fp64, whole runs.

No test compares with TRL: as of version 1.16 it has no PPO trainer.
"""

import contextlib
import copy
import math
import shutil
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl import Engine, Sampling, token_logprobs
from sparse_rl.config import make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.files import find_checkpoints, read_lines
from sparse_rl.learn.advantage import Credit
from sparse_rl.learn.batch import apply_correction, collate, make_batches, score
from sparse_rl.learn.correct import PRESETS, changed
from sparse_rl.learn.critic import Critic
from sparse_rl.learn.learner import Learner
from sparse_rl.learn.loss import Loss
from sparse_rl.learn.optimizer import OptimizerSettings
from sparse_rl.learn.ppo import PPO, ActorCritic, explained_variance, gae, terminal_rewards, value_loss, whiten
from sparse_rl.learn.score import hidden_states, replay_of
from sparse_rl.models import load_model, with_lora
from sparse_rl.train.fit import Fitting
from sparse_rl.train.run import plan_run, train
from sparse_rl.train.terminal import TerminalTable
from tests.helpers.learning import moved
from tests.helpers.models import prompts_of, tiny
from tests.helpers.processes import recorded
from tests.helpers.runs import recipe, run, weights

STEADY = OptimizerSettings(lr=1e-3)


# -------------------------------------------------------------------------------------------- equations, by loops


def loop_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Of one response: sum over l of (gamma lam)^l delta_{t+l}, not by recursion."""
    after = [*values[1:], 0.0]
    deltas = [r + gamma * b - a for r, a, b in zip(rewards, values, after)]
    return [sum((gamma * lam) ** (s - t) * deltas[s] for s in range(t, len(deltas))) for t in range(len(deltas))]


numbers = st.floats(-3, 3, allow_subnormal=False)


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_gae_is_the_sum_of_discounted_errors_over_response_tokens(data):
    """Ragged rows, with holes (beacons) and rows without a response."""
    count, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    grid = lambda kind: torch.tensor(  # noqa: E731
        data.draw(st.lists(st.lists(kind, min_size=width, max_size=width), min_size=count, max_size=count))
    )
    mask, values = grid(st.booleans()), grid(numbers).double()
    penalties = torch.where(mask, grid(numbers).double(), 0.0)
    rewards = torch.tensor(data.draw(st.lists(numbers, min_size=count, max_size=count)), dtype=torch.float64)
    gamma, lam = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1))
    found = gae(terminal_rewards(rewards, mask) - penalties, values, mask, gamma, lam)
    for i in range(count):
        places = mask[i].nonzero()[:, 0].tolist()
        earned = [-penalties[i, t].item() for t in places]
        if places:
            earned[-1] += rewards[i].item()
        expected = torch.zeros(width, dtype=torch.float64)
        expected[places] = torch.tensor(loop_gae(earned, values[i, places].tolist(), gamma, lam), dtype=torch.float64)
        torch.testing.assert_close(found[i], expected, rtol=1e-9, atol=1e-9)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whitening_value_loss_and_explained_variance_are_what_loops_find(data):
    count = data.draw(st.integers(2, 9))
    values, old, returns = (
        torch.tensor(data.draw(st.lists(numbers, min_size=count, max_size=count)), dtype=torch.float64)
        for _ in range(3)
    )
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    clip = data.draw(st.sampled_from([None, 0.1, 1.0]))
    counted = [i for i in range(count) if mask[i]]
    scale = mask.double() / max(len(counted), 1)
    loss, clipped = value_loss(values[None], old[None], returns[None], mask[None], scale[None], clip)
    expected, cut = 0.0, 0
    for i in counted:
        error = (values[i].item() - returns[i].item()) ** 2
        if clip is not None:
            moved = min(max(values[i].item(), old[i].item() - clip), old[i].item() + clip)
            bounded = (moved - returns[i].item()) ** 2
            cut, error = cut + (bounded > error), max(error, bounded)
        expected += 0.5 * error / len(counted)
    assert loss.item() == pytest.approx(expected, abs=1e-9) and int(clipped.sum()) == cut

    white = whiten(values[None], mask[None])[0]
    assert not white[~mask].any()
    if len(counted) > 1:
        chosen = [values[i].item() for i in counted]
        mean, variance = statistics.mean(chosen), statistics.variance(chosen)
        by_hand = [(x - mean) / math.sqrt(variance + 1e-8) for x in chosen]
        assert white[mask].tolist() == pytest.approx(by_hand, abs=1e-6)
    whole = explained_variance(values, returns)
    if (spread := statistics.variance(returns.tolist())) > 1e-9:
        rest = statistics.variance((returns - values).tolist())
        assert whole == pytest.approx(1 - rest / spread, rel=1e-6, abs=1e-6)
        assert explained_variance(returns, returns) == 1
    assert math.isnan(explained_variance(values, torch.ones_like(values)))


# ------------------------------------------------------------------------------------------- a whole optimizer step


CASES = {
    "trunk": (PPO(), Loss()),
    "plain": (PPO(gamma=0.98, lam=0.7, whiten=False, value_clip=None, value_weight=0.5), Loss(mean="token-mean")),
    "kl-in-the-reward": (PPO(lam=0.9), Loss(beta=0.2, clip_high=0.28)),
    "kl-in-the-loss": (PPO(kl="loss", value_clip=0.05), Loss(beta=0.2)),
    "separate": (PPO(critic="separate", value_weight=0.5), Loss(mean="dr-grpo", constant=20)),
}


@pytest.mark.parametrize("method", ["shadow", "sparse-rl-released"])
@pytest.mark.parametrize("case", CASES)
def test_a_step_has_the_gradient_of_the_equations_in_fp64(case, method):
    """sparse-rl-released rejects, drops and weights tokens in the dense view."""
    ppo, loss = CASES[case]
    view, correction = (
        ("shadow", PRESETS["none"]) if method == "shadow" else ("dense", changed(PRESETS[method], reject_below=2e-3))
    )
    model = copy.deepcopy(tiny("llama"))
    reference, objective = moved(model, 3), ActorCritic(ppo, loss)
    critic = moved(Critic(model, moved(model, 6) if ppo.critic == "separate" else None), 5, 0.2)
    engine = Engine(model, "rkv", budget=12, interval=4, rows=6)
    done = engine.generate(prompts_of(5, 9, 14), 3, Sampling(20, stop_ids=(7, 30), for_correction=True), seed=1)
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5, 0.0, 0.0, 0.25, 1.0, 0.0])
    held = contextlib.nullcontext(reference) if loss.beta else None
    packing = case in ("plain", "separate")
    scored = score(model, collate(done), 64, 1.0, held, view, packing=packing, critic=critic)
    corrected = apply_correction(scored, correction)
    if method != "shadow":
        assert 0 < corrected.accepted.sum() < 9 and corrected.mask.sum() < scored.sampled.mask[corrected.accepted].sum()
    credit = objective.credit(lambda: (rewards, {}), rewards, scored, corrected)
    (batch,) = make_batches(scored, corrected, credit.advantages, correction, loss, 1, returns=credit.returns)
    now, critic_now = moved(model, 4, 0.02), moved(critic, 8, 0.02)  # since the rollout was scored

    def tokens_of(network, head, i) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and values of a response, in fp64, alone and without padding."""
        t = done[i]
        trace, tokens, first = t.trace if view == "shadow" else None, t.tokens, t.num_prompt_tokens
        trunk = network if head.trunk is None else head.trunk
        seen = None if trace is None else replay_of(trunk, [(tokens, trace)])
        states = hidden_states(trunk, tokens[None], seen).last_hidden_state[0]
        values = [(states[k - 1] * head.weight).sum() + head.bias[0] for k in range(first, len(tokens))]
        return token_logprobs(network, tokens, trace)[first:], torch.stack(values)

    old_model, old_critic, fixed = (copy.deepcopy(m).double() for m in (model, critic, reference))
    double, head = copy.deepcopy(now).double(), copy.deepcopy(critic_now).double()
    advantages, returns, old_values, old_logprobs, reference_logprobs = [], [], [], [], []
    for i in range(9):
        with torch.no_grad():
            logprobs, values = tokens_of(old_model, old_critic, i)
            ref, _ = tokens_of(fixed, old_critic, i)
        earned = [0.0] * len(values)
        earned[-1] = rewards[i].item()
        if ppo.kl == "reward":
            earned = [r - loss.beta * (a - b).item() for r, a, b in zip(earned, logprobs, ref)]
        found = loop_gae(earned, values.tolist(), ppo.gamma, ppo.lam)
        advantages.append(found)
        returns.append([a + v for a, v in zip(found, values.tolist())])
        old_values.append(values.tolist())
        old_logprobs.append(logprobs)
        reference_logprobs.append(ref)
    kept = [corrected.mask[i][scored.sampled.mask[i]].tolist() for i in range(9)]
    factor = [batch.weights[i][scored.sampled.mask[i]].tolist() for i in range(9)]
    flat = [a for i in range(9) for a, k in zip(advantages[i], kept[i]) if k]
    mean, spread = (statistics.mean(flat), math.sqrt(statistics.variance(flat) + 1e-8)) if ppo.whiten else (0.0, 1.0)
    policy, value, total, cut = 0.0, 0.0, sum(map(sum, kept)), 0
    for i in range(9):
        if not any(kept[i]):
            continue
        logprobs, values = tokens_of(double, head, i)
        for k in range(len(values)):
            if not kept[i][k]:
                continue
            share = {"sequence-mean": 1 / (9 * sum(kept[i])), "token-mean": 1 / total, "dr-grpo": 1 / (9 * 20)}
            r, a = (logprobs[k] - old_logprobs[i][k]).exp(), (advantages[i][k] - mean) / spread
            term = -factor[i][k] * torch.minimum(r * a, r.clamp(1 - loss.clip_low, 1 + loss.clip_high) * a)
            if loss.beta and ppo.kl == "loss":
                x = reference_logprobs[i][k] - logprobs[k]
                term = term + loss.beta * (x.exp() - 1 - x).clamp(max=correction.clip_kl or math.inf)
            policy = policy + share[loss.mean] * term
            error = (values[k] - returns[i][k]) ** 2
            if ppo.value_clip is not None:
                low, high = old_values[i][k] - ppo.value_clip, old_values[i][k] + ppo.value_clip
                bounded = (values[k].clamp(low, high) - returns[i][k]) ** 2
                cut += int(bounded > error)
                error = torch.maximum(error, bounded)
            value = value + share[loss.mean] * 0.5 * error
    (policy + ppo.value_weight * value).backward()

    if critic_now.trunk is not None:  # which must see the trace again when layers run again
        for one in (now, critic_now.trunk):
            one.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    learner = Learner(now, STEADY, objective, micro_batch_tokens=64, packing=packing, critic=critic_now)
    found = recorded(learner)
    metrics = learner.step(batch).metrics
    assert metrics["update/loss"] == pytest.approx((policy + ppo.value_weight * value).item(), rel=1e-4, abs=1e-6)
    assert metrics["update/value_loss"] == pytest.approx(value.item(), rel=1e-4)
    assert metrics["update/value_clip/frac"] == pytest.approx(cut / total) and (cut > 0) == (ppo.value_clip is not None)
    expected = [p for p in (*double.parameters(), *head.parameters()) if p.requires_grad]
    size = math.sqrt(sum(p.grad.square().sum().item() for p in expected))
    assert size > 1e-3 and head.weight.grad.norm() > 1e-3
    for mine, p in zip(found[0], expected, strict=True):
        torch.testing.assert_close(mine.double(), p.grad, rtol=2e-3, atol=2e-4 * size)


@pytest.mark.parametrize("view", ["dense", "shadow"])
def test_without_discount_and_with_a_critic_that_knows_nothing_it_is_reinforce_with_a_clip(view):
    model, rewards = copy.deepcopy(tiny("llama")), torch.tensor([1.0, 0.0, -0.5, 0.25])
    engine = Engine(model, "rkv", budget=12, interval=4, rows=4)
    done = engine.generate(prompts_of(5, 9), 2, Sampling(20, stop_ids=(7, 30), for_correction=True), seed=1)
    objective, critic = ActorCritic(PPO(gamma=1.0, lam=1.0, whiten=False), Loss()), Critic(model)
    scored = score(model, collate(done), 64, view=view, critic=critic)
    corrected = apply_correction(scored, PRESETS["none"])
    credit = objective.credit(lambda: (rewards, {}), rewards, scored, corrected)
    mask = scored.sampled.mask
    assert credit.advantages.equal(torch.where(mask, rewards.double()[:, None], 0.0))
    assert isinstance(credit, Credit) and credit.returns is not None and credit.returns.equal(credit.advantages)
    now, found = moved(model, 4, 0.01), []
    for one, advantages, own in ((objective, credit.advantages, critic), (Loss(), rewards, None)):
        (batch,) = make_batches(scored, corrected, advantages, PRESETS["none"], Loss(), 1, returns=credit.returns)
        learner = Learner(copy.deepcopy(now), STEADY, one, micro_batch_tokens=64, critic=own)
        gradients = recorded(learner)
        result = learner.step(batch)
        found.append((gradients[0], result.metrics["update/clip/frac"], result.clipped))
        torch.testing.assert_close(batch.row_advantages, rewards)
    (ours, share, clipped), (theirs, their_share, their_clipped) = found
    assert share == their_share > 0 and clipped.equal(their_clipped)
    for mine, other in zip(ours, theirs):  # the head comes last, and sends nothing back while it is 0
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_the_warm_up_trains_the_critic_alone_and_at_its_own_rate():
    model = copy.deepcopy(tiny("llama"))
    engine = Engine(model, "rkv", budget=12, interval=4, rows=4)
    done = engine.generate(prompts_of(5, 9), 2, Sampling(12, for_correction=True), seed=1)
    rewards, critic = torch.tensor([1.0, 0.0, 0.5, 0.25]), moved(Critic(model), 5, 0.1)
    objective, before = ActorCritic(PPO(), Loss()), copy.deepcopy(model)
    scored = score(model, collate(done), 64, critic=critic)
    corrected = apply_correction(scored, PRESETS["none"])
    credit = objective.credit(lambda: (rewards, {}), rewards, scored, corrected)
    (batch,) = make_batches(scored, corrected, credit.advantages, PRESETS["none"], Loss(), 1, returns=credit.returns)
    adam = OptimizerSettings(lr=1e-3, weight_decay=0.0)
    head = critic.weight.detach().clone()
    learner = Learner(model, adam, objective, critic=critic, critic_lr=5e-3, critic_warmup=1)
    assert learner.step(batch).metrics["update/grad_norm"] == 0
    assert all(p.equal(q) for p, q in zip(model.parameters(), before.parameters()))
    torch.testing.assert_close((critic.weight - head).abs().max().item(), 5e-3, rtol=1e-3, atol=0)
    assert learner.step(batch).metrics["update/grad_norm"] > 0
    largest = max((p - q).abs().max().item() for p, q in zip(model.parameters(), before.parameters()))
    assert largest == pytest.approx(1e-3, rel=1e-3)  # AdamW's first step


def test_a_critic_whose_gradient_is_not_finite_stops_both():
    model = copy.deepcopy(tiny("llama"))
    learner = Learner(model, STEADY, ActorCritic(PPO(), Loss()), critic=Critic(model))
    before = [m.detach().clone() for m in learner.optimizer.masters]
    for gradient in learner.optimizer.gradients():
        gradient += 1e-2
    learner.critic.bias.grad[0] = math.inf
    norm, _ = learner.optimizer.step(0)
    assert math.isnan(norm) and all(m.equal(b) for m, b in zip(learner.optimizer.masters, before))


def test_the_head_of_adapters_is_trained_beside_them():
    for rank, own in ((4, False), (0, True), (4, True)):
        model = copy.deepcopy(tiny("qwen2"))
        model = with_lora(model, rank, 8) if rank else model
        critic = Critic(model, copy.deepcopy(model) if own else None)
        trained = {name for name, p in critic.named_parameters() if p.requires_grad}
        assert {"weight", "bias"} <= trained and not any("lm_head" in name for name in trained)
        assert (len(trained) > 2) == own and all("lora" in name for name in trained - {"weight", "bias"}) == bool(
            rank or not own
        )


# ------------------------------------------------------------------------------------------------------------- runs


RUNS = {
    "trunk-shadow": {"learn": {"method": "shadow"}, "ppo": {"warmup_steps": 3}, "loss": {"beta": 0.01}},
    "separate-corrected": {
        "learn": {"method": "sparse-rl", "refill": 1, "correction": {"reject_below": 0.05}},
        "ppo": {"critic": "separate"},
    },
    "adapters": {"model": {"lora_rank": 4}, "ppo": {"critic": "separate"}, "learn": {"method": "none"}},
    "alone": {"rollout": {"group_size": 1, "prompts": 8}, "ppo": {"kl": "loss"}, "loss": {"beta": 0.01}},
}


def settings_of(name: str, **more) -> dict:
    chosen = {section: dict(keys) for section, keys in RUNS[name].items()}
    chosen["learn"] = {**chosen.get("learn", {}), "algorithm": "ppo"}
    chosen["rollout"] = {**chosen.get("rollout", {}), **more.pop("rollout", {})}
    chosen["run"] = {"steps": 3, "checkpoint_every": 1, "keep": 3, "diagnose": 0, "samples": 1}
    return {**chosen, "eval": {"every": 0}, **more}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_on_to_the_byte(name, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    given = recipe(**settings_of(name))
    train(given, whole, show=False)
    shutil.copytree(whole, parts)
    for later in ("step-000002", "step-000003"):
        shutil.rmtree(parts / "checkpoints" / later)
    train(given, parts, resume=True, show=False)
    assert (parts / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    ends = [find_checkpoints(folder / "checkpoints")[-1][1] for folder in (whole, parts)]
    one, two = (torch.load(end / "training.pt", weights_only=True)["learner"]["optimizer"] for end in ends)
    for kind in ("masters", "exp_avg", "exp_avg_sq", "step"):
        assert all(torch.equal(a, b) for a, b in zip(one[kind], two[kind], strict=True))
    lines = read_lines(whole / "metrics.jsonl")
    assert lines[0]["value/old/mean"] == 0 and lines[-1]["value/old/mean"] != 0
    assert all(line["update/value_loss"] > 0 and "value/return/mean" in line for line in lines)
    assert not any("groups_without_variance" in key for line in lines for key in line)
    view = TerminalTable("a run", 3)
    view.show(3, lines[-1])
    assert view.cells(lines[-1])["critic explains"].endswith("%")
    if name == "separate-corrected":
        assert sum(line["reject/replaced/count"] for line in lines) > 0
    if name == "trunk-shadow":  # two optimizer steps a line, three of them of the critic alone
        assert lines[0]["update/grad_norm"] == 0 < lines[1]["update/grad_norm"]
        assert run("export", whole, "--to", tmp_path / "plain").returncode == 0
        ends.append(tmp_path / "plain")
    if name != "adapters":  # an ordinary folder, in which nothing of the critic is
        assert all(weights(end).keys() == load_model("tiny-sums")[0].state_dict().keys() for end in ends)


def test_a_step_ahead_has_the_values_of_the_weights_that_sampled(tmp_path):
    """The sampler's critic is a copy, which gets the learner's weights when it gets the policy's."""
    given = recipe(**settings_of("separate-corrected", rollout={"ahead": 1}))
    trainer = train(given, tmp_path / "run", show=False)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [line["value/old/mean"] == 0 for line in lines] == [True, True, False]
    assert trainer.sampler.critic is not trainer.learner.critic


def test_a_short_run_learns(tmp_path):
    """To end early: the reward is larger the shorter a response is, and the critic learns to tell."""
    (tmp_path / "short.py").write_text(
        "def prompt(i):\n    return f'{i % 9}+1=', 0\n"
        "def reward(answer, text):\n    return max(0.0, 1 - len(text) / 20)\n"
    )
    given = recipe(
        task={"name": str(tmp_path / "short.py")},
        learn={"algorithm": "ppo", "method": "shadow", "minibatches": 2},
        ppo={"lam": 1.0, "critic_lr": 3e-3},
        rollout={"max_new_tokens": 24, "budget": 16, "prompts": 8, "temperature": 1.5},
        optimizer={"lr": 5e-4},
        eval={"every": 0},
        run={"steps": 6, "diagnose": 0, "samples": 0},
    )
    train(given, tmp_path / "run", show=False)
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    rewards = [line["reward/mean"] for line in lines]
    assert rewards[-1] > rewards[0] + 0.4
    assert max(line["value/explained/frac"] for line in lines[1:]) > 0.15


# ------------------------------------------------------------------------------------------------- plan and mistakes


def test_the_plan_counts_a_separate_critic():
    base = {"model": {"name": "tiny:4x256", "dtype": "bfloat16"}, "task": {"name": "sums"}}
    plans = {
        critic: plan_run(make_recipe({**base, "learn": {"algorithm": "ppo"}, "ppo": {"critic": critic}}), 256)
        for critic in ("trunk", "separate")
    }
    shared, own = plans["trunk"], plans["separate"]
    assert shared.critic_bytes == 0 and "critic" not in shared.text()
    assert own.critic_bytes == own.rollout.weight_bytes + own.optimizer_bytes and "critic: weights" in own.text()
    assert own.total_bytes > shared.total_bytes + own.critic_bytes and own.update_bytes > 1.5 * shared.update_bytes
    large = make_recipe({**base, "learn": {"algorithm": "ppo"}, "ppo": {"critic": "separate"}})
    assert "model.shard" not in Fitting(large, 256, 2**30).text()


def test_what_makes_no_sense_is_refused():
    base = {"model": {"name": "tiny-sums"}, "task": {"name": "sums"}}
    ppo = {"algorithm": "ppo"}
    cases = [
        ({"ppo": {"critic": "own"}}, "known: trunk, separate"),
        ({"ppo": {"kl": "both"}}, "known: reward, loss"),
        ({"ppo": {"gamma": 1.5}}, "ppo.gamma is 1.5; it must be from 0 to 1"),
        ({"ppo": {"lam": -0.1}}, "ppo.lam is -0.1"),
        ({"ppo": {"value_clip": 0}}, "or null for no bound"),
        ({"ppo": {"value_weight": 0}}, "ppo.value_weight is 0"),
        ({"ppo": {"critic_lr": 2}}, "above 0 and below 1"),
        ({"ppo": {"warmup_steps": -1}}, "ppo.warmup_steps is -1"),
        ({"learn": {**ppo, "advantage": "rloo"}}, "leave learn.advantage at grpo"),
        ({"learn": {**ppo, "rebaseline": True}}, "learn.rebaseline is true, but PPO"),
        (
            {"learn": ppo, "ppo": {"critic": "separate"}, "model": {"name": "tiny-sums", "shard": True}},
            "ppo.critic: trunk",
        ),
        ({"rollout": {"group_size": 1}}, "ppo, which compares with a critic"),
    ]
    for sections, said in cases:
        with pytest.raises(SparseRLError, match=said):
            make_recipe({**base, **sections})
    make_recipe({**base, "learn": ppo, "rollout": {"group_size": 1, "prompts": 8}})
