"""Log-probs of tokens that are already there, in the learner's view: dense (stock attention) or shadow (under a trace)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..attention import use_attention_through_backward
from ..cache import Trace
from ..errors import SparseRLError


def token_logprobs(model: nn.Module, tokens: Tensor, trace: Trace | None = None, temperature: float = 1.0) -> Tensor:
    """fp32 [T]: the log-prob of each token given those before it; 0 for the first. Differentiable.

    tokens [T]. Without a trace every token sees all before it; with one, exactly what the sampler's cache still held. Temperature 0
    reads as 1, as in the sampler.
    """
    device = next(model.parameters()).device
    tokens = torch.as_tensor(tokens, device=device)
    inputs = {"input_ids": tokens[None], "position_ids": torch.arange(len(tokens), device=device)[None], "use_cache": False}
    if trace is None:
        logits = model(**inputs).logits[0]  # [T, V]
    else:
        _check_trace(model, tokens, trace)
        with use_attention_through_backward(model, "shadow"):
            logits = model(**inputs, evicted_at=trace.evicted_at.to(device=device, dtype=torch.int32)[None]).logits[0]
    logits = logits[:-1].float() / (temperature or 1.0)
    chosen = logits.gather(1, tokens[1:, None])[:, 0]
    return torch.cat([chosen.new_zeros(1), chosen - logits.logsumexp(-1)])


def _check_trace(model: nn.Module, tokens: Tensor, trace: Trace) -> None:
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    expected = (config.num_hidden_layers, heads, len(tokens))
    if tuple(trace.evicted_at.shape) != expected:
        raise SparseRLError(
            f"the trace is for (layers, KV heads, tokens) {tuple(trace.evicted_at.shape)} but this model and these tokens have {expected}; "
            "it belongs to another trajectory or another model."
        )
