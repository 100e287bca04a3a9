"""Reading prompts: feed them to rows of the scratch cache, and compress those that are too long."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from ..attention import Feed
from ..cache import SlotCache
from ..compressors import Compressor
from .decode import forward, never_in
from .evict import evict
from .queue import Waiting


def feed_prompts(model: nn.Module, scratch: SlotCache, prompts: list[list[int]], chunk_tokens: int) -> Tensor:
    """Feed N prompts densely, `chunk_tokens` at a time, the shorter ones padded at their end. -> logits [N, V]

    Padding would change the states of recurrent layers, so with such layers only neighbours of the same length go
    together.
    """
    if scratch.states is None:
        return _feed_together(model, scratch, prompts, chunk_tokens)
    logits, first = [], 0
    for length, same in itertools.groupby(prompts, key=len):
        group = list(same)
        rows = scratch.part(slice(first, first + len(group)))
        whole = chunk_tokens if scratch.states.continues else len(group) * length
        logits.append(_feed_together(model, rows, group, whole))
        first += len(group)
    return torch.cat(logits)


def _feed_together(model: nn.Module, scratch: SlotCache, prompts: list[list[int]], chunk_tokens: int) -> Tensor:
    device, lengths = scratch.keys.device, [len(prompt) for prompt in prompts]
    n, longest = len(prompts), max(lengths)
    tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)  # [N, P]
    ends = torch.tensor(lengths, device=device)
    ragged = min(lengths) < longest
    index = torch.arange(longest, device=device).expand(n, -1)
    chunk = max(1, chunk_tokens // n)
    logits = None
    for start in range(0, longest, chunk):
        part = slice(start, min(start + chunk, longest))
        here = index[:, part]
        feed = Feed(scratch, here, here, span=part.stop, first=start == 0, ends=ends if ragged else None)
        new = forward(model, tokens[:, part], feed)
        logits = new if logits is None else torch.where((ends > start)[:, None], new, logits)
    assert logits is not None
    return logits


def compress_prompts(
    scratch: SlotCache, compressor: Compressor, prompts: list[Waiting], long: list[int], trace_like: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Evict those prompts in `long` down to the budget. -> their trace [N, L, H, P] (None: nothing is long), and
    whether the compressor returned what it must (bool). `trace_like` has the dtype and the device of the trace.
    """
    fine = torch.ones((), dtype=torch.bool, device=scratch.keys.device)
    if not long:
        return None, fine
    longest = max(len(w.prompt) for w in prompts)
    trace_shape = (len(prompts), scratch.shape.layers, scratch.shape.heads, longest)
    trace = trace_like.new_full(trace_shape, never_in(trace_like))
    for i in long:
        columns = [[i], [len(prompts[i].prompt)], [prompts[i].prompt_stream]]
        row, fed, stream = torch.tensor(columns, device=scratch.keys.device)
        live = torch.ones_like(row).bool()
        fine &= evict(scratch, compressor, row, len(prompts[i].prompt), fed, stream, fed, trace, live)
    return trace, fine
