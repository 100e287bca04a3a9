"""A bf16 model whose logits are large, and how far its learner is from its sampler."""

import torch
from torch import nn

from sparse_rl import Engine, Sampling, token_logprobs
from tests.helpers.models import prompts_of, tiny


def bf16(name: str = "llama", **changes) -> nn.Module:
    """Made anew, with logits that share a large part, as those of trained models do."""
    model = tiny.__wrapped__(name, **changes).bfloat16()
    with torch.no_grad():
        weight = model.get_output_embeddings().weight
        weight += 4 * torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
    return model


def mean_gap(model: nn.Module, compressor: str, view: str) -> float:
    """Nats between learner and sampler, per response token. It bypasses `score`, which refuses so large a gap."""
    engine = Engine(model, compressor, budget=16, interval=8, rows=8)
    sampling = Sampling(60, stop_ids=(), for_correction=True)
    gaps = []
    with torch.no_grad():
        for t in engine.generate(prompts_of(9, 30, 12), 4, sampling, seed=3):
            learner = token_logprobs(model, t.tokens, t.trace if view == "shadow" else None).cpu()
            gaps.append((learner - t.sampler_logprobs)[t.num_prompt_tokens :].abs())
    return torch.cat(gaps).mean().item()
