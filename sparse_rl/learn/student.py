"""Students: copies of the model that learn, from its own rollouts, to think while their chunks are folded into beacons (Breadcrumbs).

    for every minibatch of a step's trajectories, as the teacher (the model that sampled them) sees them whole:
        lay beacons into each, one after every chunk: c tokens, drawn for the sequence or for every chunk
        KL( sg(teacher) || student ) of every response token, exact over the vocabulary, in chunks of it
        one optimizer step of the student

So the teacher's rollouts, already paid for by its own learning, are the students' data; a batch costs one more forward pass of the teacher
and one forward-backward pass of each student. Shapes: B rows, T tokens as fed, beacons included, n response tokens of a micro-batch.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

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
from ..keys import key
from ..models import evaluating, with_lora
from ..streams import stream_key
from .batch import Sampled, pack
from .distill import divergence
from .learner import learning
from .optimizer import MasterAdamW, OptimizerSettings
from .score import head, hidden_states, over_chunks

DRAWS = ("sequence", "chunk")
_NEVER = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class StudentSettings:
    chunks: list[Any] = key(
        "students that fold their reasoning into beacons, each by its chunks' tokens: 8, or a list; []: none", []
    )
    draw: str = key("with several sizes, which one is drawn for: every sequence, or every chunk", "sequence")
    position: str = key("a beacon's: shared (the last token's of its chunk) or own", "shared")
    lr: float = key("learning rate of the students; everything else is the optimizer's", 1e-4)
    lora_rank: int = key(
        "0: a student has weights of its own; else it is the teacher as it stands, with adapters of that rank", 0
    )
    lora_alpha: int = key("scale of the adapters: alpha / rank", 16)
    late: bool = key("the model is a finished teacher: it samples, but only students learn", False)

    def __post_init__(self):
        if not isinstance(self.chunks, (list, tuple)) or not all(map(sizes_of, self.chunks)):
            raise SparseRLError(
                f"student.chunks is {self.chunks!r}; give a list with an entry per student, such as [2, 8, [2, 4, 8]]."
            )
        names = [name_of(sizes_of(entry)) for entry in self.chunks]
        if len(set(names)) < len(names):
            raise SparseRLError(f"student.chunks is {self.chunks!r}: two students are the same; name each once.")
        if self.draw not in DRAWS or self.position not in POSITIONS:
            raise SparseRLError(
                f"student.draw is {self.draw!r} and student.position {self.position!r}; they must be one of {', '.join(DRAWS)} and one of "
                f"{', '.join(POSITIONS)}."
            )
        if not 0 < self.lr < 1:
            raise SparseRLError(f"student.lr is {self.lr}; it must be between 0 and 1.")
        require_int(at_least=0, **{"student.lora_rank": self.lora_rank})
        require_int(**{"student.lora_alpha": self.lora_alpha})
        if self.late and not self.chunks:
            raise SparseRLError(
                "student.late is true, but there is no student; say which with student.chunks, such as [8]."
            )


def sizes_of(entry) -> tuple[int, ...]:
    """What a student's chunks may have: 8 -> (8,), [2, 4] -> (2, 4)."""
    sizes = tuple(entry) if isinstance(entry, (list, tuple)) else (entry,)
    for size in sizes:
        check_chunk(size)
    return tuple(sorted(set(sizes)))


def name_of(sizes: tuple[int, ...]) -> str:
    return "c" + "-".join(map(str, sizes))


@dataclass(frozen=True)
class Seen:
    """What the teacher made of a micro-batch, without beacons."""

    model: nn.Module
    output: Any  # its decoder's
    states: Tensor  # [n, hidden]: those that predict each response token


class Student:
    def __init__(
        self, teacher: nn.Module, sizes: tuple[int, ...], how: StudentSettings, optimizer: OptimizerSettings, seed: int
    ):
        self.name, self.sizes, self.how = name_of(sizes), sizes, how
        self.model = add_beacon(copied(teacher), sizes, how.position, seed)
        self.follows = list(zip(self.model.parameters(), _in_order(self.model, teacher))) if how.lora_rank else []
        if how.lora_rank:
            self.model = with_lora(self.model, how.lora_rank, how.lora_alpha, key="student.lora_rank")
        self.optimizer = MasterAdamW(self.model.parameters(), replace(optimizer, lr=how.lr))
        self.version = 0  # optimizer steps
        self.skipped = 0  # of them in a row, for non-finite numbers

    def insert_beacons(self, tokens: Tensor, prompts: Tensor, lengths: Tensor, streams: list[int]) -> BeaconLayout:
        """Trajectories with this student's beacons. tokens int64 [B, T - beacons], prompts, lengths [B], streams: of what is drawn"""
        if self.how.draw == "chunk":
            ends = random_chunk_ends(self.sizes, streams, prompts, lengths, tokens.shape[1])
        else:
            chunks = torch.tensor([self.sizes[stream % len(self.sizes)] for stream in streams])
            ends = fixed_chunk_ends(chunks, prompts, lengths, tokens.shape[1])
        return insert_beacons(tokens, prompts, lengths, ends, beacon_of(self.model).id, _NEVER)

    def kl(self, fed: BeaconLayout, teacher: Seen, temperature: float) -> Tensor:
        """KL(teacher || student) of every response token. -> fp32 [n]"""
        device = teacher.states.device
        replay = Replay(
            fed.evicted_at.to(device, torch.int32)[:, None, None], fed.lengths.to(device)
        )  # all layers and heads alike
        hidden = hidden_states(self.model, fed.tokens.to(device), replay)

        def between(logits: Tensor, theirs: Tensor) -> Tensor:
            with torch.no_grad():
                target = (head(teacher.model, teacher.output, theirs) / temperature).log_softmax(-1)
            return divergence(target, (logits / temperature).log_softmax(-1))

        return over_chunks(self.model, hidden, fed.sampled.to(device), between, teacher.states)

    def update(self) -> float:
        """One optimizer step: its gradient norm; if that is not finite nothing was updated."""
        norm, _ = self.optimizer.step(min(1.0, (self.version + 1) / max(self.optimizer.how.warmup_steps, 1)))
        self.version += math.isfinite(norm)
        return norm

    @torch.no_grad()
    def follow(self) -> None:
        """A student that is its teacher with adapters stands on the teacher as it is now."""
        for mine, theirs in self.follows:
            mine.copy_(theirs)

    def to_save(self) -> nn.Module:
        """The model as a folder holds it: adapters merged into the weights."""
        return copied(self.model).merge_and_unload() if self.how.lora_rank else self.model

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
        how: StudentSettings,
        optimizer: OptimizerSettings,
        micro_batch_tokens: int = 16384,
        temperature: float = 1.0,
        seed: int = 0,
        max_skipped: int = 5,
        world: World | None = None,
    ):
        self.world = world or World()
        self.micro_batch_tokens, self.temperature, self.seed, self.max_skipped = (
            micro_batch_tokens,
            temperature,
            seed,
            max_skipped,
        )
        self.every = [Student(teacher, sizes_of(entry), how, optimizer, seed) for entry in how.chunks]

    def learn(self, teacher: nn.Module, sampled: Sampled, minibatches: int, step: int) -> dict[str, float]:
        """One optimizer step of every student per minibatch. The teacher is as it was when it sampled."""
        sums = {student.name: [] for student in self.every}
        for number, rows in enumerate(
            torch.arange(len(sampled.lengths)).tensor_split(minibatches if self.every else 0)
        ):
            for name, found in self._step(teacher, sampled, rows, stream_key(self.seed, [step, number])).items():
                sums[name].append(found)
        return {
            f"student/{name}/{quantity}": sum(f[i] for f in found) / len(found)
            for name, found in sums.items()
            for i, quantity in enumerate(("kl", "grad_norm"))
        }

    def _step(self, teacher: nn.Module, sampled: Sampled, rows: Tensor, stream: int) -> dict[str, tuple[float, float]]:
        """(mean KL of a token, gradient norm) of each student."""
        count, sums = int(sampled.mask[rows].sum()), {student.name: 0.0 for student in self.every}
        longer = 1 + 1 / min(min(student.sizes) for student in self.every)  # with beacons
        mine = rows[sampled.owner[rows] == self.world.rank]
        for part in pack(sampled.lengths[mine], int(self.micro_batch_tokens / longer)):
            which = mine[part]
            taught, lengths = seen(teacher, sampled, which), sampled.lengths[which]
            tokens, prompts = sampled.tokens[which, : int(lengths.max())], sampled.mask[which].int().argmax(1)
            for student in self.every:
                streams = [
                    stream_key(stream, [i], *student.sizes) % 2**62 for i in which.tolist()
                ]  # run's seed, step, trajectory, student
                fed = student.insert_beacons(tokens, prompts, lengths, streams)
                with learning(student.model):
                    kl = student.kl(fed, taught, self.temperature).sum()
                    (kl / count).backward()
                sums[student.name] += kl.item()
        means = {name: total / count for name, total in self.world.add_numbers(sums).items()}
        for student in self.every if self.world.size > 1 else ():
            self.world.add(student.optimizer.gradients())
        return {
            student.name: (means[student.name], self._update(student, means[student.name])) for student in self.every
        }

    def _update(self, student: Student, kl: float) -> float:
        """The gradient norm. A step in which a number is not finite changes nothing; too many of them in a row end the run."""
        norm = student.update() if math.isfinite(kl) else math.nan
        student.optimizer.clear()
        student.skipped = 0 if math.isfinite(norm) else student.skipped + 1
        if student.skipped >= self.max_skipped:
            raise SparseRLError(
                f"{student.skipped} steps in a row of the student {student.name} had a KL ({kl}) or gradient norm ({norm}) that is not "
                f"finite; lower student.lr (now {student.how.lr})."
            )
        return norm

    def follow(self) -> None:
        for student in self.every:
            student.follow()

    @property
    def versions(self) -> list[int]:
        return [student.version for student in self.every]

    def state_dict(self) -> dict[str, dict]:
        return {student.name: student.state_dict() for student in self.every}

    def load_state_dict(self, state: dict[str, dict]) -> None:
        for student in self.every:
            student.load_state_dict(state[student.name])


@torch.no_grad()
def seen(teacher: nn.Module, sampled: Sampled, rows: Tensor) -> Seen:
    width, device = int(sampled.lengths[rows].max()), next(teacher.parameters()).device
    with evaluating(teacher):
        output = hidden_states(teacher, sampled.tokens[rows, :width].to(device))
    return Seen(teacher, output, output.last_hidden_state[:, :-1][sampled.mask[rows, 1:width].to(device)])


def copied(model: nn.Module) -> nn.Module:
    """A deep copy. Handles of hooks that transformers keeps on a model would not survive a second one: they are shared."""
    handles = [
        h
        for m in model.modules()
        for h in (*getattr(m, "_require_grads_hooks", ()), getattr(m, "_require_grads_hook", None))
        if h
    ]
    return copy.deepcopy(model, {id(handle): handle for handle in handles})


def _in_order(student: nn.Module, teacher: nn.Module) -> list[nn.Parameter]:
    """The teacher's parameters by the names of the student's; the beacon, which only the student has, follows itself."""
    theirs = dict(teacher.named_parameters())
    return [theirs.get(name, mine) for name, mine in student.named_parameters()]
