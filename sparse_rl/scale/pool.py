"""The scale model of a pool: a run's ledger deals pieces of work to samplers, whose speed the scale model predicts.

The learner has separate GPUs, and each of its processes has its own samplers. With `rollout.ahead: 0` sampling and
learning take turns; otherwise they run at the same time on different GPUs, and a step takes as long as the longer of
the two.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import SparseRLError
from ..pool.ledger import Ledger
from ..pool.pieces import Piece, Place, cut, own_samplers
from ..rollout.schedule import row_counts
from ..train.deal import deal
from .lengths import Lengths
from .model import RECORD_BYTES, Forecast, Links, Machine, Work, mean_of, require_prompts, update_seconds

RESULT_BYTES = 37  # per token of a result of the 1.5B shape, compressed (docs/results/pool.md)


@dataclass(frozen=True)
class PoolForecast(Forecast):
    """A step with a pool. `sample`: the rollout, and scoring if the learner does it; `exchange`: records between the
    learner's processes, and results of samplers; `publish`: weights into and out of the object store; `idle`: share of
    a step that a GPU waits, averaged over learner and samplers.
    """

    messages: float  # at most, over all processes of the learner
    received: float  # bytes of results
    sent: float  # bytes of weights that one process of the learner puts into the store


@dataclass(frozen=True)
class PoolRollout:
    """A step's sampling: seconds until the last result arrives, and the messages between samplers and learner."""

    seconds: float
    working: float  # seconds of all samplers together
    handouts: int
    pieces: int

    @property
    def messages(self) -> int:
        """The most messages: one per handout, and an answer for each piece and each handout's end."""
        return 2 * self.handouts + self.pieces


def pool_rollout(work: Work, machine: Machine, samplers: int, new: np.ndarray, scores: bool = False) -> PoolRollout:
    """The sampling of a step with response lengths `new` [prompts, group]. scores: samplers score what they sampled"""
    ledger = Ledger(samplers)
    for member in range(samplers):
        ledger.join(member, work.rollout.rows)
    pieces = cut([[i] for i in range(len(new))], [list(range(new.shape[1]))] * len(new), 0, 0)
    number = ledger.ask(pieces)
    events: list[tuple[float, int, int, Place | None]] = []  # (when, order, member, piece; None: it is idle)
    now, working, handouts, order = 0.0, 0.0, 0, 0
    while number in ledger.requests:
        for member, handed in ledger.assign().items():
            times, total = finish_times(work, machine, [piece for _, piece in handed], new, scores)
            for (place, _), seconds in zip(handed, times, strict=True):
                heapq.heappush(events, (now + seconds, order := order + 1, member, place))
            heapq.heappush(events, (now + total, order := order + 1, member, None))
            working, handouts = working + total, handouts + 1
        now, _, member, place = heapq.heappop(events)
        if place is None:
            ledger.end(member)
        else:
            ledger.finish(member, place, b"")
    return PoolRollout(now, working, handouts, len(pieces))


def finish_times(
    work: Work, machine: Machine, pieces: Sequence[Piece], new: np.ndarray, scores: bool
) -> tuple[list[float], float]:
    """Seconds until each piece of a handout is finished, and until the sampler is idle."""
    drawn = [new[piece.prompt_index, list(piece.members)] for piece in pieces]
    lengths = np.concatenate(drawn)
    prompts = len({piece.prompt_index for piece in pieces})
    total = float(work.rollout_seconds(machine, lengths, prompts))
    widths = np.array(sorted(row_counts(work.rollout.rows)))
    ordered = np.sort(lengths)
    live = np.arange(len(ordered), 0, -1)
    steps = np.diff(ordered, prepend=0)
    taken = np.cumsum(steps * work.step_seconds(machine, widths[np.searchsorted(widths, np.minimum(live, widths[-1]))]))
    done = total * (taken / taken[-1])  # at most `total`, also when rounded: no piece comes after the end
    times = [float(done[np.searchsorted(ordered, own.max(), side="right") - 1]) for own in drawn]
    if not scores:
        return times, total
    for i, own in enumerate(drawn):  # scored when all are sampled, one piece after the other
        total += work.views * work.passes_of(machine, own + work.prompt_tokens)[0]
        times[i] = total
    return times, total


def pool_step(work: Work, machine: Machine, links: Links, gpus: int, samplers: int, new: np.ndarray) -> PoolForecast:
    """A step of a learner on `gpus` GPUs with `samplers` samplers, each on its own GPU."""
    ahead = bool(work.rollout.ahead)
    owner = np.array(deal([1.0] * len(new), work.minibatches, gpus))  # [prompts]
    shares = [new[owner == rank] for rank in range(gpus)]  # of each process of the learner
    members = [own_samplers(samplers, gpus, rank) for rank in range(gpus)]
    sampled = [pool_rollout(work, machine, *pair, scores=ahead) for pair in zip(members, shares, strict=True)]
    rollout, working = max(own.seconds for own in sampled), sum(own.working for own in sampled)
    total = new.ravel() + work.prompt_tokens
    passes = [work.views * work.passes_of(machine, own.ravel() + work.prompt_tokens)[0] for own in shares]
    scores = np.zeros(gpus) if ahead else np.array(passes)
    update, learned, communication = update_seconds(work, machine, links, np.repeat(owner, new.shape[1]), total, gpus)
    padded = float(total.max()) * new.size
    brought = max(
        float(share.sum()) * RESULT_BYTES / links.store + own.messages * links.message
        for share, own in zip(shares, sampled, strict=True)
    )
    exchange = brought + (padded * RECORD_BYTES / links.records if gpus > 1 else 0.0)
    publish = work.travelling_bytes / links.store
    records = padded * machine.record_seconds
    scored = float(scores.max())

    def step(communication: float) -> float:
        sample = rollout + publish  # samplers fetch what the learner has put into the store
        learn = scored + update + communication + exchange + publish + records
        return (max(sample, learn) if ahead else sample + learn) / (1 - machine.step_rest)

    found = step(communication)
    busy = working + float(scores.sum() + learned.sum())
    return PoolForecast(
        sample=rollout + scored,
        rollout=rollout,
        update=update,
        communication=communication,
        exchange=exchange,
        publish=2 * publish,
        rest=machine.step_rest * found + records,
        step=found,
        step_at_best=step(max(0.0, communication - update)),
        step_at_worst=found,
        idle=1 - busy / (found * (gpus + samplers)),
        idle_sampling=1 - working / (rollout * samplers),
        tokens=float(new.sum()),
        length=float(new.mean()),
        longest=float(new.max()),
        messages=float(sum(own.messages for own in sampled)),
        received=float(new.sum()) * RESULT_BYTES,
        sent=float(work.travelling_bytes),
    )


def forecast_pool(
    work: Work, machine: Machine, links: Links, gpus: int, lengths: Lengths, seed: int = 0, draws: int = 4
) -> PoolForecast:
    """The mean of `draws` steps with response lengths drawn at random."""
    rollout, samplers = work.rollout, work.rollout.samplers
    require_prompts(work, gpus)
    if not samplers:
        raise SparseRLError(
            f"rollout.pool is {rollout.pool} and rollout.samplers is 0 (as many as the cluster has room for), which a "
            "plan cannot know; give --rollout.samplers (--gpus only counts the GPUs of the learner)."
        )
    if samplers < gpus:
        raise SparseRLError(
            f"rollout.samplers is {samplers}, but each of the learner's {gpus} processes needs one; "
            f"use at least {gpus}."
        )
    size = rollout.prompts, rollout.group_size, rollout.max_new_tokens
    return mean_of(
        [pool_step(work, machine, links, gpus, samplers, lengths.draw(*size, seed + i)) for i in range(draws)]
    )
