"""Fold while decoding: a row whose chunk is complete feeds a beacon instead of its next token, and keeps only the
beacon's cache entry.

All rows do the same step, on tensors: choose what to feed (`begin`), run the model, sample in rows that fed a token,
and in rows that fed a beacon move its entry to where the chunk began (`fold`). The token sampled before the beacon
waits. If the policy chooses its folds (beacon/choice.py), it does so in `begin`, from the state after the last token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..beacon import BeaconEmbedding, beacon_of, beaconed, choice_logprobs, chosen_before, place_choices
from ..cache import SlotCache
from ..compressors import Compressor
from ..compressors.beacon import Beacon
from ..streams import choice_numbers

if TYPE_CHECKING:
    from .decode import RowState


@dataclass
class Chunks:
    """How far every row has been folded. R rows, at most N new tokens."""

    open: Tensor  # [R] tokens fed since the last beacon
    folded: Tensor  # [R] beacons fed
    surprise: Tensor  # [R] fp32: minus the sum of the open tokens' log-probs
    ends: Tensor  # bool [R, N]: the response tokens after which a beacon was fed
    logit: Tensor  # [R] fp32: z of the choice, after the token fed last
    choices: Tensor  # fp32 [R, N]: log-probs of the choices before the response tokens; [R, 0] if nothing is chosen

    @classmethod
    def empty(cls, rows: int, new: int, device: torch.device, chooses: bool = False) -> Chunks:
        open_tokens, folded = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2))
        ends = torch.zeros(rows, new, dtype=torch.bool, device=device)
        surprise, logit = (torch.zeros(rows, device=device) for _ in range(2))
        choices = torch.zeros(rows, new if chooses else 0, device=device)
        return cls(open_tokens, folded, surprise, ends, logit, choices)

    @property
    def tensors(self) -> list[Tensor]:
        return [self.open, self.folded, self.surprise, self.ends, self.logit, self.choices]

    def start(self, rows: Tensor | slice) -> None:
        for tensor in self.tensors:
            tensor[rows] = 0


@dataclass(frozen=True)
class Turn:
    """What each of the first B rows feeds in this step. All fields [B]"""

    token: Tensor
    position: Tensor
    folding: Tensor  # bool: the token is the beacon


class Folding:
    """Runs decode steps of rows that fold, and collects what such rows fed."""

    def __init__(self, model: nn.Module, cache: SlotCache, state: RowState, compressor: Compressor):
        beacon = beacon_of(model)
        assert beacon is not None and isinstance(compressor, Beacon)
        self.beacon, self.compressor, self.cache, self.state = beacon, compressor, cache, state

    def step(
        self,
        width: int,
        live: Tensor,
        forward: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]],
        sample: Callable[[Tensor], None],
    ) -> None:
        """One step of the first `width` rows. forward: (token, position) [B] -> logits [B, V] and, if the policy
        chooses its folds, the states [B, hidden] before the head; sample: samples from logits
        """
        done = self.state.done[:width]
        turn = begin(self.state, width, live, self.beacon, self.compressor)
        logits, hidden = forward(turn.token, turn.position)
        if hidden is not None and self.state.chunks is not None:
            known = self.state.chunks.logit[:width]
            known.copy_(torch.where(live & ~turn.folding, self.beacon.choice_logits(hidden), known))
        done |= turn.folding  # nothing is sampled from a beacon's output
        sample(logits)
        done &= ~turn.folding
        fold(self.cache, self.state, turn)

    def evidence(
        self, rows: list[int], prompts: list[Tensor], counts: list[int], responses: Tensor, logprobs: Tensor
    ) -> list[dict[str, Any]]:
        """What each row fed, tokens and beacons, as fields of its trajectory. responses, logprobs [N, n]"""
        shape, before = self.cache.shape, torch.tensor([len(prompt) for prompt in prompts])
        whole = [torch.cat([p, response[:n]]) for p, response, n in zip(prompts, responses, counts, strict=True)]
        tokens, lengths = pad_sequence(whole, batch_first=True), before + torch.tensor(counts)
        nth = torch.arange(tokens.shape[1]) - before[:, None]  # which token of the response
        assert self.state.chunks is not None
        ends = self.state.chunks.ends[rows, : max(counts)].cpu()
        ends = ends.gather(1, nth.clamp(0, max(counts) - 1)) & (nth >= 0) & (nth < torch.tensor(counts)[:, None])
        fed = beaconed(self.beacon, tokens, before, lengths, ends, shape.layers, shape.heads)
        evidence: list[dict[str, Any]] = [
            {
                "tokens": row.tokens,
                "positions": row.positions,
                "trace": row.trace.with_slots(shape.slots, ties),
                "beacon_id": row.beacon_id,
                "sampler_logprobs": torch.zeros(len(row.tokens)).masked_scatter(row.sampled, logprob[:count]),
            }
            for row, logprob, count, ties in zip(fed, logprobs, counts, self.state.ties_of(rows), strict=True)
        ]
        if self.compressor.chooses:
            for line, row, more in zip(evidence, fed, self.chosen(rows, counts), strict=True):
                place = place_choices(row.sampled, *more[:2])
                line["sampler_logprobs"][place] += more[2]
                line["choices"] = torch.zeros(len(row.tokens), dtype=torch.bool).index_fill(0, place, True)
        return evidence

    def chosen(self, rows: list[int], counts: list[int]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """For every row: bool [n], the tokens after which a beacon was fed; bool [n], the tokens before which there was
        a choice; and the log-probs of these choices, fp32.
        """
        chunks, (least, most) = self.state.chunks, (self.compressor.least, self.compressor.chunk)
        assert chunks is not None and least is not None
        ends, logprobs = (tensor[rows, : max(counts)].cpu() for tensor in (chunks.ends, chunks.choices))
        choices = chosen_before(ends, torch.tensor(counts), least, most)
        return [
            (end[:count], choice[:count], logprob[:count][choice[:count]])
            for end, choice, logprob, count in zip(ends, choices, logprobs, counts, strict=True)
        ]


def begin(state: RowState, width: int, live: Tensor, beacon: BeaconEmbedding, compressor: Beacon) -> Turn:
    """Choose what each of the first rows feeds: its next token or a beacon. live bool [B]"""
    chunks, index = state.chunks, state.index[:width]
    assert chunks is not None
    tokens, folded, surprise = chunks.open[:width], chunks.folded[:width], chunks.surprise[:width]
    folding = compressor.closes(tokens, surprise) & live
    if compressor.least is not None:
        folding |= choose(state, width, live & ~folding & (tokens >= compressor.least))
    feeding = live & ~folding
    last = (state.count[:width] - 1).clamp(min=0)[:, None]
    surprise -= state.logprobs[:width].gather(1, last)[:, 0] * feeding
    tokens += feeding
    folded += folding
    position = index if beacon.position == "own" else index - folded
    return Turn(torch.where(folding, beacon.id, state.token[:width]), position, folding)


def choose(state: RowState, width: int, asked: Tensor) -> Tensor:
    """Which of the rows that are asked choose to fold; records the choices. bool [B]"""
    chunks = state.chunks
    assert chunks is not None
    logit, place = chunks.logit[:width], (state.count[:width] - 1).clamp(min=0)  # the token that waits
    folds = asked & (choice_numbers(state.stream[:width], place) < logit.double().sigmoid())
    rows = torch.arange(width, device=asked.device)
    chunks.choices[rows, place] = torch.where(asked, choice_logprobs(logit, folds), chunks.choices[rows, place])
    return folds


def fold(cache: SlotCache, state: RowState, turn: Turn) -> None:
    """In rows that fed a beacon, move its entry to where the chunk began, and free the chunk's slots."""
    chunks, folding = state.chunks, turn.folding
    assert chunks is not None
    width = len(folding)
    rows = torch.arange(width, device=folding.device)
    used = state.used[:width]
    at = used.clamp(max=cache.capacity - 1)
    to = torch.where(folding, at - chunks.open[:width], at)
    for tensor in [tensor for stored in cache.stored for tensor in stored.tensors]:
        tensor[:, rows, :, to] = tensor[:, rows, :, at]
    ended = (state.count[:width] - 2).clamp(min=0)  # the last token fed; the one sampled after it waits
    chunks.ends[rows, ended] |= folding
    used.copy_(torch.where(folding, to + 1, used))
    state.index[:width] += folding
    chunks.open[:width] *= ~folding
    chunks.surprise[:width] *= ~folding
