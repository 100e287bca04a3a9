"""The memory plan of a training run: what every process takes, from the plan of its rollouts and the model's shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..distributed.world import BUCKET
from ..models import ModelShape, head_chunk
from .memory import ALLOCATOR_SHARE, Plan, aligned, size


@dataclass(frozen=True)
class TrainingPlan:
    """What a training step takes on every process.

    Rollout and update take turns, so only the larger of their working sets counts. Rollouts that run ahead of the
    learner run beside the update, and then both count.
    """

    rollout: Plan
    optimizer_bytes: int  # fp32 masters (unless the weights are fp32), two moments, gradients; a shard if divided
    reference_bytes: int
    update_bytes: int  # estimate: activations of a micro-batch, and the head's chunk
    eval_bytes: int  # the dense cache of held-out evaluations
    student_bytes: int = 0  # weights and optimizers of all students
    learner_bytes: int = 0  # the learner's own weights, if the sampler has a copy of its own and nothing is divided
    divided_by: int = 1  # processes among which the learner's weights, gradients and moments are divided
    ahead: bool = False

    @property
    def total_bytes(self) -> int:
        plan = self.rollout
        held = plan.total_bytes - plan.working_bytes + self.student_bytes + self.learner_bytes
        working = plan.working_bytes + self.update_bytes if self.ahead else max(plan.working_bytes, self.update_bytes)
        return held + self.optimizer_bytes + self.reference_bytes + max(working, self.eval_bytes)

    def fits(self, memory: int) -> bool:
        """Whether the plan fits, with the allocator's share left free."""
        return self.total_bytes <= memory * (1 - ALLOCATOR_SHARE)

    def text(self, memory: int | None = None) -> str:
        """The plan as a table for people."""
        plan = self.rollout
        part = f", one of {self.divided_by} parts" if self.divided_by > 1 else ""
        turns = "rollout, update and evaluation take turns"
        if self.ahead:
            turns = "evaluation takes turns with rollout and update"
        lines = [
            *plan.lines()[:-1],
            (f"optimizer: fp32 masters, moments, gradients{part}", size(self.optimizer_bytes)),
            *([("the learner's own weights", size(self.learner_bytes))] if self.learner_bytes else []),
            ("reference model", size(self.reference_bytes)),
            *([("students: weights and optimizers", size(self.student_bytes))] if self.student_bytes else []),
            ("update: activations of a micro-batch (estimate)", size(self.update_bytes)),
            ("held-out evaluation: dense cache", size(self.eval_bytes)),
            (f"total ({turns})", size(self.total_bytes)),
        ]
        if memory is not None:
            lines.append(("memory", f"{size(memory)}: {'fits' if self.fits(memory) else 'does not fit'}"))
        return aligned(lines)


def make_training_plan(
    rollout: Plan,
    shape: ModelShape,
    *,
    trained: int,
    micro_batch_tokens: int,
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
) -> TrainingPlan:
    """The plan of a training run, from the plan of its rollouts.

    `trained`: the number of trained parameters. `micro_batch_tokens` may be less than one trajectory, which is then a
    micro-batch of its own. `shadow`: attention follows a trace, by segments. `distills`: the other view also passes
    through the model. `students` copies of the model, with `student_trained` trained parameters each, learn one after
    the other in micro-batches of the same size.

    `shard`: the learner is divided among the processes, in fp32, and every process also has whole weights to sample
    with; a layer is whole while it runs, and so are embeddings and head. Without it, gradients are summed in buckets.
    `ahead`: sampler and learner have weights of their own and work at the same time.
    """
    divided = shard and processes > 1
    item = shape.dtype.itemsize
    tokens = max(micro_batch_tokens, rollout.prompt_tokens + rollout.new_tokens)
    update = _update_bytes(shape, tokens, checkpointing=checkpointing, distills=distills)
    update += _replay_bytes(rollout, shape, tokens) if shadow else 0
    dense_rows = max(1, rollout.cache_bytes // rollout.dense_row_bytes)
    per_parameter = 12 if shape.dtype == torch.float32 else 16
    embeddings = shape.vocabulary * shape.hidden
    parameters = rollout.weight_bytes // item
    frozen = 0 if trained == parameters else parameters  # under adapters
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
        reference_bytes=rollout.weight_bytes if reference else 0,
        update_bytes=update + exchanged if divided else max(update, exchanged),
        eval_bytes=min(dense_rows, rollout.rows) * rollout.dense_row_bytes if evaluates else 0,
    )


def _update_bytes(shape: ModelShape, tokens: int, *, checkpointing: bool, distills: bool) -> int:
    """Estimate: the activations of a micro-batch of `tokens` tokens, and the head's chunk."""
    item = shape.dtype.itemsize
    layer = tokens * (10 * shape.hidden + 5 * shape.intermediate + 4 * shape.query_heads * shape.head_dim) * item
    kept = tokens * shape.hidden * item  # all that checkpointing keeps of a layer
    activations = shape.layers * kept + 2 * layer if checkpointing else shape.layers * layer
    chunk = head_chunk(shape.vocabulary) * shape.vocabulary * (item + 4 * 4)
    head = chunk + 2 * shape.vocabulary * shape.hidden * item + 3 * kept
    return (2 if distills else 1) * activations + head


def _replay_bytes(rollout: Plan, shape: ModelShape, tokens: int) -> int:
    """Estimate: a micro-batch's trace, its segments and the search for them, and fp32 gradients of one layer's K, V."""
    lists = 4 * (2 + rollout.budget // rollout.beside_budget) + 3 * 8  # bytes per token, layer and KV head
    return tokens * shape.heads * (shape.layers * lists + 2 * 4 * shape.head_dim)
