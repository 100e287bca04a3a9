"""Streams of a server beside the rollout of `bench rollout` and beside vLLM's server, one after the other on one GPU.

    python benchmarks/serve_gpu.py --out runs/serve                               # minutes on one H200
    python benchmarks/serve_gpu.py --out runs/serve --peer-python OTHER/bin/python    # a Python that has vLLM
    python benchmarks/serve_gpu.py --out runs/serve --tiny                        # that it works: a CPU, seconds

    rollout       `sparse-rl bench rollout`: the engine alone, rows x (prompt + new) tokens
    serve         `sparse-rl serve`, asked for as many streams at once
    serve-dense   the same on the dense cache; only if asked for with --columns
    vllm          vLLM's OpenAI server on the same weights, prompts and lengths

The load: `--streams` completions begin at once, each with a prompt of `--prompt` token ids and exactly `--new` tokens
(`ignore_eos`), streamed, at temperature 1. Tokens per second are all tokens over the time from the first request to the
last token. The time to the first token is counted from the moment its request is sent. Clients are processes of
their own, four of them, which read lines and nothing else. A shorter load goes before, to compile and capture. Every
column leaves COLUMN.json in the folder, and what it said in COLUMN.log; columns that are there are not measured again,
and one that fails does not keep the others. Weights are random, in bf16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import peers
from stay import provenance, sentence

COLUMNS = ("rollout", "serve", "vllm")
PROCESSES = 4  # of clients


# ---------------------------------------------------------------------------------------------------------- the clients


async def stream(port: int, body: bytes) -> dict[str, float]:
    """One stream: when it was asked for, when its first token and its last came, and how many tokens it had."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**22)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    began, first, tokens, chunks = time.time(), 0.0, 0, 0
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    status = await reader.readline()
    assert b" 200 " in status, (status, await reader.read())
    async for line in reader:
        if line.startswith(b"data: {"):
            chunks += 1
            first = first or time.time()
            if b'"usage"' in line and (usage := json.loads(line[6:]).get("usage")):
                tokens = usage["completion_tokens"]
    writer.close()
    return {"began": began, "first": first, "ended": time.time(), "tokens": tokens, "chunks": chunks}


def asked(number: int, name: str, prompt: int, new: int, vocabulary: int) -> bytes:
    draw = random.Random(number)
    return json.dumps(
        {
            "model": name,
            "prompt": [draw.randrange(1, vocabulary) for _ in range(prompt)],
            "max_tokens": new,
            "temperature": 1.0,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


def some_streams(port: int, bodies: list[bytes], begin: float) -> list[dict[str, float]]:
    async def all_of_them() -> list[dict[str, float]]:
        await asyncio.sleep(max(0.0, begin - time.time()))
        return await asyncio.gather(*(stream(port, body) for body in bodies))

    return asyncio.run(all_of_them())


def load(port: int, name: str, args: argparse.Namespace, new: int) -> dict:
    bodies = [asked(i, name, args.prompt, new, args.vocabulary) for i in range(args.streams)]
    parts = [bodies[i::PROCESSES] for i in range(PROCESSES)]
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        begin = time.time() + (0.5 if args.tiny else 3.0)
        found = [one for part in pool.starmap(some_streams, [(port, p, begin) for p in parts]) for one in part]
    assert all(one["tokens"] == new for one in found), sorted({one["tokens"] for one in found})
    waits = sorted(one["first"] - one["began"] for one in found)
    seconds = max(one["ended"] for one in found) - min(one["began"] for one in found)
    return {
        "tokens_per_s": args.streams * new / seconds,
        "seconds": seconds,
        "first_token_p50_s": statistics.median(waits),
        "first_token_p99_s": waits[min(len(waits) - 1, round(0.99 * len(waits)))],
        "chunks_per_s": sum(one["chunks"] for one in found) / seconds,
    }


# ---------------------------------------------------------------------------------------------------------- the servers


@contextmanager
def running(
    command: list[str], port: int, log: Path, patience: float = 300, environment: dict[str, str] | None = None
) -> Iterator[None]:
    with log.open("w") as file:
        server = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + patience
        while True:
            assert server.poll() is None and time.monotonic() < end, f"the server did not start: {last_line(log)}"
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def last_line(log: Path) -> str:
    return (log.read_text(errors="replace").strip().splitlines() or ["it said nothing"])[-1]


def measured(
    command: list[str], port: int, column: str, args: argparse.Namespace, environment: dict[str, str] | None = None
) -> dict:
    with running(command, port, args.out / f"{column}.log", environment=environment):
        warm = load(port, "model", args, min(args.new, args.warm))
        print(f"{column}: a load of {args.warm} tokens took {warm['seconds']:.1f} s", flush=True)
        return load(port, "model", args, args.new)


def serve(args: argparse.Namespace, port: int, compressor: str) -> dict:
    total = args.prompt + args.new + 8
    command = [sys.executable, "-m", "sparse_rl", "serve", str(args.out / "model"), "--compressor", compressor]
    command += ["--budget", str(args.budget), "--interval", str(args.interval), "--rows", str(args.streams)]
    command += ["--dense-rows", "0", "--prompt-tokens", str(args.prompt), "--max-tokens", str(total)]
    column = "serve" if compressor == "rkv" else "serve-dense"
    return measured([*command, "--waiting", str(args.streams), "--port", str(port)], port, column, args)


def vllm(args: argparse.Namespace, port: int) -> dict | None:
    if why := peers.left_out(args.peer_python, args.peer_path, ("vllm",)):
        print(f"vllm is left out: {why}", flush=True)
        return None
    command = [args.peer_python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.out / "model")]
    command += ["--served-model-name", "model", "--port", str(port), "--max-num-seqs", str(args.streams)]
    command += ["--max-model-len", str(args.prompt + args.new + 8), "--no-enable-prefix-caching"]
    return measured(command, port, "vllm", args, peers.environment(args.peer_path) | peers.SERVER)


def rollout(args: argparse.Namespace) -> dict:
    command = [sys.executable, "-m", "sparse_rl", "bench", "rollout", "--model-shape", args.shape, "--json"]
    command += ["--budget", str(args.budget), "--interval", str(args.interval), "--rows", str(args.streams)]
    command += ["--prompt", str(args.prompt), "--new", str(args.new), "--repeats", "1" if args.tiny else "3"]
    log = args.out / "rollout.log"
    with log.open("w") as file:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=file, text=True)
    assert done.returncode == 0, f"bench rollout failed: {last_line(log)}"
    return json.loads(done.stdout.splitlines()[-1])


def write_model(folder: Path, shape: str) -> int:
    """Random weights, and a tokenizer with a word for every id. -> size of the vocabulary"""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    from sparse_rl.models import load_config, load_model

    vocabulary = load_config(shape).vocab_size
    if not (folder / "tokenizer.json").exists():  # the last to be written
        model, _ = load_model(shape if shape == "tiny" else f"random:{shape}")  # made where it is fast: on the GPU
        model.save_pretrained(folder)
        words = Tokenizer(models.WordLevel({f" {i}": i for i in range(vocabulary)}, unk_token=" 0"))
        words.decoder = decoders.Fuse()
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token=" 1", pad_token=" 0").save_pretrained(folder)
    return vocabulary


def model_in_a_process(folder: Path, shape: str) -> int:
    """`write_model`; its process ends, and with it what it holds of the device."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(write_model, (folder, shape))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--columns", default=",".join(COLUMNS))
    peers.add_options(parser)
    parser.add_argument("--shape", default="qwen2.5-1.5b")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=2048)
    parser.add_argument("--warm", type=int, default=640, help="tokens of the streams that go before: beyond evictions")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.shape, args.streams, args.prompt, args.new, args.warm = "tiny", 16, 16, 200, 40
        args.budget, args.interval = 32, 8
    args.out.mkdir(parents=True, exist_ok=True)
    args.vocabulary = model_in_a_process(args.out / "model", args.shape)
    ways = {
        "rollout": lambda: rollout(args),
        "serve": lambda: serve(args, free_port(), "rkv"),
        "serve-dense": lambda: serve(args, free_port(), "dense"),
        "vllm": lambda: vllm(args, free_port()),
    }
    found, failed = {}, []
    for column in args.columns.split(","):
        place = args.out / f"{column}.json"
        if not place.exists():
            try:
                result = ways[column]()
            except Exception as error:  # the other columns go on
                failed.append(column)
                print(f"{column} failed: {type(error).__name__}: {error}", flush=True)
                continue
            if result is None:
                continue
            place.write_text(json.dumps({**result, **provenance()}))
            print(f"{column}: {result['tokens_per_s']:,.0f} tokens/s", flush=True)
        found[column] = json.loads(place.read_text())
    print(table(found))
    print(sentence(provenance()))
    if failed:
        sys.exit(f"serve_gpu: failed: {', '.join(failed)}")


def table(found: dict[str, dict]) -> str:
    lines = ["| | tokens/s | of rollout | first token p50 | p99 | chunks/s |", "|---|---|---|---|---|---|"]
    base = found.get("rollout", {}).get("tokens_per_s")
    for column, result in found.items():
        share = f"{result['tokens_per_s'] / base:.2f}" if base else ""
        waits = [f"{result[key]:.2f} s" if key in result else "" for key in ("first_token_p50_s", "first_token_p99_s")]
        chunks = f"{result['chunks_per_s']:,.0f}" if "chunks_per_s" in result else ""
        lines.append(f"| {column} | {result['tokens_per_s']:,.0f} | {share} | {' | '.join(waits)} | {chunks} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
