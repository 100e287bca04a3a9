"""The plug-ins for verl, slime and prime-rl against our own correct() and policy_loss(), and against the formulas in fp64.

verl is the real one where it is installed, else a stand-in; slime and prime-rl, which need GPUs to install, are stand-ins (peers.py).
"""

import importlib
import importlib.metadata
import importlib.util
import math
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.errors import SparseRLError
from sparse_rl.learn.correct import PRESETS, correct, correction
from sparse_rl.learn.loss import Loss, policy_loss, token_scale
from tests.helpers import peers

ROOT = Path(__file__).parent.parent.parent
REAL_VERL = importlib.util.find_spec("verl") is not None
CLIP = dict(clip_low=0.2, clip_high=0.28)
# a released preset without what no host can give; and combinations that no preset has
VARIANTS = [(name, {}) for name in PRESETS if name != "sparse-rl-released"] + [
    ("sparse-rl-released", {"normalise_weights": False}),
    ("none", {"reject_below": 0.3, "mask_outside": [0.7, 1.9], "cap": 1.2}),
    ("tis", {"cap": 5.0, "clip_gap": 1.0}),
    ("geo", {"reject_outside": [0.5, 1.6], "cap": math.inf}),
]
FORMULA = {  # (lowest xi, band of the mean, band of a token, cap, bound of the gap), written out again
    "naive": (0, None, None, None, None),
    "none": (0, None, None, None, None),
    "tis": (0, None, None, 2, None),
    "mis": (0, None, (0.5, 2), math.inf, None),
    "icepop": (0, None, (0.5, 2), math.inf, None),
    "geo": (0, (0.99, 1.01), None, None, None),
    "sparse-rl": (1e-4, None, None, 2, None),
    "sparse-rl-released": (1e-4, None, (0.5, 1.5), 1.5, 20),
}
seeds = st.integers(0, 2**31)
variants = st.sampled_from(VARIANTS)
many = settings(max_examples=60, deadline=None)


def batch(seed: int):
    """Random trajectories, [N, T]: holes in the mask, an empty one at times, gaps from rounding to catastrophes."""
    g = torch.Generator().manual_seed(seed)
    n, width = (int(torch.randint(1, high, (), generator=g)) for high in (7, 11))
    lengths = torch.randint(0, width + 1, (n,), generator=g)
    lengths[0] = width
    mask = (torch.arange(width) < lengths[:, None]) & (torch.rand(n, width, generator=g) < 0.9)
    mask[0, 0] = True
    sampler = -torch.rand(n, width, generator=g) * 3 - 0.01
    scale = torch.tensor([0.003, 0.3, 1.5])[torch.randint(0, 3, (n, 1), generator=g)]
    gap = scale * torch.randn(n, width, generator=g)
    planted = torch.tensor([-12.0, -0.9, 0.8, 3.0, 15.0])[torch.randint(0, 5, (n, width), generator=g)]
    gap = torch.where(torch.rand(n, width, generator=g) < 0.04, planted, gap)
    old = sampler + gap
    logprobs = old + 0.3 * torch.randn(n, width, generator=g)
    return sampler, old, logprobs, torch.randn(n, generator=g), mask, lengths


def ours(variant, data, scale=None, mean="sequence-mean", stale=False):
    """(loss, gradient, correction) of our own functions. `scale` of the mask before and after the correction, where a host has another."""
    sampler, old, logprobs, advantages, mask, _ = data
    how = correction(variant[0], **variant[1])
    lp = logprobs.clone().requires_grad_()
    old = sampler if how.old == "sampler" else (logprobs if stale else old)
    done = correct(old - sampler, mask, how)
    loss = Loss(mean=mean, **CLIP)
    by = token_scale(done.mask, done.accepted, loss) if scale is None else scale(mask, done.mask)
    value, _, _ = policy_loss(lp, old, advantages, done.mask, done.weights, by, loss)
    value.backward()
    return value.detach(), lp.grad, done


def by_hand(name, data, denominator, stale=False):
    """(loss, gradient) in fp64, token by token. denominator(i, masks before, masks after): what a token of trajectory i is divided by."""
    sampler, old, logprobs, advantages, mask, _ = (x.double() if x.is_floating_point() else x for x in data)
    lowest, mean_band, band, cap, bound = FORMULA[name]
    old = sampler if name == "naive" else (logprobs if stale else old)
    n, width = mask.shape
    before = [[t for t in range(width) if mask[i, t]] for i in range(n)]
    gap = [{t: (old[i, t] - sampler[i, t]).item() for t in row} for i, row in enumerate(before)]
    gap = [{t: x if bound is None else min(max(x, -bound), bound) for t, x in row.items()} for row in gap]
    after = []
    for row in gap:
        middle = math.exp(sum(row.values()) / max(len(row), 1))
        rejected = any(math.exp(x) < lowest for x in row.values()) or (
            mean_band and not mean_band[0] <= middle <= mean_band[1]
        )
        after.append([] if rejected else [t for t, x in row.items() if not band or band[0] <= math.exp(x) <= band[1]])
    loss, grad = 0.0, torch.zeros(n, width, dtype=torch.float64)
    for i, row in enumerate(after):
        for t in row:
            weight = 1.0 if cap is None else min(math.exp(gap[i][t]), cap)
            weight /= denominator(i, before, after)
            a, r = advantages[i].item(), math.exp(logprobs[i, t] - old[i, t])
            clipped = min(max(r, 1 - CLIP["clip_low"]), 1 + CLIP["clip_high"])
            loss -= weight * min(r * a, clipped * a)
            grad[i, t] = -weight * a * r if r * a <= clipped * a else 0.0
    return loss, grad


def same(got, expected, exact=True):
    """Loss and gradient agree."""
    tolerance = dict(rtol=1e-5, atol=1e-6) if exact else dict(rtol=2e-4, atol=1e-5)
    for a, b in zip(got[:2], expected[:2]):
        torch.testing.assert_close(torch.as_tensor(a).double(), torch.as_tensor(b).double(), **tolerance)


# verl


@pytest.fixture(scope="module")
def verl():
    """Our module of the plug-in, over the real verl or the stand-in."""
    with pytest.MonkeyPatch.context() as patch:
        if not REAL_VERL:
            peers.stand_in_for_verl(patch)
        yield importlib.import_module("sparse_rl.integrations.verl")
        if not REAL_VERL:
            sys.modules.pop("sparse_rl.integrations.verl")


def verl_weights(old, sampler, mask, threshold=1e9, level="token"):
    """What verl's trainer makes of the log-probs, before any of them reach the actor."""
    if not REAL_VERL:
        return peers.verl_token_weights(old, sampler, mask, threshold)
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

    proto, kept, _ = compute_rollout_correction_and_rejection_mask(old, sampler, mask.float(), level, threshold)
    assert torch.equal(kept.bool(), mask)
    return proto.batch["rollout_is_weights"]


def verl_config(verl, variant=("sparse-rl", {}), **info):
    section = verl.PolicyLoss(loss_mode="sparse-rl", preset=variant[0], correction=variant[1])
    if not REAL_VERL:
        return Namespace(
            policy_loss=section, clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.28, global_batch_info=info
        )
    from verl.workers.config import FSDPActorConfig

    return FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=section,
        clip_ratio_high=0.28,
        global_batch_info=info,
    )


def verl_loss(verl, variant, data, mode, weights=None, rows=slice(None), **info):
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    sampler, old, logprobs, advantages, mask, _ = data
    lp = logprobs.clone().requires_grad_()
    loss, metrics = get_policy_loss_fn("sparse-rl")(
        old_log_prob=old[rows],
        log_prob=lp[rows],
        advantages=(advantages[:, None] * mask)[rows],
        response_mask=mask[rows],
        loss_agg_mode=mode,
        config=verl_config(verl, variant, **info),
        rollout_is_weights=(verl_weights(old, sampler, mask) if weights is None else weights)[rows],
    )
    loss.backward()
    return loss.detach(), lp.grad, metrics


@many
@given(seeds, variants)
def test_verl_gives_our_loss_and_gradient(verl, seed, variant):
    data = batch(seed)
    n = len(data[0])
    got = verl_loss(verl, variant, data, "seq-mean-token-mean", global_batch_size=n)
    *expected, done = ours(variant, data)
    same(got, expected)
    assert got[2]["sparse_rl/rejected"] == pytest.approx(1 - done.accepted.float().mean().item())
    if not variant[1] or variant[0] == "sparse-rl-released":
        same(got, by_hand(variant[0], data, lambda i, before, after: n * len(after[i])), exact=False)
    # a constant: Dr.GRPO's mean; and verl's token mean, which counts tokens before anything is dropped
    got = verl_loss(verl, variant, data, "seq-mean-token-sum-norm", global_batch_size=n, loss_scale_factor=50)
    same(got, ours(variant, data, lambda before, after: after / (n * 50.0)))
    tokens = int(data[4].sum())
    got = verl_loss(verl, variant, data, "token-mean", batch_num_tokens=tokens, global_batch_size=n)
    same(got, ours(variant, data, lambda before, after: after / tokens))


@many
@given(seeds, variants)
def test_verl_micro_batches_add_up(verl, seed, variant):
    data = batch(seed)
    n = len(data[0])
    halves = [
        verl_loss(verl, variant, data, "seq-mean-token-mean", rows=slice(i, None, 2), global_batch_size=n)
        for i in range(min(n, 2))
    ]
    same((sum(h[0] for h in halves), sum(h[1] for h in halves)), ours(variant, data))


def test_verl_takes_the_advantage_of_every_token(verl):
    """As from GAE: one token's own advantage changes its own gradient and no other's."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    sampler, old, _, _, mask, _ = batch(11)
    grads = []
    for bump in (0.0, 1.0):
        advantages = torch.ones_like(old)
        advantages[0, 0] += bump
        lp = old.clone().requires_grad_()
        weights = verl_weights(old, sampler, mask)
        config = verl_config(verl, ("tis", {}))
        loss, _ = get_policy_loss_fn("sparse-rl")(old, lp, advantages, mask, "seq-mean-token-sum", config, weights)
        loss.backward()
        grads.append(lp.grad)
    changed = (grads[0] != grads[1]).nonzero().tolist()
    assert changed == [[0, 0]]
    assert grads[1][0, 0] == pytest.approx(2 * grads[0][0, 0].item())


def test_verl_bounds_the_gap_at_20(verl):
    """Beyond it verl's weight says e^20: no difference to a preset, for none reaches that far, and none to a cap of your own below it."""
    data = list(batch(3))
    data[1] = data[1].clone()
    data[1][0, 0] = data[0][0, 0] + 30
    for variant in VARIANTS:
        if variant[0] not in ("naive", "geo"):
            same(
                verl_loss(verl, variant, data, "seq-mean-token-mean", global_batch_size=len(data[0])),
                ours(variant, data),
            )


def test_verl_normalises_weights_where_it_sees_the_whole_step(verl):
    data = batch(5)
    n, variant = len(data[0]), ("sparse-rl-released", {})
    assert n > 1
    same(verl_loss(verl, variant, data, "seq-mean-token-mean", global_batch_size=n, dp_size=1), ours(variant, data))
    for rows, info in (
        (slice(0, 1), dict(global_batch_size=n)),
        (slice(None), dict(global_batch_size=2 * n)),
        (slice(None), dict(global_batch_size=n, dp_size=2)),
        (slice(None), dict(global_batch_size=n)),
        (slice(None), {}),
    ):
        with pytest.raises(
            SparseRLError, match=r"normalise_weights .* verl hands over a micro-batch of \d+ trajectories"
        ):
            verl_loss(verl, variant, data, "seq-mean-token-mean", rows=rows, **info)


def test_verl_weights_that_are_not_xi_are_refused(verl):
    data = batch(7)
    sampler, old, _, _, mask, _ = data
    old[0, :3] = sampler[0, :3] + torch.tensor([3.0, 4.0, 0.1])
    mask[0, :3] = True

    def run(variant, weights):
        return verl_loss(verl, variant, data, "seq-mean-token-mean", weights, global_batch_size=len(old))

    cut = verl_weights(old, sampler, mask, threshold=2.0)
    for variant in (("tis", {}), ("sparse-rl", {}), ("none", {}), ("sparse-rl-released", {"normalise_weights": False})):
        same(run(variant, cut), ours(variant, data))  # verl's default threshold is beyond all that these presets use
    with pytest.raises(SparseRLError, match=r"importance weights are 0; set .*threshold to one number"):
        run(("tis", {}), torch.where(cut == 2.0, 0.0, cut))
    gap = torch.where(mask, old - sampler, 0.0).sum(1, keepdim=True).clamp(-20, 20)
    with pytest.raises(SparseRLError, match=r"one importance weight for all its tokens; set .*rollout_is=token"):
        run(("tis", {}), gap.exp() * mask)
    run(("mis", {}), mask.float())  # a sampler without any gap is not a mistake
    with pytest.raises(
        SparseRLError, match=r"no importance weights; set .*rollout_is=token .*calculate_log_probs=True"
    ):
        verl.policy_loss(old, old, old, mask, config=verl_config(verl))


def test_verl_settings_are_refused(verl):
    for fields, message in (
        (dict(preset="sparse-lr"), "no method 'sparse-lr'; did you mean 'sparse-rl'"),
        (dict(correction={"kap": 2}), "no part 'kap'"),
        (dict(correction={"cap": -1}), "cap is -1"),
        (dict(correction={"cap": "two"}), "cap is 'two'"),
        (dict(correction={"mask_outside": [2, 1]}), r"mask_outside is \(2.0, 1.0\)"),
        (dict(correction={"clip_kl": 5}), "the KL term is verl's own"),
        (dict(correction=[3]), "must be parts and their values"),
        (dict(preset="shadow"), "replays a sampler's evictions, which verl does not record"),
        (dict(loss_mode="vanilla"), "loss_mode is vanilla, which has no preset"),
    ):
        with pytest.raises(SparseRLError, match=message):
            verl.PolicyLoss(**{"loss_mode": "sparse-rl", **fields})


def entry_points() -> str:
    tomllib = pytest.importorskip("tomllib")
    plugins = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]
    return "[verl.plugins]\n" + "".join(f"{name} = {value}\n" for name, value in plugins.items())


def test_the_entry_point_names_the_plugin(verl, tmp_path):
    folder = tmp_path / "planted-1.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_text(entry_points())
    (found,) = importlib.metadata.PathDistribution(folder).entry_points
    assert found.group == "verl.plugins" and found.load() is verl


@pytest.mark.skipif(not REAL_VERL, reason="verl is not installed")
def test_verl_itself_finds_the_plugin(tmp_path):
    """A fresh process with nothing but `import verl`, and a configuration as its command line makes it."""
    folder = tmp_path / "planted-1.dist-info"
    folder.mkdir()
    (folder / "entry_points.txt").write_text(entry_points())
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    command = next(
        part for part in (ROOT / "docs/verl.md").read_text().split("```") if "python3 -m verl.trainer.main_ppo" in part
    )
    overrides = [word for word in command.replace("\\\n", " ").split() if "=" in word]
    code = f"""
import verl
from hydra import compose, initialize_config_module
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides={overrides!r})
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
print(get_policy_loss_fn(actor.policy_loss.loss_mode).__module__, actor.policy_loss.preset, dict(actor.policy_loss.correction))
print(config.algorithm.rollout_correction.rollout_is, config.algorithm.rollout_correction.rollout_is_threshold)
"""
    path = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-2:] == [
        "sparse_rl.integrations.verl sparse-rl {'reject_below': 0.001}",
        "token 1000000000.0",
    ]


@pytest.mark.skipif(not REAL_VERL, reason="verl is not installed")
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "sparse-rl-released"])
def test_verl_trains_through_it(verl, name):
    """Through verl's own ppo_loss, as its workers call it, from packed log-probs."""
    from tensordict import TensorDict
    from verl.workers.utils.losses import ppo_loss

    sampler, old, logprobs, advantages, mask, lengths = data = batch(21)
    lengths = lengths.clamp(min=1)
    n, prompt = len(old), 2
    kept = {
        "response_mask": mask,
        "old_log_probs": old,
        "advantages": advantages[:, None] * mask,
        "rollout_is_weights": verl_weights(old, sampler, mask),
    }
    nested = {
        k: torch.nested.as_nested_tensor([v[i, :size] for i, size in enumerate(lengths)], layout=torch.jagged)
        for k, v in kept.items()
    }
    ids = [torch.zeros(prompt + int(size), dtype=torch.long) for size in lengths]
    nested["input_ids"] = torch.nested.as_nested_tensor(ids, layout=torch.jagged)
    nested["prompts"] = torch.nested.as_nested_tensor([torch.zeros(prompt, dtype=torch.long)] * n, layout=torch.jagged)
    nested["responses"] = torch.nested.as_nested_tensor(
        [torch.zeros(int(s), dtype=torch.long) for s in lengths], layout=torch.jagged
    )
    td = TensorDict(nested, batch_size=n)
    for key, value in dict(dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=n).items():
        td.set_non_tensor(key, value)
    lp = logprobs.clone().requires_grad_()
    rows = [
        torch.cat([torch.zeros(prompt - 1), lp[i, :size], torch.zeros(1)]) for i, size in enumerate(lengths)
    ]  # a token's is at the one before
    config = verl_config(verl, (name, {}))
    object.__setattr__(config, "loss_agg_mode", "seq-mean-token-mean")
    loss, _ = ppo_loss(config, {"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, td)
    loss.backward()
    same((loss.detach(), lp.grad), ours((name, {}), data))


# slime


def slime_loss(monkeypatch, variant, data, denominators, per_token=False, own=None):
    """(loss, gradient, metrics) as slime's policy_loss_function has them with our function, from one rank."""
    from sparse_rl.integrations import slime

    sampler, old, logprobs, advantages, mask, lengths = data
    sizes = [int(size) for size in lengths]
    whole = [(old - sampler)[i, :size] for i, size in enumerate(sizes)]
    peers.stand_in_for_slime(monkeypatch, own, whole)
    index = own or [torch.arange(size) for size in sizes]
    lp = logprobs.clone().requires_grad_()
    local = {
        k: [v[i, : sizes[i]][at] for i, at in enumerate(index)]
        for k, v in dict(s=sampler, o=old, lp=lp, a=advantages[:, None] * mask).items()
    }
    pg_loss = peers.slime_token_loss(
        torch.cat(local["lp"]), torch.cat(local["o"]), torch.cat(local["a"]), *CLIP.values()
    )
    masks = [mask[i, :size].int() for i, size in enumerate(sizes)]
    args = Namespace(
        use_tis=True, use_rollout_logprobs=False, sparse_rl_preset=variant[0], sparse_rl_correction=variant[1]
    )
    pg_loss, kept, metrics = slime.corrected(
        args=args,
        pg_loss=pg_loss,
        train_log_probs=local["o"],
        rollout_log_probs=local["s"],
        loss_masks=masks,
        total_lengths=[size + 3 for size in sizes],
        response_lengths=sizes,
    )
    assert all(value.shape == pg_loss.shape and not value.requires_grad for value in metrics.values())
    assert [k.shape for k in kept] == [m.shape for m in masks] and all(k.dtype == m.dtype for k, m in zip(kept, masks))
    before = [m.sum() for m in masks]
    loss = peers.slime_mean(pg_loss, kept, index, before if denominators == "before" else None, per_token) / len(old)
    loss.backward()
    return loss.detach(), lp.grad, metrics


SLIME = [variant for variant in VARIANTS if variant[0] != "naive"]


@many
@given(seeds, st.sampled_from(SLIME))
def test_slime_gives_our_loss_and_gradient(seed, variant):
    data = batch(seed)
    n = len(data[0])
    with pytest.MonkeyPatch.context() as patch:
        got = slime_loss(patch, variant, data, "after")  # a slime that divides by the tokens that are left
        same(got, ours(variant, data))
        if not variant[1] or variant[0] == "sparse-rl-released":
            same(got, by_hand(variant[0], data, lambda i, before, after: n * len(after[i])), exact=False)
        got = slime_loss(patch, variant, data, "before")  # one that divides by the tokens of the response
        same(got, ours(variant, data, lambda before, after: after / (n * before.sum(1, keepdim=True).clamp(min=1))))
        got = slime_loss(patch, variant, data, "before", per_token=True)
        same(got, ours(variant, data, lambda before, after: after / n))


@many
@given(seeds, st.sampled_from(SLIME))
def test_slime_ranks_that_share_responses_add_up(seed, variant):
    data = batch(seed)
    g = torch.Generator().manual_seed(seed)
    first = [torch.rand(int(size), generator=g) < 0.5 for size in data[5]]
    with pytest.MonkeyPatch.context() as patch:
        shares = [[side.nonzero().flatten() for side in sides] for sides in (first, [~side for side in first])]
        parts = [slime_loss(patch, variant, data, "after", own=own) for own in shares]
        same((sum(p[0] for p in parts), sum(p[1] for p in parts)), ours(variant, data))
        alone = slime_loss(patch, variant, data, "after")[2]
    for name, value in alone.items():
        assert value.sum().item() == pytest.approx(sum(p[2][name].sum().item() for p in parts), rel=1e-4)


def test_slime_weights_without_bound_leave_the_gradient_finite(monkeypatch):
    data = list(batch(9))
    data[1] = data[1].clone()
    data[1][0, 0] = data[0][0, 0] + 200.0  # xi overflows, and mis drops the token
    got = slime_loss(monkeypatch, ("mis", {}), data, "after")
    assert got[1].isfinite().all() and got[1][0, 0] == 0
    same(got, ours(("mis", {}), data))


def test_slime_settings_are_refused(monkeypatch):
    data = batch(1)
    for variant, message in (
        (("naive", {}), "set slime's --use-rollout-logprobs and omit --use-tis"),
        (("sparse-rl-released", {}), r"slime hands over a micro-batch of \d+ sequences at a time"),
        (("tis", {"cap": 0}), "cap is 0"),
        (("smd", {}), "which slime does not record"),
        ((7, {}), "the preset for slime is 7"),
        (("tis", "cap=3"), "the correction for slime is 'cap=3'"),
    ):
        with pytest.raises(SparseRLError, match=message):
            slime_loss(monkeypatch, variant, data, "after")


def test_slime_defaults_and_metrics_alone(monkeypatch):
    """Without settings it is sparse-rl; --get-mismatch-metrics without --use-tis changes no loss."""
    from sparse_rl.integrations import slime

    peers.stand_in_for_slime(monkeypatch)
    old = [torch.tensor([-1.0, -14.0]), torch.tensor([-0.5])]
    sampler = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0])]
    given = dict(train_log_probs=old, rollout_log_probs=sampler, loss_masks=[torch.ones(2), torch.ones(1)])
    given |= dict(pg_loss=torch.ones(3), total_lengths=[4, 3], response_lengths=[2, 1])
    loss, masks, metrics = slime.corrected(Namespace(use_tis=True, use_rollout_logprobs=False), **given)
    torch.testing.assert_close(loss, torch.tensor([0.0, 0.0, math.exp(0.5)]))
    assert [m.tolist() for m in masks] == [[0.0, 0.0], [1.0]] and metrics["sparse_rl_rejected"].tolist() == [
        1.0,
        1.0,
        0.0,
    ]
    loss, masks, again = slime.corrected(Namespace(use_tis=False, use_rollout_logprobs=False), **given)
    assert loss is given["pg_loss"] and masks is given["loss_masks"] and again.keys() == metrics.keys()


# prime-rl


def prime_loss(monkeypatch, variant, data, weights=None, scale=None):
    from sparse_rl.integrations import prime_rl

    peers.stand_in_for_prime_rl(monkeypatch)
    sampler, _, logprobs, advantages, mask, _ = data
    lp = logprobs.clone().requires_grad_()
    kwargs = {"preset": variant[0], **CLIP, **variant[1]}
    args = (
        kwargs,
        lp,
        sampler,
        advantages[:, None].expand_as(lp),
        mask,
        weights,
        int(mask.sum()) if scale is None else scale,
    )
    loss, metrics = peers.prime_rl_loss(prime_rl.loss, *args)
    loss.backward()
    return loss.detach(), lp.grad, metrics


@many
@given(seeds, variants)
def test_prime_rl_gives_our_loss_and_gradient(seed, variant):
    data = batch(seed)
    tokens = int(data[4].sum())
    with pytest.MonkeyPatch.context() as patch:
        got = prime_loss(patch, variant, data)
        *expected, done = ours(variant, data, lambda before, after: after / tokens, stale=True)
        same(got, expected)
        assert [m["sparse_rl/rejected"].item() for m in got[2]] == [float(not ok) for ok in done.accepted]
        if torch.equal(done.mask, data[4]):  # nothing dropped: our token mean
            same(got, ours(variant, data, mean="token-mean", stale=True))
        if not variant[1] or variant[0] == "sparse-rl-released":
            same(got, by_hand(variant[0], data, lambda i, before, after: tokens, stale=True), exact=False)


def test_prime_rl_weights_of_the_component(monkeypatch):
    data = batch(13)
    weights = torch.rand(data[0].shape, generator=torch.Generator().manual_seed(0)) + 0.5
    got = prime_loss(monkeypatch, ("sparse-rl", {}), data, weights, scale=7)
    same(got, ours(("sparse-rl", {}), data, lambda before, after: after * weights / 7, stale=True))


def test_prime_rl_settings_are_refused(monkeypatch):
    data = batch(1)
    for variant, message in (
        (("sparse-rl-released", {}), "prime-rl hands over one sequence at a time; set normalise_weights to false"),
        (("geo", {"reject_outside": 0.1}), "reject_outside is 0.1"),
        (("tis", {"clip_hihg": 0.3}), "no part 'clip_hihg'"),
        (("shadow", {}), "which prime-rl does not record"),
    ):
        with pytest.raises(SparseRLError, match=message):
            prime_loss(monkeypatch, variant, data)


# all of them


def block(page: str, language: str) -> str:
    return (ROOT / "docs" / page).read_text().split(f"```{language}\n")[1].split("```")[0]


def test_the_settings_in_the_documents_are_accepted(monkeypatch):
    import yaml

    data = batch(2)
    stated = yaml.safe_load(block("slime.md", "yaml"))
    variant = (stated.pop("sparse_rl_preset"), stated.pop("sparse_rl_correction"))
    assert variant == ("sparse-rl", {"reject_below": 1e-3, "cap": 3.0}) and not stated
    same(slime_loss(monkeypatch, variant, data, "after"), ours(variant, data))
    loss = pytest.importorskip("tomllib").loads(block("prime-rl.md", "toml"))["trainer"]["loss"]
    module, _, name = loss["import_path"].rpartition(".")
    assert callable(getattr(importlib.import_module(module), name)) and loss["type"] == "custom"
    preset = loss["kwargs"].pop("preset")
    assert (preset, loss["kwargs"]) == variant
    assert "--custom-tis-function-path sparse_rl.integrations.slime.corrected" in (ROOT / "docs/slime.md").read_text()


def test_no_host_is_needed_to_import_the_package():
    code = "import sys, sparse_rl.integrations, sparse_rl.integrations.slime, sparse_rl.integrations.prime_rl\n"
    code += "assert not {'verl', 'slime', 'prime_rl', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
