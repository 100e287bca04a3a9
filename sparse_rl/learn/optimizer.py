"""AdamW that always works in fp32, whatever the model's dtype.

At a learning rate of 1e-6 a bf16 weight would never move: the step is far below its rounding. So for every trained parameter below
fp32 an fp32 master is kept; gradients are accumulated into the master as they arise, the master is updated, and the parameter is its
rounding. An fp32 parameter is its own master. Memory per trained parameter: 16 bytes in fp32, 18 in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..errors import SparseRLError, require_int
from ..keys import key
from .shards import full, put


@dataclass(frozen=True)
class OptimizerSettings:
    lr: float = key("learning rate, constant after the warm-up", 1e-6)
    warmup_steps: int = key("optimizer steps over which the learning rate rises linearly", 0)
    betas: tuple[float, float] = key("AdamW's decay rates", (0.9, 0.98))
    weight_decay: float = key("of matrices; biases and norms have none", 0.1)
    eps: float = key("AdamW's epsilon", 1e-8)
    max_grad_norm: float = key("gradients are scaled down to this norm", 1.0)

    def __post_init__(self):
        require_int(at_least=0, **{"optimizer.warmup_steps": self.warmup_steps})
        positive = 0 < self.lr < 1 and self.max_grad_norm > 0 and self.eps > 0
        if not (
            positive and self.weight_decay >= 0 and all(0 <= b < 1 for b in self.betas)
        ):  # NaN fails every comparison
            raise SparseRLError(
                f"optimizer: lr {self.lr} must be between 0 and 1, eps {self.eps} and max_grad_norm {self.max_grad_norm} above 0, "
                f"weight_decay {self.weight_decay} not negative, betas {list(self.betas)} from 0 to below 1."
            )


class MasterAdamW:
    def __init__(self, parameters: Iterable[nn.Parameter], how: OptimizerSettings):
        self.how = how
        self.parameters = [p for p in parameters if p.requires_grad]
        if not self.parameters:
            raise SparseRLError("the model has no parameters to train (requires_grad is off everywhere).")
        if any(p.dtype == torch.float16 for p in self.parameters):
            raise SparseRLError(
                "the model is float16, in which gradients vanish; train it as bfloat16 or float32 (model.dtype)."
            )
        self.masters = [p if p.dtype == torch.float32 else p.detach().float() for p in self.parameters]
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(_into(master))
        decays = [m for m in self.masters if m.dim() > 1]
        plain = [m for m in self.masters if m.dim() <= 1]
        groups = [{"params": decays, "weight_decay": how.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=how.lr,
            betas=how.betas,
            eps=how.eps,
            fused=self.masters[0].device.type == "cuda",
        )

    def step(self, share: float) -> tuple[float, float]:
        """One update from the accumulated gradients at a share of the learning rate: (gradient norm before clipping, learning rate).

        A norm that is not finite means that nothing was updated. Gradients are cleared either way.
        """
        lr = self.how.lr * share
        norm = full(nn.utils.clip_grad_norm_(self.masters, self.how.max_grad_norm)).item()
        if norm == norm and norm != float("inf"):
            for group in self.adamw.param_groups:
                group["lr"] = lr
            self.adamw.step()
            self._publish()
        self.clear()
        return norm, lr

    def clear(self) -> None:
        for tensor in (*self.parameters, *self.masters):
            tensor.grad = None

    @torch.no_grad()
    def _publish(self) -> None:
        """Every parameter becomes the rounding of its master."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    def gradients(self) -> list[Tensor]:
        """What was accumulated so far, in fp32; zeros where there was nothing."""
        for master in self.masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.masters]

    def state_dict(self) -> dict[str, list[Tensor]]:
        """Masters, moments and steps of all parameters, in their order. Zeros where nothing was updated yet."""
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
                f"the optimizer's state has no {', '.join(sorted(missing))} (it has: {', '.join(state)}): another version of sparse-rl "
                "wrote it; go on with that one, or start another run from the checkpoint's folder with model.name."
            )
        for i, master in enumerate(self.masters):
            put(state["masters"][i], master)
            moments = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
            for name, tensor in moments.items():
                put(state[name][i], tensor)
            step = state["step"][i].to(master.device if self.adamw.defaults["fused"] else "cpu", copy=True)
            self.adamw.state[master] = {"step": step, **moments}
        self._publish()


def _into(master: Tensor):
    """A hook that moves a parameter's gradient into its master's, in fp32."""

    def hook(parameter: nn.Parameter) -> None:
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    return hook
