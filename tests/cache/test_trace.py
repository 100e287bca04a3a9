"""The trace as a record: its mask, its slices, its file."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from sparse_rl import NEVER, Engine, Sampling, SparseRLError, Trace
from sparse_rl.records import TrajectoryWriter, read_trajectories
from tests.helpers.models import prompts_of


def random_trace(layers=2, heads=2, tokens=12, seed=0) -> Trace:
    g = torch.Generator().manual_seed(seed)
    index = torch.arange(tokens)
    gone = (
        index + 1 + torch.randint(0, tokens, (layers, heads, tokens), generator=g)
    )  # after the token itself was a query
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


@st.composite
def traces(draw) -> Trace:
    """Any trace: of no or few tokens, dense, evicted at a few moments or at any, in either width."""
    layers, heads, tokens = draw(st.integers(0, 3)), draw(st.integers(0, 3)), draw(st.integers(0, 400))
    moments = draw(st.integers(0, 400))
    g = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    when = torch.randint(0, tokens + 1, (moments + 1,), generator=g)[
        torch.randint(0, moments + 1, (layers, heads, tokens), generator=g)
    ]
    never = NEVER if draw(st.booleans()) else torch.iinfo(torch.int32).max
    gone = torch.where(when > torch.arange(tokens), when, never)
    return Trace(gone.to(torch.uint16 if never == NEVER and draw(st.booleans()) else torch.int32))


def assert_comes_back(trace: Trace, folder) -> int:
    """-> bytes of the file"""
    path = folder / "t.safetensors"
    trace.save(path)
    loaded = Trace.load(path).evicted_at
    assert (
        loaded.dtype == trace.evicted_at.dtype
        and loaded.shape == trace.evicted_at.shape
        and loaded.equal(trace.evicted_at)
    )
    assert [p.name for p in folder.iterdir()] == ["t.safetensors"]  # nothing partial is left
    return path.stat().st_size


@given(traces())
def test_round_trip_through_a_file(tmp_path_factory, trace):
    assert_comes_back(trace, tmp_path_factory.mktemp("trace"))


def at_moments(count: int, tokens: int) -> Trace:
    """Two layers and heads of which every token goes at one of `count` moments, NEVER among them."""
    every = torch.linspace(1, tokens, count).long()
    when = every[torch.searchsorted(every, torch.arange(tokens), right=True).clamp(max=count - 1)]
    return Trace(torch.where(when > torch.arange(tokens), when, NEVER).to(torch.uint16).expand(2, 2, -1).contiguous())


def test_the_smaller_form_is_written(tmp_path):
    tokens, seen = 4096, {}
    for moments in (2, 30, 255, 256, 257, 1000):
        trace = at_moments(moments, tokens)
        seen[len(trace.evicted_at.long().unique())] = assert_comes_back(trace, tmp_path) / trace.nbytes
    assert {255, 256, 257} & set(seen)
    assert all(share < 0.55 if count <= 256 else 1 < share < 1.05 for count, share in seen.items()), seen
    assert assert_comes_back(Trace.dense(1, 1, 3), tmp_path) < 180  # too few tokens for a table of moments to pay


def test_long_traces_come_back(tmp_path):
    tokens = NEVER + 5
    trace = Trace.dense(1, 2, tokens)
    trace.evicted_at[0, :, :1000] = torch.arange(1001, 2001) + 65000  # beyond what uint16 holds
    assert_comes_back(trace, tmp_path)
    trace.evicted_at[0, :, :1000] = 65536
    assert assert_comes_back(trace, tmp_path) < 0.3 * trace.nbytes
    assert assert_comes_back(Trace.dense(2, 2, tokens), tmp_path) < 0.3 * 4 * 4 * tokens


def test_files_of_the_first_version_load(tmp_path):
    trace = at_moments(20, 500)
    save_file({"evicted_at": trace.evicted_at}, tmp_path / "t.safetensors", metadata={"format": "sparse_rl.trace.1"})
    assert Trace.load(tmp_path / "t.safetensors").evicted_at.equal(trace.evicted_at)


def test_a_rollout_is_written_in_half(tmp_path, llama):
    (trajectory,) = Engine(llama, budget=32, interval=16, rows=1).generate(prompts_of(10), sampling=Sampling(400))
    assert assert_comes_back(trajectory.trace, tmp_path) < 0.6 * trajectory.trace.nbytes


@pytest.mark.parametrize("trace", [random_trace(), at_moments(20, 500)], ids=["plain", "events"])
def test_a_damaged_file_is_refused(tmp_path, trace):
    path = tmp_path / "t.safetensors"
    trace.save(path)
    whole = path.read_bytes()
    for kept in (0, 7, 8, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:kept])
        with pytest.raises(SparseRLError, match=r"t\.safetensors is not a trace file or is damaged"):
            Trace.load(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(SparseRLError, match="damaged"):
        Trace.load(path)


PLAIN, EVENTS = "sparse_rl.trace.1", "sparse_rl.trace.2"
GOOD = {"moments": torch.tensor([2, 9, NEVER]).to(torch.uint16), "which": torch.zeros(1, 1, 2, dtype=torch.uint8)}
FULL = torch.full((2, 2, 5), NEVER)


@pytest.mark.parametrize(
    ("form", "tensors", "message"),
    [
        (None, {"evicted_at": FULL.to(torch.uint16)}, "not a trace .its format is None"),
        ("sparse_rl.trace.9", {"evicted_at": FULL.to(torch.uint16)}, "its format is 'sparse_rl.trace.9'"),
        (PLAIN, {"weight": torch.zeros(2)}, "damaged .*evicted_at"),
        (EVENTS, {"evicted_at": FULL.to(torch.uint16)}, "damaged .*moments"),
        (PLAIN, {"evicted_at": FULL.to(torch.int64)}, "3 dimensions of torch.int64, not 3 of torch.uint16"),
        (PLAIN, {"evicted_at": FULL.to(torch.int16)}, "torch.int16"),
        (PLAIN, {"evicted_at": torch.full((2, 2, 5), torch.nan)}, "3 dimensions of torch.float32"),
        (PLAIN, {"evicted_at": FULL[0].to(torch.uint16)}, "2 dimensions of torch.uint16"),
        (PLAIN, {"evicted_at": torch.tensor([[[1, 1]]], dtype=torch.int32)}, "gone before it has been fed"),
        (PLAIN, {"evicted_at": torch.tensor([[[-1, 2]]], dtype=torch.int32)}, "gone before it has been fed"),
        (PLAIN, {"evicted_at": torch.full((1, 1, NEVER), NEVER).to(torch.uint16)}, "65535 tokens do not fit in uint16"),
        (EVENTS, {**GOOD, "which": torch.tensor([[[0, 3]]], dtype=torch.uint8)}, "it names moment 3, but has 3"),
        (EVENTS, {**GOOD, "moments": GOOD["moments"][:0]}, "it names moment 0, but has 0"),
        (EVENTS, {**GOOD, "which": GOOD["which"].long()}, "its which has 3 dimensions of torch.int64"),
        (EVENTS, {**GOOD, "which": GOOD["which"][0]}, "its which has 2 dimensions"),
        (EVENTS, {**GOOD, "moments": GOOD["moments"].float()}, "its moments has 1 dimensions of torch.float32"),
        (EVENTS, {**GOOD, "moments": GOOD["moments"][None]}, "its moments has 2 dimensions"),
        (EVENTS, {**GOOD, "moments": torch.tensor([1], dtype=torch.int32)}, "gone before it has been fed"),
    ],
)  # fmt: skip
def test_foreign_and_impossible_files_are_refused(tmp_path, form, tensors, message):
    path = tmp_path / "t.safetensors"
    save_file(tensors, path, metadata={"format": form} if form else None)
    with pytest.raises(SparseRLError, match=message) as refused:
        Trace.load(path)
    assert str(path) in str(refused.value)


def test_files_that_are_none(tmp_path):
    for path in (tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(SparseRLError, match=f"there is no trace file {path}"):
            Trace.load(path)


@pytest.fixture
def written(tmp_path, llama):
    with TrajectoryWriter(tmp_path) as writer:
        for t in Engine(llama, budget=16, interval=8, rows=2).generate(prompts_of(10, 12), sampling=Sampling(30)):
            writer.write(t)
    assert len(list(read_trajectories(tmp_path))) == 2
    return tmp_path


def test_trajectories_without_their_traces_are_refused(written):
    second = written / "traces" / "000001-000.safetensors"
    whole = second.read_bytes()
    for change, message in (
        (lambda: second.write_bytes(whole[:-3]), "000001-000.safetensors is not a trace file or is damaged"),
        (
            lambda: second.write_bytes((written / "traces" / "000000-000.safetensors").read_bytes()),
            "lengths differ: tokens 42, .* trace 40",
        ),
        (second.unlink, "there is no trace file .*000001-000.safetensors"),
    ):
        change()
        reader = read_trajectories(written)
        assert next(reader).prompt_index == 0  # the line before is whole
        with pytest.raises(SparseRLError, match=rf"trajectories.jsonl, line 2 is not a trajectory \(.*{message}"):
            next(reader)


def test_lines_that_are_no_trajectories_are_refused(written):
    path = written / "trajectories.jsonl"
    first, second = path.read_text().splitlines()
    lacking, short = json.loads(second), json.loads(second)
    del lacking["trace"]
    short["sampler_logprobs"].pop()
    for bad, message in (
        (first[:50], "line 2 is not a trajectory .Invalid control character"),
        (json.dumps(lacking), "it lacks 'trace'"),
        (json.dumps(short), "tokens 42, log-probs 41, trace 42"),
        ("[]", "line 2 is not a trajectory"),
    ):
        path.write_text(f"{first}\n{bad}\n")
        with pytest.raises(SparseRLError, match=message):
            list(read_trajectories(written))
    path.write_text(f"{first}\n{second[:50]}")  # cut off by a crash: left out
    assert len(list(read_trajectories(written))) == 1
    with pytest.raises(SparseRLError, match=r"there is no .*trajectories\.jsonl"):
        list(read_trajectories(written / "traces"))


@pytest.mark.parametrize("interval", [4, 1])
def test_a_flipped_bit_is_noticed(interval, tmp_path):
    """Whichever bit of a file flips, the file is refused, or nobody reads the bit and the trace is as it was."""
    evicted_at = torch.full((2, 2, 300), NEVER, dtype=torch.int32)
    for moment in range(20, 300, interval):
        evicted_at[:, :, moment - 20] = moment
    trace = Trace(evicted_at.to(torch.uint16))
    trace.save(tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    refused = 0
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        (tmp_path / "damaged").write_bytes(damaged)
        try:
            assert Trace.load(tmp_path / "damaged").evicted_at.equal(trace.evicted_at)
        except SparseRLError:
            refused += 1
    assert refused > 0.9 * len(whole) / 7


@pytest.mark.parametrize(
    "changes, why",
    [
        ({"num_prompt_tokens": 1000}, "num_prompt_tokens is 1000, but there are"),
        ({"num_prompt_tokens": "ten"}, "num_prompt_tokens is 'ten', not a whole number"),
        ({"tokens": [1.7] * 30}, "tokens is not a list of token ids"),
        ({"tokens": [[1, 2], [3, 4]]}, "tokens is not a list of token ids"),
        ({"tokens": [-1] * 30}, "tokens is not a list of token ids"),
        ({"tokens": 5}, "tokens is not a list of token ids"),
        ({"sampler_logprobs": [float("nan")] * 30}, "sampler_logprobs is not a list of log-probs"),
        ({"sampler_logprobs": [10**400] * 30}, "sampler_logprobs is not a list of log-probs"),
        ({"sampler_logprobs": [-1e300] * 30}, "sampler_logprobs is not a list of log-probs"),
        ({"sampler_logprobs": [-1.0] * 30}, "its prompt has log-probs"),
        ({"finish_reason": None}, "finish_reason is None"),
        ({"trace": "x" * 5000}, r"\[Errno|there is no trace file"),
        ({"version": None}, "version is None"),
    ],
)
def test_lines_that_no_rollout_writes_are_refused(changes, why, tmp_path, llama):
    (done,) = Engine(llama, budget=12, interval=4, rows=1).generate(prompts_of(10), sampling=Sampling(20))
    with TrajectoryWriter(tmp_path) as writer:
        writer.write(done)
    path = tmp_path / "trajectories.jsonl"
    line = json.loads(path.read_text())
    path.write_text(json.dumps(line | changes) + "\n")
    with pytest.raises(SparseRLError, match=f"line 1 is not a trajectory .{why}"):
        list(read_trajectories(tmp_path))


@pytest.mark.parametrize("text", [b"\xff\xfe\n", b"7\n", b"[" * 100_000 + b"\n", b"{}\n"])
def test_lines_that_are_no_records_are_refused(text, tmp_path):
    (tmp_path / "trajectories.jsonl").write_bytes(text)
    with pytest.raises(SparseRLError, match="line 1 is not a trajectory"):
        list(read_trajectories(tmp_path))


def test_the_same_trace_makes_the_same_file(tmp_path):
    """safetensors writes metadata in an order of its own, another one each time."""
    trace = Trace.dense(2, 2, 9)
    for i in range(8):
        trace.save(tmp_path / f"{i}.safetensors")
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1
