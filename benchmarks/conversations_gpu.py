"""Conversations whose replies take their time, beside the same tokens in one turn: tokens per second, rows that wait.

    python benchmarks/conversations_gpu.py --out runs/conversations               # Qwen2.5-1.5B's shape, one H200
    python benchmarks/conversations_gpu.py --out runs/tiny --tiny                 # a rehearsal on a CPU

512 conversations on 256 rows, 4 turns of 512 sampled tokens with 128 given ones after each but the last. A reply comes
10 to 500 ms after a turn has ended. The arms, one after the other on one engine:

    one turn        `generate`: the given tokens are part of the prompt, all others are sampled at once
    at once         conversations whose replies take no time
    kept            a row is kept for its conversation as long as that costs less than moving it (what training does)
    given away      a row goes to another conversation as soon as one waits, and is moved to host memory and back

Goal: `kept` at least 0.8 times as fast as `one turn`. Every arm is a line of results.jsonl at once, and not repeated;
one that fails does not keep the others.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import sys
import time
import traceback
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from stay import provenance

from sparse_rl import Engine, Sampling
from sparse_rl.models import load_model


@dataclass(frozen=True)
class Shape:
    model: str = "random:qwen2.5-1.5b"
    conversations: int = 512
    rows: int = 256
    turns: int = 4
    prompt: int = 256
    new: int = 512  # sampled in a turn
    given: int = 128  # after a turn
    budget: int = 512
    interval: int = 128
    shortest: float = 0.010  # seconds until a reply
    longest: float = 0.500

    @property
    def sampled(self) -> int:
        return self.conversations * self.turns * self.new

    @property
    def tokens(self) -> int:
        """Of a conversation."""
        return self.prompt + self.turns * self.new + (self.turns - 1) * self.given


TINY = Shape("tiny", 12, 6, 3, 12, 16, 6, 16, 8, 0.001, 0.02)


def one_turn(engine: Engine, shape: Shape) -> dict:
    prompts = drawn(engine, shape.prompt + (shape.turns - 1) * shape.given, shape.conversations)
    began = time.perf_counter()
    done = engine.generate(prompts, sampling=Sampling(shape.turns * shape.new, stop_ids=()), seed=0)
    seconds = time.perf_counter() - began
    assert sum(len(t.response_tokens) for t in done) == shape.sampled
    return {"seconds": seconds}


def conversations(engine: Engine, shape: Shape, patience: float | None, shortest: float, longest: float) -> dict:
    """All of them are open from the beginning. -> seconds, and the shares of rows' time that went by without work"""
    rng, turn = random.Random(0), Sampling(shape.new, stop_ids=())
    replies = drawn(engine, shape.given, shape.conversations)
    began = time.perf_counter()
    waits = early = moved = 0.0
    coming: list[tuple[float, int]] = []  # when a reply comes, and to which conversation
    with engine.open(
        shape.prompt, shape.tokens, conversations=shape.conversations, waiting=shape.conversations,
        park=shape.conversations, patience=patience,
    ) as live:  # fmt: skip
        chats = [live.submit(p, turn) for p in drawn(engine, shape.prompt, shape.conversations)]
        left, ended = [shape.turns] * len(chats), 0
        while ended < len(chats):
            before = time.perf_counter()
            news = live.step()
            ended_now = [chat for chat in news if chat.status == "stopped"]
            ran = len(ended_now) + sum(chat.status == "running" for chat in chats)
            needed = len(chats) - ended >= engine.rows
            lost = (time.perf_counter() - before) * max(0, engine.rows - ran)
            for chat in ended_now:
                left[chat.number] -= 1
                if left[chat.number]:
                    heapq.heappush(coming, (time.perf_counter() + rng.uniform(shortest, longest), chat.number))
                else:
                    live.release(chat)
                    ended += 1
            while coming and coming[0][0] <= time.perf_counter():
                chat = chats[heapq.heappop(coming)[1]]
                moved += chat.row is None
                live.extend(chat, replies[chat.number], turn)
            if coming and live.idle:
                began_to_wait = time.perf_counter()
                time.sleep(max(0.0, min(coming[0][0] - began_to_wait, live.until_yield, 0.05)))
                lost += (time.perf_counter() - began_to_wait) * engine.rows
            waits += lost
            early += lost if needed else 0.0
    seconds = time.perf_counter() - began
    whole = seconds * engine.rows
    assert all(chat.num_sampled == shape.turns * shape.new for chat in chats)
    found = {"seconds": seconds, "rows idle": waits / whole, "rows idle while all are needed": early / whole}
    return found | {"moved": moved / (len(chats) * (shape.turns - 1))}


def arms(shape: Shape) -> dict:
    wait = (shape.shortest, shape.longest)
    return {
        "one turn": one_turn,
        "at once": lambda engine, shape: conversations(engine, shape, None, 0.0, 0.0),
        "kept": lambda engine, shape: conversations(engine, shape, None, *wait),
        "given away": lambda engine, shape: conversations(engine, shape, 0.0, *wait),
    }


def warm_up(engine: Engine, shape: Shape) -> None:
    """Compile and capture what every arm needs, at every number of rows: conversations that end one after the other."""
    few = replace(shape, conversations=shape.rows, turns=2, new=min(shape.new, 160))
    one_turn(engine, few)
    with engine.open(shape.prompt, shape.tokens) as live:
        prompts = drawn(engine, shape.prompt, shape.rows)
        chats = [live.submit(p, Sampling(1 + i * few.new // shape.rows, stop_ids=())) for i, p in enumerate(prompts)]
        while any(chat.status != "ended" for chat in chats):
            for chat in live.step():
                if chat.status == "stopped" and chat.num_sampled < few.new:
                    live.extend(chat, prompts[0][: shape.given], Sampling(few.new, stop_ids=()))
                elif chat.status == "stopped":
                    live.release(chat)


def drawn(engine: Engine, tokens: int, many: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(1, engine.shape.vocabulary, (many, tokens), generator=generator).tolist()


def table(lines: list[dict]) -> str:
    heads = ("arm", "seconds", "sampled tokens/s", "of one turn", "rows idle", "while all are needed", "turns moved")
    rows = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    plain = next((line["tokens_per_s"] for line in lines if line["arm"] == "one turn"), None)
    for line in lines:
        cells = [line["arm"], f"{line['seconds']:.1f}", f"{line['tokens_per_s']:,.0f}"]
        cells.append("" if plain is None else f"{line['tokens_per_s'] / plain:.2f}")
        shares = ("rows idle", "rows idle while all are needed", "moved")
        cells += [f"{line[name]:.1%}" if name in line else "" for name in shares]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/conversations"))
    parser.add_argument("--arms", default="one turn,at once,kept,given away")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    shape = TINY if args.tiny else Shape()
    args.out.mkdir(parents=True, exist_ok=True)
    results = args.out / "results.jsonl"
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    same = {**asdict(shape), "machine": machine}
    found = [json.loads(line) for line in results.open()] if results.exists() else []
    lines = [line for line in found if same.items() <= line.items()]
    model = load_model(shape.model, device=None if args.tiny else "cuda")[0]
    engine = Engine(model, "rkv", budget=shape.budget, interval=shape.interval, rows=shape.rows)
    engine.reserve(shape.prompt + (shape.turns - 1) * shape.given, shape.tokens)  # no arm moves what is captured
    failed = []
    for name in args.arms.split(","):
        if any(line["arm"] == name for line in lines):
            continue
        try:
            warm_up(engine, shape)
            found = arms(shape)[name](engine, shape)
        except Exception:
            failed.append(name)
            traceback.print_exc()
            continue
        speed = {"tokens_per_s": shape.sampled / found["seconds"]}
        line = {"arm": name, **found, **speed, **same, **provenance()}
        lines.append(line)
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(name, {key: round(value, 4) for key, value in {**found, **speed}.items()}, flush=True)
    text = table(lines)
    (args.out / "table.md").write_text(text + "\n")
    print(text)
    if failed:
        sys.exit(f"conversations_gpu: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
