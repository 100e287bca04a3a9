"""A server under load: clients that ask, hang up and cancel; is a row lost, does memory grow, does the queue hold?

    python benchmarks/serve_load.py --minutes 10 --clients 200

The server is a process of its own (`sparse-rl serve tiny-sums`). Every client asks again and again: streamed or whole,
short or long; some hang up in the middle, some send nonsense. At the end nothing may run or wait, all rows must be
free, and what clients counted must be what the server counted. One JSON line with the numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter

import httpx


async def client(address: str, number: int, until: float, seen: Counter) -> None:
    draw = random.Random(number)
    async with httpx.AsyncClient(base_url=address, timeout=120) as http:
        while time.monotonic() < until:
            asked = {
                "prompt": "+".join(str(draw.randrange(10)) for _ in range(draw.randrange(2, 9))) + "=",
                "max_tokens": draw.randrange(1, 120),
                "temperature": draw.choice([0.0, 0.7, 1.0]),
                "seed": draw.randrange(1000),
                "ignore_eos": draw.random() < 0.3,
            }
            kind = draw.choices(["whole", "stream", "hang up", "nonsense"], [5, 4, 2, 1])[0]
            try:
                if kind == "nonsense":
                    answer = await http.post("/v1/completions", json={**asked, "temperature": "hot"})
                    seen[f"nonsense {answer.status_code}"] += 1
                elif kind == "whole":
                    answer = await http.post("/v1/completions", json=asked)
                    seen[f"whole {answer.status_code}"] += 1
                else:
                    async with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as answer:
                        seen[f"{kind} {answer.status_code}"] += 1
                        if kind == "hang up":
                            await asyncio.sleep(draw.random() / 4)
                        else:
                            body = await answer.aread()
                            seen["streams cut"] += not body.endswith(b"data: [DONE]\n\n") and answer.status_code == 200
            except httpx.TransportError as error:
                seen[f"{kind}: {type(error).__name__}"] += 1
            await asyncio.sleep(draw.random() / 10)


def memory(process: int) -> float:
    """MiB that a process has in memory."""
    with open(f"/proc/{process}/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+)", status.read())[1]) / 1024  # pyright: ignore[reportOptionalSubscript]


async def load(address: str, process: int, clients: int, seconds: float) -> tuple[Counter, list[float]]:
    seen, sizes, until = Counter(), [], time.monotonic() + seconds
    tasks = [asyncio.create_task(client(address, i, until, seen)) for i in range(clients)]
    while not all(task.done() for task in tasks):
        sizes.append(memory(process))
        await asyncio.sleep(max(1.0, seconds / 60))
    await asyncio.gather(*tasks)
    return seen, sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--waiting", type=int, default=64)
    args = parser.parse_args()
    command = [sys.executable, "-m", "sparse_rl", "serve", "tiny-sums", "--budget", "30", "--interval", "4"]
    command += ["--rows", str(args.rows), "--waiting", str(args.waiting), "--max-tokens", "256", "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
        seen, sizes = asyncio.run(load(address, server.pid, args.clients, 60 * args.minutes))
        end = time.monotonic() + 60
        while (health := httpx.get(f"{address}/health").json())["running"] + health["waiting"]:
            assert time.monotonic() < end, f"rows are lost: {health}"
            time.sleep(0.1)
        told = dict(re.findall(r"^(sparse_rl_\w+?)(?:_total)? ([\d.]+)$", httpx.get(f"{address}/metrics").text, re.M))
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait()
    third = len(sizes) // 3
    line = {
        "clients": args.clients,
        "minutes": args.minutes,
        "seen": dict(sorted(seen.items())),
        "server": {name.removeprefix("sparse_rl_"): float(value) for name, value in told.items()},
        "MiB": {"middle": round(max(sizes[third : 2 * third])), "end": round(max(sizes[2 * third :]))},
        "exit": code,
    }
    print(json.dumps(line))
    assert line["server"]["rows_in_use"] == 0 and code == 0 and not seen["streams cut"]


if __name__ == "__main__":
    main()
