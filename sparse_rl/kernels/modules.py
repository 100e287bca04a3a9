"""Run the layers of known models through fused kernels, within a `with`: fewer passes over memory and fewer launches,
with the weights and the rounding of the Hugging Face modules.

    with fused(model):
        loss(model).backward()          # include backward: gradient checkpointing computes layers again

    modules = known_modules(model)      # once
    with fusing(modules):               # for each forward pass; walks no model
        model(tokens)

Every instance of a known module (the Llama family's norms, MLPs, attentions and decoder layers) gets another forward
function, which is removed at the end. No class is patched, so other models, and this one outside the `with`, stay as
they were. A part is only fused if nothing was put in its place, which is looked at each time, so adapters, quantised
layers and hooks still work. On a CPU nothing changes.

The rotation is a function called by name in the attention's source. That source runs as it is, with this one name bound
to our function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import ops

_FAMILIES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "qwen3_moe": "Qwen3Moe",  # except its experts
    "mixtral": "Mixtral",
}
_ROTATION = "apply_rotary_pos_emb"  # the rotation's name in their attentions


@contextmanager
def fused(*models: nn.Module | None) -> Iterator[None]:
    """Compute the known modules of some models through fused kernels, if the learner uses them on their devices."""
    learned = [m for m in models if m is not None and ops.rules(next(m.parameters()).device).fuses_learning]
    with fusing(module for model in learned for module in model.modules()):
        yield


@contextmanager
def fusing(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Compute those of the modules that are known through fused kernels."""
    changed: list[nn.Module] = []
    try:
        for module in modules:
            forward = fused_forward(module)
            if forward is not None:
                vars(module)["forward"] = forward
                changed.append(module)
        yield
    finally:
        for module in changed:
            del vars(module)["forward"]


@contextmanager
def reading(modules: Iterable[nn.Module], device: torch.device) -> Iterator[None]:
    """`fusing`, for a forward pass over prompts or given tokens on a device.

    cuDNN's attention is left out there: it prepares a plan for every shape that it has not seen, and few groups of
    prompts have the shape of another one.
    """
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with fusing(modules), sdpa_kernel(kernels) if device.type == "cuda" else nullcontext():
        yield


def known_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that may be fused: those whose types are known."""
    return [module for module in model.modules() if _maker(module) is not None]


def fused_forward(module: nn.Module) -> Callable | None:
    """A fused forward function for a module; None if the module is not known or was changed."""
    make = _maker(module)
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
        if args:  # transformers passes all arguments by name
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
    """Whether transformers checkpoints a layer inside its forward function (since 5.23), which ours replaces. Earlier
    versions do it in the layer's __call__.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    return "__call__" not in vars(GradientCheckpointingLayer)


def _maker(module: nn.Module) -> Callable[[Any], Callable | None] | None:
    kind = _kind(module)
    return _MAKERS.get(f"{kind.__module__}.{kind.__qualname__}")


def _kind(module: nn.Module) -> type:
    """A module's type; for a module that FSDP divided, the type before, because FSDP gives it another one."""
    kind = type(module)
    return kind.__bases__[-1] if kind.__name__ == f"FSDP{kind.__bases__[-1].__name__}" else kind


def _name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _is_replaced(module: nn.Module) -> bool:
    return bool({"forward", "_hf_hook"} & vars(module).keys())


def _is_touched(module: nn.Module) -> bool:
    """Whether calling a module does more than using its parameters does, because of hooks or wrappers."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return _is_replaced(module) or any(hooks)


@functools.cache
def _with_our_rotation(forward: FunctionType) -> FunctionType | None:
    """An attention's forward function with the rotation's name bound to ours; None if it does not call it."""
    if hasattr(forward, "__wrapped__") or _ROTATION not in forward.__code__.co_names:
        return None
    names = {**forward.__globals__, _ROTATION: _rotate}
    function = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    function.__kwdefaults__ = forward.__kwdefaults__
    return function


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return ops.rotate(query, key, cos, sin)
