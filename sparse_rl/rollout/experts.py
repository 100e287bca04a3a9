"""Compute the experts of a decode step without a sync with the host.

Except in bf16, torch's grouped product asks the host where each expert's tokens begin, and a step that does so cannot
be captured in a CUDA graph. So decode steps compute experts by a kernel of ours (kernels/experts.py) in the dtypes that
`Rules.own_experts` names. It is registered with transformers' experts interface on first use and switched on for a
step; prefill and the learner keep the model's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels import ops

NAME = "sparse_rl"
_REPLACED = {"grouped_mm", "eager"}  # implementations that ask the host; others that a user chose stay


def experts_forward(experts: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Compute what transformers' experts modules do, with rounding at the same places as its grouped product.

    hidden [n, N]; of each token's k experts ids [n, k] and weights [n, k] -> [n, N]
    """
    of_experts, order = ids.reshape(-1).sort(stable=True)
    starts = torch.searchsorted(of_experts, torch.arange(experts.num_experts + 1, dtype=ids.dtype, device=ids.device))

    def product(x: Tensor, name: str) -> Tensor:
        weight = getattr(experts, name)
        weight = weight if experts.is_transposed else weight.transpose(1, 2)
        bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
        return ops.expert_product(x.to(weight.dtype), weight, bias, order, starts)

    if experts.has_gate:
        x = experts._apply_gate(product(hidden, "gate_up_proj"))
    else:
        x = experts.act_fn(product(hidden, "up_proj"))
    x = product(x, "down_proj")
    if getattr(experts, "has_post_expert_norm", False):
        x = experts.post_expert_norm(x)
    weighted = x * weights.reshape(-1, 1)
    return weighted.view(*ids.shape, -1).sum(1).to(hidden.dtype)


def implementation_of(module: nn.Module) -> str | None:
    """The name in transformers' interface of what computes a module's experts; None: it has no experts."""
    return getattr(getattr(module, "config", None), "_experts_implementation_internal", None)


def experts_to_switch(model: nn.Module) -> list[Any]:
    """The configs by which `computing_experts` switches a model's experts; empty if they stay as they are."""
    found = [module for module in model.modules() if _is_dispatched(module)]
    others = {id(module.config) for module in found if not _fits(module)}
    return list({id(m.config): m.config for m in found if id(m.config) not in others}.values())


@contextmanager
def computing_experts(configs: Sequence[Any]) -> Iterator[None]:
    """Switch the experts of these configs to our kernel, and afterwards back to what they were."""
    if configs:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    before = [config._experts_implementation_internal for config in configs]
    try:
        for config in configs:
            config._experts_implementation_internal = NAME  # the property would also set those of inner configs
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._experts_implementation_internal = implementation


def _is_dispatched(module: nn.Module) -> bool:
    """Whether transformers' experts interface chooses what the module computes."""
    said = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "num_experts"))
    return said and implementation_of(module) is not None


def _fits(module: Any) -> bool:
    found = [getattr(module, name, None) for name in ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")]
    weights = [weight for weight in found if isinstance(weight, Tensor) and weight.dim() == 3]
    if len(weights) < 2 or getattr(module, "_is_expert_parallel", False):
        return False
    known = ops.rules(weights[0].device).own_experts
    return all(weight.dtype in known for weight in weights) and implementation_of(module) in _REPLACED
