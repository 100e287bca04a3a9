"""The rollout tables of docs/results/rollouts.md and their picture: one GPU, random weights of public shapes.

    python benchmarks/rollout_gpu.py --out runs/bench             # everything, about ten minutes on one H200
    python benchmarks/rollout_gpu.py --out runs/bench --only noise,steps
    python benchmarks/rollout_gpu.py --out runs/slots --only slots,slots-kernel   # slots of 8 bits beside bf16
    python benchmarks/rollout_gpu.py --out runs/slots --only slots,slots-vllm --peer-python OTHER/bin/python
    python benchmarks/rollout_gpu.py --out runs/tiny --only slots,slots-vllm --tiny   # that it works: a CPU
    python benchmarks/rollout_gpu.py --out runs/bench --plot      # tables and picture of the measurements so far

`slots-vllm` is vLLM's dense cache in the model's dtype and in fp8, for the same rollouts as `slots`; `speed-vllm` for
those of `short` and `goal-1.5b`. Both are left out where there is no vLLM. Every measurement becomes a line of
results.jsonl at once, and is not repeated.
"""

import argparse
import json
import sys
import traceback
from dataclasses import asdict, replace
from pathlib import Path

import peers
import torch
from stay import provenance

from sparse_rl import Engine, Sampling, token_logprobs
from sparse_rl.bench import Setting, bench_rollout, bench_step
from sparse_rl.cache.formats import PLAIN, slot_format
from sparse_rl.compressors import make
from sparse_rl.models import load_config, load_model

BASE = Setting()  # Qwen2.5-1.5B, R-KV 512 + 128, 256 rows, prompts of 256, 3,840 new tokens


def of(name: str, **changes) -> Setting:
    return replace(BASE, model_shape=f"qwen2.5-{name}", **{"repeats": 1, **changes})


# rollouts and single steps, by model, so that each model is made once
PARTS = {
    "short": {"rollouts": [of("1.5b", new=512, repeats=3, peer="transformers")]},
    "goal-1.5b": {"rollouts": [of("1.5b"), of("1.5b", rows=1024)]},
    "length": {"rollouts": [of("1.5b", new=1024), of("1.5b", new=2048), of("1.5b", new=16384)]},
    "rows": {"rollouts": [of("1.5b", rows=rows, new=512) for rows in (16, 64, 512, 1024)]},
    "steps": {
        "steps": [
            *[of("1.5b", rows=rows) for rows in (16, 32, 64, 128, 256, 512, 1024)],
            *[of("1.5b", budget=budget) for budget in (128, 256, 1024, 2048)],
            of("1.5b", compressor="dense"),
        ]
    },
    "0.5b": {"rollouts": [of("0.5b", new=512)], "steps": [of("0.5b")]},
    "3b": {"rollouts": [of("3b", new=512)], "steps": [of("3b")]},
    "slots": {  # slots of 8 bits beside bf16, one after the other; `ratios` compares them
        part: [
            of(name, rows=rows, slots=slots, **more)
            for name in ("1.5b", "7b")
            for rows in (256, 1024)
            for slots in ("model", "fp8", "int8")
        ]
        for part, more in (("steps", {}), ("rollouts", {"new": 1024}))
    },
    "7b": {"rollouts": [of("7b", new=512), of("7b", rows=1024)], "steps": [of("7b"), of("7b", rows=1024)]},
}


TINY = {"model_shape": "tiny", "rows": 4, "budget": 16, "interval": 8, "prompt": 8, "new": 24, "repeats": 1}
VLLM_KINDS = {"auto": "model", "fp8": "fp8"}  # vLLM's name of a cache, and ours of slots
VLLM_PARTS = {"slots-vllm": (("slots",), ("auto", "fp8")), "speed-vllm": (("short", "goal-1.5b"), ("auto",))}


class Models:
    """One at a time: they are made when first asked for."""

    def __init__(self):
        self.name, self.model = None, None

    def __call__(self, name: str):
        if name != self.name:
            self.drop()
            shape = name if name == "tiny" else f"random:{name}"
            self.name, self.model = name, load_model(shape, device="cuda" if torch.cuda.is_available() else None)[0]
        return self.model

    def drop(self) -> None:
        self.name, self.model = None, None
        torch.cuda.empty_cache()


def in_vllm(setting: Setting, kv: str, out: Path, args: argparse.Namespace) -> dict:
    """The same rollout by vLLM, in its own process."""
    folder = out / f"vllm-{setting.model_shape}"
    folder.mkdir(exist_ok=True)
    peers.write_config(load_config(setting.model_shape), folder)
    return {**asdict(setting), **peers.vllm_rollout(args, folder, setting.rows, setting.prompt, setting.new, kv)}


def step(setting: Setting, model) -> dict:
    """One decode step alone, after a rollout short enough to capture it."""
    dense = setting.compressor == "dense"
    engine = Engine(
        model,
        make(setting.compressor, slots=setting.slots),
        setting.budget,
        setting.interval,
        setting.rows,
        max_tokens=setting.prompt + setting.new if dense else None,
    )
    sampling = Sampling(max_new_tokens=4, stop_ids=())
    engine.generate([[1] * 8] * setting.rows, sampling=sampling)
    for tensor in (tensor for stored in engine.cache.stored for tensor in (stored.keys, stored.values)):
        tensor.normal_() if tensor.is_floating_point() else tensor.random_(0, 120)
    return {**asdict(setting), "capacity": engine.cache.capacity, **bench_step(engine, sampling)}


def noise(model, new: int = 512) -> dict:
    """Mean |gap| of dense rollouts against a dense forward, and of sparse rollouts against both views; under replay
    also with slots of 8 bits.
    """
    found = {}
    ways = [("dense", "dense", PLAIN, False), ("shadow", "rkv", PLAIN, True), ("uncorrected", "rkv", PLAIN, False)]
    for name, compressor, slots, shadow in [
        *ways,
        ("shadow fp8", "rkv", "fp8", True),
        ("shadow int8", "rkv", "int8", True),
    ]:
        engine = Engine(
            model, make(compressor, slots=slots), budget=128, interval=64, rows=16,
            max_tokens=256 + new if compressor == "dense" else None,
        )  # fmt: skip
        prompts = torch.randint(1, 150000, (16, 128), generator=torch.Generator().manual_seed(1)).tolist()
        gaps = []
        for t in engine.generate(prompts, sampling=Sampling(new, stop_ids=())):
            with torch.no_grad():
                gap = token_logprobs(model, t.tokens, t.trace if shadow else None).cpu() - t.sampler_logprobs
            gaps.append(gap[t.num_prompt_tokens :].abs())
        found[name] = torch.cat(gaps).mean().item()
    return found | {f"{kind} / bf16": found[f"shadow {kind}"] / found["shadow"] for kind in ("fp8", "int8")}


# How a program of the decode kernel may walk the slots: (slots at a time, warps, tiles read ahead + 1)
TILES = [(32, 2, 3), (32, 2, 5), (64, 2, 3), (64, 4, 3), (64, 4, 4), (128, 4, 3)]


def kernel(heads: int, group: int, rows: int, capacity: int = 640, dim: int = 128, device: str = "cuda") -> dict:
    """Microseconds of the decode kernel alone in one layer of full rows, for each kind of slots and each way to walk
    them, and the bytes per second that it reads.
    """
    from triton.testing import do_bench

    from sparse_rl.cache import CacheShape, SlotCache
    from sparse_rl.kernels.decode import store_and_attend

    found: dict[str, float] = {}
    query = torch.randn(rows, heads * group, dim, device=device, dtype=torch.bfloat16)
    key = torch.randn(rows, heads, dim, device=device, dtype=torch.bfloat16)
    used, live = torch.full((rows,), capacity - 1, device=device), torch.ones(rows, dtype=torch.bool, device=device)
    for slots in ("model", "fp8", "int8"):
        shape = CacheShape(1, heads, heads * group, dim, dim, torch.bfloat16, slots=slot_format(slots))
        cache = SlotCache(shape, rows, capacity, device)
        for block, warps, stages in TILES:
            try:
                microseconds = 1000 * do_bench(
                    lambda c=cache, b=block, w=warps, s=stages: store_and_attend(
                        query, key, key, c.layer(0), used, used, live, 0.1, block=b, num_warps=w, num_stages=s
                    )
                )
            except Exception as error:  # such as too little shared memory: the other ways go on
                print(f"{slots}, tiles {block} {warps} {stages}: {type(error).__name__}: {error}", flush=True)
                continue
            found[f"{slots} {block} {warps} {stages} us"] = microseconds
            found[f"{slots} {block} {warps} {stages} TB/s"] = rows * capacity * shape.stored_bytes / microseconds / 1e6
    return found


def run(out: Path, only: list[str], args: argparse.Namespace) -> list[str]:
    """-> what failed"""
    path = out / "results.jsonl"
    known = {line["key"] for line in read(path)}
    models, failed = Models(), []

    def record(key: str, make) -> None:
        if key not in known:
            try:
                result = {"key": key, **make(), **provenance()}
            except Exception:  # the other measurements go on
                traceback.print_exc()
                torch.cuda.empty_cache()
                failed.append(key)
                return
            if "error" in result:  # and is tried again
                print(f"{key}: {result['error']}", flush=True)
                if "left out" not in result["error"]:
                    failed.append(key)
                return
            with path.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(
                key,
                {
                    k: round(v, 4)
                    for k, v in result.items()
                    if k in ("tokens_per_s", "full_step_ms", "of_floor", "ms_per_step")
                },
                flush=True,
            )
            torch.cuda.empty_cache()

    for part in only:
        if part == "noise":
            record("noise qwen2.5-1.5b", lambda: noise(models(BASE.model_shape)))
            continue
        if part == "slots-kernel":
            for shape, heads, group in (("1.5b", 2, 6), ("7b", 4, 7)):
                for rows in (256, 1024):
                    record(f"kernel {shape} rows {rows}", lambda h=heads, g=group, r=rows: kernel(h, g, r))
            continue
        if part in VLLM_PARTS:
            models.drop()
            of_parts, kinds = VLLM_PARTS[part]
            own = [setting for of in of_parts for setting in PARTS[of]["rollouts"] if setting.slots == PLAIN]
            for setting in [replace(own[0], **TINY)] if args.tiny else own:
                for kv in kinds:
                    record(
                        f"vllm {setting.model_shape} rows {setting.rows} {kv} new {setting.new}",
                        lambda s=setting, k=kv: in_vllm(s, k, out, args),
                    )
            continue
        if args.tiny:
            for setting in {s.slots: replace(s, **TINY) for s in PARTS[part].get("rollouts", [])}.values():
                record(
                    f"rollout {name(setting)} new {setting.new}",
                    lambda s=setting: bench_rollout(s, models(s.model_shape)),
                )
            continue
        for setting in PARTS[part].get("steps", []):
            record(f"step {name(setting)}", lambda s=setting: step(s, models(s.model_shape)))
        for setting in PARTS[part].get("rollouts", []):
            record(
                f"rollout {name(setting)} new {setting.new}", lambda s=setting: bench_rollout(s, models(s.model_shape))
            )
    return failed


def name(setting: Setting) -> str:
    stored = "" if setting.slots == PLAIN else f" {setting.slots}"
    return f"{setting.model_shape} {setting.compressor} {setting.budget}+{setting.interval} rows {setting.rows}{stored}"


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tables(lines: list[dict]) -> str:
    text = [
        "| rollout | tokens/s | s | ms / step | prefill | decode | evict | trace | host | KV | peak / planned |",
        "|" + "---|" * 11,
    ]
    for r in (r for r in lines if r["key"].startswith("rollout")):
        share = {k: f"{100 * v:.1f} %" for k, v in r["share"].items()}
        what = f"{r['model_shape']}, {r['rows']} rows, {r['new']:,} new{stored(r)}"
        held = "" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2**30:.1f}"
        peak = f"{held} / {r['planned_bytes'] / 2**30:.1f} GiB"
        parts = " | ".join(share.get(k, "0") for k in ("prefill", "decode", "evict", "trace", "host"))
        kv = f"{r['kv_bytes'] / 2**30:.2f} GiB"
        speed = f"{r['tokens_per_s']:,.0f} | {r['seconds']:.2f} | {r['ms_per_step']:.2f}"
        text.append(f"| {what} | {speed} | {parts} | {kv} | {peak} |")
    text += ["", "| one step | slots | ms | floor, ms | of the floor | tokens/s |", "|" + "---|" * 6]
    for r in (r for r in lines if r["key"].startswith("step")):
        what = f"{r['model_shape']}, {r['compressor']}, {r['rows']} rows{stored(r)}"
        times = f"{r['full_step_ms']:.2f} | {r['floor_ms']:.2f} | {r['of_floor']:.0%}"
        text.append(f"| {what} | {capacity(r):,} | {times} | {r['rows'] / r['full_step_ms'] * 1000:,.0f} |")
    text += ratios(lines) + beside_vllm(lines)
    text += [f"noise: {r}" for r in lines if r["key"].startswith("noise")]
    text += [f"{r['key']}: {kind} {best(r, kind)}" for r in lines if r["key"].startswith("kernel")
             for kind in ("model", "fp8", "int8")]  # fmt: skip
    text += [f"transformers: {r['peer_tokens_per_s']:,.0f} tokens/s" for r in lines if "peer_tokens_per_s" in r]
    return "\n".join(text)


def stored(line: dict) -> str:
    return f", {line['slots']} slots" if line.get("slots") in ("fp8", "int8") else ""


def capacity(line: dict) -> int:
    return line["capacity"] if "capacity" in line else line["slots"]  # measurements of earlier versions


def best(line: dict, kind: str) -> str:
    """The fastest way to walk slots of a kind."""
    times = {key: value for key, value in line.items() if key.startswith(f"{kind} ") and key.endswith(" us")}
    if not times:
        return "could not be measured"
    fastest = min(times, key=times.__getitem__)
    way = fastest.removeprefix(f"{kind} ").removesuffix(" us")
    return f"{times[fastest]:.1f} us, {line[f'{kind} {way} TB/s']:.2f} TB/s (block, warps, stages {way})"


def ratios(lines: list[dict]) -> list[str]:
    """Slots of 8 bits against those of the model's dtype, where both were measured."""
    known, text = {line["key"]: line for line in lines}, []
    for r in lines:
        plain = known.get(r["key"].replace(f" {r.get('slots')}", "")) if stored(r) else None
        if plain is None:
            continue
        if r["key"].startswith("step"):
            ratio, what = plain["full_step_ms"] / r["full_step_ms"], "one step"
        else:
            ratio, what = r["tokens_per_s"] / plain["tokens_per_s"], f"{r['new']:,} new tokens"
        text.append(f"| {r['model_shape']}, {r['rows']} rows, {what} | {r['slots']} | {ratio:.2f}x |")
    head = ["", "| against slots of the model's dtype | slots | speed |", "|---|---|---|"]
    return [*head, *text, ""] if text else []


def beside_vllm(lines: list[dict]) -> list[str]:
    """Our slots and vLLM's dense cache, each in the model's dtype and in fp8."""
    ours = {
        (r["model_shape"], r["rows"], r["new"], r["slots"]): r
        for r in lines
        if r["key"].startswith("rollout") and r["compressor"] == BASE.compressor
    }
    text = []
    for r in (r for r in lines if r["key"].startswith("vllm")):
        kind = VLLM_KINDS[r["kv_cache_dtype"]]
        own = ours.get((r["model_shape"], r["rows"], r["new"], kind))
        cells = [f"{own['tokens_per_s']:,.0f}", f"{own['tokens_per_s'] / r['tokens_per_s']:.2f}x"] if own else ["", ""]
        what = f"{r['model_shape']}, {r['rows']} rows, {r['new']:,} new, {kind if kind == 'fp8' else 'its own dtype'}"
        text.append(f"| {what} | {r['tokens_per_s']:,.0f} | {' | '.join(cells)} |")
    heads = ["", "| keys and values | vLLM's tokens/s (dense cache) | ours | ratio |", "|---|---|---|---|"]
    return [*heads, *text, ""] if text else []


def plot(lines: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # thousand tokens/s, Qwen2.5-1.5B, 256 requests, vLLM 0.24 on the same kind of GPU (docs/results/rollouts.md)
    vllm = {512: 29.3, 3840: 22.9}
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.8), layout="constrained")
    steps = [
        r
        for r in lines
        if r["key"].startswith("step")
        and (r["model_shape"], r["compressor"], stored(r)) == (BASE.model_shape, "rkv", "")
    ]
    by_rows = sorted(
        (r["rows"], r["rows"] / r["full_step_ms"], r["rows"] / r["floor_ms"])
        for r in steps
        if r["budget"] == BASE.budget
    )
    left.plot([r for r, *_ in by_rows], [s for _, s, _ in by_rows], "o-", label="measured")
    left.plot([r for r, *_ in by_rows], [f for *_, f in by_rows], ":", color="grey", label="at the memory's speed")
    left.set(xscale="log", yscale="log", xlabel="rows", ylabel="thousand tokens/s", title="one step, 512 + 128 slots")
    left.legend(frameon=False)
    by_slots = sorted((capacity(r), r["full_step_ms"], r["floor_ms"]) for r in steps if r["rows"] == BASE.rows)
    middle.plot([s for s, *_ in by_slots], [m for _, m, _ in by_slots], "o-", label="measured")
    middle.plot([s for s, *_ in by_slots], [f for *_, f in by_slots], ":", color="grey", label="at the memory's speed")
    middle.set(xlabel="slots of a row", ylabel="ms per step", title="256 rows", ylim=(0, None))
    middle.legend(frameon=False)
    rollouts = [
        r
        for r in lines
        if r["key"].startswith("rollout")
        and (r["model_shape"], r["rows"], stored(r)) == (BASE.model_shape, BASE.rows, "")
    ]
    by_length = sorted((r["new"], r["tokens_per_s"] / 1000) for r in rollouts)
    right.plot(*zip(*by_length, strict=True), "o-", label="R-KV 512 + 128")
    right.plot(list(vllm), list(vllm.values()), "s--", color="tab:red", label="vLLM 0.24, dense")
    right.set(
        xscale="log", xlabel="new tokens", ylabel="thousand tokens/s", title="whole rollouts, 256 rows", ylim=(0, None)
    )
    right.legend(frameon=False)
    figure.suptitle("Qwen2.5-1.5B shape, bf16, one NVIDIA H200")
    figure.savefig(path, dpi=110)


def main() -> None:
    parts = ["noise", *PARTS, "slots-kernel", *VLLM_PARTS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/bench"))
    parser.add_argument("--only", default=",".join(parts), help=f"some of {','.join(parts)}")
    parser.add_argument("--plot", action="store_true", help="measure nothing")
    parser.add_argument("--tiny", action="store_true", help="rollouts of a tiny model alone")
    peers.add_options(parser)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    failed = []
    if not arguments.plot:
        failed = run(arguments.out, arguments.only.split(","), arguments)
    lines = read(arguments.out / "results.jsonl")
    print(tables(lines))
    if any(line["key"].startswith("step") for line in lines) and any(
        line["key"].startswith("rollout") for line in lines
    ):
        try:
            plot(lines, arguments.out / "rollout.png")
        except Exception as error:  # such as no matplotlib: the numbers are there
            print(f"no picture: {type(error).__name__}: {error}", flush=True)
    if failed:
        sys.exit(f"rollout_gpu: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
