"""Every Triton kernel compiled ahead of time for GPUs that need not be there, and the shared memory that it takes.

    TRITON_INTERPRET=0 python -m tests.helpers.compiled_kernels 80 86 89 90 [--dims 64,128,256]

The launchers of sparse_rl/kernels run with tensors on the CPU, so types, alignment and tiles are those of a real call;
a launch only compiles, down to the machine code of ptxas. Prints one JSON object per kernel, GPU and case: its shared
memory, and how many multiply-adds of a half precision it has, which round a sum but not its product.
"""

import argparse
import itertools
import json
import re
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sparse_rl.cache import LayerSlots
from sparse_rl.cache.segments import Replay
from sparse_rl.kernels import decode, device, evict, experts, head, layers, sample, segments
from sparse_rl.kernels.twins_sample import Kept, RowSettings

# Bytes of shared memory that a block may ask for, by compute capability (CUDA C programming guide).
LIMITS = {80: 163 * 1024, 86: 99 * 1024, 89: 99 * 1024, 90: 227 * 1024}
NEVER = torch.iinfo(torch.int32).max
ROWS, HEADS, GROUP, CAPACITY = 4, 2, 6, 640


class Compiler:
    """Stands for the driver of a GPU: launches compile for it, and nothing runs."""

    def __init__(self):
        self.capability, self.case, self.found = 0, "", {}

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def compile(self, kernel: JITFunction, *args, **options) -> None:
        compiled = run(kernel, *args, **{**options, "warmup": True})
        key = self.capability, kernel.fn.__name__, self.case
        shared, fused = self.found.get(key, (0, 0))
        count = len(re.findall(r"\bfma\.rn\.b?f16", compiled.asm["ptx"]))
        self.found[key] = max(shared, compiled.metadata.shared), fused + count


run = JITFunction.run


def decode_step(dtype: torch.dtype, dim: int, *, softcap: float | None = None, window: int | None = None) -> None:
    query, key = (torch.zeros(ROWS, n, dim, dtype=dtype) for n in (HEADS * GROUP, HEADS))
    keys = torch.zeros(ROWS, HEADS, CAPACITY, dim, dtype=dtype)
    feed, ring = torch.zeros(ROWS, HEADS, CAPACITY, dtype=torch.int32), torch.zeros(
        ROWS, HEADS * GROUP, 8, dim, dtype=dtype
    )  # fmt: skip
    numbers, live = torch.zeros(ROWS, dtype=torch.int64), torch.ones(ROWS, dtype=torch.bool)
    rope, norm = torch.zeros(ROWS, dim, dtype=dtype), torch.zeros(dim, dtype=dtype)
    codes, exponents = keys.to(torch.int8), torch.zeros(ROWS, HEADS, CAPACITY, 2, dtype=torch.int8)
    stored = [(keys, None), (codes, exponents)]
    if driver.active.get_current_device() >= 89:  # older ones know no e4m3
        stored.append((codes.view(torch.uint8), exponents))
    for splits, (own, scales) in itertools.product((1, 4), stored):
        decode.store_and_attend(
            query, key, key, LayerSlots(own, own, feed, ring, scales), numbers, numbers, live, 0.1,
            (rope, rope), (norm, norm, 1e-6), softcap, window, splits=splits,
        )  # fmt: skip


def vectors(dtype: torch.dtype, size: int) -> None:
    residual, weight = torch.zeros(ROWS, size, dtype=dtype), torch.zeros(size, dtype=dtype)
    decode.add_rms_norm(None, residual, weight, 1e-6)
    decode.add_rms_norm(torch.zeros(4, ROWS, size), residual, weight, 1e-6)
    decode.silu_mul(torch.zeros(ROWS, 8 * size, dtype=dtype))


def mixture(dtype: torch.dtype, size: int) -> None:
    for pairs, added in ((8, True), (64, False), (4096, True)):  # tiles of 16, 16 and 64 rows
        x, bias = torch.zeros(pairs // 4, size, dtype=dtype), torch.zeros(8, 2 * size, dtype=dtype)
        order, starts = torch.arange(pairs), torch.zeros(9, dtype=torch.int64)
        for weight in (torch.zeros(8, size, 2 * size, dtype=dtype), torch.zeros(8, 2 * size, size, dtype=dtype)):
            inner_first = weight if weight.shape[1] == size else weight.transpose(1, 2)
            experts.expert_product(x, inner_first, bias if added else None, order, starts)


def sampling(dtype: torch.dtype, vocabulary: int) -> None:
    numbers = torch.zeros(ROWS, dtype=torch.int64)
    state = SimpleNamespace(
        capacity=torch.tensor(CAPACITY), limit=torch.full((ROWS,), 9), done=torch.zeros(ROWS, dtype=torch.bool),
        tokens=torch.zeros(ROWS, 9, dtype=torch.int64), logprobs=torch.zeros(ROWS, 9),
        **dict.fromkeys(("token", "index", "used", "stream", "count"), numbers),
    )  # fmt: skip
    for temperature, top_k, room in ((1.0, 50, None), (0.0, 0, None), (1.0, 0, 512), (1.0, 50, 0)):
        logits = torch.zeros(ROWS, vocabulary, dtype=dtype)
        state.kept = None if room is None else Kept.empty(ROWS, 9, room, torch.device("cpu"))
        stops = torch.tensor([0, 2])
        sample.sample_and_record(logits, state, temperature, stops, top_k, 0.9, room is not None)  # pyright: ignore
        state.settings = RowSettings.empty(ROWS, 16, torch.device("cpu"))
        sample.sample_by_row(logits, state)  # pyright: ignore


def eviction(dtype: torch.dtype, dim: int) -> None:
    keys = torch.zeros(ROWS, HEADS, CAPACITY, dim, dtype=dtype)
    evict.redundancy(keys, 0.5)
    for count in (8, 64):
        evict.observed_logits(torch.zeros(ROWS, HEADS * GROUP, count, dim, dtype=dtype), keys, 0.1)
    layers, feed = keys[None].expand(3, -1, -1, -1, -1), torch.zeros(3, ROWS, HEADS, CAPACITY, dtype=torch.int32)
    trace, rows = torch.zeros(ROWS, 3, HEADS, 4096, dtype=torch.int16), torch.arange(2)
    kept, live = torch.zeros(3, 2, HEADS, 512, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    for mass in (None, feed.float()):
        evict.compact(layers, layers, feed, mass, trace, slice(0, 3), rows, CAPACITY, kept, rows, live, 32767)
    codes, exponents = layers.to(torch.int8), torch.zeros(*layers.shape[:-1], 2, dtype=torch.int8)
    evict.compact(codes, codes, feed, None, trace, slice(0, 3), rows, CAPACITY, kept, rows, live, 32767, exponents)


def learning(dtype: torch.dtype, dim: int, *, softcap: float | None = None, window: int | None = None) -> None:
    for interval in (16, 128):  # queries of a segment, by which tiles are chosen
        tokens = 4 * interval
        evicted_at = torch.full((2, 1, HEADS, tokens), NEVER, dtype=torch.int32)
        for moment in range(interval, tokens, interval):
            evicted_at[..., moment - 1] = moment
        replay = Replay(evicted_at, torch.full((2,), tokens))
        query, key = (torch.zeros(2, n, tokens, dim, dtype=dtype, requires_grad=True) for n in (HEADS * GROUP, HEADS))
        out = segments.trace_attention(query, key, key, replay, 0, 0.1, window, softcap, 0.0)
        out.sum().backward()


def learning_layers(dtype: torch.dtype, size: int) -> None:
    new, residual, up = (torch.zeros(1, 64, size, dtype=dtype, requires_grad=True) for _ in range(3))
    weight = torch.zeros(size, dtype=dtype, requires_grad=True)
    total, normed = layers.add_and_norm(new, residual, weight, 1e-6)
    (total + layers.silu_gate(normed, up)).sum().backward()
    layers.add_and_norm(None, residual, weight.detach(), 1e-6)[1].sum().backward()


def learning_rotation(dtype: torch.dtype, dim: int) -> None:
    query, key = (torch.zeros(2, n, 8, dim, dtype=dtype, requires_grad=True) for n in (HEADS * GROUP, HEADS))
    angles = torch.zeros(1, 8, dim, dtype=dtype)
    sum(x.sum() for x in layers.rotate(query, key, angles, angles)).backward()


def learning_head(dtype: torch.dtype, vocabulary: int, softcap: float | None) -> None:
    logits, targets = torch.zeros(ROWS, vocabulary), torch.zeros(ROWS, dtype=torch.int64)
    *_, entropies, _, lse = head.token_statistics(logits, targets, 0.7, softcap)
    for from_entropies in (None, lse):
        head.logit_gradients(
            logits[:, :1024].contiguous(), targets, lse, entropies, lse, from_entropies, 1024, 0.7, softcap, dtype
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("capabilities", type=int, nargs="+")
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--dtypes", default="bfloat16,float16,float32")
    args = parser.parse_args()
    compiler = Compiler()
    driver.set_active(compiler)
    JITFunction.run = lambda kernel, *given, **options: compiler.compile(kernel, *given, **options)
    for compiler.capability in args.capabilities:
        device.shared_memory = lambda _: LIMITS[compiler.capability]
        for dtype in (getattr(torch, name) for name in args.dtypes.split(",")):
            compiler.case = str(dtype).removeprefix("torch.")
            for size in (896, 4096):
                vectors(dtype, size)
            for size in (128, 896, 4096, 8192):
                learning_layers(dtype, size)
            for size in (768, 2880):
                mixture(dtype, size)
            sampling(dtype, 151936)
            for softcap in (None, 30.0):
                learning_head(dtype, 151936, softcap)
            for dim in map(int, args.dims.split(",")):
                for extra in ({}, {"softcap": 30.0, "window": 128}):
                    compiler.case = f"{dtype} {dim} {'soft-cap, window' if extra else ''}".removeprefix(
                        "torch."
                    ).strip()
                    decode_step(dtype, dim, **extra)
                    learning(dtype, dim, **extra)
                eviction(dtype, dim)
                learning_rotation(dtype, dim)
    for (capability, kernel, case), (shared, fused) in compiler.found.items():
        print(json.dumps(dict(capability=capability, kernel=kernel, case=case, shared=shared, fused=fused)))


if __name__ == "__main__":
    main()
