"""Attention written out under a mask that is made of a trace: an independent reference of the shadow view."""

from collections.abc import Callable, Sequence

import torch
from transformers import AttentionInterface


def explicit_logprobs(
    model,
    trajectory,
    slots: Sequence[int],
    window: Callable = lambda module: None,
    stored: Callable = lambda x, layer: x,
) -> torch.Tensor:
    """Of the response tokens, with their gradient.

    slots: which layer of the trace each layer reads; a head of it may serve several KV heads. window: a layer's own.
    stored: keys or values as slots of a layer hold them, without a gradient of their own. A layer's attention sinks
    are one more column of the softmax, which gives nothing.
    """
    evicted_at, index = trajectory.trace.evicted_at.long(), torch.arange(len(trajectory.tokens))

    def attention(module, query, key, value, attention_mask, scaling=None, s_aux=None, **kwargs):
        key, value = (x + (stored(x.detach(), slots[module.layer_idx]) - x.detach()) for x in (key, value))
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        gone = evicted_at[slots[module.layer_idx]]  # [heads of the trace, T]
        seen = (index <= index[:, None]) & (index[:, None] < gone[:, None])
        if window(module) is not None:
            seen = seen & (index[:, None] - index < window(module))
        mask = seen.repeat_interleave(query.shape[1] // len(gone), 0)
        logits = (query @ key.transpose(-1, -2) * scaling).masked_fill(~mask, -torch.inf)
        if s_aux is not None:
            sinks = s_aux.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
            return (torch.cat([sinks, logits], -1).softmax(-1)[..., 1:] @ value).transpose(1, 2), None
        return (logits.softmax(-1) @ value).transpose(1, 2), None

    AttentionInterface.register("explicit-trace", attention)
    before = model.config._attn_implementation
    try:
        model.set_attn_implementation("explicit-trace")
        logits = model(trajectory.tokens[None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(before)
    chosen = logits.log_softmax(-1)[:-1].gather(1, trajectory.tokens[1:, None])[:, 0]
    return chosen[trajectory.num_prompt_tokens - 1 :]


def compare_gradients(own, other, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    """The same log-probs, and the same gradients of a random sum of them, in two copies of a model."""
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    weights = torch.randn(len(mine), generator=torch.Generator().manual_seed(0))
    (mine * weights).sum().backward()
    (theirs * weights).sum().backward()
    moved = 0
    for (name, here), there in zip(own.named_parameters(), other.parameters(), strict=True):
        assert (here.grad is None) == (there.grad is None), name
        if there.grad is not None:
            scale = max(1.0, there.grad.abs().max().item())
            torch.testing.assert_close(here.grad, there.grad, rtol=1e-3, atol=1e-4 * scale, msg=name)
            moved += bool(there.grad.any())
    assert moved
