"""A bf16 model whose logits are large, and how far its learner is from its sampler."""

import torch
from torch import nn

from sparse_rl import Engine, Sampling
from sparse_rl.learn.batch import collate, score
from tests.helpers.models import prompts_of, tiny


def bf16(name: str = "llama", **changes) -> nn.Module:
    """Made anew, with logits that share a large part, as those of trained models do."""
    model = tiny.__wrapped__(name, **changes).bfloat16()
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight += 4 * torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    return model


def mean_gap(model: nn.Module, compressor: str, view: str) -> float:
    engine = Engine(model, compressor, budget=16, interval=8, rows=8)
    sampled = collate(engine.generate(prompts_of(9, 30, 12), 4, Sampling(60, stop_ids=(), for_correction=True), seed=3))
    return score(model, sampled, 4096, view=view).gap[sampled.mask].abs().mean().item()
