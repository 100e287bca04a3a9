"""The trace as a record: its mask, its slices, its file."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_rl import NEVER, SparseRLError, Trace


def random_trace(layers=2, heads=2, tokens=12, seed=0) -> Trace:
    g = torch.Generator().manual_seed(seed)
    index = torch.arange(tokens)
    gone = index + 1 + torch.randint(0, tokens, (layers, heads, tokens), generator=g)  # after the token itself was a query
    return Trace(torch.where(gone < tokens, gone, NEVER).to(torch.uint16))


def test_visible_is_the_definition():
    trace = random_trace()
    mask = trace.visible()
    for layer in range(2):
        assert trace.visible(layer).equal(mask[layer])
        for head in range(2):
            for q in range(12):
                for k in range(12):
                    assert bool(mask[layer, head, q, k]) == (k <= q < int(trace.evicted_at[layer, head, k]))


@given(st.integers(0, 100), st.integers(0, 12), st.integers(0, 12))
def test_a_slice_sees_what_the_whole_sees(seed, a, b):
    start, stop = sorted((a, b))
    trace = random_trace(seed=seed)
    part = trace.slice(start, stop)
    assert part.num_tokens == stop - start
    assert part.visible().equal(trace.visible()[..., start:stop, start:stop])
    with pytest.raises(SparseRLError, match=r"tokens 0\.\.13 out of a trace of 12"):
        trace.slice(0, 13)


def test_slots_in_use_counts_what_the_last_query_sees():
    trace = random_trace()
    assert trace.slots_in_use().equal(trace.visible()[:, :, -1].sum(-1))
    assert Trace.dense(2, 3, 5).slots_in_use().eq(5).all()


def test_two_bytes_per_layer_head_and_token():
    trace = Trace.dense(28, 2, 4096)
    assert trace.nbytes == 2 * 28 * 2 * 4096
    dense_kv = 28 * 2 * 4096 * 2 * 128 * 2  # keys and values in bf16, head dim 128
    assert trace.nbytes / dense_kv == 1 / (2 * 128)


def test_long_traces_are_wide():
    assert Trace.dense(1, 1, 65534).evicted_at.dtype == torch.uint16
    wide = Trace.dense(1, 1, 65535)
    assert wide.evicted_at.dtype == torch.int32
    assert wide.slots_in_use().item() == 65535


def test_round_trip_through_a_file(tmp_path):
    for trace in (random_trace(), Trace(random_trace().evicted_at.to(torch.int32))):
        path = tmp_path / "t.safetensors"
        trace.save(path)
        loaded = Trace.load(path)
        assert loaded.evicted_at.equal(trace.evicted_at) and loaded.evicted_at.dtype == trace.evicted_at.dtype
        assert [p.name for p in tmp_path.iterdir()] == ["t.safetensors"]  # nothing partial is left


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "t.safetensors"
    random_trace().save(path)
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(SparseRLError, match="damaged"):
        Trace.load(path)
    from safetensors.torch import save_file

    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(SparseRLError, match="not a trace"):
        Trace.load(path)
