"""Who has which piece, over random schedules of joins, losses, late results and duplicates. No Ray, no clock."""

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.pool.ledger import FILLS, Brought, Ledger
from sparse_rl.pool.pieces import MOST_TOGETHER, completions, cut, engine_call, piece_of


def request(seed, prompts=3, group=6, version=0):
    ids = [[1 + i % 2, 5] for i in range(prompts)]  # some prompts occur again
    return cut(ids, [list(range(group)) for _ in ids], seed, version, expected=[float(i + 1) for i in range(prompts)])


def digest(piece):
    """What every member would find."""
    return hashlib.blake2b(repr(piece).encode()).digest()


class World:
    """A ledger, and what its members were really handed."""

    def __init__(self, wanted, over_ask):
        self.ledger = Ledger(wanted, over_ask)
        self.work = {}  # member -> what it has to bring, in its own order
        self.gone = {}  # members that were given up, and what they may still bring
        self.results = {}  # (request, piece) -> how often its first result came
        self.next = 0

    def join(self, rows):
        self.ledger.join(self.next, rows)
        self.work[self.next] = []
        self.next += 1

    def hand_out(self):
        for member, work in self.ledger.assign().items():
            assert work and not self.work[member], "only idle members get work"
            assert len({place[0] for place, _ in work}) == 1, "of one request"
            self.work[member] = list(work)

    def bring(self, member, work):
        place, piece = work.pop(0)
        brought = self.ledger.finish(member, place, digest(piece))
        assert brought is not Brought.DIFFERENT
        if brought is Brought.FIRST:
            self.results[place] = self.results.get(place, 0) + 1

    def check(self):
        """A piece waits, is held, or is done."""
        for number, found in self.ledger.requests.items():
            assert len(set(found.waiting)) == len(found.waiting)
            held = {place[1] for member in self.ledger.members.values() for place in member.holding}
            held &= {place[1] for m in self.ledger.members.values() for place in m.holding if place[0] == number}
            for piece in range(len(found.pieces)):
                states = (
                    (piece in found.waiting) + (piece in found.digests) + (piece in held and piece not in found.digests)
                )
                assert states == 1, (number, piece, states)


EVENTS = st.lists(
    st.tuples(st.sampled_from(["ask", "join", "assign", "bring", "end", "lose", "late", "stop"]), st.integers(0, 11)),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(events=EVENTS, wanted=st.integers(1, 4), over_ask=st.sampled_from([0.0, 0.5, 1.0]), rows=st.integers(1, 9))
def test_every_piece_comes_once_whatever_happens_to_members(events, wanted, over_ask, rows):
    world, asked = World(wanted, over_ask), 0
    for what, which in events:
        members = sorted(world.work)
        member = members[which % len(members)] if members else None
        if what == "ask" and asked < 3:
            world.ledger.ask(request(asked))
            asked += 1
        elif what == "join" and len(members) < 6:
            world.join(rows)
        elif what == "assign":
            world.hand_out()
        elif what == "late" and world.gone:
            gone = sorted(world.gone)[which % len(world.gone)]
            if world.gone[gone]:
                world.bring(gone, world.gone[gone])
        elif member is None:
            continue
        elif what == "bring" and world.work[member]:
            world.bring(member, world.work[member])
        elif what == "end" and not world.work[member] and not world.ledger.members[member].idle:
            world.ledger.end(member)
        elif what == "stop" and member in world.ledger.useless():
            world.work[member] = []
            world.ledger.end(member)
        elif what == "lose":
            world.ledger.lose(member)
            world.gone[member] = world.work.pop(member)
        world.check()
    while world.ledger.requests:  # somebody comes, and all that is left is done
        if not world.work:
            world.join(rows)
        world.hand_out()
        for member in list(world.work):
            while world.work[member]:
                world.bring(member, world.work[member])
            if not world.ledger.members[member].idle:
                world.ledger.end(member)
        world.check()
    expected = {(number, piece) for number in range(asked) for piece in range(len(request(number)))}
    assert set(world.results) == expected and set(world.results.values()) <= {1}


def test_longest_pieces_go_first_and_evenly():
    ledger = Ledger(wanted=3)
    for member in range(3):
        ledger.join(member, rows=64)
    pieces = cut([[i] for i in range(9)], [[0]] * 9, 0, 0, expected=[float(9 - i) for i in range(9)])
    ledger.ask(pieces)
    shares = ledger.assign()
    assert [len(work) for work in shares.values()] == [3, 3, 3]
    loads = [sum(piece.expected for _, piece in work) for work in shares.values()]
    assert max(loads) - min(loads) <= 2
    assert [work[0][1].expected for work in shares.values()] == [9, 8, 7]


def test_work_is_left_for_members_that_are_still_coming():
    ledger = Ledger(wanted=4)
    ledger.join(0, rows=64)
    ledger.ask(request(0, prompts=8, group=4))
    assert sum(len(piece.members) for _, piece in ledger.assign()[0]) == 8  # a quarter


def test_a_member_takes_no_more_than_a_few_times_its_rows():
    ledger = Ledger()
    ledger.join(0, rows=2)
    ledger.ask(request(0, prompts=8, group=4))
    assert sum(len(piece.members) for _, piece in ledger.assign()[0]) == 2 * FILLS == 8


def test_nothing_is_left_over_when_shares_are_not_whole_pieces():
    ledger = Ledger(wanted=6)
    for member in range(6):
        ledger.join(member, rows=64)
    ledger.ask(cut([[i] for i in range(32)], [list(range(4))] * 32, 0, 0))  # 128 completions, 21.3 for each
    assert sorted(len(work) for work in ledger.assign().values()) == [5, 5, 5, 5, 6, 6]
    assert not ledger.requests[0].waiting


def test_the_last_pieces_are_asked_twice_and_the_slower_copy_is_useless():
    ledger = Ledger(wanted=2, over_ask=1.0)
    ledger.join(0, rows=4)
    ledger.join(1, rows=4)
    (piece,) = cut([[1]], [[0, 1]], 0, 0)
    ledger.ask([piece])
    assert list(ledger.assign()) == [0] and list(ledger.assign()) == [1] and ledger.asked_twice == 1
    assert ledger.finish(1, (0, 0), digest(piece)) is Brought.FIRST
    ledger.end(1)
    assert ledger.useless() == [0]
    assert ledger.finish(0, (0, 0), digest(piece)) is Brought.SAME
    assert ledger.finish(0, (0, 0), b"other") is Brought.DIFFERENT
    ledger.end(0)
    assert ledger.members[0].idle and not ledger.assign()


def test_a_piece_that_two_hold_does_not_wait_when_one_is_lost():
    ledger = Ledger(wanted=2, over_ask=1.0)
    ledger.join(0, rows=4)
    ledger.join(1, rows=4)
    ledger.ask(cut([[1]], [[0, 1]], 0, 0))
    ledger.assign()
    ledger.assign()
    ledger.lose(0)
    assert not ledger.requests[0].waiting
    ledger.lose(1)
    assert ledger.requests[0].waiting == [0]


def test_losses_of_a_piece_are_counted():
    ledger = Ledger()
    ledger.ask(request(0, prompts=1, group=4))
    for turn in range(3):
        ledger.join(turn, rows=4)
        ledger.assign()
        ledger.lose(turn)
    count, piece = ledger.most_lost()
    assert count == ledger.asked_again == 3 and piece.prompt_index == 0


@settings(max_examples=100, deadline=None)
@given(prompts=st.lists(st.integers(0, 2), min_size=1, max_size=6), group=st.integers(1, 9), data=st.data())
def test_an_engine_call_names_every_occurrence(prompts, group, data):
    """Pieces in any combination give an engine the occurrence, and so the random stream, that the whole request has."""
    ids = [[7 + prompt] for prompt in prompts]
    pieces = cut(ids, [list(range(group))] * len(ids), 3, 0)
    assert all(len(piece.members) <= MOST_TOGETHER for piece in pieces)
    chosen = data.draw(st.lists(st.sampled_from(range(len(pieces))), unique=True, min_size=1))
    some = [pieces[i] for i in chosen]
    asked, samples, indices = engine_call(some)
    found = set()
    for place, (tokens, numbers, index) in enumerate(zip(asked, samples, indices, strict=True)):
        occurrence = sum(other == tokens for other in asked[:place])
        for number in numbers:
            assert ids[index] == tokens and occurrence == sum(other == tokens for other in ids[:index])
            found.add((index, number))
    assert found == {place for piece in some for place in completions(piece)} == set(piece_of(some))
