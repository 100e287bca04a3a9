"""AdamW that works in fp32 at least, whatever the model's dtype.

At a learning rate of 1e-6 a bf16 weight would never change, because the step is far below its rounding. So every
trained parameter in a lower precision has an fp32 master (float16 also needs a scaled loss, scaler.py). Gradients are
accumulated into the master as they are computed, the master is updated, and the parameter is the master, rounded. An
fp32 parameter is its own master, and so is an fp64 one. Memory per trained parameter: 16 bytes in fp32, 18 in bf16; if
masters and moments are offloaded to the host (offload.py), 8 and 6 on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import SparseRLError, nearest, require_int
from ..keys import key
from .offload import Piece, host_zeros, update_by_buckets
from .scaler import LossScale
from .shards import full, is_divided, put, whole_or_part

SCHEDULES: dict[str, Callable[[float], float]] = {  # maps the progress, 0 to 1, to a factor of the learning rate
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


@dataclass(frozen=True)
class OptimizerSettings:
    lr: float = key("learning rate after the warm-up", 1e-6)
    warmup_steps: int = key("optimizer steps over which the learning rate rises linearly", 0)
    schedule: str = key(
        "the learning rate after the warm-up: constant, or falling to 0 as linear or cosine", "constant"
    )
    decay_steps: int | None = key(
        "optimizer steps, warm-up included, after which linear and cosine reach 0; null: all of the run's, run.steps x "
        "learn.minibatches",
        None,
    )
    betas: tuple[float, float] = key("AdamW's decay rates", (0.9, 0.98))
    weight_decay: float = key("weight decay of matrices; biases and norms have none", 0.1)
    eps: float = key("AdamW's epsilon", 1e-8)
    choice_scale: float = key(
        "the head that chooses folds (rollout.compressor: beacon:2-16), which begins at 0, learns so many times faster "
        "than lr",
        50.0,
    )
    max_grad_norm: float = key("gradients with a larger norm are scaled down to this one", 1.0)
    offload: bool = key(
        "keep fp32 masters and moments in host memory and pass them through the GPU at every optimizer step: 4 bytes "
        "per trained parameter on the GPU instead of 16",
        False,
    )

    def __post_init__(self):
        require_int(at_least=0, **{"optimizer.warmup_steps": self.warmup_steps})
        if self.schedule not in SCHEDULES:
            raise SparseRLError(f"optimizer.schedule is {self.schedule!r}; {nearest(self.schedule, SCHEDULES)}")
        if self.decay_steps is not None:
            require_int(**{"optimizer.decay_steps": self.decay_steps})
            if self.schedule == "constant":
                raise SparseRLError(
                    f"optimizer.decay_steps is {self.decay_steps}, but optimizer.schedule is constant; use linear or "
                    "cosine, or set decay_steps to null."
                )
            if self.decay_steps <= self.warmup_steps:
                raise SparseRLError(
                    f"optimizer.decay_steps is {self.decay_steps}, but the warm-up alone takes {self.warmup_steps} "
                    "optimizer steps (optimizer.warmup_steps); set it above that."
                )
        positive = 0 < self.lr < 1 and self.max_grad_norm > 0 and 0 < self.eps < math.inf
        decays = 0 <= self.weight_decay < math.inf and all(0 <= b < 1 for b in self.betas)
        if not (positive and decays):  # NaN fails every comparison
            raise SparseRLError(
                f"optimizer: lr {self.lr} must be above 0 and below 1, eps {self.eps} and max_grad_norm "
                f"{self.max_grad_norm} above 0, weight_decay {self.weight_decay} not negative (and finite), betas "
                f"{list(self.betas)} from 0 to below 1."
            )

        if not 0 < self.choice_scale < math.inf:
            raise SparseRLError(
                f"optimizer.choice_scale is {self.choice_scale}; it must be above 0 and finite, such as 50.0."
            )
        if self.lr * self.weight_decay > 1:
            raise SparseRLError(
                f"optimizer.weight_decay is {self.weight_decay} and lr {self.lr}, so that a step would shrink weights "
                f"past 0; use a weight_decay of at most {1 / self.lr:g}."
            )

    def lr_after(self, steps: int) -> float:
        """The learning rate of the optimizer step after `steps` others: it rises linearly, then follows the schedule.
        It depends on nothing else, so a resumed run continues exactly.
        """
        if steps < self.warmup_steps:
            return self.lr * ((steps + 1) / self.warmup_steps)
        if self.schedule == "constant":
            return self.lr
        assert self.decay_steps is not None, "whoever knows the run's length fills it in"
        progress = (steps - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        return self.lr * SCHEDULES[self.schedule](min(1.0, progress))


class MasterAdamW:
    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        settings: OptimizerSettings,
        critic: Iterable[nn.Parameter] = (),
        critic_lr: float | None = None,
        scale: LossScale | None = None,
        choice: Iterable[nn.Parameter] = (),
    ):
        """`critic`: parameters with a separate gradient norm and a separate learning rate (None: that of the others),
        which follows the same schedule. `scale`: the loss scale of a float16 model; backward must then start from
        `scaled` losses. `choice`: those of `parameters` that learn `choice_scale` times faster.
        """
        self.settings, self.scale = settings, scale
        self.overflowed = False  # whether the last step was skipped only because the scale was too large
        parameters = list(parameters)
        self.parameters = [p for p in parameters if p.requires_grad]
        self.policy = len(self.parameters)  # the critic's parameters come after this many others
        self.parameters += [p for p in critic if p.requires_grad]
        if not self.policy:
            raise SparseRLError("the model has no parameters to train (requires_grad is off everywhere).")
        if scale is None and any(p.dtype == torch.float16 for p in parameters):  # frozen ones under adapters, too
            raise SparseRLError(
                "the model is float16, in which gradients vanish unless the loss is scaled, as only reinforcement "
                "learning does; set model.dtype to bfloat16 or float32 for warm-ups and students."
            )
        self.device = self.parameters[0].device
        self.masters = self._make_masters()
        # What carries gradients: the master, or for a master on the host a tensor of its shape without storage.
        self.carriers = [
            m if m is p or not settings.offload else torch.zeros((), device=p.device).expand(p.shape)
            for m, p in zip(self.masters, self.parameters, strict=True)
        ]
        for parameter, carrier in zip(self.parameters, self.carriers, strict=True):
            if carrier is not parameter:
                parameter.register_post_accumulate_grad_hook(_accumulate_into(carrier))
        groups: dict[tuple[float, float], list[Tensor]] = {}  # by (factor of the learning rate, weight decay)
        faster = dict.fromkeys(choice, settings.choice_scale)
        for i, (parameter, master) in enumerate(zip(self.parameters, self.masters, strict=True)):
            of_critic = i >= self.policy
            rate = (critic_lr or settings.lr) / settings.lr if of_critic else faster.get(parameter, 1.0)
            decay = settings.weight_decay if master.dim() > 1 else 0.0
            groups.setdefault((rate, decay), []).append(master)
        self.adamw = torch.optim.AdamW(
            [{"params": p, "weight_decay": decay, "rate": rate} for (rate, decay), p in groups.items()],
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=self.device.type == "cuda" and not settings.offload,
        )
        if settings.offload:
            shapes = [m.shape for m in self.masters]
            moments = zip(host_zeros(shapes, self.device), host_zeros(shapes, self.device), strict=True)
            for master, (first, second) in zip(self.masters, moments, strict=True):
                self.adamw.state[master] = {"step": torch.tensor(0.0), "exp_avg": first, "exp_avg_sq": second}

    @torch.no_grad()
    def _make_masters(self) -> list[Tensor]:
        """The fp32 masters: the parameters themselves or copies of them; offloaded copies are on the host, in fp32."""
        if not self.settings.offload:
            return [p if p.dtype.itemsize >= 4 else p.detach().float() for p in self.parameters]
        if any(is_divided(p) for p in self.parameters):
            raise SparseRLError(
                "optimizer.offload does not work for a learner that is divided among processes; set model.shard or "
                "optimizer.offload to false."
            )
        apart = [p for p in self.parameters if p.dtype != torch.float32]
        copies = dict(zip(apart, host_zeros([p.shape for p in apart], self.device), strict=True))
        for parameter, copied in copies.items():
            copied.copy_(parameter)
        return [copies.get(p, p) for p in self.parameters]

    def step(self, steps_done: int, loss: float = 0.0, critic_only: bool = False) -> tuple[float, float]:
        """One update from the accumulated gradients. Returns (gradient norm before clipping, learning rate), both
        without the critic's.

        steps_done: optimizer steps before this one, for the schedule. If the loss or a norm is not finite, nothing is
        updated and the returned norm is not finite. Gradients are cleared in any case. critic_only: all other
        parameters stay as they are.
        """
        self.overflowed = False
        if not math.isfinite(loss):
            self.clear()
            return math.nan, math.nan
        lr = self.settings.lr_after(steps_done)
        self._unscale()
        policy, critic = self._parts(self.carriers)
        if critic_only:
            for carrier in policy:
                carrier.grad = None
        norm, of_critic = (
            full(nn.utils.clip_grad_norm_(part, self.settings.max_grad_norm)).item() if part else 0.0
            for part in (policy, critic)
        )
        if not math.isfinite(of_critic):
            norm = math.nan
        if math.isfinite(norm):
            for group in self.adamw.param_groups:
                group["lr"] = lr * group["rate"]
            self._update()
        if self.scale is not None:
            self.overflowed = not math.isfinite(norm) and self.scale.value > 1
            self.scale = self.scale.after(math.isfinite(norm))
        self.clear()
        return norm, lr

    def _update(self) -> None:
        """Apply AdamW to the masters, then round them into the parameters."""
        if not self.settings.offload:
            self.adamw.step()
            self._round_masters()
            return
        place = {master: i for i, master in enumerate(self.masters)}
        for group in self.adamw.param_groups:
            moving = [place[m] for m in group["params"] if self.carriers[place[m]].grad is not None]
            update_by_buckets([self._piece(i) for i in moving], group, self.device)
            for i in moving:
                self.adamw.state[self.masters[i]]["step"] += 1

    def _piece(self, i: int) -> Piece:
        parameter, master, gradient = self.parameters[i], self.masters[i], self.carriers[i].grad
        state = self.adamw.state[master]
        assert gradient is not None
        return Piece(
            master=master.detach(),
            exp_avg=state["exp_avg"],
            exp_avg_sq=state["exp_avg_sq"],
            gradient=gradient,
            rounded=None if master is parameter else parameter.detach(),
            steps=float(state["step"]),
        )

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, from which backward must start."""
        return loss if self.scale is None else loss * self.scale.value

    def _unscale(self) -> None:
        gradients = [c.grad for c in self.carriers if c.grad is not None]
        if self.scale is not None and gradients:
            torch._foreach_mul_(gradients, 1 / self.scale.value)  # pyright: ignore[reportPrivateImportUsage]

    def _parts(self, tensors: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Split tensors into those of the model and those of the critic."""
        return tensors[: self.policy], tensors[self.policy :]

    def is_finite(self) -> bool:
        """Whether all weights of this process and their moments are finite."""
        moments = [value for state in self.adamw.state.values() for value in state.values() if torch.is_tensor(value)]
        return all(bool(whole_or_part(tensor).isfinite().all()) for tensor in (*self.masters, *moments))

    def clear(self) -> None:
        for tensor in (*self.parameters, *self.carriers):
            tensor.grad = None

    @torch.no_grad()
    def _round_masters(self) -> None:
        """Set every parameter to its master, rounded."""
        rounded = [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if m is not p]
        if rounded:  # one launch for many tensors, with the bits of copy_
            torch._foreach_copy_([p for p, _ in rounded], [m for _, m in rounded])  # pyright: ignore[reportPrivateImportUsage]

    def gradients(self, critic_only: bool = False) -> list[Tensor]:
        """The gradients accumulated so far, in fp32; zeros for parameters without one."""
        found = []
        for carrier in self._parts(self.carriers)[1] if critic_only else self.carriers:
            if carrier.grad is None:
                carrier.grad = torch.zeros_like(carrier)
            found.append(carrier.grad)
        return found

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Masters, moments and steps of all parameters, in order; zeros if nothing was updated yet."""
        states = [
            self.adamw.state.get(m) or {"exp_avg": torch.zeros_like(m), "exp_avg_sq": torch.zeros_like(m)}
            for m in self.masters
        ]
        return {
            "masters": [m.detach() for m in self.masters],
            "exp_avg": [state["exp_avg"] for state in states],
            "exp_avg_sq": [state["exp_avg_sq"] for state in states],
            "step": [torch.tensor(float(state.get("step", 0.0))) for state in states],
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        if missing := {"masters", "exp_avg", "exp_avg_sq", "step"} - state.keys():
            raise SparseRLError(
                f"the optimizer's state has no {', '.join(sorted(missing))} (it has: {', '.join(state)}): another "
                "version of sparse-rl wrote it; continue with that version, or start another run with the checkpoint's "
                "folder as model.name."
            )
        if len(state["masters"]) != len(self.masters):
            raise SparseRLError(
                f"the optimizer's state is of {len(state['masters'])} tensors, but this run trains "
                f"{len(self.masters)}, as when another version of sparse-rl gave adapters to other layers; continue "
                "with the version that wrote it, or export the checkpoint and start another run from it."
            )
        for i, master in enumerate(self.masters):
            put(state["masters"][i], master)
            here = self.adamw.state[master] if self.settings.offload else {}
            moments = {name: here.get(name, torch.zeros_like(master)) for name in ("exp_avg", "exp_avg_sq")}
            for name, tensor in moments.items():
                put(state[name][i], tensor)
            if not 0 <= state["step"][i] < math.inf:
                raise ValueError(f"the optimizer has made {state['step'][i].item()} steps")
            step = state["step"][i].to(master.device if self.adamw.defaults["fused"] else "cpu", copy=True)
            self.adamw.state[master] = {"step": step, **moments}
        self._round_masters()


def count_skipped(skipped: int, norm: float) -> int:
    """The number of consecutive skipped steps, after a step with this gradient norm."""
    return 0 if math.isfinite(norm) else skipped + 1


def check_skipped(skipped: int, limit: int, sentence: str) -> None:
    """Raise the sentence if `limit` consecutive steps were skipped. Store the count first; checkpoints must hold it."""
    if skipped >= limit:
        raise SparseRLError(sentence)


def _accumulate_into(carrier: Tensor) -> Callable[[Tensor], None]:
    """A hook that adds a parameter's gradient to its carrier, in fp32."""

    def hook(parameter: Tensor) -> None:
        assert parameter.grad is not None
        if carrier.grad is None:
            carrier.grad = parameter.grad.float()
        else:
            carrier.grad += parameter.grad
        parameter.grad = None

    return hook
