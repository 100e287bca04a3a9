"""Show a run in the terminal: a table of its latest steps that redraws itself, or plain lines without a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..pool.standing import Standings

_ROWS = 12
_SAMPLERS = 8  # samplers that are shown
_COLUMNS = {  # heading -> (metric, format)
    "reward": ("reward/mean", "{:.3f}"),
    "right": ("reward/right/frac", "{:.1%}"),
    "rejected": ("reject/trajectories/frac", "{:.1%}"),
    "xi p05": ("gap/xi/p05", "{:.3f}"),
    "alpha p05": ("gap/alpha/p05", "{:.3f}"),
    "KV tokens saved": ("cache/tokens_saved/frac", "{:.0%}"),
    "tokens/s": ("rollout/tokens_per_s", "{:,.0f}"),
    "dense": ("eval/dense/accuracy", "{:.3f}"),
    "dense reward": ("eval/dense/reward", "{:.3f}"),
    "sparse": ("eval/sparse/accuracy", "{:.3f}"),
    "sparse reward": ("eval/sparse/reward", "{:.3f}"),
}
_IF_REWARDS_SAY_MORE = {  # heading -> the metric that it repeats if a reward is 1 for a right answer and else 0
    "right": "reward/mean",
    "dense reward": "eval/dense/accuracy",
    "sparse reward": "eval/sparse/accuracy",
}


class TerminalTable:
    """Shows the numbers of every step. As a context manager it owns the terminal while it is open.

    enabled: whether steps are shown. quiet: `say` shows nothing either.
    """

    def __init__(self, title: str, steps: int, enabled: bool = True, quiet: bool = False):
        self.title, self.steps, self.enabled = title, steps, enabled
        self.rows: dict[int, dict] = {}
        self.console = Console(stderr=True, quiet=quiet)
        self.live = Live(console=self.console, refresh_per_second=4) if enabled and sys.stderr.isatty() else None
        self.started: tuple[float, int] | None = None
        self.stage = ""
        self.samplers: Standings | None = None  # those of a pool
        self.changing = threading.RLock()  # a pool may call from other threads

    def show_stage(self, stage: str) -> None:
        """Show what the run is doing."""
        with self.changing:
            self.stage = stage
            self._redraw()

    def show_samplers(self, samplers: Standings) -> None:
        """Show where a pool's samplers are and what they do."""
        with self.changing:
            self.samplers = samplers
            self._redraw()

    def _redraw(self) -> None:
        if self.live:
            shown = [self.table(), *([] if self.samplers is None else [samplers_table(self.samplers)])]
            self.live.update(Group(*shown))

    def show(self, step: int, values: Mapping[str, float]) -> None:
        now = time.perf_counter()
        with self.changing:
            self.started = self.started or (now, step)
            self.rows[step] = {**self.rows.get(step, {}), **values}
            self._redraw()
        if self.enabled and not self.live:
            cells = [f"{name} {text}" for name, text in self.cells(values).items() if text]
            print(f"step {step}/{self.steps}: {', '.join(cells)}{self.time_left(step)}", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def columns(self) -> dict[str, tuple[str, str]]:
        """Heading -> (metric, format): the usual columns, one for each named reward, one for a critic, two for a pool,
        and two for each student (its KL to the teacher and its accuracy).
        """
        found = {heading: column for heading, column in _COLUMNS.items() if not self._repeats(heading)}
        for name in dict.fromkeys(name for values in self.rows.values() for name in values):
            part, who, quantity = (*name.split("/"), "", "")[:3]
            if (part, quantity) == ("reward", "mean"):
                found[who] = (name, "{:.3f}")
            elif name == "value/explained/frac":
                found["critic explains"] = (name, "{:.0%}")
            elif (part, quantity) == ("pool", "count") and who in ("samplers", "lost"):
                found[who] = (name, "{:.0f}")
            elif (part, quantity) == ("student", "kl"):
                found[f"{who} KL"] = (name, "{:.3f}")
            elif (part, quantity) == ("eval", "accuracy") and who not in ("dense", "sparse"):
                found[who] = (name, "{:.3f}")
        return found

    def _repeats(self, heading: str) -> bool:
        """Whether a column repeats another one."""
        other = _IF_REWARDS_SAY_MORE.get(heading)
        name, _ = _COLUMNS[heading]
        return other is not None and all(abs(v.get(name, 0.0) - v.get(other, 0.0)) < 1e-9 for v in self.rows.values())

    def cells(self, values: Mapping[str, float]) -> dict[str, str]:
        columns = self.columns().items()
        return {
            heading: pattern.format(values[name]) if values.get(name) is not None else ""
            for heading, (name, pattern) in columns
        }

    def time_left(self, step: int) -> str:
        assert self.started is not None, "no step was shown yet"
        start, first = self.started
        if step <= first or step >= self.steps:
            return ""
        left = (time.perf_counter() - start) / (step - first) * (self.steps - step)
        return f"; {left // 3600:.0f}:{left // 60 % 60:02.0f}:{left % 60:02.0f} left"

    def table(self) -> Table:
        last = max(self.rows, default=0)
        left = self.time_left(last) if self.rows else ""
        table = Table(title=f"{self.title}: step {last} of {self.steps}{left}", caption=f"now: {self.stage}")
        for heading in ("step", *self.columns()):
            table.add_column(heading, justify="right", no_wrap=True)
        shown = [step for step in self.rows if "eval/dense/accuracy" in self.rows[step]][-_ROWS // 2 :]
        shown = sorted({*shown, *list(self.rows)[-_ROWS // 2 :]})
        for step in shown:
            table.add_row(str(step), *self.cells(self.rows[step]).values())
        return table

    def __enter__(self) -> TerminalTable:
        if self.live:
            self.live.__enter__()
        return self

    def __exit__(self, *exception) -> None:
        if self.live:
            self.live.__exit__(*exception)


def samplers_table(found: Standings) -> Table:
    """A table of a pool's first few samplers, and the sum of the others."""
    under_way = f"pieces {found.done} of {found.asked}" if found.asked else "nothing is asked for"
    table = Table(title=f"{len(found.samplers)} samplers: {under_way}")
    for heading in ("sampler", "node", "pieces", "has", "tokens/s", "lost on its node"):
        table.add_column(heading, justify="left" if heading == "node" else "right", no_wrap=True)
    for member in found.samplers[:_SAMPLERS]:
        rate = "" if member.tokens_per_s is None else f"{member.tokens_per_s:,.0f}"
        lost = f"{found.lost.get(member.node, 0)}"
        table.add_row(f"{member.sampler}", Text(member.node), f"{member.pieces}", f"{member.held}", rate, lost)
    rest = found.samplers[_SAMPLERS:]
    if rest:
        counts = [f"{sum(getattr(member, name) for member in rest)}" for name in ("pieces", "held")]
        table.add_row(f"{len(rest)} more", "", *counts, f"{sum(m.tokens_per_s or 0.0 for m in rest):,.0f}", "")
    gone = sum(count for node, count in found.lost.items() if node not in {m.node for m in found.samplers})
    table.caption = f"{gone} lost on nodes that are gone" if gone else None
    return table
