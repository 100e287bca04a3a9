"""Random batches for the plug-ins of other trainers; loss and gradient by our functions and by the formulas."""

import math
from pathlib import Path

import torch
from hypothesis import settings
from hypothesis import strategies as st

from sparse_rl.learn.correct import PRESETS, correct, correction
from sparse_rl.learn.loss import Loss, policy_loss, token_scale

ROOT = Path(__file__).parent.parent.parent
CLIP = dict(clip_low=0.2, clip_high=0.28)
# all presets, one of them without the part that no host supports, and combinations that no preset has
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
    """Random trajectories, [N, T]: masks with holes, sometimes an empty one, gaps from rounding errors to huge ones."""
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
    """(loss, gradient, corrected) of our own functions. `scale`: the host's, from the masks before and after."""
    sampler, old, logprobs, advantages, mask, _ = data
    chosen = correction(variant[0], **variant[1])
    lp = logprobs.clone().requires_grad_()
    old = sampler if chosen.old == "sampler" else (logprobs if stale else old)
    corrected = correct(old - sampler, mask, chosen)
    loss = Loss(mean=mean, **CLIP)
    by = token_scale(corrected.mask, corrected.accepted, loss) if scale is None else scale(mask, corrected.mask)
    value, _, _ = policy_loss(lp, old, advantages, corrected.mask, corrected.weights, by, loss)
    value.backward()
    return value.detach(), lp.grad, corrected


def by_hand(name, data, denominator, stale=False):
    """(loss, gradient) in fp64, token by token. denominator(i, masks before, masks after): that of trajectory i."""
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


def block(page: str, language: str, within: str = "") -> str:
    """The first code block in this language, with this in it, on a page of the docs."""
    blocks = (ROOT / "docs" / page).read_text().split(f"```{language}\n")[1:]
    return next(text for text in (block.split("```")[0] for block in blocks) if within in text)
