"""The scale model against every row of docs/results/ with the seconds of a decode step, a rollout or a training step on
one H200.

    python benchmarks/scale_recorded.py            # the tables of docs/scale.md

The constants in sparse_rl/scale/model.py were fitted on the rows marked `fitted`, and nothing is fitted here. No row is
omitted, but those of training steps with learners of earlier versions.
"""

import re
from pathlib import Path

import numpy as np

from sparse_rl.config import load_recipe, make_recipe
from sparse_rl.scale.lengths import Lengths
from sparse_rl.scale.model import H200, Forecast, Links, Work, one_step, work_of

RESULTS = Path(__file__).parent.parent / "docs" / "results.md"
FITTED = {
    ("qwen2.5-1.5b", 16, 640),
    ("qwen2.5-1.5b", 256, 640),
    ("qwen2.5-1.5b", 1024, 640),
    ("qwen2.5-1.5b", 256, 1152),
}
PREFILL_FITTED = {("qwen2.5-1.5b", 256, 512), ("qwen2.5-7b", 256, 512)}
SHARES_FITTED = ("qwen2.5-1.5b", 256, 3840)  # evictions, traces and host
PROMPT = 308  # mean tokens of the prompts of the training step


def work(model: str, rows: int, new: int, prompt: int = 256, checkpointing: bool = True, **more: dict) -> Work:
    rollout = {"rows": rows, "prompts": rows, "group_size": 2, "max_new_tokens": new} | more.pop("rollout", {})
    settings = {
        "model": {"name": model, "gradient_checkpointing": checkpointing},
        "task": {"name": "math"},
        "rollout": rollout,
        **more,
    }
    return work_of(make_recipe(settings), prompt)


def numbers(cell: str) -> float:
    return float(re.sub(r"[^0-9.]", "", cell.split("(")[0]))


def recorded() -> str:
    """All pages of docs/results/."""
    return "\n".join(page.read_text() for page in sorted(RESULTS.with_suffix("").glob("*.md")))


def rows_of(first: str) -> list[list[str]]:
    """The cells of the table in docs/results/ whose first column has this heading."""
    lines = recorded().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return found
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def decode_steps() -> list[tuple[str, str, float, float]]:
    """(row, fitted or held out, predicted ms, measured ms)"""
    found = []
    for cells in rows_of("one step"):
        model, compressor, rows = cells[0].split(", ")
        rows, slots = int(rows.split()[0]), int(numbers(cells[1]))
        it = work(model, rows, 512, rollout={"compressor": compressor})
        fitted = "fitted" if (model, rows, slots) in FITTED else ""
        predicted = 1e3 * float(it.decode_seconds(H200, rows, slots))
        found.append((f"{model}, {rows} rows, {slots:,} slots", fitted, predicted, numbers(cells[2])))
    return found


def rollouts() -> list[tuple[str, str, float, float]]:
    """(row, fitted or held out, predicted s, measured s)"""
    found = []
    for cells in rows_of("rollout"):
        model, rows, new = cells[0].split(", ")
        rows, new = int(rows.split()[0]), int(numbers(new))
        fitted = "its prefill" if (model, rows, new) in PREFILL_FITTED else ""
        if (model, rows, new) == SHARES_FITTED:
            fitted = "its other shares"
        seconds = work(model, rows, new).rollout_seconds(H200, np.full(rows, new), rows)
        found.append((cells[0], fitted, seconds, numbers(cells[2])))
    for cells in rows_of("cache | slots of a row"):
        name, per_second = cells[0].replace("`", "").split()[0], numbers(cells[2])
        more = {"learn": {"method": "shadow"}} if name.startswith("beacon") else {}
        rollout = {"compressor": name, "budget": 207 if name == "rkv" else 512}
        it = work("qwen2.5-1.5b", 256, 1024, rollout=rollout, **more)
        seconds = it.rollout_seconds(H200, np.full(256, 1024), 256)
        what = f"qwen2.5-1.5b, 256 rows, 1,024 new, {name}, {numbers(cells[1]):,.0f} slots"
        found.append((what, "", seconds, 256 * 1024 / per_second))
    return found


def passes() -> list[tuple[str, str, float, float]]:
    """Stages of the learner alone, (row, fitted or held out, predicted ms, measured ms)"""
    found = []
    for stage, view, tokens, ms in rows_of("stage of the learner"):
        count, length = (int(numbers(part)) for part in tokens.split(" x "))
        it = work("qwen2.5-1.5b", 256, 4096, learn={"method": "shadow" if view == "shadow" else "none"})
        times = it.passes if stage == "update" else 1
        seconds = times * it.pass_seconds(H200, count * length, length)
        found.append((f"{stage}, {view}, {tokens} tokens", "", 1e3 * seconds, numbers(ms)))
    return found


def step_of(method: str, checkpointing: bool, ahead: int = 0) -> Forecast:
    """The step of 32 prompts x 8 completions of 1,024 tokens."""
    it = work(
        "qwen2.5-1.5b", 256, 1024, PROMPT,
        checkpointing=checkpointing,
        learn={"method": method, "minibatches": 4, "micro_batch_tokens": 16384},
        loss={"beta": 0.0 if method == "shadow" else 1e-4},
        rollout={"prompts": 32, "group_size": 8, "ahead": ahead},
    )  # fmt: skip
    return one_step(it, H200, Links(), 1, np.full((32, 8), 1024))


def training_steps() -> list[tuple[str, str, float, float]]:
    """Stage by stage: (row, fitted or held out, predicted s, measured s)"""
    found = []
    for cells in rows_of("1,024 new tokens"):
        method = "shadow" if "shadow" in cells[0] else "sparse-rl"
        step = step_of(method, checkpointing=False)
        ours = (step.rollout, step.sample - step.rollout, step.update, step.rest, step.step)
        for stage, predicted, took in zip(
            ("rollout", "score", "update", "rest", "step"), ours, cells[1:6], strict=True
        ):
            fitted = "their sum" if method == "sparse-rl" and stage in ("score", "update") else ""
            if predicted:
                found.append((f"{method}: {stage}", fitted, predicted, numbers(took)))
    took = next(line for line in recorded().splitlines() if line.startswith("| thread |")).split("|")[2]
    ahead = step_of("sparse-rl", checkpointing=True, ahead=1)
    found.append(("sparse-rl, checkpointing, one step ahead: step", "", ahead.step, numbers(took)))
    small = load_recipe("countdown-beacons", [("model.name", "tiny:6x256"), ("student.chunks", "[]")])
    drawn = Lengths(290, 0.4).draw(64, 8, 656, seed=0)
    ours = one_step(work_of(small, 30), H200, Links(), 1, drawn).step
    took = next(cells for cells in rows_of("students | a step") if cells[0] == "none")[1]
    return [*found, ("a model of 4.5 M parameters, 64 x 8 of about 290 tokens: step", "", ours, numbers(took))]


def table(head: str, unit: str, found: list[tuple[str, str, float, float]]) -> str:
    lines = [f"| {head} | | predicted, {unit} | measured, {unit} | error |", "|---|---|---|---|---|"]
    lines += [
        f"| {name} | {fitted} | {ours:.2f} | {theirs:.2f} | {ours / theirs - 1:+.1%} |"
        for name, fitted, ours, theirs in found
    ]
    return "\n".join(lines)


def tables() -> str:
    parts = [("one decode step", "ms", decode_steps()), ("rollout", "s", rollouts())]
    parts += [("stage of the learner", "ms", passes()), ("training step", "s", training_steps())]
    return "\n\n".join(table(*part) for part in parts)


if __name__ == "__main__":
    print(tables())
