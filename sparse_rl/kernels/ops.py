"""Choose between GPU kernels and plain torch: which function computes an operation, and how rollouts run on a device.

Every operation has a function of the same name and arguments in each module that can compute it: the modules of Triton
kernels that `KERNELS` lists, and `twins`, which computes everything in plain torch. A kernel is used on a CUDA device
with Triton if it supports the arguments; otherwise the twin is used. Callers call the functions below and need not know
the device. `RULES` has everything else that depends on the device, such as how often the host syncs with it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ..cache import LayerSlots
from ..cache.segments import WIDEST_HEAD, Replay
from . import twins
from .twins_sample import Rows

# ------------------------------------------------------------------------------------------------- what computes what


@dataclass(frozen=True)
class Place:
    """Where an operation runs."""

    device: str  # cuda, cpu, ...
    triton: bool  # whether Triton can be imported

    @property
    def runs_kernels(self) -> bool:
        return self.device == "cuda" and self.triton


def place_of(tensor: Tensor) -> Place:
    return Place(tensor.device.type, has_triton())


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@dataclass(frozen=True)
class Kernel:
    module: str  # in this folder
    fits: Callable[..., bool] = lambda *_: True  # whether it can compute an operation for its arguments


def few_queries_see_all_slots(queries: Tensor, unreachable: Tensor | None) -> bool:
    return unreachable is None and queries.shape[2] <= 64


def fits_tiles(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether attention under a trace can be computed tile by tile."""
    alike = query.dtype == key.dtype == value.dtype and max(query.shape[-1], value.shape[-1]) <= WIDEST_HEAD
    return alike and query.dtype in (torch.bfloat16, torch.float16, torch.float32) and dropout == 0


def fits_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    replay: Replay,
    softcap: float | None,
    dropout: float,
    sinks: Tensor | None,
) -> bool:
    """Whether attention under a trace can go by segments, so that memory follows the tokens."""
    return fits_tiles(query, key, value, dropout) and replay.segments.are_few


def fits_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    replay: Replay,
    softcap: float | None,
    dropout: float,
    sinks: Tensor | None,
) -> bool:
    """Whether FlexAttention can be used. It cannot differentiate a soft-cap with dynamic shapes; for packed rows we do
    not use it.
    """
    return fits_tiles(query, key, value, dropout) and softcap is None and replay.packing is None


def fits_vectors(*tensors: Tensor) -> bool:
    """Whether the learner's kernels for norms, gates and rotations support the dtype, and a row fits into a program."""
    dtypes = {tensor.dtype for tensor in tensors}
    return len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16, torch.float32}


def fits_norm(residual: Tensor, weight: Tensor) -> bool:
    return fits_vectors(residual, weight) and residual.shape[-1] <= 16384


def fits_rotation(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    whole = query.shape[-1] == key.shape[-1] == cos.shape[-1] and cos.dim() == 3
    return fits_vectors(query, key, cos, sin) and whole and query.shape[-1] % 2 == 0


def fits_experts(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    return fits_vectors(x, weight) and (bias is None or bias.dtype == x.dtype)


def alike(keys: Tensor, values: Tensor) -> bool:
    return keys.shape == values.shape


def is_fp32(logits: Tensor) -> bool:
    return logits.dtype == torch.float32


KERNELS: dict[str, tuple[Kernel, ...]] = {  # the first that fits is used; the twin if none does
    "add_rms_norm": (Kernel("decode"),),
    "silu_mul": (Kernel("decode"),),
    "expert_product": (Kernel("experts", fits_experts),),
    "store_and_attend": (Kernel("decode"),),
    "sample_and_record": (Kernel("sample"),),
    "sample_by_row": (Kernel("sample"),),
    "redundancy": (Kernel("evict"),),
    "observed_logits": (Kernel("evict", few_queries_see_all_slots),),
    "compact": (Kernel("evict", alike),),
    "trace_attention": (Kernel("segments", fits_segments), Kernel("flex", fits_flex)),
    "add_and_norm": (Kernel("layers", fits_norm),),
    "silu_gate": (Kernel("layers", fits_vectors),),
    "rotate": (Kernel("layers", fits_rotation),),
    "token_statistics": (Kernel("head", is_fp32),),
    "logit_gradients": (Kernel("head", is_fp32),),
}


def module_for(operation: str, place: Place, *arguments) -> str:
    """The module whose function computes an operation; `arguments`: those that its kernels' `fits` need"""
    if place.runs_kernels:
        for kernel in KERNELS[operation]:
            if kernel.fits(*arguments):
                return kernel.module
    return "twins"


def _function(operation: str, tensor: Tensor, *arguments) -> Callable:
    module = module_for(operation, place_of(tensor), *arguments)
    return getattr(importlib.import_module(f".{module}", __package__), operation)


# --------------------------------------------------------------------- the operations; shapes and meaning: see twins.py


def add_rms_norm(new: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _function("add_rms_norm", residual)(new, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    return _function("silu_mul", gate_up)(gate_up)


def expert_product(x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor) -> Tensor:
    return _function("expert_product", x, x, weight, bias)(x, weight, bias, order, starts)


def store_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: LayerSlots,
    used: Tensor,
    index: Tensor,
    live: Tensor,
    scaling: float,
    rope: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    return _function("store_and_attend", query)(
        query, key, value, slots, used, index, live, scaling, rope, norms, softcap, sliding_window, sinks
    )


def sample_and_record(
    logits: Tensor,
    state: Rows,
    temperature: float,
    stop_ids: Tensor,
    top_k: int = 0,
    top_p: float = 1.0,
    records: bool = False,
) -> None:
    _function("sample_and_record", logits)(logits, state, temperature, stop_ids, top_k, top_p, records)


def sample_by_row(logits: Tensor, state: Rows) -> None:
    _function("sample_by_row", logits)(logits, state)


def redundancy(keys: Tensor, threshold: float) -> Tensor:
    return _function("redundancy", keys)(keys, threshold)


def observed_logits(
    queries: Tensor, keys: Tensor, scaling: float, softcap: float | None = None, unreachable: Tensor | None = None
) -> Tensor:
    return _function("observed_logits", keys, queries, unreachable)(queries, keys, scaling, softcap, unreachable)


def compact(
    keys: Tensor,
    values: Tensor,
    feed: Tensor,
    mass: Tensor | None,
    trace: Tensor,
    layers: slice,
    rows: Tensor,
    used: int,
    kept: Tensor,
    fed: Tensor,
    live: Tensor,
    never: int,
    exponents: Tensor | None = None,
) -> None:
    _function("compact", rows, keys, values)(
        keys, values, feed, mass, trace, layers, rows, used, kept, fed, live, never, exponents
    )


def trace_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    replay: Replay,
    layer: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    dropout: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Kernels take keys and values of one width, so the narrower get zeros, which add nothing to a product."""
    attend = _function("trace_attention", query, query, key, value, replay, softcap, dropout, sinks)
    short = query.shape[-1] - value.shape[-1]
    if short == 0 or attend is twins.trace_attention:
        return attend(query, key, value, replay, layer, scaling, sliding_window, softcap, dropout, sinks)
    query, key = (F.pad(x, (0, max(0, -short))) for x in (query, key))
    wide = F.pad(value, (0, max(0, short)))
    out = attend(query, key, wide, replay, layer, scaling, sliding_window, softcap, dropout, sinks)
    return out[..., : value.shape[-1]]


def add_and_norm(new: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return _function("add_and_norm", residual, residual, weight)(new, residual, weight, eps)


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    return _function("silu_gate", gate, gate, up)(gate, up)


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _function("rotate", query, query, key, cos, sin)(query, key, cos, sin)


def token_statistics(
    logits: Tensor, targets: Tensor, temperature: float, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _function("token_statistics", logits, logits)(logits, targets, temperature, softcap)


def logit_gradients(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropies: Tensor,
    from_logprobs: Tensor,
    from_entropies: Tensor | None,
    start: int,
    temperature: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    return _function("logit_gradients", logits, logits)(
        logits, targets, lse, entropies, from_logprobs, from_entropies, start, temperature, softcap, dtype
    )


# ------------------------------------------------------------------------------- how rollouts and the learner run


@dataclass(frozen=True)
class Rules:
    """How rollouts and the learner run on a kind of device."""

    on_gpu: bool  # decides which copies the plan counts and which clock times the phases
    fuses: bool  # models of the Llama family are decoded by fused kernels (rollout/fused.py)
    captures: bool  # decode steps are CUDA graphs, so the row state keeps its addresses between calls
    attends_while_storing: bool  # a decode step stores a token and attends in one operation
    own_experts: tuple[torch.dtype, ...]  # in which decode steps compute experts by our kernel (rollout/experts.py)
    splits_products: bool  # a matrix product with few tiles is computed as a sum of parts
    defers_checks: bool  # a compressor's slots are checked at the next sync, not at once
    poll: tuple[int, int]  # the least and the most decode steps between two syncs
    row_multiple: int  # decode batches are padded to multiples of it, so that rounding does not depend on their size
    fuses_learning: bool  # norms, rotations, gates (modules.py) and heads that are known are computed by kernels
    adds_masks: bool  # masks of several queries are made what is added to logits, once for all layers
    slot_multiple: int  # several queries read a multiple of so many slots, so that kernels need not copy their masks
    feeds_together: bool  # given tokens are fed to several rows at a time
    fuses_prompts: bool  # norms, rotations and gates likewise, where rollouts read prompts and given tokens


_CPU = Rules(
    on_gpu=False,
    fuses=False,
    captures=False,
    attends_while_storing=False,
    own_experts=(),
    splits_products=False,
    defers_checks=False,
    poll=(1, 1),
    row_multiple=4,
    fuses_learning=False,
    adds_masks=False,
    slot_multiple=1,
    feeds_together=False,
    fuses_prompts=False,
)
RULES = {
    "cpu": _CPU,
    "cuda": Rules(
        on_gpu=True,
        fuses=True,
        captures=True,
        attends_while_storing=True,
        own_experts=(torch.float32, torch.float16),
        splits_products=True,
        defers_checks=True,
        poll=(8, 16),
        row_multiple=1,
        fuses_learning=True,
        adds_masks=True,
        slot_multiple=16,
        feeds_together=True,
        fuses_prompts=True,
    ),
}


def rules(device: torch.device) -> Rules:
    return RULES.get(device.type, replace(_CPU, row_multiple=1))
