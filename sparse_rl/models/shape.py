"""`ModelShape`: what the engine must know about a model before it runs, read from its config alone. Also shapes of
public architectures by name, the bytes of a model's weights, and dtypes by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..cache import CacheShape, LayerShape, LayerState
from ..cache.segments import WIDEST_HEAD
from ..errors import SparseRLError, nearest
from .layers import layer_shapes
from .states import layer_states
from .support import check_supported, context_of, hard_limits

# Public architectures: enough to plan memory, or to measure speed with random weights, without a download.
# (model type, hidden, feed-forward, layers, query heads, KV heads, head dim, vocabulary, tied embeddings, context)
SHAPES = {
    "qwen2.5-0.5b": ("qwen2", 896, 4864, 24, 14, 2, 64, 151936, True, 32768),
    "qwen2.5-1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True, 131072),
    "qwen2.5-3b": ("qwen2", 2048, 11008, 36, 16, 2, 128, 151936, True, 32768),
    "qwen2.5-7b": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False, 131072),
    "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, True, 40960),
    "qwen3-1.7b": ("qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True, 40960),
    "qwen3-4b": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True, 40960),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False, 40960),
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, True, 131072),
    "llama-3.2-3b": ("llama", 3072, 8192, 28, 24, 8, 128, 128256, True, 131072),
}


@dataclass(frozen=True)
class ModelShape:
    """What a model's config says about its cache."""

    architecture: str
    layers: int  # all of them
    slot_layers: int  # those that have slots
    heads: int  # KV heads; where layers differ, of the layer that has most
    query_heads: int
    head_dim: int  # of keys, the largest
    vocabulary: int
    hidden: int
    intermediate: int
    context: int  # positions the model was made for
    hard_context: int | None  # positions that must not be exceeded: rescaling RoPE, a table of positions, `hard_limits`
    dtype: torch.dtype
    states: tuple[LayerState, ...] = ()  # of recurrent layers
    by_layer: tuple[LayerShape, ...] = ()  # where layers with slots differ in KV heads or head dims; (): all are alike
    latent: tuple[int, int] | None = None  # numbers of the latent and of the rotated key that a slot holds (MLA)
    value_dim: int | None = None  # of a head in the learner, where it is not head_dim

    @classmethod
    def of(cls, config, dtype: torch.dtype | None = None) -> ModelShape:
        config = config.get_text_config(decoder=True)
        check_supported(config)
        context = context_of(config)
        assert context is not None
        query_heads = config.num_attention_heads
        shapes, latent = layer_shapes(config), None
        head_dim, value_dim = (max(dims) for dims in zip(*((shape.key_dim, shape.value_dim) for shape in shapes)))
        if getattr(config, "kv_lora_rank", None):
            latent = (config.kv_lora_rank, config.qk_rope_head_dim)
            head_dim, value_dim = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        ropes = _rope_parameters(config)
        limits = [
            r.get("original_max_position_embeddings") or config.max_position_embeddings for r in ropes if _rescales(r)
        ]
        limits += hard_limits(config)
        if not any(ropes) and config.model_type != "bloom":  # whose biases go on without end
            limits.append(context)
        return cls(
            architecture=config.model_type,
            layers=config.num_hidden_layers,
            slot_layers=len(shapes),
            heads=max(shape.heads for shape in shapes),
            query_heads=query_heads,
            head_dim=head_dim,
            vocabulary=config.vocab_size,
            hidden=config.hidden_size,
            intermediate=_intermediate(config),
            context=context,
            hard_context=min(limits, default=None),
            dtype=dtype or config.dtype or torch.float32,
            states=layer_states(config),
            by_layer=shapes if len(set(shapes)) > 1 else (),
            latent=latent,
            value_dim=None if value_dim == head_dim else value_dim,
        )

    @property
    def key_numbers(self) -> int:
        """Numbers of a token's keys, in the learner's largest layer."""
        if self.by_layer:
            return max(shape.heads * shape.key_dim for shape in self.by_layer)
        heads = self.query_heads if self.latent else self.heads  # the learner expands latents for all heads
        return heads * self.head_dim

    @property
    def learner_masks(self) -> int:
        """Masks of tokens x tokens that a layer of the learner needs under a trace, on a GPU. 0: it goes by segments"""
        if max(self.head_dim, self.value_dim or 0) <= WIDEST_HEAD:
            return 0
        return 1 if self.latent else self.query_heads

    def cache_shape(self) -> CacheShape:
        key, value = (sum(self.latent), 0) if self.latent else (self.head_dim, self.value_dim or self.head_dim)
        return CacheShape(
            self.slot_layers, self.heads, self.query_heads, key, value, self.dtype,
            states=self.states, by_layer=self.by_layer, latent=self.latent[0] if self.latent else 0,
        )  # fmt: skip


def _intermediate(config) -> int:
    """The width of the feed-forward part that one token goes through: of a mixture, its experts side by side."""
    dense = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    dense = max(dense) if isinstance(dense, (list, tuple)) else dense  # one per layer
    chosen = getattr(config, "num_experts_per_tok", None)
    if not isinstance(chosen, int):
        return dense
    of_each = getattr(config, "moe_intermediate_size", None) or dense
    shared = getattr(config, "shared_expert_intermediate_size", None) or 0
    return max(dense, chosen * of_each + shared)


def _rope_parameters(config) -> list[dict]:
    """All RoPE settings of a config: one dict, or one per layer type."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [r for r in rope.values() if isinstance(r, dict) and "rope_type" in r]
    return nested or [rope]


def _rescales(rope: dict) -> bool:
    """Whether this RoPE changes with the length of the sequence, which would falsify keys that are already cached."""
    return rope.get("rope_type") in ("dynamic", "longrope")


def shape_config(name: str):
    """The config of a public architecture, in bf16."""
    from transformers import AutoConfig

    kind, hidden, intermediate, layers, query_heads, heads, head_dim, vocabulary, tied, context = SHAPES[name]
    return AutoConfig.for_model(
        kind,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=query_heads,
        num_key_value_heads=heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=context,
        dtype="bfloat16",
    )


def weight_bytes(config, dtype: torch.dtype | None = None, kind: Any = None) -> int:
    """Bytes of a model's parameters, counted on a model without storage. `kind`: transformers' class that makes it."""
    parameters = without_storage(config, kind).parameters()
    return sum(p.numel() for p in parameters) * (dtype or config.dtype or torch.float32).itemsize


def without_storage(config, kind: Any = None) -> nn.Module:
    """The model of a config, with parameters that have shapes and no values."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            return (kind or AutoModelForCausalLM).from_config(config, trust_remote_code=False)
    except Exception as error:  # settings that do not fit together lead to errors of any type
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise SparseRLError(f"no model can be made from this config ({why}); repair its config.json.") from error


def head_chunk(vocabulary: int) -> int:
    """Tokens whose logits exist at a time while learning: at least 1,024, or 16 MiB of fp32 for a small vocabulary."""
    return max(1024, 2**22 // vocabulary)


MLP_CHUNK = 8192  # tokens that pass through an MLP together where the learner's rows are long


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str | None) -> torch.dtype | None:
    """A dtype by name; None stands for the model's own dtype."""
    if name is not None and name not in DTYPES:
        raise SparseRLError(f"there is no dtype {name!r}; {nearest(name, DTYPES)}")
    return DTYPES[name] if name else None
