"""benchmarks/noise_parts.py: what it rounds, and that nothing else differs from the model."""

import sys
from pathlib import Path

import pytest
import torch

from sparse_rl.models import load_model

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from noise_parts import LAST_BIT, MODULES, gap, logprobs, parts_rounded, rounding


@pytest.mark.parametrize("dtype, most", [(torch.bfloat16, 3e-4), (torch.float16, 3e-3)])
def test_numbers_round_to_the_dtype_and_seldom_to_the_other_side(dtype, most):
    x = torch.randn(1000, 300, generator=torch.Generator().manual_seed(0))
    one, other, nearest = rounding(1, dtype)(x), rounding(1001, dtype)(x), x.to(dtype).float()
    assert torch.equal(one, one.to(dtype).float())
    moved = one != nearest
    middle = (one[moved] + nearest[moved]) / 2
    assert ((x[moved] - middle).abs() <= 1.6 * LAST_BIT * middle.abs()).all()  # only what lies at a tie
    assert 0 < (one != other).float().mean() < most


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
    assert gap(model, tokens, mask, set())["max_abs_gap"] == 0
    for part in MODULES:
        with parts_rounded(model, {part}, 1):
            moved = (logprobs(model, tokens, mask) - plain).abs().max()
        assert 1e-5 < moved < 0.2, part
    assert not model.model.layers[0].mlp.down_proj._forward_hooks
    assert model.config._attn_implementation == attention
