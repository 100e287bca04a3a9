"""Read prompts: feed them to rows of the scratch cache, and compress those that are too long.

A prompt that is too long is compressed once, after it was read. With `Compressor.prompt_chunk` it is compressed after
every chunk of so many tokens, so a scratch row only needs room for the budget and a chunk. Chunks lie at fixed places
of a prompt, and the trace records every eviction.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..attention import Feed
from ..cache import SlotCache
from ..compressors import Compressor
from ..kernels import ops
from ..kernels.modules import reading
from ..models.routing import RouteRecorder
from .decode import forward, never_in
from .evict import evict
from .queue import Waiting
from .sent import sent, sent_together


@dataclass
class Read:
    """The state after reading prompts into the first N rows of the scratch cache."""

    logits: Tensor  # [N, V] after the last token of each
    trace: Tensor | None  # [N, L, H, P]; None: nothing was evicted
    used: list[int]  # slots that each prompt takes
    fine: Tensor  # bool: whether the compressor returned valid slots
    routes: list[Tensor] | None = None  # with a recorder: the experts of each prompt's tokens, [P, M, k]

    def routes_of(self, prompt: int, length: int) -> Tensor | None:
        return None if self.routes is None else self.routes[prompt][:length].clone()


@dataclass(frozen=True)
class Reader:
    """Reads prompts into a scratch cache."""

    model: nn.Module
    compressor: Compressor
    together: int  # about how many tokens are fed at a time
    trace_like: Tensor  # has the dtype and the device of the trace
    recorder: RouteRecorder | None = None
    known: Sequence[nn.Module] = field(default=(), repr=False)  # modules that may be fused

    def read(self, scratch: SlotCache, prompts: list[Waiting]) -> Read:
        """Feed N prompts, the shorter ones padded at their end.

        Padding would change the states of recurrent layers, so with such layers only neighbours of the same length go
        together; some take a prompt only whole.
        """
        if scratch.states is None:
            return self._read(scratch, prompts, self.together)
        parts: list[Read] = []
        for length, same in itertools.groupby(prompts, key=lambda w: len(w.prompt)):
            group = list(same)
            first = sum(len(part.used) for part in parts)
            together = self.together if scratch.states.continues else len(group) * length
            parts.append(self._read(scratch.part(slice(first, first + len(group))), group, together))
        return _join(parts, max(len(w.prompt) for w in prompts), self.trace_like)

    def _read(self, scratch: SlotCache, prompts: list[Waiting], together: int) -> Read:
        """Feed prompts that may be fed together."""
        device, lengths = scratch.device, [len(w.prompt) for w in prompts]
        n, longest = len(prompts), max(lengths)
        table = torch.tensor([w.prompt + [0] * (longest - len(w.prompt)) for w in prompts])  # [N, P]
        tokens, ends = sent_together([table, torch.tensor(lengths)], device)
        long = [i for i, length in enumerate(lengths) if self.compressor.evicts_prompt(length)]
        shape = (n, scratch.shape.layers, scratch.shape.heads, longest)
        trace = self.trace_like.new_full(shape, never_in(self.trace_like)) if long else None
        fine = torch.ones((), dtype=torch.bool, device=device)
        used = [0] * n
        logits: Tensor | None = None
        routes: list[Tensor] = []
        chunk = self.compressor.prompt_chunk if long else 0
        for start, stop, ends_chunk in pieces(longest, max(1, together // n), chunk):
            index = torch.arange(start, stop, device=device).expand(n, -1)
            slot = index if used == [start] * n else index - start + sent(used, device)[:, None]
            slot = slot.clamp(max=scratch.capacity - 1)  # of prompts that have ended, whose last slot is free
            feed = Feed(
                scratch, slot, index, span=span_of(scratch, max(used) + stop - start), first=start == 0,
                ends=ends if min(lengths) < longest else None,
            )  # fmt: skip
            into = None if self.recorder is None else self.recorder.empty(index.numel(), device)  # [M, N * c, k]
            with reading(self.known, device):
                new = forward(self.model, tokens[:, start:stop], feed)
            if into is not None:
                routes.append(into.unflatten(1, (n, -1)).permute(1, 2, 0, 3))
            logits = new if logits is None else torch.where((ends > start)[:, None], new, logits)
            used = [have + max(0, min(stop, length) - start) for have, length in zip(used, lengths)]
            for i in long if ends_chunk else ():
                if used[i] > self.compressor.least_budget:
                    assert trace is not None
                    fine &= _compress(scratch, self.compressor, i, used[i], min(stop, lengths[i]), prompts[i], trace)
                    used[i] = self.compressor.least_budget
        assert logits is not None
        return Read(logits, trace, used, fine, list(torch.cat(routes, 1)) if routes else None)


def _join(parts: list[Read], longest: int, trace_like: Tensor) -> Read:
    """Parts one after the other; traces are padded to the longest prompt."""
    used, fine = [n for part in parts for n in part.used], torch.stack([part.fine for part in parts]).all()
    logits = torch.cat([part.logits for part in parts])
    some = next((part.trace for part in parts if part.trace is not None), None)
    routes = None if parts[0].routes is None else [r for part in parts for r in part.routes or ()]
    if some is None:
        return Read(logits, None, used, fine, routes)
    trace = trace_like.new_full((len(used), *some.shape[1:3], longest), never_in(trace_like))
    first = 0
    for part in parts:
        if part.trace is not None:
            trace[first : first + len(part.used), :, :, : part.trace.shape[3]] = part.trace
        first += len(part.used)
    return Read(logits, trace, used, fine, routes)


def pieces(longest: int, together: int, chunk: int) -> list[tuple[int, int, bool]]:
    """(start, stop, whether it ends a chunk) of the tokens fed at a time. chunk 0: the prompt is one chunk"""
    chunk = chunk or longest
    found = []
    for first in range(0, longest, chunk):
        last = min(first + chunk, longest)
        for start in range(first, last, together):
            stop = min(start + together, last)
            found.append((start, stop, stop == last))
    return found


def _compress(
    scratch: SlotCache, compressor: Compressor, row: int, used: int, fed: int, prompt: Waiting, trace: Tensor
) -> Tensor:
    """Evict one prompt, of which `fed` tokens were fed, down to the budget. -> bool: whether the slots were valid"""
    columns = [[row], [fed], [prompt.prompt_stream], [len(prompt.prompt)]]
    rows, feds, stream, lengths = sent(columns, scratch.device)
    live = torch.ones_like(rows).bool()
    return evict(scratch, compressor, rows, used, feds, stream, lengths, trace, live, tokens=fed)


def span_of(cache: SlotCache, used: int) -> int:
    """How many slots to read, of rows that use so many."""
    multiple = ops.rules(cache.device).slot_multiple
    return min(cache.capacity, -(-used // multiple) * multiple)
