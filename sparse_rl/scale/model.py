"""The scale model: step time, idle share and cost of a run on many GPUs, from figures measured on one. docs/scale.md says how true it is.

A step is cut as `Trainer.run` cuts it: every process samples and scores its prompts, all meet, every optimizer step waits for the slowest
and sums gradients. Response lengths are drawn, prompts dealt and rows drained as the code does it; the straggler is what comes out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..compressors import Compressor
from ..config import Recipe, RolloutSettings
from ..distributed.world import BUCKET
from ..errors import SparseRLError, require_int
from ..learn.batch import pack
from ..models import ModelShape, dtype_of, load_config, weight_bytes
from ..rollout.schedule import row_counts
from ..train.budget import compressor_of
from ..train.deal import deal
from ..train.run import lora_parameters
from .lengths import Lengths

RECORD_BYTES = 47  # of a token, padding included, when trajectories are exchanged (tests/test_scale.py)


@dataclass(frozen=True)
class Machine:
    """One GPU as it was measured: all rates are of our code on it, not of its data sheet."""

    bandwidth: float  # bytes/s, of weights and slots in a decode step
    decode_flops: float  # of a decode step's matrix products
    layer_seconds: float  # of a layer in a decode step, whatever it computes
    prefill_flops: float  # of the modules' forward pass, without gradient
    token_seconds: float  # of a token in a layer of the modules, whatever its width
    evict_flops: float  # of an eviction, counted as the products of its keys with each other
    learn_flops: float  # of scoring and learning
    rollout_rest: float  # share of a rollout: traces to the host, the host itself
    step_rest: float  # share of a step: grading, the overlaps of a few trajectories
    hidden: float  # share of the shorter of sampling and learning that is gained by doing both at the same time
    record_seconds: (
        float  # of a token of the whole step, padding included, on the host of every process: corrections, diagnostics
    )
    memory: int  # bytes


# one NVIDIA H200, bf16: docs/scale.md says which rows of docs/results.md each number is from
H200 = Machine(4.35e12, 667e12, 32.4e-6, 564e12, 79.7e-9, 62.3e12, 392e12, 0.031, 0.045, 0.53, 0.44e-6, 139 * 2**30)


@dataclass(frozen=True)
class Links:
    """What lies between processes. Assumptions, all of them: nothing here was measured on GPUs."""

    link: float = 300e9  # bytes/s of a GPU to others of its node
    network: float = 40e9  # bytes/s of a GPU to other nodes
    per_node: int = 8
    latency: float = 50e-6  # of a collective operation
    records: float = 1e9  # bytes/s at which a process takes in the records of a step

    def __post_init__(self):
        for name in ("link", "network", "latency", "records"):
            if not 0 < getattr(self, name) < math.inf:
                raise SparseRLError(f"{name} is {getattr(self, name)}; it must be a positive number.")
        require_int(**{"GPUs per node": self.per_node})

    def seconds(self, volume: float, processes: int, calls: int = 1) -> float:
        """Of collectives in which every process sends `volume` bytes: as slow as the slowest part of the ring."""
        if processes == 1:
            return 0.0
        return (
            volume / (self.link if processes <= self.per_node else min(self.link, self.network)) + calls * self.latency
        )


@dataclass(frozen=True)
class Work:
    """A model and a recipe as the equations need them."""

    shape: ModelShape
    rollout: RolloutSettings
    compressor: Compressor
    body: int  # parameters of the layers
    head: int
    trained: int
    prompt_tokens: int
    capacity: int
    start: int  # slots of a row when its response begins
    minibatches: int
    micro_batch_tokens: int
    seen: float  # keys that a query of the learner sees at most
    views: int  # forward passes of scoring
    passes: float  # of an update, in forward passes
    shard: bool

    @classmethod
    def of(
        cls, shape: ModelShape, recipe: Recipe, *, tied: bool, parameters: int, trained: int, prompt_tokens: int
    ) -> Work:
        learn, bound, head = recipe.learn, compressor_of(recipe.rollout), shape.vocabulary * shape.hidden
        capacity, how = bound.capacity(prompt_tokens, recipe.rollout.max_new_tokens), learn.how()
        backward = 1 if recipe.model.lora_rank else 2
        return cls(
            shape,
            recipe.rollout,
            bound,
            body=parameters - head * (1 if tied else 2),
            head=head,
            trained=trained,
            prompt_tokens=prompt_tokens,
            capacity=capacity,
            start=bound.budget if bound.evicts_prompt(prompt_tokens) else prompt_tokens,
            minibatches=learn.minibatches,
            micro_batch_tokens=learn.micro_batch_tokens,
            seen=capacity if how.view == "shadow" else math.inf,
            views=2 if recipe.loss.beta > 0 else 1,
            passes=(1 + backward + recipe.model.gradient_checkpointing) * (2 if how.distill else 1),
            shard=recipe.model.shard,
        )

    @property
    def evicts(self) -> bool:
        return self.compressor.evicts_response

    @property
    def weight_bytes(self) -> int:
        """Of the weights that a decode step reads."""
        return (self.body + self.head) * self.shape.dtype.itemsize

    @property
    def divided_bytes(self) -> int:
        """Of all weights, as shards are gathered: those looked up too."""
        return max(self.trained, self.body + self.head) * self.shape.dtype.itemsize

    @property
    def kv_bytes(self) -> int:
        """Of a slot in all layers."""
        return self.shape.cache_shape().kv_bytes_per_token

    @property
    def query_width(self) -> int:
        """Of all layers."""
        return self.shape.layers * self.shape.query_heads * self.shape.head_dim

    # ------------------------------------------------------------------------------------------------------------ one GPU

    def decode_seconds(self, machine: Machine, rows: float | np.ndarray, slots: float) -> float | np.ndarray:
        """One token of every row, which uses `slots` slots on average."""
        return self.step_seconds(machine, rows) + rows * slots * self.kv_bytes / machine.bandwidth

    def step_seconds(self, machine: Machine, width: float | np.ndarray) -> float | np.ndarray:
        """The part of it that all rows share: read the weights once, or multiply with them, whichever takes longer."""
        products = np.maximum(
            self.weight_bytes / machine.bandwidth, 2 * (self.body + self.head) * width / machine.decode_flops
        )
        return self.shape.layers * machine.layer_seconds + products

    def slots_read(self, new: np.ndarray) -> np.ndarray:
        """Slots that attention reads for responses of `new` tokens, summed over these."""
        if self.compressor.folds:
            chunk = self.compressor.interval
            return new * (self.start + chunk / 2) + new**2 / (2 * chunk)
        if not self.evicts:
            return new * self.start + new**2 / 2
        before = np.minimum(new, self.capacity - self.start)  # tokens until the row is full
        return before * (self.start + before / 2) + (new - before) * (self.compressor.budget + self.capacity) / 2

    def evictions(self, new: np.ndarray) -> np.ndarray:
        if not self.evicts:
            return np.zeros_like(new)
        until = self.capacity - self.start
        return np.where(new >= until, 1 + (new - until) // (self.capacity - self.compressor.budget), 0)

    def rollout_seconds(self, machine: Machine, new: np.ndarray, prompts: int) -> float:
        """Responses of `new` tokens [n] to some prompts, by one process."""
        live, steps = drain(new + (new // self.compressor.interval if self.compressor.folds else 0), self.rollout.rows)
        widths = np.array(sorted(row_counts(self.rollout.rows)))
        decode = (steps * self.step_seconds(machine, widths[np.searchsorted(widths, live)])).sum()
        decode += self.slots_read(new).sum() * self.kv_bytes / machine.bandwidth
        fed = prompts * self.prompt_tokens
        attention = 2 * fed * self.prompt_tokens * self.query_width
        prefill = (
            2 * fed * self.body + attention
        ) / machine.prefill_flops + fed * self.shape.layers * machine.token_seconds
        keys = self.capacity * self.kv_bytes / (2 * self.shape.dtype.itemsize)  # numbers in the keys of a row
        evict = self.evictions(new).sum() * 2 * self.capacity * keys / machine.evict_flops
        return (decode + prefill + evict) / (1 - machine.rollout_rest)

    def pass_seconds(self, machine: Machine, sequences: int, length: int) -> float:
        """A forward pass over a micro-batch, padding included."""
        tokens = sequences * length
        flops = 2 * tokens * (self.body + self.head) + 4 * tokens * min(self.seen, length / 2) * self.query_width
        return flops / machine.learn_flops + tokens * self.shape.layers * machine.token_seconds

    def passes_of(self, machine: Machine, lengths: np.ndarray) -> tuple[float, int]:
        """(seconds of a forward pass over all sequences, micro-batches)"""
        packed = pack(torch.from_numpy(lengths), self.micro_batch_tokens)
        return sum(self.pass_seconds(machine, len(rows), int(lengths[rows[0]])) for rows in packed), len(packed)

    # ------------------------------------------------------------------------------------------------------------ several

    def communication(self, links: Links, processes: int, micro_batches: int) -> float:
        """Seconds of an optimizer step's: gradients summed, or shards gathered twice and gradients scattered in every micro-batch."""
        share = (processes - 1) / processes
        if not self.shard:
            return links.seconds(2 * share * 4 * self.trained, processes, 1 + self.trained // BUCKET)
        volume = share * (2 * self.divided_bytes + 4 * self.trained)
        return micro_batches * links.seconds(volume, processes, 3 * (self.shape.layers + 1))

    def publish_seconds(self, links: Links, machine: Machine, processes: int) -> float:
        """Whole weights for the sampler: gathered from shards, or copied."""
        if self.shard and processes > 1:
            return links.seconds((processes - 1) / processes * self.divided_bytes, processes, 12 * self.shape.layers)
        return 2 * self.weight_bytes / machine.bandwidth if self.rollout.ahead else 0.0


@dataclass(frozen=True)
class Forecast:
    """A step, in seconds; means over the steps that were drawn."""

    sample: float  # rollout and scoring, on the slowest process
    rollout: float  # of it rollout
    update: float  # arithmetic of all optimizer steps, each on the slowest process
    communication: float  # of gradients or shards, as if none of it were hidden behind arithmetic
    exchange: float  # records of all trajectories to all processes
    publish: float  # whole weights to samplers
    rest: float  # grading, corrections, diagnostics
    step: float
    step_at_best: float  # if communication hid behind arithmetic wholly
    step_at_worst: float  # if rollouts ahead gained nothing, as the device is shared; else as `step`
    idle: float  # share of a step that a process waits for the slowest, on average
    idle_sampling: float  # the same of the sampling alone: the metric processes/idle/frac
    tokens: float  # of responses
    length: float  # mean response
    longest: float


def drain(steps: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(running rows, for how many decode steps): sequences of given steps, in order, each in the row that is free first."""
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
    """Steps drawn `draws` times, and their mean."""
    require_int(**{"--gpus": gpus})
    if work.rollout.prompts < gpus:
        raise SparseRLError(
            f"rollout.prompts is {work.rollout.prompts} for {gpus} GPUs, but a group stays on one; use at least as many."
        )
    size = work.rollout.prompts, work.rollout.group_size, work.rollout.max_new_tokens
    drawn = [one_step(work, machine, links, gpus, lengths.draw(*size, seed + i)) for i in range(draws)]
    return Forecast(
        **{name: float(np.mean([getattr(f, name) for f in drawn])) for name in Forecast.__dataclass_fields__}
    )


def one_step(
    work: Work, machine: Machine, links: Links, gpus: int, new: np.ndarray, expected: Sequence[float] | None = None
) -> Forecast:
    """A step with given response lengths [prompts, group]; `expected`: what the dealing goes by, nothing known if None."""
    owner = np.array(deal([1.0] * len(new) if expected is None else expected, work.minibatches, gpus))
    block = np.concatenate(
        [np.full(len(part), i) for i, part in enumerate(np.array_split(np.arange(new.size), work.minibatches))]
    )
    owners, total = np.repeat(owner, new.shape[1]), new.ravel() + work.prompt_tokens
    shares = [new[owner == rank] for rank in range(gpus)]
    rollouts = np.array([work.rollout_seconds(machine, share.ravel(), len(share)) for share in shares])
    scores = np.array([work.views * work.passes_of(machine, share.ravel() + work.prompt_tokens)[0] for share in shares])
    learner = (
        2 * 16 * work.trained / (gpus if work.shard else 1) / machine.bandwidth
    )  # masters, moments, gradients: read and written
    sampled, learned = rollouts + scores, np.zeros(gpus)
    update = communication = 0.0
    for i in range(work.minibatches):
        mine = [work.passes_of(machine, total[(owners == rank) & (block == i)]) for rank in range(gpus)]
        seconds = work.passes * np.array([seconds for seconds, _ in mine]) + learner
        update += seconds.max()
        learned += seconds
        communication += work.communication(links, gpus, max(count for _, count in mine))
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
    shorter = 1 if sample >= update + communication else 0
    ahead = bool(work.rollout.ahead)
    found = step(communication, ahead)
    return Forecast(
        sample=sample,
        rollout=float(rollouts[slowest]),
        update=float(update),
        communication=communication,
        exchange=exchange,
        publish=publish,
        rest=machine.step_rest * found + records,
        step=found,
        step_at_best=step(max(0.0, communication - update), ahead),
        step_at_worst=step(communication, False),
        idle=float(
            (sum(waits) - (machine.hidden * waits[shorter] if ahead else 0.0)) / found
        ),  # less what is hidden of the shorter part
        idle_sampling=float(1 - sampled.mean() / sample),
        tokens=float(new.sum()),
        length=float(new.mean()),
        longest=float(new.max()),
    )


def work_of(recipe: Recipe, prompt_tokens: int) -> Work:
    """What the scale model must know of a recipe, from the model's config alone."""
    config = load_config(recipe.model.name)
    shape = ModelShape.of(config, dtype_of(recipe.model.dtype))
    parameters = weight_bytes(config, shape.dtype) // shape.dtype.itemsize
    trained = lora_parameters(config, recipe.model.lora_rank) if recipe.model.lora_rank else parameters
    tied = bool(config.get_text_config(decoder=True).tie_word_embeddings)
    return Work.of(shape, recipe, tied=tied, parameters=parameters, trained=trained, prompt_tokens=prompt_tokens)
