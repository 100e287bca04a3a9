"""The numbers that summarize a benchmark's items, and a table of them. Pure functions."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..planning.memory import size
from .results import Item, mean_rewards, shares, tokens_saved
from .statistics import interval, pass_at_k, resampled


@dataclass(frozen=True)
class Summary:
    bench: str
    problems: int
    samples: int  # completions of each
    accuracy: float  # Avg@samples, which estimates Pass@1: the share of completions that are right
    low: float  # of the 95 % interval
    high: float
    pass_at: dict[int, float]  # k -> the chance that one of k completions is right
    reward: float  # mean
    reward_low: float  # of its 95 % interval
    reward_high: float
    rewards: dict[str, float]  # means of its named parts
    graded_rewards: bool  # whether rewards say more than accuracy
    length: float  # tokens sampled
    turns: float  # of the model in a conversation
    given: float  # tokens of replies
    truncated: float  # a share of the completions, as are the next two
    loops: float
    no_answer: float
    timeouts: int  # completions that could not be graded, by reason
    errors: int
    bad_golds: int
    entries: float  # mean KV entries that a query saw, over all completions
    peak_entries: float  # of the completion with the most
    tokens_saved: float  # 1 - entries in use at the end / tokens
    kv_bytes: float  # bytes of `entries`
    peak_kv_bytes: float

    @property
    def ungraded(self) -> int:
        return self.timeouts + self.errors + self.bad_golds


def summarize(items: Sequence[Item], samples: int, bytes_per_entry: int) -> Summary:
    """Summarize the items of one benchmark; every problem has `samples` of them."""
    by_problem = list(shares(items).values())
    if len(items) != samples * len(by_problem):
        raise ValueError(f"{len(items)} items of {len(by_problem)} problems are not {samples} for each")
    low, high = interval(by_problem, samples)
    right = [round(share * samples) for share in by_problem]
    verdicts = [item.verdict for item in items]
    reward_low, reward_high = reward_interval(items) if graded_rewards(items) else (low, high)
    names = sorted({name for item in items for name in item.rewards})

    def mean(values) -> float:
        return statistics.fmean(map(float, values))

    return Summary(
        bench=items[0].bench,
        problems=len(by_problem),
        samples=samples,
        accuracy=mean(by_problem),
        low=low,
        high=high,
        pass_at={k: pass_at_k(right, samples, k) for k in powers_up_to(samples)},
        reward=mean(item.reward for item in items),
        reward_low=reward_low,
        reward_high=reward_high,
        rewards={name: mean(item.rewards.get(name, 0.0) for item in items) for name in names},
        graded_rewards=graded_rewards(items),
        length=mean(item.tokens for item in items),
        turns=mean(item.turns for item in items),
        given=mean(item.given for item in items),
        truncated=mean(item.finish == "length" for item in items),
        loops=mean(item.loop for item in items),
        no_answer=mean(verdict == "no answer" for verdict in verdicts),
        timeouts=verdicts.count("timeout"),
        errors=verdicts.count("error"),
        bad_golds=verdicts.count("bad gold"),
        entries=mean(item.entries for item in items),
        peak_entries=max(item.peak_entries for item in items),
        tokens_saved=tokens_saved(items),
        kv_bytes=bytes_per_entry * mean(item.entries for item in items),
        peak_kv_bytes=bytes_per_entry * max(item.peak_entries for item in items),
    )


def powers_up_to(samples: int) -> list[int]:
    """1, 2, 4, ... and samples itself."""
    return sorted({samples, *(2**i for i in range(samples.bit_length()))})


def graded_rewards(items: Sequence[Item]) -> bool:
    """Whether rewards say more than accuracy: they are not just 1 for what is right and 0 for the rest."""
    return any(item.reward != float(item.right) or item.rewards for item in items)


def reward_interval(items: Sequence[Item]) -> tuple[float, float]:
    """The 95 % interval of the mean reward."""
    return resampled(list(mean_rewards(items).values()), 2000, random.Random(0))


COLUMNS: dict[str, Callable[[Summary], str]] = {  # heading -> its cell
    "benchmark": lambda s: s.bench,
    "problems": lambda s: f"{s.problems:,} x {s.samples}" if s.samples > 1 else f"{s.problems:,}",
    "accuracy (95 %)": lambda s: f"{s.accuracy:.1%} ({s.low:.1%} to {s.high:.1%})",
    "reward (95 %)": lambda s: f"{s.reward:.3f} ({s.reward_low:.3f} to {s.reward_high:.3f})",
    "rewards": lambda s: ", ".join(f"{name} {value:.3f}" for name, value in s.rewards.items()),
    "pass@k": lambda s: f"{s.pass_at[s.samples]:.1%}" if s.samples > 1 else "-",
    "length": lambda s: f"{s.length:,.0f}",
    "turns": lambda s: f"{s.turns:.2f}",
    "given": lambda s: f"{s.given:,.0f}",
    "cut": lambda s: f"{s.truncated:.1%}",
    "loops": lambda s: f"{s.loops:.1%}",
    "no answer": lambda s: f"{s.no_answer:.1%}",
    "ungraded": lambda s: str(s.ungraded),
    "KV mean": lambda s: size(s.kv_bytes),
    "KV peak": lambda s: size(s.peak_kv_bytes),
    "KV tokens saved": lambda s: f"{s.tokens_saved:.1%}",
}


def table(summaries: Sequence[Summary]) -> str:
    """One line per benchmark, and their mean if there are several; with rewards if they say more than accuracy."""
    hidden = set() if any(s.graded_rewards for s in summaries) else {"reward (95 %)"}
    hidden |= set() if any(s.rewards for s in summaries) else {"rewards"}
    hidden |= set() if any(s.turns > 1 for s in summaries) else {"turns", "given"}
    shown = {heading: tell for heading, tell in COLUMNS.items() if heading not in hidden}
    rows = [list(shown), *([tell(s) for tell in shown.values()] for s in summaries)]
    if len(summaries) > 1:
        means = {
            "benchmark": "mean",
            "accuracy (95 %)": f"{statistics.fmean(s.accuracy for s in summaries):.1%}",
            "reward (95 %)": f"{statistics.fmean(s.reward for s in summaries):.3f}",
        }
        rows.append([means.get(heading, "") for heading in shown])
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows)
