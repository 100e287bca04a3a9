"""One decode step for all rows: feed the last token, sample the next, write it down. Tensors only, no word with the host.

Left for the captured version: row counts are already fixed and nothing here depends on values the host would have to read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..attention import Feed
from ..cache import SlotCache, Trace
from ..cache.trace import never, trace_dtype
from ..errors import SparseRLError
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

    @classmethod
    def empty(cls, cache: SlotCache, tokens: int, new: int) -> RowState:
        rows, device = cache.rows, cache.keys.device
        wide = trace_dtype(tokens) == torch.int32
        trace = torch.empty(rows, cache.shape.layers, cache.shape.heads, tokens, dtype=torch.int32 if wide else torch.int16, device=device)
        zeros = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(5)]
        done = torch.ones(rows, dtype=torch.bool, device=device)
        record = torch.zeros(rows, new, dtype=torch.int64, device=device)
        return cls(*zeros, done, record, record.float(), trace)

    @property
    def never(self) -> int:
        """`evicted_at` of a token that stays, in the bits of `trace`."""
        return -1 if self.trace.dtype == torch.int16 else never(self.trace.dtype)

    @property
    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.__dataclass_fields__]

    def move(self, source: int, to: int) -> None:
        for tensor in self.tensors:
            tensor[to] = tensor[source]
        self.done[source] = True

    def start(self, row: int, used: int, fed: int, stream: int, prompt_trace: Tensor) -> None:
        """A fresh sequence whose prompt has been fed; its first token is recorded next. prompt_trace [L, H, P]"""
        self.used[row], self.index[row], self.stream[row] = used, fed - 1, stream
        self.count[row], self.done[row] = 0, False
        self.trace[row] = self.never
        self.trace[row, :, :, :fed] = prompt_trace

    def record(self, rows: slice, tokens: Tensor, logprobs: Tensor, stop_ids: Tensor) -> None:
        """Write down what was sampled for those rows that are not done. tokens, logprobs [B]"""
        live = ~self.done[rows]
        place = self.count[rows].clamp(max=self.tokens.shape[1] - 1)[:, None]
        for record, new in ((self.tokens[rows], tokens), (self.logprobs[rows], logprobs)):
            record.scatter_(1, place, torch.where(live[:, None], new[:, None], record.gather(1, place)))
        self.token[rows] = torch.where(live, tokens, self.token[rows])
        self.count[rows] += live
        self.index[rows] += live
        self.done[rows] |= torch.isin(tokens, stop_ids) | (self.count[rows] >= self.tokens.shape[1])

    def record_evictions(self, rows: Tensor, fed: Tensor, evicted: Tensor) -> None:
        """rows, fed [N]; evicted feed indices [L, N, H, X] are invisible from query `fed` on."""
        layers, _, heads, _ = evicted.shape
        layer = torch.arange(layers, device=rows.device)[:, None, None, None]
        head = torch.arange(heads, device=rows.device)[None, None, :, None]
        value = fed.to(self.trace.dtype)[None, :, None, None].expand(evicted.shape)
        self.trace[rows[None, :, None, None], layer, head, evicted.long()] = value

    def trace_of(self, row: int, tokens: int) -> Trace:
        evicted_at = self.trace[row, :, :, :tokens].clone().cpu()  # a copy: the row will be reused
        dtype = trace_dtype(tokens)
        if evicted_at.dtype == torch.int16:
            return Trace(evicted_at.view(torch.uint16))
        if dtype == torch.uint16:  # the call allowed for more tokens than this trajectory has
            return Trace(evicted_at.clamp(max=never(dtype)).to(dtype))
        return Trace(evicted_at)


def forward(model: nn.Module, tokens: Tensor, feed: Feed) -> Tensor:
    """Logits [B, V] after the last of the tokens being fed. tokens [B, T]

    On the CPU a matrix product rounds a row the same way whatever the number of rows, from four rows on (with several threads: in
    multiples of four). Padding to that makes what a sequence does independent, to the bit, of how many run beside it.
    """
    rows, length = tokens.shape
    padding = -rows % 4 if tokens.device.type == "cpu" and length < 4 else 0
    index = feed.index
    if padding:
        tokens, index = (torch.cat([x, x[:1].expand(padding, -1)]) for x in (tokens, index))
    logits = model(input_ids=tokens, position_ids=index, use_cache=False, logits_to_keep=1, slots_feed=feed).logits
    missed = set(range(feed.cache.shape.layers)) - feed.layers_seen
    if missed:
        raise SparseRLError(f"{type(model).__name__}: layers {sorted(missed)} did not use the replaced attention: not supported.")
    return logits[:rows, -1]


def decode_step(model: nn.Module, cache: SlotCache, state: RowState, width: int, span: int, sampling: Sampling, stop_ids: Tensor) -> None:
    """Advance the first `width` rows by one token. Rows that are done feed and overwrite a slot nobody reads."""
    rows = slice(0, width)
    slot = state.used[rows].clamp(max=cache.capacity - 1)[:, None]
    logits = forward(model, state.token[rows, None], Feed(cache, slot, state.index[rows, None], span))
    tokens, logprobs = sample(logits, state.stream[rows], state.count[rows], sampling)
    state.used[rows] += ~state.done[rows]
    state.record(rows, tokens, logprobs, stop_ids)
