"""Feed given tokens to rows that stopped, chunk by chunk; also rebuild a row by reading its tokens under its trace.

A chunk ends where its row is full or its turn ends, so where chunks lie depends on the row alone. Rows are fed where
they are: on a GPU many together, the shorter chunks padded at their end; on a CPU one at a time, so that rounding does
not depend on others. Padding is not stored, because a row may be full after its chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..attention import Feed
from ..cache import SlotCache
from ..cache.ties import KnownTies
from ..kernels.modules import reading
from ..models.routing import RouteRecorder
from ..planning.memory import most_fed
from .decode import forward
from .evict import evict_as
from .prefill import pieces, span_of
from .sent import sent_together


@dataclass(frozen=True)
class Chunk:
    """Given tokens to feed to one row at a time."""

    row: int
    tokens: list[int]
    used: int  # slots in use before
    fed: int  # tokens fed before


@dataclass(frozen=True)
class Fed:
    """What N rows are after a chunk, on the device."""

    rows: Tensor  # [N]
    used: Tensor  # [N] slots in use
    index: Tensor  # [N] the feed index of the last token
    logits: Tensor  # [N, V] after it
    routes: list[Tensor] | None  # with a recorder: the experts of the tokens, [n, M, k] each


@dataclass(frozen=True)
class Feeder:
    """Feeds given tokens to rows of a cache."""

    model: nn.Module
    cache: SlotCache
    scratch: SlotCache
    together: int  # about how many tokens are fed at a time
    most: int  # rows that are fed together at most
    recorder: RouteRecorder | None = None
    known: Sequence[nn.Module] = field(default=(), repr=False)  # modules that may be fused

    def groups(self, chunks: list[Chunk]) -> list[list[Chunk]]:
        """Chunks that are fed together, the longest first, so that those of a group are about equally long; with
        recurrent layers, whose states padding would change, exactly.
        """
        most = 1 if self.cache.ties is not None else self.most  # ties are noted row by row
        left = sorted(chunks, key=lambda chunk: -len(chunk.tokens)) if most > 1 else chunks
        groups: list[list[Chunk]] = []
        while left:
            longest = len(left[0].tokens)
            alike = sum(len(c.tokens) == longest for c in left) if self.cache.states is not None else len(left)
            fits = most_fed(self.cache.shape, self.cache.capacity, longest, self.together, self.device)
            n = -(-alike // -(-alike // min(most, fits)))  # as few groups as can be, and about equal ones
            groups.append(sorted(left[:n], key=lambda chunk: chunk.row))
            left = left[n:]
        return groups

    @property
    def device(self) -> torch.device:
        return self.cache.device

    def feed(self, chunks: list[Chunk]) -> Fed:
        """Feed chunks to different rows, in the order of these."""
        first, n = chunks[0].row, len(chunks)
        if [chunk.row for chunk in chunks] == list(range(first, first + n)):
            return self._feed(self.cache.part(slice(first, first + n)), chunks)
        return self._feed(self.cache, chunks, apart=True)

    def _feed(
        self,
        cache: SlotCache,
        chunks: list[Chunk],
        apart: bool = False,
        first: bool = False,
        known: KnownTies | None = None,
    ) -> Fed:
        """Feed chunks to the first rows of `cache`; if they lie `apart`, to their own rows. first: whether these are
        empty; known: ties, if they were fed before
        """
        n, device = len(chunks), cache.device
        lengths = torch.tensor([len(chunk.tokens) for chunk in chunks])
        longest, padded = int(lengths.max()), len(set(lengths.tolist())) > 1
        every = torch.tensor([token for chunk in chunks for token in chunk.tokens])
        real = torch.arange(longest) < lengths[:, None]
        table = torch.zeros(n, longest, dtype=torch.int64).masked_scatter_(real, every)
        columns = torch.tensor([(chunk.row, chunk.used, chunk.fed) for chunk in chunks]).T
        cuts = [(start, stop) for start, stop, _ in pieces(longest, max(1, self.together // n), 0)]
        stored = [real[:, start:stop].flatten().nonzero()[:, 0] for start, stop in cuts] if padded else []
        (rows, used, fed), length, tokens, *stored = sent_together([columns, lengths, table, *stored], device)
        ends, logits, routes = fed + length, None, []
        for i, (start, stop) in enumerate(cuts):
            place = torch.arange(start, stop, device=device)
            index = fed[:, None] + place
            feed = Feed(
                cache, used[:, None] + place, index, span=span_of(cache, max(c.used for c in chunks) + stop),
                first=first and start == 0, ends=ends if padded else None, rows=rows if apart else None,
                stored=stored[i] if padded else None, known=None if known is None else known.between(start, stop),
                position=index.minimum(ends[:, None] - 1) if padded else None,  # some models have none for the padding
            )  # fmt: skip
            into = None if self.recorder is None else self.recorder.empty(index.numel(), device)  # [M, N * c, k]
            with reading(self.known, device):
                new = forward(self.model, tokens[:, start:stop], feed)
            if into is not None:
                routes.append(into.unflatten(1, (n, -1)).permute(1, 2, 0, 3))
            logits = new if logits is None else torch.where((length > start)[:, None], new, logits)
        assert logits is not None
        experts = None
        if routes:
            experts = [r[: len(c.tokens)].clone() for r, c in zip(torch.cat(routes, 1), chunks, strict=True)]
        return Fed(rows, used + length, ends - 1, logits, experts)

    def recall(self, row: int, tokens: list[int], evicted_at: Tensor, ties: Tensor | None) -> int:
        """Read tokens into a row again, with the evictions and ties that their trace records. -> slots in use

        What takes more slots than a row has, of a long prompt, is read in the scratch. evicted_at int64 [L, H, T], T at
        least the number of tokens, on the device; ties [N, 4]
        """
        known, zero = KnownTies.of([ties], evicted_at.device), torch.zeros(1, dtype=torch.int64, device=self.device)
        own, scratch, n = self.cache.part(slice(row, row + 1)), self.scratch.part(slice(0, 1)), len(tokens)
        moments = {m for m in evicted_at.unique().tolist() if m <= n}
        cache, used, fed = own, 0, 0
        for moment in sorted(moments | {n}):
            if moment > fed:
                other = own if used + moment - fed <= own.capacity else scratch
                if other is not cache:
                    other.fork(cache, zero, zero, used)
                    cache = other
                ties_here = None if known is None else known.between(fed, moment)
                self._feed(cache, [Chunk(row, tokens[fed:moment], used, fed)], first=fed == 0, known=ties_here)
                used, fed = used + moment - fed, moment
            if moment in moments:
                used = evict_as(cache, used, evicted_at, moment)
        if cache is scratch:
            own.fork(scratch, zero, zero, used)
        return used
