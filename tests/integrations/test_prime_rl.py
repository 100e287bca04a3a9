"""The plug-in for prime-rl, over a stand-in (helpers/peers.py), against our functions and the formulas in fp64."""

import tomllib

import pytest
import torch
from hypothesis import given

from sparse_rl.errors import SparseRLError
from tests.helpers import peers
from tests.helpers.host_cases import CLIP, batch, block, by_hand, many, ours, same, seeds, variants


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


def test_the_settings_in_the_document_are_accepted(monkeypatch):
    stated = tomllib.loads(block("prime-rl.md", "toml", "[trainer.loss"))["trainer"]["loss"]
    assert (stated["type"], stated["import_path"]) == ("custom", "sparse_rl.integrations.prime_rl.loss")
    preset, parts = stated["kwargs"].pop("preset"), stated["kwargs"]
    assert (preset, parts) == ("sparse-rl", {"reject_below": 1e-3, "cap": 3.0})
    data = batch(2)
    tokens = int(data[4].sum())
    expected = ours((preset, parts), data, lambda before, after: after / tokens, stale=True)
    same(prime_loss(monkeypatch, (preset, parts), data), expected)
