"""Evict once: the compressor chooses slots of full rows, rows are compacted, and the trace records what is gone."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cache import SlotCache
from ..compressors import CacheView, Compressor
from ..compressors.base import choose, refusal
from ..errors import SparseRLError
from ..kernels import ops
from ..streams import eviction_streams
from .decode import never_in
from .sent import sent


def evict(
    cache: SlotCache,
    compressor: Compressor,
    rows: Tensor,
    used: int,
    fed: Tensor,
    streams: Tensor,
    num_prompt_tokens: Tensor,
    trace: Tensor,
    live: Tensor,
    replies: Tensor | None = None,
    tokens: int = 0,
) -> Tensor:
    """Compress rows, all with `used` slots in use, down to the budget; rows that are not live stay as they are.

    rows, fed (tokens fed so far), streams, num_prompt_tokens, live (bool) [N]; trace [R, L, H, T], in which a
    layer with fewer KV heads than others repeats each of them
    tokens: if layers have different budgets, tokens fed to each row; `used` then counts the smallest layer (`alike`)
    replies int64 [N, T]: the number of the reply that a token was given in, from 1; 0 if it was not given
    -> bool: whether the compressor returned valid slots
    """
    shape, n = cache.shape, len(rows)
    streams = eviction_streams(streams, shape.layers, shape.heads)  # [L, N, H]
    scaling = _common(cache.scaling, "scale")
    assert scaling is not None, "a prompt has been fed"
    fine = torch.ones((), dtype=torch.bool, device=rows.device)
    for layers in cache.layer_chunks(n, used):
        stored = cache.stored_by(layers)
        held, own = stored.used(used, tokens), compressor.with_extra(stored.extra)
        budget = own.budget
        if held <= budget:
            continue  # a larger layer has no need to evict yet
        feed = stored.feed[:, rows, :, :held]  # [l, N, H, S]
        num_queries = min(own.num_queries, held)  # `held` tokens were fed, so there are as many queries
        queries = cache.recent_queries(layers, rows, fed, num_queries)
        keys, values = cache.read(layers, rows, held, own.uses_values)
        view = CacheView(
            keys=keys.flatten(0, 1),
            values=None if values is None else values.flatten(0, 1),
            feed=feed.flatten(0, 1),
            queries=None if queries is None else queries.flatten(0, 1),
            mass=None if stored.mass is None else stored.mass[:, rows, :, :held].flatten(0, 1),
            streams=streams[layers, :, : stored.heads].flatten(0, 1),
            num_prompt_tokens=num_prompt_tokens.repeat(feed.shape[0]),
            scaling=scaling,
            softcap=_common(cache.softcap, "soft-cap"),
            unreachable=_unreachable(cache, layers, feed, fed),
            given_age=None if replies is None else _ages(replies, feed, fed).flatten(0, 1),
            layer=torch.arange(shape.layers, device=rows.device)[layers].repeat_interleave(n),
        )
        kept = choose(own, view, budget)
        fine &= _check_kept(kept, (view.keys.shape[0], stored.heads, budget), held, own)
        if ops.rules(rows.device).defers_checks:
            kept = kept.clamp(0, held - 1)  # until the host checks it, a wrong number must not reach another row
        else:
            check_fine(bool(fine), held, own)
        repeats = shape.heads // stored.heads
        ops.compact(
            stored.keys, stored.values, stored.feed, stored.mass, trace[:, layers, ::repeats], slice(None), rows, held,
            kept.unflatten(0, (-1, n)), fed, live, never_in(trace), stored.exponents,
        )  # fmt: skip
        if repeats > 1:
            trace[rows, layers] = trace[rows, layers, ::repeats].repeat_interleave(repeats, 2)
    return fine


def _ages(replies: Tensor, feed: Tensor, fed: Tensor) -> Tensor:
    """How many replies ago the token of each slot was given; -1: not given. replies [N, T], feed [l, N, H, S]"""
    past = torch.arange(replies.shape[1], device=feed.device) < fed[:, None]
    last = (replies * past).amax(1)[:, None, None]  # [N, 1, 1]
    number = replies[:, None].expand(-1, feed.shape[2], -1)  # [N, H, T]
    found = number.expand(feed.shape[0], *number.shape).gather(3, feed.long())
    return torch.where(found > 0, last - found, -1)


def check_fine(fine: bool, used: int, compressor: Compressor) -> None:
    if not fine:
        raise refusal(compressor, used)


def _common(per_layer: list, what: str) -> float | None:
    values = set(per_layer)
    if len(values) != 1:
        raise SparseRLError(
            f"layers {what} their attention logits in different ways ({values}), so this architecture is not supported."
        )
    return values.pop()


def _unreachable(cache: SlotCache, layers: slice, feed: Tensor, fed: Tensor) -> Tensor | None:
    """Slots that no later query sees in a layer with a sliding window. feed [l, N, H, S], fed [N] -> [l * N, H, S]"""
    windows = cache.sliding_window[layers]
    if all(window is None for window in windows):
        return None
    reach = sent([torch.iinfo(torch.int32).max if w is None else w for w in windows], feed.device)
    distance = fed[None, :, None, None] - feed  # the next query has feed index `fed`
    return (distance >= reach[:, None, None, None]).flatten(0, 1)


def _check_kept(kept: object, shape: tuple[int, int, int], used: int, compressor: Compressor) -> Tensor:
    """Refuse a wrong shape at once. -> bool on the device: whether the slot numbers are valid"""
    if not isinstance(kept, Tensor) or tuple(kept.shape) != shape or kept.dtype != torch.int64:
        given = f"{kept.dtype} {list(kept.shape)}" if isinstance(kept, Tensor) else type(kept).__name__
        raise SparseRLError(f"{compressor.name}.keep must return int64 slot numbers {list(shape)}, not {given}.")
    return (kept[..., 1:] > kept[..., :-1]).all() & (kept[..., 0] >= 0).all() & (kept[..., -1] < used).all()


def evict_as(cache: SlotCache, used: int, evicted_at: Tensor, fed: int) -> int:
    """Evict from the first row what its trace says is gone after `fed` tokens. evicted_at int64 [L, H, T] -> slots left

    Slots are counted in the smallest layer.
    """
    row = torch.zeros(1, dtype=torch.int64, device=cache.device)
    live = torch.ones(1, dtype=torch.bool, device=cache.device)
    trace = torch.empty(1, *evicted_at.shape, dtype=torch.int32, device=cache.device)  # it is known
    left = []
    for stored in cache.stored:
        layers, held, repeats = stored.layers, stored.used(used, fed), cache.shape.heads // stored.heads
        feed = stored.feed[:, 0, :, :held].long()  # [l, H, S]
        stays = evicted_at[layers, ::repeats].gather(2, feed) > fed
        left.append(int(stays[0, 0].sum()))
        kept = stays.nonzero()[:, 2].view(*stays.shape[:2], left[-1])  # as many in every layer and head
        ops.compact(
            stored.keys, stored.values, stored.feed, stored.mass, trace[:, layers, ::repeats], slice(None), row, held,
            kept[:, None], row + fed, live, never_in(trace), stored.exponents,
        )  # fmt: skip
    return min(left)


def alike(fed: Sequence[int], used: int, extra: int) -> list[list[int]]:
    """Group full rows whose layers use equally many slots, so that each group is evicted together.

    fed: tokens fed to each; used: slots in use in the smallest layer; extra: how many more the largest layer has. Rows
    differ only while the largest layer still holds everything that was fed.
    """
    groups: dict[int, list[int]] = {}
    for place, tokens in enumerate(fed):
        groups.setdefault(min(tokens, used + extra), []).append(place)
    return list(groups.values())
