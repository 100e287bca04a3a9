"""The scale model of a pool: the ledger of a run, samplers that take as long as the model says, and their sum."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.config import make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.planning.training import CONTEXT
from sparse_rl.pool.ledger import FILLS, Ledger
from sparse_rl.pool.pieces import MOST_TOGETHER, own_samplers
from sparse_rl.pool.pool import Pool
from sparse_rl.scale import pool as scale_pool
from sparse_rl.scale.lengths import Lengths
from sparse_rl.scale.model import H200, Links, Work, one_step, work_of
from sparse_rl.scale.pool import RESULT_BYTES, finish_times, forecast_pool, pool_rollout, pool_step
from sparse_rl.train.run import plan_run
from tests.helpers.pools import Threads

LINKS = Links()


def settings_of(**sections: dict):
    rollout = {"rows": 16, "prompts": 16, "group_size": 4, "max_new_tokens": 2048, "pool": "ray", "samplers": 4}
    given = {"model": {"name": "qwen2.5-1.5b"} | sections.pop("model", {}), "task": {"name": "sums"}}
    return make_recipe({**given, "rollout": rollout | sections.pop("rollout", {}), **sections})


def work(**sections: dict) -> Work:
    return work_of(settings_of(**sections), 256)


WORK = work()
STEPS = st.tuples(st.integers(1, 12), st.integers(1, 6), st.integers(0, 2**31)).map(
    lambda drawn: Lengths(400, 0.75).draw(drawn[0], drawn[1], 2048, drawn[2])
)


class Watched(Ledger):
    """Notes what a ledger was told."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.handouts, self.finished = [], []

    def assign(self):
        found = super().assign()
        self.handouts.extend(found.values())
        return found

    def finish(self, member, place, digest):
        self.finished.append(place)
        return super().finish(member, place, digest)


@settings(max_examples=60, deadline=None)
@given(new=STEPS, samplers=st.integers(1, 9), scores=st.booleans())
def test_work_is_conserved(new, samplers, scores):
    """Nobody works longer than the step; all handouts together take the time of all samplers; the longest completion
    alone is a lower bound.
    """
    found = pool_rollout(WORK, H200, samplers, new, scores)
    assert found.pieces == len(new) * -(-new.shape[1] // MOST_TOGETHER)
    assert 0 < found.working <= found.seconds * samplers * (1 + 1e-9)
    assert min(samplers, found.pieces) <= found.handouts <= found.pieces
    assert found.seconds >= WORK.rollout_seconds(H200, new.ravel()[[new.argmax()]], 1) * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(new=STEPS, samplers=st.integers(1, 9))
def test_every_piece_is_brought_once_and_messages_are_those_of_the_ledger(new, samplers):
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scale_pool, "Ledger", lambda wanted: made.append(Watched(wanted)) or made[-1])
        found = pool_rollout(WORK, H200, samplers, new)
    (ledger,) = made
    places = [place for handed in ledger.handouts for place, _ in handed]
    assert sorted(places) == sorted(ledger.finished) == [(0, i) for i in range(found.pieces)]
    assert found.handouts == len(ledger.handouts) and found.messages == len(places) + 2 * found.handouts


def test_a_pool_sends_no_more_messages_than_are_counted():
    """A real pool, whose members are threads: a message for each handout, an answer for each piece or fewer."""

    class Hands:
        rows = WORK.rollout.rows

        def complete(self, work, fetch, deliver):
            for place, _ in work:
                deliver(place, b"")

        def begin(self): ...

        def stop(self): ...

        def beats(self):
            return 0

        def tokens(self):
            return 0

        def cache_bytes(self):
            return 0

        def fetched_bytes(self):
            return 0

        def spent(self):
            return {}

    new = np.full((16, 4), 100)
    transport = Threads(Hands)
    pool = Pool(transport, 3)
    pool.publish(0, list)
    while pool.live < 3:
        pool.turn()
    before = pool.counts.messages
    pool.complete(scale_pool.cut([[i] for i in range(16)], [list(range(4))] * 16, 0, 0))
    found = pool_rollout(WORK, H200, 3, new)
    assert len(transport.handed) == found.handouts == 3
    assert pool.counts.messages - before <= found.messages
    pool.close()


@settings(max_examples=40, deadline=None)
@given(new=STEPS)
def test_one_sampler_takes_as_long_as_one_process(new):
    """As long as it is handed everything at once."""
    found = pool_rollout(WORK, H200, 1, new)
    if new.size <= FILLS * WORK.rollout.rows:
        pieces = [row[i : i + MOST_TOGETHER] for row in new for i in range(0, len(row), MOST_TOGETHER)]
        order = np.concatenate(sorted(pieces, key=lambda piece: -len(piece)))  # the longest expected go first
        assert found.handouts == 1
        assert found.seconds == found.working == pytest.approx(WORK.rollout_seconds(H200, order, len(new)))


@settings(max_examples=40, deadline=None)
@given(length=st.integers(1, 2000), power=st.integers(0, 5))
def test_more_samplers_are_not_slower_where_all_are_alike(length, power):
    """Pieces of equal lengths divide evenly. With unequal lengths, which nobody knows beforehand, one more sampler may
    be unlucky.
    """
    new = np.full((16, 8), length)
    few, many = (pool_rollout(WORK, H200, 2**p, new).seconds for p in (power, power + 1))
    assert many <= few * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(new=STEPS, samplers=st.integers(1, 6), ahead=st.sampled_from([0, 1, 4]), gpus=st.integers(1, 2))
def test_a_step_is_the_sum_of_its_parts_or_the_longer_of_two(new, samplers, ahead, gpus):
    if len(new) < 4 * gpus or samplers < gpus:
        return
    it = dataclasses.replace(WORK, rollout=dataclasses.replace(WORK.rollout, ahead=ahead))
    found = pool_step(it, H200, LINKS, gpus, samplers, new)
    assert 0 <= found.idle < 1 and -1e-9 <= found.idle_sampling < 1
    publish = found.publish / 2
    rest = found.rest - H200.step_rest * found.step
    learn = found.update + found.communication + found.exchange + publish + rest
    sample = found.rollout + publish
    assert (found.sample == found.rollout) == bool(ahead)
    whole = max(sample, learn) if ahead else sample + learn + found.sample - found.rollout
    assert found.step == pytest.approx(whole / (1 - H200.step_rest))


def test_one_sampler_in_turn_is_one_process_and_what_travels():
    """With `ahead` 0 and one sampler, a step is that of one GPU, plus weights, results and messages."""
    new = Lengths(400, 0.75).draw(16, 4, 2048, seed=3)
    alone = one_step(WORK, H200, LINKS, 1, new)
    found = pool_step(WORK, H200, LINKS, 1, 1, new)
    messages = 16 + 2
    travels = 2 * WORK.trained * 2 / LINKS.store + new.sum() * RESULT_BYTES / LINKS.store + messages * LINKS.message
    assert found.messages == messages and found.received == new.sum() * RESULT_BYTES
    assert (found.sample, found.update) == (pytest.approx(alone.sample), alone.update)
    assert found.step == pytest.approx(alone.step + travels / (1 - H200.step_rest))


def test_links_of_a_pool_count():
    new = np.full((16, 4), 500)
    plain = pool_step(WORK, H200, LINKS, 1, 4, new)
    slow = pool_step(WORK, H200, dataclasses.replace(LINKS, store=0.5e9), 1, 4, new)
    chatty = pool_step(WORK, H200, dataclasses.replace(LINKS, message=1.0), 1, 4, new)
    assert slow.publish == 2 * plain.publish == 4 * WORK.trained * 2 / 1e9
    assert chatty.exchange - plain.exchange == pytest.approx(plain.messages * 0.999)
    adapters = work(model={"lora_rank": 8})
    assert pool_step(adapters, H200, LINKS, 1, 4, new).sent < 0.02 * plain.sent


def test_each_process_of_the_learner_has_samplers_of_its_own():
    assert [own_samplers(7, 3, rank) for rank in range(3)] == [3, 2, 2]
    new = np.full((16, 4), 500)
    two = pool_step(WORK, H200, LINKS, 2, 4, new)
    half = pool_rollout(WORK, H200, 2, new[:8])
    assert two.rollout == pytest.approx(half.seconds) and two.messages == 2 * half.messages


def test_finish_times_end_with_the_handout():
    new = Lengths(400, 0.75).draw(4, 4, 2048, seed=0)
    pieces = scale_pool.cut([[i] for i in range(4)], [list(range(4))] * 4, 0, 0)
    times, total = finish_times(WORK, H200, pieces, new, scores=False)
    assert max(times) == pytest.approx(total) and np.argmax(times) == np.argmax(new.max(1))
    scored, longer = finish_times(WORK, H200, pieces, new, scores=True)
    assert scored == sorted(scored) and scored[-1] == longer > total


def test_a_plan_needs_to_know_how_many_samplers():
    lengths = Lengths(400, 0.75)
    for samplers, gpus, said in [
        (0, 1, "a plan cannot know; give --rollout.samplers"),
        (1, 2, "each of the learner's 2 processes needs one; use at least 2"),
        (40, 32, "rollout.prompts is 16, but all completions of a prompt stay on one of 32 GPUs"),
    ]:
        with pytest.raises(SparseRLError, match=said):
            forecast_pool(work(rollout={"samplers": samplers}), H200, LINKS, gpus, lengths)
    found = forecast_pool(WORK, H200, LINKS, 1, lengths)
    assert found == forecast_pool(WORK, H200, LINKS, 1, lengths) != forecast_pool(WORK, H200, LINKS, 1, lengths, seed=9)


@pytest.mark.parametrize("sections", [{}, {"loss": {"beta": 0.01}}, {"learn": {"method": "shadow"}}])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_sampler_needs_less_than_the_learner(sections, ahead):
    planned = plan_run(settings_of(**sections, rollout={"ahead": ahead, "pool": "ray://head:6379"}), 256)
    alone, scoring = planned.sampler_bytes(scores=False), planned.sampler_bytes(scores=True)
    assert planned.rollout.total_bytes < alone <= scoring < planned.total_bytes
    assert scoring - alone >= planned.reference_bytes


def test_samplers_of_a_machine_share_the_learners_gpu(monkeypatch):
    """A cluster of one's own spreads samplers over all GPUs, the learner's too; those of a named one are elsewhere."""

    def planned(pool, **rollout):
        return plan_run(settings_of(rollout={"pool": pool, **rollout}), 256)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for ahead in (0, 1):
        alone = planned("ray://head:6379", ahead=ahead)
        each = alone.sampler_bytes(scores=bool(ahead)) + CONTEXT
        assert not alone.beside_bytes
        for gpus, samplers, beside in [(0, 0, 1), (1, 1, 1), (1, 3, 3), (2, 3, 2), (8, 4, 1)]:
            monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
            found = planned("ray", ahead=ahead, samplers=samplers)
            assert found.beside_bytes == beside * each and found.total_bytes == alone.total_bytes + beside * each
            assert found.sampler_bytes(bool(ahead)) == alone.sampler_bytes(bool(ahead))
    assert "samplers of the pool on this GPU" in found.text() and "on this GPU" not in alone.text()
    assert not found.fits(int(alone.total_bytes / 0.95) + 1) and alone.fits(int(alone.total_bytes / 0.95) + 1)
