"""The kernels of an eviction against their torch twins: on the GPU where there is one, else in Triton's interpreter."""

import math

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

from sparse_rl.cache import SlotCache
from sparse_rl.cache.formats import KINDS
from sparse_rl.cache.slots import CacheShape
from sparse_rl.kernels import evict, twins

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
GUARD = 64  # elements behind every allocation that nobody may write


@pytest.fixture(autouse=True)
def wide_dots(monkeypatch):
    """The interpreter's tl.dot multiplies the bits of bf16 operands as if they were integers: widen them first."""
    plain = InterpreterBuilder.create_dot

    def create_dot(self, a, b, *rest):
        return plain(
            self, *(self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *rest
        )

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def poisoned(monkeypatch):
    """What the kernels allocate starts as NaN, or as a huge number, and ends in a guard."""
    allocated = []

    def empty(*shape, dtype, device):
        value = torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max // 2
        flat = torch.full((math.prod(shape) + GUARD,), value, dtype=dtype, device=device)
        allocated.append(flat)
        return flat[:-GUARD].view(shape)

    monkeypatch.setattr(evict.torch, "empty", empty)
    yield
    assert allocated
    for flat in allocated:
        guard = flat[-GUARD:]
        assert (guard.isnan() if flat.is_floating_point() else guard == torch.iinfo(flat.dtype).max // 2).all()


def generator(*seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(hash(seed) % 2**31)


def planted_keys(rows, heads, used, dim, dtype, repeated=0.7):
    """Some keys in clusters of near-copies of any length, others on their own."""
    g = generator(rows, heads, used, dim)
    keys = torch.randn(rows, heads, used, dim, generator=g)
    clusters = torch.randn(rows, heads, max(1, used // 8), dim, generator=g)
    member = torch.randint(clusters.shape[2], (rows, heads, used, 1), generator=g).expand(-1, -1, -1, dim)
    near = clusters.gather(2, member) + 0.3 * torch.randn(keys.shape, generator=g)
    keys = torch.where(torch.rand(rows, heads, used, 1, generator=g) < repeated, near, keys)
    return (keys * (0.2 + 3 * torch.rand(rows, heads, used, 1, generator=g))).to(dtype)


def cosines(keys):
    unit = torch.nn.functional.normalize(keys.double(), dim=-1)
    return (unit @ unit.transpose(-1, -2)).masked_fill(torch.eye(keys.shape[2], dtype=torch.bool), 0.0)  # [B, H, S, S]


def far_from_ties(keys, around):
    """A threshold close to `around` that no cosine comes within 1e-4 of: rounding decides nothing."""
    found = cosines(keys).flatten()
    edges = (
        torch.cat([torch.tensor([around - 0.05, around + 0.05]), found[(found - around).abs() < 0.05]]).sort().values
    )
    widest = edges.diff().argmax()
    assert edges.diff()[widest] > 2e-4
    return ((edges[widest] + edges[widest + 1]) / 2).item()


@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((2, 2, 150, 24), FP32),
        ((1, 3, 96, 64), FP32),
        ((2, 1, 33, 80), FP32),
        ((1, 2, 257, 64), BF16),
        ((1, 2, 128, 128), BF16),
        ((2, 1, 130, 80), BF16),
        ((2, 3, 50, 128), FP16),
        ((1, 1, 300, 64), FP16),
        ((1, 1, 25, 8), FP16),
        ((3, 1, 2, 24), FP32),
        ((1, 2, 1, 64), BF16),
    ],
)
def test_redundancy(shape, dtype, poisoned):
    keys = planted_keys(*shape, dtype)
    threshold = far_from_ties(keys, 0.5)
    copies = (cosines(keys) > threshold).sum(-1)
    if shape[2] > 30:
        assert (copies > 1).any() and (copies == 0).any()  # several copies, and none
    result = evict.redundancy(keys.to(DEVICE), threshold)
    assert result.dtype == FP32
    torch.testing.assert_close(result.cpu(), twins.redundancy(keys, threshold), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "threshold", [-2.0, -0.2, 0.9, 2.0]
)  # all are copies (a key of itself, too: cosine 0), ..., none is
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_redundancy_at_other_thresholds(threshold, dtype, poisoned):
    keys = planted_keys(1, 2, 150, 24, dtype)
    keys[:, :, 7] = 0.0  # has no direction
    keys[:, :, 9:20] *= 1e-13  # shorter than what a norm is taken for at least
    if abs(threshold) < 1:
        threshold = far_from_ties(keys, threshold)
    torch.testing.assert_close(
        evict.redundancy(keys.to(DEVICE), threshold).cpu(), twins.redundancy(keys, threshold), rtol=1e-5, atol=0
    )


def test_redundancy_finds_the_newest_of_copies_anywhere():
    """Seen in what the search itself writes, with copies 100 slots apart either way, 28 slots apart, and none."""
    used, dim = 200, 128
    keys = torch.eye(dim)[torch.arange(used) % 100].view(1, 1, used, dim)  # slots s and s + 100 are copies, s < 50
    keys[:, :, 150:] = torch.eye(dim)[100:].repeat(2, 1)[: used - 150]  # s and s + 28, 150 <= s < 172
    threshold = 0.5
    same = (keys[0, 0] @ keys[0, 0].T > threshold) & ~torch.eye(used, dtype=torch.bool)
    expected = torch.where(same, torch.arange(used), -1).amax(-1)
    assert (expected == -1).sum() == 56 and (expected > 177).sum() == 22
    for dtype in (FP32, BF16):
        newest = {}
        launch = evict._newest_copy

        class Spy:
            def __getitem__(self, grid, launch=launch, newest=newest):
                return lambda *args, **options: (
                    launch[grid](*args, **options),
                    newest.update(found=args[2], cosine=args[3]),
                )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(evict, "_newest_copy", Spy())
            evict.redundancy(keys.to(DEVICE, dtype), threshold)
        assert newest["found"].flatten().tolist() == expected.tolist()
        assert newest["cosine"].flatten().tolist() == pytest.approx((expected >= 0).float().tolist(), abs=1e-6)


@pytest.mark.parametrize(
    "rows, heads, group, used, dim, count, dtype, softcap",
    [
        (2, 2, 3, 75, 24, 8, FP32, None),
        (1, 2, 1, 32, 64, 5, FP32, 0.7),
        (1, 1, 4, 31, 80, 64, FP32, None),
        (1, 2, 7, 200, 128, 8, BF16, None),
        (2, 3, 2, 128, 64, 1, BF16, 2.0),
        (1, 1, 2, 129, 80, 33, FP16, None),
        (3, 1, 5, 1, 8, 8, FP16, 50.0),
    ],
)
def test_observed_logits(rows, heads, group, used, dim, count, dtype, softcap, poisoned):
    g = generator(rows, heads, group, used)
    keys = torch.randn(rows, heads, used, dim, generator=g).to(dtype)
    queries = torch.randn(rows, heads * group, count + 3, dim, generator=g).to(dtype)
    queries, scaling = queries[:, :, -count:], dim**-0.5
    expected = twins.observed_logits(queries, keys, scaling, softcap)
    result = evict.observed_logits(queries.to(DEVICE), keys.to(DEVICE), scaling, softcap)
    assert result.dtype == FP32
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-5, atol=1e-4)


def random_storage(layers, rows, heads, capacity, dims, dtype, mass, margin, g):
    """A cache's content by name. With a margin there are rows and slots beyond the cache: its tensors are views."""
    lead = (layers, rows + margin, heads, capacity + margin)
    storage = {
        "keys": (5 * torch.randn(*lead, dims[0], generator=g)).abs().to(dtype),
        "values": (5 * torch.randn(*lead, dims[1], generator=g)).abs().to(dtype),
        "feed": 3 * torch.arange(lead[-1], dtype=torch.int32) + torch.randint(3, lead, generator=g, dtype=torch.int32),
    }
    if dtype in KINDS:
        storage["exponents"] = torch.randint(-9, 9, (*lead, 2), generator=g, dtype=torch.int8)
    return storage | ({"mass": torch.rand(lead, generator=g)} if mass else {})


def cache_over(storage, margin):
    layers, rows, heads, capacity, key_dim = storage["keys"].shape
    shape = CacheShape(layers, heads, heads, key_dim, storage["values"].shape[-1], storage["keys"].dtype)
    cache = SlotCache(shape, rows - margin, capacity - margin, storage["keys"].device)
    for name, tensor in storage.items():
        holder = cache.stored[0]
        setattr(holder, name, tensor[:, margin:, :, : capacity - margin])
    return cache


def random_kept(shape, used, budget, choice, g):
    if choice == "first":
        return torch.arange(budget).expand(*shape, budget)
    if choice == "last":
        return torch.arange(used - budget, used).expand(*shape, budget)
    return torch.rand(*shape, used, generator=g).argsort(-1)[..., :budget].sort(-1).values


ALL = slice(0, 3)


@pytest.mark.parametrize("choice", ["first", "last", "random"])
@pytest.mark.parametrize(
    "capacity, used, budget, dims, dtype, mass, margin, layers",
    [
        (150, 150, 130, (128, 128), BF16, False, 0, ALL),
        (150, 140, 70, (24, 64), BF16, True, 2, slice(1, 3)),
        (65, 65, 64, (80, 80), FP32, True, 0, slice(1, 2)),
        (70, 66, 66, (64, 24), FP16, False, 1, ALL),
        (20, 9, 1, (64, 128), FP32, True, 3, slice(0, 3, 2)),
        (8, 1, 1, (24, 24), FP32, False, 0, ALL),
        (1100, 1090, 1000, (8, 16), FP16, True, 0, slice(2, 3)),  # several blocks of the trace, too
        (150, 140, 70, (64, 64), torch.uint8, True, 0, slice(1, 3)),  # codes, with exponents
        (600, 590, 550, (24, 24), torch.int8, False, 0, ALL),
    ],
)
@pytest.mark.parametrize("wide", [False, True], ids=["int16", "int32"])
def test_compact(capacity, used, budget, dims, dtype, mass, margin, layers, choice, wide):
    g = generator(capacity, used, budget, wide)
    num_layers, rows, heads, tokens = 3, 5, 2, 3 * (capacity + margin)
    storage = random_storage(num_layers, rows, heads, capacity, dims, dtype, mass, margin, g)
    expected, result = ({name: x.clone().to(to) for name, x in storage.items()} for to in ("cpu", DEVICE))
    chosen = torch.tensor([4, 0, 3, 1])
    live = torch.tensor([True, True, False, True])
    fed = torch.tensor([40_001, 70_000 if wide else 65_534, 40_003, 32_767])  # above int16's largest: uint16 bits
    never = torch.iinfo(torch.int32).max if wide else -1
    kept = random_kept((len(range(3)[layers]), len(chosen), heads), used, budget, choice, g)

    cache = cache_over(expected, margin)
    repeats = 2 if margin else 1  # of each head in the trace, as in layers with fewer heads than others
    whole = torch.randint(30_000, (rows, num_layers, heads * repeats, tokens), generator=g)
    whole = whole.to(torch.int32 if wide else torch.int16)
    trace = whole[:, :, ::repeats]
    trace.scatter_(3, cache.feed[..., :used].transpose(0, 1).long(), never)  # in use, so not evicted yet
    found = whole.clone().to(DEVICE)
    traced = found[:, :, ::repeats]
    slots = cache.keys, cache.values, cache.feed, cache.mass
    twins.compact(*slots, trace, layers, chosen, used, kept, fed, live, never, cache.stored[0].exponents)

    cache = cache_over(result, margin)
    slots = cache.keys, cache.values, cache.feed, cache.mass
    rest = (x.to(DEVICE) for x in (kept, fed, live))
    evict.compact(*slots, traced, layers, chosen.to(DEVICE), used, *rest, never, cache.stored[0].exponents)
    for name in storage:
        assert torch.equal(result[name].cpu(), expected[name]), name
    assert torch.equal(found.cpu(), whole)


@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """Row 0 and the last row of a tensor of more than 2**31 elements hold the same, and get the same."""
    rows, used, dim = 2**31 // (1024 * 128) + 8, 1024, 128
    row = planted_keys(1, 1, used, dim, BF16).cuda()
    keys = row.repeat(rows, 1, 1, 1)
    assert torch.equal(evict.redundancy(keys, 0.5)[-1], evict.redundancy(row, 0.5)[0])
    queries = torch.randn(1, 2, 8, dim, device="cuda", dtype=BF16)
    assert torch.equal(
        evict.observed_logits(queries.repeat(rows, 1, 1, 1), keys, 0.1)[-1], evict.observed_logits(queries, row, 0.1)[0]
    )
    feed = torch.arange(used, dtype=torch.int32, device="cuda").expand(1, rows, 1, used).contiguous()
    trace = torch.full((rows, 1, 1, used), -1, dtype=torch.int16, device="cuda")
    kept = random_kept((1, 2, 1), used, 512, "random", generator(0)).cuda()
    ends, live = torch.tensor([0, rows - 1], device="cuda"), torch.tensor([False, True], device="cuda")
    evict.compact(
        keys[None],
        keys[None],
        feed,
        None,
        trace,
        slice(0, 1),
        ends,
        used,
        kept,
        torch.tensor([9, 9], device="cuda"),
        live,
        -1,
    )
    assert torch.equal(keys[0, 0], row[0, 0])
    assert feed[0, -1, 0, :512].tolist() == kept[0, 1, 0].tolist()
    assert (trace[-1] == 9).sum() == 512 and (trace[:-1] == -1).all()
