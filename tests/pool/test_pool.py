"""The pool with members that are lost, late, slow, hung, out of memory or wrong: made-up work, without Ray."""

import random
import sys
import threading

import pytest

from sparse_rl.errors import NonFiniteLogits, OutOfMemory, SparseRLError
from sparse_rl.pool import pool as pool_module
from sparse_rl.pool.cluster import connect
from sparse_rl.pool.pieces import cut
from sparse_rl.pool.pool import Pool
from tests.helpers.pools import Threads


class Echo:
    """Brings a text that says which weights it had."""

    rows = 8

    def __init__(self, trouble=None):
        self.trouble, self.ended, self.done = trouble, threading.Event(), 0

    def complete(self, work, fetch, deliver):
        weights = fetch()
        self.ended.clear()
        for place, piece in work:
            if self.trouble is not None:
                self.trouble(self, piece)
            if self.ended.is_set():
                return
            deliver(place, f"{weights} {piece}".encode())
            self.done += 1

    def stop(self):
        self.ended.set()

    def beats(self):
        return self.done

    def cache_bytes(self):
        return 100


def made(hands=Echo, members=2, mishap=lambda member, finished: None, **options):
    transport = Threads(hands, mishap)
    transport.publish = lambda version, weights, oldest: transport.weights.update({version: weights}) or 8
    pool = Pool(transport, members, **options)
    pool.publish(0, lambda: "first")
    return pool, transport


def request(prompts=6, group=5, version=0):
    return cut([[i] for i in range(prompts)], [list(range(group))] * prompts, 1, version)


def expected(pieces, weights="first"):
    return [f"{weights} {piece}".encode() for piece in pieces]


def test_results_come_in_order():
    pool, _ = made()
    assert pool.complete(request()) == expected(request())
    assert pool.complete([]) == [] and pool.counts.joined == 2
    pool.close()


@pytest.mark.parametrize("seed", range(5))
def test_members_that_are_lost_or_late_change_nothing(seed):
    draw, kills = random.Random(seed), []

    def mishap(member, finished):
        what = draw.choice([None] * 5 + ["lose", "late"]) if len(kills) < 12 else None
        kills.extend([what] if what else [])
        return what

    pool, _ = made(mishap=mishap, members=3, over_ask=0.5)
    for version in range(4):
        pool.publish(version, lambda version=version: f"version {version}")
        pieces = request(version=version)
        weights = "first" if version == 0 else f"version {version}"
        assert pool.complete(pieces) == expected(pieces, weights)
    assert pool.counts.lost == len(kills) and len(kills) > 0 and pool.counts.different == 0
    pool.close()


def test_a_member_that_hangs_is_replaced():
    hung = []

    def hang(hands, piece):
        if not hung:
            hung.append(hands)
        if hands is hung[0]:
            hands.ended.wait(60)

    said = []
    pool, _ = made(lambda: Echo(hang), patience=0.3, say=said.append)
    assert pool.complete(request()) == expected(request())
    assert pool.counts.lost == 1 and "did not get on for 0.3 s" in said[0] and pool.ledger.asked_again
    pool.close()


def test_a_slow_member_is_overtaken():
    slow = []

    def dawdle(hands, piece):
        if not slow:
            slow.append(hands)
        if hands is slow[0]:
            hands.ended.wait(60)

    pool, transport = made(lambda: Echo(dawdle), over_ask=1.0)
    assert pool.complete(request(prompts=2, group=4)) == expected(request(prompts=2, group=4))
    assert pool.ledger.asked_twice and not pool.counts.lost
    assert pool.complete(request(version=0)) == expected(request())  # the slow one was told to stop, and is there again
    assert transport.stopped
    pool.close()


def test_a_member_out_of_memory_is_replaced():
    poor = []

    def run_out(hands, piece):
        if not poor or hands is poor[0]:
            poor[:] = [hands]
            raise OutOfMemory("no room for 3 rows")

    pool, _ = made(lambda: Echo(run_out))
    assert pool.complete(request()) == expected(request())
    assert pool.counts.lost == 1 and pool.why == "no room for 3 rows"
    pool.close()


def test_what_would_fail_anywhere_fails_at_once():
    def fail(hands, piece):
        raise NonFiniteLogits("the logits of row 3 are not finite")

    pool, _ = made(lambda: Echo(fail))
    with pytest.raises(NonFiniteLogits, match="row 3"):
        pool.complete(request())
    with pytest.raises(NonFiniteLogits, match="row 3"):  # and so do all requests
        pool.complete(request())
    pool.close()


def test_a_piece_that_ends_all_its_members_ends_the_run(monkeypatch):
    monkeypatch.setattr(pool_module, "MOST_LOSSES", 4)

    def crash(hands, piece):
        if piece.prompt_index == 3:
            raise RuntimeError("illegal memory access")

    pool, _ = made(lambda: Echo(crash))
    with pytest.raises(SparseRLError, match=r"4 samplers were lost .* prompt 3 .*illegal memory access"):
        pool.complete(request())
    pool.close()


def test_members_that_cannot_start_end_the_run():
    pool, transport = made()

    def start(member):
        transport.news.append(pool_module.Lost(member, "no module named sparse_rl"))

    transport.start = start
    with pytest.raises(SparseRLError, match=r"3 samplers in a row could not be started; the last: no module"):
        pool.complete(request())
    pool.close()


def test_nobody_comes(monkeypatch):
    monkeypatch.setattr(pool_module, "JOINING", 0.2)
    pool, transport = made()
    transport.start = lambda member: None
    with pytest.raises(SparseRLError, match=r"no sampler has been there for 0.2 s; 2 are asked for"):
        pool.complete(request())
    pool.close()


def test_members_join_in_the_middle(monkeypatch):
    monkeypatch.setattr(pool_module, "_ROOM_EVERY", 0.0)
    pool, transport = made(members=0)
    transport.most = 1
    assert pool.complete(request()) == expected(request()) and pool.live == 1
    transport.most = 3
    assert pool.complete(request()) == expected(request()) and pool.live == 3
    assert len({member for member, _ in transport.handed}) == 3
    pool.close()


def test_several_requests_at_a_time_each_with_its_weights():
    pool, _ = made(members=2)
    pool.publish(1, lambda: "second")
    found = {}

    def ask(version):
        found[version] = pool.complete(request(version=version))

    threads = [threading.Thread(target=ask, args=(version,)) for version in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: expected(request()), 1: expected(request(version=1), "second")}
    pool.close()


def test_closing_ends_requests_under_way():
    begun = threading.Event()

    def wait(hands, piece):
        begun.set()
        hands.ended.wait(60)

    pool, _ = made(lambda: Echo(wait))
    errors = []

    def ask():
        try:
            pool.complete(request())
        except KeyboardInterrupt as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    begun.wait(60)
    pool.close()
    thread.join()
    assert len(errors) == 1


def test_without_ray_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with pytest.raises(SparseRLError, match=r"pip install 'sparse-rl\[ray\]'"):
        connect("ray://auto", 0)
