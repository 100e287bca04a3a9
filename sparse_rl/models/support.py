"""Refuse models whose own cache a slot cache cannot replace, and say why."""

from __future__ import annotations

from torch import nn

from ..cache.states import LAYERS_WITHOUT_SLOTS, RECURRENT_LAYERS
from ..errors import SparseRLError, require_int
from .states import FAMILIES, check_recurrent


def check_model(model: nn.Module) -> None:
    """Refuse models that are not from transformers, before anything runs."""
    from transformers import PreTrainedModel

    outermost = next((m for m in model.modules() if isinstance(m, PreTrainedModel)), None)
    if outermost is None or getattr(model, "config", None) is None:
        raise SparseRLError(f"{type(model).__name__} is not a transformers model: pass a Hugging Face causal LM.")


def check_sliding_windows(config, windows: list[int | None]) -> None:
    """Refuse a model whose config has sliding windows that its layers did not pass to the attention.

    `windows`: the window that each layer with slots passed.
    """
    config = config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        with_slots = [(i, kind) for i, kind in enumerate(kinds) if kind not in LAYERS_WITHOUT_SLOTS]
        lost = [
            i
            for (i, kind), window in zip(with_slots, windows, strict=False)
            if kind == "sliding_attention" and window is None
        ]
    else:
        slides = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
        lost = list(range(len(windows))) if slides and not any(windows) else []
    if lost:
        raise SparseRLError(
            f"{config.model_type} has sliding windows in layers {lost} but does not pass them to its attention, "
            "which would see beyond them here: this architecture is not supported."
        )


_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
_OTHER_LAYERS = {  # by type: what layers of it do
    "compressed_sparse_attention": "attend to summaries of several tokens, which an indexer chooses",
    "heavily_compressed_attention": "attend to summaries of many tokens",
    "indexed_attention": "attend to what an indexer chooses for each query",
    "hybrid": "keep a state of a kind not known here beside their keys and values",
    "hybrid_sliding": "keep a state of a kind not known here beside their keys and values",
    **dict.fromkeys(RECURRENT_LAYERS - {"hybrid"}, "are recurrent and keep states of a kind not known here"),
}
_OTHER_MODELS = {  # whose config alone does not say it
    "cpmant": "adds a learned bias to its attention logits, and its prompts see all of themselves",
    "whisper": "is the decoder of a speech model and attends to audio",
}
_CHUNKED = "chunked_attention"  # served as far as the first chunk goes, where it is full attention (`hard_limits`)
# Models whose last layers attend with the keys and values of the last layer of their type before them.
_SHARING = {"gemma3n_text", "gemma4_text", "gemma4_unified_text"}
# Models whose latents are one KV head with the matrices absorbed (attention/latent.py).
_LATENT = {"axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "longcat_flash", "minicpm3", "youtu"}


def check_supported(config) -> None:
    """Refuse a config that a slot cache cannot serve. The attention refuses what only shows when the model runs."""
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise SparseRLError(f"{name} is an encoder-decoder; only decoder-only causal LMs are supported.")
    if name in _OTHER_MODELS:
        raise SparseRLError(f"{name} {_OTHER_MODELS[name]}: this architecture is not supported.")
    if _of_all_layers(config, "num_attention_heads") is None:
        raise SparseRLError(
            f"{name} has no num_attention_heads in its config: without attention there are no keys and values that "
            "could be evicted."
        )
    if getattr(config, "use_bidirectional_attention", False) not in (False, None, "vision"):
        raise SparseRLError(f"{name} is set to bidirectional attention; a cache can only serve causal attention.")
    if (shared := getattr(config, "num_kv_shared_layers", None) or 0) and name not in _SHARING:
        raise SparseRLError(
            f"{name} shares keys and values between its last {shared} layers in a way that is not known here: "
            "this architecture is not supported."
        )
    others = sorted(set(getattr(config, "layer_types", None) or []) - _SUPPORTED_LAYERS - {_CHUNKED})
    if name in FAMILIES:
        others = [kind for kind in others if kind not in RECURRENT_LAYERS | LAYERS_WITHOUT_SLOTS]
    if others:
        reasons = [f"{kind} layers {_OTHER_LAYERS.get(kind, 'are of a type not known here')}" for kind in others]
        raise SparseRLError(f"{name} cannot be replayed: its {'; its '.join(reasons)}.")
    if (chosen := getattr(config, "index_topk", None)) is not None:
        raise SparseRLError(
            f"{name} cannot be replayed: an indexer with keys of its own chooses the {chosen} tokens that a query sees."
        )
    if getattr(config, "kv_lora_rank", None) and name not in _LATENT:
        raise SparseRLError(f"{name} has latent keys and values of a kind not known here: it is not supported.")
    for key in ("num_hidden_layers", "num_attention_heads", "max_position_embeddings", "vocab_size", "hidden_size"):
        value = context_of(config) if key == "max_position_embeddings" else _of_all_layers(config, key)
        if value is None:
            raise SparseRLError(f"{name} has no {key} in its config: this architecture is not supported.")
        require_int(**{f"{key} of the model's config": value})
    check_recurrent(config)


def context_of(config) -> int | None:
    """Positions the model was made for, by whatever name its config has for them."""
    if (found := getattr(config, "max_position_embeddings", None) or getattr(config, "max_seq_len", None)) is not None:
        return found
    return 2048 if config.model_type == "bloom" else None  # its config does not say; it was trained with so many


def hard_limits(config) -> list[int]:
    """Positions beyond which attention is another: chunks begin, or queries are scaled (Llama 4)."""
    limits = []
    if _CHUNKED in (getattr(config, "layer_types", None) or []):
        limits.append(config.attention_chunk_size)
    if getattr(config, "attn_temperature_tuning", None) and getattr(config, "floor_scale", None):
        limits.append(int(config.floor_scale) - 1)
    return limits


def _of_all_layers(config, key: str):
    """A size from a config, which must be one for all layers; None where the config has none."""
    try:
        value = getattr(config, key, None)
    except RuntimeError as error:
        raise SparseRLError(
            f"{config.model_type} has another {key} in some layers than in others, where only KV heads and head dims "
            "may differ: this architecture is not supported."
        ) from error
    if isinstance(value, (list, tuple)):
        if len(set(value)) != 1:
            raise SparseRLError(
                f"{config.model_type} has a {key} per layer, {list(value)[:8]}, where only KV heads and head dims may "
                "differ: this architecture is not supported."
            )
        return value[0]
    return value
