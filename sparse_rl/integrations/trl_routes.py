"""Mixtures of experts under replay in TRL: the policy goes through the sampler's experts, the reference chooses its
own, as in our own training (models/routing.py).
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..cache import Trace
from ..learn.routes import routes_in_order
from ..models.routing import has_experts, why_not_replayed


def records_routes(model: nn.Module, replay: bool) -> bool:
    """Whether rollouts record routes, because the trainer will follow them."""
    if not (replay and has_experts(model)):
        return False
    why = why_not_replayed(model)
    if why is not None:
        warnings.warn(
            f"{type(model).__name__} {why}, so its routing is not replayed: the trainer chooses experts anew, and "
            "where two are nearly tied its log-probs differ from the sampler's.",
            stacklevel=3,
        )
    return why is None


def sampler_s_routes(policy: nn.Module, model: nn.Module, traces: Sequence[Trace]) -> Tensor | None:
    """The experts to which a batch is sent, [M, n, k]; None: those that the model chooses.

    policy: the trainer's model, unwrapped; model: the one that is computed, which may be the reference
    """
    routes = [trace.routes for trace in traces if trace.routes is not None]
    if not routes or model is not policy or _is_reference(model):
        return None
    return routes_in_order(model, routes, torch.tensor([trace.num_tokens for trace in traces]))


def _is_reference(model: nn.Module) -> bool:
    """Whether a model's adapters are off, or are those that TRL keeps as the reference."""
    if "peft" not in sys.modules:
        return False
    from peft.tuners.tuners_utils import BaseTunerLayer

    adapters = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    return any(module.disable_adapters or "ref" in module.active_adapters for module in adapters)
