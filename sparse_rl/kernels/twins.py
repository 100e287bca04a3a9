"""The kernels of this folder in plain torch; those for sampling and for the learner are in twins_sample.py and
twins_learner.py.

B rows, Hq = H * G query heads, H KV heads, G query heads per KV head, C slots of a row, S slots in use, D head dim,
T tokens, V vocabulary.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor
from torch.nn import functional as F

from ..cache import LayerSlots
from ..cache.formats import KINDS, dequantize, quantize
from ..cache.segments import Packing, Replay
from ..cache.trace import visible
from .twins_learner import add_and_norm, logit_gradients, rotate, silu_gate, token_statistics  # noqa: F401
from .twins_sample import sample_and_record, sample_by_row  # noqa: F401

BLOCK_ELEMENTS = 16 * 2**20  # similarity entries made at a time: [S, S] never exists for all rows at once

# ---------------------------------------------------------------------------------------- the decode step (decode.py)

_WRITTEN_OUT = 1024  # queries whose logits exist at a time where attention is written out


def add_rms_norm(new: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += new, in place; its RMS norm. -> [B, N]

    residual [B, N]; new [B, N] or the parts of a sum, fp32 [S, B, N]; weight [N]
    """
    if new is not None:
        residual += new.sum(0).to(residual.dtype) if new.dim() == 3 else new
    wide = residual.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(residual.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. [B, 2 N] -> [B, N]"""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def expert_product(x: Tensor, weight: Tensor, bias: Tensor | None, order: Tensor, starts: Tensor) -> Tensor:
    """Multiply each token with the weights of its experts, round, and add their biases; 0 for pairs without an expert.
    -> [S, O], pair by pair

    x [n, I]; S pairs of a token and an expert, S / n of each row of x, one behind the other; weight [E, I, O], any
    strides; bias [E, O]; order [S]: the pairs, expert by expert; starts [E + 1]: where an expert's begin in `order`
    """
    pairs_per_row, bounds = len(order) // max(1, len(x)), starts.tolist()
    out = x.new_zeros(len(order), weight.shape[2])
    for expert, (begin, stop) in enumerate(itertools.pairwise(bounds)):
        pairs = order[begin:stop]
        product = x[pairs // pairs_per_row] @ weight[expert] if stop > begin else x.new_zeros(0, weight.shape[2])
        out[pairs] = product if bias is None else product + bias[expert]
    return out


def store(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: LayerSlots,
    used: Tensor,
    index: Tensor,
    live: Tensor,
    rope: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Norm (if the architecture does) and rotate the new token's query and key; write it to the next slot of live rows.

    query [B, Hq, D]; key, value [B, H, D]; used, index [B]; live bool [B]; rope: cos, sin [B, D]; norms: the weights
    [D] of query and key, and epsilon -> query [B, Hq, D]
    """
    if norms is not None:
        query_weight, key_weight, eps = norms
        query, key = add_rms_norm(None, query, query_weight, eps), add_rms_norm(None, key, key_weight, eps)
    if rope is not None:
        cos, sin = (x[:, None] for x in rope)
        query, key = (x * cos + _rotate_half(x) * sin for x in (query, key))
    keys, values, feed, ring, exponents = slots
    rows = torch.arange(query.shape[0], device=query.device)
    slot = used.clamp(max=keys.shape[2] - 1)
    if exponents is not None:
        (key, key_exponent), (value, value_exponent) = (quantize(x, KINDS[keys.dtype]) for x in (key, value))
        _write(exponents, rows, slot, torch.stack([key_exponent, value_exponent], -1), live)
    for tensor, place, new in ((keys, slot, key), (values, slot, value), (feed, slot, index[:, None].to(feed.dtype))):
        _write(tensor, rows, place, new, live)
    if ring is not None:
        _write(ring, rows, index % ring.shape[2], query, live)
    return query


def store_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slots: LayerSlots,
    used: Tensor,
    index: Tensor,
    live: Tensor,
    scaling: float,
    rope: tuple[Tensor, Tensor] | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`store`, then the attention of the new queries over what every live row holds. -> [B, Hq * D]

    The result for other rows has no meaning.
    """
    query = store(query, key, value, slots, used, index, live, rope, norms)
    keys, values, feed, _, exponents = slots
    lengths = used * live + 1
    rows, heads, longest = query.shape[0], keys.shape[1], int(lengths.max())
    keys, values = keys[:rows, :, :longest], values[:rows, :, :longest]
    if exponents is not None:
        exponents = exponents[:rows, :, :longest]
        keys, values = (dequantize(x, exponents[..., i], torch.float32) for i, x in enumerate((keys, values)))
    keys, values = keys.float(), values.float()
    logits = query.float().unflatten(1, (heads, -1)) @ keys.transpose(-1, -2) * scaling  # [B, H, G, S]
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    seen = (torch.arange(longest, device=query.device) < lengths[:, None])[:, None, None]
    if sliding_window is not None:
        distance = index[:, None, None] - feed[:rows, :, :longest]
        seen = seen & (distance < sliding_window)[:, :, None]
    logits = logits.masked_fill(~seen, -torch.inf)
    probs = softmax_with_sinks(logits, None if sinks is None else sinks.float().view(heads, -1, 1))
    return (probs @ values).flatten(1).to(query.dtype)


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def _write(tensor: Tensor, rows: Tensor, place: Tensor, new: Tensor, live: Tensor) -> None:
    """tensor[row, :, place[row]] = new[row] for every live row. tensor [R, H, C, ...]; new [B, H, ...]"""
    old = tensor[rows, :, place]
    tensor[rows, :, place] = torch.where(live.view(-1, *[1] * (old.dim() - 1)), new, old)


# ------------------------------------------------------------------------------------------------ evictions (evict.py)


def redundancy(keys: Tensor, threshold: float) -> Tensor:
    """How similar each key is to all others on average, as a softmax over the slots. [B, H, S, D] -> [B, H, S]"""
    rows, heads, used, _ = keys.shape
    unit = F.normalize(keys.float(), dim=-1)
    slot = torch.arange(used, device=keys.device)
    total = torch.zeros(rows, heads, used, device=keys.device)
    block = max(1, BLOCK_ELEMENTS // (rows * heads * used))
    for start in range(0, used, block):
        i = slot[start : start + block]
        similar = unit[:, :, i] @ unit.transpose(-1, -2)  # [B, H, i, S]
        similar.masked_fill_(i[:, None] == slot, 0.0)
        copies = similar > threshold
        newest = torch.where(copies, slot, -1).amax(-1, keepdim=True)  # [B, H, i, 1]; -1: no copy
        similar.masked_fill_(slot == newest, 0.0)
        total += similar.sum(2)
    return (total / used).softmax(-1)


def observed_logits(
    queries: Tensor, keys: Tensor, scaling: float, softcap: float | None = None, unreachable: Tensor | None = None
) -> Tensor:
    """The highest logit of a group's query heads, for every query and slot. -> fp32 [B, H, W, S]

    queries [B, H * G, W, D], keys [B, H, S, D]; unreachable bool [B, H, S]: slots that no later query can see
    """
    return grouped_logits(queries, keys, scaling, softcap, unreachable).amax(2)


def grouped_logits(
    queries: Tensor, keys: Tensor, scaling: float, softcap: float | None, unreachable: Tensor | None
) -> Tensor:
    """The logits of every query head. -> fp32 [B, H, G, W, S]"""
    heads, count = keys.shape[1], queries.shape[2]
    grouped = group_heads(queries.float(), heads)  # keys are not repeated
    logits = (grouped @ keys.float().transpose(-1, -2) * scaling).unflatten(2, (-1, count))
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    if unreachable is not None:
        logits = logits.masked_fill(unreachable[:, :, None, None], -1e30)
    return logits


def compact(
    keys: Tensor,
    values: Tensor,
    feed: Tensor,
    mass: Tensor | None,
    trace: Tensor,
    layers: slice,
    rows: Tensor,
    used: int,
    kept: Tensor,
    fed: Tensor,
    live: Tensor,
    never: int,
    exponents: Tensor | None = None,
) -> None:
    """In place, for live rows: slot k becomes slot kept[k], and the trace says that every other token left at `fed`.

    The whole cache: keys, values [L, R, H, C, D], of codes also their exponents int8 [L, R, H, C, 2], feed int32 and
    mass fp32 [L, R, H, C]; trace [R, L, H, T], `never` where a token stays. For some of its layers: kept int64
    [l, N, H, K], ascending, below `used`. rows (distinct), fed int64 [N]; live bool [N]
    """
    rows, kept, fed = rows[live], kept[:, live], fed[live]
    budget, heads = kept.shape[-1], kept.shape[2]
    tokens = feed[layers][:, rows, :, :used]  # a copy, as are the gathers below
    gone = torch.ones_like(tokens, dtype=torch.bool).scatter_(-1, kept, False)
    evicted = tokens[gone].view(*tokens.shape[:-1], used - budget).long()  # [l, N, H, X]
    for tensor in (keys, values) if exponents is None else (keys, values, exponents):
        part = tensor[layers][:, rows, :, :used]
        tensor[layers, rows, :, :budget] = part.gather(3, kept[..., None].expand(*kept.shape, part.shape[-1]))
    feed[layers, rows, :, :budget] = tokens.gather(3, kept)
    if mass is not None:
        mass[layers, rows, :, :budget] = mass[layers][:, rows, :, :used].gather(3, kept)
    layer = torch.arange(len(keys), device=rows.device)[layers][:, None, None, None]
    head = torch.arange(heads, device=rows.device)[None, None, :, None]
    now = fed.to(trace.dtype)[None, :, None, None].expand(evicted.shape)
    trace[rows[None, :, None, None], layer, head, evicted] = now


# -------------------------------------------------------------------- attention under a trace (segments.py, flex.py)


def trace_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    replay: Replay,
    layer: int,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    dropout: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of every query to the tokens that the sampler's cache still held for it. -> [B, T, H * G, D]

    query [B, H * G, T, D]; key, value [B, H, T, D]. The mask is built per layer, so [L, H, T, T] never exists; where
    all heads share a trace (latents), it is one mask.
    """
    mask = trace_mask(replay, layer, key.shape[1], sliding_window)
    return attend(query, key, value, mask, scaling, softcap, dropout, sinks)


def trace_mask(replay: Replay, layer: int, heads: int, sliding_window: int | None) -> Tensor:
    """The mask of one layer: what its queries see. -> bool [B, H, T, T]; for a packed row [1, H, S, S]"""
    mask = layer_mask(replay.of_layer(layer, heads), sliding_window)
    return mask if replay.packing is None else packed_mask(mask, replay.lengths, replay.packing)


def layer_mask(evicted_at: Tensor, sliding_window: int | None) -> Tensor:
    """[B, H, T] -> bool [B, H, T, T]"""
    mask = visible(evicted_at)
    if sliding_window is None:
        return mask
    index = torch.arange(evicted_at.shape[-1], device=evicted_at.device)
    return mask & (index[:, None] - index[None, :] < sliding_window)


def packed_mask(mask: Tensor, lengths: Tensor, packing: Packing) -> Tensor:
    """The mask of a packed row, in which each query sees what its trajectory says. [B, H, T, T] -> [1, H, S, S]"""
    packed = torch.zeros(1, mask.shape[1], packing.size, packing.size, dtype=torch.bool, device=mask.device)
    for own, place, first, length in zip(mask, packing.place, packing.first.tolist(), lengths.tolist(), strict=True):
        packed[0][:, place[first:length, None], place[None, :length]] = own[:, first:length, :length]
    return packed


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scaling: float,
    softcap: float | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Attention under a mask. query [B, H * G, T, D]; key, value [B, H, S, D]; seen bool [B, 1 or H, T, S]

    The G query heads of a KV head become G more queries of that head, so keys and values are never repeated.
    sinks [H * G]: a logit per query head that takes its share of the softmax, and gives nothing (gpt-oss).
    bias [B, H * G, T, S]: added to the logits. -> [B, T, H * G, D]
    """
    heads, tokens = key.shape[1], query.shape[2]
    if softcap is not None or sinks is not None:
        assert bias is None, "no model has both"
        parts = zip(query.split(_WRITTEN_OUT, 2), seen.expand(-1, -1, tokens, -1).split(_WRITTEN_OUT, 2), strict=True)
        out = [attend_with_probs(q, key, value, s, scaling, softcap, dropout, sinks)[0] for q, s in parts]
        return torch.cat(out, 1)
    mask = group_mask(seen, query.shape[1] // heads)
    if bias is not None:
        mask = group_heads(bias, heads).masked_fill(~mask, -torch.inf)
    return attend_under(mask, query, key, value, scaling, dropout)


def attend_under(
    mask: Tensor, query: Tensor, key: Tensor, value: Tensor, scaling: float, dropout: float = 0.0
) -> Tensor:
    """`attend` under a mask that is grouped like the queries: bool, or added to the logits. [B, 1 or H, G * T, S]"""
    out = F.scaled_dot_product_attention(
        group_heads(query, key.shape[1]), key, value, attn_mask=mask, dropout_p=dropout, scale=scaling
    )
    return ungroup_heads(out, query.shape[2])


def attend_with_probs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    scaling: float,
    softcap: float | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `attend`, written out, for soft-capped logits and sinks; and the probabilities [B, H, G * T, S], in fp32 or
    wider.
    """
    heads, tokens = key.shape[1], query.shape[2]
    logits = group_heads(query, heads) @ key.transpose(-1, -2) * scaling
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        logits = logits + group_heads(bias, heads)
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    logits = logits.masked_fill(~group_mask(seen, query.shape[1] // heads), -torch.inf)
    if sinks is not None:  # [H, G * T, 1]
        sinks = sinks.to(logits.dtype).view(heads, -1, 1).repeat_interleave(tokens, 1)
    probs = softmax_with_sinks(logits, sinks)
    out = F.dropout(probs.to(value.dtype), dropout) @ value
    return ungroup_heads(out, tokens), probs


def softmax_with_sinks(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last dimension, of which a sink takes its share. sinks: as logits, with 1 at the end"""
    if sinks is None:
        return logits.softmax(-1)
    return torch.cat([logits, sinks.expand(*logits.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


def group_heads(query: Tensor, heads: int) -> Tensor:
    """[B, H * G, T, D] -> [B, H, G * T, D]"""
    return query.unflatten(1, (heads, -1)).flatten(2, 3)


def ungroup_heads(out: Tensor, tokens: int) -> Tensor:
    """[B, H, G * T, D] -> [B, T, H * G, D]"""
    return out.unflatten(2, (-1, tokens)).flatten(1, 2).transpose(1, 2).contiguous()


def group_mask(seen: Tensor, groups: int) -> Tensor:
    """[B, 1 or H, T, S] -> [B, 1 or H, G * T, S]"""
    if groups == 1 or seen.shape[2] == 1:
        return seen
    return seen[:, :, None].expand(-1, -1, groups, -1, -1).flatten(2, 3)
