"""What prompts and given tokens leave in a cache, read one way or another."""

import torch
from torch import Tensor

from sparse_rl import Engine
from sparse_rl.cache import SlotCache
from sparse_rl.rollout.feed import Chunk, Feeder
from sparse_rl.rollout.live_loop import LiveLoop
from sparse_rl.rollout.queue import Waiting
from tests.helpers.decoding import change_rules
from tests.helpers.models import prompts_of

ON_A_GPU = dict(feeds_together=True, adds_masks=True, slot_multiple=16)  # how it feeds many rows at a time
PROMPTS = (9, 17, 5, 21, 12, 17)


def read_as_on_a_gpu(monkeypatch, fused: bool) -> None:
    """On a CPU, feed rows together; fused: known layers by what computes them on a GPU, or by its twins."""
    change_rules(monkeypatch, **ON_A_GPU, fuses_prompts=fused)


def loop_of(model, compressor="rkv", rows=8, interval=16, **options) -> LiveLoop:
    """The loop of an open engine, whose rows are empty. Budget 16, prompts of up to 24 tokens"""
    together = dict(prefill_rows=len(PROMPTS), prefill_chunk=16384)
    engine = Engine(model, compressor, budget=16, interval=interval, rows=rows, **together, **options)
    engine.storage.reserve_live(24, 120, 16)
    return LiveLoop(engine, 120, 0, None, 0)


def read(model, compressor="rkv", **options) -> tuple[Tensor, SlotCache]:
    """Read six prompts together -> logits, and the scratch that holds them"""
    loop = loop_of(model, compressor, **options)
    with loop.engine._switched():
        loop.prefill([Waiting(i, prompt, i, []) for i, prompt in enumerate(prompts_of(*PROMPTS))])
    return loop.ready_logits, loop.scratch


def feeding(model, compressor="rkv", **options) -> tuple[Feeder, list[Chunk], LiveLoop]:
    """A cache whose rows hold six prompts, and chunks for five of these, three of which then are full."""
    loop = loop_of(model, compressor, **options)
    with loop.engine._switched():
        loop.prefill([Waiting(i, prompt, i, []) for i, prompt in enumerate(prompts_of(*PROMPTS))])
        rows = torch.tensor([7, 1, 2, 3, 5, 0], device=loop.device)
        loop.cache.fork(loop.scratch, torch.arange(len(PROMPTS), device=loop.device), rows, max(PROMPTS))
    full = loop.cache.capacity - torch.tensor(PROMPTS)
    lengths = [full[0], 4, full[2], 7, full[4]] if loop.cache.states is None else [3, 6, 3, 6, 3]
    given = prompts_of(*map(int, lengths), seed=1)
    chunks = [Chunk(int(rows[i]), tokens, PROMPTS[i], PROMPTS[i]) for i, tokens in enumerate(given)]
    return loop.feeder, chunks, loop


def fed(model, compressor="rkv", **options) -> tuple[dict[int, Tensor], SlotCache, int]:
    """Feed the chunks -> by row, logits after its last token; the cache; in how many groups. No other row changes"""
    feeder, chunks, loop = feeding(model, compressor, **options)
    logits, others = {}, [4, 6, 0]  # two empty rows, and one whose prompt is all that it is fed
    before = [tensor[:, others].clone() for tensor in loop.cache.tensors]
    with loop.engine._switched():
        groups = feeder.groups(chunks)
        for group in groups:
            found = feeder.feed(group)
            assert found.rows.tolist() == [chunk.row for chunk in group]
            assert found.used.tolist() == [chunk.used + len(chunk.tokens) for chunk in group]
            assert found.index.tolist() == [chunk.fed + len(chunk.tokens) - 1 for chunk in group]
            logits |= {chunk.row: one for chunk, one in zip(group, found.logits, strict=True)}
    assert all(tensor[:, others].equal(old) for tensor, old in zip(loop.cache.tensors, before, strict=True))
    return logits, loop.cache, len(groups)
