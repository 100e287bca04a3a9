"""The memory plan of a training run: what every process needs, from its rollouts' plan and the model's shape."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from ..distributed.world import BUCKET
from ..models import MLP_CHUNK, ModelShape, head_chunk
from .memory import ALLOCATOR_SHARE, Plan, aligned, scan_token_bytes, size

WORKSPACE = 2**28  # what GPU libraries allocate for themselves, such as 32 MiB per stream for matrix products

CONTEXT = 2**29  # what CUDA needs for every further process on a GPU (estimate)

OFFLOADED = 2 * 2**25  # trained parameters whose masters and moments are on the device at a time (learn/offload.py)


@dataclass(frozen=True)
class TrainingPlan:
    """The memory of a training step in every process.

    Rollout and update take turns, so only the larger of their working sets counts. Rollouts that run ahead of the
    learner run at the same time as the update, and then both count.
    """

    rollout: Plan
    # fp32 masters (unless the weights are fp32), two moments and gradients; a shard of them if they are divided; only
    # gradients if the others are offloaded to the host
    optimizer_bytes: int
    reference_bytes: int
    update_bytes: int  # estimate: activations of a micro-batch, in the update or in scoring, and the head's chunk
    eval_bytes: int  # the dense cache of held-out evaluations
    student_bytes: int = 0  # weights and optimizers of all students
    reward_model_bytes: int = 0
    grading_bytes: int = 0  # estimate: activations of the reward model, which takes turns with the rollout
    critic_bytes: int = 0  # weights and optimizer of a separate critic
    learner_bytes: int = 0  # the learner's weights, if the sampler has a separate copy and nothing is divided
    host_bytes: int = 0  # in host memory: offloaded masters and moments, inputs of layers
    divided_by: int = 1  # processes among which the learner's weights, gradients and moments are divided
    ahead: bool = False
    offloads_optimizer: bool = False
    scoring_bytes: int = 0  # estimate: the part of `update_bytes` that scoring alone would need
    beside_bytes: int = 0  # samplers of a pool, in separate processes on the same device

    @property
    def total_bytes(self) -> int:
        plan = self.rollout
        sampling = max(plan.working_bytes, self.grading_bytes)
        working = sampling + self.update_bytes if self.ahead else max(sampling, self.update_bytes)
        models = self.learner_bytes + self.reference_bytes + self.reward_model_bytes
        held = self.optimizer_bytes + models + self.student_bytes + self.critic_bytes + WORKSPACE + self.beside_bytes
        return plan.total_bytes - plan.working_bytes + held + max(working, self.eval_bytes)

    def sampler_bytes(self, scores: bool) -> int:
        """The memory of a pool's sampler in a separate process, without optimizer and update. scores: it also scores
        what it samples, for which it has the reference's and a critic's weights if the run has them
        """
        plan = self.rollout
        critic = plan.weight_bytes if self.critic_bytes else 0
        models, working = (self.reference_bytes + critic, self.scoring_bytes) if scores else (0, 0)
        return plan.total_bytes - plan.working_bytes + models + WORKSPACE + max(plan.working_bytes, working)

    def with_samplers(self, count: int, scores: bool) -> TrainingPlan:
        """The plan with this many samplers of a pool on the same device."""
        return replace(self, beside_bytes=count * (self.sampler_bytes(scores) + CONTEXT))

    def fits(self, memory: int) -> bool:
        """Whether the plan fits, with the allocator's share left free."""
        return self.total_bytes <= memory * (1 - ALLOCATOR_SHARE)

    def text(self, memory: int | None = None) -> str:
        """The plan as a table to print."""
        plan = self.rollout
        turns = "rollout, update and evaluation take turns"
        if self.ahead:
            turns = "evaluation takes turns with rollout and update"
        lines = [
            *plan.lines()[:-1],
            *self._optimizer_lines(),
            *([("the learner's own weights", size(self.learner_bytes))] if self.learner_bytes else []),
            ("reference model", size(self.reference_bytes)),
            *self._reward_model_lines(),
            *([("students: weights and optimizers", size(self.student_bytes))] if self.student_bytes else []),
            *([("critic: weights and optimizer", size(self.critic_bytes))] if self.critic_bytes else []),
            ("update: activations of a micro-batch (estimate)", size(self.update_bytes)),
            ("held-out evaluation: dense cache", size(self.eval_bytes)),
            ("workspaces of libraries (estimate)", size(WORKSPACE)),
            *([("samplers of the pool on this GPU", size(self.beside_bytes))] if self.beside_bytes else []),
            (f"total ({turns})", size(self.total_bytes)),
        ]
        if memory is not None:
            lines.append(
                (
                    "memory, 5 % of it left to the allocator",
                    f"{size(memory)}: {'fits' if self.fits(memory) else 'does not fit'}",
                )
            )
        return aligned(lines)

    def _optimizer_lines(self) -> list[tuple[str, str]]:
        part = f", one of {self.divided_by} parts" if self.divided_by > 1 else ""
        held = "fp32 gradients" if self.offloads_optimizer else "fp32 masters, moments, gradients"
        on_host = [("offloaded to the host (not in the total)", size(self.host_bytes))] if self.host_bytes else []
        return [(f"optimizer: {held}{part}", size(self.optimizer_bytes)), *on_host]

    def _reward_model_lines(self) -> list[tuple[str, str]]:
        if not self.reward_model_bytes:
            return []
        return [
            ("reward model", size(self.reward_model_bytes)),
            ("grading: activations of the reward model (estimate)", size(self.grading_bytes)),
        ]


def make_training_plan(
    rollout: Plan,
    shape: ModelShape,
    *,
    trained: int,
    micro_batch_tokens: int,
    trajectories: int,
    minibatches: int,
    checkpointing: bool,
    reference: bool,
    evaluates: bool,
    shadow: bool = False,
    distills: bool = False,
    students: int = 0,
    student_trained: int = 0,
    processes: int = 1,
    shard: bool = False,
    ahead: bool = False,
    reward_model: tuple[int, int] = (0, 0),
    critic: bool = False,
    offload: bool = False,
    keeps_products: bool = False,
    long_rows: bool = False,
    routes: int = 0,
    support: int = 0,
) -> TrainingPlan:
    """The plan of a training run, from the plan of its rollouts.

    `trained`: the number of trained parameters. `micro_batch_tokens` may be less than one trajectory, which is then
    a micro-batch alone, or more than there are: a process has `trajectories` in a step, and an optimizer step has one
    of `minibatches` parts of them. `shadow`: attention follows a trace, by segments. `distills`: the other view also
    passes through the model. `students` copies of the model, with `student_trained` trained parameters each, learn
    one after the other in micro-batches of the same size.

    `shard`: the learner is divided among the processes, in fp32, and every process also has whole weights to sample
    with; a layer is whole while it runs, and so are embeddings and head. Without it, gradients are summed in buckets.
    `ahead`: sampler and learner have separate weights and work at the same time. `critic`: a separate one, of the
    model's size and with as many trained parameters; its activations exist together with the policy's.
    `reward_model`: bytes of its weights and of a forward pass. `offload`: masters and moments are on the host and pass
    through the device in buckets, when activations are already freed. `keeps_products`: checkpointing keeps the outputs
    of products and attention as well (learn/selective.py). `long_rows`: what checkpointing keeps is on the
    host as well, and MLPs run by chunks (learn/long.py). `routes`: bytes of a token's experts, if they are replayed.
    `support`: the most tokens that could be drawn at one place, if log-probs are renormalised over them.
    """
    divided = shard and processes > 1
    item = shape.dtype.itemsize
    parameters = rollout.weight_bytes // item
    adapters = trained < parameters
    longest = rollout.prompt_tokens + rollout.new_tokens
    tokens, scored = (
        max(longest, min(micro_batch_tokens, count * longest))
        for count in (math.ceil(trajectories / minibatches), trajectories)
    )
    passes = 1 + distills + critic
    options = {"adapters": adapters, "long_rows": long_rows}
    of_layer = None
    if checkpointing:
        of_layer = products_bytes(shape) if keeps_products else shape.hidden * item
    update = _update_bytes(shape, tokens, checkpointed=of_layer, passes=passes, **options)
    update += _replay_bytes(rollout, shape, tokens, kept=not checkpointing) if shadow else 0
    scoring = _scoring_bytes(shape, scored, **options)
    scoring += _replay_bytes(rollout, shape, scored) if shadow else 0
    update, scoring = (
        part + _told_bytes(shape, count, routes, support) for part, count in ((update, tokens), (scoring, scored))
    )
    update = max(update, scoring)
    dense_rows = max(1, rollout.cache_bytes // rollout.dense_row_bytes)
    on_host = (8 if shape.dtype == torch.float32 else 12) if offload else 0  # bytes per trained parameter
    per_parameter = (12 if shape.dtype == torch.float32 else 16) - on_host
    learners = trained * (1 + critic) + students * student_trained
    passing = 3 * 4 * min(OFFLOADED, trained) if offload else 0
    embeddings = shape.vocabulary * shape.hidden
    frozen = parameters if adapters else 0
    gathered = (2 * embeddings + 2 * (parameters - embeddings) // shape.layers) * (item + 4)  # weights and gradients
    summed = 4 * max(BUCKET, embeddings)  # the largest bucket
    exchanged = 0 if processes == 1 else gathered if divided else summed
    return TrainingPlan(
        rollout=rollout,
        optimizer_bytes=(16 * trained + 4 * frozen) // processes if divided else trained * per_parameter,
        learner_bytes=rollout.weight_bytes if ahead and not divided else 0,
        divided_by=processes if divided else 1,
        ahead=ahead,
        student_bytes=students * (rollout.weight_bytes + student_trained * per_parameter),
        critic_bytes=(1 + ahead) * rollout.weight_bytes + trained * per_parameter if critic else 0,
        reference_bytes=rollout.weight_bytes if reference else 0,
        reward_model_bytes=reward_model[0],
        grading_bytes=reward_model[1],
        update_bytes=update + exchanged if divided else max(update, exchanged, passing),
        host_bytes=on_host * learners + (passes * shape.layers * tokens * shape.hidden * item if long_rows else 0),
        offloads_optimizer=offload,
        scoring_bytes=scoring,
        eval_bytes=min(dense_rows, rollout.rows) * rollout.dense_row_bytes if evaluates else 0,
    )


def layer_bytes(shape: ModelShape, adapters: bool = False) -> int:
    """Bytes that autograd keeps per token of a layer of the Llama family: inputs of products, norms and attention.

    Norms compute in fp32, also those of queries and keys, which not every model has. Adapters are in fp32 and keep a
    copy of their input in fp32; frozen weights keep nothing.
    """
    item = shape.dtype.itemsize
    hidden, intermediate = shape.hidden, shape.intermediate
    queries, keys = shape.query_heads * shape.head_dim, shape.key_numbers
    attention = 2 * (queries + keys) * item  # queries, keys, values and the output
    if not adapters:
        norms = (2 * hidden + queries + keys) * (4 + item)
        return norms + 2 * hidden * item + attention + 4 * intermediate * item
    norms = (2 * hidden + queries + keys) * 4
    shared = item == 4  # what is fp32 already is not copied
    inputs = 4 * (2 * hidden + intermediate) if shared else 4 * (5 * hidden + queries + intermediate)
    return norms + inputs + attention + 3 * intermediate * item


def products_bytes(shape: ModelShape) -> int:
    """Bytes that selective checkpointing keeps per token of a layer of the Llama family: its input, and the outputs of
    matrix products and attention, with a log-sum-exp for every query head. Adapters keep no more, but for their rank.
    """
    attention = 2 * (shape.query_heads * shape.head_dim + shape.key_numbers)  # queries, keys, values and the output
    return (3 * shape.hidden + attention + 2 * shape.intermediate) * shape.dtype.itemsize + 4 * shape.query_heads


def mlp_bytes(shape: ModelShape, adapters: bool = False) -> int:
    """The part of `layer_bytes` that goes by chunks with `long_rows`: what an MLP keeps besides its input."""
    item, intermediate = shape.dtype.itemsize, shape.intermediate
    if not adapters:
        return 4 * intermediate * item
    return 4 * (intermediate if item == 4 else 2 * shape.hidden + intermediate) + 3 * intermediate * item


def _update_bytes(
    shape: ModelShape, tokens: int, *, checkpointed: int | None, passes: int, adapters: bool, long_rows: bool
) -> int:
    """Estimate: the activations of a micro-batch of `tokens` tokens, a layer's gradients, and the head's chunk.

    checkpointed: bytes that checkpointing keeps of a layer per token; None: there is none. passes: forward passes whose
    activations are kept until the backward pass
    """
    item = shape.dtype.itemsize
    layer = tokens * layer_bytes(shape, adapters)
    kept = tokens * shape.hidden * item  # a layer's input
    activations = (shape.layers + 1) * layer
    if checkpointed is not None:
        activations = shape.layers * tokens * checkpointed + 2 * layer
    if long_rows:
        # inputs being copied out, in use, and copied in; one layer, one chunk of its MLP, and their gradients
        activations = 5 * kept + 2 * _layer_in_chunks(shape, tokens, adapters)
    scans = len(shape.states) if checkpointed is None else 1  # whose activations exist at a time
    activations += scans * tokens * 2 * scan_token_bytes(shape)
    chunk = min(tokens, head_chunk(shape.vocabulary)) * shape.vocabulary * (item + 4 * 4)
    gradients = 0 if adapters else 2 * shape.vocabulary * shape.hidden * item  # of the head
    return passes * activations + chunk + gradients + 3 * kept


def _layer_in_chunks(shape: ModelShape, tokens: int, adapters: bool) -> int:
    """`layer_bytes` of `tokens` tokens, with only a chunk of the MLP at a time."""
    mlp = mlp_bytes(shape, adapters)
    return tokens * (layer_bytes(shape, adapters) - mlp) + min(tokens, MLP_CHUNK) * mlp


def _scoring_bytes(shape: ModelShape, tokens: int, *, adapters: bool, long_rows: bool) -> int:
    """Estimate: one layer of a forward pass over `tokens` tokens without gradients, and the head's chunk."""
    item = shape.dtype.itemsize
    chunk = min(tokens, head_chunk(shape.vocabulary)) * shape.vocabulary * (item + 4 * 4)
    layer = _layer_in_chunks(shape, tokens, adapters) if long_rows else tokens * layer_bytes(shape, adapters)
    return max(layer, tokens * scan_token_bytes(shape)) + tokens * 3 * shape.hidden * item + chunk


def _told_bytes(shape: ModelShape, tokens: int, routes: int, support: int) -> int:
    """Bytes of what a micro-batch takes from its rollout: the experts of its tokens and the ids of their supports. For
    a chunk of the head, also the ids as int64 for search and gathering, and their logits (estimate: four fp32 copies).
    """
    return tokens * (routes + 4 * support) + min(tokens, head_chunk(shape.vocabulary)) * support * (2 * 8 + 8 + 4 * 4)


def classifier_bytes(hidden: int, intermediate: int, item: int, tokens: int, longest: int) -> int:
    """Estimate: one layer of a classifier's forward pass over `tokens` tokens, and masks of rows of `longest`."""
    layer = 2 * hidden * 4 + (6 * hidden + 3 * intermediate) * item  # norms in fp32; states, attention, feed-forward
    return tokens * (layer + longest * item)


def _replay_bytes(rollout: Plan, shape: ModelShape, tokens: int, kept: bool = False) -> int:
    """Estimate: a micro-batch's trace, its segments and the search for them, and fp32 gradients of one layer's K, V.

    If kernels do not go by segments, also the masks of a layer, also as numbers that are added to logits; kept: the
    masks of all layers exist until the backward pass
    """
    lists = 4 * (2 + rollout.budget // rollout.beside_budget) + 3 * 8  # bytes per token, layer and KV head
    masks = tokens * (rollout.prompt_tokens + rollout.new_tokens) * shape.learner_masks
    masks *= (shape.slot_layers if kept else 1) * (1 + shape.dtype.itemsize) + 2  # and what they are made of
    return tokens * (shape.heads * shape.slot_layers * lists + 2 * 4 * shape.key_numbers) + masks
