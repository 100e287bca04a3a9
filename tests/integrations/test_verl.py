"""The plug-in for verl against our own correct() and policy_loss(), and against the formulas in fp64.

verl is the real one if it is installed, or else a stand-in (tests/helpers/peers.py).
"""

import importlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from hypothesis import given

from sparse_rl.errors import SparseRLError
from sparse_rl.learn.correct import PRESETS
from tests.helpers import peers
from tests.helpers.host_cases import ROOT, VARIANTS, batch, by_hand, many, ours, same, seeds, variants

REAL_VERL = importlib.util.find_spec("verl") is not None


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
    """Beyond 20 verl's weight is e^20. No preset reaches that far, nor does a cap of your own below it."""
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
    rollouts, loss = (
        [word for word in part.replace("\\\n", " ").split() if "=" in word]
        for part in (ROOT / "docs/verl.md").read_text().split("```")
        if "python3 -m verl.trainer.main_ppo" in part
    )
    of_vllm = ("rollout.name=", "engine_kwargs.vllm")
    both = rollouts + [word for word in loss if not any(name in word for name in of_vllm)]
    code = f"""
import verl
from hydra import compose, initialize_config_module
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.replica import get_rollout_replica_class
from sparse_rl.integrations.verl_server import Settings
with initialize_config_module("verl.trainer.config", version_base=None):
    config = compose("ppo_trainer", overrides={both!r})
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    print(get_rollout_replica_class(rollout.name), get_rollout_class(rollout.name), Settings.of(rollout.engine_kwargs))
    config = compose("ppo_trainer", overrides={loss!r})
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
section = actor.policy_loss
print(get_policy_loss_fn(section.loss_mode).__module__, section.preset, dict(section.correction))
print(config.algorithm.rollout_correction.rollout_is, config.algorithm.rollout_correction.rollout_is_threshold)
"""
    path = os.pathsep.join([str(tmp_path), str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-3:] == [
        "<class 'sparse_rl.integrations.verl_rollout.Replica'> "
        "<class 'sparse_rl.integrations.verl_rollout.ServerAdapter'> "
        "Settings(compressor='rkv', budget=512, interval=128, rows=256, options={'protect_prompt': True})",
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
