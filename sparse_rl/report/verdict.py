"""Is a run healthy, and what to change if it is not: sentences about its curves, each with its figure and its number.

A rule compares one number with the two thresholds of thresholds.py: beyond the first, look at the run; beyond the
second, something is wrong. A rule says nothing about a run that lacks its metrics. A run is judged on the cache that it
is for (aim.py), and no rule advises what the run does already.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np

from ..planning.memory import size
from .aim import UNKNOWN, Aim
from .bins import significant
from .held_out import held_out, held_out_reward
from .sentence import CANNOT, Sentence, judged, went
from .thresholds import BLIND, FEW_REWARDED, LEVELS, NATS, level
from .trend import Curves, first_fifth, last_fifth, now, numbers, start_and_now, total

Rule = Callable[[Curves], list[Sentence]]
AimedRule = Callable[[Curves, Aim], list[Sentence]]

HARDER = "everything is right, so use harder problems"


def verdict(curves: Curves, aim: Aim = UNKNOWN) -> list[dict[str, Any]]:
    """Everything there is to say about a run, the worst first."""
    said = [*reward(curves), *(sentence for rule in AIMED for sentence in rule(curves, aim))]
    said += [sentence for rule in RULES for sentence in rule(curves)]
    said.sort(key=lambda sentence: LEVELS.index(sentence.level))
    return [{**asdict(sentence), "value": significant(sentence.value)} for sentence in said]


# ---------- rules


def reward(curves: Curves) -> list[Sentence]:
    figure = "reward/mean"
    early, late = first_fifth(curves, figure), last_fifth(curves, figure)
    if len(early) < 3:  # too few for a standard error
        return []
    values = numbers(curves, figure)
    if values.min() == values.max():
        solved = (now(curves, "reward/right/frac") or 0.0) >= 0.9
        text = f"Reward is {values[0]:.3f} in every step, so nothing was learned; {HARDER if solved else CANNOT}."
        return [Sentence("warn", text, figure, float(values[0]))]
    change = float(late.mean() - early.mean())
    error = math.sqrt(early.var(ddof=1) / len(early) + late.var(ddof=1) / len(late))
    said = f"from {early.mean():.3f} to {late.mean():.3f} ({change:+.3f}, standard error about {error:.3f})"
    return judged(
        "reward",
        float(late.mean()),
        figure,
        good=f"Reward rose {said}.",
        warn=f"Reward went {said}: this cannot be told from chance; train longer, or raise optimizer.lr.",
        fail=f"Reward fell {said}; lower optimizer.lr, and look at entropy and rejection.",
        judge=change / error if error else math.copysign(math.inf, change) if change else 0.0,
    )


def reject(curves: Curves, aim: Aim) -> list[Sentence]:
    figure = "reject/trajectories/frac"
    share = now(curves, figure)
    if share is None or not curves[figure].finite.any():  # the method may reject nothing by design
        return []
    said = f"{share:.1%} of the trajectories are rejected"
    remedy = f"raise rollout.budget{aim.use('shadow')}"
    return judged(
        "reject",
        share,
        figure,
        good=f"{said}.",
        warn=f"{said}, while a few per cent are healthy: the cache is too small for what is sampled; {remedy}.",
        fail=f"{said}: most of what is sampled teaches nothing; {remedy}.",
    )


def rewarded(curves: Curves, aim: Aim) -> list[Sentence]:
    figure = "reject/rewarded/frac"
    right, wrong = now(curves, figure), now(curves, "reject/unrewarded/frac")
    if right is None or wrong is None or right < FEW_REWARDED:
        return []
    text = (
        f"Rewarded trajectories are rejected more often ({right:.1%}) than others ({wrong:.1%}): what should be "
        f"learned is thrown away; raise rollout.budget{aim.use('tis', 'shadow')}."
    )
    return judged("rewarded", right, figure, good="", warn=text, judge=right / wrong if wrong else math.inf)


def alpha(curves: Curves, aim: Aim) -> list[Sentence]:
    figure = "gap/alpha/p05"
    value, entropy = now(curves, figure), now(curves, "old/entropy/mean")
    if value is None:
        return []
    said = f"alpha p05, the overlap of the dense and the sampler's distribution, is {value:.2f}"
    if entropy is not None and entropy < BLIND and level("alpha", value) == "good":
        why = f"entropy is {entropy:.3f} nats, so both distributions are nearly certain; read rejection and xi"
        return [Sentence("warn", f"{said}, but it says nothing here: {why}.", figure, value)]
    remedy = "raise rollout.budget, or try another rollout.compressor"
    if (
        aim.small and level("alpha", value) != "good"
    ):  # the learner sees what the sampler saw, so it learns all the same
        why = f"the small cache changes what the model says; if its held-out accuracy stays low, {remedy}"
        return [Sentence("warn", f"{said}; above 0.86 is healthy: {why}.", figure, value)]
    return judged(
        "alpha",
        value,
        figure,
        good=f"{said}, above 0.86.",
        warn=f"{said}; above 0.86 is healthy: {remedy}.",
        fail=f"{said}, far below 0.86: {remedy}{aim.use('shadow')}.",
    )


def xi(curves: Curves) -> list[Sentence]:
    low, high = now(curves, "gap/xi/p05"), now(curves, "gap/xi/p95")
    found = []
    if low is not None:
        text = (
            f"One token in twenty has xi below {low:.2f}: the learner finds it less likely than the sampler did; "
            "raise rollout.budget."
        )
        found += judged("xi_low", low, "gap/xi/p05", good="", warn=text)
    if high is not None:
        text = (
            f"One token in twenty has xi above {high:.2f}: the learner finds it more likely than the sampler did; "
            "raise rollout.budget."
        )
        found += judged("xi_high", high, "gap/xi/p95", good="", warn=text)
    if low is not None and high is not None and not found:
        text = f"xi of nine tokens in ten {near_one(low, high)}."
        found.append(Sentence("good", text, "gap/xi/p05", low))
    return found


def near_one(low: float, high: float) -> str:
    """lies between 0.97 and 1.02, near 1; or is 1 to within 0.001"""
    furthest = max(abs(low - 1), abs(high - 1))
    if furthest < 1e-6:
        return "is 1: the learner agrees with the sampler"
    if f"{low:.2f}" == f"{high:.2f}":
        return f"is 1 to within {furthest:.1g}"
    return f"lies between {low:.2f} and {high:.2f}, near 1"


def share_rule(rule: str, figure: str, said: str, remedy: str, quiet: bool = False) -> Rule:
    """A rule on a share: says `said`, and `remedy` after it unless it is good. `quiet`: says nothing if it is good."""

    def judge(curves: Curves) -> list[Sentence]:
        value = now(curves, figure)
        if value is None:
            return []
        text = said.format(value)
        return judged(rule, value, figure, good="" if quiet else f"{text}.", warn=text + remedy)

    return judge


def count_rule(rule: str, figure: str, what: str) -> Rule:
    """A rule on updates that came to nothing, judged per step. It says nothing if there are few."""

    def judge(curves: Curves) -> list[Sentence]:
        if not (steps := len(numbers(curves, figure))):
            return []
        count = total(curves, figure)
        said = f"{count:,.0f} {'update' if count == 1 else 'updates'} in {steps:,} steps"
        text = f"{said} {'was' if count == 1 else 'were'} {what}"
        return judged(rule, count, figure, good="", warn=text, judge=count / steps)

    return judge


def truncated(curves: Curves) -> list[Sentence]:
    """Of conversations turns are a limit, too."""
    turns = now(curves, "talk/turns/mean")
    said = "{:.1%} of the responses are cut by length"
    remedy = " and can hardly be rewarded; raise rollout.max_new_tokens."
    if turns is not None:
        said = f"{{:.1%}} of the conversations, of {turns:.1f} turns, are cut by a limit"
        remedy = " before they end; raise rollout.max_new_tokens or rollout.max_turns."
    return share_rule("truncated", "rollout/truncated/frac", said, remedy)(curves)


def entropy(curves: Curves) -> list[Sentence]:
    figure = "old/entropy/mean"
    if (found := start_and_now(curves, figure)) is None:
        return []
    first, last = found
    said = f"Entropy {went(first, last)} nats"
    if last < first:
        warn = f"{said}: the model is growing certain, and explores less."
        remedy = "lower optimizer.lr, raise loss.clip_high, or add loss.beta"
        fail = f"{said}: it collapsed, and samples are all alike; {remedy}."
        return judged("collapse", last, figure, f"{said}.", warn, fail, judge=last / first)
    text = f"{said}: the model is coming apart; lower optimizer.lr, or add loss.beta."
    return judged("explosion", last, figure, f"{said}.", text, judge=last / first if last - first >= NATS else 1.0)


def norm(curves: Curves) -> list[Sentence]:
    figure = "update/grad_norm"
    if (found := start_and_now(curves, figure)) is None:
        return []
    first, last = found
    said = f"The gradient norm is {last:.3g}"
    text = f"{said}, {last / first:.3g} times that of the start; lower optimizer.lr or optimizer.max_grad_norm."
    return judged("norm", last, figure, f"{said}.", text, judge=last / first)


def flat(curves: Curves) -> list[Sentence]:
    figure = "advantage/groups_without_variance/frac"
    value, right = now(curves, figure), now(curves, "reward/right/frac")
    if value is None:
        return []
    said = f"{value:.0%} of the groups have no variance in their rewards"
    remedy = "raise rollout.group_size"
    if right is not None and not 0.1 < right < 0.9:
        too = "easy" if right >= 0.9 else "hard"
        remedy = f"with {right:.0%} right the problems are too {too}: use others, or {remedy}"
    return judged("flat", value, figure, good=f"{said}.", warn=f"{said}, and give no signal; {remedy}.")


def memory(curves: Curves) -> list[Sentence]:
    figure = "cache/bytes_saved/frac"
    value, allocated = now(curves, figure), now(curves, "cache/bytes/allocated")
    if value is None or now(curves, "cache/tokens_saved/frac") == 0:  # the user chose a dense cache
        return []
    cache = "The KV cache" if allocated is None else f"The KV cache of {size(allocated)}"
    compared = f"{abs(value):.0%} {'less' if value >= 0 else 'more'}"
    said = f"{cache} takes {compared} than dense rows of the longest trajectory would"
    return judged(
        "memory",
        value,
        figure,
        good=f"{said}.",
        warn=f"{said}: responses are short for this budget; lower rollout.budget, or sample on a dense cache.",
        fail=f"{said}: compression costs memory; lower rollout.budget, or set rollout.compressor: dense.",
    )


def rollout(curves: Curves) -> list[Sentence]:
    figure = "time/rollout"
    part, whole = now(curves, figure), now(curves, "time/step")
    if part is None or not whole or not np.isfinite(curves[figure].value[-1]):  # one step ahead: not part of a step
        return []
    said = f"Rollouts take {part / whole:.0%} of a step's {whole:.3g} s"
    text = f"{said}; raise rollout.rows as far as memory allows (`sparse-rl plan --recipe`)."
    return judged("rollout", part / whole, figure, f"{said}.", text)


def waits(curves: Curves) -> list[Sentence]:
    figure = "talk/wait/seconds"
    part, rollout = now(curves, figure), now(curves, "time/rollout") or now(curves, "ahead/rollout/seconds")
    if part is None or not rollout:
        return []
    said = f"For {part / rollout:.0%} of the {rollout:.3g} s of a rollout no row runs, because all wait for replies"
    text = f"{said}; raise task.workers, if the task has it, or make replies faster."
    return judged("waits", part, figure, good="", warn=text, judge=part / rollout)


def ungraded(curves: Curves) -> list[Sentence]:
    names = ("grade/timeout/count", "grade/error/count", "grade/bad_gold/count")
    counts = {name: count for name in names if (count := total(curves, name))}
    asked = total(curves, "rollout/trajectories/count")
    if not counts or not asked:
        return []
    count = sum(counts.values())
    kinds = ", ".join(f"{name.split('/')[1].replace('_', ' ')} {found:,.0f}" for name, found in counts.items())
    said = f"{count:,.0f} of {asked:,.0f} completions could not be graded ({kinds}) and count as wrong"
    replies = total(curves, "talk/timeout/count") + total(curves, "talk/error/count")
    remedy = (
        f"in {replies:,.0f} of them the task's reply failed: fix it" if replies else "fix the grader or its answers"
    )
    text = f"{said}; {remedy}."
    return judged("ungraded", count, next(iter(counts)), good="", warn=text, judge=count / asked)


def students(curves: Curves) -> list[Sentence]:
    said = []
    for figure in curves:
        if not (figure.startswith("student/") and figure.endswith("/kl")):
            continue
        if (found := start_and_now(curves, figure)) is not None:
            first, last = found
            name = figure.removeprefix("student/").removesuffix("/kl")
            fact = f"The KL of student {name} to its teacher went from {first:.4f} to {last:.4f} nats"
            text = f"{fact}, and should fall; lower student.lr, or train longer."
            said += judged("student", last, figure, f"{fact}.", text, judge=last / first)
    return said


AIMED: tuple[AimedRule, ...] = (held_out, held_out_reward, reject, rewarded, alpha)
RULES: tuple[Rule, ...] = (
    xi,
    share_rule(
        "ess",
        "gap/ess/frac",
        "The weights are worth {:.0%} of the tokens sampled (effective sample size)",
        "; raise rollout.budget.",
        quiet=True,
    ),
    share_rule(
        "loops",
        "rollout/loops/frac",
        "{:.1%} of the responses end by repeating themselves",
        "; raise rollout.budget or protect the prompt.",
    ),
    truncated,
    entropy,
    share_rule(
        "clip",
        "update/clip/frac",
        "{:.2%} of the tokens are clipped",
        ", while a few per cent are healthy: updates are too large; lower optimizer.lr or learn.minibatches.",
    ),
    norm,
    count_rule(
        "skipped",
        "update/skipped/count",
        "skipped because of non-finite numbers; lower optimizer.lr, or set model.dtype: float32.",
    ),
    count_rule(
        "empty",
        "update/empty/count",
        "empty: everything was rejected, or no group had variance; raise rollout.group_size.",
    ),
    flat,
    memory,
    rollout,
    waits,
    ungraded,
    students,
)
