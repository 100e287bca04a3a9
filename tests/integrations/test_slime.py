"""The plug-in for slime, over a stand-in (helpers/peers.py), against our functions and the formulas in fp64."""

import math
from argparse import Namespace

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from sparse_rl.errors import SparseRLError
from tests.helpers import peers
from tests.helpers.host_cases import CLIP, ROOT, VARIANTS, batch, block, by_hand, many, ours, same, seeds


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


def test_the_settings_in_the_document_are_accepted(monkeypatch):
    data = batch(2)
    stated = yaml.safe_load(block("slime.md", "yaml"))
    variant = (stated.pop("sparse_rl_preset"), stated.pop("sparse_rl_correction"))
    assert variant == ("sparse-rl", {"reject_below": 1e-3, "cap": 3.0}) and not stated
    same(slime_loss(monkeypatch, variant, data, "after"), ours(variant, data))
    assert "--custom-tis-function-path sparse_rl.integrations.slime.corrected" in (ROOT / "docs/slime.md").read_text()
