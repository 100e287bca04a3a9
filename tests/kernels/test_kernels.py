"""Every kernel of the decode step against its torch twin: on a GPU where there is one, else in Triton's interpreter."""

import copy

import pytest
import torch

pytest.importorskip("triton")

from sparse_rl.cache import LayerSlots
from sparse_rl.cache.formats import CODES, dequantize, quantize
from sparse_rl.kernels import decode, twins
from sparse_rl.kernels.sample import sample_and_record, sample_by_row
from sparse_rl.kernels.twins_sample import Kept, RowSettings
from sparse_rl.rollout.decode import RowState

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bf16 matrices
CAPACITY = 10
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel allocates holds NaN until it is written."""
    empty = torch.empty

    def poison(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-1)

    monkeypatch.setattr(torch, "empty", poison)
    monkeypatch.setattr(torch, "empty_like", lambda x, **kwargs: poison(x.shape, dtype=x.dtype, device=x.device))


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def close(actual, expected, dtype):
    error = (actual.double() - expected.double()).norm() / expected.double().norm()
    assert error <= TOLERANCE[dtype], error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, size", [(1, 16), (3, 96), (5, 1536), (2, 3000)])
def test_add_rms_norm(rows, size, dtype):
    new, residual, weight = (
        draw(rows, size, dtype=dtype),
        draw(rows, size, dtype=dtype, seed=1),
        draw(size, dtype=dtype),
    )
    for given in (None, new):
        mine, theirs = residual.clone(), residual.clone()
        close(decode.add_rms_norm(given, mine, weight, 1e-6), twins.add_rms_norm(given, theirs, weight, 1e-6), dtype)
        close(mine, theirs, dtype)
        if DEVICE == "cuda" or dtype == torch.float32:  # the interpreter cuts bf16 off instead of rounding
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows, size", [(1, 16), (3, 1025), (4, 2816)])
def test_silu_mul(rows, size, dtype):
    gate_up = draw(rows, 2 * size, dtype=dtype) * 3
    close(decode.silu_mul(gate_up), twins.silu_mul(gate_up), dtype)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_add_rms_norm_of_a_sum_in_parts(parts):
    new, residual, weight = (
        draw(parts, 3, 96),
        draw(3, 96, dtype=torch.bfloat16, seed=1),
        draw(96, dtype=torch.bfloat16),
    )
    mine, theirs = residual.clone(), residual.clone()
    close(decode.add_rms_norm(new, mine, weight, 1e-6), twins.add_rms_norm(new, theirs, weight, 1e-6), torch.bfloat16)
    close(mine, theirs, torch.bfloat16)


def token_and_cache(query_heads, heads, dim, ring, capacity, dtype):
    """(new token, cache) of 7 rows in 9: one is empty, one is full and waits, one has ended. Unused slots hold NaN."""
    rows, total = 7, 9
    used = torch.tensor([0, capacity - 1, capacity // 2, capacity, 1, capacity // 3, 2], device=DEVICE)
    index = used * 3 + torch.tensor([0, 1, 40, 3, 2, 70, 1], device=DEVICE)
    live = torch.tensor([True, True, True, False, True, True, False], device=DEVICE)
    qkv = draw(
        rows, query_heads + 2 * heads, dim, dtype=dtype
    )  # heads of one buffer, as the joint projection leaves them
    keys, values = (draw(total, heads, capacity, dim, dtype=dtype, seed=s) for s in (5, 6))
    for row, length in enumerate(used.tolist()):
        keys[row, :, length:] = values[row, :, length:] = float("nan")
    feed = (torch.arange(capacity, dtype=torch.int32, device=DEVICE) * 3).expand(total, heads, -1).contiguous()
    queries = draw(total, query_heads, ring, dim, dtype=dtype, seed=7) if ring else None
    return qkv.split([query_heads, heads, heads], 1), LayerSlots(keys, values, feed, queries), (used, index, live)


@pytest.mark.parametrize("dtype, splits", [(torch.float32, None), (torch.float32, 1), (torch.float32, 3), (HALF, None)])
@pytest.mark.parametrize("rope, norms", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    "heads, group, dim, ring, capacity",
    [(2, 2, 16, 3, 70), (2, 6, 128, 8, 65), (1, 7, 64, 0, 33), (3, 1, 24, 1, 100), (1, 20, 80, 5, 64)],
)
def test_store_and_attend(heads, group, dim, ring, capacity, rope, norms, splits, dtype):
    turn = tuple(draw(7, dim, dtype=dtype, seed=s) for s in (1, 2)) if rope else None
    weights = (draw(dim, dtype=dtype, seed=3), draw(dim, dtype=dtype, seed=4), 1e-6) if norms else None
    sinks = draw(heads * group, dtype=dtype, seed=9)
    ways = ((None, None, None), (2.0, None, None), (None, 20, sinks))
    for softcap, window, sink in ways if splits is None else ((None, None, None), (None, None, sinks)):
        token, cache, row = token_and_cache(heads * group, heads, dim, ring, capacity, dtype)
        mine = LayerSlots(*[None if x is None else x.clone() for x in cache])
        actual = decode.store_and_attend(
            *token, mine, *row, 0.3, turn, weights, softcap, window, sink, splits=splits, block=32
        )
        live = row[2]
        theirs = LayerSlots(*[None if x is None else x.clone() for x in cache])
        twins.store(*token, theirs, *row, turn, weights)
        clean = LayerSlots(*[None if x is None else x.nan_to_num() for x in cache])
        expected = twins.store_and_attend(*token, clean, *row, 0.3, turn, weights, softcap, window, sink)
        close(actual[live], expected[live], dtype)
        assert actual.isfinite().all()
        for a, b, before in zip(mine, theirs, cache, strict=True):
            if a is not None:
                close(a.nan_to_num(), b.nan_to_num(), dtype)
                assert norms or torch.equal(a.nan_to_num(), b.nan_to_num())  # a rotation rounds as the twin's
                assert torch.equal(a.isnan(), b.isnan())
                assert torch.equal(
                    a[[3, 6, 7, 8]].nan_to_num(), before[[3, 6, 7, 8]].nan_to_num()
                )  # rows that do not run, and beyond
                assert not torch.equal(a[2].nan_to_num(), before[2].nan_to_num())


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize("dtype, splits", [(torch.float32, None), (torch.float32, 3), (HALF, 1), (torch.bfloat16, 1)])
@pytest.mark.parametrize(
    "heads, group, dim, ring, capacity", [(2, 6, 128, 8, 65), (3, 1, 24, 1, 100), (1, 7, 64, 0, 33)]
)
def test_store_and_attend_over_codes(heads, group, dim, ring, capacity, splits, dtype, kind):
    """Of 8 bits, with a scale per slot and KV head. Unused slots hold NaN here, too."""
    if (kind, dtype, DEVICE) == ("int8", torch.bfloat16, "cpu"):
        pytest.skip("the interpreter multiplies no bf16 matrices; e4m3 is multiplied in fp16")
    turn, weights = tuple(draw(7, dim, dtype=dtype, seed=s) for s in (1, 2)), None
    if (dtype, DEVICE) == (torch.bfloat16, "cpu"):
        turn = None  # the interpreter cuts bf16 off where it should round
    elif group == 6:
        weights = draw(dim, dtype=dtype, seed=3), draw(dim, dtype=dtype, seed=4), 1e-6
    token, plain, row = token_and_cache(heads * group, heads, dim, ring, capacity, dtype)
    token[1][1] *= 1e-3  # of other sizes
    token[2][2, :, 0] = 300.0
    (keys, key_exponents), (values, value_exponents) = (quantize(x, kind) for x in plain[:2])
    assert (key_exponents == -128).any()
    cache = LayerSlots(keys, values, *plain[2:4], torch.stack([key_exponents, value_exponents], -1))
    mine = LayerSlots(*[None if x is None else x.clone() for x in cache])
    actual = decode.store_and_attend(*token, mine, *row, 0.3, turn, weights, splits=splits, block=32)
    theirs = LayerSlots(*[None if x is None else x.clone() for x in cache])
    twins.store(*token, theirs, *row, turn, weights)
    expected = twins.store_and_attend(*token, zeroed(cache), *row, 0.3, turn, weights)
    close(actual[row[2]], expected[row[2]], dtype)
    assert actual.isfinite().all()
    assert torch.equal(mine.values, theirs.values) and torch.equal(mine.exponents, theirs.exponents)
    steps = (in_order(mine.keys) - in_order(theirs.keys)).abs()
    if weights is None:
        assert not steps.any()
    else:  # a norm's sum has another order: a few new keys ended on the other side of the middle between two codes
        used, _, live = row
        new = live.nonzero()[:, 0]
        assert steps.max() <= 1 and steps[new, :, used[new]].float().mean() < 0.01
    for a, before in zip(mine, cache, strict=True):
        if a is not None:
            assert torch.equal(a[[3, 6, 7, 8]].nan_to_num(), before[[3, 6, 7, 8]].nan_to_num())


def zeroed(cache: LayerSlots) -> LayerSlots:
    """The same where unused slots hold zeros, because the twin multiplies them with zero."""
    assert cache.exponents is not None
    unused = cache.exponents == -128  # [R, H, C, 2]
    keys, values = (x.masked_fill(unused[..., i, None], 0) for i, x in enumerate(cache[:2]))
    return LayerSlots(keys, values, *cache[2:4], cache.exponents.masked_fill(unused, 0))


def in_order(codes: torch.Tensor) -> torch.Tensor:
    """Codes as whole numbers in the order of what they stand for, one apart where no code lies between."""
    if codes.dtype == torch.int8:
        return codes.int()
    size = (codes & 0x7F).int()  # e4m3: a sign, then bits in the order of magnitudes
    return torch.where(codes > 0x7F, -size, size)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_a_new_token_is_rounded_as_the_reference_does(kind):
    """Vectors of every size, on the borders between two codes and two exponents, and not finite: to the bit."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 16, generator=generator) * torch.logspace(-6, 4, 24)[:, None]
    x[10] = torch.arange(16) * 2.0**-10 + 1.0  # ties, in e4m3 below its normal numbers
    x[11] = (torch.arange(16) + 0.5) * 127 / 15.5
    x[12, 0], x[13, 0], x[14, 0] = 448.0, 449.0, 448.0 * 2.0**-20
    x[15], x[16, 3], x[17, 4] = 0.0, float("nan"), float("inf")
    x[18:22, 1:] *= 2.0**-13  # one number that is far larger
    x = x.to(DEVICE)
    rows = len(x)
    codes, exponents = (
        torch.zeros(rows, 1, 2, 16, dtype=CODES[kind].dtype),
        torch.zeros(rows, 1, 2, 2, dtype=torch.int8),
    )
    slots = LayerSlots(codes, codes.clone(), torch.zeros(rows, 1, 2, dtype=torch.int32), None, exponents)
    slots = LayerSlots(*[None if t is None else t.to(DEVICE) for t in slots])
    zero, live = torch.zeros(rows, dtype=torch.int64, device=DEVICE), torch.ones(rows, dtype=torch.bool, device=DEVICE)
    out = decode.store_and_attend(x[:, None], x[:, None], -x[:, None], slots, zero, zero, live, 0.1)
    expected_codes, expected = quantize(x, kind)
    finite = expected != -128
    assert finite.sum() == rows - 2
    for i, (stored, sign) in enumerate(((slots.keys, 1), (slots.values, -1))):
        assert torch.equal(slots.exponents[:, 0, 0, i], expected)
        read = dequantize(stored[:, 0, 0], slots.exponents[:, 0, 0, i], torch.float32)
        assert torch.equal(read[finite], sign * dequantize(expected_codes, expected, torch.float32)[finite])
        assert read[~finite].isnan().all()
    assert torch.equal(out[finite], -dequantize(expected_codes, expected, torch.float32)[finite])  # it sees itself
    assert out[~finite].isnan().all()


def state_of(rows: int, new: int, seed: int = 0) -> RowState:
    """Rows in all conditions: fresh, running, about to reach the limit, done, full."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, new, (rows,), generator=generator)
    stream = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    used = torch.randint(0, 11, (rows,), generator=generator)
    done = torch.rand(rows, generator=generator) < 0.2
    fields = [
        torch.zeros(rows).long(),
        counts + 3,
        used,
        stream,
        counts,
        done,
        torch.zeros(rows, new).long(),
        torch.zeros(rows, new),
    ]
    return RowState(
        *[f.to(DEVICE) for f in fields],
        torch.zeros(1, device=DEVICE),
        torch.full((rows,), new - 1, device=DEVICE),
        torch.tensor([CAPACITY], device=DEVICE),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("vocabulary", [61, 4096, 9000])
def test_sampling_and_its_bookkeeping(vocabulary, temperature, dtype):
    rows, new = 40, 9
    logits = draw(rows, vocabulary, dtype=dtype) * 4
    logits[0, : vocabulary - 1] = -torch.inf  # all mass on the last token
    logits[1, 1:] = -torch.inf
    stop_ids = torch.tensor([3, 7, vocabulary - 1], device=DEVICE)
    mine, theirs = state_of(rows + 2, new), state_of(rows + 2, new)
    sample_and_record(logits, mine, temperature, stop_ids)
    twins.sample_and_record(logits, theirs, temperature, stop_ids)
    for name in ("token", "index", "used", "count", "done", "tokens"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    torch.testing.assert_close(mine.logprobs, theirs.logprobs, atol=2e-5, rtol=1e-5)
    assert mine.done[:rows].sum() > state_of(rows + 2, new).done[:rows].sum()  # some stopped


@pytest.mark.parametrize("dtype, vocabulary, recorded", [(torch.float32, 300, True), (torch.bfloat16, 1500, False)])
def test_rows_with_settings_of_their_own(dtype, vocabulary, recorded):
    """Every row as if all rows had its settings."""
    rows, new = 24, 9
    logits = draw(rows, vocabulary, dtype=dtype) * 4
    ways = [(0.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.8), (1.0, 40, 0.5), (2.0, vocabulary + 1, 1.0)]
    stops = [[3], [3, 7], list(range(30)), [], [vocabulary - 1], [1]]
    mine = state_of(rows, new)
    mine.settings = RowSettings.empty(rows, 32, torch.device(DEVICE))
    room = min(512, vocabulary)
    if recorded:
        mine.kept = Kept.empty(rows, new, room, torch.device(DEVICE))
    for row in range(rows):
        temperature, top_k, top_p = ways[row % 6]
        own = mine.settings
        own.temperature[row], own.top_k[row], own.top_p[row] = temperature, top_k, top_p
        own.records[row] = recorded and temperature > 0 and bool(top_k or top_p < 1)
        own.stop_ids[row, : len(stops[row % 6])] = torch.tensor(stops[row % 6], device=DEVICE)
    both = copy.deepcopy(mine)
    twins.sample_by_row(logits, both)
    sample_by_row(logits, mine)
    for way, (temperature, top_k, top_p) in enumerate(ways):
        theirs = state_of(rows, new)
        records = recorded and temperature > 0 and bool(top_k or top_p < 1)
        theirs.kept = Kept.empty(rows, new, room, torch.device(DEVICE)) if recorded else None
        ids = torch.tensor(stops[way], device=DEVICE, dtype=torch.int64)
        sample_and_record(logits, theirs, temperature, ids, top_k, top_p, records)
        some = torch.arange(way, rows, 6, device=DEVICE)
        for found in (mine, both):
            for name in ("token", "index", "used", "count", "done", "tokens"):
                assert torch.equal(getattr(found, name)[some], getattr(theirs, name)[some]), (name, way)
            torch.testing.assert_close(found.logprobs[some], theirs.logprobs[some], atol=2e-5, rtol=1e-5)
            if records and found.kept is not None and theirs.kept is not None:
                assert found.kept.count[some].equal(theirs.kept.count[some])
                assert found.kept.ids[some].equal(theirs.kept.ids[some])


@pytest.mark.parametrize(
    "dtype, temperature, vocabulary",
    [(torch.float32, 0.7, 1100), (torch.bfloat16, 1.0, 4200), (torch.float16, 2.0, 61)],
)
@pytest.mark.parametrize("limits", [dict(top_p=0.9), dict(top_p=1e-46), dict(top_k=7), dict(top_k=40, top_p=0.6)])
def test_sampling_of_the_likeliest_alone(vocabulary, limits, temperature, dtype):
    """Against the twin, which sorts. Numbers of bfloat16 are often tied; of each row another token is drawn."""
    rows, new = 12, 9
    logits = draw(rows, vocabulary, dtype=dtype) * 4
    logits[0, 1:] = -torch.inf
    logits[1] = 0.0  # all tied, and of two signs
    logits[1, ::2] = -0.0
    logits[2] -= 100
    logits[3, 5] = 60.0
    none = torch.tensor([], dtype=torch.int64, device=DEVICE)
    mine, theirs = state_of(rows, new), state_of(rows, new)
    sample_and_record(logits, mine, temperature, none, **limits)
    twins.sample_and_record(logits, theirs, temperature, none, **limits)
    assert torch.equal(mine.tokens, theirs.tokens) and torch.equal(mine.done, theirs.done)
    torch.testing.assert_close(mine.logprobs, theirs.logprobs, atol=2e-5, rtol=1e-5)
    assert mine.count.sum() > state_of(rows, new).count.sum()


@pytest.mark.parametrize("room", [0, 512])
@pytest.mark.parametrize("dtype, vocabulary", [(torch.float32, 61), (torch.float32, 1501), (torch.bfloat16, 4200)])
@pytest.mark.parametrize("limits", [dict(top_p=0.9), dict(top_p=1e-46), dict(top_k=1), dict(top_k=40, top_p=0.6)])
def test_what_could_be_drawn_is_recorded(vocabulary, limits, dtype, room):
    """Against the twin: how many, the margin, which ones; rows that do not run keep what they had."""
    rows, new = 12, 9
    logits = draw(rows, vocabulary, dtype=dtype) * 4
    logits[0, 1:] = -torch.inf
    logits[1, ::2] = -0.0
    logits[1, 1::2] = 0.0  # all tied: more than may be recorded
    logits[2] = 0.01 * logits[2]  # flat: the cap leaves the likeliest 512
    logits[3, 5] = 60.0
    logits[4, 100:] = 3.0  # 512 can only be had by dividing tied ones
    none = torch.tensor([], dtype=torch.int64, device=DEVICE)
    mine, theirs = state_of(rows, new), state_of(rows, new)
    for state in (mine, theirs):
        state.kept = Kept.empty(rows, new, room, torch.device(DEVICE))
        for tensor in state.kept.tensors:
            tensor.fill_(7)
    before = mine.count.clone()
    sample_and_record(logits, mine, 0.8, none, **limits, records=True)
    twins.sample_and_record(logits, theirs, 0.8, none, **limits, records=True)
    assert torch.equal(mine.tokens, theirs.tokens) and torch.equal(mine.done, theirs.done)
    torch.testing.assert_close(mine.logprobs, theirs.logprobs, atol=2e-5, rtol=1e-5)
    assert torch.equal(mine.kept.count, theirs.kept.count) and torch.equal(mine.kept.ids, theirs.kept.ids)
    torch.testing.assert_close(mine.kept.margin, theirs.kept.margin)
    ran = (mine.count > before).nonzero()[:, 0]
    assert 0 < len(ran) < rows
    for row in ran.tolist():
        place = int(before[row])
        count, margin = int(mine.kept.count[row, place]), mine.kept.margin[row, place]
        wide = logits[row].float()
        kept = (wide >= wide.max() - margin) & (wide > -torch.inf)  # as the learner finds them
        assert int(kept.sum()) == count <= (512 if row != 1 else vocabulary) and kept[mine.tokens[row, place]]
        if room:
            listed = mine.kept.ids[row, place]
            assert torch.equal(listed[: min(count, room)].long().cpu(), kept.nonzero()[:room, 0].cpu())
            assert listed[count:].eq(-1).all()


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
@pytest.mark.parametrize("whole_row", [False, True])
@pytest.mark.parametrize("limits", [{}, dict(top_k=50, top_p=0.9)])
def test_logits_that_are_not_finite_end_the_row(bad, temperature, whole_row, limits):
    if whole_row and bad != bad and temperature == 0 and DEVICE == "cpu":
        pytest.skip("the interpreter refuses the argmax of nothing but NaN")
    state = state_of(4, 9)
    state.done[:], state.used[:], state.count[:] = False, 0, 2
    logits = draw(4, 4500)
    logits[2, 4321] = bad
    if whole_row:
        logits[2] = bad
    sample_and_record(logits, state, temperature, torch.tensor([], dtype=torch.int64, device=DEVICE), **limits)
    assert state.logprobs[:, 2].isfinite().tolist() == [True, True, False, True]
    assert state.done.tolist() == [False, False, True, False]


def test_samples_follow_the_distribution():
    """Over many streams the share of each token is its probability."""
    rows, vocabulary = 150, 12
    state = state_of(rows, 3)
    state.done[:], state.used[:], state.count[:] = False, 0, 0
    logits = draw(1, vocabulary).expand(rows, -1).contiguous()
    sample_and_record(logits, state, 1.0, torch.tensor([], dtype=torch.int64, device=DEVICE))
    share = torch.bincount(state.token.cpu(), minlength=vocabulary) / rows
    expected = logits[0].softmax(-1).cpu()
    assert ((share - expected).abs() <= 5 * (expected * (1 - expected) / rows).sqrt() + 1e-3).all()
