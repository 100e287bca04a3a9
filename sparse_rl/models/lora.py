"""Low-rank adapters: the layers that get some, and a model with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn

from ..beacon import beacon_of
from ..errors import SparseRLError, nearest
from .adapters import quiet_peft

# feed-forward layers; in a mixture, peft takes these names for those of its experts and routers
_FEED_FORWARD = {
    *("gate_proj", "up_proj", "down_proj", "gate", "w1", "w2", "w3"),
    *("input_linear", "output_linear"),
}


def adapted_layers(model: nn.Module, targets: Sequence[str] = ()) -> dict[str, nn.Module]:
    """The layers that get adapters: all that are linear but the head, or those of them whose names end in a target.

    The feed-forward layers of a mixture get none, nor do routers and whatever else is beside experts: peft would make
    the changed weights of all experts in every pass.
    """
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer

    head = cast(Any, model).get_output_embeddings()
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D) and m is not head}
    mixtures = tuple(
        f"{name.rpartition('.')[0]}." for name, m in model.named_modules() if "Experts" in type(m).__name__
    )
    if mixtures:
        linear = {
            name: m for name, m in linear.items() if _last(name) not in _FEED_FORWARD and not name.startswith(mixtures)
        }
    known = {_last(name) for name in linear}
    for target in targets:
        if not any(_ends_in(name, target) for name in linear):
            raise SparseRLError(
                f"model.lora_targets has {target!r}, but no linear layer besides the head"
                f"{' and the feed-forward layers of a mixture' if mixtures else ''} has this name; "
                f"{nearest(target, sorted(known))}"
            )
    if not linear:
        raise SparseRLError(
            f"{type(model).__name__} has no linear layers that could get adapters; set model.lora_rank to 0."
        )
    return {name: m for name, m in linear.items() if not targets or any(_ends_in(name, target) for target in targets)}


def _names(model: nn.Module, layers: Mapping[str, nn.Module]) -> list[str]:
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
    layers = adapted_layers(model, targets)
    turned = not any(isinstance(m, nn.Linear) for m in layers.values())  # a Conv1D's weight is [in, out]
    with quiet_peft():
        config = LoraConfig(
            r=rank, lora_alpha=alpha, target_modules=_names(model, layers), fan_in_fan_out=turned, task_type="CAUSAL_LM"
        )
        adapted = get_peft_model(model, config)
    if (beacon := beacon_of(adapted)) is not None:
        beacon.beacon.requires_grad_(True)
    return adapted
