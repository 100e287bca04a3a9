"""Conversations that are begun anew under a new trace; odd calls of an open engine get a sentence and lose no row."""

import copy
import random
import threading
import time

import numpy as np
import pytest
import torch

from sparse_rl import Engine, Sampling, SparseRLError, read_trajectories, token_logprobs
from sparse_rl.records import TrajectoryWriter
from sparse_rl.rollout.live import QueueFull
from tests.helpers.compressors import STANDALONE
from tests.helpers.models import prompts_of, tiny
from tests.rollout.test_live import BUDGET, INTERVAL, assert_replayed, assert_same_bits, held, model_of, plan_of, some

LONGEST = 150  # tokens of a prompt
ANSWER = Sampling(30, stop_ids=())
PAIRS = some(
    *(("llama", compressor) for compressor in STANDALONE),
    ("gemma3", "rkv"),
    ("qwen3_5_text", "h2o"),
    ("gpt-oss", "rkv"),
)


def opened(model, compressor="rkv", rows=2, most=300, prompt_tokens=LONGEST, **options):
    return Engine(model, compressor, budget=BUDGET, interval=INTERVAL, rows=rows).open(prompt_tokens, most, **options)


def submitted(model, prompt, compressor="rkv", seed=0, **options):
    """What a new engine gives for this prompt."""
    with opened(model, compressor, **options) as live:
        chat = live.submit(prompt, ANSWER, seed)
        live.run()
        return live.release(chat)


def stopped(live, tokens=30, seed=0):
    chat = live.submit(prompts_of(tokens)[0], ANSWER, seed)
    live.run()
    return chat


# ---------------------------------------------------------------------------------------------------- a new trace


@pytest.mark.parametrize("architecture, compressor", PAIRS)
def test_a_renewed_conversation_is_a_new_submission(architecture, compressor):
    """Of the same tokens, to the bit, wherever its row was. Its new trace replays, and it says what happened."""
    model, more = model_of(architecture), prompts_of(12, seed=5)[0]
    places, found, old = ({}, {"hold": 0, "park": 9}, {"hold": 0, "park": 0}), [], None
    for place in places:
        with opened(model, compressor, **place) as live:
            chat = stopped(live)
            assert (chat.row is not None, chat.parked is not None) == (not place, place.get("park") == 9)
            old, tokens = live.trajectory(chat), [*chat.tokens, *more]
            again = live.renew(chat, more)
            live.run()
            assert (chat.status, chat.finish_reason, chat.row, chat.parked) == ("ended", "renewed", None, None)
            assert again.prompt == tokens and again.read() == again.tokens[len(tokens) :]
            assert (again.way, again.renewed, again.seed, again.number) == ("prefilled", 1, 0, 1)
            found.append(live.release(again))
            assert live.rows_in_use == live.num_open == 0 and not live._loop.alive and not live._loop.parked
    expected = submitted(model, tokens, compressor)
    for trajectory in found:
        assert_same_bits(trajectory, expected)
        assert (trajectory.renewed, expected.renewed, old.renewed) == (1, 0, 0)
        assert_replayed(model, trajectory)
    if compressor not in ("dense", "prompt-only"):  # what was evicted before is seen again, until the prompt is read
        assert (found[0].trace.evicted_at[..., : len(tokens)].int() >= len(tokens)).all()
        assert (old.trace.evicted_at.int() < len(old.tokens)).any()


def test_it_goes_on_like_any_other(llama):
    """Extended, restored and renewed again, with settings of its own, under one trace each time."""
    with opened(llama, hold=0, park=0) as live:
        chat = stopped(live)
        again = live.renew(chat, sampling=Sampling(9, 0.7, stop_ids=()), seed=4)
        live.run()
        assert (again.seed, len(again.tokens)) == (4, 30 + 30 + 9)
        live.extend(again, [5, 6], ANSWER)
        live.run()
        assert (again.way, again.renewed) == ("restored", 1)
        trajectory = live.trajectory(again)
        assert trajectory.renewed == 1 and trajectory.num_given_tokens == 2 and len(trajectory.turns) == 2
        third = live.renew(again, keep=20)
        live.run()
        assert third.renewed == 2 and third.way == "prefilled"
        last = live.release(third)
    assert_same_bits(last, submitted(llama, chat.tokens[:20], seed=4))
    mask = trajectory.response_mask.clone()
    mask[: trajectory.turns[1].start] = False  # the turn before had another temperature
    with torch.no_grad():
        replayed = token_logprobs(llama, trajectory.tokens, trajectory.trace)
    assert (replayed - trajectory.sampler_logprobs)[mask].abs().max() < 1e-4


def test_an_edited_past_and_a_second_answer(llama):
    with opened(llama) as live:
        chat = stopped(live, seed=3)
        first, tokens = live.trajectory(chat), list(chat.tokens)
        same = live.renew(chat, keep=30)
        live.run()
        assert_same_bits(live.trajectory(same), first)
        other = live.renew(same, keep=30, seed=4)
        live.run()
        assert other.tokens[:30] == tokens[:30] and other.tokens != tokens
        edited = live.renew(other, [1, 2, 3], keep=10)
        live.run()
        assert edited.prompt == [*tokens[:10], 1, 2, 3]
        anything = live.renew(edited, [4, 4], keep=0)
        live.run()
        assert anything.prompt == [4, 4] and anything.renewed == 4
        for keep, said in ((-1, "keep is -1"), (1000, "at most 32"), (1.5, "keep is 1.5"), (0, "to be read is empty")):
            with pytest.raises(SparseRLError, match=said):
                live.renew(anything, keep=keep)
        assert live.release(anything).renewed == 4


def test_company_does_not_notice(llama):
    """Renewed among strangers at random moments: the same bits, theirs too."""
    plans = [plan_of(seed, 3) for seed in range(4)]
    with opened(llama, rows=8) as live:
        expected = [live.release(chat) for chat in held(live, plans)]
        chat = stopped(live)
    anew = submitted(llama, [*chat.tokens, 8, 9])
    rng, found, turns = random.Random(2), {}, dict.fromkeys(range(4), 1)
    with opened(llama, hold_seconds=0.0, park=9) as live:
        chats = [live.submit(plan.prompt, plan.sampling[0], plan.seed) for plan in plans]
        mine = live.submit(prompts_of(30)[0], ANSWER, 0)
        while len(found) < 4 or mine.status != "stopped" or not mine.renewed:
            if mine.status == "stopped" and not mine.renewed and rng.random() < 0.3:
                mine = live.renew(mine, [8, 9])
            for i, plan in enumerate(plans):
                if i in found or chats[i].status != "stopped" or rng.random() < 0.5:
                    continue
                if turns[i] == 3:
                    found[i] = live.release(chats[i])
                else:
                    live.extend(chats[i], plan.given[turns[i]], plan.sampling[turns[i]])
                    turns[i] += 1
            live.step()
        assert_same_bits(live.release(mine), anew)
        assert live.rows_in_use == 0
    for i, wanted in enumerate(expected):
        assert_same_bits(found[i], wanted)


def test_what_is_recorded_begins_anew():
    """Routes and supports are those of the new trace alone, of a prompt that holds the earlier turn."""
    model = copy.deepcopy(tiny("qwen3-moe"))
    way = Sampling(12, 1.0, 6, support="ids", stop_ids=())
    engine = Engine(model, "rkv", budget=BUDGET, interval=INTERVAL, rows=2, record_routes=True)
    with engine.open(LONGEST, 200, way) as live:
        chat = live.submit(prompts_of(30)[0], way)
        live.run()
        again = live.renew(chat, [3, 4])
        live.run()
        live.extend(again, [5])
        live.run()
        trajectory = live.release(again)
    assert len(trajectory.trace.routes) == len(trajectory.tokens) == 30 + 12 + 2 + 12 + 1 + 12
    mask = trajectory.response_mask
    assert trajectory.support.counts[mask].gt(0).all() and not trajectory.support.counts[~mask].any()
    with torch.no_grad():
        found = token_logprobs(model, trajectory.tokens, trajectory.trace, support=trajectory.support)
    assert (found - trajectory.sampler_logprobs)[mask].abs().max() < 1e-4


def test_files_and_versions_say_so(llama, tmp_path):
    with opened(llama) as live:
        chat = stopped(live)
        before = live.trajectory(chat)
        live.engine.version = 3
        again = live.renew(chat)
        live.run()
        trajectory = live.release(again)
    assert trajectory.version == 3  # every slot is of the new weights
    with TrajectoryWriter(tmp_path / "kept") as writer:
        writer.write(trajectory)
        writer.write(before)
    for read, written in zip(read_trajectories(tmp_path / "kept"), (trajectory, before), strict=True):
        assert_same_bits(read, written)  # each with its own trace
        assert read.renewed == written.renewed
    lines = tmp_path / "kept" / "trajectories.jsonl"
    assert lines.read_text().count('"renewed"') == 1
    lines.write_text(lines.read_text().replace('"renewed": 1', '"renewed": -1'))
    with pytest.raises(SparseRLError, match=r"line 1 is not a trajectory .renewed is -1, not a whole number"):
        list(read_trajectories(tmp_path / "kept"))


def test_conversations_with_equal_numbers_have_files_of_their_own(llama, tmp_path):
    """Two that renew the same one, and one that was submitted with the same numbers."""
    with opened(llama, rows=3) as live:
        chat = stopped(live)
        live.cancel(chat)
        live.step()
        chats = [live.renew(chat, seed=1), live.renew(chat, keep=20, seed=2), live.submit(prompts_of(9)[0], ANSWER)]
        live.run()
        found = [live.release(each) for each in chats]
    assert [(t.prompt_index, t.sample_index, t.renewed) for t in found] == [(0, 0, 1), (0, 0, 1), (0, 0, 0)]
    with TrajectoryWriter(tmp_path / "kept") as writer:
        for trajectory in found:
            writer.write(trajectory)
    for read, written in zip(read_trajectories(tmp_path / "kept"), found, strict=True):
        assert_same_bits(read, written)


def test_the_way_of_every_turn_is_told(llama):
    ways = {}
    for name, place in {"held": {}, "parked": {"hold": 0, "park": 1}, "trace": {"hold": 0, "park": 0}}.items():
        with opened(llama, **place) as live:
            chat, ways[name] = stopped(live), []
            for _ in range(2):
                ways[name].append(chat.way)
                live.extend(chat, [1])
                live.run()
            ways[name].append(chat.way)
    assert ways["held"] == ways["parked"] == ["prefilled", "extended", "extended"]
    assert ways["trace"] == ["prefilled", "restored", "restored"]


# --------------------------------------------------------------------------------------------------------- limits


def test_a_conversation_that_is_no_prompt_any_more(llama):
    """It may be too long for the rows in which prompts are read, or for an answer: it can still be extended."""
    with opened(llama, prompt_tokens=40, most=100) as live:
        chat = stopped(live)
        with pytest.raises(SparseRLError) as caught:
            live.renew(chat, [1])
        assert str(caught.value) == (
            "conversation 0 as a prompt has 61 tokens, but this engine was opened for prompts of up to 40; extend it, "
            "keep fewer, or open with prompt_tokens=61."
        )
        live.extend(chat, sampling=Sampling(1000, stop_ids=()))
        live.run()
        assert len(chat.tokens) == 100
        short = live.renew(chat, keep=40)
        live.run()
        assert len(short.tokens) == 100 and live.num_open == 1
    with opened(llama, prompt_tokens=90, most=100) as live:
        chat = stopped(live, tokens=70)
        assert len(chat.tokens) == 100
        with pytest.raises(SparseRLError, match=r"a conversation of 100 tokens leaves .* max_tokens=101"):
            live.extend(chat)
        again = live.renew(chat, keep=90)
        live.run()
        assert len(again.tokens) == 100 and again.finish_reason == "length"


def test_it_takes_the_place_of_the_old_one_however_many_wait(llama):
    """One that has ended has no place: it waits like a new one."""
    with opened(llama, waiting=1, conversations=3) as live:
        chat, other = stopped(live), stopped(live, seed=1)
        gone = stopped(live, seed=2)
        live.release(gone)
        waits = live.submit([1, 2], ANSWER)
        for call in (lambda: live.submit([1, 3], ANSWER), lambda: live.renew(gone)):
            with pytest.raises(QueueFull, match="1 conversations wait"):
                call()
        again, more = live.renew(chat), live.renew(other)
        assert live.num_open == 3  # at once
        live.run()
        assert again.status == more.status == waits.status == "stopped" and live.num_open == 3
        live.release(waits)
        last = live.renew(gone)
        live.run()
        assert last.status == "stopped" and last.renewed == 1
        for one in (again, more, last):
            live.cancel(one)
        live.step()
        assert live.rows_in_use == live.num_open == 0


def test_one_that_has_ended_comes_back_even_after_its_engine(llama, monkeypatch):
    with opened(llama) as live:
        released, cancelled, left = stopped(live), stopped(live, seed=1), stopped(live, seed=2)
        live.release(released)
        live.cancel(cancelled)
        live.step()
        chats = [live.renew(released, [5]), live.renew(cancelled, [5])]
        live.run()
        assert all(chat.renewed == 1 and chat.status == "stopped" for chat in chats)
        monkeypatch.setattr(live._loop, "decode", lambda: 1 / 0)
        running = live.submit([1, 2, 3], ANSWER)
        with pytest.raises(ZeroDivisionError):
            live.step()
        assert running.status == left.status == "ended" and left.finish_reason == "closed"
    with opened(llama) as live:
        again = live.renew(left, [5])
        live.run()
        found = live.release(again)
    assert_same_bits(found, submitted(llama, [*left.tokens, 5], seed=2))


# ------------------------------------------------------------------------------------------------------ odd orders


def test_odd_orders_are_refused_in_a_sentence(llama):
    def refused(call, *said):
        with pytest.raises(SparseRLError) as caught:
            call()
        assert all(part in str(caught.value) for part in said) and "\n" not in str(caught.value), caught.value

    with opened(llama) as live:
        chat = live.submit(prompts_of(30)[0], ANSWER)
        for _ in range(2):  # waiting, then running: whatever else is wrong, it says that first
            for call in (
                lambda: live.renew(chat),
                lambda: live.renew(chat, [99]),
                lambda: live.extend(chat, [1] * 1000),
                lambda: live.extend(chat, [99]),
                lambda: live.release(chat),
            ):
                refused(call, f"conversation 0 is {chat.status}; wait until it has stopped")
            live.step()
        live.run()
        live.extend(chat, [1])
        refused(lambda: live.renew(chat), "conversation 0 is waiting; wait until it has stopped to begin it anew")
        live.run()
        again = live.renew(chat)
        for _ in range(2):  # before and after the round in which it takes effect
            refused(lambda: live.extend(chat, [1]), "conversation 0 has ended", "`submit`", "`renew`")
            refused(lambda: live.release(chat), "conversation 0 has ended, so its trajectory is gone")
            live.cancel(chat)  # nothing happens
            live.step()
        live.run()
        assert chat.finish_reason == "renewed" and again.status == "stopped"
        live.cancel(again)
        third = live.renew(again)  # the conversation is gone on with before the round in which it would have ended
        live.cancel(third)
        live.run()
        assert third.status == "ended" and live.rows_in_use == live.num_open == 0 and live.idle
        refused(lambda: live.renew(None), "None is not a conversation")
        refused(lambda: live.renew(third, seed="x"), "seed is 'x'; give a whole number")
        refused(lambda: live.renew(third, sampling={}), "sampling is {}; give a Sampling")
    refused(lambda: live.renew(third), "this engine was closed")


NO_TOKENS = {
    "half": [1, 2.5],
    "whole": [1.0],
    "none": [1, None],
    "nothing": None,
    "texts": ["a"],
    "text": "abc",
    "bytes": b"ab",
    "number": 5,
    "lists": [[1, 2]],
    "matrix": torch.ones(1, 2, dtype=torch.long),
    "floats": torch.ones(3),
    "scalar": torch.tensor(3),
    "infinite": [float("inf")],
    "encoding": {"input_ids": [1, 2]},
}


@pytest.mark.parametrize("tokens", NO_TOKENS.values(), ids=NO_TOKENS)
def test_what_are_no_token_ids_reach_no_row(tokens, llama):
    """A round that they reached would fail for everyone."""
    with opened(llama) as live:
        chat = stopped(live)
        for call in (live.submit, lambda odd: live.extend(chat, odd), lambda odd: live.renew(chat, odd)):
            with pytest.raises(SparseRLError, match=r"list of token ids, (not|but entry) .*; (encode|give)") as caught:
                call(tokens)
            assert "\n" not in str(caught.value)
        live.extend(chat, np.array([1, 2]))
        live.run()
        assert live.release(chat).num_given_tokens == 2 and live.num_open == 0
    with pytest.raises(SparseRLError, match="list of token ids"):
        Engine(llama, "rkv", budget=BUDGET, interval=INTERVAL, rows=2).generate([tokens])


def test_settings_that_make_no_sense_are_refused(llama):
    with opened(llama) as live:
        for call, said in (
            (lambda: live.submit([1], ANSWER, None), "seed is None; give a whole number"),
            (lambda: live.submit([1], ANSWER, 1.5), "seed is 1.5"),
            (lambda: live.submit([1], {}), "sampling is {}; give a Sampling"),
            (lambda: live.submit([1], ANSWER, stop_strings=None), "stop_strings is None; give a list"),
            (lambda: live.submit([1], ANSWER, stop_strings=5), "stop_strings is 5; give a list"),
        ):
            with pytest.raises(SparseRLError, match=said):
                call()
        assert live.num_open == 0
    for options, said in (
        ({"patience": "x"}, "patience is 'x'; it must be a number of seconds"),
        ({"sampling": {"top_k": 3}}, "sampling is .*; give a Sampling"),
    ):
        with pytest.raises(SparseRLError, match=said):
            opened(llama, **options)


def test_one_that_was_cut_off_lets_go_of_its_conversations(llama):
    """Who waits for one of them to stop must not wait for ever."""
    live = opened(llama)
    chat = live.submit([1, 2], ANSWER)
    live.step()
    with live.engine.open(LONGEST, 300) as second:
        with pytest.raises(SparseRLError, match="was cut off"):
            live.step()
        mine = second.submit([1, 2], ANSWER)
        second.step()
        live.close()
        live.close()
        assert (chat.status, chat.finish_reason, live.num_open) == ("ended", "closed", 0)
        second.run()
        found = second.release(mine)
    assert_same_bits(found, submitted(llama, [1, 2]))


def test_one_that_was_renewed_before_the_end_lets_go_of_its_copy(llama):
    with opened(llama, rows=1, park=4) as live:
        old, other = (live.submit(prompt, ANSWER) for prompt in prompts_of(20, 30))
        live.run()
        assert old.parked is not None
        live.renew(old)  # nothing steps any more
    assert old.parked is None and old.sequence is None and other.row is None


def test_one_that_goes_on_meanwhile_is_not_renewed_without_its_new_turn(llama, monkeypatch):
    with opened(llama) as live:
        chat = live.submit(prompts_of(20)[0], ANSWER)
        live.run()
        begin = live._begin

        def meanwhile(*given):
            live.extend(chat, [3, 4])
            live.run()
            return begin(*given)

        monkeypatch.setattr(live, "_begin", meanwhile)
        with pytest.raises(SparseRLError, match="went on while it was renewed"):
            live.renew(chat, [5])
        assert live.release(chat).given is not None


def test_threads_may_renew(llama):
    plans = [plan_of(seed, 2) for seed in range(4)]
    expected = []
    for plan in plans:
        with opened(llama) as live:
            chat = held(live, [plan])[0]
            again = live.renew(chat, [1, 2], ANSWER)
            live.run()
            expected.append(live.release(again))
    with opened(llama, hold_seconds=0.0, park=9) as live:
        found, ready = {}, [threading.Event() for _ in plans]

        def talk(i, plan):
            def wait():
                while chat.status != "stopped":
                    time.sleep(0.002)

            chat = live.submit(plan.prompt, plan.sampling[0], plan.seed)
            wait()
            live.extend(chat, plan.given[1], plan.sampling[1])
            wait()
            chat = found[i] = live.renew(chat, [1, 2], ANSWER)
            wait()
            ready[i].set()

        threads = [threading.Thread(target=talk, args=pair) for pair in enumerate(plans)]
        for thread in threads:
            thread.start()
        while not all(event.is_set() for event in ready):
            live.step()
        for thread in threads:
            thread.join()
        for i, wanted in enumerate(expected):
            assert_same_bits(live.release(found[i]), wanted)
        assert live.rows_in_use == live.num_open == 0
