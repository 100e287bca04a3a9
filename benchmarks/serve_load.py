"""A server under load: clients that ask, hang up and cancel; is a row lost, does memory grow, does the queue hold?

    python benchmarks/serve_load.py --minutes 10 --clients 200

The server is a process of its own (`sparse-rl serve`, the built-in tiny model with a chat template). Every client asks
again and again: completions and chats, streamed or whole, short or long, with traces, maps and log-probs, conversations
that go on in their rows; some hang up in the middle, some send nonsense. A client that is refused with 429 waits as
long as Retry-After says. At the end every client has a stream open; then SIGTERM: all streams must end as they
should. Before it nothing may run or wait, and every row that is not free must be that of a conversation which may go
on. One JSON line with the numbers, memory by minute among them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx

KINDS = {"whole": 5, "stream": 4, "hang up": 3, "cancel": 2, "conversation": 2, "nonsense": 1}
CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
DONE = b"data: [DONE]\n\n"


@dataclass
class Found:
    """What clients and the watcher saw."""

    answers: Counter = field(default_factory=Counter)  # by kind and status
    wrong: list[str] = field(default_factory=list)  # what must not be
    memory: list[tuple[float, float]] = field(default_factory=list)  # seconds, MiB
    waiting: int = 0  # the longest queue that was seen


@dataclass
class Client:
    http: httpx.AsyncClient
    draw: random.Random
    name: str
    found: Found

    def asked(self) -> dict:
        return {
            "prompt": "+".join(str(self.draw.randrange(10)) for _ in range(self.draw.randrange(2, 9))) + "=",
            "max_tokens": self.draw.randrange(1, 120),
            "temperature": self.draw.choice([0.0, 0.7, 1.0]),
            "seed": self.draw.randrange(1000),
            "ignore_eos": self.draw.random() < 0.3,
            "n": self.draw.choice([1, 1, 1, 2]),
            "stop": self.draw.choice([None, None, "11"]),
            "trace": self.draw.random() < 0.2,
        }

    async def once(self) -> None:
        kind = self.draw.choices(list(KINDS), list(KINDS.values()))[0]
        try:
            status = await getattr(self, kind.replace(" ", "_"))()
        except httpx.TransportError as error:
            self.found.wrong.append(f"{kind}: {error!r}")
            return
        self.found.answers[f"{kind} {status}"] += 1
        if status >= 500:
            self.found.wrong.append(f"{kind}: {status}")

    async def told(self, answer: httpx.Response) -> int:
        """The status; a client that is told to come again later waits."""
        if answer.status_code == 429:
            await asyncio.sleep(float(answer.headers["Retry-After"]) * (0.5 + self.draw.random()))
        return answer.status_code

    async def whole(self) -> int:
        return await self.told(await self.http.post("/v1/completions", json=self.asked() | {"logprobs": 1}))

    async def stream(self) -> int:
        async with self.http.stream("POST", "/v1/completions", json=self.asked() | {"stream": True}) as answer:
            body = await answer.aread()
            if answer.status_code == 200 and not (body.endswith(DONE) and b'"error"' not in body):
                self.found.wrong.append(f"a stream was cut: {body[-200:]!r}")
            return await self.told(answer)

    async def hang_up(self) -> int:
        """Read a little of a stream, then close the connection."""
        asked = self.asked() | {"stream": True, "map": self.draw.random() < 0.3}
        async with self.http.stream("POST", "/v1/completions", json=asked) as answer:
            await asyncio.sleep(self.draw.random() / 4)
            return await self.told(answer)

    async def cancel(self) -> int:
        """Give up while waiting for the whole answer."""
        task = asyncio.create_task(self.http.post("/v1/completions", json=self.asked()))
        done, _ = await asyncio.wait({task}, timeout=self.draw.random() / 4)
        if done:
            return await self.told(await task)
        task.cancel()
        await asyncio.wait({task})
        return 0

    async def conversation(self) -> int:
        """Two or three turns in one row; sometimes the client leaves in the middle of one."""
        messages, status = [], 0
        for turn in range(self.draw.randrange(2, 4)):
            messages.append({"role": "user", "content": f"{self.draw.randrange(10)}+{turn}="})
            asked = {"messages": messages, "conversation": self.name, "max_tokens": self.draw.randrange(1, 30)}
            task = asyncio.create_task(self.http.post("/v1/chat/completions", json=asked))
            done, _ = await asyncio.wait({task}, timeout=60 if self.draw.random() < 0.8 else self.draw.random() / 20)
            if not done:
                task.cancel()
                await asyncio.wait({task})
                return 0
            answer = await task
            status = await self.told(answer)
            if status != 200:
                return status
            self.found.answers[f"turn {answer.json()['conversation']}"] += 1
            messages.append(answer.json()["choices"][0]["message"])
        return status

    async def nonsense(self) -> int:
        odd = self.draw.choice([{"temperature": "hot"}, {"n": 10**9}, {"prompt": "1" * 5000}, {"seed": []}])
        status = (await self.http.post("/v1/completions", json=self.asked() | odd)).status_code
        if status != 400:
            self.found.wrong.append(f"nonsense was answered {status}")
        return status

    async def until(self, end: float) -> None:
        while time.monotonic() < end:
            await self.once()
            await asyncio.sleep(self.draw.random() / 10)


def memory(process: int) -> float:
    """MiB that a process has in memory."""
    with open(f"/proc/{process}/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+)", status.read())[1]) / 1024  # pyright: ignore[reportOptionalSubscript]


def metrics(text: str) -> dict[str, float]:
    return {n: float(v) for n, v in re.findall(r"^sparse_rl_(\w+?)(?:_total)? ([\d.e+]+)$", text, re.M)}


async def watch(http: httpx.AsyncClient, server: subprocess.Popen, found: Found, every: float) -> None:
    began = time.monotonic()
    while True:
        found.memory.append((time.monotonic() - began, memory(server.pid)))
        found.waiting = max(found.waiting, (await http.get("/health")).json()["waiting"])
        await asyncio.sleep(every)


async def settled(http: httpx.AsyncClient) -> dict[str, float]:
    """What the server counts once nothing runs or waits."""
    end = time.monotonic() + 60
    while (health := (await http.get("/health")).json())["running"] + health["waiting"]:
        assert time.monotonic() < end, f"answers are lost: {health}"
        await asyncio.sleep(0.1)
    return metrics((await http.get("/metrics")).text)


async def drained(clients: list[Client], server: subprocess.Popen) -> Counter:
    """Every client has a stream open when SIGTERM comes: how do they end?"""
    began = asyncio.Semaphore(0)

    async def read(client: Client) -> str:
        asked = {"prompt": "1+2=", "max_tokens": 100, "ignore_eos": True, "stream": True}
        async with client.http.stream("POST", "/v1/completions", json=asked) as answer:
            began.release()
            body = await answer.aread()
        if answer.status_code != 200:
            return str(answer.status_code)
        return "whole" if body.endswith(DONE) and body.count(b'"finish_reason": "length"') == 1 else "cut"

    tasks = [asyncio.create_task(read(client)) for client in clients]
    for _ in tasks:
        await began.acquire()
    server.send_signal(signal.SIGTERM)
    return Counter(await asyncio.gather(*tasks))


async def load(address: str, server: subprocess.Popen, args: argparse.Namespace) -> tuple[Found, dict, Counter]:
    found, seconds = Found(), 60 * args.minutes
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=args.clients)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as http:
        clients = [Client(http, random.Random(i), f"client {i}", found) for i in range(args.clients)]
        watcher = asyncio.create_task(watch(http, server, found, max(0.5, seconds / 120)))
        end = time.monotonic() + seconds
        await asyncio.gather(*(client.until(end) for client in clients))
        watcher.cancel()
        told = await settled(http)
        ends = await drained(clients, server)
    return found, told, ends


def served_model(folder: Path) -> Path:
    from sparse_rl import load_model

    model, tokenizer = load_model("tiny-sums", "float32")
    tokenizer.chat_template = CHAT
    model.save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    return folder / "tiny"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--waiting", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sparse_rl", "serve", str(served_model(Path(folder))), "--budget", "30"]
        command += ["--interval", "4", "--rows", str(args.rows), "--waiting", str(args.waiting), "--max-tokens", "256"]
        server = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            address = next(found[0] for line in server.stdout if (found := re.search(r"http://\S+", line)))
            found, told, ends = asyncio.run(load(address, server, args))
        except BaseException:
            server.kill()
            raise
        _, errors = server.communicate(timeout=120)
    most = max(1, round(found.memory[-1][0] / 60))
    by_minute = {
        minute: round(statistics.median(size for at, size in found.memory if minute <= at / 60 < minute + 1), 1)
        for minute in range(most)
    }
    line = {
        "clients": args.clients,
        "minutes": args.minutes,
        "answers": dict(sorted(found.answers.items())),
        "server": told,
        "longest queue": found.waiting,
        "MiB by minute": by_minute,
        "at SIGTERM": dict(ends),
        "exit": server.returncode,
        "wrong": found.wrong[:20],
    }
    print(json.dumps(line))
    assert told["open"] == told["conversations"] >= told["rows_in_use"], "a row is lost"
    assert not found.wrong and server.returncode == 0 and "Traceback" not in errors, errors[-3000:]
    most = args.waiting + 4 * args.rows  # new answers, and conversations that go on: these have a place already
    assert set(ends) <= {"whole", "429"} and ends["whole"] and found.waiting <= most


if __name__ == "__main__":
    main()
