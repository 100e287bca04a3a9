"""The learner's kernels, forward and backward, against plain torch in fp64: norms, gates, rotations, log-probs.

The kernels run on a GPU where there is one, else in Triton's interpreter.
"""

import pytest
import torch

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.kernels import head, layers, ops, twins

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter cuts bf16 off
TOLERANCE = {torch.float32: 2e-6 if DEVICE == "cpu" else 1e-5, torch.bfloat16: 1.2e-2, torch.float16: 1.5e-3}
RAGGED = settings(max_examples=12, deadline=None)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def compare(kernel, twin, tensors, *others, skip=()):
    """Results and gradients, relative to the largest of each; the twin in fp64. `skip`: frozen tensors."""
    dtype = tensors[-1].dtype
    mine = [None if x is None else x.detach().clone() for x in tensors]
    exact = [None if x is None else x.detach().double() for x in tensors]
    for given_tensors in (mine, exact):
        for i, x in enumerate(given_tensors):
            if x is not None and i not in skip:
                x.requires_grad_()
    found, expected = kernel(*mine, *others), twin(*exact, *others)
    found, expected = (x if isinstance(x, tuple) else (x,) for x in (found, expected))
    upstream = [torch.randn_like(x) for x in expected]
    torch.autograd.backward(found, [u.to(dtype) for u in upstream])
    torch.autograd.backward(expected, upstream)
    gradients = [(a.grad, b.grad) for a, b in zip(mine, exact) if a is not None and a.requires_grad]
    for a, b in [*zip(found, expected, strict=True), *gradients]:
        assert a.dtype == dtype and a.shape == b.shape
        if a.numel():
            assert (a.double() - b).abs().max() <= TOLERANCE[dtype] * max(1.0, b.abs().max().item())
    assert all(mine[i].grad is None for i in skip)


def exact_norm(new, residual, weight, eps):
    """In fp64 throughout."""
    total = residual if new is None else residual + new
    return total, weight * total * (total.square().mean(-1, keepdim=True) + eps).rsqrt()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("rows, size", [(1, 1), (2, 37), (33, 128), (19, 896), (3, 3000)])
def test_norms(rows, size, adds, dtype):
    new = draw(1, rows, size, dtype=dtype, seed=1) if adds else None
    residual, weight = draw(1, rows, size, dtype=dtype), draw(size, dtype=dtype, seed=2)
    compare(layers.add_and_norm, exact_norm, [new, residual, weight], 1e-5)
    compare(layers.add_and_norm, exact_norm, [new, residual, weight], 1e-5, skip=[2])


@RAGGED
@given(st.integers(0, 70), st.integers(1, 300), st.booleans(), st.sampled_from([1e-6, 1e-2]))
def test_norms_of_any_shape(rows, size, adds, eps):
    new = draw(rows, size, seed=1) if adds else None
    compare(layers.add_and_norm, exact_norm, [new, draw(rows, size), draw(size, seed=2)], eps)


@pytest.mark.parametrize("unused", [0, 1])
def test_norms_of_which_one_result_is_used(unused):
    """A query's norm uses no sum; nothing may be added for it."""
    tensors = [draw(4, 40, seed=i).requires_grad_() for i in range(2)] + [draw(40).requires_grad_()]
    found = torch.autograd.grad(layers.add_and_norm(*tensors, 1e-6)[1 - unused].sum(), tensors, allow_unused=True)
    expected = torch.autograd.grad(twins.add_and_norm(*tensors, 1e-6)[1 - unused].sum(), tensors, allow_unused=True)
    for a, b in zip(found, expected, strict=True):
        assert (a is None and b is None) or torch.allclose(a, b, atol=1e-5)


def test_norms_round_where_modules_do():
    """In a half precision a norm differs from the module's by summation order alone, far below its rounding."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    module = LlamaRMSNorm(640).to(DEVICE, HALF)
    module.weight.data += draw(640, dtype=HALF)
    x = draw(64, 640, dtype=HALF, seed=3)
    ours, theirs = layers.add_and_norm(None, x, module.weight, 1e-6)[1], module(x)
    assert (ours != theirs).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("shape", [(1,), (3, 5, 37), (2, 1500), (0, 8)])
def test_gates(shape, dtype):
    compare(layers.silu_gate, twins.silu_gate, [draw(*shape, dtype=dtype), draw(*shape, dtype=dtype, seed=1)])
    far = 60 * draw(*shape, dtype=dtype)  # where exp alone would overflow
    compare(layers.silu_gate, twins.silu_gate, [far, draw(*shape, dtype=dtype, seed=1)])


@RAGGED
@given(
    st.integers(1, 3), st.integers(1, 9), st.sampled_from([(1, 1), (6, 2), (12, 3)]), st.sampled_from([2, 16, 24]),
    st.booleans(), st.sampled_from([torch.float32, HALF]),
)  # fmt: skip
def test_rotations(batch, tokens, heads, dim, shared, dtype):
    """Queries and keys as an attention has them, heads inside tokens; angles for all sequences or for each."""
    query, key = (draw(batch, tokens, n, dim, dtype=dtype, seed=n).transpose(1, 2) for n in heads)
    cos, sin = (draw(1 if shared else batch, tokens, dim, dtype=dtype, seed=s) for s in (5, 6))
    compare(layers.rotate, twins.rotate, [query, key, cos, sin], skip=[2, 3])


def test_rotations_are_transformers_own():
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    query, key = draw(2, 5, 4, 16, dtype=HALF).transpose(1, 2), draw(2, 5, 2, 16, dtype=HALF).transpose(1, 2)
    cos, sin = draw(2, 5, 16, dtype=HALF, seed=1), draw(2, 5, 16, dtype=HALF, seed=2)
    theirs = apply_rotary_pos_emb(query, key, cos, sin)
    for rotated in (layers.rotate(query, key, cos, sin), twins.rotate(query, key, cos, sin)):
        for a, b in zip(rotated, theirs, strict=True):
            assert torch.equal(a, b)  # in bf16, too: each product is rounded before the sum


def test_a_graph_can_be_walked_twice():
    """Nothing that backward reads is overwritten."""
    x, gates = draw(2, 4, 32).requires_grad_(), draw(2, 4, 32, seed=1).requires_grad_()
    total, normed = layers.add_and_norm(gates, x, draw(32, seed=2), 1e-6)
    value = (layers.silu_gate(normed, total) * draw(2, 4, 32, seed=3)).sum()
    first = torch.autograd.grad(value, [x, gates], retain_graph=True)
    second = torch.autograd.grad(value, [x, gates])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def exact_statistics(logits, targets, temperature, softcap):
    """In fp64, differentiable: log-probs and entropies; and ranks."""
    z = (logits if softcap is None else torch.tanh(logits / softcap) * softcap) / temperature
    logprobs = z.log_softmax(-1)
    chosen = logprobs.gather(1, targets[:, None])[:, 0]
    return chosen, -(logprobs.exp() * logprobs).sum(-1), 1 + (z > z.gather(1, targets[:, None])).sum(-1)


@pytest.mark.parametrize("module", [head, twins])
@pytest.mark.parametrize("temperature, softcap", [(1.0, None), (0.7, None), (1.3, 5.0)])
@pytest.mark.parametrize("tokens, size", [(1, 1), (3, 61), (2, 5000), (1, 151936), (0, 7)])
def test_log_probs_and_their_gradients(module, tokens, size, temperature, softcap):
    logits = 6 * draw(tokens, size)
    targets = torch.arange(tokens, device=DEVICE) * 7919 % size
    exact = logits.double().requires_grad_()
    expected = exact_statistics(exact, targets, temperature, softcap)
    *found, lse = module.token_statistics(logits, targets, temperature, softcap)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a.double(), b.double().detach(), rtol=1e-5, atol=2e-5)
    up = [draw(tokens, seed=s) for s in (1, 2)]
    for through_entropy in (False, True):
        exact.grad = None
        value = (up[0] * expected[0]).sum() + (up[1] * expected[1]).sum() * through_entropy
        value.backward(retain_graph=True)
        upstream = up[1] if through_entropy else None
        parts, start = [], 0
        for part in logits.split(max(1, size // 3), 1):
            given = (part.contiguous(), targets, lse, found[1], up[0], upstream, start, temperature, softcap)
            parts.append(module.logit_gradients(*given, torch.float32))
            start += part.shape[1]
        torch.testing.assert_close(torch.cat(parts, 1).double(), exact.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", [head, twins])
def test_entries_that_cannot_be_drawn(module):
    logits = draw(2, 40)
    logits[0, 5:] = -torch.inf
    targets = torch.tensor([1, 2], device=DEVICE)
    logprobs, entropies, ranks, lse = module.token_statistics(logits, targets, 1.0, None)
    expected = exact_statistics(logits[:, :5].double(), targets, 1.0, None)
    assert torch.isfinite(entropies).all() and abs(entropies[0] - expected[1][0]) < 1e-5
    assert ranks[0] == expected[2][0] and abs(logprobs[0] - expected[0][0]) < 1e-5
    ones = torch.ones_like(lse)
    gradients = module.logit_gradients(logits, targets, lse, entropies, ones, ones, 0, 1.0, None, torch.float32)
    assert torch.isfinite(gradients).all() and (gradients[0, 5:] == 0).all()


@pytest.mark.parametrize("module", [head, twins])
def test_logits_that_are_no_numbers_are_not_hidden(module):
    logits = draw(2, 40)
    logits[0, 30] = torch.nan
    logprobs, *_ = module.token_statistics(logits, torch.tensor([1, 2], device=DEVICE), 1.0, None)
    assert not torch.isfinite(logprobs[0]) and torch.isfinite(logprobs[1])


GPU = ops.Place("cuda", triton=True)


@pytest.mark.parametrize(
    "dtype, module", [(torch.bfloat16, "layers"), (torch.float32, "layers"), (torch.float64, "twins")]
)
def test_the_table_of_layers(dtype, module):
    x, weight, other = torch.zeros(2, 8, dtype=dtype), torch.zeros(8, dtype=dtype), torch.zeros(8, dtype=torch.float16)
    query, cos = torch.zeros(1, 2, 3, 8, dtype=dtype), torch.zeros(1, 3, 8, dtype=dtype)
    assert ops.module_for("add_and_norm", GPU, x, weight) == module
    assert ops.module_for("silu_gate", GPU, x, x) == module
    assert ops.module_for("rotate", GPU, query, query, cos, cos) == module
    assert ops.module_for("add_and_norm", GPU, x, other) == "twins"  # modules promote: the kernel would not
    assert ops.module_for("rotate", GPU, query, query, cos[..., :4], cos[..., :4]) == "twins"
    assert ops.module_for("add_and_norm", GPU, torch.zeros(1, 16385), torch.zeros(16385)) == "twins"
    assert ops.module_for("add_and_norm", ops.Place("cpu", triton=True), x, weight) == "twins"
