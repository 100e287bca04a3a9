"""Low-rank adapters: the layers that get some, and a model with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from ..beacon import beacon_of
from ..errors import SparseRLError, nearest
from .adapters import quiet_peft
from .routing import has_experts

# in a mixture, peft takes these names for those of its experts and routers
_FEED_FORWARD = {"gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"}


def adapted_layers(model: nn.Module, targets: Sequence[str] = ()) -> dict[str, nn.Linear]:
    """The layers that get adapters: all that are linear but the head, or those of them whose names end in a target.

    The feed-forward layers of a mixture get none: peft would make the changed weights of all experts in every pass.
    """
    head = cast(Any, model).get_output_embeddings()
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    if mixture := has_experts(model):
        linear = {name: m for name, m in linear.items() if _last(name) not in _FEED_FORWARD}
    known = {_last(name) for name in linear}
    for target in targets:
        if not any(_ends_in(name, target) for name in linear):
            raise SparseRLError(
                f"model.lora_targets has {target!r}, but no linear layer besides the head"
                f"{' and the feed-forward layers of a mixture' if mixture else ''} has this name; "
                f"{nearest(target, sorted(known))}"
            )
    return {name: m for name, m in linear.items() if not targets or any(_ends_in(name, target) for target in targets)}


def _names(model: nn.Module, layers: Mapping[str, nn.Linear]) -> list[str]:
    """The layers' last names, if no other module has them; otherwise their whole names."""
    last = {_last(name) for name in layers}
    others = any(_last(name) in last and name not in layers for name, _ in model.named_modules())
    return sorted(layers if others else last)


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def with_lora(
    model: nn.Module, rank: int, alpha: int, targets: Sequence[str] = (), key: str = "model.lora_rank"
) -> nn.Module:
    """Add low-rank adapters to linear layers of a model (`adapted_layers`); only these, and a beacon if there is one,
    are trained.

    `key`: the setting that error messages name
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise SparseRLError(f"{key} is {rank}, which needs peft: pip install 'sparse-rl[lora]'.") from error
    names = _names(model, adapted_layers(model, targets))
    with quiet_peft():
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=names, task_type="CAUSAL_LM")
        adapted = get_peft_model(model, config)
    if (beacon := beacon_of(adapted)) is not None:
        beacon.beacon.requires_grad_(True)
    return adapted
