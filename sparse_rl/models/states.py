"""Read from a config the shapes of the states that recurrent layers keep for a row, per family of architectures.

A family is one kind of recurrent layer in transformers. The shapes are compared with what a layer hands over when it
runs (attention/recurrent.py), so a config that says something else is refused.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..cache import LayerState
from ..cache.states import RECURRENT_LAYERS
from ..errors import SparseRLError
from .layers import num_slot_layers


def _gated_delta_net(config: Any) -> LayerState:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    heads, width = config.linear_num_value_heads, config.linear_value_head_dim
    conv = (2 * keys + heads * width, config.linear_conv_kernel_dim)
    return LayerState(-1, conv, (heads, config.linear_key_head_dim, width))


def _kimi_delta_attention(config: Any) -> LayerState:
    heads, width = config.linear_num_heads, config.linear_head_dim
    return LayerState(-1, (3 * heads * width, config.linear_conv_kernel_dim), (heads, width, width))


def _mamba2(config: Any) -> LayerState:
    inner = getattr(config, "mamba_d_ssm", None) or int(config.mamba_expand * config.hidden_size)
    conv = (inner + 2 * config.mamba_n_groups * config.mamba_d_state, config.mamba_d_conv)
    return LayerState(-1, conv, (config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state))


def _nemotron(config: Any) -> LayerState:
    heads, width, state = config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size
    return LayerState(-1, (heads * width + 2 * config.n_groups * state, config.conv_kernel), (heads, width, state))


def _mamba1(config: Any) -> LayerState:
    inner = config.mamba_expand * config.hidden_size  # its scan always begins with an empty state
    return LayerState(-1, (inner, config.mamba_d_conv), (inner, config.mamba_d_state), continues=False)


def _short_convolution(config: Any) -> LayerState:
    return LayerState(-1, (config.hidden_size, config.conv_L_cache), None)


@dataclass(frozen=True)
class Family:
    name: str
    state: Callable[[Any], LayerState]
    package: str  # of the kernels that transformers takes where it is installed
    distribution: str  # the package's name for pip


_FLA = ("fla", "flash-linear-attention")
_SSM = ("mamba_ssm", "mamba-ssm")
_GATED_DELTA = Family("gated delta net", _gated_delta_net, *_FLA)
_MAMBA2 = Family("Mamba 2", _mamba2, *_SSM)
_CONVOLUTION = Family("short convolution", _short_convolution, "causal_conv1d", "causal-conv1d")
_NO_TIME = 1e-9  # a time step that changes nothing; transformers cannot make a model with a least one of 0
FAMILIES = {
    "qwen3_next": _GATED_DELTA,
    "qwen3_5_text": _GATED_DELTA,
    "qwen3_5_moe_text": _GATED_DELTA,
    "olmo_hybrid": _GATED_DELTA,
    "kimi_linear": Family("Kimi delta attention", _kimi_delta_attention, *_FLA),
    "bamba": _MAMBA2,
    "falcon_h1": _MAMBA2,
    "granitemoehybrid": _MAMBA2,
    "nemotron_h": Family("Mamba 2", _nemotron, *_SSM),
    "jamba": Family("Mamba", _mamba1, *_SSM),
    "lfm2": _CONVOLUTION,
    "lfm2_moe": _CONVOLUTION,
    "lfm3": _CONVOLUTION,
}


def layer_states(config: Any) -> tuple[LayerState, ...]:
    """What each recurrent layer of a supported config keeps of a row."""
    kinds = getattr(config, "layer_types", None) or []
    recurrent = [layer for layer, kind in enumerate(kinds) if kind in RECURRENT_LAYERS]
    if not recurrent:
        return ()
    state = FAMILIES[config.model_type].state(config)
    return tuple(replace(state, layer=layer) for layer in recurrent)


def is_recurrent(config: Any) -> bool:
    return any(kind in RECURRENT_LAYERS for kind in getattr(config, "layer_types", None) or [])


def recurrent_kernels(config: Any) -> str | None:
    """Which kernels compute a model's recurrent layers, in words; None: it has none."""
    config = config.get_text_config(decoder=True)
    if not is_recurrent(config) or config.model_type not in FAMILIES:
        return None
    family = FAMILIES[config.model_type]
    try:
        importlib.import_module(family.package)
    except Exception:  # whatever a broken package raises: transformers falls back on it, too
        return f"{family.name} by the torch operations of transformers ({family.distribution} is not installed)"
    return f"{family.name} by {family.distribution}"


def check_recurrent(config: Any) -> None:
    """Refuse a model of recurrent layers alone, and recurrent layers that do not compute the same in one way as in
    another. Only the families above come here.
    """
    name = config.model_type
    if not is_recurrent(config):
        return
    if not num_slot_layers(config):
        raise SparseRLError(f"{name} has recurrent layers alone here: it has no KV cache that could be compressed.")
    low, high = _time_steps(config)
    if low > _NO_TIME or high < math.inf:
        key, value = ("time_step_min", _NO_TIME) if name == "nemotron_h" else ("time_step_limit", "[0, Infinity]")
        raise SparseRLError(
            f"{name} limits its time steps to {low} .. {high} where it reads many tokens at once, but not where it "
            f"reads one: sampler and learner would compute different things; set {key} in its config.json to {value} "
            "first."
        )


def _time_steps(config: Any) -> tuple[float, float]:
    """The limits of a Mamba 2 layer's time steps, as transformers' modules read them."""
    if config.model_type == "nemotron_h":
        return config.time_step_min, math.inf
    low, high = getattr(config, "time_step_limit", None) or (0.0, math.inf)
    return low, high
