"""Record which member has which piece of work. Pure code without clock, network or weights; pool.py reports events.

    ask       a request is cut into pieces, which wait
    join      a member has joined and is idle
    assign    waiting pieces go to idle members: oldest request first, longest pieces first, each to the least busy
    finish    a member has brought a piece; the first result counts, and later ones are compared with it
    end       a member has finished what it was handed
    lose      a member is gone; its pieces wait again, unless another member holds them

A piece is in one of three states: waiting, held by members, or done. It becomes done only once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from .pieces import Piece, Place

FILLS = 4  # times its rows: the most completions that a member is handed at once
KEPT = 4  # requests that are done and whose digests are kept, to compare results that come late


class Brought(Enum):
    """What became of the result that a member brought."""

    FIRST = "the first result of its piece"
    SAME = "another one, equal to the first"
    DIFFERENT = "another one, different from the first"
    UNKNOWN = "of a piece that was forgotten"


@dataclass
class Request:
    pieces: Sequence[Piece]
    waiting: list[int]  # numbers of pieces
    digests: dict[int, bytes] = field(default_factory=dict)  # of the pieces that are done
    losses: dict[int, int] = field(default_factory=dict)  # how often a piece was lost with its holder

    @property
    def is_done(self) -> bool:
        return len(self.digests) == len(self.pieces)


@dataclass
class Member:
    rows: int  # completions that it samples at a time
    holding: dict[Place, None] = field(default_factory=dict)  # in the order in which they were handed out
    idle: bool = True


class Ledger:
    def __init__(self, wanted: int = 1, over_ask: float = 0.0):
        """`wanted`: members that there should be, for whom work is left; `over_ask`: the share of a request's pieces
        that, being the last, may be held by two.
        """
        self.wanted, self.over_ask = wanted, over_ask
        self.members: dict[int, Member] = {}
        self.requests: dict[int, Request] = {}
        self.done: dict[int, Request] = {}
        self.asked = self.asked_again = self.asked_twice = 0  # requests; pieces after a loss; pieces held by two

    def ask(self, pieces: Sequence[Piece]) -> int:
        """The number of the request."""
        number, self.asked = self.asked, self.asked + 1
        self.requests[number] = Request(pieces, list(range(len(pieces))))
        return number

    def forget(self, request: int) -> None:
        """Nobody waits for it any more."""
        self.requests.pop(request, None)

    def join(self, member: int, rows: int) -> None:
        assert member not in self.members
        self.members[member] = Member(rows)

    def assign(self) -> dict[int, list[tuple[Place, Piece]]]:
        """What idle members get to do now, each of one request. They hold it from here on."""
        handouts: dict[int, list[tuple[Place, Piece]]] = {}
        idle = [member for member, found in self.members.items() if found.idle]
        for number, request in self.requests.items():
            if not idle:
                break
            handouts |= self._deal(number, request, idle)
            idle = [member for member in idle if member not in handouts]
        for number, request in self.requests.items():
            if idle and not request.waiting:
                handouts |= self._ask_twice(number, request, idle)
                idle = [member for member in idle if member not in handouts]
        for member, pieces in handouts.items():
            self.members[member].idle = False
            self.members[member].holding.update((place, None) for place, _ in pieces)
        return handouts

    def finish(self, member: int, place: Place, digest: bytes) -> Brought:
        """`member` may be one that was given up."""
        if member in self.members:
            self.members[member].holding.pop(place, None)
        number, piece = place
        request = self.requests.get(number) or self.done.get(number)
        if request is None:
            return Brought.UNKNOWN
        if piece in request.digests:
            return Brought.SAME if request.digests[piece] == digest else Brought.DIFFERENT
        request.digests[piece] = digest
        if piece in request.waiting:  # its holder had been given up
            request.waiting.remove(piece)
        if request.is_done:
            self.done[number] = self.requests.pop(number)
            while len(self.done) > KEPT:
                del self.done[next(iter(self.done))]
        return Brought.FIRST

    def end(self, member: int) -> None:
        """What a member holds still, because it was stopped, waits again."""
        self._return(self.members[member])
        self.members[member].idle = True

    def lose(self, member: int) -> None:
        lost = self.members.pop(member)
        for number, piece in lost.holding:
            request = self.requests.get(number)
            if request is not None and piece not in request.digests:
                request.losses[piece] = request.losses.get(piece, 0) + 1
                self.asked_again += 1
        self._return(lost)

    def useless(self) -> list[int]:
        """Members that work on nothing anybody waits for."""
        return [
            name
            for name, member in self.members.items()
            if not member.idle and member.holding and all(self._is_done(place) for place in member.holding)
        ]

    def most_lost(self) -> tuple[int, Piece] | None:
        """The piece that was lost most often of all that are not done, after how many times."""
        found = [
            (count, request.pieces[piece])
            for request in self.requests.values()
            for piece, count in request.losses.items()
            if piece not in request.digests
        ]
        return max(found, key=lambda pair: pair[0], default=None)

    def _is_done(self, place: Place) -> bool:
        request = self.requests.get(place[0])
        return request is None or place[1] in request.digests

    def _return(self, member: Member) -> None:
        for place in member.holding:
            if not self._is_done(place) and not any(
                place in m.holding for m in self.members.values() if m is not member
            ):
                self.requests[place[0]].waiting.append(place[1])
        member.holding.clear()

    def _deal(self, number: int, request: Request, idle: Sequence[int]) -> dict[int, list[tuple[Place, Piece]]]:
        """An equal part of the request for every idle member, whenever it is idle: a late one gets as much as others.

        A member whose rows become free fills them from its share, so a share may be several times its rows; what is
        left over is for those who are faster. A share is rounded up to whole pieces: a few pieces that are left at the
        end take as long as many.
        """
        whole = sum(len(piece.members) for piece in request.pieces)
        share = math.ceil(whole / max(len(self.members), self.wanted))
        given: dict[int, list[tuple[Place, Piece]]] = {}
        count, load = dict.fromkeys(idle, 0), dict.fromkeys(idle, 0.0)
        for piece in sorted(request.waiting, key=lambda i: (-work(request.pieces[i]), i)):
            size = len(request.pieces[piece].members)
            able = [m for m in idle if count[m] < min(share, FILLS * self.members[m].rows)]
            if not able:
                break
            member = min(able, key=lambda m: load[m])
            count[member] += size
            load[member] += work(request.pieces[piece])
            given.setdefault(member, []).append(((number, piece), request.pieces[piece]))
        taken = {place[1] for pieces in given.values() for place, _ in pieces}
        request.waiting = [piece for piece in request.waiting if piece not in taken]
        return given

    def _ask_twice(self, number: int, request: Request, idle: Sequence[int]) -> dict[int, list[tuple[Place, Piece]]]:
        """The last pieces of a request once more, one for each idle member; those that were handed out first come
        first.
        """
        open_ = len(request.pieces) - len(request.digests)
        if open_ > self.over_ask * len(request.pieces):
            return {}
        held = [place for member in self.members.values() for place in member.holding if place[0] == number]
        once = [place for place in held if held.count(place) == 1 and place[1] not in request.digests]
        given = {member: [(place, request.pieces[place[1]])] for member, place in zip(idle, once)}
        self.asked_twice += len(given)
        return given


def work(piece: Piece) -> float:
    """Tokens that a piece is expected to take."""
    return piece.expected * len(piece.members)
