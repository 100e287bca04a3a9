"""Read from a config what each layer stores of a token. In most models all layers store the same; in Gemma 4 and
MiMo-V2-Flash those with sliding windows have other KV heads than the rest.

The attention compares this with what a layer hands over, so a config that says something else is refused.
"""

from __future__ import annotations

from typing import Any

from ..cache import LayerShape
from ..cache.states import slot_layers
from ..errors import SparseRLError, require_int


def layer_shapes(config: Any) -> tuple[LayerShape, ...]:
    """What every layer that has slots stores of a token."""
    if getattr(config, "kv_lora_rank", None):  # one latent and one rotated key for all heads
        shape = LayerShape(1, config.kv_lora_rank + config.qk_rope_head_dim, 0)
        return (shape,) * num_slot_layers(config)
    shapes = tuple(_shape_of(config, layer) for layer in _storing(config))
    most = max((shape.heads for shape in shapes), default=1)
    for shape in shapes:  # a layer's heads are every so many of the trace's
        if most % shape.heads:
            raise SparseRLError(
                f"{config.model_type} has layers with {shape.heads} and others with {most} KV heads, which is no "
                "multiple of it: a trace cannot record both."
            )
    return shapes


def num_slot_layers(config: Any) -> int:
    """Layers that have slots: all, but for those that only keep a state, mix no tokens, or read another's slots."""
    return len(_storing(config))


def num_slot_heads(config: Any) -> int:
    """KV heads of the layer that stores most: one where slots hold latents."""
    return max((shape.heads for shape in layer_shapes(config)), default=1)


def _storing(config: Any) -> list[int]:
    """The layer that stores, of every set of slots: the first of those that read it."""
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return list(range(config.num_hidden_layers))
    shared = getattr(config, "num_kv_shared_layers", None) or 0
    first: dict[int, int] = {}
    for layer, number in slot_layers(tuple(kinds[: config.num_hidden_layers]), shared).items():
        first.setdefault(number, layer)
    return [first[number] for number in sorted(first)]


def _shape_of(config: Any, layer: int) -> LayerShape:
    heads, width = _heads(config, layer), _width(config, layer)
    values = config.v_head_dim if config.model_type == _MIMO else width
    sizes = {"num_key_value_heads": heads, "head_dim": width, "v_head_dim": values}
    require_int(**{f"{key} of the model's config": value for key, value in sizes.items()})
    return LayerShape(heads, width, values)


_MIMO = "mimo_v2_flash"
_GEMMA_4 = {"gemma4_text", "gemma4_unified_text"}


def _heads(config: Any, layer: int) -> int:
    """KV heads of a layer."""
    name = config.model_type
    if name == "gpt_bigcode" and config.multi_query:
        return 1
    if name == "falcon":
        return config.num_kv_heads if config.new_decoder_architecture or not config.multi_query else 1
    if name == "jetmoe":  # every expert of a token has queries of its own, for keys that all of them share
        return config.num_attention_heads
    heads = None
    if _is_global(config, layer) and getattr(config, "attention_k_eq_v", False):
        heads = getattr(config, "num_global_key_value_heads", None)
    heads = _setting(config, layer, "num_key_value_heads") if heads is None else heads
    heads = config.num_attention_heads if heads is None else heads
    doubled = name == _MIMO and config.layer_types[layer] == "sliding_attention"
    return 2 * heads if doubled else heads


def _width(config: Any, layer: int) -> int:
    """The width of a layer's heads."""
    width = getattr(config, "global_head_dim", None) if _is_global(config, layer) else None
    width = _setting(config, layer, "head_dim") if width is None else width
    return config.hidden_size // config.num_attention_heads if width is None else width


def _is_global(config: Any, layer: int) -> bool:
    """Whether a layer has settings of its own, under other names: full layers of Gemma 4 in older versions."""
    old = config.model_type in _GEMMA_4 and not getattr(config, "per_layer_config", None)
    return old and config.layer_types[layer] == "full_attention"


def _setting(config: Any, layer: int, key: str) -> Any:
    """A setting of one layer. Where layers differ, transformers answers for each alone, or has a list."""
    layers = getattr(config, "per_layer_config", None)
    value = getattr(layers[layer] if layers else config, key, None)
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) != config.num_hidden_layers:
        raise SparseRLError(
            f"{config.model_type} has a {key} for {len(value)} layers but {config.num_hidden_layers} layers: repair "
            "its config.json."
        )
    return value[layer]
