"""The table that decides between a kernel and its twin, for devices that are not here."""

import importlib
import inspect

import pytest
import torch

from sparse_rl.cache.segments import Replay
from sparse_rl.kernels import ops, twins

GPU, CPU, NO_TRITON = ops.Place("cuda", triton=True), ops.Place("cpu", triton=True), ops.Place("cuda", triton=False)
NEVER = torch.iinfo(torch.int32).max


@pytest.mark.parametrize(
    "operation, module",
    [
        ("add_rms_norm", "decode"),
        ("silu_mul", "decode"),
        ("store_and_attend", "decode"),
        ("sample_and_record", "sample"),
        ("redundancy", "evict"),
    ],
)
def test_kernels_run_on_a_gpu_with_triton_and_twins_elsewhere(operation, module):
    assert ops.module_for(operation, GPU) == module
    for place in (CPU, NO_TRITON, ops.Place("mps", triton=True)):
        assert ops.module_for(operation, place) == "twins"


@pytest.mark.parametrize("place, width, module", [(GPU, 8, "evict"), (GPU, 0, "twins"), (CPU, 8, "twins")])
def test_the_kernel_moves_keys_and_values_of_one_width(place, width, module):
    """Latents have no values of their own."""
    keys, values = torch.zeros(1, 2, 1, 4, 8), torch.zeros(1, 2, 1, 4, width)
    assert ops.module_for("compact", place, keys, values) == module


@pytest.mark.parametrize(
    "place, queries, slides, module",
    [
        (GPU, 8, False, "evict"),
        (GPU, 64, False, "evict"),
        (GPU, 65, False, "twins"),
        (GPU, 8, True, "twins"),
        (CPU, 8, False, "twins"),
        (NO_TRITON, 8, False, "twins"),
    ],
)
def test_observed_logits(place, queries, slides, module):
    unreachable = torch.zeros(1, 2, 5, dtype=torch.bool) if slides else None
    assert ops.module_for("observed_logits", place, torch.zeros(1, 4, queries, 8), unreachable) == module


def replay_of(few: bool) -> Replay:
    """A trace of one segment, or one in which a token leaves at every step after many have stayed."""
    tokens = 1024
    evicted_at = torch.full((1, 2, 1, tokens), NEVER, dtype=torch.int32)
    if not few:
        evicted_at[..., ::2] = torch.arange(1, tokens + 1, dtype=torch.int32)[::2]
    replay = Replay(evicted_at, torch.tensor([tokens]))
    assert replay.segments.are_few == few
    return replay


@pytest.mark.parametrize(
    "changes, module",
    [
        ({}, "segments"),
        (dict(dtype=torch.float32), "segments"),
        (dict(dtype=torch.float16), "segments"),
        (dict(dim=256), "segments"),
        (dict(softcap=30.0), "segments"),
        (dict(few=False), "flex"),
        (dict(sinks=True), "segments"),
        (dict(few=False, sinks=True), "flex"),
        (dict(few=False, softcap=30.0), "twins"),
        (dict(dtype=torch.float64), "twins"),
        (dict(dim=257), "twins"),
        (dict(value_dim=32), "segments"),
        (dict(value_dim=96, few=False), "flex"),
        (dict(value_dim=257), "twins"),
        (dict(value_dtype=torch.float32), "twins"),
        (dict(dropout=0.1), "twins"),
        (dict(place=CPU), "twins"),
        (dict(place=NO_TRITON), "twins"),
    ],
)
def test_attention_under_a_trace(changes, module):
    given = dict(place=GPU, dtype=torch.bfloat16, dim=64, softcap=None, dropout=0.0, few=True) | changes
    query = torch.zeros(1, 2, 4, given["dim"], dtype=given["dtype"], device="meta")
    key = query[:, :1]
    value = torch.zeros(1, 1, 4, given.get("value_dim", given["dim"]), device="meta")
    value = value.to(given.get("value_dtype", given["dtype"]))
    sinks = torch.zeros(2, device="meta") if given.get("sinks") else None
    arguments = (query, key, value, replay_of(given["few"]), given["softcap"], given["dropout"], sinks)
    assert ops.module_for("trace_attention", given["place"], *arguments) == module


def test_segments_are_not_looked_for_where_no_kernel_can_run():
    replay = replay_of(few=True)
    del replay.segments
    query = torch.zeros(1, 2, 4, 8, dtype=torch.float64)
    for place in (CPU, GPU):
        ops.module_for("trace_attention", place, query, query, query, replay, None, 0.0, None)
    assert "segments" not in vars(replay)


@pytest.mark.parametrize("operation", ops.KERNELS)
def test_an_operation_has_the_arguments_of_its_twin(operation):
    assert list(inspect.signature(getattr(ops, operation)).parameters) == list(
        inspect.signature(getattr(twins, operation)).parameters
    )


@pytest.mark.parametrize("operation, kernel", [(name, k.module) for name in ops.KERNELS for k in ops.KERNELS[name]])
def test_a_kernel_has_the_arguments_of_its_twin(operation, kernel):
    """It may have more, which say how it runs."""
    pytest.importorskip("triton")
    function = getattr(importlib.import_module(f"sparse_rl.kernels.{kernel}"), operation)
    expected = list(inspect.signature(getattr(twins, operation)).parameters)
    assert list(inspect.signature(function).parameters)[: len(expected)] == expected


def test_how_rollouts_run_on_a_device():
    cpu, gpu, other = (ops.rules(torch.device(kind)) for kind in ("cpu", "cuda", "mps"))
    assert (cpu.poll, cpu.row_multiple) == ((1, 1), 4) and (gpu.poll, gpu.row_multiple) == ((8, 16), 1)
    flags = (
        "on_gpu",
        "fuses",
        "captures",
        "attends_while_storing",
        "splits_products",
        "defers_checks",
        "fuses_learning",
    )
    assert all(getattr(gpu, flag) for flag in flags) and not any(getattr(cpu, flag) for flag in flags)
    assert (other.poll, other.row_multiple) == ((1, 1), 1) and not any(getattr(other, flag) for flag in flags)
