"""What the kernels of decode.py compute, in plain torch. B rows, Hq query heads, H KV heads, C slots, D head dim."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..cache import LayerSlots


def add_rms_norm(new: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """residual += new, in place; its RMS norm. residual [B, N]; new [B, N] or the parts of a sum, fp32 [S, B, N]; weight [N] -> [B, N]"""
    if new is not None:
        residual += new.sum(0).to(residual.dtype) if new.dim() == 3 else new
    wide = residual.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(residual.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up. [B, 2 N] -> [B, N]"""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


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
    """Norm (where the architecture does) and rotate the new token's query and key, then write it to the next slot of every live row.

    query [B, Hq, D]; key, value [B, H, D];
    used, index [B]; live bool [B]; rope: cos, sin [B, D]; norms: weights [D] of query and key, and epsilon -> query [B, Hq, D]
    """
    if norms is not None:
        query, key = (add_rms_norm(None, x, weight, norms[2]) for x, weight in ((query, norms[0]), (key, norms[1])))
    if rope is not None:
        cos, sin = (x[:, None] for x in rope)
        query, key = (x * cos + _rotate_half(x) * sin for x in (query, key))
    keys, values, feed, ring = slots
    rows = torch.arange(query.shape[0], device=query.device)
    slot = used.clamp(max=keys.shape[2] - 1)
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
) -> Tensor:
    """`store`, then the new queries over what every live row holds; what comes of the other rows means nothing. -> [B, Hq * D]"""
    query = store(query, key, value, slots, used, index, live, rope, norms)
    keys, values, feed, _ = slots
    lengths = used * live + 1
    rows, heads, longest = query.shape[0], keys.shape[1], int(lengths.max())
    keys, values = keys[:rows, :, :longest].float(), values[:rows, :, :longest].float()
    logits = query.float().unflatten(1, (heads, -1)) @ keys.transpose(-1, -2) * scaling  # [B, H, G, S]
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    visible = (torch.arange(longest, device=query.device) < lengths[:, None])[:, None, None]
    if sliding_window is not None:
        distance = index[:, None, None] - feed[:rows, :, :longest]
        visible = visible & (distance < sliding_window)[:, :, None]
    out = logits.masked_fill(~visible, -torch.inf).softmax(-1) @ values
    return out.flatten(1).to(query.dtype)


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def _write(tensor: Tensor, rows: Tensor, place: Tensor, new: Tensor, live: Tensor) -> None:
    """tensor[row, :, place[row]] = new[row] for every live row. tensor [R, H, C, ...]; new [B, H, ...]"""
    old = tensor[rows, :, place]
    tensor[rows, :, place] = torch.where(live.view(-1, *[1] * (old.dim() - 1)), new, old)
