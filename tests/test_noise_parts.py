"""benchmarks/noise_parts.py: what it rounds, and that nothing else differs from the model."""

import sys
from pathlib import Path

import pytest
import torch

from sparse_rl.models import load_model

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from noise_parts import LAST_BIT, MODULES, PARTS, gaps, logprobs, parts_rounded, rounding


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 3e-4), (torch.float16, 3e-3)])
def test_numbers_round_to_the_dtype_and_seldom_to_the_other_side(dtype, most):
    x = torch.randn(1000, 300, generator=torch.Generator().manual_seed(0))
    one, other = (rounding("o_proj", True, seed, dtype)(x) for seed in (0, 1))
    nearest = x.to(dtype).float()
    assert torch.equal(one, one.to(dtype).float())
    moved = one != nearest
    middle = (one[moved] + nearest[moved]) / 2
    assert ((x[moved] - middle).abs() <= 1.6 * LAST_BIT * middle.abs()).all()  # only what lies at a tie
    assert 0 < (one != other).float().mean() < most


@pytest.mark.parametrize("part", MODULES)
def test_only_sums_are_off_in_their_last_bits(part):
    """A sum of two bf16 numbers is often a tie. Sampler and learner both round it to even."""
    x = torch.randn(300, 300, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    ties = (x.view(torch.int32) | 0x8000).view(torch.float32)  # half way to the next bf16 number
    rounded = [rounding(part, True, seed)(ties) for seed in (0, 1)]
    left = [rounding(part, False, seed)(ties) for seed in (0, 1)]
    if part in ("embedding and residual stream", "rotated queries and keys", "gated product"):
        assert torch.equal(rounded[0], ties.bfloat16().float()) and torch.equal(rounded[0], rounded[1])
        assert torch.equal(left[0], ties) and torch.equal(left[1], ties)
    else:
        assert 0.4 < (rounded[0] != rounded[1]).float().mean() < 0.6
        assert 0.4 < (left[0] != left[1]).float().mean() < 0.6
        torch.testing.assert_close(left[0], ties, rtol=2 * LAST_BIT, atol=0)


def test_a_part_has_the_same_signs_whatever_else_rounds():
    model, _ = load_model("tiny:2x64", "float32", "cpu")
    tokens = torch.randint(3, 60, (4, 60), generator=torch.Generator().manual_seed(0))

    def first_queries(left_out: str, seed: int) -> torch.Tensor:
        """Not rounded, so that their last bits are seen."""
        found = []
        with parts_rounded(model, set(PARTS) - {"queries, keys, values", left_out}, seed):
            layer = model.model.layers[0].self_attn.q_proj
            hook = layer.register_forward_hook(lambda module, args, out: found.append(out))
            model(tokens, use_cache=False)
            hook.remove()
        return found[0]

    every = first_queries("", 2)
    for later in ("attention output", "attention weights", "down_proj"):
        assert torch.equal(first_queries(later, 2), every)
    assert not torch.equal(first_queries("", 3), every)


def test_without_rounding_it_is_the_model_and_every_part_makes_a_gap():
    model, _ = load_model("tiny:2x64", "float32", "cpu")
    attention = model.config._attn_implementation
    tokens = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[:, :10] = False
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[:, 9:-1].double()
    plain = logits.log_softmax(-1).gather(-1, tokens[:, 10:, None]).flatten()
    with parts_rounded(model, set(), 0):
        torch.testing.assert_close(logprobs(model, tokens, mask), plain, rtol=0, atol=1e-5)
    found = gaps(model, tokens, mask, set(), pairs=3)  # only the last bits of fp32
    assert len({one["mean_abs_gap"] for one in found}) == 3
    assert all(0 < one["max_abs_gap"] < 1e-5 for one in found)
    assert gaps(model, tokens, mask, set(PARTS), pairs=2)[0] == gaps(model, tokens, mask, set(PARTS), pairs=1)[0]
    for part in MODULES:
        with parts_rounded(model, {part}, 1):
            moved = (logprobs(model, tokens, mask) - plain).abs().max()
        assert 1e-5 < moved < 0.2, part
    assert not model.model.layers[0].mlp.down_proj._forward_hooks
    assert model.config._attn_implementation == attention
