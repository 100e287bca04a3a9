"""Feed given tokens to rows that stopped, chunk by chunk; also rebuild a row by reading its tokens under its trace.

A chunk ends where its row is full or its turn ends, so where chunks lie depends on the row alone. Rows are copied to
the scratch cache, fed there together, and copied back; on a CPU one at a time, so that rounding does not depend on
others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attention import Feed
from ..cache import SlotCache
from ..cache.ties import KnownTies
from ..models.routing import RouteRecorder
from .decode import forward
from .evict import evict_as
from .prefill import pieces
from .sent import sent


@dataclass(frozen=True)
class Chunk:
    """Given tokens to feed to one row at a time."""

    row: int
    tokens: list[int]
    used: int  # slots in use before
    fed: int  # tokens fed before


@dataclass(frozen=True)
class Feeder:
    """Feeds given tokens to rows of a cache."""

    model: nn.Module
    cache: SlotCache
    scratch: SlotCache
    together: int  # about how many tokens are fed at a time
    recorder: RouteRecorder | None = None

    def groups(self, chunks: list[Chunk]) -> list[list[Chunk]]:
        """Chunks that are fed together; with recurrent layers, whose states padding would change, only
        equal lengths.
        """
        parts = [chunks]
        if self.scratch.states is not None:
            parts = [[c for c in chunks if len(c.tokens) == n] for n in sorted({len(c.tokens) for c in chunks})]
        most = self.scratch.rows
        return [part[i : i + most] for part in parts for i in range(0, len(part), most)]

    def feed(self, chunks: list[Chunk]) -> tuple[Tensor, list[Tensor] | None]:
        """Feed chunks -> logits [N, V] after the last token of each; with a recorder also their experts,
        [n, M, k] each
        """
        n, device = len(chunks), self.cache.device
        rows = sent([chunk.row for chunk in chunks], device)
        desk = torch.arange(n, device=device)
        after = max(chunk.used + len(chunk.tokens) for chunk in chunks)
        self.scratch.fork(self.cache, rows, desk, max(chunk.used for chunk in chunks))
        logits, routes = self._feed(self.scratch.part(slice(0, n)), chunks, first=False)
        self.cache.fork(self.scratch, desk, rows, after)
        return logits, routes

    def _feed(
        self, scratch: SlotCache, chunks: list[Chunk], first: bool, known: KnownTies | None = None
    ) -> tuple[Tensor, list[Tensor] | None]:
        """Feed chunks to the rows of `scratch`. first: whether these are empty; known: ties, if they were fed before"""
        n, device = len(chunks), scratch.device
        lengths = [len(chunk.tokens) for chunk in chunks]
        longest, short = max(lengths), min(lengths)
        padded = [chunk.tokens + [0] * (longest - len(chunk.tokens)) for chunk in chunks]
        tokens = sent(padded, device)  # [N, T]
        used, fed, ends = sent([(c.used, c.fed, c.fed + len(c.tokens)) for c in chunks], device).T
        logits, routes = None, []
        for start, stop, _ in pieces(longest, max(1, self.together // n), 0):
            place = torch.arange(start, stop, device=device)
            index = fed[:, None] + place
            slot = (used[:, None] + place).clamp(max=scratch.capacity - 1)  # padding: no row uses the last slot
            span = min(scratch.capacity, max(c.used for c in chunks) + stop)
            feed = Feed(
                scratch, slot, index, span=span, first=first and start == 0, ends=ends if short < longest else None,
                known=None if known is None else known.between(start, stop),
            )  # fmt: skip
            into = None if self.recorder is None else self.recorder.empty(index.numel(), device)  # [M, N * c, k]
            new = forward(self.model, tokens[:, start:stop], feed)
            if into is not None:
                routes.append(into.unflatten(1, (n, -1)).permute(1, 2, 0, 3))
            logits = new if logits is None else torch.where((ends > fed + start)[:, None], new, logits)
        assert logits is not None
        if not routes:
            return logits, None
        return logits, [r[:length].clone() for r, length in zip(torch.cat(routes, 1), lengths, strict=True)]

    def recall(self, row: int, tokens: list[int], evicted_at: Tensor, ties: Tensor | None) -> int:
        """Read tokens into a row again, with the evictions and ties that their trace records. -> slots in use

        evicted_at int64 [L, H, T], T at least the number of tokens, on the device; ties [N, 4]
        """
        known = KnownTies.of([ties], evicted_at.device)
        scratch, n = self.scratch.part(slice(0, 1)), len(tokens)
        moments = {m for m in evicted_at.unique().tolist() if m <= n}
        used = fed = 0
        for moment in sorted(moments | {n}):
            if moment > fed:
                ties_here = None if known is None else known.between(fed, moment)
                self._feed(scratch, [Chunk(0, tokens[fed:moment], used, fed)], fed == 0, ties_here)
                used, fed = used + moment - fed, moment
            if moment in moments:
                used = evict_as(self.scratch, used, evicted_at, moment)
        to = sent([row], scratch.device)
        self.cache.fork(self.scratch, torch.zeros_like(to), to, used)
        return used
