"""Multi-head latent attention (DeepSeek V2 and V3, Kimi, GLM 4 MoE lite, MiniCPM3): slots hold latents.

A layer makes keys and values of all heads from one latent c [r] and one rotated key k_R per token, by matrices
U_K [heads, n, r] and U_V [heads, v, r]:

    logit  = q_N . (U_K c) + q_R . k_R = (U_K^T q_N ; q_R) . (c ; k_R)
    output = sum_k p_k U_V c_k         = U_V sum_k p_k c_k

So with the matrices absorbed into query and output it is attention of many query heads over one KV head, whose keys are
(c ; k_R) and whose values are c. That one head is what slots hold, compressors score and traces record. The learner
computes keys and values of all heads, as the model does, and hides from all of them what was evicted.

Shapes: B rows, T tokens, H query heads, n unrotated and R rotated numbers of a query, r of a latent, v of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..errors import SparseRLError

if TYPE_CHECKING:
    from .slots import Feed


def absorbed(module: Any, query: Tensor, feed: Feed) -> tuple[Tensor, Tensor, Tensor]:
    """query [B, H, T, n + R] -> absorbed query [B, H, T, r + R], key [B, 1, T, r + R], value [B, 1, T, r]"""
    latent, rotated = feed.latents.pop(module.layer_idx, (None, None))
    if latent is None or rotated is None or latent.shape[1] != 1 or latent.shape[3] != module.kv_lora_rank:
        raise SparseRLError(
            f"{type(module).__name__} does not hand its latents to the cache in this version of transformers: "
            "update transformers."
        )
    unrotated = query.shape[-1] - rotated.shape[-1]
    keys, _ = _matrices(module, unrotated)
    inner = torch.einsum("bhtn,hnr->bhtr", query[..., :unrotated], keys)
    return torch.cat([inner, query[..., unrotated:]], -1), torch.cat([latent, rotated], -1), latent


def expanded(module: Any, out: Tensor) -> Tensor:
    """What the heads read of the latents, as values. [B, T, H, r] -> [B, T, H, v]"""
    _, values = _matrices(module, module.qk_nope_head_dim)
    return torch.einsum("bthr,hvr->bthv", out, values)


def _matrices(module: Any, unrotated: int) -> tuple[Tensor, Tensor]:
    """U_K [H, n, r] and U_V [H, v, r], adapters included."""
    layer = module.kv_b_proj
    if type(layer) is nn.Linear:
        both = layer.weight
    else:  # what it makes of every unit vector
        both = layer(torch.eye(module.kv_lora_rank, dtype=layer.weight.dtype, device=layer.weight.device)).t()
    both = both.view(-1, unrotated + module.v_head_dim, module.kv_lora_rank)
    return both[:, :unrotated], both[:, unrotated:]
