"""Ties: a number that rounding alone decides gets the sampler's code from whoever rounds it again."""

import dataclasses

import pytest
import torch

from sparse_rl import SparseRLError
from sparse_rl.cache import CacheShape, SlotCache, SlotFormat, Trace
from sparse_rl.cache.formats import CODES, MARGIN, as_stored, dequantize, quantize, ties_of
from sparse_rl.cache.ties import KnownTies, TieLog
from tests.helpers.formats import NUMBERS

KINDS = list(CODES)
NOISE = 4e-6  # most that sampler and learner differ in our tests, as a share of a vector's maximum


def vectors(kind, seed=0):
    """[2, 3, 40, 16]: some numbers within 1e-6 of the middle of two codes, some maxima within 1e-6 of the border of two
    exponents, and one row that is zero.
    """
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape):
        return torch.rand(*shape, generator=generator)

    x = torch.randn(2, 3, 40, 16, generator=generator)
    x *= CODES[kind].largest * (0.51 + 0.45 * drawn(2, 3, 40, 1)) / x.abs().amax(-1, keepdim=True)
    codes = NUMBERS[kind].float()
    middles = ((codes[1:] + codes[:-1]) / 2)[(codes[:-1] > 0.5) & (codes[1:] <= CODES[kind].largest / 2)]
    chosen = middles[(drawn(x.shape) * len(middles)).long()] * (1 + 1e-6 * (drawn(x.shape) - 0.5)) * x.sign()
    some = (drawn(x.shape) < 0.2) & (x.abs() < x.abs().amax(-1, keepdim=True))
    x = torch.where(some, chosen, x)
    border = CODES[kind].largest / x[:, :, ::4].abs().amax(-1, keepdim=True)
    x[:, :, ::4] *= border * (1 + 1e-6 * (drawn(2, 3, 10, 1) - 0.5))
    x[0, 1, 2] = 0
    return x * 2.0 ** torch.arange(-20, 20)[:, None]


def noisy(x, seed=1):
    noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return x + NOISE * noise * x.abs().amax(-1, keepdim=True)


def read(x, kind, ties=None):
    return dequantize(*quantize(x, kind, ties), x.dtype)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_differ_by_rounding_get_the_same_codes(kind, seed):
    """Where steps are finer than the margin, which only e4m3 has, either code is as near as the noise."""
    x = vectors(kind, seed)
    y, ties = noisy(x, seed + 100), ties_of(x, kind)
    largest = x.abs().amax(-1, keepdim=True)
    fine = (read(x, kind) - read(y, kind, ties)).abs() / largest
    assert quantize(x, kind)[1].equal(quantize(y, kind, ties)[1])
    assert fine[x.abs() > largest / 1000].nan_to_num(0.0).max() == 0 and fine.nan_to_num(0.0).max() < 2 * MARGIN
    assert not quantize(x, kind)[1].equal(quantize(y, kind)[1])  # without ties exponents differ
    assert (read(x, kind) != read(y, kind)).sum() > 100  # and numbers


@pytest.mark.parametrize("kind", KINDS)
def test_who_found_the_ties_changes_nothing(kind):
    x = vectors(kind)
    ties = ties_of(x, kind)
    for mine, theirs in zip(quantize(x, kind, ties), quantize(x, kind), strict=True):
        assert mine.equal(theirs)
    assert all(len(found) > 50 for found in (ties.numbers[0], ties.vectors[0]))
    assert 0 < ties.away.float().mean() < 1 and 0 < ties.larger.float().mean() < 1
    plain = torch.randn(50, 4, 20, 64, generator=torch.Generator().manual_seed(0))
    assert len(ties_of(plain, kind).away) < 0.02 * plain.numel()  # ties are rare


@pytest.mark.parametrize("kind", KINDS)
def test_no_tie_is_found_where_nothing_is_rounded(kind):
    x = torch.zeros(1, 2, 3, 8)
    x[0, 1, 0], x[0, 1, 1, 2], x[0, 1, 2, 3] = 1e-38, float("nan"), float("inf")
    ties = ties_of(x, kind)
    assert not len(ties.away) and not len(ties.larger)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_passes_straight_through(kind):
    x = vectors(kind)
    y, ties = noisy(x).requires_grad_(), ties_of(x, kind)
    weights = torch.randn(x.shape)
    (as_stored(y, kind, ties) * weights).sum().backward()
    assert y.grad.equal(weights)


def cache_of(kind, rows, **options):
    shape = CacheShape(3, 3, 4, 16, 16, torch.float32, slots=SlotFormat(kind, (1,)))
    return SlotCache(dataclasses.replace(shape, **options), rows, 50)


def test_only_small_slots_in_fp32_on_a_cpu_note_ties():
    assert cache_of("int8", 1).ties is not None
    for options in ({"dtype": torch.bfloat16}, {"dtype": torch.float64}, {"slots": None}):
        assert cache_of("int8", 1, **options).ties is None


@pytest.mark.parametrize("kind", KINDS)
def test_notes_go_where_slots_go_and_say_what_to_do(kind):
    cache, other = cache_of(kind, 4), cache_of(kind, 3)
    key, value = vectors(kind, 0), vectors(kind, 1)
    index = torch.arange(40).expand(2, -1) + torch.tensor([[0], [5]])
    real = index < 30
    for layer in range(3):
        other.part(slice(1, 3)).note_ties(layer, key, value, index, real)
    cache.fork(other, torch.tensor([2, 1, 0]), torch.tensor([3, 0, 1]), 10)
    assert [len(cache.ties.of_row(row)) for row in (1, 2)] == [0, 0]
    noted = cache.ties.of_row(3)
    assert noted.equal(other.part(slice(2, 3)).ties.of_row(0)) and noted.equal(noted.unique(dim=0))  # in order
    assert set(noted[:, 1].tolist()) == {0, 2} and noted[:, 0].min() >= 5 and 25 < noted[:, 0].max() < 30
    known = KnownTies.of([None, noted[:0], noted])
    assert (known.row == 2).all()
    known = KnownTies.of([cache.ties.of_row(0), noted]).between(5, 30)  # the second row's first tokens
    for layer in (0, 2):
        for x, ties in zip((key, value), known.of_layer(layer, key, value), strict=True):
            x = torch.stack([x[0, :, 5:30], x[1, :, :25]])
            assert all(mine.equal(theirs) for mine, theirs in zip(quantize(noisy(x), kind, ties), quantize(x, kind)))
    cache.ties.put(1, noted.to(torch.int32))
    assert cache.ties.of_row(1).equal(noted)
    cache.ties.begin(2)
    assert [len(cache.ties.of_row(row)) > 0 for row in range(4)] == [False, False, False, True]


@pytest.mark.parametrize("rows, most", [(2, 63), (2**12, 3)])  # 2^7 and 2^18 numbers a token
def test_what_waits_is_bounded_in_tokens_and_in_numbers(rows, most):
    log, x, waiting = TieLog([[] for _ in range(rows)]), torch.zeros(rows, 2, 1, 16), []
    for token in range(100):
        log.note(0, "int8", x, x, torch.full((rows, 1), token), None)
        waiting.append(len(log.fed))
    assert max(waiting) == most and min(waiting) == 0


def test_values_may_be_narrower_than_keys():
    log, key, value = TieLog([[], []]), vectors("int8", 0), vectors("int8", 1)[..., :4].contiguous()
    log.note(1, "int8", key, value, torch.arange(40).expand(2, -1), None)
    known = KnownTies.of([log.of_row(0), log.of_row(1)])
    for x, ties in zip((key, value), known.of_layer(1, key, value), strict=True):
        assert set(zip(*(i.tolist() for i in ties.numbers))) == set(zip(*(i.tolist() for i in ties_of(x, "int8")[0])))


def test_ties_of_another_model_are_refused():
    known = KnownTies.of([torch.tensor([[0, 0, 0, 4 * (15 + 1)]])])
    x = torch.zeros(1, 1, 1, 8)
    with pytest.raises(SparseRLError, match=r"says how number 15 of a key or value was rounded, but .* have 8 numbers"):
        known.of_layer(0, x, x)
    assert not len(known.of_layer(1, x, x)[0].away)


TIES = torch.tensor([[0, 2, 1, 9], [1, 0, 0, 3], [3, 1, 1, 70]])


def test_a_trace_file_keeps_them(tmp_path):
    trace = Trace.dense(3, 2, 5).with_slots(SlotFormat("int8"), TIES)
    trace.save(tmp_path / "a")
    for loaded in (Trace.load(tmp_path / "a"), Trace.from_bytes(trace.to_bytes())):
        assert loaded.slots == trace.slots and loaded.ties.dtype == torch.uint16
        assert loaded.ties.to(torch.int64).equal(TIES)
    assert trace.slice(1, 4).ties.to(torch.int64).equal(torch.tensor([[0, 0, 0, 3], [2, 1, 1, 70]]))
    assert trace.nbytes == 3 * 2 * 5 * 2 + 3 * 4 * 2
    long = Trace.dense(3, 2, 70_000).with_slots(SlotFormat("int8"), TIES + torch.tensor([66_000, 0, 0, 0]))
    assert Trace.from_bytes(long.to_bytes()).ties[:, 0].tolist() == [66_000, 66_001, 66_003]
    none = Trace.dense(3, 2, 5).with_slots(SlotFormat("int8"), None)
    assert Trace.from_bytes(none.to_bytes()).ties is None
    empty = Trace.dense(3, 2, 5).with_slots(SlotFormat("int8"), TIES[:0])
    assert Trace.from_bytes(empty.to_bytes()).ties.shape == (0, 4)


@pytest.mark.parametrize(
    "ties, why",
    [
        (TIES[:, :3], "its ties have 3 numbers each, not 4"),
        (TIES.to(torch.int32), "its ties are torch.int32, but its moments are torch.uint16"),
        (TIES.float(), "its ties has 2 dimensions of torch.float32"),
        (TIES[0], "its ties has 1 dimensions"),
        (TIES + torch.tensor([2, 0, 0, 0]), "its ties name token 5, but it has 5"),
        (TIES + torch.tensor([0, 1, 0, 0]), "its ties name layer 3, but it has 3"),
        (TIES + torch.tensor([0, 0, 1, 0]), "its ties name KV head 2, but it has 2"),
    ],
)
def test_files_with_impossible_ties_are_refused(tmp_path, ties, why):
    ties = ties.to(torch.uint16) if ties.dtype == torch.int64 else ties
    dataclasses.replace(Trace.dense(3, 2, 5), slots=SlotFormat("int8"), ties=ties).save(tmp_path / "a")
    with pytest.raises(SparseRLError, match=f"is not a trace .{why}"):
        Trace.load(tmp_path / "a")


def test_damaged_ties_are_refused(tmp_path):
    long = Trace.dense(1, 1, 70_000)
    dataclasses.replace(long, ties=torch.tensor([[-1, 0, 0, 1]], dtype=torch.int32)).save(tmp_path / "a")
    with pytest.raises(SparseRLError, match="its ties have the number -1"):
        Trace.load(tmp_path / "a")
    trace = Trace.dense(3, 2, 5).with_slots(SlotFormat("int8"), TIES)
    content = bytearray(trace.to_bytes())
    content[content.index(trace.ties.numpy().tobytes())] ^= 1
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(SparseRLError, match="the checksum of its ties differs: it is damaged"):
        Trace.load(tmp_path / "a")
    (tmp_path / "a").write_bytes(trace.to_bytes().replace(b"sparse_rl.ties.1", b"sparse_rl.ties.9"))
    with pytest.raises(
        SparseRLError, match=r"holds ties in the form 'sparse_rl\.ties\.9', which this version does not"
    ):
        Trace.load(tmp_path / "a")
