"""The product over experts against its twin, and against the experts of transformers: on a GPU where there is one, else
in Triton's interpreter.
"""

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.kernels import experts, ops, twins
from tests.kernels.test_kernels import DEVICE, HALF, close, draw, poisoned  # noqa: F401


def assigned(pairs, count, seed=0, used=None):
    """Experts of some pairs at random -> order, starts. used: how many experts are chosen from"""
    ids = torch.randint(0, used or count, (pairs,), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    of_experts, order = ids.sort(stable=True)
    return order, torch.searchsorted(of_experts, torch.arange(count + 1, device=DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    "tokens, per_token, count, used, size_in, size_out",
    [
        (1, 1, 1, 1, 1, 1),  # the least there is
        (3, 2, 8, 8, 32, 48),  # most experts have no token
        (50, 2, 3, 1, 40, 70),  # one has them all, in several tiles
        (64, 8, 5, 5, 130, 65),  # several tiles of every kind, none full
    ],
)
def test_the_product_is_its_twin(tokens, per_token, count, used, size_in, size_out, transposed, dtype):
    order, starts = assigned(tokens * per_token, count, used=used)
    x, bias = draw(tokens, size_in, dtype=dtype), draw(count, size_out, dtype=dtype, seed=2)
    shape = (count, size_in, size_out) if transposed else (count, size_out, size_in)
    weight = draw(*shape, dtype=dtype, seed=1)
    weight = weight if transposed else weight.transpose(1, 2)
    for added in (None, bias):
        found = experts.expert_product(x, weight, added, order, starts)
        close(found, twins.expert_product(x, weight, added, order, starts), dtype)


@settings(max_examples=15)
@given(st.integers(0, 40), st.integers(1, 3), st.integers(1, 9), st.integers(0, 99))
def test_the_product_of_any_assignment(tokens, per_token, count, seed):
    order, starts = assigned(tokens * per_token, count, seed)
    x, weight = draw(tokens, 17), draw(count, 17, 5, seed=1)
    found = experts.expert_product(x, weight, None, order, starts)
    assert found.shape == (tokens * per_token, 5)
    assert torch.allclose(found, twins.expert_product(x, weight, None, order, starts), atol=1e-5)


def test_pairs_of_no_expert_are_zero():
    """Ids behind the last expert, as experts of other devices have, come last in the order."""
    order, starts = assigned(12, 4)
    starts[-1] -= 5
    x, weight = draw(12, 16), draw(4, 16, 8, seed=1)
    for product in (experts.expert_product, twins.expert_product):
        found = product(x, weight, None, order, starts)
        assert found[order[-5:]].eq(0).all() and found[order[:-5]].ne(0).any()


@pytest.mark.parametrize(
    "place, dtype, module",
    [
        (ops.Place("cuda", triton=True), torch.float32, "experts"),
        (ops.Place("cuda", triton=True), torch.float16, "experts"),
        (ops.Place("cuda", triton=True), torch.float64, "twins"),
        (ops.Place("cuda", triton=False), torch.float32, "twins"),
        (ops.Place("cpu", triton=True), torch.float32, "twins"),
    ],
)
def test_what_computes_the_product(place, dtype, module):
    x = torch.zeros(2, 4, dtype=dtype)
    assert ops.module_for("expert_product", place, x, x[None], None) == module
