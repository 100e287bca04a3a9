"""The thread that owns the engines hands events over in batches: none is lost, none is late, each in its order."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest

from sparse_rl import Engine, Sampling
from sparse_rl.kernels import ops
from sparse_rl.rollout import live_loop
from sparse_rl.serve import desk as desk_module
from sparse_rl.serve.desk import Desk, Place
from sparse_rl.serve.protocol import Refusal
from tests.helpers.models import prompts_of

NEW = 60
TURN = Sampling(NEW, stop_ids=())


@pytest.fixture(params=["cpu", "like a GPU"])
def desk(request, llama, monkeypatch):
    """A desk whose rounds hand events over as they do on a CPU, or as on a GPU: before the host waits for it."""
    if request.param != "cpu":
        rules = SimpleNamespace(rules=lambda device: replace(ops.rules(device), on_gpu=True))
        monkeypatch.setattr(live_loop, "ops", rules)
    monkeypatch.setattr(desk_module, "_NEWS", 1e9)  # every round's news are told
    engine = Engine(llama, "rkv", budget=16, interval=8, rows=4, poll=(4, 4))
    desk = Desk({"a": Place(engine, lambda engine: engine.open(64, 400))})
    desk.start()
    yield desk
    desk.stop()


def submit(desk, number=0):
    return desk.submit("a", prompts_of(9, seed=number)[0], TURN, number, 0, [])


async def heard(desk, ticket):
    """All events of an answer, the error at their end included."""
    events = []
    try:
        async for event in desk.events(ticket):
            events.append(event)
    except Refusal as error:
        return events, error
    return events, None


def waiting_in(ticket):
    """The events that a ticket has and nobody has read."""
    return [ticket.events.get_nowait() for _ in range(ticket.events.qsize())]


def batches_of(loop):
    """The sizes of the batches that reach an event loop, in a list that grows."""
    sizes, plain = [], loop.call_soon_threadsafe

    def call(callback, *args, **options):
        if callback is desk_module._put:
            sizes.append(len(args[0]))
        return plain(callback, *args, **options)

    loop.call_soon_threadsafe = call
    return sizes


def assert_whole(ticket, events):
    """Events have all tokens of the answer, in order, and the last one alone says that it ended."""
    conversation, prompt = ticket.conversation, len(ticket.conversation.prompt)
    assert [token for event in events for token in event.tokens] == conversation.tokens[prompt:]
    assert [value for event in events for value in event.logprobs] == conversation.logprobs[prompt:]
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["length"]
    assert events[-1].trajectory.tokens.tolist() == conversation.tokens


def test_the_events_of_a_round_come_together(desk):
    async def ask():
        sizes, before = batches_of(asyncio.get_running_loop()), desk.places["a"].engine.rounds
        tickets = [submit(desk, number) for number in range(6)]  # two of them wait for a row
        for ticket, (events, error) in zip(
            tickets, await asyncio.gather(*(heard(desk, ticket) for ticket in tickets)), strict=True
        ):
            assert error is None and len(events) > 5
            assert_whole(ticket, events)
        assert len(sizes) <= desk.places["a"].engine.rounds - before + 1 and max(sizes) == 4

    asyncio.run(asyncio.wait_for(ask(), 60))
    assert not desk._told and desk.counts.finished == {"length": 6}
    assert desk.counts.generated_tokens == 6 * NEW


def test_every_event_loop_gets_its_own(desk):
    def serve(number, found):
        async def ask():
            tickets = [submit(desk, 10 * number + i) for i in range(2)]
            return tickets, await asyncio.gather(*(heard(desk, ticket) for ticket in tickets))

        found[number] = asyncio.run(asyncio.wait_for(ask(), 60))

    found = {}
    threads = [threading.Thread(target=serve, args=(number, found)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2]
    for tickets, heard_by in found.values():
        for ticket, (events, error) in zip(tickets, heard_by, strict=True):
            assert error is None
            assert_whole(ticket, events)


def test_a_turn_that_goes_on_tells_what_it_sampled_and_not_what_was_given(desk):
    async def ask():
        old = desk.submit("a", prompts_of(9)[0], TURN, 0, 0, [], keep=True)
        await heard(desk, old)
        before, given = len(old.conversation.tokens), [5, 6, 7]
        ticket = desk.extend(old, given, TURN, [])
        events, error = await heard(desk, ticket)
        assert error is None and old.conversation.tokens[before : before + 3] == given
        sampled = [token for event in events for token in event.tokens]
        assert sampled == old.conversation.tokens[before + 3 :] and len(sampled) == NEW
        desk.forget(old)

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_all_that_was_told_is_there_when_a_job_runs(desk):
    """Also at a pause, after which no round would hand it over."""

    async def ask():
        tickets = [submit(desk, number) for number in range(3)]
        firsts = [await ticket.events.get() for ticket in tickets]
        assert await desk.work(lambda: len(desk._told)) == 0
        await desk.work(lambda: setattr(desk, "paused", True))
        got = [[first, *waiting_in(ticket)] for first, ticket in zip(firsts, tickets, strict=True)]
        for ticket, events in zip(tickets, got, strict=True):
            assert sum(len(event.tokens) for event in events) == ticket.told - len(ticket.conversation.prompt)
            assert ticket.told == len(ticket.conversation.tokens)
        desk.cancel(tickets[0])  # takes effect while it is paused
        while desk.open > 2:
            await asyncio.sleep(0.001)
        await desk.work(lambda: setattr(desk, "paused", False))
        for ticket, events in list(zip(tickets, got, strict=True))[1:]:
            later, error = await heard(desk, ticket)
            assert error is None
            assert_whole(ticket, events + later)
        assert not waiting_in(tickets[0])

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_one_that_is_cancelled_changes_nothing_for_others(desk):
    async def ask():
        tickets = [submit(desk, number) for number in range(4)]
        await tickets[0].events.get()
        desk.cancel(tickets[0])
        for ticket in tickets[1:]:
            events, error = await heard(desk, ticket)
            assert error is None
            assert_whole(ticket, events)

    asyncio.run(asyncio.wait_for(ask(), 60))
    assert desk.counts.cancelled == 1


@pytest.mark.parametrize("how", ["failure", "stop"])
def test_an_end_comes_after_all_that_was_told(desk, how):
    async def ask():
        tickets = [submit(desk, number) for number in range(4)]
        firsts = [await ticket.events.get() for ticket in tickets]
        if how == "failure":
            desk.places["a"].live._loop.decode = lambda: 1 / 0
        else:
            desk.end()
        for first, ticket in zip(firsts, tickets, strict=True):
            events, error = await heard(desk, ticket)
            told = sum(len(event.tokens) for event in [first, *events])
            assert told == ticket.told - len(ticket.conversation.prompt) and ticket.events.empty()
            assert error is not None and error.status == (500 if how == "failure" else 503)
        if how == "failure":
            while desk.places["a"].live.closed:  # it is opened again
                await asyncio.sleep(0.001)
            again = submit(desk)
            events, error = await heard(desk, again)
            assert error is None
            assert_whole(again, events)

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_the_host_is_free_once_a_gpu_has_work(llama, monkeypatch):
    """`meanwhile` runs when the steps of a round have been launched and nothing was waited for yet; on a CPU, where a
    launched step has run, before them.
    """
    done = []
    for on_gpu in (True, False):
        rules = SimpleNamespace(rules=lambda device, on_gpu=on_gpu: replace(ops.rules(device), on_gpu=on_gpu))
        monkeypatch.setattr(live_loop, "ops", rules)
        with Engine(llama, "rkv", budget=16, interval=8, rows=2).open(64, 400) as live:
            live.submit(prompts_of(9)[0], TURN)
            live.step()
            run, tell = live._loop.decoder.run, live._loop.tell
            monkeypatch.setattr(live._loop.decoder, "run", lambda *args, run=run: (done.append("run"), run(*args)))
            monkeypatch.setattr(live._loop, "tell", lambda *args, tell=tell: (done.append("tell"), tell(*args)))
            done.clear()
            live.step(meanwhile=lambda: done.append("meanwhile"))
            own = ["run", "meanwhile", "tell"]
            assert done == (own if on_gpu else ["meanwhile", *own])
            live.step(sample=False, meanwhile=lambda: done.append("late"))
            live.step()
            assert "late" not in done and done.count("meanwhile") == (1 if on_gpu else 2)
