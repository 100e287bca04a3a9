"""The learner: does one optimizer step per batch, micro-batch by micro-batch, on the weights the engine samples from.

With several processes, each goes through its own rows of the batch; gradients and the sums of metrics are added up over
all processes. Every process knows the whole batch, so all of them scale and count the same way without communication.

Trajectories that cannot change the weights do not go through the model: rejected and empty ones and, without a KL
term, those without an advantage. A step in which no trajectory is left, or in which a number is not finite, leaves the
weights and the optimizer as they were, and is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..attention import Replay
from ..beacon import choice_parameters
from ..distributed.world import World
from ..errors import SparseRLError
from ..kernels.modules import fused
from ..models import evaluating
from .batch import Batch, check_replay, seen_by
from .critic import Critic
from .distill import DISTILL_WEIGHT, distillation
from .long import long_rows
from .objective import Objective
from .optimizer import MasterAdamW, OptimizerSettings, check_skipped, count_skipped
from .packing import micro_batches_of
from .routes import sent_to
from .scaler import LossScale
from .score import batch_logprobs, hidden_states, logprobs_of, statistics_of
from .shards import Sharded
from .support import ids_for

T = TypeVar("T")
_SUMS: tuple[str, ...] = ("loss", "tokens", "clipped", "drift", "kl", "distill", "value_loss", "value_clipped")


class Disagreement(SparseRLError):
    """Processes have different weights. It is unknown which are right, so none are saved."""


@dataclass(frozen=True)
class UpdateResult:
    """The metrics and results of one optimizer step."""

    metrics: dict[str, float]
    clipped: Tensor  # bool [N, T]: the tokens whose gain was clipped, in this process's own rows
    seen: Seen | None = None


@dataclass(frozen=True)
class Seen:
    """Log-probs and entropies of a batch before its weights moved, from all processes."""

    rows: Tensor  # int64 [n]: rows that went through the model
    logprobs: Tensor  # fp32 [n, T]; 0 for tokens that do not count
    entropies: Tensor  # fp32 [n, T]


class Learner:
    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerSettings,
        objective: Objective,
        *,
        micro_batch_tokens: int = 16384,
        packing: bool = False,
        temperature: float = 1.0,
        max_skipped: int = 5,
        distill: str | None = None,
        distill_weight: float = DISTILL_WEIGHT,
        world: World | None = None,
        sharded: Sharded | None = None,
        critic: Critic | None = None,
        critic_lr: float | None = None,
        critic_warmup: int = 0,
    ):
        """`packing`: micro-batches are packed rows (packing.py).

        `sharded`: the model divided among the processes; None: every process has all of it.
        `critic`: learns values beside the policy; in the first `critic_warmup` optimizer steps only the critic learns.
        """
        self.model, self.objective = model, objective
        self.world, self.sharded = world or World(), sharded
        self.micro_batch_tokens, self.packing, self.temperature = micro_batch_tokens, packing, temperature
        self.max_skipped = max_skipped
        self.distill, self.distill_weight = distill, distill_weight
        self.critic, self.critic_warmup = critic, critic_warmup
        of_critic = () if critic is None else critic.parameters()
        scale = LossScale() if self.dtype == torch.float16 else None
        choice = choice_parameters(model)
        self.optimizer = MasterAdamW(model.parameters(), optimizer, of_critic, critic_lr, scale, choice)
        self.version = 0  # optimizer steps behind the weights
        self.skipped = 0  # consecutive steps that were skipped because a number was not finite

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the model computes."""
        return next(self.model.parameters()).dtype if self.sharded is None else self.sharded.dtype

    def step(self, batch: Batch, check: bool = False) -> UpdateResult:
        """Forward, loss, backward, clip, update.

        check: the batch's old log-probs are the sampler's, and these weights sampled it in the same view, so they must
        give the same log-probs. If they do not, nothing is updated and an error is raised.
        """
        if self.distill is not None and batch.traces is None:
            raise SparseRLError(
                "distillation needs the shadow view, but the batch was scored in the dense one: "
                "score(..., view='shadow')."
            )
        clipped = torch.zeros_like(batch.mask)
        active = self._active_rows(batch)
        if not len(active):
            return UpdateResult({"update/empty/count": 1.0}, clipped)
        batch, found = self.objective.prepare(batch, self._row_sums)
        found_logprobs = torch.zeros(2, *batch.mask.shape, device=self.device) if check else None
        sums = self._accumulate_gradients(batch, active, clipped, found_logprobs)
        seen = None if found_logprobs is None else self._check(batch, active, found_logprobs)
        scaled = {} if self.optimizer.scale is None else {"update/loss_scale": self.optimizer.scale.value}
        norm, lr = self.optimizer.step(self.version, sums["loss"], self.version < self.critic_warmup)
        if self.optimizer.overflowed:
            return UpdateResult({"update/skipped/count": 1.0, **scaled}, clipped, seen)
        self.skipped = count_skipped(self.skipped, norm)
        check_skipped(self.skipped, self.max_skipped, self._diverged(sums, norm))
        if self.skipped:
            return UpdateResult({"update/skipped/count": 1.0, **scaled}, clipped, seen)
        self.version += 1
        metrics = {"update/loss": sums["loss"], "update/grad_norm": norm, "update/lr": lr, **scaled}
        metrics |= self.objective.metrics(sums, batch) | found
        if self.distill is not None:
            metrics["update/distill/mean"] = sums["distill"] / max(sums["tokens"], 1)
        return UpdateResult(metrics, clipped, seen)

    def _check(self, batch: Batch, active: Tensor, found: Tensor) -> Seen:
        """Refuse to learn if the learner's log-probs are not the sampler's, in all processes at once.

        found fp32 [2, N, T]: log-probs and entropies of this process's own rows, 0 elsewhere
        """
        self.world.add([found])
        logprobs, entropies = found[:, active.to(self.device)].cpu()
        mask = batch.mask[active]
        try:
            check_replay(torch.where(mask, logprobs - batch.old_logprobs[active], 0.0), mask, self.dtype)
        except SparseRLError:
            self.optimizer.clear()
            raise
        return Seen(active, logprobs, entropies)

    def _active_rows(self, batch: Batch) -> Tensor:
        """The rows that can change the weights."""
        moves = self.objective.active(batch) if self.distill is None else batch.mask.any(1)
        return moves.nonzero()[:, 0]

    def _accumulate_gradients(
        self, batch: Batch, active: Tensor, clipped: Tensor, seen: Tensor | None = None
    ) -> dict[str, float]:
        """Accumulate the gradients of some rows over all processes; returns the sums from which metrics are computed.

        `clipped` is filled in for this process's own rows, and so is `seen`: log-probs and entropies, [2, N, T].
        """
        sums, found = dict.fromkeys(_SUMS, 0.0), []
        critic = nullcontext() if self.critic is None else learning(self.critic)
        models = self.model, self.critic
        with learning(self.model), critic, fused(*models), long_rows(*models):
            for rows in self._micro_batches(batch, active):
                if len(rows):
                    found.append((rows, *self._backward(batch, rows, seen)))
                else:
                    self._accumulate(self._empty_micro_batch() * 0.0)
        for rows, values, cut in found:  # only now, because reading a number waits for the device
            clipped[rows, : cut.shape[1]] = cut.cpu()
            for name, value in values.items():
                sums[name] += float(value)
        sums = self.world.add_numbers(sums)
        if self.sharded is None:
            self.world.add(self.optimizer.gradients() if self.world.size > 1 else [])
        elif self.critic is not None:  # the critic is whole; see _accumulate for the factor
            gradients = [gradient.div_(self.world.size) for gradient in self.optimizer.gradients(critic_only=True)]
            self.world.add(gradients)
        return sums

    def _backward(self, batch: Batch, rows: Tensor, found: Tensor | None = None) -> tuple[dict[str, Tensor], Tensor]:
        """Accumulate the gradient of a micro-batch; returns the sums for its metrics and its clipped tokens."""
        part = batch.part(rows, self.device)
        tokens, mask, choices = part.tokens, part.mask, part.choices
        seen, routes = self._seen(batch, rows)
        ids = ids_for(batch.supports, rows, mask)

        def forward(model: nn.Module) -> tuple[Tensor, Tensor | None, Tensor | None]:
            states = hidden_states(model, tokens, seen, routes)
            if found is None:
                logprobs = logprobs_of(model, states, tokens, mask, self.temperature, choices, ids)
            else:
                logprobs, entropies, _ = statistics_of(model, states, tokens, mask, self.temperature, choices, ids)
                found[:, rows.to(self.device), : tokens.shape[1]] = torch.stack([logprobs.detach(), entropies])
            values = None if self.critic is None else self.critic(states, tokens, mask, seen)
            if self.distill is None:
                return logprobs, values, None
            return logprobs, values, distillation(model, tokens, mask, states, self.distill, self.temperature or 1.0)

        logprobs, values, view_kl = self._call(forward)
        loss, sums, clipped = self.objective.micro_batch(logprobs, part, values)
        if view_kl is not None:
            loss = loss + self.distill_weight * (part.scale * view_kl).sum()
            sums["distill"] = view_kl.detach().sum()
        self._accumulate(loss)
        return {"loss": loss.detach(), **sums}, clipped

    @torch.no_grad()
    def _row_sums(self, batch: Batch) -> Tensor:
        """The sums of active rows' log-probs under the present weights; 0 for other rows. fp64 [N]

        All processes get the sums of all rows.
        """
        sums = torch.zeros(len(batch.mask), dtype=torch.float64, device=self.device)
        with evaluating(self.model), fused(self.model), long_rows(self.model):
            for rows in self._micro_batches(batch, self.objective.active(batch).nonzero()[:, 0]):
                if not len(rows):
                    self._empty_micro_batch()
                    continue
                part = batch.part(rows, self.device)
                seen, ids = self._seen(batch, rows), ids_for(batch.supports, rows, part.mask)
                logprobs = self._call(
                    lambda model, part=part, seen=seen, ids=ids: batch_logprobs(
                        model, part.tokens, part.mask, self.temperature, *seen, part.choices, ids
                    )
                )
                sums[rows.to(self.device)] = torch.where(part.mask, logprobs, 0.0).double().sum(1)
        self.world.add([sums])
        return sums.cpu()

    def _micro_batches(self, batch: Batch, rows: Tensor) -> Iterator[Tensor]:
        """Those of some rows that belong to this process, in micro-batches.

        All processes gather and reduce shards together, so none may omit a micro-batch: a process without rows gets
        empty ones while others still have real ones.
        """
        shares = [self._packed(batch, rows[batch.owner_rank[rows] == rank]) for rank in range(self.world.size)]
        own = shares[self.world.rank]
        yield from own
        if self.sharded is not None:
            yield from [rows[:0]] * (max(map(len, shares)) - len(own))

    def _packed(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        tokens, lengths = batch.tokens[rows], batch.lengths[rows]
        parts = micro_batches_of(self.model, tokens, lengths, self.micro_batch_tokens, self.packing)
        return [rows[part] for part in parts]

    def _seen(self, batch: Batch, rows: Tensor) -> tuple[Replay | None, Tensor | None]:
        """What the queries of a micro-batch see, and the experts to which its tokens are sent."""
        seen = seen_by(self.model, batch, rows, batch.traces is not None, self.packing, batch.routes)
        return seen, sent_to(self.model, batch.routes, rows, batch.lengths, seen)

    def _call(self, forward: Callable[[nn.Module], T]) -> T:
        """Call a function with the model. If its weights are divided, everything must happen inside one such call."""
        return forward(self.model) if self.sharded is None else self.sharded(forward)

    def _accumulate(self, loss: Tensor) -> None:
        """Run backward. Shards get the mean of the processes' gradients, but need their sum, hence the factor."""
        self.optimizer.scaled(loss if self.sharded is None else loss * self.world.size).backward()

    def _empty_micro_batch(self) -> Tensor:
        """A dummy forward pass that returns a number which depends on all weights."""
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        target_mask = torch.tensor([[False, True]], device=self.device)

        def forward(model: nn.Module) -> Tensor:
            states = hidden_states(model, tokens)
            logprobs = logprobs_of(model, states, tokens, target_mask, self.temperature)
            if self.distill is None:
                return logprobs
            return logprobs + distillation(model, tokens, target_mask, states, self.distill, self.temperature or 1.0)

        return self._call(forward).sum()

    def _diverged(self, sums: dict[str, float], norm: float) -> str:
        return (
            f"{self.skipped} optimizer steps in a row had a loss ({sums['loss']}) or gradient norm ({norm}) that is "
            f"not finite; the weights are those of optimizer step {self.version}. Lower optimizer.lr (now "
            f"{self.optimizer.settings.lr}) or use bfloat16 or float32."
        )

    def check_agreement(self) -> None:
        """Refuse to continue if weights differ between processes. All made the same updates, so all bits must agree."""
        sums = self.world.run_on_all(
            lambda: [master.detach().double().sum().item() for master in self.optimizer.masters]
        )
        if any(other != sums[0] for other in sums):
            raise Disagreement(
                f"the weights of the {self.world.size} processes are not the same after {self.version} optimizer "
                "steps; the processes must have the same kind of device, torch and model files. Go on from the last "
                "checkpoint with --resume."
            )

    def state_dict(self) -> dict:
        scale = self.optimizer.scale
        scaled = {} if scale is None else {"loss_scale": scale.state_dict()}
        return {"optimizer": self.optimizer.state_dict(), "version": self.version, "skipped": self.skipped, **scaled}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self.skipped = int(state["version"]), int(state["skipped"])
        if self.optimizer.scale is not None and "loss_scale" in state:  # earlier versions trained adapters without one
            self.optimizer.scale = LossScale.from_state(state["loss_scale"])


@contextmanager
def learning(model: nn.Module) -> Iterator[None]:
    """Put a model into train mode, which gradient checkpointing needs, but without dropout: the sampler had none, and
    ratios must start at 1.
    """
    training = [(module, module.training) for module in model.modules()]
    rates = _dropouts(model)
    try:
        for module, _ in training:
            module.training = True
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, mode in training:
            module.training = mode
        for module, name, value in rates:
            setattr(module, name, value)


def without_dropout(model: nn.Module) -> list[float]:
    """Set every dropout rate to 0, for good; returns the rates that were not 0."""
    rates = [(module, name, value) for module, name, value in _dropouts(model) if value]
    for module, name, _ in rates:
        setattr(module, name, 0.0)
    return [value for *_, value in rates]


def _dropouts(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if _is_dropout(module, name, value)
    ]


def _is_dropout(module: nn.Module, name: str, value) -> bool:
    """Whether an attribute is a dropout rate: a Dropout module's p, or what a layer hands to a function."""
    inside = isinstance(module, nn.modules.dropout._DropoutNd) and name == "p"
    return isinstance(value, float) and (inside or "drop" in name or "jitter" in name)
