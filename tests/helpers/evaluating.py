"""Small evaluations and items."""

import json
from pathlib import Path

from typer.testing import CliRunner

from sparse_rl import Engine, Sampling, load_model, tasks
from sparse_rl.cli.main import app
from sparse_rl.evaluation import Exam, Results, ask
from sparse_rl.evaluation.results import Item

SMALL = ["--limit", 10, "--samples", 2, "--max-new-tokens", 40, "--rows", 4, "--seed", 3]
SPARSE = ["--compressor", "rkv", "--budget", 24, "--interval", 4]


def run(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)])


def asked_again(tmp_path, exams, rows=4, cache="rkv", **question):
    """What `ask` leaves in a folder, as items."""
    model, tokenizer = load_model("tiny-sums")
    with Results(
        tmp_path, {"model": "tiny-sums", "benches": {e.name: e.settings() for e in exams}, **question}
    ) as results:
        summaries = ask(Engine(model, cache, budget=24, interval=4, rows=rows), tokenizer, exams, 3, results)
    return results, summaries


def exam(name="sums", count=6, samples=2, new=40, **options) -> Exam:
    task = tasks.make(name, **options).held_out()
    return Exam(name, task, task.sample(0, count), samples, Sampling(new), options)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def item(bench="sums", index=0, sample=0, right=True, answer="1", **more) -> Item:
    usual = {"prompt": "p", "text": "t", "finish": "stop", "prompt_tokens": 4, "tokens": 6, "loop": False}
    usual |= {
        "entries": 7.0,
        "peak_entries": 9.0,
        "last_entries": 9.0,
        "gold": "1",
        "verdict": "right" if right else "wrong",
        "reward": float(right),
    }
    return Item(bench=bench, index=index, sample=sample, answer=answer, **(usual | more))
