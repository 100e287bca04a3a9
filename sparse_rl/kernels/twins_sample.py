"""The sampling kernels (sample.py) in plain torch. B rows, V vocabulary, K room for ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..cache.support import MOST
from ..streams import uniform


@dataclass
class Kept:
    """A record of the tokens that could be drawn (cache/support.py), in a step [B] or for rows and their
    tokens [R, N].
    """

    count: Tensor  # int32 [...]
    margin: Tensor  # fp32 [...]
    ids: Tensor  # int32 [..., K], ascending, what follows the last is -1; K = 0: only counts and margins are recorded

    @property
    def tensors(self) -> list[Tensor]:
        return [self.count, self.margin, self.ids]

    @classmethod
    def empty(cls, rows: int, new: int, room: int, device: torch.device) -> Kept:
        return cls(
            torch.zeros(rows, new, dtype=torch.int32, device=device),
            torch.zeros(rows, new, dtype=torch.float32, device=device),
            torch.zeros(rows, new, room, dtype=torch.int32, device=device),
        )


@dataclass
class RowSettings:
    """How each of R rows samples, if rows differ. fp64, so that no setting is rounded."""

    temperature: Tensor  # fp64 [R]; 0: greedy
    top_k: Tensor  # int64 [R]; 0: off
    top_p: Tensor  # fp64 [R]; 1: off
    records: Tensor  # bool [R]: whether it is recorded which tokens could be drawn
    stop_ids: Tensor  # int64 [R, S]; -1: none

    @property
    def tensors(self) -> list[Tensor]:
        return [self.temperature, self.top_k, self.top_p, self.records, self.stop_ids]

    @classmethod
    def empty(cls, rows: int, stops: int, device: torch.device) -> RowSettings:
        return cls(
            torch.ones(rows, dtype=torch.float64, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
            torch.ones(rows, dtype=torch.float64, device=device),
            torch.zeros(rows, dtype=torch.bool, device=device),
            torch.full((rows, stops), -1, dtype=torch.int64, device=device),
        )


class Rows(Protocol):
    """The fields of rows that sampling reads and writes (rollout/decode.RowState)."""

    token: Tensor
    index: Tensor
    used: Tensor
    stream: Tensor
    count: Tensor
    done: Tensor
    tokens: Tensor
    logprobs: Tensor
    limit: Tensor
    capacity: Tensor
    kept: Kept | None
    settings: RowSettings | None

    def live(self, width: int) -> Tensor: ...

    def record(
        self,
        rows: slice | Tensor,
        tokens: Tensor,
        logprobs: Tensor,
        stop_ids: Tensor,
        live: Tensor,
        kept: Kept | None = None,
    ) -> None: ...


def sample_and_record(
    logits: Tensor,
    state: Rows,
    temperature: float,
    stop_ids: Tensor,
    top_k: int = 0,
    top_p: float = 1.0,
    records: bool = False,
) -> None:
    """Sample a token for each running row of the first B, and record it. logits [B, V]; temperature 0: greedy

    records: also record which tokens could be drawn, at most MOST of them (`truncate`)
    """
    width = len(logits)
    live = state.live(width)
    room = room_of(state, records)
    stream, step = state.stream[:width], state.count[:width]
    tokens, logprobs, kept = sample(logits, stream, step, temperature, top_k, top_p, room)
    state.used[:width] += live
    state.record(slice(0, width), tokens, logprobs, stop_ids, live, kept)


def sample_by_row(logits: Tensor, state: Rows) -> None:
    """`sample_and_record` with settings for every row; rows with the same ones are sampled together. logits [B, V]"""
    width, settings = len(logits), state.settings
    assert settings is not None
    live = state.live(width)
    ways = zip(*(tensor[:width].tolist() for tensor in settings.tensors[:4]), strict=True)
    together: dict[tuple, list[int]] = {}
    for row, way in enumerate(ways):
        together.setdefault(way, []).append(row)
    state.used[:width] += live
    for (temperature, top_k, top_p, records), rows in together.items():
        which = torch.tensor(rows, device=logits.device)
        stream, step = state.stream[which], state.count[which]
        room = room_of(state, records)
        tokens, logprobs, kept = sample(logits[which], stream, step, temperature, top_k, top_p, room)
        state.record(which, tokens, logprobs, settings.stop_ids[which], live[which], kept)


def room_of(state: Rows, records: bool) -> int | None:
    """How many ids are recorded for a token; None: nothing is recorded."""
    assert not records or state.kept is not None, "there is no room to record which tokens could be drawn"
    return state.kept.ids.shape[-1] if records and state.kept is not None else None


def sample(
    logits: Tensor, stream: Tensor, step: Tensor, temperature: float, top_k: int, top_p: float, room: int | None = None
) -> tuple[Tensor, Tensor, Kept | None]:
    """Draw one token per row: (tokens [B], log-probs fp32 [B]). A row with non-finite logits has a non-finite log-prob.

    logits [B, V]; stream [B] int64; step [B] int64: how many tokens the sequence has drawn before. room: see `room_of`
    """
    left = truncate(logits, temperature, top_k, top_p, room is not None)
    logprobs = (left / (temperature or 1.0)).log_softmax(-1)
    if temperature == 0:
        tokens = logprobs.argmax(-1)
    else:
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        point = uniform(stream, step)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, point, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
    kept = None if room is None else kept_of(logits.float(), left, room)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0], kept


def log_distribution(logits: Tensor, temperature: float, top_k: int, top_p: float, capped: bool = False) -> Tensor:
    """fp32 log-probs [B, V] of the distribution to sample from: temperature, top-k, top-p, then renormalised."""
    return (truncate(logits, temperature, top_k, top_p, capped) / (temperature or 1.0)).log_softmax(-1)


def truncate(logits: Tensor, temperature: float, top_k: int, top_p: float, capped: bool) -> Tensor:
    """fp32 logits [B, V], -inf where a token cannot be drawn. Temperature 0 keeps all.

    Tokens as likely as the last kept one stay, too. capped: at most MOST tokens stay; if more are tied at that border,
    none of the tied ones stays, unless they are the likeliest.
    """
    logits = logits.float()
    if temperature == 0:
        return logits
    size = logits.shape[-1]
    if capped and size > MOST:
        highest = logits.topk(MOST + 1, dim=-1).values
        fit = highest > highest[:, -1:]
        least = torch.where(fit, highest, torch.inf).amin(-1, keepdim=True)
        least = torch.where(fit[:, :1], least, highest[:, :1])
        logits = logits.masked_fill(logits < least, -torch.inf)
    if 0 < top_k < size:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        ordered = logits.sort(-1, descending=True).values
        probs = (ordered.double() / temperature).softmax(-1)  # fp32 over a large vocabulary would not sum to 1
        beyond = probs.cumsum(-1) - probs >= top_p  # the likelier tokens suffice already
        least = ordered.masked_fill(beyond, torch.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill(logits < least, -torch.inf)
    return logits


def kept_of(logits: Tensor, left: Tensor, room: int) -> Kept:
    """A record of what `truncate` kept of logits [B, V]."""
    kept = left > -torch.inf
    highest, least = logits.amax(-1), torch.where(kept, logits, torch.inf).amin(-1)
    beyond = torch.where(kept, -torch.inf, logits).amax(-1)  # -inf: nothing was dropped
    ids = torch.full((len(logits), room + 1), -1, dtype=torch.int32, device=logits.device)
    if room:
        place = kept.cumsum(-1) - 1
        index = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device).expand_as(kept)
        ids.scatter_(1, torch.where(kept & (place < room), place, room), index)  # the last column holds what is dropped
    return Kept(kept.sum(-1, dtype=torch.int32), highest - (least / 2 + beyond / 2), ids[:, :room])
