"""The learner's layers through fused kernels, within a `with`: the weights and the rounding of the Hugging Face
modules, fewer passes over memory.

    with fused(model):
        loss(model).backward()          # backward too: gradient checkpointing computes layers again

Every instance of a module that is known (the Llama family's norms, MLPs, attentions and decoder layers) gets a forward
function of its own, which is taken away again at the end. No class or module is patched, so other models, and this one
outside the `with`, are as they were. A part is only fused if nothing was put in its place, so adapters, quantised
layers and hooks stay in force: what calls a submodule still calls it. On a CPU nothing changes at all.

The rotation is a function in the attention's own source. That source runs as it is, with that one name bound to ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from ..kernels import ops

_FAMILIES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "qwen3_moe": "Qwen3Moe",  # but for experts
    "mixtral": "Mixtral",
}
_ROTATION = "apply_rotary_pos_emb"  # in the source of their attentions


@contextmanager
def fused(*models: nn.Module | None) -> Iterator[None]:
    """Compute what is known of some models through fused kernels, where their devices have any."""
    changed: list[nn.Module] = []
    try:
        for model in models:
            if model is None or not ops.rules(next(model.parameters()).device).fuses_learning:
                continue
            for module in model.modules():
                forward = fused_forward(module)
                if forward is not None:
                    vars(module)["forward"] = forward
                    changed.append(module)
        yield
    finally:
        for module in changed:
            del vars(module)["forward"]


def fused_forward(module: nn.Module) -> Callable | None:
    """The forward function that computes what a module's own does; None: the module is not known, or was changed."""
    kind = _kind(module)
    make = _MAKERS.get(f"{kind.__module__}.{kind.__qualname__}")
    return None if make is None or _is_replaced(module) else make(module)


def _norm(module: Any) -> Callable:
    def forward(hidden_states: Tensor) -> Tensor:
        return ops.add_and_norm(None, hidden_states, module.weight, module.variance_epsilon)[1]

    return forward


def _mlp(module: Any) -> Callable | None:
    if type(module.act_fn).__name__ not in ("SiLU", "SiLUActivation") or _is_touched(module.act_fn):
        return None

    def forward(x: Tensor) -> Tensor:
        return module.down_proj(ops.silu_gate(module.gate_proj(x), module.up_proj(x)))

    return forward


def _attention(module: Any) -> Callable | None:
    function = _with_our_rotation(_kind(module).forward)
    return None if function is None else function.__get__(module)


def _layer(module: Any) -> Callable | None:
    before, after = module.input_layernorm, module.post_attention_layernorm
    if any(_MAKERS.get(_name(norm)) is not _norm or _is_touched(norm) for norm in (before, after)):
        return None
    own = _kind(module).forward
    own = getattr(own, "__wrapped__", own) if _checkpoints_forward() else own

    def compute(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args:  # transformers names them all
            return own(module, hidden_states, *args, **kwargs)
        residual, x = ops.add_and_norm(None, hidden_states, before.weight, before.variance_epsilon)
        x, _ = module.self_attn(hidden_states=x, **kwargs)
        residual, x = ops.add_and_norm(x, residual, after.weight, after.variance_epsilon)
        return residual + module.mlp(x)

    def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if module.gradient_checkpointing and module.training:
            return module._gradient_checkpointing_func(functools.partial(compute, **kwargs), hidden_states, *args)
        return compute(hidden_states, *args, **kwargs)

    return forward if _checkpoints_forward() else compute


_MAKERS: dict[str, Callable[[Any], Callable | None]] = {
    f"transformers.models.{room}.modeling_{room}.{name}{part}": make
    for room, name in _FAMILIES.items()
    for part, make in (("RMSNorm", _norm), ("MLP", _mlp), ("Attention", _attention), ("DecoderLayer", _layer))
}


@functools.cache
def _checkpoints_forward() -> bool:
    """Whether transformers checkpoints a layer inside its forward function (from 5.23 on), which ours replaces; before,
    the layer's call does it.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    return "__call__" not in vars(GradientCheckpointingLayer)


def _kind(module: nn.Module) -> type:
    """A module's type; of a module that FSDP divided, which gave it a type of its own, the type before."""
    kind = type(module)
    return kind.__bases__[-1] if kind.__name__ == f"FSDP{kind.__bases__[-1].__name__}" else kind


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _is_replaced(module: nn.Module) -> bool:
    return bool({"forward", "_hf_hook"} & vars(module).keys())


def _is_touched(module: nn.Module) -> bool:
    """Whether something is done when a module is called that is not done when only its parameters are read."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return _is_replaced(module) or any(hooks)


@functools.cache
def _with_our_rotation(forward: FunctionType) -> FunctionType | None:
    """An attention's forward function in which the name of the rotation means ours; None: it does not rotate so."""
    if hasattr(forward, "__wrapped__") or _ROTATION not in forward.__code__.co_names:
        return None
    names = {**forward.__globals__, _ROTATION: _rotate}
    function = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    function.__kwdefaults__ = forward.__kwdefaults__
    return function


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return ops.rotate(query, key, cos, sin)
