"""What the host learns when it syncs with the device, in one copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .decode import RowState
from .sent import sent


@dataclass(frozen=True)
class Synced:
    """What the host knows about every row after a sync."""

    done: list[int]
    count: list[int]  # tokens sampled
    finite: list[int]  # whether the last log-prob is
    fine: list[int]  # whether evictions were
    used: list[int]  # slots
    tokens: list[list[int]]  # from the asked place on
    logprobs: list[list[float]]  # of them


def sync(state: RowState, fine: Tensor, first: list[int], most: int, before_waiting: Callable[[], None]) -> Synced:
    """Wait for the device. first, most: of each row return so many sampled tokens, from this one on

    before_waiting: called when the device has been asked for all of it
    """
    last = (state.count - 1).clamp(min=0)[:, None]
    finite = state.logprobs.gather(1, last)[:, 0].isfinite()
    asked = [torch.stack([state.done, state.count, finite, fine.expand(len(finite)), state.used], 1)]
    numbers = asked[0].shape[1]
    if most:
        place = sent(first, state.count.device)[:, None] + torch.arange(most, device=state.count.device)
        place = place.clamp(max=state.tokens.shape[1] - 1)
        bits = state.logprobs.gather(1, place).view(torch.int32)
        asked += [state.tokens.gather(1, place), bits.long()]
    found = torch.cat(asked, 1)
    before_waiting()
    by_row, tokens, bits = found.cpu().split([numbers, most, most], 1)
    done, count, ends_finite, all_fine, used = by_row.T.tolist()
    logprobs = bits.int().view(torch.float32)
    return Synced(done, count, ends_finite, all_fine, used, tokens.tolist(), logprobs.tolist())
