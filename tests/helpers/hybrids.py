"""Tiny random models with recurrent layers, one of each family."""

import functools

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.helpers.models import SMALL

_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_DELTA = dict(
    head_dim=8,
    layer_types=_LINEAR,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
)
_EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
_MAMBA2 = dict(mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=16)
HYBRIDS: dict[str, dict] = {
    "qwen3_5_text": _DELTA,
    "qwen3_next": dict(**_DELTA, **_EXPERTS, shared_expert_intermediate_size=16),
    "olmo_hybrid": dict(**_DELTA),
    "falcon_h1": dict(**_MAMBA2, mamba_d_ssm=64, head_dim=8),
    "bamba": dict(**_MAMBA2, attn_layer_indices=[1]),
    "granitemoehybrid": dict(
        **_MAMBA2, layer_types=_LINEAR, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=32
    ),
    "nemotron_h": dict(
        num_hidden_layers=4,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        chunk_size=16,
        head_dim=8,
        time_step_min=1e-9,
    ),
    "jamba": dict(attn_layer_period=3, attn_layer_offset=1, num_experts=2, mamba_d_state=8, mamba_dt_rank=4),
    "lfm2": dict(layer_types=["conv", "full_attention", "conv"]),
}


@functools.cache
def hybrid(name: str, **changes):
    """A tiny random hybrid in fp32, made once."""
    config = AutoConfig.for_model(name, **{**SMALL, **HYBRIDS[name], **changes})
    torch.manual_seed(len(name))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.15)  # with 0.25, transformers' chunked and stepwise forms differ by 1e-3 nats
            elif parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model
