"""Records for people: where the members of a pool are and what they have done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Standing:
    """A member that has joined, with counts since then."""

    sampler: int  # its number: members of a pool are counted from 0, those that were lost included
    node: str
    pieces: int  # that it brought first
    held: int  # pieces that it has now
    tokens: int  # that it has sampled
    seconds: float  # that it has worked

    @property
    def tokens_per_s(self) -> float | None:
        return self.tokens / self.seconds if self.seconds > 0 else None


@dataclass(frozen=True)
class Standings:
    samplers: Sequence[Standing]
    lost: Mapping[str, int]  # members, by node
    done: int  # pieces of what is asked for now
    asked: int

    def to_dict(self) -> dict:
        """What is written down: without what is under way."""
        names = ("sampler", "node", "pieces", "tokens", "seconds")
        samplers = [{name: getattr(member, name) for name in names} for member in self.samplers]
        return {"samplers": samplers, "lost": dict(self.lost)}
