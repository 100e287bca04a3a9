"""The learner: one optimizer step from one batch, micro-batch by micro-batch, in the weights the engine samples from.

With several processes each goes through its own rows of the batch; gradients and the sums of metrics are added up over all of them. Every
process knows the whole batch, so all scale and count alike, and all agree without asking.

Trajectories that cannot move the weights (rejected, without an advantage and without a KL term, empty) do not go through the model. A step
in which nothing is left, or in which a number is not finite, leaves weights and optimizer as they were and is counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..distributed.world import World
from ..errors import SparseRLError
from .batch import Batch, pack, replay
from .distill import distillation
from .loss import Loss, policy_loss
from .optimizer import MasterAdamW, OptimizerSettings
from .score import hidden_states, logprobs_of
from .shards import Sharded


class Disagreement(SparseRLError):
    """Processes have different weights: which of them are right nobody knows, so none are saved."""


class Learner:
    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerSettings,
        loss: Loss,
        *,
        micro_batch_tokens: int = 16384,
        temperature: float = 1.0,
        clip_kl: float | None = None,
        max_skipped: int = 5,
        distill: str | None = None,
        distill_weight: float = 0.1,
        world: World | None = None,
        sharded: Sharded | None = None,
    ):
        """`sharded`: the model divided among the processes; None: every one has all of it."""
        self.model, self.loss = model, loss
        self.world, self.sharded = world or World(), sharded
        self.micro_batch_tokens, self.temperature, self.clip_kl, self.max_skipped = (
            micro_batch_tokens,
            temperature,
            clip_kl,
            max_skipped,
        )
        self.distill, self.distill_weight = distill, distill_weight
        self.optimizer = MasterAdamW(model.parameters(), optimizer)
        self.version = 0  # optimizer steps behind the weights
        self.skipped = 0  # steps in a row that were skipped for non-finite numbers

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def step(self, batch: Batch) -> dict[str, float]:
        """Forward, loss, backward, clip, update. Returns metrics."""
        if self.distill is not None and batch.traces is None:
            raise SparseRLError(
                "distillation needs the shadow view, but the batch was scored in the dense one: score(..., view='shadow')."
            )
        moves = batch.mask.any(1)
        if self.loss.beta == 0 and self.distill is None:
            moves &= batch.advantages != 0
        active = moves.nonzero()[:, 0]
        if not len(active):
            return {"update/empty/count": 1.0}
        sums = {"loss": 0.0, "tokens": 0.0, "clipped": 0.0, "drift": 0.0, "kl": 0.0, "distill": 0.0}
        shares = [self._packed(batch, active[batch.owner[active] == rank]) for rank in range(self.world.size)]
        with learning(self.model):
            for rows in shares[self.world.rank]:
                for name, value in self._backward(batch, rows).items():
                    sums[name] += value
            if self.sharded is not None:
                for _ in range(max(map(len, shares)) - len(shares[self.world.rank])):
                    self._empty_micro_batch()
        sums = self.world.add_numbers(sums)
        if self.sharded is None:
            self.world.add(self.optimizer.gradients() if self.world.size > 1 else [])
        finite = math.isfinite(sums["loss"])
        warm = min(1.0, (self.version + 1) / max(self.optimizer.how.warmup_steps, 1))
        norm, lr = self.optimizer.step(warm) if finite else (math.nan, math.nan)
        if not (finite and math.isfinite(norm)):
            self.optimizer.clear()
            return self._skip(sums["loss"], norm)
        self.version += 1
        self.skipped = 0
        metrics = {
            "update/loss": sums["loss"],
            "update/grad_norm": norm,
            "update/lr": lr,
            "update/clip/frac": sums["clipped"] / max(batch.response_tokens, 1),
            "update/drift/mean": sums["drift"] / max(sums["tokens"], 1),
        }
        if self.loss.beta > 0:
            metrics["update/kl/mean"] = sums["kl"] / max(sums["tokens"], 1)
        if self.distill is not None:
            metrics["update/distill/mean"] = sums["distill"] / max(sums["tokens"], 1)
        return metrics

    def _backward(self, batch: Batch, rows: torch.Tensor) -> dict[str, float]:
        """Accumulate the gradient of a micro-batch; the sums its metrics are made of."""
        width = int(batch.lengths[rows].max())

        def cut(tensor):
            return None if tensor is None else tensor[rows, :width].to(self.device)

        tokens, mask, scale = cut(batch.tokens), cut(batch.mask), cut(batch.scale)
        seen = None if batch.traces is None else replay(self.model, batch, rows)

        def forward(model: nn.Module) -> tuple[Tensor, Tensor | None]:
            states = hidden_states(model, tokens, seen)
            logprobs = logprobs_of(model, states, tokens, mask, self.temperature)
            if self.distill is None:
                return logprobs, None
            return logprobs, distillation(model, tokens, mask, states, self.distill, self.temperature or 1.0)

        logprobs, gap = forward(self.model) if self.sharded is None else self.sharded(forward)
        loss, sums, clipped = policy_loss(
            logprobs,
            cut(batch.old_logprobs),
            batch.advantages[rows].to(self.device),
            mask,
            cut(batch.weights),
            scale,
            self.loss,
            cut(batch.reference_logprobs),
            self.clip_kl,
        )
        batch.clipped[rows, :width] = clipped.cpu()
        if gap is not None:
            loss = loss + self.distill_weight * (scale * gap).sum()
            sums["distill"] = gap.detach().sum()
        self._accumulate(loss)
        return {"loss": loss.item()} | {name: float(value) for name, value in sums.items()}

    def _packed(self, batch: Batch, rows: Tensor) -> list[Tensor]:
        """Some rows in micro-batches."""
        return [rows[part] for part in pack(batch.lengths[rows], self.micro_batch_tokens)]

    def _accumulate(self, loss: Tensor) -> None:
        """Shards hold the mean of the processes' gradients, but the loss of a step is the sum of theirs."""
        (loss if self.sharded is None else loss * self.world.size).backward()

    def _empty_micro_batch(self) -> None:
        """A micro-batch of nothing, while others have more than this process: shards are gathered and reduced by all of them at once."""
        tokens = torch.zeros(1, 2, dtype=torch.int64, device=self.device)
        asked = torch.tensor([[False, True]], device=self.device)

        def forward(model: nn.Module) -> Tensor:
            states = hidden_states(model, tokens)
            logprobs = logprobs_of(model, states, tokens, asked, self.temperature)
            if self.distill is not None:
                logprobs = logprobs + distillation(model, tokens, asked, states, self.distill, self.temperature or 1.0)
            return logprobs

        self._accumulate(self.sharded(forward).sum() * 0.0)

    def _skip(self, loss: float, norm: float) -> dict[str, float]:
        self.skipped += 1
        if self.skipped >= self.max_skipped:
            raise SparseRLError(
                f"{self.skipped} optimizer steps in a row had a loss ({loss}) or gradient norm ({norm}) that is not finite; the weights "
                f"are those of optimizer step {self.version}. Lower optimizer.lr (now {self.optimizer.how.lr}) or use bfloat16 or float32."
            )
        return {"update/skipped/count": 1.0}

    def check_agreement(self) -> None:
        """Refuse to go on from weights that differ between processes: each made the same updates, so they must be the same bits."""
        sums = self.world.run_on_all(
            lambda: [master.detach().double().sum().item() for master in self.optimizer.masters]
        )
        if any(other != sums[0] for other in sums):
            raise Disagreement(
                f"the weights of the {self.world.size} processes are not the same after {self.version} optimizer steps; they must have the "
                "same kind of device, torch and model files. Go on from the last checkpoint with --resume."
            )

    def state_dict(self) -> dict:
        return {"optimizer": self.optimizer.state_dict(), "version": self.version, "skipped": self.skipped}

    def load_state_dict(self, state: dict) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.version, self.skipped = state["version"], state["skipped"]


@contextmanager
def learning(model: nn.Module) -> Iterator[None]:
    """Train mode, which gradient checkpointing needs, but without dropout: the sampler had none, and a ratio must start at 1."""
    training = [(module, module.training) for module in model.modules()]
    shares = _dropouts(model)
    try:
        for module, _ in training:
            module.training = True
        for module, name, _ in shares:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, mode in training:
            module.training = mode
        for module, name, value in shares:
            setattr(module, name, value)


def without_dropout(model: nn.Module) -> list[float]:
    """Set every share that is dropped to 0, for good, and say which they were."""
    shares = [(module, name, value) for module, name, value in _dropouts(model) if value]
    for module, name, _ in shares:
        setattr(module, name, 0.0)
    return [value for *_, value in shares]


def _dropouts(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    return [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if _is_dropout(module, name, value)
    ]


def _is_dropout(module: nn.Module, name: str, value) -> bool:
    """Whether an attribute is the share of something to drop: a Dropout module's p, or what a layer hands to a function."""
    inside = isinstance(module, nn.modules.dropout._DropoutNd) and name == "p"
    return isinstance(value, float) and (inside or "drop" in name or "jitter" in name)
