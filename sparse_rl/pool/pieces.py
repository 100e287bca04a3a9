"""A piece of work: some completions of one prompt, with the same result whoever computes it.

What a completion samples depends on its prompt, how often this prompt has occurred in the request, its number in the
group, the seed, the weights and the budget. A piece holds or names all of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST_TOGETHER = 4  # completions of a piece: few, so that what is lost or late is little

Place = tuple[int, int]  # (request, number in the request)


@dataclass(frozen=True)
class Piece:
    prompt_index: int  # in its request
    prompt: tuple[int, ...]
    occurrence: int  # how often the same prompt came before it in the request
    members: tuple[int, ...]  # of its group
    seed: int
    version: int  # optimizer steps behind the weights to sample with
    budget: int | None = None  # slots kept at an eviction, where the budget moves
    expected: float = 1.0  # tokens of each completion
    diagnose: tuple[int, ...] = ()  # members that are looked at more closely


def cut(
    ids: Sequence[Sequence[int]],
    members: Sequence[Sequence[int]],
    seed: int,
    version: int,
    budget: int | None = None,
    expected: Sequence[float] | None = None,
    diagnose: Sequence[tuple[int, int]] = (),
) -> list[Piece]:
    """A request as pieces, in the order of its completions. diagnose: (prompt, member)"""
    occurred: Counter[tuple[int, ...]] = Counter()
    pieces = []
    for i, (prompt, wanted) in enumerate(zip(ids, members, strict=True)):
        tokens = tuple(prompt)
        occurrence, tokens_each = occurred[tokens], float(len(tokens)) if expected is None else expected[i]
        occurred[tokens] += 1
        for start in range(0, len(wanted), MOST_TOGETHER):
            part = tuple(wanted[start : start + MOST_TOGETHER])
            shown = tuple(member for prompt_index, member in diagnose if prompt_index == i and member in part)
            pieces.append(Piece(i, tokens, occurrence, part, seed, version, budget, tokens_each, shown))
    return pieces


def engine_call(pieces: Sequence[Piece]) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Pieces of one request as one call of an engine: prompts, wanted members, and the prompt_index of each prompt.

    An engine counts occurrences by itself, so earlier ones are named, with no members.
    """
    wanted: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    index_of: dict[tuple[int, tuple[int, ...]], int] = {}
    for piece in pieces:
        wanted.setdefault((piece.occurrence, piece.prompt), []).extend(piece.members)
        index_of[piece.occurrence, piece.prompt] = piece.prompt_index
    prompts: list[list[int]] = []
    samples: list[list[int]] = []
    indices: list[int] = []
    named: Counter[tuple[int, ...]] = Counter()
    for occurrence, prompt in sorted(wanted, key=lambda pair: (pair[0], index_of[pair])):
        here = wanted[occurrence, prompt]
        for numbers in (*([] for _ in range(occurrence - named[prompt])), sorted(here)):
            prompts.append(list(prompt))
            samples.append(numbers)
            indices.append(index_of[occurrence, prompt])
        named[prompt] = occurrence + 1
    return prompts, samples, indices


def piece_of(pieces: Sequence[Piece]) -> dict[tuple[int, int], int]:
    """(prompt_index, member) -> the number of its piece."""
    return {place: number for number, piece in enumerate(pieces) for place in completions(piece)}


def completions(piece: Piece) -> Iterator[tuple[int, int]]:
    for member in piece.members:
        yield piece.prompt_index, member


def own_samplers(samplers: int, processes: int, rank: int) -> int:
    """How many of a run's samplers are those of one of its processes."""
    return samplers // processes + (rank < samplers % processes)
