"""`ModelShape`: what the engine must know about a model before it runs, read from its config alone. Also public
architectures by name, the bytes of a model's weights, and dtypes by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..cache import CacheShape
from ..errors import SparseRLError, nearest
from .support import check_supported

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
    layers: int
    heads: int  # KV heads
    query_heads: int
    head_dim: int
    vocabulary: int
    hidden: int
    intermediate: int
    context: int  # positions the model was made for
    hard_context: int | None  # positions that must not be exceeded: rescaling RoPE, or a table of learned positions
    dtype: torch.dtype

    @classmethod
    def of(cls, config, dtype: torch.dtype | None = None) -> ModelShape:
        config = config.get_text_config(decoder=True)
        check_supported(config)
        query_heads = config.num_attention_heads
        ropes = _rope_parameters(config)
        limits = [
            r.get("original_max_position_embeddings") or config.max_position_embeddings for r in ropes if _rescales(r)
        ]
        if not any(ropes):
            limits.append(config.max_position_embeddings)
        return cls(
            architecture=config.model_type,
            layers=config.num_hidden_layers,
            heads=getattr(config, "num_key_value_heads", None) or query_heads,
            query_heads=query_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // query_heads,
            vocabulary=config.vocab_size,
            hidden=config.hidden_size,
            intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
            context=config.max_position_embeddings,
            hard_context=min(limits, default=None),
            dtype=dtype or config.dtype or torch.float32,
        )

    def cache_shape(self) -> CacheShape:
        return CacheShape(self.layers, self.heads, self.query_heads, self.head_dim, self.head_dim, self.dtype)


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
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = (kind or AutoModelForCausalLM).from_config(config, trust_remote_code=False)
    except Exception as error:  # settings that do not fit together lead to errors of any type
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise SparseRLError(f"no model can be made from this config ({why}); repair its config.json.") from error
    return sum(p.numel() for p in model.parameters()) * (dtype or config.dtype or torch.float32).itemsize


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
