"""Train students: copies of the model that learn from its rollouts to reason while chunks are folded into beacons.

The method is Breadcrumbs. The teacher is the model that sampled, and sees trajectories whole. For every minibatch of a
step's trajectories:

    insert a beacon into each trajectory after every chunk of c tokens; c is drawn per sequence or per chunk
    KL( sg(teacher) || student ) of every response token, exact over the vocabulary, in chunks
    one optimizer step of the student

So students need no rollouts of their own: a batch costs one more forward pass of the teacher and one forward-backward
pass of each student. Shapes: B rows, T tokens as fed, beacons included, n response tokens of a micro-batch.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..attention import Replay
from ..beacon import (
    POSITIONS,
    BeaconLayout,
    add_beacon,
    beacon_of,
    check_chunk,
    fixed_chunk_ends,
    insert_beacons,
    random_chunk_ends,
)
from ..distributed.world import World
from ..errors import SparseRLError, require_int
from ..kernels.modules import fused
from ..keys import key
from ..models import evaluating, with_lora
from ..streams import stream_key
from .batch import Sampled
from .distill import divergence
from .learner import learning
from .optimizer import MasterAdamW, OptimizerSettings, check_skipped, count_skipped
from .packing import pack
from .score import head, hidden_states, over_chunks

DRAWS = ("sequence", "chunk")
MAX_RANK = 65_536  # of adapters: more than any matrix has
_NEVER = torch.iinfo(torch.int32).max
AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True)
class StudentSettings:
    chunks: list[Any] = key(
        "one entry per student that folds its reasoning into beacons: its tokens per chunk, such as 8, or a list of "
        "chunk sizes; []: no students",
        [],
    )
    draw: str = key("whether one of several chunk sizes is drawn for every `sequence` or every `chunk`", "sequence")
    position: str = key("the RoPE position of a beacon: shared (with the last token of its chunk) or own", "shared")
    lr: float = key("learning rate of the students; all other settings come from the optimizer section", 1e-4)
    lora_rank: int = key(
        "rank of a student's adapters, which are laid over the current teacher; 0: a student has its own weights", 0
    )
    lora_alpha: int = key("scale of the adapters: alpha / rank", 16)
    freeze_teacher: bool = key("the model is a finished teacher: it samples, but only students learn", False)

    def __post_init__(self):
        if not isinstance(self.chunks, (list, tuple)) or not all(map(sizes_of, self.chunks)):
            raise SparseRLError(
                f"student.chunks is {self.chunks!r}; give a list with one entry per student, such as [2, 8, [2, 4, 8]]."
            )
        names = [name_of(sizes_of(entry)) for entry in self.chunks]
        if len(set(names)) < len(names):
            raise SparseRLError(f"student.chunks is {self.chunks!r}: two students are the same; name each once.")
        if self.draw not in DRAWS or self.position not in POSITIONS:
            raise SparseRLError(
                f"student.draw is {self.draw!r} and student.position is {self.position!r}; draw must be one of "
                f"{', '.join(DRAWS)}, and position one of {', '.join(POSITIONS)}."
            )
        if not 0 < self.lr < 1:
            raise SparseRLError(f"student.lr is {self.lr}; it must be above 0 and below 1.")
        require_int(at_least=0, at_most=MAX_RANK, **{"student.lora_rank": self.lora_rank})
        require_int(**{"student.lora_alpha": self.lora_alpha})
        if self.freeze_teacher and not self.chunks:
            raise SparseRLError(
                "student.freeze_teacher is true, but there is no student; name one with student.chunks, such as [8]."
            )


def sizes_of(entry) -> tuple[int, ...]:
    """The chunk sizes of a student: 8 -> (8,), [2, 4] -> (2, 4)."""
    sizes = tuple(entry) if isinstance(entry, (list, tuple)) else (entry,)
    for size in sizes:
        check_chunk(size)
    return tuple(sorted(set(sizes)))


def name_of(sizes: tuple[int, ...]) -> str:
    return "c" + "-".join(map(str, sizes))


@dataclass(frozen=True)
class TeacherStates:
    """The teacher's states for a micro-batch, without beacons."""

    model: nn.Module
    output: Any  # the decoder's output
    states: Tensor  # [n, hidden]: the states that predict each response token


class Student:
    def __init__(
        self,
        teacher: nn.Module,
        sizes: tuple[int, ...],
        settings: StudentSettings,
        optimizer: OptimizerSettings,
        seed: int,
    ):
        self.name, self.sizes, self.settings = name_of(sizes), sizes, settings
        self.model = add_beacon(copied(teacher), sizes, settings.position, seed)
        self.follows = list(zip(self.model.parameters(), _in_order(self.model, teacher))) if settings.lora_rank else []
        if settings.lora_rank:
            self.model = with_lora(self.model, settings.lora_rank, settings.lora_alpha, key="student.lora_rank")
        self.optimizer = MasterAdamW(self.model.parameters(), replace(optimizer, lr=settings.lr))
        self.version = 0  # optimizer steps
        self.skipped = 0  # consecutive steps that were skipped because a number was not finite

    def insert_beacons(
        self, tokens: Tensor, prompts: Tensor, lengths: Tensor, streams: list[int], sampled: Tensor | None = None
    ) -> BeaconLayout:
        """Insert this student's beacons into trajectories.

        tokens int64 [B, T - beacons]; prompts, lengths [B]; streams: one random stream per row, for drawing sizes;
        sampled: bool like tokens: the response tokens that the policy sampled; None: all of them
        """
        beacon = beacon_of(self.model)
        assert beacon is not None
        if self.settings.draw == "chunk":
            ends = random_chunk_ends(self.sizes, streams, prompts, lengths, tokens.shape[1])
        else:
            chunks = torch.tensor([self.sizes[stream % len(self.sizes)] for stream in streams])
            ends = fixed_chunk_ends(chunks, prompts, lengths, tokens.shape[1])
        return insert_beacons(tokens, prompts, lengths, ends, beacon.id, _NEVER, sampled)

    def kl(self, fed: BeaconLayout, teacher: TeacherStates, temperature: float) -> Tensor:
        """KL(teacher || student) of every response token. -> fp32 [n]"""
        device = teacher.states.device
        evicted_at = fed.evicted_at.to(device, torch.int32)[:, None, None]  # the same for all layers and heads
        replay = Replay(evicted_at, fed.lengths.to(device))
        hidden = hidden_states(self.model, fed.tokens.to(device), replay)

        def divergence_of(logits: Tensor, theirs: Tensor) -> Tensor:
            with torch.no_grad():
                target = (head(teacher.model, teacher.output, theirs) / temperature).log_softmax(-1)
            return divergence(target, (logits / temperature).log_softmax(-1))

        return over_chunks(self.model, hidden, fed.sampled.to(device), divergence_of, teacher.states)

    def update(self, kl: float, max_skipped: int) -> float:
        """Do one optimizer step and return its gradient norm.

        A step in which a number is not finite changes nothing; too many consecutive ones end the run.
        """
        norm, _ = self.optimizer.step(self.version, kl)
        self.version += math.isfinite(norm)
        self.skipped = count_skipped(self.skipped, norm)
        check_skipped(
            self.skipped,
            max_skipped,
            f"{self.skipped} steps in a row of the student {self.name} had a KL ({kl}) or gradient norm ({norm}) that "
            f"is not finite; lower student.lr (now {self.settings.lr}).",
        )
        return norm

    @torch.no_grad()
    def follow(self) -> None:
        """Copy the teacher's current weights under the adapters of a student that has some."""
        for mine, theirs in self.follows:
            mine.copy_(theirs)

    def to_save(self) -> nn.Module:
        """The model as it is saved: with adapters merged into the weights."""
        if not self.settings.lora_rank:
            return self.model
        from peft import PeftModel

        adapted = copied(self.model)
        assert isinstance(adapted, PeftModel)
        return adapted.merge_and_unload()

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "version": self.version}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = state["version"]
        self.follow()


class Students:
    """All students of a run."""

    def __init__(
        self,
        teacher: nn.Module,
        settings: StudentSettings,
        optimizer: OptimizerSettings,
        micro_batch_tokens: int = 16384,
        temperature: float = 1.0,
        seed: int = 0,
        max_skipped: int = 5,
        world: World | None = None,
    ):
        self.world = world or World()
        self.micro_batch_tokens, self.temperature = micro_batch_tokens, temperature
        self.seed, self.max_skipped = seed, max_skipped
        self.members = [Student(teacher, sizes_of(entry), settings, optimizer, seed) for entry in settings.chunks]

    def learn(self, teacher: nn.Module, sampled: Sampled, minibatches: int, step: int) -> dict[str, float]:
        """One optimizer step of every student per minibatch. The teacher must be as it was when it sampled."""
        if not self.members:
            return {}
        found: dict[str, list[tuple[float, float]]] = {student.name: [] for student in self.members}
        for number, rows in enumerate(torch.arange(len(sampled.lengths)).tensor_split(minibatches)):
            for name, result in self._step(teacher, sampled, rows, stream_key(self.seed, [step, number])).items():
                found[name].append(result)
        return {
            f"student/{name}/{quantity}": sum(result[i] for result in results) / len(results)
            for name, results in found.items()
            for i, quantity in enumerate(("kl", "grad_norm"))
        }

    def _step(self, teacher: nn.Module, sampled: Sampled, rows: Tensor, stream: int) -> dict[str, tuple[float, float]]:
        """(mean KL of a token, gradient norm) of each student. rows: the trajectories of one optimizer step"""
        count, sums = int(sampled.mask[rows].sum()), {student.name: 0.0 for student in self.members}
        longer = 1 + 1 / min(min(student.sizes) for student in self.members)  # with beacons
        own_rows = rows[sampled.owner_rank[rows] == self.world.rank]
        for part in pack(sampled.lengths[own_rows], int(self.micro_batch_tokens / longer)):
            for name, kl in self._backward(teacher, sampled, own_rows[part], stream, count).items():
                sums[name] += kl
        means = {name: total / count for name, total in self.world.add_numbers(sums).items()}
        for student in self.members if self.world.size > 1 else ():
            self.world.add(student.optimizer.gradients())
        return {s.name: (means[s.name], s.update(means[s.name], self.max_skipped)) for s in self.members}

    def _backward(
        self, teacher: nn.Module, sampled: Sampled, rows: Tensor, stream: int, count: int
    ) -> dict[str, float]:
        """Accumulate the gradients of a micro-batch in every student; returns the sum of each student's KL.

        count: the response tokens of the optimizer step
        """
        taught, lengths = teacher_states(teacher, sampled, rows), sampled.lengths[rows]
        width, prompts = int(lengths.max()), sampled.mask[rows].int().argmax(1)
        tokens, mask = sampled.tokens[rows, :width], sampled.mask[rows, :width]
        sums = {}
        for student in self.members:
            # A stream for each (seed of the run, step, trajectory, student).
            streams = [stream_key(stream, [i], *student.sizes) % 2**62 for i in rows.tolist()]
            fed = student.insert_beacons(tokens, prompts, lengths, streams, mask)
            with learning(student.model), fused(student.model):
                kl = student.kl(fed, taught, self.temperature).sum()
                (kl / count).backward()
            sums[student.name] = kl.item()
        return sums

    def follow(self) -> None:
        for student in self.members:
            student.follow()

    @property
    def versions(self) -> list[int]:
        return [student.version for student in self.members]

    def state_dict(self) -> dict[str, dict]:
        return {student.name: student.state_dict() for student in self.members}

    def load_state_dict(self, state: dict[str, dict]) -> None:
        for student in self.members:
            student.load_state_dict(state[student.name])


@torch.no_grad()
def teacher_states(teacher: nn.Module, sampled: Sampled, rows: Tensor) -> TeacherStates:
    width, device = int(sampled.lengths[rows].max()), next(teacher.parameters()).device
    with evaluating(teacher):
        output = hidden_states(teacher, sampled.tokens[rows, :width].to(device))
    return TeacherStates(teacher, output, output.last_hidden_state[:, :-1][sampled.mask[rows, 1:width].to(device)])


def copied(model: AnyModule) -> AnyModule:
    """A deep copy that shares the hook handles which transformers keeps; copies of these would lose their hooks."""
    handles = [
        h
        for m in model.modules()
        for h in (*getattr(m, "_require_grads_hooks", ()), getattr(m, "_require_grads_hook", None))
        if h
    ]
    return copy.deepcopy(model, {id(handle): handle for handle in handles})


def _in_order(student: nn.Module, teacher: nn.Module) -> list[nn.Parameter]:
    """For each of the student's parameters, the teacher's of the same name; for the beacon, which only
    it has, itself.
    """
    theirs = dict(teacher.named_parameters())
    return [theirs.get(name, mine) for name, mine in student.named_parameters()]
