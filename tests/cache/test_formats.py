"""Slots of 8 bits: what is read is what a slow reference reads, to the bit."""

import pytest
import torch

from sparse_rl import SparseRLError
from sparse_rl.cache import CacheShape, SlotCache, SlotFormat, Trace
from sparse_rl.cache.formats import CODES, as_stored, common_format, dequantize, quantize, slot_format
from sparse_rl.cache.places import Places
from tests.helpers.formats import NUMBERS, stored

KINDS = list(CODES)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def vectors(dtype=torch.float32):
    """Of all sizes; with one number that is far larger, as biased keys have; on the borders of an exponent; zero."""
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 40)[:, None]
    x[3, 5] *= 1000
    x[4, :] = 0
    x[5, 0], x[6, 0], x[7, 0], x[8, 0] = 448.0, 449.0, 127.0, 127.5
    x[9:11] = torch.tensor([1e-30, -0.0] * 8)
    return x.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_what_the_reference_reads(kind, dtype):
    x = vectors(dtype)
    codes, exponents = quantize(x, kind)
    assert codes.dtype.itemsize == exponents.dtype.itemsize == 1 and exponents.shape == x.shape[:-1]
    read = dequantize(codes, exponents, dtype)
    assert read.dtype == dtype
    assert torch.equal(read.double(), stored(x, kind).to(dtype).double())
    assert torch.equal(as_stored(read, kind), read)  # nothing is left to round


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_is_read_exactly_in_every_dtype(kind):
    """So a scale may be multiplied with keys or with logits, whatever the dtype."""
    both = torch.cat([NUMBERS[kind], -NUMBERS[kind]])
    for dtype in DTYPES:
        x = (both * 2.0**-5).to(dtype)
        assert torch.equal(as_stored(x, kind), x)


@pytest.mark.parametrize("kind, most", [("fp8", 2**-4), ("int8", 2**-7)])
def test_rounding_is_small(kind, most):
    """Of e4m3 relative to a number, of int8 to the largest of its vector."""
    x = torch.randn(500, 64)
    size = x.abs() if kind == "fp8" else x.abs().amax(-1, keepdim=True).expand_as(x)
    off = (as_stored(x, kind) - x).abs() / size
    assert off[x.abs() > 0.02].max() <= most and off.max() > most / 2.1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_vectors_that_are_not_finite_are_read_as_nan(kind, bad):
    x = torch.ones(3, 8)
    x[1, 2] = bad
    read = as_stored(x, kind)
    assert read[1].isnan().all() and torch.equal(read[[0, 2]], x[[0, 2]])


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_passes_straight_through(kind):
    x = vectors().requires_grad_()
    weights = torch.randn(x.shape)
    (as_stored(x, kind) * weights).sum().backward()
    assert torch.equal(x.grad, weights)


@pytest.mark.parametrize("kept", [(), (0,), (1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_takes_the_bytes_that_its_shape_says(kind, kept):
    shape = CacheShape(3, 2, 4, 6, 6, torch.bfloat16, num_queries=2, mass=True, slots=SlotFormat(kind, kept))
    cache = SlotCache(shape, rows=5, capacity=7)
    assert cache.nbytes == 5 * shape.row_bytes(7)
    assert [cache.layer(i).keys.dtype for i in range(3)] == [
        torch.bfloat16 if i in kept else CODES[kind].dtype for i in range(3)
    ]
    assert [i for part in cache.layer_chunks(5, 7) for i in range(part.start, part.stop)] == [0, 1, 2]


def test_at_128_numbers_a_head_slots_are_half_as_large():
    plain = CacheShape(28, 2, 12, 128, 128, torch.bfloat16)
    small = CacheShape(28, 2, 12, 128, 128, torch.bfloat16, slots=SlotFormat("fp8"))
    assert plain.slot_bytes == 28 * 2 * 516 and small.slot_bytes == 28 * 2 * 262
    assert 4096 * plain.kv_bytes_per_token / small.row_bytes(640) > 12


@pytest.mark.parametrize("kept", [(), (0, 2)])
def test_forked_rows_and_parts_read_what_was_stored(kept):
    shape = CacheShape(3, 2, 4, 6, 6, torch.float32, slots=SlotFormat("int8", kept))
    cache, other = SlotCache(shape, 4, 7), SlotCache(shape, 2, 9)
    index = torch.arange(5).expand(2, -1)
    places = Places.of(torch.arange(2)[:, None], index)
    key, value = torch.randn(2, 2, 2, 5, 6)
    for layer in range(3):
        read = other.append(layer, places, key, value)
        for mine, given in zip(read, (key, value)):
            assert torch.equal(mine, given) == (layer in kept)
    other.place(index, lambda extra: places)
    cache.fork(other, torch.tensor([1, 0, 1]), torch.tensor([0, 2, 3]), 5)
    for layer in range(3):
        expected = other.as_stored(layer, key, value)
        for mine, theirs in zip(cache.read(slice(layer, layer + 1), torch.tensor([0, 2, 3]), 5), expected):
            assert torch.equal(mine[0], theirs[[1, 0, 1]])
        assert torch.equal(cache.part(slice(2, 4)).read(slice(layer, layer + 1), slice(1), 5)[0][0], expected[0][:1])
    taken = cache.take(3, 5, fed=5)
    assert len(taken) == len(cache.tensors) and taken[0].shape[2] == 5
    cache.put(1, taken)
    cache.tensors[0][:, 3] = 0  # a copy was taken
    for layer in range(3):
        expected = other.as_stored(layer, key, value)
        for mine, theirs in zip(cache.read(slice(layer, layer + 1), torch.tensor([1]), 5), expected):
            assert torch.equal(mine[0, 0], theirs[1])
    cache.clear()
    assert not any(tensor.any() for tensor in cache.tensors)


def test_names_and_layers_are_checked():
    assert slot_format() is None and slot_format("fp8", [0, -1]) == SlotFormat("fp8", (0, -1))
    assert SlotFormat("fp8", (-1, 0, 3)).for_layers(4) == SlotFormat("fp8", (0, 3))
    with pytest.raises(SparseRLError, match="there is no slot format 'fp4'; did you mean 'fp8'"):
        slot_format("fp4")
    with pytest.raises(SparseRLError, match="set slots to fp8 or int8"):
        slot_format("model", [1])
    with pytest.raises(SparseRLError, match="it must be a list of layer numbers"):
        slot_format("fp8", "01")
    with pytest.raises(SparseRLError, match="it must be a list of layer numbers"):
        slot_format("fp8", [0.5])
    with pytest.raises(SparseRLError, match="names layer 4, but 4 layers have slots"):
        SlotFormat("int8", (4,)).for_layers(4)
    with pytest.raises(SparseRLError, match=r"stored in different formats.*\(fp8; the model's dtype\)"):
        common_format([None, SlotFormat("fp8")])


def test_a_trace_file_says_how_slots_were_stored(tmp_path):
    trace = Trace.dense(3, 2, 5)
    for slots in (None, SlotFormat("fp8"), SlotFormat("int8", (0, 2))):
        Trace(trace.evicted_at, slots=slots).save(tmp_path / "a")
        assert Trace.load(tmp_path / "a").slots == slots
        assert Trace.from_bytes((tmp_path / "a").read_bytes()).slots == slots
        assert Trace.load(tmp_path / "a").slice(1, 3).slots == slots
    Trace(trace.evicted_at, slots=SlotFormat("int8", (5,))).save(tmp_path / "a")
    with pytest.raises(SparseRLError, match=r"is not a trace.*layer 5, but 3 layers"):
        Trace.load(tmp_path / "a")
