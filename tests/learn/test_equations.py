"""Every preset's loss and gradient against an independent fp64 reference, written with loops from the formulas."""

import math

import pytest
import torch

from sparse_rl.errors import SparseRLError
from sparse_rl.learn.advantage import advantage
from sparse_rl.learn.correct import PRESETS, Correction, correct, correction
from sparse_rl.learn.loss import Loss, policy_loss, token_scale

# One trajectory per line: response length (0: empty), gap that a token is planted with, reward.
PLANTED = [
    (6, None, 1.0),
    (5, -12.0, 0.0),
    (1, None, 1.0),
    (0, None, 0.0),
    (7, 3.0, 0.0),
    (7, -0.9, 1.0),
    (2, 25.0, 1.0),
    (4, 0.6, 0.0),
]
GROUP = [0, 0, 0, 0, 1, 1, 1, 1]


def planted_batch(seed: int):
    """Random log-probs with known outliers: fp64 tensors [8, 7] and the response mask."""
    g = torch.Generator().manual_seed(seed)
    n, width = len(PLANTED), 7
    mask = torch.tensor([[t < length for t in range(width)] for length, _, _ in PLANTED])
    sampler = -torch.rand(n, width, generator=g, dtype=torch.float64) * 3
    gap = 0.004 * torch.randn(n, width, generator=g, dtype=torch.float64)
    for i, (length, outlier, _) in enumerate(PLANTED):
        if outlier is not None:
            gap[i, length // 2] = outlier
    old = sampler + gap
    logprobs = old + 0.3 * torch.randn(n, width, generator=g, dtype=torch.float64)
    reference = logprobs + 0.5 * torch.randn(n, width, generator=g, dtype=torch.float64)
    reference[5, 1] = logprobs[5, 1].item() + 9.0  # a k3 far above any clip
    rewards = torch.tensor([reward for _, _, reward in PLANTED])
    return sampler, old, logprobs, reference, mask, rewards


def reference_advantages(rewards, members=None):
    result = []
    for i, r in enumerate(rewards):
        group = [rewards[j] for j in range(len(rewards)) if GROUP[j] == GROUP[i] and (members is None or members[j])]
        if len(group) < 2 or max(group) == min(group) or (members is not None and not members[i]):
            result.append(0.0)
            continue
        mean = sum(group) / len(group)
        std = math.sqrt(sum((x - mean) ** 2 for x in group) / (len(group) - 1))
        result.append((r - mean) / (std + 1e-6))
    return result


def reference_loss(preset, sampler, old, logprobs, ref, mask, rewards, loss: Loss):
    """(loss, gradient) by loops over trajectories and tokens. All fp64; the gradient of each token is written out by
    hand.
    """
    n, width = len(mask), len(mask[0])
    parts = {
        "naive": {},
        "none": {},
        "tis": dict(cap=2),
        "mis": dict(band=(0.5, 2), cap=math.inf),
        "icepop": dict(band=(0.5, 2), cap=math.inf),
        "geo": dict(geo=(0.99, 1.01)),
        "sparse-rl": dict(veto=1e-4, cap=2),
        "sparse-rl-released": dict(veto=1e-4, band=(0.5, 1.5), cap=1.5, normalise=True, clip_gap=20, clip_kl=10),
    }[preset]
    if preset == "naive":
        old = sampler
    adv = reference_advantages(rewards)
    xi = [[0.0] * width for _ in range(n)]
    M = [[False] * width for _ in range(n)]
    w = [[1.0] * width for _ in range(n)]
    accepted = []
    for i in range(n):
        tokens = [t for t in range(width) if mask[i][t]]
        gaps = {t: old[i][t] - sampler[i][t] for t in tokens}
        if "clip_gap" in parts:
            gaps = {t: max(-20.0, min(20.0, x)) for t, x in gaps.items()}
        for t in tokens:
            xi[i][t] = math.exp(gaps[t])
        accept = True
        if "veto" in parts and tokens:
            accept = min(xi[i][t] for t in tokens) >= parts["veto"]
        if "geo" in parts and tokens:
            accept = parts["geo"][0] <= math.exp(sum(gaps.values()) / len(tokens)) <= parts["geo"][1]
        accepted.append(accept)
        for t in tokens:
            M[i][t] = accept and ("band" not in parts or parts["band"][0] <= xi[i][t] <= parts["band"][1])
            if "cap" in parts:
                w[i][t] = min(xi[i][t], parts["cap"])
    if parts.get("normalise"):
        everything = [w[i][t] for i in range(n) for t in range(width) if mask[i][t]]
        mean = sum(everything) / len(everything)
        w = [[x / mean for x in row] for row in w]
    total_tokens = sum(map(sum, M))
    trajectories = max(1, sum(accepted)) if loss.renormalise else n
    value, gradient = 0.0, torch.zeros(n, width, dtype=torch.float64)
    for i in range(n):
        tokens = [t for t in range(width) if M[i][t]]
        for t in tokens:
            if loss.mean == "token-mean":
                scale = 1 / max(total_tokens, 1)
            elif loss.mean == "dr-grpo":
                scale = 1 / (trajectories * loss.constant)
            else:
                scale = 1 / (trajectories * max(len(tokens), 1))
            if loss.level == "token":
                r, spread = math.exp(logprobs[i][t] - old[i][t]), {t: 1.0}
            else:
                r = math.exp(sum(logprobs[i][u] - old[i][u] for u in tokens) / len(tokens))
                spread = {u: 1 / len(tokens) for u in tokens}
            bounded = min(max(r, 1 - loss.clip_low), 1 + loss.clip_high)
            surrogate = -min(r * adv[i], bounded * adv[i])
            if loss.clip == "weight":  # the bounded ratio is a constant: d(-c A logprob)/d(logprob) = -c A
                value += scale * w[i][t] * -bounded * adv[i] * logprobs[i][t]
                gradient[i, t] += scale * w[i][t] * -bounded * adv[i]
            else:
                value += scale * w[i][t] * surrogate
            if loss.clip == "ratio" and r * adv[i] <= bounded * adv[i]:  # not clipped away: d(-r A)/d(logprob) = -r A
                for u, share in spread.items():
                    gradient[i, u] += scale * w[i][t] * -r * adv[i] * share
            if loss.beta:
                d = ref[i][t] - logprobs[i][t]
                penalty = math.exp(d) - 1 - d
                slope = 1 - math.exp(d)
                if "clip_kl" in parts and abs(penalty) > 10:
                    penalty, slope = 10.0, 0.0
                value += scale * loss.beta * penalty
                gradient[i, t] += scale * loss.beta * slope
    return value, gradient


LOSSES = [
    Loss(),
    Loss(beta=0.05, clip_high=0.28),
    Loss(mean="token-mean", beta=0.05),
    Loss(mean="dr-grpo", constant=16, beta=0.05),
    Loss(renormalise=True),
    Loss(mean="dr-grpo", constant=16, renormalise=True),
    Loss(level="sequence", clip_low=3e-2, clip_high=4e-2),
    Loss(clip="weight", mean="token-mean", clip_low=1.0, clip_high=0.28),
    Loss(clip="weight", beta=0.05),
    Loss(clip="weight", level="sequence", clip_low=3e-2, clip_high=4e-2, mean="dr-grpo", constant=16),
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, vars(loss).values())))
@pytest.mark.parametrize("preset", PRESETS)
def test_loss_and_gradient_equal_the_loops(preset, loss, seed):
    sampler, old, logprobs, reference, mask, rewards = planted_batch(seed)
    expected, gradient = reference_loss(
        preset, *(x.tolist() for x in (sampler, old, logprobs, reference, mask, rewards)), loss
    )
    chosen = PRESETS[preset]
    used_old = sampler if chosen.old == "sampler" else old
    advantages, _ = advantage(rewards, torch.tensor(GROUP))
    corrected = correct(used_old - sampler, mask, chosen)
    scale = token_scale(corrected.mask, corrected.accepted, loss).double()
    leaf = logprobs.clone().requires_grad_()
    value, *_ = policy_loss(
        leaf, used_old, advantages, corrected.mask, corrected.weights.double(), scale, loss, reference, chosen.clip_kl
    )
    value.backward()
    assert value.item() == pytest.approx(expected, rel=1e-5, abs=1e-9)
    torch.testing.assert_close(leaf.grad, gradient, rtol=1e-5, atol=1e-9)


def test_no_token_loses_its_gradient_where_the_weight_is_clipped():
    _, old, logprobs, _, mask, rewards = planted_batch(0)
    advantages, _ = advantage(rewards, torch.tensor(GROUP))

    def moved(loss: Loss) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = logprobs.clone().requires_grad_()
        scale = token_scale(mask, mask.any(1), loss)
        value, sums, clipped = policy_loss(leaf, old, advantages, mask, torch.ones_like(scale), scale, loss)
        value.backward()
        assert sums["clipped"] == clipped.sum() > 0 and not (clipped & ~mask).any()
        return leaf.grad != 0, clipped

    for loss, dropped in ((Loss(clip_low=0.1, clip_high=0.1), True), (Loss("weight", 0.1, 0.1), False)):
        gradient, clipped = moved(loss)
        assert torch.equal(gradient, mask & ~clipped if dropped else mask)
    outside = ((logprobs - old).exp() - 1).abs() > 0.1
    assert torch.equal(clipped, outside & mask)  # on both sides, whatever the sign of the advantage


def test_micro_batches_add_up():
    sampler, old, logprobs, reference, mask, rewards = planted_batch(0)
    loss = Loss(beta=0.05)
    corrected = correct(old - sampler, mask, PRESETS["sparse-rl"])
    scale, (adv, _) = token_scale(corrected.mask, corrected.accepted, loss), advantage(rewards, torch.tensor(GROUP))

    def part(rows):
        return policy_loss(
            logprobs[rows],
            old[rows],
            adv[rows],
            corrected.mask[rows],
            corrected.weights[rows],
            scale[rows],
            loss,
            reference[rows],
        )[0]

    whole = part(slice(None))
    torch.testing.assert_close(part(slice(0, 3)) + part(slice(3, 4)) + part(slice(4, 8)), whole)


def test_presets_reject_what_they_should():
    sampler, old, _, _, mask, _ = planted_batch(0)
    accepted = {name: correct(old - sampler, mask, preset).accepted.tolist() for name, preset in PRESETS.items()}
    assert accepted["none"] == [True] * 8
    assert accepted["sparse-rl"] == [True, False, True, True, True, True, True, True]  # the planted gap of -12
    assert accepted["geo"] == [True, False, True, True, False, False, False, False]


def test_estimators():
    rewards, group = torch.tensor([1.0, 0.0, 0.0, 3.0, 3.0, 5.0]), torch.tensor([4, 4, 4, 9, 9, 2])
    dr, metrics = advantage(rewards, group, "dr-grpo")
    torch.testing.assert_close(dr, torch.tensor([2 / 3, -1 / 3, -1 / 3, 0, 0, 0], dtype=torch.float64))
    assert metrics["advantage/groups_without_variance/frac"] == pytest.approx(2 / 3)
    rloo, _ = advantage(rewards, group, "rloo")
    torch.testing.assert_close(rloo, torch.tensor([1, -0.5, -0.5, 0, 0, 0], dtype=torch.float64))
    grpo, _ = advantage(rewards, group, "grpo")
    std = rewards[:3].std().item()
    torch.testing.assert_close(grpo[:3], torch.tensor([2 / 3, -1 / 3, -1 / 3], dtype=torch.float64) / (std + 1e-6))


@pytest.mark.parametrize("seed", range(5))
def test_rebaseline_leaves_rejected_members_out(seed):
    g = torch.Generator().manual_seed(seed)
    rewards, members = torch.rand(8, generator=g), torch.rand(8, generator=g) > 0.4
    got, _ = advantage(rewards, torch.tensor(GROUP), members=members)
    expected = reference_advantages(rewards.double().tolist(), members.tolist())
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_parts_combine_and_are_checked():
    combined = correction("sparse-rl", cap=5.0, mask_outside=(0.1, 10.0))
    assert combined == Correction(reject_below=1e-4, cap=5.0, mask_outside=(0.1, 10.0))
    with pytest.raises(SparseRLError, match="'sparse_rl'; did you mean 'sparse-rl'"):
        correction("sparse_rl")
    with pytest.raises(SparseRLError, match=r"no part 'capp'; did you mean 'cap'"):
        correction("tis", capp=3)
    with pytest.raises(SparseRLError, match=r"mask_outside is \(2, 1\)"):
        correction("mis", mask_outside=(2, 1))
    with pytest.raises(SparseRLError, match="did you mean 'token-mean'"):
        Loss(mean="tokenmean")
    with pytest.raises(SparseRLError, match=r"loss.clip is 'wieght'; did you mean 'weight'"):
        Loss(clip="wieght")
    with pytest.raises(SparseRLError, match="did you mean 'rloo'"):
        advantage(torch.ones(2), torch.zeros(2), "rlo")


def test_everything_rejected_is_a_loss_of_zero():
    sampler, old, logprobs, _, mask, rewards = planted_batch(0)
    corrected = correct(old - sampler - 20, mask, PRESETS["sparse-rl"])
    assert corrected.accepted.tolist() == [i == 3 for i in range(8)]  # the empty response has nothing to reject
    leaf = logprobs.clone().requires_grad_()
    loss = Loss(renormalise=True)
    adv, _ = advantage(rewards, torch.tensor(GROUP))
    value, *_ = policy_loss(
        leaf, old, adv, corrected.mask, corrected.weights, token_scale(corrected.mask, corrected.accepted, loss), loss
    )
    value.backward()
    assert value.item() == 0 and leaf.grad.abs().max() == 0
