"""`make demo`: the built-in model learns running sums on a compressed cache, with three methods side by side.

    sparse-rl demo --out runs/demo          # about two minutes on one CPU core

The row of rollouts on a dense cache was measured once with the same settings; `python -m sparse_rl.demo` measures it
again.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .config import RECIPES, Recipe, load_recipe
from .errors import SparseRLError
from .files import read_lines
from .planning.memory import size
from .report import write
from .report.palette import colour
from .train.run import train

METHODS = {  # what each does about the mismatch between the sampler's small cache and the learner
    "naive": "ignores the mismatch: it takes the sampler's log-probs for the learner's own",
    "sparse-rl": "corrects it: it rejects and reweights, and learns as if the cache were dense",
    "shadow": "removes it: the learner sees what the small cache held, and learns for that cache",
}
DENSE = "dense*"  # the reference
REFERENCE = Path(__file__).parent / "assets" / "demo-dense.json"


def recipe(method: str) -> Recipe:
    """25 steps of the recipe tiny-sums with a correction preset; `dense`: on the dense cache."""
    changes = [("method", method)]
    if method == "dense":
        changes = [("compressor", "dense"), ("compressor_options", "{}"), ("method", "none")]
    return load_recipe(RECIPES / "tiny-sums.yaml", [("steps", "25"), *changes])


def run(out: Path) -> None:
    """Train with every method, print the table, draw the picture and write the report."""
    console, start = Console(), time.perf_counter()
    if out.exists() and not (out / "naive" / "recipe.yaml").exists() and any(out.iterdir()):
        raise SparseRLError(f"{out} holds something other than a demo; choose another folder with --out.")
    console.print(
        "A character-level model of 0.3 M parameters learns running sums by GRPO: "
        "25 steps of 16 prompts x 8 completions, "
        "sampled on an R-KV cache of 38 + 4 slots where a prompt and its completion have about 70 tokens.\n"
    )
    rows = {}
    for method in METHODS:
        shutil.rmtree(out / method, ignore_errors=True)
        train(recipe(method), out / method)
        rows[method] = summary(out / method)
    rows[DENSE] = json.loads(REFERENCE.read_text())
    tell(console, rows)
    try:
        picture = draw(rows, out / "demo.png")
        console.print(f"\nCurves: {picture}")
    except ImportError:
        console.print("\nNo picture: matplotlib is not installed (pip install 'sparse-rl[plot]').")
    page = write([out / method for method in METHODS], out / "report.html")
    console.print(f"Report, with every sampled token and what each head still saw: {page}")
    console.print(f"{time.perf_counter() - start:.0f} s in all")


def tell(console: Console, rows: dict[str, dict]) -> None:
    """Print the table, what its columns are, and what the curves do."""
    console.print(table(rows))
    console.print(
        "dense, sparse: share of 128 held-out sums that are right, sampled on the whole cache and on 38 + 4 slots; "
        "after: the mean of the last two evaluations. KV cache, rejected, tokens per s: of the training rollouts.\n"
        f"* rollouts on a dense cache, as reference; measured once ({rows[DENSE]['measured']}).\n"
    )
    for line in reading(rows):
        console.print(line, highlight=False)


def summary(folder: Path) -> dict:
    """The numbers of a run that the table and the picture show."""
    metrics, timing = read_lines(folder / "metrics.jsonl"), read_lines(folder / "timing.jsonl")

    def values(lines: list[dict], key: str) -> list[tuple[int, float]]:
        return [(line["step"], line[key]) for line in lines if line.get(key) is not None]

    def mean(lines: list[dict], key: str) -> float:
        return statistics.mean(value for _, value in values(lines, key))

    return {
        "curves": {view: values(metrics, f"eval/{view}/accuracy") for view in ("dense", "sparse")},
        "reward": values(metrics, "reward/mean"),
        "rejected": mean(metrics, "reject/trajectories/frac"),
        "kv_bytes": mean(timing, "cache/bytes/allocated"),
        "tokens_per_s": mean(timing, "rollout/tokens_per_s"),
    }


def before_and_after(curve: list[tuple[int, float]]) -> tuple[float | None, float]:
    """The first evaluation, None if there is only one, and the mean of the last two."""
    return (curve[0][1] if len(curve) > 1 else None), statistics.mean(value for _, value in curve[-2:])


def reading(rows: dict[str, dict]) -> list[str]:
    """What the curves of every method do, in words."""
    lines = []
    for method, idea in METHODS.items():
        moves = []
        for view, cache in (("dense", "the dense cache"), ("sparse", "38 + 4 slots")):
            before, after = before_and_after(rows[method]["curves"][view])
            assert before is not None
            change = after - before
            word = "stays near" if abs(change) < 0.05 else "rises to" if change > 0 else "falls to"
            moves.append(f"{word} {after:.2f} on {cache}")
        lines.append(f"{method} {idea}. Accuracy {' and '.join(moves)}.")
    return lines


def table(rows: dict[str, dict]) -> Table:
    """One row per method: accuracy before and after, on both caches, and what the rollouts took."""
    result = Table()
    accuracies = ("dense\nbefore", "dense\nafter", "sparse\nbefore", "sparse\nafter")
    for heading in ("", *accuracies, "KV\ncache", "re-\njected", "tokens\nper s"):
        result.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, row in rows.items():
        cells = []
        for view in ("dense", "sparse"):
            before, after = before_and_after(row["curves"][view])
            cells += ["" if before is None else f"{before:.2f}", f"{after:.2f}"]
        # the reference was measured at another time, perhaps on another machine: its speed is not comparable
        speed = "" if "measured" in row else f"{row['tokens_per_s']:,.0f}"
        result.add_row(name, *cells, size(row["kv_bytes"]), f"{row['rejected']:.0%}", speed)
    return result


def draw(rows: dict[str, dict], path: Path) -> Path:
    """Accuracies and rewards over the steps, as a picture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(12, 3.6), sharex=True, layout="constrained")
    titles = ("held-out accuracy, dense cache", "held-out accuracy, 38 + 4 slots", "reward of the training rollouts")
    for name, row in rows.items():
        style = {"color": colour(name.rstrip("*")), "label": name, "linestyle": "--" if name == DENSE else "-"}
        for axis, curve in zip(axes, (*row["curves"].values(), row["reward"])):
            if curve:
                axis.plot(*zip(*curve), marker="o" if len(curve) < 15 else None, markersize=3, **style)
    for axis, title in zip(axes, titles):
        axis.set_title(title, fontsize=10)
        axis.set_ylim(0, 1)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    axes[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path


def measure_reference(out: Path, measured: str) -> None:
    """Write the dense row that is shipped: the same settings, nothing evicted. `measured` says when and on what."""
    from .compressors import make
    from .rollout import Engine
    from .train.held_out import accuracy

    shutil.rmtree(out, ignore_errors=True)
    trainer, rollout = train(recipe("dense"), out), recipe("naive").rollout
    assert trainer.held_out is not None
    compressor = make(rollout.compressor, **rollout.cache_options)
    engine = Engine(trainer.model, compressor, rollout.max_budget, rollout.interval, rollout.rows)
    prompts = trainer.held_out.sample(0, trainer.recipe.eval.prompts)
    found = accuracy(engine, trainer.tokenizer, trainer.held_out, prompts, 2, trainer.sampler.sampling, seed=0)
    result = summary(out)
    result["measured"] = measured
    result["curves"]["sparse"] = [(trainer.steps_done, found["accuracy"])]
    REFERENCE.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    measure_reference(Path("runs/demo-dense"), " ".join(sys.argv[1:]) or "by you")
