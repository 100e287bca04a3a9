"""Tiny random models of every architecture, and prompts for them."""

import functools

import torch
import transformers
from transformers import AutoModelForCausalLM

VOCABULARY = 61


SLIDING = 24  # shorter than the sequences in these tests


SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    initializer_range=0.3,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)


_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA = dict(head_dim=8, sliding_window=SLIDING, query_pre_attn_scalar=12)


CONFIGS = {
    "qwen2": ("Qwen2Config", {}),
    "qwen2-sliding": ("Qwen2Config", dict(use_sliding_window=True, sliding_window=SLIDING, max_window_layers=1)),
    "qwen3": ("Qwen3Config", dict(head_dim=16)),
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", dict(sliding_window=SLIDING)),
    "phi3": ("Phi3Config", dict(sliding_window=SLIDING)),
    "gemma2": ("Gemma2Config", dict(**_GEMMA, attn_logit_softcapping=3.0)),
    "gemma3": ("Gemma3TextConfig", dict(**_GEMMA, layer_types=_MIXED)),
    "olmo2": ("Olmo2Config", {}),
    "gpt-oss": (
        "GptOssConfig",
        dict(head_dim=8, sliding_window=SLIDING, num_local_experts=4, num_experts_per_tok=2, layer_types=_MIXED),
    ),
    "smollm3": ("SmolLM3Config", dict(no_rope_layers=[1, 1, 0])),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        dict(head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True),
    ),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen2-moe": (
        "Qwen2MoeConfig",
        dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, shared_expert_intermediate_size=24),
    ),
    "olmoe": ("OlmoeConfig", dict(num_experts=8, num_experts_per_tok=2)),
}  # fmt: skip


MIXTURES = ["qwen3-moe", "qwen2-moe", "mixtral", "olmoe", "gpt-oss"]  # of experts
ARCHITECTURES = [name for name in CONFIGS if name not in ("qwen2-moe", "olmoe")]  # the same attention as others


@functools.cache
def tiny(name: str, **changes):
    """A tiny random model of an architecture, fp32, made once. `changes` override its config."""
    config_class, own = CONFIGS[name]
    config = getattr(transformers, config_class)(**{**SMALL, **own, **changes})
    attention = "eager" if name in ("gemma2", "gpt-oss") else "sdpa"  # stock sdpa refuses soft-caps and sinks
    with torch.random.fork_rng(), torch.no_grad():  # what a test draws next must not depend on who made the model
        torch.manual_seed(len(name))
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases and norms start out constant: make them count
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
