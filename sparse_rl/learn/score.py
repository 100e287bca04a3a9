"""Log-probs of tokens that are already there, in the learner's view: dense (stock attention) or shadow (under a trace).

The model's own forward makes the logits, whatever it does to them, once and in its own dtype; their fp32 softmax exists for a chunk of
tokens at a time, and is made again during backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import use_attention_through_backward
from ..cache import Trace
from ..errors import SparseRLError

CHUNK = 1024  # tokens whose fp32 logits exist at a time


def token_logprobs(model: nn.Module, tokens: Tensor, trace: Trace | None = None, temperature: float = 1.0) -> Tensor:
    """fp32 [T]: the log-prob of each token given those before it; 0 for the first. Differentiable.

    tokens [T]. Without a trace every token sees all before it; with one, exactly what the sampler's cache still held. Temperature 0
    reads as 1, as in the sampler.
    """
    device = next(model.parameters()).device
    tokens = torch.as_tensor(tokens, device=device)
    inputs = {"input_ids": tokens[None], "position_ids": torch.arange(len(tokens), device=device)[None], "use_cache": False}
    if trace is None:
        logits = model(**inputs).logits[0, :-1]  # [T - 1, V]
    else:
        _check_trace(model, tokens, trace)
        with use_attention_through_backward(model, "shadow"):
            logits = model(**inputs, evicted_at=trace.evicted_at.to(device=device, dtype=torch.int32)[None]).logits[0, :-1]
    return torch.cat([logits.new_zeros(1, dtype=torch.float32), chosen_logprobs(logits, tokens[1:], temperature or 1.0)])


def chosen_logprobs(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """fp32 log-probs of the targets, chunk by chunk. logits [N, V] in any dtype, targets [N] -> [N]"""

    def chunk(part: Tensor, target: Tensor) -> Tensor:
        part = part.float() / temperature
        return part.gather(1, target[:, None])[:, 0] - part.logsumexp(-1)

    parts = zip(logits.split(CHUNK), targets.split(CHUNK), strict=True)
    return torch.cat([checkpoint(chunk, part, target, use_reentrant=False) for part, target in parts])


def _check_trace(model: nn.Module, tokens: Tensor, trace: Trace) -> None:
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    expected = (config.num_hidden_layers, heads, len(tokens))
    if tuple(trace.evicted_at.shape) != expected:
        raise SparseRLError(
            f"the trace is for (layers, KV heads, tokens) {tuple(trace.evicted_at.shape)} but this model and these tokens have {expected}; "
            "it belongs to another trajectory or another model."
        )
