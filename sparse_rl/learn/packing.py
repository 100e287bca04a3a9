"""Pack trajectories into one row without padding, with the tokens that a group has in common only once.

The completions of a prompt begin with the same tokens, so they share hidden states, keys and values there, because
causal attention does not look ahead. The first completion brings these tokens and the others read them. Log-probs and
gradients are those of separate rows, up to rounding: the gradient of a shared token is the sum over all its readers.

    tokens      p p p a a a | p p p b b     ->     p p p a a a b b
    positions   0 1 2 3 4 5 | 0 1 2 3 4            0 1 2 3 4 5 3 4

In the shadow view, trajectories must also agree in what was evicted while these tokens were fed; otherwise each brings
its own. If routes are replayed, they share tokens up to the first one that went through other experts.

Shapes: N rows, T tokens (padded), S tokens of the packed row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Replay
from ..beacon import beacon_of
from ..cache import Trace
from ..cache.segments import Packing
from ..cache.ties import slots_and_ties
from ..errors import SparseRLError
from ..kernels.ops import place_of
from ..models import is_recurrent
from .routes import common_start
from .score import causal_lm_of, pad_traces

PACKING = ("auto", "always", "never")
WORTH_SHARING = 8  # tokens; sharing fewer saves no time
WORTH_PACKING = 0.9  # share of the padded tokens; above it, stock attention is faster in the dense view
_PADDED = 4  # rows are unpacked for the head; with padding they have at most this many times the tokens
# Architectures that were tested to compute the same at explicit positions, under our attention.
_KNOWN = {"llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3_text", "olmo2", "smollm3", "gpt_oss"}
_KNOWN |= {"qwen2_moe", "qwen3_moe", "mixtral", "olmoe"}


def packs(model: nn.Module, choice: str) -> bool:
    """Whether a model's micro-batches are packed. `auto`: on a GPU, if its architecture is known"""
    config = causal_lm_of(model).config.get_text_config(decoder=True)
    known = may_pack(config) and beacon_of(model) is None
    if choice == "always" and not known:
        kind = " with beacons" if beacon_of(model) else ", which have recurrent layers," if is_recurrent(config) else ""
        raise SparseRLError(
            f"learn.packing is always, but micro-batches of {config.model_type} models{kind} cannot be packed; use "
            "auto or never."
        )
    parameter = next(model.parameters())
    has_kernels = place_of(parameter).runs_kernels and parameter.dtype != torch.float64
    return known and (choice == "always" or (choice == "auto" and has_kernels))


def may_pack(config: Any) -> bool:
    """Whether models of this config can be packed; a recurrent state would carry over to the next trajectory."""
    return config.model_type in _KNOWN and not is_recurrent(config)


def shared_prefixes(tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """For every row, the row that brings its first tokens (itself if no earlier one does), and how many tokens.

    Neighbours that begin alike form a group, which shares the beginning common to all. -> int64 [N], int64 [N]
    """
    rows = torch.arange(len(tokens))
    shorter = torch.minimum(lengths[1:], lengths[:-1])[:, None]
    same = (tokens[1:] == tokens[:-1]) & (torch.arange(tokens.shape[1]) < shorter)
    alike = torch.cat([torch.zeros(1, dtype=torch.int64), same.long().cumprod(1).sum(1)])  # with the row before
    leader = torch.where(alike < WORTH_SHARING, rows, 0).cummax(0).values
    common = torch.full_like(rows, tokens.shape[1])
    common.scatter_reduce_(0, leader, torch.where(leader == rows, common, alike), "amin")
    return leader, torch.where(leader == rows, 0, common[leader])


def micro_batches_of(
    model: nn.Module, tokens: Tensor, lengths: Tensor, micro_batch_tokens: int, packing: bool
) -> list[Tensor]:
    """Divide rows into micro-batches, packed or padded."""
    if packing:
        return pack_groups(tokens, lengths, micro_batch_tokens, shares(model))
    return pack(lengths, micro_batch_tokens)


def pack(lengths: Tensor, micro_batch_tokens: int) -> list[Tensor]:
    """Divide rows [N] into micro-batches of at most `micro_batch_tokens` tokens, padding included, longest rows first.

    A longer row goes alone.
    """
    order = lengths.argsort(descending=True, stable=True)
    packed, start = [], 0
    while start < len(order):
        count = max(1, micro_batch_tokens // int(lengths[order[start]]))
        packed.append(order[start : start + count])
        start += count
    return packed


def pack_groups(tokens: Tensor, lengths: Tensor, micro_batch_tokens: int, share: bool = True) -> list[Tensor]:
    """Divide rows into micro-batches of at most `micro_batch_tokens` packed tokens, groups with the longest rows first.

    Rows of a group stay neighbours. A longer row goes alone. share: the result of `shares` for the model
    """
    leader, shared = shared_prefixes(tokens, lengths)
    shared = shared if share else torch.zeros_like(shared)
    longest = torch.zeros_like(lengths).scatter_reduce_(0, leader, lengths, "amax")[leader]
    order = longest.argsort(descending=True, stable=True)
    packed: list[list[int]] = [[]]
    size, width, here = 0, 0, -1  # tokens and longest row of the last micro-batch, and its last group
    for row in order.tolist():
        length, group = int(lengths[row]), int(leader[row])
        brings = length - int(shared[row]) * (group == here)
        wide = max(width, length) * (len(packed[-1]) + 1) > _PADDED * micro_batch_tokens
        if packed[-1] and (size + brings > micro_batch_tokens or wide):
            packed.append([])
            size, width, brings = 0, 0, length
        packed[-1].append(row)
        size, width, here = size + brings, max(width, length), group
    return [torch.tensor(rows) for rows in packed if rows]


def packed_replay(
    model: nn.Module,
    tokens: Tensor,
    lengths: Tensor,
    traces: Sequence[Trace] | None,
    routes: Sequence[Tensor] | None = None,
) -> Replay | None:
    """Pack some rows into one, on the model's device; None if that does not pay.

    `traces`: for the shadow view; None: every token sees all tokens before it. `routes` [t, M, k] each: the experts to
    which tokens are sent; None: the model chooses. It does not pay if packing saves little in the dense view, or if
    traces have so many segments that the kernels cannot take a packed row.
    """
    device = next(model.parameters()).device
    never = torch.iinfo(torch.int32).max
    if traces is None:
        evicted_at = torch.full((len(tokens), 1, 1, int(lengths.max())), never, dtype=torch.int32)
    else:
        evicted_at = pad_traces(model, [(row[:n], t) for row, n, t in zip(tokens, lengths.tolist(), traces)])
    packing = pack_rows(tokens, lengths, evicted_at, shares(model), routes)
    if traces is None and packing.size > WORTH_PACKING * evicted_at.numel():
        return None
    moved = Packing(packing.place.to(device), packing.first.to(device), packing.size)
    slots, ties = slots_and_ties(traces or [], device)
    if ties is not None:  # of shared tokens those of the trajectory that brings them
        brought = ties.token >= moved.first[ties.row]
        ties = ties.moved(torch.zeros_like(ties.row), moved.place[ties.row, ties.token], brought)
    replay = Replay(evicted_at.to(device), lengths.to(device), moved, slots=slots, ties=ties)
    return replay if device.type == "cpu" or replay.segments.are_few else None


def pack_rows(
    tokens: Tensor, lengths: Tensor, evicted_at: Tensor, share: bool, routes: Sequence[Tensor] | None = None
) -> Packing:
    """Compute where the tokens of rows go in a packed row. evicted_at int32 [N, L, H, T]"""
    leader, shared = shared_prefixes(tokens, lengths)
    first = torch.zeros_like(lengths)
    for row in (shared > 0).nonzero()[:, 0].tolist() if share else []:
        other = int(leader[row])
        count = common_start(routes, row, other, int(shared[row]))
        mine, theirs = (evicted_at[r, ..., :count].clamp(max=count) for r in (row, other))
        first[row] = count if torch.equal(mine, theirs) else 0
    brings = lengths - first
    begin = brings.cumsum(0) - brings  # where the tokens that a row brings begin
    index = torch.arange(evicted_at.shape[-1])
    own = begin[:, None] + index - first[:, None]
    place = torch.where(index < first[:, None], own[leader], own)  # a leader brings all of its own
    return Packing(torch.where(index < lengths[:, None], place, 0), first, int(brings.sum()))


def shares(model: nn.Module) -> bool:
    """Whether rows may share tokens; not if a layer has a window, because kernels measure distances in
    the packed row.
    """
    return may_share(causal_lm_of(model).config.get_text_config(decoder=True))


def may_share(config: Any) -> bool:
    return getattr(config, "sliding_window", None) is None or not getattr(config, "use_sliding_window", True)
