"""Log-probs of tokens that are already there, in the learner's view: dense (stock attention) or shadow (under a trace).

The logits of all tokens, [T, vocabulary], never exist: the head runs on a chunk of tokens at a time, and again during backward.
Models whose logits are more than head(hidden), soft-capped or scaled ones, are noticed by a two-token probe and go the plain way.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import use_attention_through_backward
from ..cache import Trace
from ..errors import SparseRLError
from ..models import evaluating

CHUNK = 1024  # tokens whose logits exist at a time
_PLAIN_HEAD: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def token_logprobs(model: nn.Module, tokens: Tensor, trace: Trace | None = None, temperature: float = 1.0) -> Tensor:
    """fp32 [T]: the log-prob of each token given those before it; 0 for the first. Differentiable.

    tokens [T]. Without a trace every token sees all before it; with one, exactly what the sampler's cache still held. Temperature 0
    reads as 1, as in the sampler.
    """
    has_plain_head(model)  # asked here, while the model still has its own attention
    device = next(model.parameters()).device
    tokens = torch.as_tensor(tokens, device=device)
    inputs = {"input_ids": tokens[None], "position_ids": torch.arange(len(tokens), device=device)[None], "use_cache": False}
    if trace is None:
        logprobs = next_token_logprobs(model, inputs, tokens[1:], temperature)
    else:
        _check_trace(model, tokens, trace)
        inputs["evicted_at"] = trace.evicted_at.to(device=device, dtype=torch.int32)[None]
        with use_attention_through_backward(model, "shadow"):
            logprobs = next_token_logprobs(model, inputs, tokens[1:], temperature)
    return torch.cat([logprobs.new_zeros(1), logprobs])


def next_token_logprobs(model: nn.Module, inputs: dict, targets: Tensor, temperature: float) -> Tensor:
    """fp32 [T - 1]: the log-prob of each target after the tokens before it. targets [T - 1]"""
    temperature = temperature or 1.0
    if not has_plain_head(model):
        logits = model(**inputs).logits[0, :-1]
        parts = zip(logits.split(CHUNK), targets.split(CHUNK), strict=True)
        return torch.cat([_chosen(part, target, temperature) for part, target in parts])
    hidden = model.get_decoder()(**inputs).last_hidden_state[0, :-1]  # [T - 1, width]
    head = model.get_output_embeddings()

    def chunk(part: Tensor, target: Tensor) -> Tensor:
        return _chosen(head(part), target, temperature)

    parts = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
    return torch.cat([checkpoint(chunk, part, target, use_reentrant=False) for part, target in parts])


def _chosen(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    logits = logits.float() / temperature
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


@torch.no_grad()
def has_plain_head(model: nn.Module) -> bool:
    """Whether the model's logits are exactly head(last hidden state), asked once per model with two tokens."""
    if model not in _PLAIN_HEAD:
        tokens = torch.tensor([[0, 1]], device=next(model.parameters()).device)
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        with evaluating(model):
            logits = model(input_ids=tokens, use_cache=False).logits
            _PLAIN_HEAD[model] = torch.equal(head(decoder(input_ids=tokens, use_cache=False).last_hidden_state), logits)
    return _PLAIN_HEAD[model]


def _check_trace(model: nn.Module, tokens: Tensor, trace: Trace) -> None:
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    expected = (config.num_hidden_layers, heads, len(tokens))
    if tuple(trace.evicted_at.shape) != expected:
        raise SparseRLError(
            f"the trace is for (layers, KV heads, tokens) {tuple(trace.evicted_at.shape)} but this model and these tokens have {expected}; "
            "it belongs to another trajectory or another model."
        )
