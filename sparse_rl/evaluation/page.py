"""Show the cross table as a picture and as a self-contained page."""

from __future__ import annotations

import base64
import html
import io
import itertools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ..files import replace_file
from .compare import ALL, Cell, rows_of

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 96rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9em }
th, td { text-align: left; vertical-align: bottom; padding: .25rem .8rem .25rem 0; border-bottom: 1px solid #8884 }
td:first-child { white-space: nowrap }
code { overflow-wrap: anywhere }
tr.dense td { border-top: 2px solid #8888 }
img { max-width: 100%; background: white; border-radius: 4px }
p, li { max-width: 50rem }
"""

READING = """
<p>Differences of accuracy, the share of completions that are right, are in percentage points; those of mean rewards
are in rewards. Both have a 95 % interval from problems drawn with replacement, and the p-value of a paired test on the
same problems: McNemar's exact test if every problem has 0 or 1, as with one completion, and random signs otherwise.
{tests} tests are shown, without a correction for their number: about {chance:.0f} of them would be below 0.05 if
nothing differed.</p>
<p>Same verdict: the share of completions with the verdict of the dense cache. Same answer: of the completions that give
an answer on the dense cache (an empty box is not an answer), the share that gives the same one. Text in common: how
much of a completion on the dense cache is repeated before the two differ; both draw the same random numbers. KV tokens
saved: 1 - entries in use at the end / tokens. Tokens per second: the engine's speed on this machine.</p>
"""


def draw(cells: Sequence[Cell]) -> bytes:
    """Draw accuracy against budget, one panel per benchmark; below it mean rewards, if they say more than accuracy, and
    the text in common with the dense cache. -> PNG
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    benches = list(dict.fromkeys(c.bench for c in cells))
    across = min(3, len(benches))
    each = -(-len(benches) // across)  # rows of panels that one quantity takes
    quantities = [
        of_accuracy,
        *([of_reward] if any(c.graded_rewards for c in cells) else []),
        *([of_agreement] if any(c.in_common is not None for c in cells) else []),
    ]
    down = each * len(quantities)
    figure, axes = pyplot.subplots(
        down, across, figsize=(1.5 + 4.2 * across, 3.2 * down), squeeze=False, constrained_layout=True
    )
    for quantity, block in zip(quantities, (axes[i : i + each] for i in range(0, down, each))):
        for axis in block.flat[len(benches) :]:
            axis.axis("off")
        for axis, bench in zip(block.flat, benches):
            panel(axis, bench, [c for c in cells if c.bench == bench], quantity)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="outside right upper")
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110)
    pyplot.close(figure)
    return file.getvalue()


def of_accuracy(axis, line: Sequence[Cell], x: Sequence[float] | None, style: dict) -> None:
    axis.set_ylabel("accuracy")
    with_interval(axis, [(c.accuracy, c.low, c.high) for c in line], x, style)


def of_reward(axis, line: Sequence[Cell], x: Sequence[float] | None, style: dict) -> None:
    axis.set_ylabel("mean reward")
    with_interval(axis, [(c.reward, c.reward_low, c.reward_high) for c in line], x, style)


def with_interval(axis, points: list[tuple[float, float, float]], x: Sequence[float] | None, style: dict) -> None:
    """Draw (mean, low, high): of caches with a budget at x, of a cache without one as a line across the panel."""
    if x is None:
        ((mean, low, high),) = points
        axis.axhline(mean, linewidth=1, **style)
        axis.axhspan(low, high, color=style["color"], alpha=0.06)
    else:
        error = [[max(0.0, mean - low) for mean, low, _ in points], [max(0.0, high - mean) for mean, _, high in points]]
        axis.errorbar(x, [mean for mean, _, _ in points], error, capsize=2, **style)


def of_agreement(axis, line: Sequence[Cell], x: Sequence[float] | None, style: dict) -> None:
    axis.set_ylabel("text in common with dense")
    axis.set_ylim(top=1.02)
    if x is not None:
        axis.plot(x, [c.in_common for c in line], linewidth=0.8, **style)
    elif line[0].in_common is not None:
        axis.axhline(line[0].in_common, linewidth=1, **style)


def panel(axis, bench: str, cells: Sequence[Cell], quantity: Callable) -> None:
    models = list(dict.fromkeys(c.model for c in cells))
    names = list(dict.fromkeys(c.cache.split()[0] for c in cells if c.budget is not None))
    budgets = sorted({c.budget for c in cells if c.budget is not None})
    nearest = min((b / a for a, b in itertools.pairwise(budgets)), default=1.5)
    curves = max(len(models) * len(names) - 1, 1)
    for number, model in enumerate(models):
        style = {"linestyle": ("-", "--", ":", "-.")[number % 4]}
        before = f"{shortest(model, models)}, " if len(models) > 1 else ""
        for i, name in enumerate(names):
            aside = nearest ** (0.3 * ((i + len(names) * number) / curves - 0.5))  # points of a budget: side by side
            mine = [c for c in cells if c.model == model and c.cache.split()[0] == name]
            at = sorted(((c.budget, k) for k, c in enumerate(mine) if c.budget is not None))
            line, x = [mine[k] for _, k in at], [budget * aside for budget, _ in at]
            tint = f"C{i if len(names) > 1 else number}"  # of the cache, or of the model if there is one cache
            marker = "os^Dv"[number % 5]
            quantity(axis, line, x, {**style, "color": tint, "marker": marker, "label": legible(before + name)})
        for i, c in enumerate(c for c in cells if c.model == model and c.budget is None):
            color = "black" if c.cache == "dense" else f"C{len(names) + i}"
            quantity(axis, [c], None, {**style, "color": color, "label": legible(before + c.cache)})
    if budgets:
        axis.set_xscale("log", base=2)
        axis.set_xticks(budgets, [str(budget) for budget in budgets])
        axis.minorticks_off()
        if len(budgets) == 1:  # points side by side at the tick, not at the edges
            axis.set_xlim(budgets[0] / 2, budgets[0] * 2)
    axis.set(title=legible(bench), xlabel="budget")
    if quantity is not of_reward:  # which may be negative
        axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)


def shortest(model: str, models: Sequence[str]) -> str:
    """The last part of a model's name, or all of it if another model has the same last part."""
    name = Path(model).name
    return model if [Path(other).name for other in models].count(name) > 1 else name


def legible(text: str) -> str:
    """Text for matplotlib, which reads dollars as mathematics and hides names that begin with an underscore."""
    return (" " + text if text.startswith("_") else text).replace("$", r"\$")


def with_code(text: str) -> str:
    """Text as HTML, with text between backticks as code."""
    return re.sub("`(.*)`", r"<code>\1</code>", html.escape(text), flags=re.DOTALL)


def page(cells: Sequence[Cell], picture: bytes, asked: str) -> str:
    models = list(dict.fromkeys(c.model for c in cells))
    tests = sum(d is not None for c in cells for d in (c.cost, c.better, c.reward_cost, c.reward_better))
    encoded = base64.b64encode(picture).decode()
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{html.escape(' against '.join(models))}</title><style>{STYLE}</style>",
        f"<h1>{html.escape(' against '.join(models))}, dense and sparse inference</h1><p>{with_code(asked)}</p>",
        f"<img alt='accuracy, reward and text in common against budget' src='data:image/png;base64,{encoded}'>",
    ]
    benches = list(dict.fromkeys(c.bench for c in cells))
    for bench in [*([ALL] if ALL in benches else []), *(b for b in benches if b != ALL)]:
        heads, *rows = rows_of(bench, cells)
        parts.append(f"<h2>{html.escape(bench)}</h2><div class=wide><table>")
        parts.append(f"<tr>{''.join(f'<th>{html.escape(head)}' for head in heads)}")
        before = None
        for row in rows:
            style = " class=dense" if row[0] != before else ""
            parts.append(f"<tr{style}>{''.join(f'<td>{html.escape(value)}' for value in row)}")
            before = row[0]
        parts.append("</table></div>")
    parts.append(READING.format(tests=tests, chance=0.05 * tests))
    return "\n".join(parts) + "\n"


def write(cells: Sequence[Cell], folder: Path, asked: str) -> list[Path]:
    """Write compare.png and compare.html."""
    picture = draw(cells)
    image, document = folder / "compare.png", folder / "compare.html"
    replace_file(image, picture)
    replace_file(document, page(cells, picture, asked).encode())
    return [image, document]
