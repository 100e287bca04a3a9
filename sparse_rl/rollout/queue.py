"""Records of where sequences are in a call: waiting, prefilled or running. They live on the host."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from torch import Tensor

from ..streams import stream_key


@dataclass(frozen=True)
class Waiting:
    """A prompt with the members of its group that have no row yet."""

    prompt_index: int
    prompt: list[int]
    prompt_stream: int
    streams: deque[tuple[int, int]]  # (sample index, random stream)


@dataclass(frozen=True)
class Prefilled:
    """A prompt in a row of the scratch cache, ready to be forked."""

    waiting: Waiting
    row: int
    used: int  # slots left after compression
    routes: Tensor | None = None  # [P, M, k] experts of its tokens, if recorded; shared by the group


@dataclass
class Row:
    """A running sequence."""

    waiting: Waiting
    sample_index: int
    used: int  # slots in use
    fed: int  # tokens fed
    count: int = 0  # tokens sampled by the last sync
    limit: int = 0  # the most tokens that it may sample
    prompt_routes: Tensor | None = None  # [P, M, k]
    stream: int | None = None  # of random numbers


def make_queue(prompts: list[list[int]], wanted: list[list[int]], seed: int) -> deque[Waiting]:
    """The queue of a call. Random streams follow from (seed, prompt, its earlier occurrences, sample number), so that
    repeated prompts get different samples.

    A prompt of which no sample is wanted also counts as an occurrence.
    """
    occurred: Counter[tuple[int, ...]] = Counter()
    queue: deque[Waiting] = deque()
    for i, (prompt, numbers) in enumerate(zip(prompts, wanted, strict=True)):
        occurrence = occurred[tuple(prompt)]
        occurred[tuple(prompt)] += 1
        streams = deque((sample, stream_key(seed, prompt, occurrence, sample)) for sample in numbers)
        if streams:
            queue.append(Waiting(i, prompt, stream_key(seed, prompt), streams))
    return queue
