"""The pool with members that are lost, late, slow, hung, out of memory or wrong: made-up work, without Ray."""

import contextlib
import math
import random
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_rl.errors import NonFiniteLogits, OutOfMemory, SparseRLError
from sparse_rl.pool import cluster
from sparse_rl.pool import pool as pool_module
from sparse_rl.pool.cluster import POLL, RayTransport, connect, kill_sampler
from sparse_rl.pool.pieces import cut
from sparse_rl.pool.pool import Pool
from sparse_rl.pool.weights import Versions
from sparse_rl.pool.worker import Worker
from tests.helpers.pools import Threads


class Echo:
    """Brings a text that says which weights it had."""

    rows = 8

    def __init__(self, trouble=None):
        self.trouble, self.ended, self.done = trouble, threading.Event(), 0

    def complete(self, work, fetch, deliver):
        (weights,) = (str(part["text"]) for part in fetch(None))
        for place, piece in work:
            if self.trouble is not None:
                self.trouble(self, piece)
            if self.ended.is_set():
                return
            deliver(place, f"{weights} {piece}".encode())
            self.done += 1

    def begin(self):
        self.ended.clear()

    def stop(self):
        self.ended.set()

    def beats(self):
        return self.done

    def tokens(self):
        return 10 * self.done

    def cache_bytes(self):
        return 100

    def fetched_bytes(self):
        return 5 * self.done

    def spent(self):
        return {"echo": 2.0 * self.done}


def text(content):
    """Weights as far as Echo knows them."""
    return [{"text": np.array(content)}]


def made(hands=Echo, members=2, mishap=lambda member, finished: None, **options):
    transport = Threads(hands, mishap)
    pool = Pool(transport, members, **options)
    pool.publish(0, lambda: text("first"))
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
        pool.publish(version, lambda version=version: text(f"version {version}"))
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


def test_a_member_that_hangs_is_replaced_though_every_request_is_short():
    """Others overtake it, so no request waits for it; its silence counts over all of them."""
    hung = []

    def hang(hands, piece):
        if not hung:
            hung.append(hands)
        while hands is hung[0] and not release.wait(0.01):
            pass  # it does not hear that it should stop

    release = threading.Event()
    pool, _ = made(lambda: Echo(hang), over_ask=1.0, patience=0.3)
    small = request(prompts=2, group=4)
    for _ in range(500):
        assert pool.complete(small) == expected(small)
        if pool.counts.lost:
            break
    release.set()
    assert pool.counts.lost == 1 and pool.why == "it did not get on for 0.3 s"
    assert pool.complete(request()) == expected(request()) and pool.live == 2
    pool.close()


def test_time_between_requests_is_nobodys_silence(monkeypatch):
    pool, _ = made(patience=30.0)
    pool.complete(request())
    now = pool_module.time.monotonic()
    monkeypatch.setattr(pool_module.time, "monotonic", lambda: now + 3600.0)
    assert pool.complete(request()) == expected(request()) and not pool.counts.lost
    pool.close()


def test_members_that_cannot_start_are_tried_at_growing_intervals(monkeypatch):
    """One machine of several is broken: the others go on, and it is not asked in every turn."""
    said, now = [], [0.0]
    pool, transport = made(members=2, say=said.append)
    start, tried = transport.start, []

    def half(member):
        tried.append(now[0])
        if member == 0:
            return start(member)
        transport.news.append(pool_module.Lost(member, "no module named sparse_rl"))

    transport.start = half
    monkeypatch.setattr(pool_module.time, "monotonic", lambda: now[0])
    pool.complete(request())
    for _ in range(200):
        now[0] += 1.0
        pool.turn()
    assert tried[:6] == [0.0, 0.0, 1.0, 3.0, 7.0, 15.0] and tried[-1] - tried[-2] == pool_module.LONGEST_PAUSE
    assert len(said) == 1 and "could not be started (no module named sparse_rl)" in said[0] and pool.live == 1
    pool.close()


def test_a_member_that_hangs_before_it_has_joined_is_replaced(monkeypatch):
    monkeypatch.setattr(pool_module, "JOINING", 0.2)
    pool, transport = made(members=2)
    start, killed = transport.start, []
    transport.start = lambda member: None if member == 1 else start(member)
    transport.kill = lambda member, kill=transport.kill: killed.append(member) if member == 1 else kill(member)
    for _ in range(1000):
        assert pool.complete(request()) == expected(request())
        if killed:
            break
        pool_module.time.sleep(0.01)
        pool.turn()
    assert killed == [1] and pool.why == "it did not join within 0.2 s"
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


def test_a_node_that_is_lost_with_all_its_starting_members_does_not_end_the_run():
    pool, transport = made(members=5)
    start = transport.start

    def first_are_lost(member):
        return transport.news.append(pool_module.Lost(member, "its node died")) if member < 5 else start(member)

    transport.start = first_are_lost
    assert pool.complete(request()) == expected(request()) and pool.failed_starts == 0
    pool.close()


def test_members_that_cannot_start_end_the_run():
    pool, transport = made()

    def start(member):
        transport.news.append(pool_module.Lost(member, "no module named sparse_rl"))

    transport.start = start
    with pytest.raises(SparseRLError, match=r"samplers could not be started, 3 times in a row; the last: no module"):
        pool.complete(request())
    pool.close()


def test_nobody_comes(monkeypatch):
    monkeypatch.setattr(pool_module, "JOINING", 0.5)
    monkeypatch.setattr(pool_module, "ALONE", 0.1)
    said = []
    pool, transport = made(say=said.append)
    transport.start = lambda member: None
    with pytest.raises(SparseRLError, match=r"no sampler has been there for 0.5 s; 2 are asked for"):
        pool.complete(request())
    assert len(said) == 1 and "for 0.1 s; 2 are asked for, and the cluster has room for 2. They may" in said[0]
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
    pool.publish(1, lambda: text("second"))
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


@pytest.mark.parametrize("differ", [False, True])
def test_second_results_are_compared_with_the_first(differ):
    """Two members hold one piece, and do not hear that they should stop."""
    together, said = threading.Barrier(2), []

    class Both(Echo):
        def complete(self, work, fetch, deliver):
            if work[0][0] == (0, 0):
                together.wait(60)
            for place, piece in work:
                deliver(place, f"{id(self) if differ else ''} {piece}".encode())

    pool, _ = made(Both, over_ask=1.0, say=said.append)
    while pool.live < 2:
        pool.turn()
    (first,) = pool.complete(request(prompts=1, group=1))
    while not pool.counts.duplicates:
        pool.turn()
    assert pool.ledger.asked_twice == pool.counts.duplicates == 1 and pool.counts.different == differ
    assert len(said) == differ and first.endswith(f"{request(prompts=1, group=1)[0]}".encode())
    pool.close()


def test_members_are_watched_and_counted(monkeypatch):
    monkeypatch.setattr(pool_module, "WATCH", 0.0)
    views, lost = [], []

    def mishap(member, finished):
        return None if lost or not finished else lost.append(member) or "lose"

    pool, _ = made(mishap=mishap, watch=views.append)
    pool.complete(request())
    found = pool.standings()
    assert found.lost == {"here": 1} and sum(member.pieces for member in found.samplers) == len(request())
    assert all(member.seconds > 0 and member.node == "here" for member in found.samplers if member.pieces)
    assert lost[0] not in [member.sampler for member in found.samplers] and not found.asked
    assert any(0 < view.done < view.asked == len(request()) for view in views)
    with pool.driving:  # while somebody drives it, nobody waits
        assert pool.standings() is found
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


@pytest.fixture
def ray_that(monkeypatch):
    """Stands in for Ray, imported with the loopback interface alone; what is given happens when it begins."""

    def made(init):
        fake = SimpleNamespace(is_initialized=lambda: False, init=init, exceptions=SimpleNamespace())
        monkeypatch.setitem(sys.modules, "ray", fake)
        monkeypatch.setitem(sys.modules, "ray.exceptions", fake.exceptions)
        monkeypatch.setenv(cluster._LOOPBACK, "0")
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        return fake

    return made


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_run_keeps_its_own_sigterm(ray_that, named, fails):
    """Ray's handler would end it without a checkpoint."""

    def init(**options):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        if fails:
            raise ValueError("no")

    def mine(*_):
        raise AssertionError

    ray_that(init)
    before = signal.signal(signal.SIGTERM, mine)
    try:
        with socket.create_server(("127.0.0.1", 0)) as head:
            address = f"ray://127.0.0.1:{head.getsockname()[1]}" if named else "ray"
            with pytest.raises(SparseRLError) if fails else contextlib.nullcontext():
                connect(address, 0)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_cluster_of_ones_own_is_not_open_to_the_network(ray_that, monkeypatch):
    ray_that(lambda **options: pytest.fail("a cluster was started"))
    monkeypatch.delenv(cluster._LOOPBACK)
    with pytest.raises(SparseRLError, match=r"imported Ray before RAY_.* was 0: .* would listen to the network"):
        connect("ray", 0)


def test_nobody_waits_for_a_head_that_is_not_there(ray_that):
    ray_that(lambda **options: pytest.fail("Ray would look for minutes"))
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(SparseRLError, match=r"no cluster to join \(.*refused.*\); .*RAY_AUTH_MODE=token"):
        connect(f"ray://127.0.0.1:{port}", 0)


def test_an_object_store_that_is_too_large_is_a_sentence(ray_that):
    def init(**options):
        raise ValueError("The requested object store memory size is greater than the total available memory.")

    ray_that(init)
    with pytest.raises(SparseRLError, match=r"cannot have 60.0 GiB, .* greater than .*; lower rollout.ahead"):
        connect("ray", 60 * 2**30)


@pytest.mark.parametrize("on_gpu, gets", [(True, {"num_gpus": 3}), (False, {})])
def test_a_cluster_of_ones_own_has_the_gpus_that_torch_sees(ray_that, monkeypatch, on_gpu, gets):
    asked = []
    ray_that(lambda **options: asked.append({k: v for k, v in options.items() if k == "num_gpus"}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    connect("ray", 0, on_gpu)
    assert asked == [gets]


def fake_ray(put):
    """A module as far as `publish` knows it."""
    errors = SimpleNamespace(
        ObjectStoreFullError=type("ObjectStoreFullError", (Exception,), {}),
        OutOfDiskError=type("OutOfDiskError", (Exception,), {}),
    )
    return SimpleNamespace(put=put, exceptions=errors)


@pytest.mark.parametrize("kind", ["ObjectStoreFullError", "OutOfDiskError"])
def test_a_full_object_store_is_told_with_what_it_needed(kind):
    def put(value):
        raise getattr(ray.exceptions, kind)("the node is full")

    ray, transport = fake_ray(put), object.__new__(RayTransport)
    transport.ray, transport.about, transport.weights = ray, {}, Versions(transport._put, None)
    with pytest.raises(
        SparseRLError, match=r"no room for 4 MiB of weights and more \(the node is full\); .*object-store-memory"
    ):
        transport.publish(1, [{"w": np.zeros(2**20, np.int32)}], 0)


def test_a_member_works_in_one_thread():
    """Libraries keep by thread what they prepare for a shape."""
    worker, seen = Worker(Echo(lambda hands, piece: seen.add(threading.current_thread()))), set()
    for number, piece in enumerate(request(prompts=3, group=1)):
        worker.start([((number, 0), piece)], lambda has: text("first"))
        while worker.poll(60).busy:
            pass
    (thread,) = seen
    worker.close()
    thread.join(60)
    assert not thread.is_alive()


def test_results_come_while_others_are_under_way():
    go_on = threading.Event()
    pool, _ = made(lambda: Echo(lambda hands, piece: piece.prompt_index == 1 and go_on.wait(60)), members=1)
    results = pool.results(request(prompts=2, group=1))
    assert next(results)[0] == 0
    go_on.set()
    assert [number for number, _ in results] == [1]
    assert pool.counts.spent == {"echo": 4.0} and not pool.waiting and not pool.ledger.requests
    pool.close()


def test_results_that_nobody_reads_any_more_are_given_up():
    pool, _ = made()
    with contextlib.closing(pool.results(request())) as results:
        next(results)
    assert not pool.waiting and not pool.ledger.requests
    assert pool.complete(request()) == expected(request())
    pool.close()


def test_weights_that_could_not_be_sent_are_sent_again_and_a_closed_pool_takes_none():
    pool, _ = made()

    def fails():
        raise OSError("no room")
        yield

    with pytest.raises(OSError, match="no room"):
        pool.publish(1, fails)
    pool.publish(1, lambda: text("version 1"))
    pieces = request(version=1)
    assert pool.complete(pieces) == expected(pieces, "version 1")
    pool.close()
    pool.publish(2, fails)
    pool.close()


def test_a_stop_that_comes_late_does_not_end_what_came_after_it():
    """Ray may run two calls of an actor in another order than they were sent in."""
    worker, (one, other) = Worker(Echo()), request(prompts=2, group=1)
    worker.start([((0, 0), one)], lambda has: text("first"))
    assert [place for place, _ in worker.poll(60).finished] == [(0, 0)]
    while worker.poll(60).busy:
        pass
    begun, go_on = threading.Event(), threading.Event()
    worker.hands.trouble = lambda hands, piece: begun.set() or go_on.wait(60)
    worker.start([((1, 0), other)], lambda has: text("first"))
    begun.wait(60)
    worker.stop((0, 0))
    go_on.set()
    assert [place for place, _ in worker.poll(60).finished] == [(1, 0)]


def test_a_stop_that_comes_while_weights_are_fetched_is_heard():
    worker, (piece,) = Worker(Echo()), request(prompts=1, group=1)
    begun, go_on = threading.Event(), threading.Event()
    worker.start([((0, 0), piece)], lambda has: (begun.set(), go_on.wait(60)) and text("first"))
    begun.wait(60)
    worker.stop((0, 0))
    go_on.set()
    answer = worker.poll(60)
    assert not answer.busy and not answer.finished and answer.error is None


def test_members_are_polled_before_patience_ends(monkeypatch):
    """Else one that works would look silent."""
    monkeypatch.setattr(cluster, "connect", lambda address, store, on_gpu: (FakeCluster([2.0]), False))
    for patience, seconds in ((600.0, POLL), (math.inf, POLL), (2.0, 0.5)):
        assert RayTransport("ray", Echo, 1, False, 0, patience=patience).poll == seconds


class FakeCluster:
    """A cluster as far as its sizes go."""

    def __init__(self, nodes, gpus=()):
        self.found = [{"CPU": cpus} | ({"GPU": gpus[i]} if gpus else {}) for i, cpus in enumerate(nodes)]

    def cluster_resources(self):
        return {name: sum(node.get(name, 0.0) for node in self.found) for name in ("CPU", "GPU")}

    def nodes(self):
        return [{"Alive": True, "Resources": node} for node in self.found] + [{"Alive": False, "Resources": {}}]

    def get_runtime_context(self):
        return SimpleNamespace(get_node_id=lambda: "here")


def test_all_samplers_find_a_place(monkeypatch):
    """Two CPUs here and one there: five of 0.6 do not fit, though they are three together."""
    fake = FakeCluster([2.0, 1.0])
    monkeypatch.setattr(cluster, "connect", lambda address, store, on_gpu: (fake, False))
    transport = RayTransport("ray", Echo, 5, False, 0)
    assert transport.each == 0.5 and transport.room() == 6
    fake.found.pop()
    assert transport.room() == 4
    assert RayTransport("ray", Echo, 0, False, 0).each == 1.0
    fake = FakeCluster([16.0, 16.0], gpus=[8.0, 4.0])
    transport = RayTransport("ray", Echo, 16, True, 0, processes=2)
    assert (transport.kind, transport.each, transport.room()) == ("GPU", 0.5, 12)  # no sampler is on two GPUs


@given(units=st.lists(st.integers(0, 9).map(float), min_size=1, max_size=6), samplers=st.integers(0, 40))
def test_a_share_is_the_largest_with_which_all_find_a_place(units, samplers):
    each = cluster.share_of_each(units, samplers)
    assert 0.01 <= each <= 1.0 and (cluster.places(units, each) >= samplers or not any(units))
    assert each == 1.0 or cluster.places(units, each + 0.01) < samplers


def test_only_samplers_are_ended():
    """The number of a process that ended may be that of another."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    kill_sampler(child.pid)
    child.communicate(b"\n")
    assert child.returncode == 0
    kill_sampler(child.pid)  # nobody has it
