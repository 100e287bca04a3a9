"""Compute log-probs, entropies and ranks of target tokens from hidden states, for heads that are a single matrix.

    z = cap(h W^T) / temperature          logprob = z[target] - log sum exp z

Forward goes through the tokens chunk by chunk: one product and one pass over its result. Backward goes through the
vocabulary part by part, for all tokens together: the product again, one pass that turns logits into their gradients,
and two products. So a part's rows of dW are complete and rounded once, without an accumulation buffer of W's size; only
dh is accumulated, in fp32. [n, V] never exists, and no logit exists twice in fp32.

Shapes: n target tokens, N hidden size, V vocabulary. Nothing here depends on how the decoder was computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ..kernels import ops
from ..models import Float32Head, wide_product

# Models whose logits are their head's product, soft-capped if their config says so, and nothing else.
_FAMILIES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "qwen3_moe": "Qwen3Moe",
    "mixtral": "Mixtral",
    "gemma2": "Gemma2",
}
_KNOWN = {f"transformers.models.{room}.modeling_{room}.{name}ForCausalLM" for room, name in _FAMILIES.items()}
_KNOWN.add("transformers.models.gemma3.modeling_gemma3.Gemma3ForCausalLM")


@dataclass(frozen=True)
class PlainHead:
    weight: Tensor  # [V, N]
    softcap: float | None

    def statistics(
        self, hidden: Tensor, targets: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs and entropies of the targets, differentiable, and their ranks (1: likeliest). fp32 [n] each

        hidden [n, N]; targets int64 [n]; chunk: tokens whose logits exist at a time
        """
        hidden = hidden.to(self.weight.dtype)
        return _Statistics.apply(hidden, self.weight, targets, temperature, self.softcap, chunk)

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 [c, N] -> [c, V]"""
        return self.capped(_product(hidden.to(self.weight.dtype), self.weight))

    def logits_at(self, hidden: Tensor, ids: Tensor, chunk: int) -> Tensor:
        """The logits of only some ids, differentiable. hidden [n, N], int32 [n, K], -1 means none -> fp32 [n, K]"""
        return self.capped(_LogitsAt.apply(hidden.to(self.weight.dtype), self.weight, ids, chunk))

    def capped(self, logits: Tensor) -> Tensor:
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def plain_head(causal_lm: nn.Module) -> PlainHead | None:
    """A model's head, if its device has fused kernels and the logits are just its product; they are fp32 or wider."""
    kind, head = type(causal_lm), getattr(causal_lm, "lm_head", None)
    if f"{kind.__module__}.{kind.__qualname__}" not in _KNOWN or not isinstance(head, nn.Linear):
        return None
    weight = head.weight
    exact = type(head) is Float32Head or (type(head) is nn.Linear and weight.dtype.itemsize >= 4)
    whole = type(weight) in (nn.Parameter, Tensor) and weight.is_floating_point() and head.bias is None
    touched = any({"forward", "_hf_hook"} & vars(m).keys() or _hooks(m) for m in (causal_lm, head))
    touched = touched or torch.is_autocast_enabled(weight.device.type)  # the head itself would follow autocast
    if not (exact and whole and not touched and ops.rules(weight.device).fuses_learning):
        return None
    return PlainHead(weight, getattr(causal_lm.config, "final_logit_softcapping", None))


def _hooks(module: nn.Module) -> int:
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


class _Statistics(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, temperature, softcap, chunk):
        found = [
            ops.token_statistics(_product(part, weight), of_part, temperature, softcap)
            for part, of_part in zip(hidden.split(chunk), targets.split(chunk), strict=True)
        ]
        logprobs, entropies, ranks, lse = (torch.cat(parts) for parts in zip(*found, strict=True))
        ctx.save_for_backward(hidden, weight, targets, lse, entropies)
        ctx.temperature, ctx.softcap, ctx.chunk = temperature, softcap, chunk
        ctx.mark_non_differentiable(ranks)
        ctx.set_materialize_grads(False)
        return logprobs, entropies, ranks

    @staticmethod
    @once_differentiable
    def backward(ctx, from_logprobs, from_entropies, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, lse, entropies = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        if from_logprobs is None:
            from_logprobs = torch.zeros_like(lse)
        wide = torch.promote_types(weight.dtype, torch.float32)
        dtype = weight.dtype if weight.is_cuda else wide  # as the head itself does
        to_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device) if wants_hidden else None
        to_weight = torch.empty_like(weight) if wants_weight else None
        rows, start = hidden.to(dtype), 0
        for part in weight.split(vocabulary_part(len(hidden), len(weight), ctx.chunk)):
            gradients = ops.logit_gradients(
                _product(hidden, part), targets, lse, entropies, from_logprobs, from_entropies, start,
                ctx.temperature, ctx.softcap, dtype,
            )  # fmt: skip
            end = start + len(part)
            with torch.autocast(weight.device.type, enabled=False):
                if to_hidden is not None:
                    to_hidden += wide_product(gradients, part.to(dtype).t())
                if to_weight is not None and dtype == weight.dtype:
                    torch.mm(gradients.t(), rows, out=to_weight[start:end])
                elif to_weight is not None:
                    to_weight[start:end] = gradients.t() @ rows
            start = end
        return None if to_hidden is None else to_hidden.to(hidden.dtype), to_weight, None, None, None, None


class _LogitsAt(torch.autograd.Function):
    """Forward: the product chunk by chunk, of which only the ids are kept. Backward: their gradients are spread over
    parts of the vocabulary, where all others are 0, so the product is not needed again.
    """

    @staticmethod
    def forward(ctx, hidden, weight, ids, chunk):
        ctx.save_for_backward(hidden, weight, ids)
        ctx.chunk = chunk
        parts = zip(hidden.split(chunk), ids.clamp(min=0).split(chunk), strict=True)
        return torch.cat([_product(part, weight).gather(1, of_part.long()) for part, of_part in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, ids = ctx.saved_tensors
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        wide = torch.promote_types(weight.dtype, torch.float32)
        dtype = weight.dtype if weight.is_cuda else wide  # as the head itself does
        to_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device) if wants_hidden else None
        to_weight = torch.empty_like(weight) if wants_weight else None
        rows, upstream, start = hidden.to(dtype), upstream.masked_fill(ids < 0, 0.0).to(dtype), 0
        for part in weight.split(vocabulary_part(len(hidden), len(weight), ctx.chunk)):
            place, end = ids.long() - start, start + len(part)
            inside = (place >= 0) & (place < len(part))
            gradients = torch.zeros(len(hidden), len(part), dtype=dtype, device=hidden.device)
            gradients.scatter_add_(1, torch.where(inside, place, 0), torch.where(inside, upstream, 0.0))
            with torch.autocast(weight.device.type, enabled=False):
                if to_hidden is not None:
                    to_hidden += wide_product(gradients, part.to(dtype).t())
                if to_weight is not None:
                    to_weight[start:end] = gradients.t() @ rows
            start = end
        return None if to_hidden is None else to_hidden.to(hidden.dtype), to_weight, None, None


def vocabulary_part(tokens: int, vocabulary: int, chunk: int) -> int:
    """Entries of the vocabulary whose logits exist at a time, for all tokens: as many logits as two chunks of tokens
    have, because here there are only logits and their gradients, in half precision.
    """
    entries = 2 * chunk * vocabulary // max(tokens, 1)
    return min(vocabulary, entries // 256 * 256 if entries >= 256 else max(1, entries))


def _product(hidden: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(weight.device.type, enabled=False):
        return wide_product(hidden, weight)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.shape = x.shape
        return x.flatten(0, 1).index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (index,) = ctx.saved_tensors
        whole = upstream.new_zeros(ctx.shape)
        whole.flatten(0, 1).index_copy_(0, index, upstream)
        return whole, None


def states_before(states: Tensor, target_mask: Tensor) -> Tensor:
    """The states from which the target tokens are predicted. [B, T, N], bool [B, T] -> [n, N]

    No state is used twice, so the backward pass is a copy; that of plain indexing would sort and add.
    """
    index = target_mask.flatten().nonzero()[:, 0] - 1  # the first token of a sequence is never a target
    return _Rows.apply(states, index)
