"""Reading prompts: feed them to rows of the scratch cache, and compress those that are too long."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..attention import Feed
from ..cache import SlotCache
from ..compressors import Compressor
from ..models.routing import RouteRecorder
from .decode import forward, never_in
from .evict import evict
from .queue import Waiting


def feed_prompts(
    model: nn.Module,
    scratch: SlotCache,
    prompts: list[list[int]],
    chunk_tokens: int,
    recorder: RouteRecorder | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Feed N prompts densely, `chunk_tokens` at a time, the shorter ones padded at their end.

    -> logits [N, V], and with a recorder through which experts the tokens went, [N, P, M, k]
    """
    device, lengths = scratch.keys.device, [len(prompt) for prompt in prompts]
    n, longest = len(prompts), max(lengths)
    tokens = torch.tensor([prompt + [0] * (longest - len(prompt)) for prompt in prompts], device=device)  # [N, P]
    ends = torch.tensor(lengths, device=device)
    ragged = min(lengths) < longest
    index = torch.arange(longest, device=device).expand(n, -1)
    chunk = max(1, chunk_tokens // n)
    logits, routes = None, []
    for start in range(0, longest, chunk):
        part = slice(start, min(start + chunk, longest))
        here = index[:, part]
        feed = Feed(scratch, here, here, span=part.stop, first=start == 0, ends=ends if ragged else None)
        into = None if recorder is None else recorder.empty(here.numel(), device)  # [M, N * c, k]
        new = forward(model, tokens[:, part], feed)
        if into is not None:
            routes.append(into.unflatten(1, (n, -1)).permute(1, 2, 0, 3))
        logits = new if logits is None else torch.where((ends > start)[:, None], new, logits)
    assert logits is not None
    return logits, torch.cat(routes, 1) if routes else None


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
