"""The speed of rollouts: a model with random weights, whole rollouts timed end to end, and, on a GPU, one decode step
compared with the time that the memory needs.

    sparse-rl bench rollout --model-shape qwen2.5-1.5b --rows 256 --budget 512 --interval 128 --prompt 256 --new 3840
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from .attention import use_attention
from .beacon import add_beacon, beacon_of
from .cache.formats import PLAIN
from .compressors import let_choose, make
from .errors import SparseRLError, require_int
from .models import evaluating, load_model, recurrent_kernels
from .planning.memory import size
from .rollout import Engine, Sampling
from .rollout.decode import RowState


@dataclass(frozen=True)
class Setting:
    """A rollout to be timed: `rows` prompts of `prompt` tokens at once, each continued by exactly `new` tokens."""

    model_shape: str = "qwen2.5-1.5b"
    compressor: str = "rkv"
    budget: int = 512
    interval: int = 128
    rows: int = 256
    prompt: int = 256
    new: int = 3840
    repeats: int = 3
    peer: str | None = None
    peer_new: int = 128  # new tokens of the peer; its time per token grows with this number
    slots: str = PLAIN  # how keys and values are stored

    def __post_init__(self):
        require_int(rows=self.rows, prompt=self.prompt, new=self.new, repeats=self.repeats, peer_new=self.peer_new)
        if self.peer not in (None, "transformers"):
            raise SparseRLError(f"there is no peer {self.peer!r}; the only known peer is `transformers`.")


def measure(setting: Setting, dtype: str | None = None, device: str | None = None) -> dict:
    """Make a model with random weights and return its `bench_rollout`."""
    name = setting.model_shape if setting.model_shape == "tiny" else f"random:{setting.model_shape}"
    return bench_rollout(setting, load_model(name, dtype, device)[0])


def bench_rollout(setting: Setting, model: nn.Module) -> dict:
    """The figures of the median repeat, after a short rollout that compiles and captures.

    If the compressor needs a beacon and the model has none, the model gets one.
    """
    device = next(model.parameters()).device
    compressor = make(setting.compressor, slots=setting.slots)
    if compressor.folds and beacon_of(model) is None:
        add_beacon(model)
    let_choose(model, compressor)
    engine = Engine(model, compressor, budget=setting.budget, interval=setting.interval, rows=setting.rows)
    engine.reserve(setting.prompt, setting.new)  # so that the timed runs reuse what the warm-up captures
    assert engine.cache is not None
    sampling = Sampling(max_new_tokens=setting.new, stop_ids=())
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, engine.shape.vocabulary, (setting.rows, setting.prompt), generator=generator).tolist()
    engine.generate(prompts, sampling=replace(sampling, max_new_tokens=_warm_up_tokens(setting, engine)))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    runs, trace_bytes = [], 0
    for seed in range(setting.repeats):
        start = time.perf_counter()
        trajectories = engine.generate(prompts, sampling=sampling, seed=seed)
        seconds = time.perf_counter() - start
        assert all(len(t.response_tokens) == setting.new for t in trajectories)
        runs.append({**engine.seconds, "total": seconds})
        trace_bytes = sum(t.trace.nbytes for t in trajectories)
    plan = engine.plan(setting.prompt, setting.new)
    middle = sorted(runs, key=lambda run: run["total"])[len(runs) // 2]
    tokens, total = setting.rows * setting.new, middle["total"]
    result = {
        **asdict(setting),
        "tokens_per_s": tokens / total,
        "seconds": total,
        "seconds_all": [run["total"] for run in runs],
        "share": {name: middle[name] / total for name in middle if name != "total"},
        "ms_per_step": 1000 * middle.get("decode", 0.0) / max(1, engine.steps),
        "steps": engine.steps,
        "kv_bytes": engine.cache.nbytes,
        "kv_bytes_planned": plan.cache_bytes,
        "kv_bytes_dense": plan.dense_row_bytes * setting.rows,
        "trace_bytes": trace_bytes,
        "planned_bytes": plan.total_bytes,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }
    if (kernels := recurrent_kernels(engine.model.config)) is not None:
        result["recurrent_layers"] = kernels
    if device.type == "cuda":
        result |= bench_step(engine, sampling)
    if setting.peer:
        result["peer_tokens_per_s"] = transformers_tokens_per_s(model, prompts, setting.peer_new)
        result["ratio"] = result["tokens_per_s"] / result["peer_tokens_per_s"]
    return result


def _warm_up_tokens(setting: Setting, engine: Engine) -> int:
    """New tokens that take a rollout beyond its first eviction while decoding."""
    if not engine.compressor.evicts_response:
        return min(setting.new, 8)
    assert engine.cache is not None
    capacity = engine.cache.capacity
    until_full = capacity - setting.prompt if setting.prompt < capacity else setting.interval
    return min(setting.new, until_full + 2)


def summary(result: dict) -> str:
    """The result as a table for people."""
    share = ", ".join(f"{name} {value:.1%}" for name, value in result["share"].items())
    held, planned, dense = (size(result[f"kv_bytes{which}"]) for which in ("", "_planned", "_dense"))
    timed = f"({result['seconds']:.2f} s, median of {result['repeats']})"
    lines = [
        f"{result['model_shape']} (random weights) on {result['machine']}, torch {result['torch']}: "
        f"{result['rows']} rows, prompts of {result['prompt']}, {result['new']} new tokens, {result['compressor']}"
        + ("" if result["slots"] == PLAIN else f", {result['slots']} slots"),
        f"  tokens/s, end to end    {result['tokens_per_s']:,.0f}  {timed}",
        f"  time per decode step    {result['ms_per_step']:.2f} ms over {result['steps']} steps",
        f"  where the time went     {share}",
        f"  KV cache                {held}, planned {planned}; dense rows {dense}",
    ]
    if "of_floor" in result:
        lines.append(
            f"  a step with full rows   {result['full_step_ms']:.2f} ms, {result['of_floor']:.0%} of what the memory's "
            f"speed allows ({result['floor_ms']:.2f} ms at {result['copy_bytes_per_s'] / 1e12:.2f} TB/s)"
        )
        lines.append(f"  peak memory             {size(result['peak_bytes'])}, planned {size(result['planned_bytes'])}")
    if "ratio" in result:
        peer = f"{result['peer_tokens_per_s']:,.0f} tokens/s over {result['peer_new']} new tokens"
        lines.append(f"  model.generate          {peer}: {result['ratio']:.2f}x")
    return "\n".join(lines)


def bench_step(engine: Engine, sampling: Sampling, repeats: int = 50) -> dict:
    """One decode step of all rows with every slot in use, against the time that reading weights and slots takes."""
    cache, state = engine.cache, engine.state
    assert cache is not None and state is not None
    weight_bytes = sum(p.nbytes for p in engine.model.parameters())
    slot_bytes = cache.rows * cache.capacity * cache.shape.stored_bytes
    bandwidth = copy_bandwidth(engine.device)
    floor = 1000 * (weight_bytes + slot_bytes) / bandwidth
    with torch.no_grad(), evaluating(engine.model), use_attention(engine.model, "slots"):
        decoder = engine.decoder(sampling)
        state.begin(sampling.max_new_tokens, cache.capacity)

        def full_step() -> float:
            fill(state, cache.capacity - 1)
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            decoder.run(cache.rows, 1, cache.capacity)
            after.record()
            after.synchronize()
            return before.elapsed_time(after)

        times = [full_step() for _ in range(repeats + 5)][5:]
        state.done.fill_(True)
    step = statistics.median(times)
    return {"full_step_ms": step, "floor_ms": floor, "of_floor": floor / step, "copy_bytes_per_s": bandwidth}


def fill(state: RowState, used: int) -> None:
    """Make every row run with `used` slots in use; if rows have chunks, each chunk has just begun."""
    state.done.fill_(False)
    state.used.fill_(used)
    state.count.zero_()
    if state.chunks is not None:
        state.chunks.start(slice(None))


def copy_bandwidth(device: torch.device, size: int = 2**31) -> float:
    """Bytes per second, reads plus writes, of a large copy."""
    source, target = (torch.empty(size, dtype=torch.int8, device=device) for _ in range(2))
    times = []
    for _ in range(10):
        before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before.record()
        target.copy_(source)
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after) / 1000)
    return 2 * size / statistics.median(times)


def transformers_tokens_per_s(model: nn.Module, prompts: list[list[int]], new: int) -> float:
    """The speed of `model.generate` on the same prompts: it samples, with its own dynamic cache."""
    ids = torch.tensor(prompts, device=next(model.parameters()).device)
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    seconds = 0.0
    for count in (4, new):  # the first call warms up
        start = time.perf_counter()
        cast(Any, model).generate(ids, max_new_tokens=count, min_new_tokens=count, **options)
        if ids.is_cuda:
            torch.cuda.synchronize(ids.device)
        seconds = time.perf_counter() - start
    return len(prompts) * new / seconds
