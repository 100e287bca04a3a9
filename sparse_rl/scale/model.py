"""The scale model: predicts step time, idle share and cost of a run on many GPUs, from figures measured on one GPU.

A step has the parts that `Trainer.run` gives it: every process samples and scores its prompts, all processes meet, and
every optimizer step waits for the slowest process and sums gradients. Response lengths are drawn at random; prompts are
dealt and rows drained as in the code; the wait for stragglers follows. docs/scale.md says how accurate the model is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from ..compressors import Compressor
from ..config import Recipe, RolloutSettings
from ..distributed.world import BUCKET
from ..errors import SparseRLError, require_int
from ..learn.packing import may_pack, may_share, pack
from ..models import ModelShape, dtype_of, load_config, weight_bytes
from ..rollout.schedule import row_counts
from ..train.budget import compressor_of
from ..train.deal import deal
from ..train.run import trained_parameters
from .lengths import Lengths

RECORD_BYTES = 47  # bytes exchanged per token of a step, padding included (tests/scale/test_scale.py measures them)


@dataclass(frozen=True)
class Machine:
    """A GPU as it was measured: all rates are those of this code on it, not those of a data sheet."""

    bandwidth: float  # bytes/s at which a decode step reads weights and slots
    decode_flops: float  # FLOP/s of the matrix products of a decode step
    layer_seconds: float  # fixed seconds per layer of a decode step
    prefill_flops: float  # FLOP/s of reading prompts
    token_seconds: float  # fixed seconds per token and layer of reading prompts
    evict_flops: float  # FLOP/s of an eviction, counted as the products of a row's keys with each other
    learn_flops: float  # FLOP/s of scoring and learning, in steps of a run
    rollout_rest: float  # share of a rollout spent on traces to the host and on the host itself
    step_rest: float  # share of a step spent on grading and on the overlaps of a few trajectories
    hidden: float  # share of the shorter of sampling and learning that is saved by doing both at the same time
    record_seconds: float  # of corrections and diagnostics on each host, per token of the step, padding included
    memory: int  # bytes


# one NVIDIA H200, bf16: docs/scale.md says which measurement each number comes from
H200 = Machine(4.35e12, 667e12, 32.4e-6, 564e12, 79.7e-9, 62.3e12, 434e12, 0.031, 0.045, 0.53, 0.44e-6, 139 * 2**30)


@dataclass(frozen=True)
class Links:
    """The connections between processes. All numbers are assumptions: none was measured on GPUs."""

    link: float = 300e9  # bytes/s of a GPU to others of its node
    network: float = 40e9  # bytes/s of a GPU to other nodes
    per_node: int = 8  # GPUs
    latency: float = 50e-6  # seconds per collective operation
    records: float = 1e9  # bytes/s at which a process receives the records of a step
    store: float = 1e9  # bytes/s into Ray's object store, and out of it on another node
    message: float = 1e-3  # seconds of the learner's process for a message of a pool

    def __post_init__(self):
        for name in ("link", "network", "latency", "records", "store", "message"):
            if not 0 < getattr(self, name) < math.inf:
                raise SparseRLError(f"{name} is {getattr(self, name)}; it must be a positive number.")
        require_int(**{"GPUs per node": self.per_node})

    def seconds(self, volume: float, processes: int, calls: int = 1) -> float:
        """Seconds of `calls` collectives in which every process sends `volume` bytes in all, over a ring."""
        if processes == 1:
            return 0.0
        slowest = self.link if processes <= self.per_node else min(self.link, self.network)
        return volume / slowest + calls * self.latency


@dataclass(frozen=True)
class Work:
    """The numbers of a model and a recipe that the equations need."""

    shape: ModelShape
    rollout: RolloutSettings
    compressor: Compressor
    body: int  # parameters in the layers
    head: int  # parameters of the head
    trained: int  # trained parameters
    prompt_tokens: int  # of every prompt
    capacity: int
    start: int  # slots in use when a response begins
    minibatches: int
    micro_batch_tokens: int
    seen: float  # the most keys that a query of the learner sees
    views: int  # forward passes of scoring
    passes: float  # cost of an update, in forward passes
    packs: bool  # whether micro-batches of the learner have no padding
    shares: bool  # whether the completions of a prompt share its tokens there
    shard: bool

    @classmethod
    def of(
        cls, shape: ModelShape, recipe: Recipe, *, tied: bool, parameters: int, trained: int, prompt_tokens: int,
        packs: bool, shares: bool,
    ) -> Work:  # fmt: skip
        learn, bound, head = recipe.learn, compressor_of(recipe.rollout).on_average(), shape.vocabulary * shape.hidden
        capacity, method = bound.capacity(prompt_tokens, recipe.rollout.max_new_tokens), learn.resolve_method()
        backward = 1 if recipe.model.lora_rank else 2
        models = 2 if recipe.has_separate_critic else 1  # models that learn
        recomputed = recipe.checkpoints_gradients and not recipe.keeps_products  # forward passes; products alone count
        return cls(
            shape,
            recipe.rollout,
            bound,
            body=parameters - head * (1 if tied else 2),
            head=head,
            trained=trained * models,
            prompt_tokens=prompt_tokens,
            capacity=capacity,
            start=bound.budget if bound.evicts_prompt(prompt_tokens) else prompt_tokens,
            minibatches=learn.minibatches,
            micro_batch_tokens=recipe.micro_batch_tokens,
            seen=capacity if method.view == "shadow" else math.inf,
            views=recipe.scores_all + (models - 1) + recipe.keeps_reference,
            passes=(1 + backward + recomputed) * (models + (method.distill is not None)),
            packs=packs,
            shares=packs and shares,
            shard=recipe.model.shard,
        )

    @property
    def evicts(self) -> bool:
        return self.compressor.evicts_response

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a decode step reads."""
        return (self.body + self.head) * self.shape.dtype.itemsize

    @property
    def divided_bytes(self) -> int:
        """Bytes of all weights that are gathered from shards, embeddings included."""
        return max(self.trained, self.body + self.head) * self.shape.dtype.itemsize

    @property
    def travelling_bytes(self) -> int:
        """Bytes of the trained weights, which a pool's samplers are sent for every step."""
        return self.trained * self.shape.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """Bytes of one slot in all layers."""
        cache, slots = self.shape.cache_shape(), self.compressor.slots
        return replace(cache, slots=None if slots is None else slots.for_layers(cache.layers)).stored_bytes

    @property
    def query_width(self) -> int:
        """Numbers in the queries of one token, over all layers."""
        return self.shape.layers * self.shape.query_heads * self.shape.head_dim

    # ---- one GPU

    def decode_seconds(self, machine: Machine, rows: float | np.ndarray, slots: float) -> float | np.ndarray:
        """Seconds to decode one token of every row; a row uses `slots` slots on average."""
        return self.step_seconds(machine, rows) + rows * slots * self.kv_bytes / machine.bandwidth

    def step_seconds(self, machine: Machine, width: float | np.ndarray) -> float | np.ndarray:
        """The part of `decode_seconds` without the slots: reading the weights or multiplying, whichever
        takes longer.
        """
        products = np.maximum(
            self.weight_bytes / machine.bandwidth, 2 * (self.body + self.head) * width / machine.decode_flops
        )
        return self.shape.layers * machine.layer_seconds + products

    def slots_read(self, new: np.ndarray) -> np.ndarray:
        """Slots that attention reads over a whole response of `new` tokens."""
        if self.compressor.folds:
            chunk = self.compressor.interval
            return new * (self.start + chunk / 2) + new**2 / (2 * chunk)
        if not self.evicts:
            return new * self.start + new**2 / 2
        before = np.minimum(new, self.capacity - self.start)  # tokens before the row is full
        return before * (self.start + before / 2) + (new - before) * (self.compressor.budget + self.capacity) / 2

    def evictions(self, new: np.ndarray) -> np.ndarray:
        """Evictions while a response of `new` tokens is decoded."""
        if not self.evicts:
            return np.zeros_like(new)
        until = self.capacity - self.start
        return np.where(new >= until, 1 + (new - until) // (self.capacity - self.compressor.budget), 0)

    def rollout_seconds(self, machine: Machine, new: np.ndarray, prompts: int) -> float:
        """Seconds in which one process samples responses of `new` tokens [n] to `prompts` prompts."""
        live, steps = drain(new + (new // self.compressor.interval if self.compressor.folds else 0), self.rollout.rows)
        widths = np.array(sorted(row_counts(self.rollout.rows)))
        decode = (steps * self.step_seconds(machine, widths[np.searchsorted(widths, live)])).sum()
        decode += self.slots_read(new).sum() * self.kv_bytes / machine.bandwidth
        fed = prompts * self.prompt_tokens
        attention = 2 * fed * self.prompt_tokens * self.query_width
        prefill = (2 * fed * self.body + attention) / machine.prefill_flops
        prefill += fed * self.shape.layers * machine.token_seconds
        keys = self.capacity * self.kv_bytes / (2 * self.shape.dtype.itemsize)  # numbers in the keys of a row
        evict = self.evictions(new).sum() * 2 * self.capacity * keys / machine.evict_flops
        return (decode + prefill + evict) / (1 - machine.rollout_rest)

    def pass_seconds(self, machine: Machine, tokens: float, length: float) -> float:
        """Seconds of a forward pass over so many tokens, those of padding included, of sequences of this length."""
        flops = 2 * tokens * (self.body + self.head) + 4 * tokens * min(self.seen, length / 2) * self.query_width
        return flops / machine.learn_flops

    def passes_of(self, machine: Machine, lengths: np.ndarray) -> tuple[float, int]:
        """(seconds of a forward pass over all sequences, number of micro-batches)"""
        if not self.packs:
            padded = [
                (len(rows), int(lengths[rows[0]])) for rows in pack(torch.from_numpy(lengths), self.micro_batch_tokens)
            ]
            return sum(self.pass_seconds(machine, rows * length, length) for rows, length in padded), len(padded)
        tokens = self.packed_tokens(lengths)
        mean = float((lengths**2.0).sum() / max(1, lengths.sum()))  # of the sequence that a token is in
        return self.pass_seconds(machine, tokens, mean), math.ceil(tokens / self.micro_batch_tokens)

    def packed_tokens(self, lengths: np.ndarray) -> float:
        """Tokens of sequences that are packed. Neighbours have the same prompt, as many as a group has completions."""
        shared = len(lengths) - math.ceil(len(lengths) / self.rollout.group_size) if self.shares else 0
        return float(lengths.sum()) - shared * self.prompt_tokens

    # ---- several GPUs

    def communication(self, links: Links, processes: int, micro_batches: int) -> float:
        """Seconds of communication per optimizer step.

        Either gradients are summed once, or every micro-batch gathers shards twice and scatters gradients once.
        """
        share = (processes - 1) / processes
        if not self.shard:
            return links.seconds(2 * share * 4 * self.trained, processes, 1 + self.trained // BUCKET)
        volume = share * (2 * self.divided_bytes + 4 * self.trained)
        return micro_batches * links.seconds(volume, processes, 3 * (self.shape.layers + 1))

    def publish_seconds(self, links: Links, machine: Machine, processes: int) -> float:
        """Seconds to give the sampler whole weights: gathered from shards, or copied."""
        if self.shard and processes > 1:
            return links.seconds((processes - 1) / processes * self.divided_bytes, processes, 12 * self.shape.layers)
        return 2 * self.weight_bytes / machine.bandwidth if self.rollout.ahead else 0.0


@dataclass(frozen=True)
class Forecast:
    """Seconds of a step and its parts, and response lengths: means over the steps that were drawn."""

    sample: float  # rollout and scoring, on the slowest process
    rollout: float  # the rollout's part of `sample`
    update: float  # arithmetic of all optimizer steps, each on the slowest process
    communication: float  # gradients or shards, as if arithmetic hid none of it
    exchange: float  # records of all trajectories, sent to all processes
    publish: float  # whole weights, given to the samplers
    rest: float  # grading, corrections, diagnostics
    step: float
    step_at_best: float  # if arithmetic hid all communication
    step_at_worst: float  # if sampling ahead gained nothing, because the device is shared; otherwise equal to `step`
    idle: float  # share of a step that a process waits for the slowest, on average
    idle_sampling: float  # the same share of sampling alone: the metric processes/idle/frac
    tokens: float  # response tokens of the step
    length: float  # tokens of the mean response
    longest: float  # tokens of the longest response


Drawn = TypeVar("Drawn", bound=Forecast)


def drain(steps: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(numbers of running rows, decode steps that each number lasts). Sequences take `steps` steps; each goes, in
    order, into the first row that becomes free.
    """
    free, starts = [0.0] * min(rows, len(steps)), np.empty(len(steps))
    for i, count in enumerate(steps.tolist()):
        starts[i] = heapq.heappop(free)
        heapq.heappush(free, starts[i] + count)
    times = np.concatenate([starts + steps, starts])  # a row ends before the next begins in it
    order = np.argsort(times, kind="stable")
    live = np.cumsum(np.repeat([-1, 1], len(steps))[order])
    return live[:-1], np.diff(times[order])


def forecast(
    work: Work, machine: Machine, links: Links, gpus: int, lengths: Lengths, seed: int = 0, draws: int = 4
) -> Forecast:
    """The mean of `draws` steps with response lengths drawn at random."""
    require_prompts(work, gpus)
    size = work.rollout.prompts, work.rollout.group_size, work.rollout.max_new_tokens
    drawn = [one_step(work, machine, links, gpus, lengths.draw(*size, seed + i)) for i in range(draws)]
    return mean_of(drawn)


def require_prompts(work: Work, gpus: int) -> None:
    require_int(**{"--gpus": gpus})
    if work.rollout.prompts < gpus:
        raise SparseRLError(
            f"rollout.prompts is {work.rollout.prompts}, but all completions of a prompt stay on one of {gpus} GPUs; "
            f"use at least {gpus} prompts."
        )


def mean_of(drawn: Sequence[Drawn]) -> Drawn:
    kind = type(drawn[0])
    return kind(**{name: float(np.mean([getattr(f, name) for f in drawn])) for name in kind.__dataclass_fields__})


def one_step(
    work: Work, machine: Machine, links: Links, gpus: int, new: np.ndarray, expected: Sequence[float] | None = None
) -> Forecast:
    """A step with response lengths `new` [prompts, group]. `expected`: the lengths by which prompts are dealt to
    processes; None if all are expected to be equal
    """
    owner = np.array(deal([1.0] * len(new) if expected is None else expected, work.minibatches, gpus))  # [prompts]
    shares = [new[owner == rank] for rank in range(gpus)]
    rollouts = np.array([work.rollout_seconds(machine, share.ravel(), len(share)) for share in shares])
    scores = np.array([work.views * work.passes_of(machine, share.ravel() + work.prompt_tokens)[0] for share in shares])
    sampled, total = rollouts + scores, new.ravel() + work.prompt_tokens
    update, learned, communication = update_seconds(work, machine, links, np.repeat(owner, new.shape[1]), total, gpus)
    sample, slowest = float(sampled.max()), int(sampled.argmax())
    padded = float(total.max()) * new.size
    exchange = padded * RECORD_BYTES / links.records if gpus > 1 else 0.0
    records = padded * machine.record_seconds
    publish = work.publish_seconds(links, machine, gpus)

    def step(communication: float, ahead: bool) -> float:
        learn = update + communication
        gained = machine.hidden * min(sample, learn) if ahead else 0.0
        return (sample + learn - gained + exchange + publish + records) / (1 - machine.step_rest)

    waits = sample - sampled.mean(), update - learned.mean()
    shorter = 1 if sample >= update + communication else 0  # sampling ahead hides a part of this wait
    ahead = bool(work.rollout.ahead)
    found = step(communication, ahead)
    return Forecast(
        sample=sample,
        rollout=float(rollouts[slowest]),
        update=update,
        communication=communication,
        exchange=exchange,
        publish=publish,
        rest=machine.step_rest * found + records,
        step=found,
        step_at_best=step(max(0.0, communication - update), ahead),
        step_at_worst=step(communication, False),
        idle=float((sum(waits) - (machine.hidden * waits[shorter] if ahead else 0.0)) / found),
        idle_sampling=float(1 - sampled.mean() / sample),
        tokens=float(new.sum()),
        length=float(new.mean()),
        longest=float(new.max()),
    )


def update_seconds(
    work: Work, machine: Machine, links: Links, owners: np.ndarray, total: np.ndarray, gpus: int
) -> tuple[float, np.ndarray, float]:
    """All optimizer steps: (seconds on the slowest process, seconds on each process, seconds of communication).

    `owners`: the process of each trajectory; `total`: its prompt and response tokens.
    """
    optimizer = 2 * 16 * work.trained / (gpus if work.shard else 1) / machine.bandwidth  # reads and writes all state
    update, learned, communication = 0.0, np.zeros(gpus), 0.0
    for batch in np.array_split(np.arange(len(total)), work.minibatches):
        own = [work.passes_of(machine, total[batch[owners[batch] == rank]]) for rank in range(gpus)]
        seconds = work.passes * np.array([seconds for seconds, _ in own]) + optimizer
        update += seconds.max()
        learned += seconds
        communication += work.communication(links, gpus, max(count for _, count in own))
    return float(update), learned, communication


def work_of(recipe: Recipe, prompt_tokens: int) -> Work:
    """The `Work` of a recipe, from the model's config alone."""
    config = load_config(recipe.model.name)
    shape = ModelShape.of(config, dtype_of(recipe.model.dtype))
    parameters = weight_bytes(config, shape.dtype) // shape.dtype.itemsize
    trained = trained_parameters(config, recipe) or parameters
    text = config.get_text_config(decoder=True)
    packs = recipe.learn.packing != "never" and may_pack(text) and not recipe.student.chunks
    return Work.of(
        shape, recipe, tied=bool(text.tie_word_embeddings), parameters=parameters, trained=trained,
        prompt_tokens=prompt_tokens, packs=packs, shares=may_share(text),
    )  # fmt: skip
