"""What a pool of samplers costs: messages and bytes of a step, its share of the time, and how fast weights travel.

    python benchmarks/pool_overhead.py --out runs/overhead dealing            # 2 to 64 samplers with stub engines
    python benchmarks/pool_overhead.py --out runs/overhead weights 1.5b 7b    # on two nodes of the loopback interface
    python benchmarks/pool_overhead.py --out runs/overhead --table            # repeat any of them: counts are kept

`dealing`: a step of Qwen2.5-1.5B's shape with drawn response lengths. Pool, ledger and Ray are those of a run; a
sampler's engine is a stub that sleeps as long as the scale model says that an H200 takes, and then brings as many bytes
as a result has (`bytes`: measured once on an engine with 28 layers and two KV heads). The scale model's prediction is
made of the same lengths by the same ledger, without Ray: what a step takes beyond it is the pool's overhead.

`weights`: bf16 arrays in the shapes of a model go into the object store of one node, and an actor on another node
fetches them and copies them once, as a sampler does. A part is little more than 512 MiB, as in a run. 1.5B: all parts
stay until the next version comes, of which there are two: the first into memory that nobody has touched, the second
into that of the first. 7B: each part is forgotten as soon as it was fetched, so that it needs little memory. Last, a
share of the weights changes, as in a step (benchmarks/weight_changes.py), and only that is sent.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": ""}
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from sparse_rl.files import append_line, read_lines
from sparse_rl.pool import cluster
from sparse_rl.pool.cluster import Actor, RayTransport
from sparse_rl.pool.pieces import cut
from sparse_rl.pool.pool import Pool
from sparse_rl.pool.weights import Changes, changed_part

SAMPLERS = (2, 4, 8, 16, 32, 64)
PROMPTS, GROUP, LONGEST, MEAN, PROMPT_TOKENS = 128, 8, 4096, 1024, 256
PART = 512 * 2**20


def work_of_shape(samplers: int) -> Any:
    from sparse_rl.config import load_recipe
    from sparse_rl.scale.model import work_of

    keys = {"model.name": "random:qwen2.5-1.5b", "rollout.pool": "ray", "rollout.samplers": samplers}
    keys |= {"rollout.prompts": PROMPTS, "rollout.group_size": GROUP, "rollout.max_new_tokens": LONGEST}
    return work_of(load_recipe("qwen2.5-1.5b-simplerl", [(k, str(v)) for k, v in keys.items()]), PROMPT_TOKENS)


@dataclass(frozen=True)
class Stub:
    """Makes hands that sleep."""

    rows: int
    new: np.ndarray  # lengths [prompts, group]
    bytes_per_token: float

    def __call__(self) -> StubHands:
        return StubHands(self)


class StubHands:
    def __init__(self, stub: Stub):
        self.stub, self.rows, self.done = stub, stub.rows, 0
        self.times: tuple[list[float], float] = ([], 0.0)  # of what it is handed: until each piece is there, and in all
        self.noise = np.random.default_rng(0).bytes(2**25)  # what a compressed trace looks like

    def complete(self, work, fetch, deliver) -> None:
        for part in fetch(None):
            _ = [array.copy() for array in part.values()]
        times, total = self.times
        start = time.perf_counter()
        for number in np.argsort(times):
            place, piece = work[number]
            time.sleep(max(0.0, start + times[number] - time.perf_counter()))
            tokens = int(self.stub.new[piece.prompt_index, list(piece.members)].sum())
            deliver(place, self.noise[: int(tokens * self.stub.bytes_per_token)])
            self.done += 1
        time.sleep(max(0.0, start + total - time.perf_counter()))

    def begin(self) -> None: ...

    def stop(self) -> None: ...

    def beats(self) -> int:
        return self.done

    def tokens(self) -> int:
        return 0

    def cache_bytes(self) -> int:
        return 0

    def fetched_bytes(self) -> int:
        return 0

    def spent(self) -> dict[str, float]:
        return {}


class TimedActor(Actor):
    """Is told how long what it is handed takes: it has neither the model nor torch."""

    hands: Any

    def timed_start(self, work, weights, seconds, times):
        self.hands.times = times
        return self.start(work, weights, seconds)


def deal_once(samplers: int, bytes_per_token: float, steps: int) -> dict:
    """`steps` steps of a pool, after one in which everybody joins; and what the scale model says."""
    import ray

    from sparse_rl.scale.lengths import Lengths
    from sparse_rl.scale.model import H200
    from sparse_rl.scale.pool import finish_times, pool_rollout

    work = work_of_shape(samplers)
    new = Lengths(MEAN, 0.75).draw(PROMPTS, GROUP, LONGEST, seed=0)
    predicted = pool_rollout(work, H200, samplers, new)
    pieces = cut([[i] for i in range(PROMPTS)], [list(range(GROUP))] * PROMPTS, 0, 0)

    class Timed(RayTransport):
        def hand(self, member, handed):
            times = finish_times(work, H200, [piece for _, piece in handed], new, scores=False)
            weights = self.weights.offer(0)
            self.asked[self.actors[member].timed_start.remote(list(handed), weights, self.poll, times)] = member

    cluster.Actor = TimedActor  # pyright: ignore[reportAttributeAccessIssue]
    ray.init(num_cpus=samplers, object_store_memory=2**30, include_dashboard=False, log_to_driver=False)
    try:
        transport = Timed("ray", Stub(work.rollout.rows, new, bytes_per_token), samplers, False, 0)
        pool = Pool(transport, samplers)
        pool.publish(0, lambda: [{"w": np.zeros(1, np.int16)}])
        while pool.live < samplers:
            pool.turn()
        seconds, cpu, before = [], time.process_time(), (pool.counts.messages, pool.counts.bytes_in)
        for _ in range(steps):
            start = time.perf_counter()
            pool.complete(pieces)
            seconds.append(time.perf_counter() - start)
        cpu = (time.process_time() - cpu) / steps
        messages, received = (now - then for now, then in zip((pool.counts.messages, pool.counts.bytes_in), before))
        pool.close()
    finally:
        ray.shutdown()
    found = {"kind": "dealing", "samplers": samplers, "seconds": float(np.median(seconds)), "learner_cpu": cpu}
    found |= {"messages": messages / steps, "bytes": received / steps, "steps": steps}
    return found | {"predicted": predicted.seconds, "predicted_messages": predicted.messages}


def measure_bytes() -> float:
    """Bytes per token of a result of an engine with the 1.5B shape's layers and KV heads, R-KV 512 + 128."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from sparse_rl.config import load_recipe
    from sparse_rl.rollout import Engine, Sampling
    from sparse_rl.train.ask import Done, closed
    from sparse_rl.train.budget import compressor_of

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 28, "num_attention_heads": 4}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_key_value_heads=2, head_dim=16, vocab_size=512)).eval()
    recipe = load_recipe("qwen2.5-1.5b-simplerl", [])
    engine = Engine(model, compressor_of(recipe.rollout), rows=4)
    prompts = torch.randint(10, 500, (1, PROMPT_TOKENS)).tolist()
    found = engine.generate(prompts, 4, Sampling(max_new_tokens=MEAN), 0)
    return len(closed(Done(found))) / sum(len(t.response_tokens) for t in found)


SHAPES = {  # hidden, intermediate, layers, query heads, KV heads, head width, vocabulary, tied
    "1.5b": (1536, 8960, 28, 12, 2, 128, 151936, True),
    "7b": (3584, 18944, 28, 28, 4, 128, 152064, False),
}


def arrays_of(name: str, changed: float = 0.0):
    """The bf16 arrays of a model in parts, all of them views of one block of random numbers.

    changed: share of the numbers that differ from those of other calls
    """
    hidden, inner, layers, heads, kv, width, vocabulary, tied = SHAPES[name]
    layer = [hidden * heads * width * 2, 2 * hidden * kv * width, 3 * hidden * inner, 2 * hidden]
    sizes = [vocabulary * hidden] * (1 if tied else 2) + [count for _ in range(layers) for count in layer]
    block = np.random.default_rng(0).integers(-(2**15), 2**15, max(sizes), dtype=np.int16)
    block[np.random.default_rng(1).random(len(block), np.float32) < changed] ^= 1
    part, size = {}, 0
    for i, count in enumerate(sizes):
        part[str(i)] = block[:count]
        size += 2 * count
        if size >= PART:
            yield part
            part, size = {}, 0
    yield part


class Receiver:
    def receive(self, refs: list[Any]) -> tuple[int, float, float]:
        """(bytes, seconds of fetching, seconds of copying)"""
        import ray

        start = time.perf_counter()
        part = ray.get(refs[0])
        fetched = time.perf_counter()
        if not hasattr(self, "buffer"):
            self.buffer = np.zeros(2**30, np.int16)  # parameters that are there already
        begun, size = time.perf_counter(), 0
        for content in part.values():
            if isinstance(content, Changes):
                self.buffer[content.places] = content.values
            else:
                np.copyto(self.buffer[: content.size], content)
            size += content.nbytes
        return size, fetched - start, time.perf_counter() - begun


def send_weights(name: str, forget: bool, changed: float) -> list[dict]:
    """Two versions of a model, and then what changed; forget: one version, of which each part is dropped from the store
    as soon as it was fetched
    """
    import ray
    from ray.cluster_utils import Cluster

    store = int(1.5 * 2**30) if forget else int(3.4 * 2**30)
    nodes = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": store, "include_dashboard": False}
    )
    nodes.add_node(num_cpus=1, object_store_memory=store, resources={"other": 1})
    ray.init(address=nodes.address, log_to_driver=False)
    try:
        receiver = ray.remote(Receiver).options(resources={"other": 1}).remote()
        ray.get(receiver.receive.remote([ray.put({"w": np.zeros(1, np.int16)})]))
        lines = []
        for version in range(1 if forget else 2):
            lines.append(
                {"model": name, "kept": not forget, "version": version, **send(ray, receiver, arrays_of(name), forget)}
            )
            time.sleep(2.0)  # until both stores have forgotten it
        compared = 0.0

        def changes():
            nonlocal compared
            for new, old in zip(arrays_of(name, changed), arrays_of(name), strict=True):
                start = time.perf_counter()
                part = changed_part(new, old)
                compared += time.perf_counter() - start
                yield part

        found = send(ray, receiver, changes(), forget)
        return [*lines, {"model": name, "changed": changed, "compare": compared, **found}]
    finally:
        ray.shutdown()
        nodes.shutdown()


def send(ray: Any, receiver: Any, parts: Iterable[Any], forget: bool) -> dict:
    total, put, fetched, copied, kept, count = 0, 0.0, 0.0, 0.0, [], 0
    for part in parts:
        start = time.perf_counter()
        ref = ray.put(part)
        put += time.perf_counter() - start
        size, fetch, copy = ray.get(receiver.receive.remote([ref]))
        total, fetched, copied, count = total + size, fetched + fetch, copied + copy, count + 1
        if not forget:
            kept.append(ref)
        del ref
    return {"kind": "weights", "bytes": total, "parts": count, "put": put, "fetch": fetched, "copy": copied}


def table(lines: list[dict]) -> str:
    rows = [
        "| samplers | a step | predicted | overhead | learner's process | messages | predicted, at most | received |"
    ]
    rows += ["|" + "---|" * 8]
    for line in sorted((r for r in lines if r["kind"] == "dealing"), key=lambda r: r["samplers"]):
        over = line["seconds"] / line["predicted"] - 1
        rows.append(
            f"| {line['samplers']} | {line['seconds']:.2f} s | {line['predicted']:.2f} s | {over:+.1%} | "
            f"{line['learner_cpu']:.2f} s ({line['learner_cpu'] / line['seconds']:.0%}) | {line['messages']:.0f} | "
            f"{line['predicted_messages']} | {line['bytes'] / 2**20:.1f} MiB |"
        )
    heads = "| model | bytes | parts | compared | into the store | to the other node | copied | in all |"
    rows += ["", heads, "|" + "---|" * 8]
    for line in (r for r in lines if r["kind"] == "weights"):
        stages = [line.get("compare", 0.0), *(line[name] for name in ("put", "fetch", "copy"))]
        told = "changes" if "changed" in line else f"version {line['version'] + 1}" if line["kept"] else "part by part"
        rates = [f"{s:.1f} s" + (f" ({line['bytes'] / s / 1e9:.2f} GB/s)" if s > 0.05 else "") for s in stages[1:]]
        cells = [f"{line['model']}, {told}", f"{line['bytes'] / 1e9:.2f} GB", line["parts"], f"{stages[0]:.1f} s"]
        rows.append("| " + " | ".join(map(str, [*cells, *rates, f"{sum(stages):.1f} s"])) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="bytes; dealing, or numbers of samplers; weights 1.5b 7b")
    parser.add_argument("--out", type=Path, default=Path("runs/overhead"))
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--changed", type=float, default=0.005, help="share of the weights that a step changes")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    results = given.out / "results.jsonl"
    lines = read_lines(results)
    if "dealing" in given.what or "bytes" in given.what:
        known = [line["per_token"] for line in lines if line["kind"] == "bytes"]
        per_token = known[0] if known else measure_bytes()
        if not known:
            append_line(results, {"kind": "bytes", "per_token": per_token})
        print(f"{per_token:.1f} bytes per token", flush=True)
        done = {line["samplers"] for line in lines if line["kind"] == "dealing"}
        for samplers in [n for n in SAMPLERS if n not in done] if "dealing" in given.what else []:
            append_line(results, found := deal_once(samplers, per_token, given.steps))
            print(found, flush=True)
    for name in (name for name in given.what if name in SHAPES):
        for found in send_weights(name, name == "7b", given.changed):
            append_line(results, found)
            print(found, flush=True)
    if given.table:
        print(table(read_lines(results)))


if __name__ == "__main__":
    main()
