"""Is a run healthy, and what to change if not: sentences made from its curves, each with its figure and number.

A rule compares one number with two limits (`LIMITS`, the table of them all); beyond the first one should look, beyond the second
something is wrong. "Now" is the mean of a curve's last fifth, "start" of its first. A rule whose metrics a run does not have says nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..planning.memory import size
from .bins import significant
from .curves import Curve

Curves = Mapping[str, Curve]

LIMITS = {  # rule: (look, bad), beyond which; downwards where bad is the smaller
    "reject": (0.30, 0.60),  # rejected trajectories now
    "rewarded": (1.5, math.inf),  # rejected of rewarded / of unrewarded ones now, where at least FEW_REWARDED are
    "alpha": (0.86, 0.40),  # alpha_5 now; blind where entropy is below BLIND
    "xi_low": (0.80, 0.50),  # 5th percentile of xi now
    "xi_high": (1.25, 2.0),  # 95th percentile of xi now
    "ess": (0.50, 0.20),  # effective sample size of the weights now
    "loops": (0.02, 0.10),  # responses now that end by repeating themselves
    "truncated": (0.10, 0.50),  # responses now that were cut by length
    "collapse": (0.30, 0.10),  # entropy now / at the start, where it fell
    "explosion": (2.0, 4.0),  # entropy now / at the start, where it grew by NATS
    "clip": (0.05, 0.20),  # clipped tokens now
    "norm": (5.0, 50.0),  # gradient norm now / at the start
    "skipped": (0.0, 0.05),  # updates skipped for non-finite numbers, per step
    "empty": (0.10, 0.50),  # updates without anything to learn from, per step
    "flat": (0.50, 0.80),  # groups without variance now
    "reward": (2.0, -2.0),  # change of reward, start to now, in standard errors
    "gap": (0.05, 0.15),  # growth of held-out accuracy, dense - sparse
    "held_out": (0.03, 0.10),  # fall of held-out accuracy, dense
    "memory": (0.20, 0.0),  # KV bytes saved against dense rows now
    "rollout": (0.80, 0.95),  # share of a step's time that is rollout, now
    "ungraded": (0.0, 0.05),  # completions the grader failed on, of all
    "student": (1.0, 1.2),  # a student's KL now / at the start
}
BLIND = 0.02  # nats of entropy below which alpha_5 is near 1 whatever the cache does
FEW_REWARDED = 0.05  # rejected share of rewarded ones that is not worth a sentence
NATS = 0.5  # by which entropy must grow to explode
FEWEST = 5  # points from which a start and a now can be told apart
LEVELS = ("bad", "look", "good")
Rule = Callable[[Curves], "list[Sentence]"]


@dataclass(frozen=True)
class Sentence:
    level: str  # good, look or bad
    text: str
    figure: str  # the name of a curve
    value: float


def verdict(curves: Curves) -> list[dict[str, Any]]:
    """Everything there is to say about a run, the worst first."""
    said = [sentence for rule in RULES for sentence in rule(curves)]
    said.sort(key=lambda sentence: LEVELS.index(sentence.level))
    return [{**asdict(sentence), "value": significant(sentence.value)} for sentence in said]


def level(rule: str, value: float) -> str:
    look, bad = LIMITS[rule]
    beyond = (lambda limit: value > limit) if bad > look else (lambda limit: value < limit)
    return "bad" if beyond(bad) else "look" if beyond(look) else "good"


def judged(
    rule: str, value: float, figure: str, texts: tuple[str, str, str], judge: float | None = None
) -> list[Sentence]:
    """One sentence: `texts` for good, look and bad; no text, no sentence. `judge`: what is compared, where it is not the value shown."""
    found = level(rule, value if judge is None else judge)
    text = texts[("good", "look", "bad").index(found)]
    return [Sentence(found, text, figure, value)] if text else []


# ------------------------------------------------------------------------------------------------------------ numbers of a curve


def now(curves: Curves, name: str) -> float | None:
    """The mean of the last fifth; None without a number."""
    return _mean(curves, name, -1)


def start(curves: Curves, name: str) -> float | None:
    return _mean(curves, name, 0)


def _mean(curves: Curves, name: str, which: int) -> float | None:
    part = fifth(curves, name, which)
    return float(part.mean()) if len(part) else None


def fifth(curves: Curves, name: str, which: int) -> np.ndarray:
    """The first (0) or last (-1) fifth of a curve's numbers, one at least where there are some."""
    values = curves[name].finite if name in curves else np.zeros(0)
    count = max(1, len(values) // 5)
    return values[:count] if which == 0 else values[-count:]


def grown(curves: Curves, name: str) -> float | None:
    """Now / start; None where there are too few points, or nothing to divide by."""
    first, last = start(curves, name), now(curves, name)
    return last / first if first and len(curves[name].finite) >= FEWEST else None


def total(curves: Curves, name: str) -> float:
    return float(curves[name].finite.sum()) if name in curves else 0.0


# ------------------------------------------------------------------------------------------------------------ rules


def reject(curves: Curves) -> list[Sentence]:
    figure = "reject/trajectories/frac"
    share = now(curves, figure)
    if share is None or not curves[figure].finite.any():  # a method that rejects nothing shows nothing by it
        return []
    said = f"{share:.1%} of the trajectories are rejected"
    remedy = "raise rollout.budget, or replay instead of correcting (learn.method: shadow)"
    return judged(
        "reject",
        share,
        figure,
        (
            f"{said}.",
            f"{said}, where a few per cent are healthy: the cache is too small for what is sampled; {remedy}.",
            f"{said}: most of what is sampled teaches nothing; {remedy}.",
        ),
    )


def rewarded(curves: Curves) -> list[Sentence]:
    figure = "reject/rewarded/frac"
    right, wrong = now(curves, figure), now(curves, "reject/unrewarded/frac")
    if right is None or wrong is None or right < FEW_REWARDED:
        return []
    text = (
        f"Rewarded trajectories are rejected more often ({right:.1%}) than others ({wrong:.1%}): what should be learned is thrown away; "
        "raise rollout.budget, or use learn.method: tis or shadow."
    )
    return judged(
        "rewarded", right, figure, ("", text, text), judge=right / wrong if wrong else math.inf if right else 0.0
    )


def alpha(curves: Curves) -> list[Sentence]:
    figure = "gap/alpha/p05"
    value, entropy = now(curves, figure), now(curves, "old/entropy/mean")
    if value is None:
        return []
    said = f"alpha_5, the overlap of the dense and the sampler's distribution, is {value:.2f}"
    if entropy is not None and entropy < BLIND and level("alpha", value) == "good":
        text = f"{said}, but it is blind here: entropy is {entropy:.3f} nats, and both are sure of themselves; read rejection and xi."
        return [Sentence("look", text, figure, value)]
    remedy = "raise rollout.budget, or try another rollout.compressor"
    return judged(
        "alpha",
        value,
        figure,
        (
            f"{said}, above 0.86.",
            f"{said}; above 0.86 is healthy: {remedy}.",
            f"{said}, far below 0.86: {remedy}, or use learn.method: shadow.",
        ),
    )


def xi(curves: Curves) -> list[Sentence]:
    low, high = now(curves, "gap/xi/p05"), now(curves, "gap/xi/p95")
    found = []
    if low is not None:
        text = f"A twentieth of the tokens has xi below {low:.2f}: less likely to the learner than to the sampler; raise rollout.budget."
        found += judged("xi_low", low, "gap/xi/p05", ("", text, text))
    if high is not None:
        text = f"A twentieth of the tokens has xi above {high:.2f}: more likely to the learner than to the sampler; raise rollout.budget."
        found += judged("xi_high", high, "gap/xi/p95", ("", text, text))
    if low is not None and high is not None and not found:
        found.append(
            Sentence(
                "good", f"xi of nine tokens in ten lies between {low:.2f} and {high:.2f}, near 1.", "gap/xi/p05", low
            )
        )
    return found


def of_share(rule: str, figure: str, said: str, then: str, quiet: bool = False) -> Rule:
    """A rule of one number between 0 and 1: `said`, with `then` behind it where it is not good; `quiet`: nothing where it is."""

    def judge(curves: Curves) -> list[Sentence]:
        value = now(curves, figure)
        if value is None:
            return []
        text = said.format(value)
        return judged(rule, value, figure, ("" if quiet else f"{text}.", text + then, text + then))

    return judge


def of_count(rule: str, figure: str, then: str) -> Rule:
    """A rule of updates that came to nothing, judged per step; nothing is said where there are few."""

    def judge(curves: Curves) -> list[Sentence]:
        if figure not in curves or not len(curves[figure].finite):
            return []
        count, steps = total(curves, figure), len(curves[figure].finite)
        text = f"{count:,.0f} {'update' if count == 1 else 'updates'} in {steps:,} steps {'was' if count == 1 else 'were'} {then}"
        return judged(rule, count, figure, ("", text, text), judge=count / steps)

    return judge


def entropy(curves: Curves) -> list[Sentence]:
    figure = "old/entropy/mean"
    ratio = grown(curves, figure)
    if ratio is None:
        return []
    first, last = start(curves, figure), now(curves, figure)
    said = f"Entropy went from {first:.3f} to {last:.3f} nats"
    calm = f"{said}."
    if ratio < 1:
        falling = f"{said}: the model is growing sure of itself, and explores less."
        gone = f"{said}: it collapsed, and samples are all alike; lower optimizer.lr, raise loss.clip_high, or add loss.beta."
        return judged("collapse", last, figure, (calm, falling, gone), judge=ratio)
    text = f"{said}: the model is coming apart; lower optimizer.lr, or add loss.beta."
    return judged("explosion", last, figure, (calm, text, text), judge=ratio if last - first >= NATS else 1.0)


def norm(curves: Curves) -> list[Sentence]:
    figure = "update/grad_norm"
    ratio = grown(curves, figure)
    if ratio is None:
        return []
    last = now(curves, figure)
    text = f"The gradient norm is {last:.3g}, {ratio:.3g} times that of the start; lower optimizer.lr or optimizer.max_grad_norm."
    return judged("norm", last, figure, (f"The gradient norm is {last:.3g}.", text, text), judge=ratio)


def flat(curves: Curves) -> list[Sentence]:
    figure = "advantage/groups_without_variance/frac"
    value, reward = now(curves, figure), now(curves, "reward/right/frac")
    if value is None:
        return []
    said = f"{value:.0%} of the groups have no variance in their rewards"
    remedy = "raise rollout.group_size"
    if reward is not None and not 0.1 < reward < 0.9:
        remedy = f"with {reward:.0%} right the problems are too {'easy' if reward >= 0.9 else 'hard'}: take others, or {remedy}"
    text = f"{said}, and give no signal; {remedy}."
    return judged("flat", value, figure, (f"{said}.", text, text))


def reward(curves: Curves) -> list[Sentence]:
    figure = "reward/mean"
    early, late = fifth(curves, figure, 0), fifth(curves, figure, -1)
    if len(early) < 3:  # too few for an error
        return []
    change = float(late.mean() - early.mean())
    error = math.sqrt(early.var(ddof=1) / len(early) + late.var(ddof=1) / len(late))
    said = f"from {early.mean():.3f} to {late.mean():.3f} ({change:+.3f}, standard error about {error:.3f})"
    judge = change / error if error else math.copysign(math.inf, change) if change else 0.0
    return judged(
        "reward",
        float(late.mean()),
        figure,
        (
            f"Reward rose {said}.",
            f"Reward went {said}: no rise that could be told from chance; train longer, or raise optimizer.lr.",
            f"Reward fell {said}; lower optimizer.lr, and look at entropy and rejection.",
        ),
        judge,
    )


def held_out(curves: Curves) -> list[Sentence]:
    """Thirds rather than fifths, for evaluations are few."""
    dense, sparse = curves.get("eval/dense/accuracy"), curves.get("eval/sparse/accuracy")
    found = []
    if dense is not None and len(dense.finite) >= 2:
        first, last = _thirds(dense.finite)
        said = f"Held-out accuracy on the dense cache went from {first:.3f} to {last:.3f}"
        text = f"{said}: what is learned does not carry over; lower optimizer.lr, or correct the mismatch (learn.method: sparse-rl)."
        found += judged("held_out", last, "eval/dense/accuracy", (f"{said}.", text, text), judge=first - last)
    if dense is not None and sparse is not None:
        _, one, other = np.intersect1d(dense.step, sparse.step, return_indices=True)
        apart = dense.value[one] - sparse.value[other]
        apart = apart[np.isfinite(apart)]
        if len(apart) >= 2:
            first, last = _thirds(apart)
            said = f"Held-out accuracy, dense less small cache, is {last:+.3f} ({first:+.3f} at the start)"
            text = f"{said}: the gap widens; to deploy on the small cache use learn.method: shadow, to deploy dense raise rollout.budget."
            fell = any(
                sentence.level != "good" for sentence in found
            )  # where dense accuracy fell, a narrow gap is no good news
            found += judged(
                "gap", last, "eval/sparse/accuracy", ("" if fell else f"{said}.", text, text), judge=last - first
            )
    return found


def _thirds(values: np.ndarray) -> tuple[float, float]:
    """Means of the first and of the last third."""
    count = max(1, len(values) // 3)
    return float(values[:count].mean()), float(values[-count:].mean())


def memory(curves: Curves) -> list[Sentence]:
    figure = "cache/bytes_saved/frac"
    value, bytes_ = now(curves, figure), now(curves, "cache/bytes/allocated")
    if value is None or now(curves, "cache/tokens_saved/frac") == 0:  # a dense cache is what was asked for
        return []
    took = "The KV cache" if bytes_ is None else f"The KV cache of {size(bytes_)}"
    than = f"{abs(value):.0%} {'less' if value >= 0 else 'more'} than dense rows of the longest trajectory would"
    return judged(
        "memory",
        value,
        figure,
        (
            f"{took} takes {than}.",
            f"{took} takes {than}: responses are short for this budget; lower rollout.budget, or sample on a dense cache.",
            f"{took} takes {than}: compression costs memory; lower rollout.budget, or set rollout.compressor: dense.",
        ),
    )


def rollout(curves: Curves) -> list[Sentence]:
    part, whole = now(curves, "time/rollout"), now(curves, "time/step")
    if (
        part is None or not whole or not np.isfinite(curves["time/rollout"].value[-1])
    ):  # one step ahead, rollouts are no part of a step
        return []
    said = f"Rollouts take {part / whole:.0%} of a step's {whole:.3g} s"
    text = f"{said}; raise rollout.rows as far as memory allows (`sparse-rl plan --recipe`)."
    return judged("rollout", part / whole, "time/rollout", (f"{said}.", text, text))


def ungraded(curves: Curves) -> list[Sentence]:
    names = [
        name for name in ("grade/timeout/count", "grade/error/count", "grade/bad_gold/count") if total(curves, name)
    ]
    asked = total(curves, "rollout/trajectories/count")
    if not names or not asked:
        return []
    count = sum(total(curves, name) for name in names)
    kinds = ", ".join(f"{name.split('/')[1].replace('_', ' ')} {total(curves, name):,.0f}" for name in names)
    text = f"{count:,.0f} of {asked:,.0f} completions could not be graded ({kinds}) and count as wrong; mend the grader or its answers."
    return judged("ungraded", count, names[0], ("", text, text), judge=count / asked)


def students(curves: Curves) -> list[Sentence]:
    found = []
    for figure in curves:
        if figure.startswith("student/") and figure.endswith("/kl") and (ratio := grown(curves, figure)) is not None:
            name = figure.removeprefix("student/").removesuffix("/kl")
            first, last = start(curves, figure), now(curves, figure)
            said = f"The KL of student {name} to its teacher went from {first:.4f} to {last:.4f} nats"
            text = f"{said}, and should fall; lower student.lr, or train longer."
            found += judged("student", last, figure, (f"{said}.", text, text), judge=ratio)
    return found


RULES: tuple[Rule, ...] = (
    reward,
    held_out,
    reject,
    rewarded,
    alpha,
    xi,
    of_share(
        "ess",
        "gap/ess/frac",
        "The weights are worth {:.0%} of the tokens sampled (effective sample size)",
        "; raise rollout.budget.",
        quiet=True,
    ),
    of_share(
        "loops",
        "rollout/loops/frac",
        "{:.1%} of the responses end by repeating themselves",
        ", which no correction sees, because xi is near 1 inside a loop; raise rollout.budget or protect the prompt.",
    ),
    of_share(
        "truncated",
        "rollout/truncated/frac",
        "{:.1%} of the responses are cut by length",
        " and can hardly be rewarded; raise rollout.max_new_tokens.",
    ),
    entropy,
    of_share(
        "clip",
        "update/clip/frac",
        "{:.2%} of the tokens are clipped",
        ", where a few per cent are healthy: updates are too large; lower optimizer.lr or learn.minibatches.",
    ),
    norm,
    of_count(
        "skipped",
        "update/skipped/count",
        "skipped for non-finite numbers; lower optimizer.lr, or set model.dtype: float32.",
    ),
    of_count(
        "empty", "update/empty/count", "empty: all was rejected, or no group had variance; raise rollout.group_size."
    ),
    flat,
    memory,
    rollout,
    ungraded,
    students,
)
