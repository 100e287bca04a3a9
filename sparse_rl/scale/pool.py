"""The scale model of a pool: the ledger of a run deals a step's pieces to samplers that take as long as the model says.

The learner has GPUs of its own. With `rollout.ahead: 0` sampling and learning take turns; otherwise they run at the
same time on different GPUs, and a step takes as long as the longer of the two.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import SparseRLError, require_int
from ..pool.ledger import Ledger
from ..pool.pieces import Piece, Place, cut
from ..rollout.schedule import row_counts
from ..train.deal import deal
from .lengths import Lengths
from .model import RECORD_BYTES, Forecast, Links, Machine, Work, mean_of, update_seconds

RESULT_BYTES = 37  # per token of a result of the 1.5B shape, compressed (docs/results/pool.md)


@dataclass(frozen=True)
class PoolRollout:
    """A step's sampling: seconds until the last piece is there, and what samplers and learner sent each other."""

    seconds: float
    working: float  # seconds of all samplers together
    handouts: int
    pieces: int

    @property
    def messages(self) -> int:
        """At most: a handout, and an answer for each piece and each handout's end."""
        return 2 * self.handouts + self.pieces


def pool_rollout(work: Work, machine: Machine, samplers: int, new: np.ndarray, scores: bool = False) -> PoolRollout:
    """A step with response lengths `new` [prompts, group]. scores: samplers score what they have sampled"""
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
    """Seconds until each piece of a handout is there, and until the sampler is idle."""
    drawn = [new[piece.prompt_index, list(piece.members)] for piece in pieces]
    lengths = np.concatenate(drawn)
    prompts = len({piece.prompt_index for piece in pieces})
    total = work.rollout_seconds(machine, lengths, prompts)
    widths = np.array(sorted(row_counts(work.rollout.rows)))
    ordered = np.sort(lengths)
    live = np.arange(len(ordered), 0, -1)
    steps = np.diff(ordered, prepend=0)
    taken = np.cumsum(steps * work.step_seconds(machine, widths[np.searchsorted(widths, np.minimum(live, widths[-1]))]))
    done = total * taken / taken[-1]
    times = [float(done[np.searchsorted(ordered, own.max(), side="right") - 1]) for own in drawn]
    if not scores:
        return times, total
    for i, own in enumerate(drawn):  # scored when all are sampled, one piece after the other
        total += work.views * work.passes_of(machine, own + work.prompt_tokens)[0]
        times[i] = total
    return times, total


def pool_step(work: Work, machine: Machine, links: Links, gpus: int, samplers: int, new: np.ndarray) -> Forecast:
    """A step of a learner on `gpus` GPUs and `samplers` samplers, each with a GPU."""
    ahead = bool(work.rollout.ahead)
    sampled = pool_rollout(work, machine, samplers, new, scores=ahead)
    owner = np.array(deal([1.0] * len(new), work.minibatches, gpus))  # [prompts]
    total = new.ravel() + work.prompt_tokens
    by_rank = [new[owner == rank].ravel() + work.prompt_tokens for rank in range(gpus)]
    scores = np.array([0.0 if ahead else work.views * work.passes_of(machine, own)[0] for own in by_rank])
    update, learned, communication = update_seconds(work, machine, links, np.repeat(owner, new.shape[1]), total, gpus)
    padded = float(total.max()) * new.size
    exchange = padded * RECORD_BYTES / links.records if gpus > 1 else 0.0
    results = float(new.sum()) * RESULT_BYTES / links.store + sampled.messages * links.message
    publish = work.travelling_bytes / links.store
    records = padded * machine.record_seconds
    sample = sampled.seconds + publish  # samplers fetch what the learner has put into the store

    def step(communication: float) -> float:
        learn = float(scores.max()) + update + communication + exchange + results + publish + records
        return (max(sample, learn) if ahead else sample + learn) / (1 - machine.step_rest)

    found = step(communication)
    busy = sampled.working + float(scores.sum() + learned.sum())
    return Forecast(
        sample=sample + float(scores.max()),
        rollout=sampled.seconds,
        update=update,
        communication=communication,
        exchange=exchange + results,
        publish=2 * publish,
        rest=machine.step_rest * found + records,
        step=found,
        step_at_best=step(max(0.0, communication - update)),
        step_at_worst=found,
        idle=1 - busy / (found * (gpus + samplers)),
        idle_sampling=1 - sampled.working / (sampled.seconds * samplers),
        tokens=float(new.sum()),
        length=float(new.mean()),
        longest=float(new.max()),
    )


def forecast_pool(
    work: Work, machine: Machine, links: Links, gpus: int, lengths: Lengths, seed: int = 0, draws: int = 4
) -> Forecast:
    """The mean of `draws` steps with response lengths drawn at random."""
    samplers = work.rollout.samplers
    require_int(**{"--gpus": gpus})
    if not samplers:
        raise SparseRLError(
            f"rollout.pool is {work.rollout.pool} and rollout.samplers is 0, as many as the cluster has room for; "
            "a plan cannot know that: give --rollout.samplers: --gpus counts the GPUs of the learner alone."
        )
    size = work.rollout.prompts, work.rollout.group_size, work.rollout.max_new_tokens
    return mean_of(
        [pool_step(work, machine, links, gpus, samplers, lengths.draw(*size, seed + i)) for i in range(draws)]
    )
