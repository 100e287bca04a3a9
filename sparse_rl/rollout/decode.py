"""One decode step for all rows: feed the last token, sample the next, write it down. Tensors only, no word with the host.

A row runs while it is not done and has a free slot; one whose slots are full waits, untouched, until it has been evicted. So the host may
run several steps before it looks, and what a sequence does is the same however many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import kernels
from ..attention import Feed
from ..cache import SlotCache, Trace
from ..cache.trace import never, trace_dtype
from ..errors import SparseRLError
from .fold import Chunks
from .sampling import Sampling, sample


@dataclass
class RowState:
    """What every row is doing. R rows, N new tokens at most, T tokens at most; `trace` holds uint16 as int16 bits."""

    token: Tensor  # [R] sampled last, to be fed next
    index: Tensor  # [R] its feed index
    used: Tensor  # [R] slots in use
    stream: Tensor  # [R] the sequence's random stream
    count: Tensor  # [R] tokens sampled
    done: Tensor  # [R] bool: idle, or finished and not yet collected
    tokens: Tensor  # [R, N]
    logprobs: Tensor  # [R, N] fp32
    trace: Tensor  # [R, L, H, T]
    limit: Tensor  # [1] new tokens of this call, at most N
    capacity: Tensor  # [1] slots at which a row of this call is full, at most the cache's
    chunks: Chunks | None = None  # of rows that are folded into beacons

    @classmethod
    def empty(cls, cache: SlotCache, tokens: int, new: int, folds: bool = False) -> RowState:
        rows, device = cache.rows, cache.keys.device
        zeros = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(5)]
        done = torch.ones(rows, dtype=torch.bool, device=device)
        record = torch.zeros(rows, new, dtype=torch.int64, device=device)
        limit, capacity = torch.tensor([[new], [cache.capacity]], device=device).unbind()
        chunks = Chunks.empty(rows, new, device) if folds else None
        return cls(*zeros, done, record, record.float(), empty_trace(cache, tokens), limit, capacity, chunks)

    @property
    def never(self) -> int:
        """`evicted_at` of a token that stays, in the bits of `trace`."""
        return -1 if self.trace.dtype == torch.int16 else never(self.trace.dtype)

    @property
    def by_row(self) -> list[Tensor]:
        own = [getattr(self, name) for name in self.__dataclass_fields__ if name not in ("limit", "capacity", "chunks")]
        return own + (self.chunks.tensors if self.chunks else [])

    def begin(self, new: int, capacity: int) -> None:
        """A new call: every row is idle."""
        self.limit.fill_(new)
        self.capacity.fill_(capacity)
        self.done.fill_(True)

    def live(self, width: int) -> Tensor:
        """Of the first `width` rows, those that take part in a step. bool [B]"""
        return ~self.done[:width] & (self.used[:width] < self.capacity)

    def live_and_full(self) -> Tensor:
        """Rows that would run, had they a free slot. bool [R]"""
        return ~self.done & (self.used >= self.capacity)

    def move(self, source: Tensor, to: Tensor) -> None:
        for tensor in self.by_row:
            tensor[to] = tensor[source]
        self.done[source] = True

    def start(self, rows: Tensor, used: Tensor, fed: Tensor, stream: Tensor) -> None:
        """Fresh sequences whose prompts have been fed; their first tokens are recorded next. All [N]"""
        self.used[rows], self.index[rows], self.stream[rows] = used, fed - 1, stream
        self.count[rows], self.done[rows] = 0, False
        self.trace[rows] = self.never
        if self.chunks is not None:
            self.chunks.start(rows)

    def record(self, rows: slice | Tensor, tokens: Tensor, logprobs: Tensor, stop_ids: Tensor, live: Tensor) -> None:
        """Write down what was sampled for those rows that run. tokens, logprobs, live [B]

        A log-prob that is not finite ends the row too, so that it is the last one written when the host looks.
        """
        place = self.count[rows].clamp(max=self.tokens.shape[1] - 1)
        which = torch.arange(len(self.count), device=tokens.device)[rows]
        for record, new in ((self.tokens, tokens), (self.logprobs, logprobs)):
            record[which, place] = torch.where(live, new, record[which, place])
        self.token[rows] = torch.where(live, tokens, self.token[rows])
        self.count[rows] += live
        self.index[rows] += live
        ended = (tokens[:, None] == stop_ids).any(1) | (self.count[rows] >= self.limit) | ~logprobs.isfinite()
        self.done[rows] |= live & ended

    def traces_of(self, rows: list[int], tokens: list[int]) -> list[Trace]:
        """Copies on the CPU (the rows will be reused) of as many tokens as each trajectory has."""
        copied = self.trace[rows, :, :, : max(tokens)].cpu()
        return [_as_trace(copied[i, :, :, :n]) for i, n in enumerate(tokens)]


def empty_trace(cache: SlotCache, tokens: int) -> Tensor:
    """[R, L, H, T], to be filled; uint16 as int16 bits, which every operation knows."""
    dtype = torch.int32 if trace_dtype(tokens) == torch.int32 else torch.int16
    return torch.empty(cache.rows, cache.shape.layers, cache.shape.heads, tokens, dtype=dtype, device=cache.keys.device)


def _as_trace(evicted_at: Tensor) -> Trace:
    """[L, H, T], uint16 as int16 bits or int32"""
    dtype = trace_dtype(evicted_at.shape[-1])
    evicted_at = evicted_at.clone()
    if evicted_at.dtype == torch.int16:
        return Trace(evicted_at.view(torch.uint16))
    if dtype == torch.uint16:  # the call allowed for more tokens than this trajectory has
        return Trace(evicted_at.clamp(max=never(dtype)).to(dtype))
    return Trace(evicted_at)


def forward(model: nn.Module, tokens: Tensor, feed: Feed) -> Tensor:
    """Logits [B, V] after the last of the tokens being fed, or with `feed.ends` after the last real one if it is among them. tokens [B, T]

    On the CPU a matrix product rounds a row the same way whatever the number of rows, from four rows on (with several threads: in
    multiples of four). Padding to that makes what a sequence does independent, to the bit, of how many run beside it.
    """
    rows, length = tokens.shape
    padding = -rows % 4 if tokens.device.type == "cpu" and length < 4 else 0
    position = feed.index if feed.position is None else feed.position
    if padding:
        tokens, position = (torch.cat([x, x[:1].expand(padding, -1)]) for x in (tokens, position))
    if feed.ends is None:
        logits = model(
            input_ids=tokens, position_ids=position, use_cache=False, logits_to_keep=1, slots_feed=feed
        ).logits
    else:
        last = (feed.ends - 1 - feed.index[:, 0]).clamp(0, length - 1)
        logits = _logits_at(model, last, input_ids=tokens, position_ids=position, use_cache=False, slots_feed=feed)
    missed = set(range(feed.cache.shape.layers)) - feed.layers_seen
    if missed:
        raise SparseRLError(
            f"{type(model).__name__}: layers {sorted(missed)} did not use the replaced attention: not supported."
        )
    return logits[:rows, -1]


def _logits_at(model: nn.Module, place: Tensor, **inputs) -> Tensor:
    """Logits [B, 1, V] of one token per row: the head is shown these tokens alone. place [B]"""
    rows = torch.arange(len(place), device=place.device)
    hook = model.get_output_embeddings().register_forward_pre_hook(
        lambda _, args: (args[0][rows, place][:, None], *args[1:])
    )
    try:
        return model(**inputs).logits
    finally:
        hook.remove()


def forward_modules(
    model: nn.Module, cache: SlotCache, state: RowState, token: Tensor, position: Tensor, live: Tensor | None, span: int
) -> Tensor:
    """Logits after a token of each of the first rows, by the model's own modules. Works for every architecture. token, position [B]"""
    width = len(token)
    slot = state.used[:width].clamp(max=cache.capacity - 1)[:, None]
    feed = Feed(cache, slot, state.index[:width, None], span, position=position[:, None], live=live)
    return forward(model, token[:, None], feed)


def sample_next(logits: Tensor, state: RowState, sampling: Sampling, stop_ids: Tensor, live: Tensor | None) -> None:
    """Sample a token for every row that runs, and write it down. logits [B, V]"""
    width = len(logits)
    if logits.is_cuda and kernels.has_triton():
        from ..kernels.sample import sample_and_record

        sample_and_record(logits, state, sampling.temperature, stop_ids, sampling.top_k, sampling.top_p)
        return
    live = state.live(width) if live is None else live
    tokens, logprobs = sample(logits, state.stream[:width], state.count[:width], sampling)
    state.used[:width] += live
    state.record(slice(0, width), tokens, logprobs, stop_ids, live)
