"""An engine that stays open: conversations of several turns under one trace, in any company."""

import copy
import random
import threading
import time
from dataclasses import dataclass

import pytest
import torch

from sparse_rl import Engine, Sampling, SparseRLError, token_logprobs
from sparse_rl.cache import SlotCache, SlotFormat
from sparse_rl.cache.formats import quantize
from sparse_rl.compressors import make
from sparse_rl.compressors.learned import fresh
from sparse_rl.learn.calibrate import calibrate
from sparse_rl.models import companions_of, set_companion
from sparse_rl.rollout.live import QueueFull
from tests.helpers.compressors import STANDALONE
from tests.helpers.hybrids import hybrid
from tests.helpers.models import prompts_of, tiny

BUDGET, INTERVAL = 16, 8
MOST = 400  # tokens of a conversation


def opened(model, compressor="rkv", rows=4, max_tokens=MOST, **options):
    engine = Engine(model, compressor, budget=BUDGET, interval=INTERVAL, rows=rows)
    return engine.open(64, max_tokens, **options)


@dataclass
class Plan:
    """What happens in a conversation: its prompt, and by turns what is given and how the answer is sampled."""

    prompt: list[int]
    given: list[list[int]]  # of the first turn: nothing
    sampling: list[Sampling]
    seed: int


def plan_of(seed: int, turns: int = 8, temperature: float | None = None) -> Plan:
    rng = random.Random(seed)
    lengths = [rng.choice([1, 2, 5, 8, 17]) for _ in range(turns - 1)]
    lengths[rng.randrange(turns - 1)] = 60  # beyond the capacity
    ways = [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 9, 1.0), (1.0, 0, 0.8), (0.0, 0, 1.0)]
    chosen = [rng.choice(ways) if temperature is None else (temperature, 0, 1.0) for _ in range(turns)]
    return Plan(
        prompts_of(rng.choice([4, 20, 24, 50]), seed=seed)[0],
        [[], *(prompts_of(n, seed=seed * 100 + i)[0] for i, n in enumerate(lengths))],
        [Sampling(rng.randrange(1, 15), *way, stop_ids=(7, 9)) for way in chosen],
        seed,
    )


def held(live, plans):
    """Conversations as planned, all turns together."""
    chats = [live.submit(plan.prompt, plan.sampling[0], plan.seed) for plan in plans]
    live.run()
    for turn in range(1, max(len(plan.given) for plan in plans)):
        for chat, plan in zip(chats, plans, strict=True):
            live.extend(chat, plan.given[turn], plan.sampling[turn])
        live.run()
    return chats


def assert_replayed(model, trajectory, within=1e-4):
    """Under its one trace the learner finds the sampler's log-probs on all sampled tokens."""
    mask = trajectory.response_mask
    with torch.no_grad():
        found = token_logprobs(model, trajectory.tokens, trajectory.trace)
    assert mask.any() and (found - trajectory.sampler_logprobs)[mask].abs().max() < within
    assert not trajectory.sampler_logprobs[~mask].any()


def assert_same_bits(a, b):
    assert a.tokens.equal(b.tokens) and a.sampler_logprobs.equal(b.sampler_logprobs)
    assert a.trace.evicted_at.equal(b.trace.evicted_at)
    assert (a.given is None) == (b.given is None) and (a.given is None or a.given.equal(b.given))


def some(*usual):
    """Pairs of architecture and compressor: the usual ones, the others in a campaign."""
    every = [(a, c) for a in ("llama", "gemma3", "qwen3_5_text") for c in STANDALONE]
    return [*usual, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in every if pair not in usual)]


def model_of(architecture):
    return hybrid(architecture) if architecture == "qwen3_5_text" else tiny(architecture)


# every compressor with one architecture; sliding windows, recurrent states, experts and all others with some
PAIRS = some(
    *(("llama", compressor) for compressor in STANDALONE),
    *(("gemma3", compressor) for compressor in ("rkv", "h2o")),
    *(("qwen3_5_text", compressor) for compressor in ("rkv", "h2o")),
    ("gpt-oss", "tova"),
)


@pytest.mark.parametrize("architecture, compressor", PAIRS)
def test_conversations_replay_under_one_trace(architecture, compressor):
    model = model_of(architecture)
    plans = [plan_of(seed, temperature=1.0) for seed in range(3)]
    with opened(model, compressor, rows=2) as live:
        chats = held(live, plans)
        trajectories = [live.release(chat) for chat in chats]
        assert live.rows_in_use == 0
    for plan, trajectory in zip(plans, trajectories, strict=True):
        assert_replayed(model, trajectory)
        assert trajectory.num_given_tokens == sum(map(len, plan.given))
        assert len(trajectory.turns) == len(plan.given)
        for turn, sampling in zip(trajectory.turns, plan.sampling, strict=True):
            assert 1 <= turn.stop - turn.start <= sampling.max_new_tokens
        evicted = (trajectory.trace.evicted_at.long() < len(trajectory.tokens)).any()
        assert bool(evicted) == (compressor != "dense" and (compressor != "prompt-only" or len(plan.prompt) > BUDGET))


@pytest.mark.parametrize("architecture", ["llama", "gemma3", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "compressor, options", [("triattention", {}), ("learned", {}), ("learned", {"temperature": 1.0})]
)
def test_compressors_that_know_a_model_hold_conversations(compressor, options, architecture):
    """They replay, and do not depend on company either, where evictions are drawn, too."""
    model, plans = model_of(architecture), [plan_of(seed, 4, temperature=1.0) for seed in range(2)]
    try:
        if compressor == "learned":
            set_companion(model, "learned", fresh(model, "all"))
        else:
            calibrate(model, prompts_of(60), tokens=60)
        with opened(model, make(compressor, **options), rows=2) as live:
            together = [live.release(chat) for chat in held(live, plans)]
        with opened(model, make(compressor, **options), rows=1, hold=0, park=9) as live:
            parked = [live.release(chat) for chat in held(live, plans)]
    finally:
        companions_of(model).clear()
    for one, other in zip(together, parked, strict=True):
        assert_replayed(model, one)
        assert_same_bits(one, other)


@pytest.mark.parametrize("compressor", ["rkv", "dense", "prompt-only"])
def test_the_first_turn_is_what_generate_gives(compressor, llama):
    prompts, sampling = prompts_of(5, 33, 60, 12, 9), Sampling(30, stop_ids=(7,))
    engine = Engine(llama, compressor, budget=BUDGET, interval=INTERVAL, rows=3, max_tokens=100)
    expected = engine.generate(prompts, 2, sampling, seed=4)
    with engine.open(64, 100) as live:
        chats = [live.submit(prompt, sampling, 4, sample=i) for prompt in prompts for i in range(2)]
        live.run()
        for chat, wanted in zip(chats, expected, strict=True):
            found = live.release(chat)
            assert found.finish_reason == wanted.finish_reason and found.given is None
            if engine.compressor.evicts_response:
                assert_same_bits(found, wanted)
            else:  # rows that grow are read up to another slot
                assert found.tokens.equal(wanted.tokens) and found.trace.evicted_at.equal(wanted.trace.evicted_at)


@pytest.mark.parametrize(
    "architecture, compressor", some(("llama", "rkv"), ("llama", "dense"), ("gemma3", "h2o"), ("qwen3_5_text", "rkv"))
)
def test_arrival_and_company_do_not_matter(architecture, compressor):
    """Alone, all together, or at random moments among strangers with fewer rows, parked and brought back: the same
    bits.
    """
    model, plans = model_of(architecture), [plan_of(seed, 3) for seed in range(3)]
    with opened(model, compressor, rows=8) as live:
        alone = [live.release(held(live, [plan])[0]) for plan in plans]
    with opened(model, compressor, rows=8) as live:
        together = [live.release(chat) for chat in held(live, plans)]
    rng, trajectories = random.Random(5), {}
    strangers = [plan_of(seed, 2) for seed in range(10, 14)]
    with opened(model, compressor, rows=2, hold_seconds=0.0, park=9) as live:
        chats, turns = {}, {}
        everyone = plans + strangers
        while len(trajectories) < len(everyone):
            for i, plan in enumerate(everyone):
                if i not in chats and rng.random() < 0.2:
                    chats[i], turns[i] = live.submit(plan.prompt, plan.sampling[0], plan.seed), 1
                elif i in chats and chats[i].status == "stopped" and rng.random() < 0.3:
                    if turns[i] == len(plan.given):
                        trajectories[i] = live.release(chats[i])
                    else:
                        live.extend(chats[i], plan.given[turns[i]], plan.sampling[turns[i]])
                        turns[i] += 1
            live.step()
        assert live.rows_in_use == 0
    for i in range(len(plans)):
        assert_same_bits(alone[i], together[i])
        assert_same_bits(alone[i], trajectories[i])


def test_settings_belong_to_the_turn(llama):
    """Rows that sample differently beside one another, as if each had the engine for itself."""
    ways = [Sampling(20, 0.0), Sampling(9, 0.6), Sampling(20, 1.0, 5), Sampling(30, 1.0, 0, 0.7), Sampling(40, 2.0)]
    engine = Engine(llama, "rkv", budget=BUDGET, interval=INTERVAL, rows=8)
    (prompt,) = prompts_of(20)
    expected = [engine.generate([prompt], sampling=way, seed=3)[0] for way in ways]
    with engine.open(64, 200) as live:
        chats = [live.submit(prompt, way, 3) for way in ways]
        live.run()
        for chat, wanted in zip(chats, expected, strict=True):
            assert_same_bits(live.release(chat), wanted)


@pytest.mark.parametrize("support", ["margins", "ids"])
def test_what_could_be_drawn_is_recorded_over_all_turns(support, llama):
    way = Sampling(8, 1.0, 6, 0.9, support=support)
    with opened(llama, sampling=way) as live:
        chat = live.submit(prompts_of(9)[0], way)
        live.run()
        for n in (5, 30):
            live.extend(chat, prompts_of(n)[0])
            live.run()
        trajectory = live.release(chat)
    recorded, mask = trajectory.support, trajectory.response_mask
    assert recorded is not None and recorded.counts[mask].gt(0).all() and not recorded.counts[~mask].any()
    if support == "ids":
        with torch.no_grad():
            found = token_logprobs(llama, trajectory.tokens, trajectory.trace, support=recorded)
        assert (found - trajectory.sampler_logprobs)[mask].abs().max() < 1e-4


def test_routes_of_all_turns_are_recorded():
    """Of a mixture of experts: those of prompt, sampled and given tokens, also where a turn goes on without any."""
    model = copy.deepcopy(tiny("qwen3-moe"))  # transformers leaves hooks on a model that was asked for router logits
    engine = Engine(model, "rkv", budget=BUDGET, interval=INTERVAL, rows=2, record_routes=True)
    with engine.open(64, 200) as live:
        chat = live.submit(prompts_of(30)[0], Sampling(9))
        live.run()
        for n in (0, 40, 2, 0):
            live.extend(chat, prompts_of(n, seed=n)[0])
            live.run()
        trajectory = live.release(chat)
    routes = trajectory.trace.routes
    assert routes is not None and len(routes) == len(trajectory.tokens) == 30 + 5 * 9 + 42
    assert_replayed(model, trajectory)
    with torch.no_grad():
        found = model(trajectory.tokens[None, :20], output_router_logits=True).router_logits  # nothing is evicted yet
    for layer, logits in enumerate(found):
        chosen = logits.view(20, -1).topk(routes.shape[-1]).indices
        assert chosen.sort().values.equal(routes[:20, layer].long().sort().values)


# ------------------------------------------------------------------------------------------------- cut and extended


@pytest.mark.parametrize("compressor", ["rkv", "h2o", "random", "dense"])
def test_a_turn_that_is_cut_goes_on_to_the_bit(compressor, llama):
    (prompt,) = prompts_of(30)
    with opened(llama, compressor) as live:
        whole = live.submit(prompt, Sampling(60), 2)
        cut = live.submit(prompt, Sampling(1), 2)
        live.run()
        for n in (1, 7, 20, 31):
            live.extend(cut, sampling=Sampling(n))
            live.run()
        assert_same_bits(live.release(whole), live.release(cut))


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen3_5_text"])
def test_without_evictions_a_conversation_is_one_prompt(architecture):
    """Cut and extended anywhere: a fresh prefill of everything gives the same next tokens and log-probs."""
    model = model_of(architecture)
    greedy = Sampling(6, 0.0)
    with opened(model, "dense", rows=3) as live:
        chat = live.submit(prompts_of(9)[0], greedy)
        live.run()
        for i, n in enumerate((1, 3, 4, 12)):
            live.extend(chat, prompts_of(n, seed=i)[0], greedy)
            text = [*chat.tokens, *prompts_of(n, seed=i)[0]]
            fresh = live.submit(text, greedy)
            live.run()
            told = len(text)
            assert chat.tokens[told:] == fresh.tokens[told:]
            torch.testing.assert_close(chat.logprobs[told:], fresh.logprobs[told:], atol=1e-4, rtol=0)
            live.release(fresh)


# --------------------------------------------------------------------------------------------- rows that come and go


@pytest.mark.parametrize(
    "architecture, compressor",
    some(("llama", "rkv"), ("llama", "prompt-only"), ("gemma3", "h2o"), ("qwen3_5_text", "h2o")),
)
def test_a_conversation_read_again_under_its_trace_goes_on(architecture, compressor):
    """Nothing is parked, so only tokens and trace are left: slots, recent queries, states and attention received come
    back up to rounding, the conversation goes on, and replays.
    """
    kept, slots, recalled, again = kept_and_recalled(model_of(architecture), compressor)
    assert recalled.tokens.equal(kept.tokens) and recalled.trace.evicted_at.equal(kept.trace.evicted_at)
    assert_replayed(model_of(architecture), recalled)
    for mine, theirs in zip(slots, again, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("compressor", ["rkv", "h2o", "prompt-only"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_what_is_read_again_differs_by_rounding_alone(architecture, compressor):
    """In fp64 slots and queries come back to 1e-12. Attention received is a sum in fp32, whose order differs: 1e-5."""
    *_, slots, _, again = kept_and_recalled(copy.deepcopy(tiny(architecture)).double(), compressor)
    assert any(part.dtype == torch.float64 for part in slots)
    for mine, theirs in zip(slots, again, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12 if mine.dtype == torch.float64 else 1e-5, rtol=0)


def kept_and_recalled(model, compressor):
    """A conversation and its slots at the end: one that stayed in its row, and one that lost it after every turn."""
    plan = plan_of(1, 4, temperature=1.0)

    def run(**options):
        with opened(model, compressor, rows=2, **options) as live:
            chat = held(live, [plan])[0]
            lost = chat.row is None and chat.parked is None and chat.trace is not None
            live._loop.hold = 2
            live.extend(chat, prompts_of(3)[0], Sampling(1))
            live.run()
            ((row, sequence),) = live._loop.held.items()
            return live.trajectory(chat), live.engine.cache.take(row, sequence.used, sequence.fed), lost

    (kept, slots, _), (recalled, again, lost) = run(), run(hold=0, park=0)
    assert lost
    return kept, slots, recalled, again


@pytest.mark.parametrize(
    "compressor, kind, layers",
    [("rkv", "fp8", []), ("h2o", "fp8", [1]), ("rkv", "int8", [0, -1]), ("dense", "fp8", [])],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_slots_of_8_bits_are_parked_and_read_again(compressor, kind, layers, dtype):
    """Codes and exponents of every tensor come back to the bit, also into another row; read again under the trace they
    are the same codes, because it records ties in fp32, and in fp64 nothing lies between two codes. One trace replays
    all of it.
    """
    model = copy.deepcopy(tiny("llama")).to(dtype)
    plan = plan_of(1, 4, temperature=1.0)

    def run(stranger=False, **options):
        made = make(compressor, slots=kind, slots_kept=layers)
        with opened(model, made, rows=2, **options) as live:
            assert live.engine.storage.live_plan(64, MOST).cache_bytes == live.engine.cache.nbytes
            chat, rows, without = live.submit(plan.prompt, plan.sampling[0], plan.seed), set(), []
            live.run()
            for turn in range(1, len(plan.given)):
                rows.add(chat.row)
                without.append((chat.parked is not None, chat.trace is not None))
                assert live.trajectory(chat).trace.slots == live.engine.cache.shape.slots  # wherever it is
                if stranger and turn == 1:  # takes the row that is free
                    live.submit(prompts_of(9)[0], Sampling(200, stop_ids=()))
                    live.step()
                live.extend(chat, plan.given[turn], plan.sampling[turn])
                while chat.status != "stopped":
                    live.step()
                    rows.add(chat.row)
            live._loop.hold = 2
            live.extend(chat, prompts_of(3)[0], Sampling(1))
            live.run()
            slots = live.engine.cache.take(chat.row, chat.sequence.used, chat.sequence.fed)
            return live.trajectory(chat), slots, rows, without

    kept, slots, rows, without = run()
    assert rows == {0} and not any(any(one) for one in without)
    parked, back, rows, without = run(stranger=True, hold=0, park=9)
    assert 1 in rows and all(one == (True, False) for one in without)
    recalled, again, _, without = run(hold=0, park=0)
    assert all(one == (False, True) for one in without)
    assert kept.trace.slots == SlotFormat(kind, tuple(sorted(i % 3 for i in layers)))
    assert_same_bits(parked, kept)
    assert recalled.tokens.equal(kept.tokens) and recalled.trace.evicted_at.equal(kept.trace.evicted_at)
    codes = [part for part in slots if part.dtype in (torch.uint8, torch.int8) and part.shape[-1] > 2]
    assert len(codes) == (4 if layers == [1] else 2)  # keys and values of two runs of layers, or of one
    for mine, same, close in zip(slots, back, again, strict=True):
        assert mine.equal(same)
        torch.testing.assert_close(mine, close, atol=1e-5, rtol=0)  # attention received is fp32
    for trajectory in (kept, parked, recalled):
        assert trajectory.trace.slots == kept.trace.slots
        assert (trajectory.trace.ties is not None) == (dtype == torch.float32)
        assert dtype == torch.float64 or trajectory.trace.ties.equal(kept.trace.ties)
        assert_replayed(model, trajectory)
    with torch.no_grad():  # without rounding it is another distribution
        plain = token_logprobs(model, kept.tokens, type(kept.trace)(kept.trace.evicted_at))
    assert (plain - kept.sampler_logprobs)[kept.response_mask].abs().max() > 1e-3


def test_tokens_that_are_read_again_get_the_codes_that_they_had(monkeypatch):
    """Even where the keys and values that are read again differ by several times as much as fp32 makes them."""
    append, moved = SlotCache.append, []

    def other_numbers(self, layer, slot, key, value, ties=None):
        if ties is not None:  # of a conversation that is read again
            noise = [torch.rand(x.shape, generator=generator) * 2 - 1 for x in (key, value)]
            key, value = (x + 7e-6 * n * x.abs().amax(-1, keepdim=True) for x, n in zip((key, value), noise))
            moved.append(
                sum((quantize(x, "int8", t)[0] != quantize(x, "int8")[0]).sum() for x, t in zip((key, value), ties))
            )
        return append(self, layer, slot, key, value, ties)

    generator = torch.Generator().manual_seed(0)
    monkeypatch.setattr(SlotCache, "append", other_numbers)
    kept, slots, recalled, again = kept_and_recalled(tiny("llama"), make("rkv", slots="int8"))
    assert sum(moved) > 0  # some of them would have got another code
    assert recalled.trace.evicted_at.equal(kept.trace.evicted_at)
    codes = [(mine, theirs) for mine, theirs in zip(slots, again, strict=True) if mine.dtype == torch.int8]
    assert len(codes) == 3 and all(mine.equal(theirs) for mine, theirs in codes)
    assert_replayed(tiny("llama"), recalled)


def test_ten_thousand_operations_leave_every_row_free():
    """Submit, extend, renew, cancel, release, step in any order: refusals are sentences, and what stopped replays."""
    rng, alive, seen, finished = random.Random(0), [], {"full": 0, "cancelled": 0, "extended": 0, "renewed": 0}, []
    prompts, model = prompts_of(*range(3, 33)), tiny("llama", num_hidden_layers=1)
    engine = Engine(model, "knorm", budget=12, interval=4, rows=3)
    with engine.open(40, 90, waiting=3, conversations=9, hold=2, park=1) as live:
        for _ in range(10_000):
            do = rng.random()
            if do < 0.4:
                try:
                    way = Sampling(rng.randrange(1, 4), rng.choice([0.0, 1.0]), stop_ids=(7,))
                    alive.append(live.submit(rng.choice(prompts), way, rng.randrange(99)))
                except QueueFull as full:
                    seen["full"] += 1
                    assert "release or await" in str(full) and "\n" not in str(full)
            elif do < 0.6 and alive:
                chat = rng.choice(alive)
                try:
                    live.extend(chat, rng.choice(prompts)[: rng.randrange(0, 30)], Sampling(rng.randrange(1, 4)))
                    seen["extended"] += 1
                except SparseRLError as error:
                    assert "wait until it has stopped to continue" in str(error) or "leaves no room" in str(error)
            elif do < 0.75 and alive:
                chat = alive.pop(rng.randrange(len(alive)))
                live.cancel(chat)
                seen["cancelled"] += 1
            elif do < 0.85:
                if stopped := [chat for chat in alive if chat.status == "stopped"]:
                    alive.remove(stopped[0])
                    finished.append(live.release(stopped[0]))
            elif do < 0.9 and alive:
                chat = rng.choice([chat for chat in alive if chat.status == "stopped"] or alive)
                try:
                    keep = rng.choice([None, rng.randrange(len(chat.tokens))])
                    new = live.renew(chat, rng.choice(prompts)[: rng.randrange(0, 9)], keep=keep)
                    alive.remove(chat)
                    alive.append(new)
                    seen["renewed"] += 1
                except SparseRLError as error:
                    assert any(said in str(error) for said in ("has stopped to begin it", "keep fewer", "is empty"))
            else:
                live.step()
            assert live.rows_in_use <= 3 and len(live._loop.parked) <= 1
        for chat in alive:
            live.cancel(chat)
        live.run()
        assert live.idle and live.rows_in_use == 0 and not live._open
        assert not live._loop.alive and not live._loop.parked and not live._loop.queue
        assert engine.state.done.all()
    assert min(seen.values()) > 100 and len(finished) > 100
    long = sorted(finished, key=lambda t: len(t.turns))[-5:]
    assert len(long[-1].turns) > 2
    for trajectory in long:
        with torch.no_grad():
            found = token_logprobs(model, trajectory.tokens, trajectory.trace)
        assert (found - trajectory.sampler_logprobs)[trajectory.response_mask].abs().max() < 1e-4


# ------------------------------------------------------------------------------------------ cancel, stop, interrupt


def test_cancelled_anywhere(llama):
    """Waiting, running, being fed, held or parked: its row is free after the next round, and others do not notice."""
    plan = plan_of(0, 3)
    with opened(llama, rows=2) as live:
        expected = live.release(held(live, [plan])[0])
    with opened(llama, rows=2, hold=1) as live:
        chat = live.submit(plan.prompt, plan.sampling[0], plan.seed)
        other = live.submit(prompts_of(9)[0], Sampling(50))
        third = live.submit(prompts_of(8)[0], Sampling(50))
        live.cancel(third)  # before a round has seen it
        live.step()
        live.cancel(other)  # running
        live.run()
        assert other.status == third.status == "ended" and other.finish_reason == "cancelled" and other.tokens[9:]
        another = live.submit(prompts_of(9)[0], Sampling(2))
        live.run()
        live.extend(another, prompts_of(60)[0])
        live.step()
        assert live._loop.feeding
        live.cancel(another)
        live.extend(chat, plan.given[1], plan.sampling[1])
        live.run()
        parked = [live.submit(prompts_of(n)[0], Sampling(2)) for n in (5, 6)]
        live.run()
        assert chat.parked is not None
        live.cancel(parked[0])
        live.cancel(parked[0])  # again: nothing happens
        live.extend(chat, plan.given[2], plan.sampling[2])
        live.run()
        assert_same_bits(live.release(chat), expected)
        live.cancel(parked[1])
        live.step()
        assert live.rows_in_use == 0


def test_an_interrupt_waits_for_the_end_of_the_round(llama, monkeypatch):
    import signal

    plan = plan_of(3, 4)
    with opened(llama) as live:
        expected = live.release(held(live, [plan])[0])
    with opened(llama) as live:
        loop, interrupts = live._loop, []
        for name in ("decode", "evict", "feed"):
            original = getattr(loop, name)

            def interrupted(*args, original=original):
                signal.raise_signal(signal.SIGINT)
                return original(*args)

            monkeypatch.setattr(loop, name, interrupted)

        def run():
            while not live.idle:
                try:
                    live.step()
                except KeyboardInterrupt:
                    interrupts.append(1)

        chat = live.submit(plan.prompt, plan.sampling[0], plan.seed)
        run()
        for given, sampling in zip(plan.given[1:], plan.sampling[1:], strict=True):
            live.extend(chat, given, sampling)
            run()
        assert len(interrupts) > 10
        assert_same_bits(live.release(chat), expected)


def test_news_of_an_interrupted_round_are_told_by_the_next_one(llama, monkeypatch):
    """Who waits for the news that a conversation stopped must not wait forever; what was cancelled has none."""
    import signal

    with opened(llama) as live:
        chat, other = (live.submit(prompts_of(n)[0], Sampling(3)) for n in (9, 12))
        original = live._loop.finish

        def interrupted():
            original()
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(live._loop, "finish", interrupted)
        while not chat.status == other.status == "stopped":
            with pytest.raises(KeyboardInterrupt):
                live.step()
        monkeypatch.undo()
        live.cancel(other)
        assert not live.idle and live.step() == [chat]
        assert live.idle and live.step() == []


def test_stopped_from_another_thread_before_a_round(llama):
    with opened(llama) as live:
        chat = live.submit(prompts_of(9)[0], Sampling(20))
        live.step()
        live.engine.stopped = True
        with pytest.raises(KeyboardInterrupt):
            live.step()
        live.engine.stopped = False
        live.run()
        assert len(chat.tokens) == 29


def test_threads_may_submit_extend_and_cancel(llama):
    plans = [plan_of(seed, 3) for seed in range(6)]
    with opened(llama, rows=8) as live:
        expected = [live.release(chat) for chat in held(live, plans)]
    with opened(llama, rows=2) as live:
        found, ready = {}, [threading.Event() for _ in plans]

        def talk(i, plan):
            chat = found[i] = live.submit(plan.prompt, plan.sampling[0], plan.seed)
            live.cancel(live.submit(plan.prompt, plan.sampling[0], 1000 + i))
            for turn in range(1, 3):
                while chat.status != "stopped":
                    time.sleep(0.002)
                live.extend(chat, plan.given[turn], plan.sampling[turn])
            while chat.status != "stopped":
                time.sleep(0.002)
            ready[i].set()

        threads = [threading.Thread(target=talk, args=(i, plan)) for i, plan in enumerate(plans)]
        for thread in threads:
            thread.start()
        while not all(event.is_set() for event in ready):
            live.step()
        for thread in threads:
            thread.join()
        for i, wanted in enumerate(expected):
            assert_same_bits(live.release(found[i]), wanted)


class Letters:
    """A tokenizer whose tokens are two characters each, none of them special."""

    all_special_ids = ()

    def decode(self, tokens, **_):
        return "".join(f"{token:02d}" for token in tokens)

    def convert_ids_to_tokens(self, token):
        return f"{token:02d}"


@pytest.mark.parametrize("poll", [None, (4, 8)])
def test_stop_strings_end_a_turn_at_the_token_that_completes_one(poll, llama):
    engine = Engine(llama, "rkv", budget=BUDGET, interval=INTERVAL, rows=4, poll=poll)
    (prompt,) = prompts_of(9)
    free = engine.generate([prompt], sampling=Sampling(40), seed=3)[0].response_tokens.tolist()
    string = f"{free[20]:02d}{free[21]:02d}"[1:]
    end = next(i for i in range(1, 40) if string in Letters().decode(free[: i + 1]))
    with engine.open(64, 100, tokenizer=Letters()) as live:
        chat = live.submit(prompt, Sampling(40), 3, stop_strings=[string, "none of these"])
        live.run()
        assert chat.tokens[9:] == free[: end + 1] and chat.finish_reason == "stop" and chat.matched == string
        live.extend(chat, prompts_of(30)[0], Sampling(5))
        live.run()
        assert chat.matched is None
        assert_replayed(llama, live.release(chat))


def test_tokens_are_read_as_they_come(llama):
    with opened(llama) as live:
        chat = live.submit(prompts_of(9)[0], Sampling(12))
        pieces = []
        while not live.idle:
            news = live.step()
            assert news == [chat]
            pieces.append(chat.read())
        assert all(pieces) and len(pieces) > 5 and [token for piece in pieces for token in piece] == chat.tokens[9:]
        live.extend(chat, [1, 2, 3])
        live.run()
        assert chat.read() == chat.tokens[-12:] and chat.read() == []


def test_versions_are_those_of_the_oldest_weights(llama):
    with opened(llama) as live:
        live.engine.version = 5
        chat = live.submit(prompts_of(9)[0], Sampling(3))
        live.run()
        live.engine.version = 6
        live.extend(chat, [3])
        live.run()
        assert live.release(chat).version == 5


def test_the_conversation_has_a_limit_of_its_own(llama):
    with opened(llama, max_tokens=80) as live:
        chat = live.submit(prompts_of(30)[0], Sampling(1000))
        live.run()
        assert len(chat.tokens) == 80 and chat.finish_reason == "length"
        with pytest.raises(SparseRLError, match="leaves no room for an answer"):
            live.extend(chat)
        assert_replayed(llama, live.release(chat))


# --------------------------------------------------------------------------------------------------------- mistakes


def test_what_makes_no_sense_is_refused(llama):
    with opened(llama, waiting=2) as live:
        for call, said in (
            (lambda: live.submit([]), "the prompt is empty"),
            (lambda: live.submit([61]), "token id 61, outside the vocabulary"),
            (lambda: live.submit(prompts_of(65)[0]), "open with prompt_tokens=65"),
            (lambda: live.submit([1], Sampling(stop_ids=tuple(range(17)))), "17 stop ids"),
            (lambda: live.submit([1], Sampling(top_k=3, support="ids")), "not opened to record"),
            (lambda: live.submit([1], stop_strings=["x"]), "need a tokenizer"),
            (lambda: live.submit([1], stop_strings="x"), "give a list of texts"),
        ):
            with pytest.raises(SparseRLError, match=said) as caught:
                call()
            assert "\n" not in str(caught.value)
        chats = [live.submit([1, 2]), live.submit([1, 3])]
        with pytest.raises(QueueFull, match="2 conversations wait"):
            live.submit([1, 4])
        with pytest.raises(SparseRLError, match="conversation 0 is waiting; wait until it has stopped"):
            live.extend(chats[0], [1])
        with pytest.raises(SparseRLError, match="wait until it has stopped to read its trajectory"):
            live.trajectory(chats[0])
        live.cancel(chats[1])
        live.step()
        with pytest.raises(SparseRLError, match="conversation 1 has ended; begin another with `submit`"):
            live.extend(chats[1], [1])
        with pytest.raises(SparseRLError, match="conversation 1 has ended, so its trajectory is gone"):
            live.trajectory(chats[1])
        live.submit([1, 4])
    for call in (live.step, lambda: live.submit([1])):
        with pytest.raises(SparseRLError, match="was closed"):
            call()
    assert chats[0].status == "ended"


def test_conversations_of_other_engines_are_refused(llama):
    """They have the same numbers: none may be taken for one of this engine's, and none may end it."""
    with opened(llama) as live, opened(llama) as other:
        mine, strange = live.submit([1, 2], Sampling(3)), other.submit([3, 4, 5], Sampling(3))
        live.run()
        other.run()
        assert mine.number == strange.number
        for call in (live.extend, live.cancel, live.trajectory, live.release):
            with pytest.raises(SparseRLError, match="conversation 0 was begun with another open engine"):
                call(strange)
            with pytest.raises(SparseRLError, match=r"None is not a conversation; give what `submit` returned"):
                call(None)
        with pytest.raises(SparseRLError, match=r"sampling is \{.*give a Sampling"):
            live.extend(mine, [1], {"max_new_tokens": 3})
        live.run()
        assert len(live.release(mine).response_tokens) == len(other.release(strange).response_tokens) == 3
    for seconds in (-1, "5", float("nan")):
        with pytest.raises(SparseRLError, match=r"hold_seconds is .* a number of at least 0"):
            opened(llama, hold_seconds=seconds)


def test_models_and_compressors_that_cannot_are_refused(llama):
    import copy

    from sparse_rl.beacon import add_beacon

    with pytest.raises(SparseRLError, match="folds chunks of a response into beacons"):
        Engine(add_beacon(copy.deepcopy(llama)), "beacon:4", rows=2).open(8, 20)
    with pytest.raises(SparseRLError, match="can only read tokens as a whole prompt"):
        Engine(hybrid("jamba"), "rkv", rows=2, budget=16, interval=8).open(8, 20)
    with pytest.raises(SparseRLError, match="max_tokens is 8"):
        Engine(llama, "rkv", rows=2, budget=16, interval=8).open(8, 8)


def test_another_call_cuts_it_off(llama):
    live = opened(llama)
    live.submit([1, 2])
    live.step()
    expected = Engine(llama, "rkv", budget=BUDGET, interval=INTERVAL, rows=4).generate([[3]], sampling=Sampling(30))[0]
    assert live.engine.generate([[3]], sampling=Sampling(30))[0].tokens.equal(expected.tokens)
    with pytest.raises(SparseRLError, match="was cut off"):
        live.step()
    live.close()


def test_an_error_in_a_round_closes_the_engine_and_leaves_it_usable(llama, monkeypatch):
    with opened(llama) as live:
        chat = live.submit([1, 2])
        live.step()
        monkeypatch.setattr(live._loop, "decode", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            live.step()
        assert live.closed and chat.status == "ended"
        assert llama.config._attn_implementation == "sdpa"
    assert live.engine.generate([[3]], sampling=Sampling(5))


def test_the_plan_counts_what_is_allocated(llama):
    engine = Engine(llama, "rkv", budget=BUDGET, interval=INTERVAL, rows=4)
    plan = engine.storage.live_plan(64, 200)
    with engine.open(64, 200):
        assert engine.cache.nbytes == plan.cache_bytes and engine.scratch.nbytes == plan.scratch_bytes
        state = engine.state
        assert sum(t.nbytes for t in (state.tokens, state.logprobs, state.trace)) == plan.record_bytes
