"""Place beacons among tokens: after which tokens they are fed, and how a sequence then looks.

T tokens fed, n tokens of a response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache import Trace
from ..cache.trace import never, trace_dtype
from .embedding import BeaconEmbedding


def fixed_chunk_ends(chunk: Tensor | int, prompts: Tensor, lengths: Tensor, width: int) -> Tensor:
    """The tokens after which a beacon is fed, if one is fed after every `chunk` tokens of a response.

    The last token is never fed, so no beacon follows it or the token before it.
    chunk, prompts, lengths [B] -> bool [B, T]
    """
    nth = torch.arange(1, width + 1) - prompts[:, None]  # which token of the response, from 1
    size = torch.as_tensor(chunk).view(-1, 1)
    return (nth > 0) & (nth % size == 0) & (nth < (lengths - prompts)[:, None] - 1)


def random_chunk_ends(
    sizes: tuple[int, ...], streams: Sequence[int], prompts: Tensor, lengths: Tensor, width: int
) -> Tensor:
    """The tokens after which a beacon is fed, if the size of every chunk is drawn from `sizes`, by a stream per row."""
    ends = torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, stream, prompt, length in zip(ends, streams, prompts.tolist(), lengths.tolist(), strict=True):
        choices = torch.randint(len(sizes), (length - prompt,), generator=torch.Generator().manual_seed(stream))
        last = prompt + torch.tensor(sizes)[choices].cumsum(0) - 1
        row[last[last < length - 2]] = True
    return ends


@dataclass(frozen=True)
class BeaconLayout:
    """Sequences as they are fed, beacons included, padded at the end."""

    tokens: Tensor  # int64 [B, T]
    lengths: Tensor  # int64 [B]
    sampled: Tensor  # bool [B, T]: sampled tokens, not beacons
    evicted_at: Tensor  # int64 [B, T]: `never` for prompt, beacons and the last chunk; all layers and heads share it


def insert_beacons(
    tokens: Tensor,
    prompts: Tensor,
    lengths: Tensor,
    ends: Tensor,
    beacon_id: int,
    never: int,
    sampled: Tensor | None = None,
) -> BeaconLayout:
    """Put a beacon after every token that ends a chunk.

    tokens int64 [B, T - beacons], prompts, lengths [B], ends bool like tokens; sampled bool like tokens: those of the
    response that the policy sampled; None: it sampled all. The others are folded like them.
    """
    fed = lengths + ends.sum(1)
    width, index = int(fed.max()), torch.arange(tokens.shape[1])
    place = torch.where(index < lengths[:, None], index + ends.cumsum(1) - ends.long(), width)  # padding: at the end
    laid = torch.full((len(tokens), width + 1), beacon_id).scatter(1, place, tokens)[:, :width]
    index = torch.arange(width)
    there = index < fed[:, None]
    is_beacon = (laid == beacon_id) & there
    # A chunk is gone for the query after its beacon.
    following = torch.where(is_beacon, index + 1, never).flip(1).cummin(1).values.flip(1)
    response = (index >= prompts[:, None]) & there & ~is_beacon
    evicted_at = torch.where(response, following, never)
    if sampled is not None:
        response &= torch.zeros(len(tokens), width + 1, dtype=torch.bool).scatter(1, place, sampled)[:, :width]
    return BeaconLayout(torch.where(there, laid, 0), fed, response, evicted_at)


@dataclass(frozen=True)
class Beaconed:
    """A sequence as it was fed, as a trajectory holds it."""

    tokens: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    trace: Trace  # evicted_at [L, H, T]
    beacon_id: int
    sampled: Tensor  # bool [T]: response tokens, without beacons


def beaconed(
    beacon: BeaconEmbedding, tokens: Tensor, prompts: Tensor, lengths: Tensor, ends: Tensor, layers: int, heads: int
) -> list[Beaconed]:
    """What rows have fed, from what they sampled and where their chunks ended; arguments as in `insert_beacons`."""
    laid = insert_beacons(tokens, prompts, lengths, ends, beacon.id, never(torch.int32))
    positions, found = beacon.positions(laid.tokens), []
    for i, length in enumerate(laid.lengths.tolist()):
        dtype = trace_dtype(length)
        gone = laid.evicted_at[i, :length].clamp(max=never(dtype)).to(dtype).expand(layers, heads, -1).contiguous()
        tokens, sampled = laid.tokens[i, :length], laid.sampled[i, :length]
        found.append(Beaconed(tokens, positions[i, :length], Trace(gone), beacon.id, sampled))
    return found
