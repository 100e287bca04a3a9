"""A held row that is kept for its conversation while others wait."""

import time

import pytest

from sparse_rl import Engine, Sampling, SparseRLError
from tests.helpers.models import prompts_of

FIRST, SECOND = prompts_of(9, 6)
TURN = Sampling(12, stop_ids=())


def opened(model, **options):
    return Engine(model, "rkv", budget=16, interval=8, rows=1).open(64, 200, **options)


def test_a_row_waits_for_its_conversation_and_then_goes_to_another(llama, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with opened(llama, patience=2.0) as live:
        first, second = live.submit(FIRST, TURN), live.submit(SECOND, TURN)
        while first.status != "stopped":
            live.step()
        now[0] = 1.9
        assert live.idle and not live.step() and (first.row, second.status) == (0, "waiting")
        live.extend(first, [5, 6])  # in time: nothing was moved
        while first.status != "stopped":
            assert first.parked is None
            live.step()
        now[0] += 2.0
        assert not live.idle
        live.step()
        assert first.parked is not None and second.row == 0


def test_what_is_sampled_does_not_depend_on_it(llama):
    found = []
    for patience in (0.0, 0.05, None):
        with opened(llama, patience=patience) as live:
            chats = [live.submit(FIRST, TURN), live.submit(SECOND, TURN)]
            live.run()
            for chat in chats:
                live.extend(chat, [5, 6, 7])
            live.run()
            found.append([live.release(chat) for chat in chats])
    for others in found[1:]:
        for ours, theirs in zip(others, found[0], strict=True):
            assert ours.tokens.equal(theirs.tokens) and ours.sampler_logprobs.equal(theirs.sampler_logprobs)
            assert ours.trace.evicted_at.equal(theirs.trace.evicted_at)


def test_who_waits_sleeps_until_a_row_may_be_had(llama):
    engine = Engine(llama, "rkv", budget=16, interval=8, rows=1)
    with engine.open(64, 200, patience=0.3) as live:
        chats = [live.submit(FIRST, TURN), live.submit(SECOND, TURN)]
        while chats[0].status != "stopped":
            live.step()
        assert 0 < live.until_yield <= 0.3
        steps, step = [], live.step
        live.step = lambda: steps.append(1) or step()
        live.run()
        assert len(steps) < 100 and chats[1].status == "stopped" and live.until_yield == float("inf")
    with engine.open(64, 200, patience=60.0, hold_seconds=0.0) as live:  # the shorter of the two counts
        chats = [live.submit(FIRST, TURN), live.submit(SECOND, TURN)]
        live.run()
        assert chats[1].status == "stopped"


@pytest.mark.parametrize("patience", [-1.0, float("nan"), float("inf")])
def test_a_patience_that_is_none_is_refused(llama, patience):
    engine = Engine(llama, "rkv", budget=16, interval=8, rows=1)
    with pytest.raises(SparseRLError, match="patience is"):
        engine.open(64, 200, patience=patience)
    assert engine.generate([FIRST], sampling=TURN)  # it can be used
