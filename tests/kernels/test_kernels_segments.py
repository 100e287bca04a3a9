"""Attention under a trace by segments, forward and backward, against the boolean mask in fp64.

The kernels run on a GPU where there is one, else in Triton's interpreter.
"""

import copy

import pytest
import torch
import transformers
from packaging.version import Version

pytest.importorskip("triton")

from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl import Engine, Sampling
from sparse_rl.beacon import fixed_chunk_ends, insert_beacons
from sparse_rl.cache.segments import Replay, find_segments, key_tiles, query_tiles
from sparse_rl.kernels import ops
from sparse_rl.kernels.flex import visible_blocks
from sparse_rl.kernels.layout import _list_kept, make_layout
from sparse_rl.kernels.segments import segment_attention
from sparse_rl.kernels.twins import attend, layer_mask
from sparse_rl.learn.batch import collate
from sparse_rl.learn.score import batch_logprobs, replay_of
from tests import survey
from tests.helpers.models import prompts_of, tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16  # the interpreter multiplies no bf16 matrices
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
NEVER = torch.iinfo(torch.int32).max


def trace(
    tokens: int,
    length: int,
    budget: int,
    interval: int,
    prompt: int = 1,
    layers: int = 2,
    heads: int = 2,
    seed: int = 0,
):
    """int32 [L, H, T]: random survivors at the moments an engine would evict at; padded with "never"."""
    generator = torch.Generator().manual_seed(seed)
    evicted_at = torch.full((layers, heads, tokens), NEVER, dtype=torch.int32)
    moment = max(prompt, budget + interval)
    while moment <= length:  # also after the last token
        for head in evicted_at.flatten(0, 1):
            alive = (head[:moment] == NEVER).nonzero()[:, 0]
            head[alive[torch.randperm(len(alive), generator=generator)[budget:]]] = moment
        moment += interval
    return evicted_at


def any_trace(tokens: int, length: int, seed: int, layers: int = 2, heads: int = 2):
    """Every head evicts when it likes: as irregular as a trace can be."""
    generator = torch.Generator().manual_seed(seed)
    life = 1 + (torch.rand(layers, heads, tokens, generator=generator) ** 3 * tokens).int()
    evicted_at = torch.arange(tokens, dtype=torch.int32) + life
    return torch.where(
        (evicted_at <= length) & (torch.arange(tokens) < length), evicted_at, NEVER
    )  # also after the last one


def micro_batch(kind: str, tokens: int = 70):
    lengths = torch.tensor([tokens, 40, 6])
    if kind == "irregular":
        tokens, lengths = 20, torch.tensor([20, 13, 4])
        rows = [any_trace(tokens, n, seed) for seed, n in enumerate(lengths.tolist())]
    else:
        budget, interval, prompt = {"even": (12, 8, 1), "odd": (9, 5, 30), "nothing evicted": (tokens, 1, 1)}[kind]
        rows = [trace(tokens, n, budget, interval, prompt, seed=seed) for seed, n in enumerate(lengths.tolist())]
    return torch.stack(rows).to(DEVICE), lengths.to(DEVICE)


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("kind", ["even", "odd", "nothing evicted", "irregular"])
@pytest.mark.parametrize(
    "dtype, group, dim, window, softcap",
    [
        (torch.float32, 2, 16, None, None),
        (HALF, 3, 24, None, None),
        (torch.float32, 1, 32, 17, None),
        (torch.float32, 2, 8, None, 3.0),
        (torch.float32, 2, 8, 25, 3.0),
        (HALF, 6, 64, None, None),
    ],
)
def test_equals_the_boolean_mask(kind, dtype, group, dim, window, softcap):
    slow_here = {"irregular": window is None or softcap is not None, "odd": dim == 64, "nothing evicted": dtype == HALF}
    if DEVICE == "cpu" and slow_here.get(kind):
        pytest.skip("slow in the interpreter, where other shapes show the same")
    evicted_at, lengths = micro_batch(kind)
    (rows, _, heads, tokens), layer, scaling = evicted_at.shape, 1, 0.3
    query = draw(rows, tokens, heads * group, dim, dtype=dtype).transpose(
        1, 2
    )  # as a model has them: heads inside tokens in memory
    key, value = (draw(rows, heads, tokens, dim, dtype=dtype, seed=seed) for seed in (1, 2))
    upstream = draw(rows, tokens, heads * group, dim, dtype=dtype, seed=3)
    real = torch.arange(tokens, device=DEVICE) < lengths[:, None]  # [B, T]
    upstream = upstream * real[:, :, None, None]  # nobody asks for padding

    mine = [x.detach().requires_grad_() for x in (query, key, value)]
    layout = make_layout(find_segments(evicted_at, lengths), evicted_at, dim, dtype)
    out = segment_attention(*mine, layout, layer, scaling, window, softcap)
    out.backward(upstream)

    theirs = [x.detach().double().requires_grad_() for x in (query, key, value)]
    expected = attend(*theirs, layer_mask(evicted_at[:, layer], window), scaling, softcap)
    expected.backward(upstream.double())

    assert error(out[real], expected[real]) < TOLERANCE[dtype]
    assert (out[~real] == 0).all()
    for name, a, b in zip(("query", "key", "value"), mine, theirs, strict=True):
        assert a.grad.dtype == dtype and a.grad.isfinite().all()
        assert error(a.grad, b.grad) < 2 * TOLERANCE[dtype], name


def test_a_layer_with_fewer_heads_than_the_trace_reads_every_other():
    """A trace repeats the heads of such a layer: one made of every other row gives the same."""
    evicted_at, lengths = micro_batch("even")
    rows, _, heads, tokens = evicted_at.shape
    query, key, value = (draw(rows, h, tokens, 16, seed=seed) for seed, h in enumerate((2 * heads, heads, heads)))
    found = []
    for of_trace in (evicted_at, evicted_at.repeat_interleave(2, 2)):
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        layout = make_layout(find_segments(of_trace, lengths), of_trace, 16, torch.float32)
        out = segment_attention(*inputs, layout, 1, 0.3, None, None)
        out.square().sum().backward()
        found.append([out.detach(), *(x.grad for x in inputs)])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("window, softcap", [(None, None), (25, None), (None, 3.0)])
def test_sinks_take_their_share_and_get_their_gradient(window, softcap):
    evicted_at, lengths = micro_batch("even")
    (rows, _, heads, tokens), group, dim, layer, scaling = evicted_at.shape, 2, 16, 1, 0.3
    query = draw(rows, heads * group, tokens, dim, dtype=torch.float32)
    key, value = (draw(rows, heads, tokens, dim, dtype=torch.float32, seed=seed) for seed in (1, 2))
    sinks = 2 * draw(heads * group, dtype=torch.float32, seed=5)
    upstream = draw(rows, tokens, heads * group, dim, dtype=torch.float32, seed=3)
    upstream = upstream * (torch.arange(tokens, device=DEVICE) < lengths[:, None])[:, :, None, None]

    mine = [x.detach().requires_grad_() for x in (query, key, value, sinks)]
    layout = make_layout(find_segments(evicted_at, lengths), evicted_at, dim, torch.float32)
    out = segment_attention(*mine[:3], layout, layer, scaling, window, softcap, mine[3])
    out.backward(upstream)

    theirs = [x.detach().double().requires_grad_() for x in (query, key, value, sinks)]
    mask = layer_mask(evicted_at[:, layer], window)
    expected = attend(*theirs[:3], mask, scaling, softcap, sinks=theirs[3])
    expected.backward(upstream.double())
    logits = theirs[0].unflatten(1, (heads, group)) @ theirs[1][:, :, None].transpose(-1, -2) * scaling
    logits = logits if softcap is None else torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~mask[:, :, None], -torch.inf).flatten(1, 2)  # by the definition, once more
    scale = (logits.logsumexp(-1) - theirs[3][:, None]).sigmoid()
    plain = attend(*theirs[:3], mask, scaling, softcap) * scale.transpose(1, 2)[..., None]
    real = torch.arange(tokens, device=DEVICE) < lengths[:, None]
    assert error(expected[real], plain[real]) < 1e-12
    assert error(out[real], expected[real]) < TOLERANCE[torch.float32]
    for name, a, b in zip(("query", "key", "value", "sinks"), mine, theirs, strict=True):
        assert error(a.grad, b.grad) < 2 * TOLERANCE[torch.float32], name


@pytest.mark.parametrize("innermost", [True, False])
def test_gradients_of_inputs_that_are_slices(innermost):
    """Queries, keys and values may be parts of one projection, with the head dim innermost in memory or not."""
    evicted_at, lengths = micro_batch("even")
    rows, _, heads, tokens = evicted_at.shape
    whole = (
        draw(rows, tokens, 3 * heads, 16) if innermost else draw(rows, tokens, 16, 3 * heads).transpose(2, 3)
    ).requires_grad_()
    query, key, value = whole.transpose(1, 2).split(heads, 1)
    layout = make_layout(find_segments(evicted_at, lengths), evicted_at, 16, torch.float32)
    upstream = (
        draw(rows, heads, tokens, 16, seed=3).transpose(1, 2)
        if innermost
        else draw(rows, tokens, 16, heads, seed=3).transpose(2, 3)
    )
    upstream = upstream * (torch.arange(tokens, device=DEVICE) < lengths[:, None])[:, :, None, None]
    assert innermost == (upstream.stride(-1) == 1) == (query.stride(-1) == 1)
    segment_attention(query, key, value, layout, 0, 0.25, None, None).backward(upstream)
    again = whole.detach().double().requires_grad_()
    attend(*again.transpose(1, 2).split(heads, 1), layer_mask(evicted_at[:, 0], None), 0.25).backward(upstream.double())
    assert error(whole.grad, again.grad) < 4e-5


def test_lists_of_long_rows():
    """What each segment keeps, over several blocks of the kernel that lists it."""
    tokens = 2600
    evicted_at = torch.stack([trace(tokens, n, 300, 200, layers=1, seed=n) for n in (tokens, 1700)]).to(DEVICE)
    segments = find_segments(evicted_at, torch.tensor([tokens, 1700], device=DEVICE))
    layout = make_layout(segments, evicted_at, 16, torch.float32)
    assert segments.most_kept == 300 and segments.begins.shape[1] == 12
    for b in range(2):
        for s, begin in enumerate(segments.begins[b].tolist()):
            for head in range(2):
                kept = (evicted_at[b, 0, head, :begin] > begin).nonzero()[:, 0]
                count = int(segments.counts[b, 0, head, s])
                assert begin == segments.lengths[b] or layout.kept[b, 0, head, s, :count].tolist() == kept.tolist()


def test_a_second_derivative_is_refused():
    evicted_at, lengths = micro_batch("irregular")
    query, key, value = (draw(3, 2, 20, 16, seed=seed).requires_grad_() for seed in range(3))
    layout = make_layout(find_segments(evicted_at, lengths), evicted_at, 16, torch.float32)
    out = segment_attention(query, key, value, layout, 0, 0.25, None, None)
    (gradient,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (gradient.square().sum() + query.sum()).backward()


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu/test_gpu_shadow.py does it on the device")
@pytest.mark.parametrize("name", ["gemma2", "minicpm3", "mimo_v2_flash"])  # the others on a GPU
def test_through_a_model(name, monkeypatch):
    """Log-probs and gradients of a model by segments equal those under the mask: with windows and soft-caps, with
    latents, and with values narrower than keys, in layers that differ.
    """
    if name != "gemma2" and Version(transformers.__version__) < Version("5.22"):
        pytest.skip("older versions name its settings otherwise")
    monkeypatch.setitem(survey.OWN, "mimo_v2_flash", {"v_head_dim": 6})
    model = copy.deepcopy(tiny(name) if name == "gemma2" else survey.tiny_model(name))
    done = Engine(model, budget=10, interval=6, rows=2).generate(prompts_of(4, 20), sampling=Sampling(16))
    tokens = collate(done)
    found = []
    for way in (True, False):
        monkeypatch.setattr(ops, "place_of", lambda _, way=way: ops.Place("cuda" if way else "cpu", triton=True))
        replay = replay_of(model, [(t.tokens, t.trace) for t in done])
        model.zero_grad()
        logprobs = batch_logprobs(model, tokens.tokens, tokens.mask, 1.0, replay)
        logprobs.sum().backward()
        assert bool(replay.layouts) == way  # the kernels were used, or were not
        found.append(
            (logprobs.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
        )
    assert (found[0][0] - found[1][0]).abs().max() < 1e-4 and error(found[0][1], found[1][1]) < 1e-4


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 60), st.integers(0, 10_000))
def test_segments_say_what_each_query_sees(tokens, seed):
    """A query sees the tokens kept at its segment's begin, and the segment's own; tiles cover everything once."""
    lengths = torch.randint(1, tokens + 1, (3,), generator=torch.Generator().manual_seed(seed))
    lengths[0] = tokens
    evicted_at = torch.stack([any_trace(tokens, n, seed + i) for i, n in enumerate(lengths.tolist())])
    segments = find_segments(evicted_at, lengths)
    mask = (torch.arange(tokens)[None, :] <= torch.arange(tokens)[:, None]) & (
        torch.arange(tokens)[:, None] < evicted_at[..., None, :]
    )
    for b, length in enumerate(lengths.tolist()):
        begins = segments.begins[b].tolist()
        assert begins[0] == 0 and begins == sorted(begins) and begins[-1] <= length
        for s, (begin, end) in enumerate(zip(begins, [*begins[1:], length], strict=True)):
            kept = (torch.arange(tokens) < begin) & (evicted_at[b] > begin)  # [L, H, T]
            for q in range(begin, end):
                own = (torch.arange(tokens) >= begin) & (torch.arange(tokens) <= q)
                assert torch.equal(mask[b, :, :, q], kept | own)
            assert begin == length or torch.equal(segments.counts[b, :, :, s], kept.sum(-1).int())
    for size in (1, 4, 16):
        tiles, listed = query_tiles(segments, size), key_tiles(segments, size)
        for b, length in enumerate(lengths.tolist()):
            covered = [
                q for first, end, _, _ in tiles[b].tolist() if first >= 0 for q in range(first, min(first + size, end))
            ]
            assert covered == list(range(length))
            for _, end, begin, s in listed[b].tolist():
                starts = [row[0] for row in listed[b].tolist() if row[3] == s and s >= 0]
                assert s < 0 or (
                    starts == list(range(0, starts[-1] + 1, size))
                    and starts[-1] + size >= segments.counts[b, ..., s].max() + end - begin
                )


@settings(max_examples=25, deadline=None)
@given(st.integers(100, 700), st.integers(0, 10_000), st.sampled_from([None, 1, 127, 128, 129, 255, 256, 257, 384]))
def test_blocks_of_the_fallback_hold_what_is_visible(tokens, seed, window):
    """`some` holds every block in which something is visible, `whole` none in which something is not."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(1, 6, (1, 2, -(-tokens // 128)), generator=generator) * 128 + torch.randint(
        -1, 2, (1, 2, 1), generator=generator
    )
    evicted_at = edges.repeat_interleave(128, -1)[
        ..., :tokens
    ].int()  # whole blocks leave together, at or beside the edges of others
    lonely = torch.rand(1, 2, tokens, generator=generator) < 0.005
    evicted_at = torch.where(lonely, NEVER, evicted_at).maximum(torch.arange(1, tokens + 1, dtype=torch.int32))
    some, whole = visible_blocks(evicted_at, window)
    mask = layer_mask(evicted_at, window)[0]  # [H, T, T]
    short = -tokens % 128
    blocks = (
        torch.nn.functional.pad(mask, (0, short, 0, short)).unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))
    )  # [H, Q, 128, K, 128]
    below = torch.ones(blocks.shape[1], blocks.shape[3], dtype=torch.bool).tril(-1)
    anything, everything = blocks.any(-1).any(-2), blocks.all(-1).all(-2) & below
    assert not (anything & ~some[0]).any()
    assert torch.equal(whole[0], everything)
    if window is None:  # then nothing is listed in vain, below the diagonal
        assert torch.equal(some[0] & below, anything & below)


def test_many_segments_are_told_apart():
    """Kept tokens are listed where the lists stay small, not where every token is an event."""
    few = trace(4096, 4096, 512, 128, layers=1, heads=2)[None]
    assert find_segments(few, torch.tensor([4096])).are_few
    chunks = (
        torch.arange(1, 4097, dtype=torch.int32).expand(1, 1, 2, -1).clone()
    )  # every other token goes at once, the rest stays: beacons
    chunks[..., ::2] = NEVER
    assert not find_segments(chunks, torch.tensor([4096])).are_few
    for interval, few in ((8, True), (6, False)):  # 512 kept at every eighth token are 64 a token; more is too much
        assert (
            find_segments(trace(4096, 4096, 512, interval, layers=1, heads=2)[None], torch.tensor([4096])).are_few
            == few
        )
    assert find_segments(
        trace(4096, 4096, 512, 6, layers=1, heads=1)[None], torch.tensor([4096])
    ).are_few  # one list for all


@pytest.mark.parametrize("chunk", [4, 9])
def test_layers_and_heads_may_share_their_lists(chunk):
    """As beacons do: what one head sees, all see."""
    prompts, lengths, group, dim = torch.tensor([6, 20]), torch.tensor([50, 33]), 2, 16
    laid = insert_beacons(
        torch.zeros(2, 50, dtype=torch.int64),
        prompts,
        lengths,
        fixed_chunk_ends(chunk, prompts, lengths, 50),
        99,
        NEVER,
    )
    shared, fed = laid.evicted_at.to(DEVICE, torch.int32)[:, None, None], laid.lengths.to(DEVICE)
    tokens, heads = shared.shape[-1], 3
    query, key, value = (draw(2, h, tokens, dim, seed=seed) for seed, h in enumerate((heads * group, heads, heads)))
    upstream = (
        draw(2, tokens, heads * group, dim, seed=3)
        * (torch.arange(tokens, device=DEVICE) < fed[:, None])[:, :, None, None]
    )
    found = []
    for evicted_at in (shared, shared.expand(-1, 4, heads, -1)):
        mine = [x.detach().requires_grad_() for x in (query, key, value)]
        layout = make_layout(find_segments(evicted_at, fed), evicted_at, dim, torch.float32)
        assert layout.kept.shape[1:3] == evicted_at.shape[1:3]
        out = segment_attention(*mine, layout, 3, 0.3, None, None)
        out.backward(upstream)
        found.append([out.detach(), *(x.grad for x in mine)])
    replay = Replay(shared, fed)
    theirs = [x.detach().double().requires_grad_() for x in (query, key, value)]
    attend(*theirs, layer_mask(replay.of_layer(3, heads), None), 0.3, None).backward(upstream.double())
    for ours, expected in zip(found[0], found[1], strict=True):
        assert error(ours, expected) < 1e-6
    for ours, expected in zip(found[0][1:], theirs, strict=True):
        assert error(ours, expected.grad) < TOLERANCE[torch.float32]


def test_rows_with_fewer_segments_write_no_list_beyond_their_own():
    """A short row beside a long one: at its end it sees more than any segment keeps, and nobody lists that."""
    long, short = trace(96, 96, 8, 24, layers=1, heads=1), trace(96, 31, 8, 24, layers=1, heads=1)
    evicted_at, lengths = torch.stack([long, short]).to(DEVICE), torch.tensor([96, 31], device=DEVICE)
    segments = find_segments(evicted_at, lengths)
    count, most = segments.begins.shape[1], segments.most_kept
    assert int((evicted_at[1, 0, 0, :31] > 31).sum()) > most
    buffer = torch.full((2 * count * most + 64,), -7, dtype=torch.int32, device=DEVICE)
    _list_kept[(2 * count,)](evicted_at, segments.begins.contiguous(), buffer, 1, 96, count, most, BLOCK=64)
    kept, beyond = buffer[: 2 * count * most].view(2, count, most), buffer[2 * count * most :]
    assert (beyond == -7).all()
    for s, (begin, n) in enumerate(zip(segments.begins[0].tolist(), segments.counts[0, 0, 0].tolist(), strict=True)):
        assert kept[0, s, :n].tolist() == (evicted_at[0, 0, 0, :begin] > begin).nonzero()[:, 0].tolist()
