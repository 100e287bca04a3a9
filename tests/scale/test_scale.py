"""The scale model: its parts against the engine and the dealing, its constants against the rows they explain."""

import dataclasses
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparse_rl.cache import Trace
from sparse_rl.config import make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.learn.packing import shared_prefixes
from sparse_rl.models import load_model
from sparse_rl.rollout import Engine, Sampling
from sparse_rl.scale.lengths import Lengths, lengths_of_run
from sparse_rl.scale.model import H200, RECORD_BYTES, Links, Work, drain, forecast, one_step, work_of
from sparse_rl.tasks import make
from sparse_rl.train.deal import deal
from sparse_rl.train.log import Clock
from sparse_rl.train.merge import without_full_traces
from sparse_rl.train.run import train
from sparse_rl.train.worker import Sampler
from tests.helpers.models import prompts_of, tiny
from tests.helpers.runs import recipe

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))
import scale_recorded

ROOT = Path(__file__).parent.parent.parent


def work(name: str = "qwen2.5-1.5b", prompt: int = 256, **sections: dict) -> Work:
    rollout = {"rows": 16, "prompts": 16, "group_size": 4, "max_new_tokens": 2048} | sections.pop("rollout", {})
    settings = {
        "model": {"name": name} | sections.pop("model", {}),
        "task": {"name": "sums"},
        "rollout": rollout,
        **sections,
    }
    return work_of(make_recipe(settings), prompt)


def test_the_constants_explain_the_recorded_rows():
    """Rows are read from docs/results.md; the widest error claimed for each table in docs/scale.md holds."""
    tables = (scale_recorded.decode_steps(), 0.09), (scale_recorded.rollouts(), 0.18), (scale_recorded.passes(), 0.37)
    for rows, widest in tables:
        assert len(rows) >= 4
        for name, _, ours, theirs in rows:
            assert abs(ours / theirs - 1) <= widest, (name, ours, theirs)
    assert len(scale_recorded.decode_steps()) == 16 and len(scale_recorded.rollouts()) == 17
    steps = {
        name: ours / theirs - 1 for name, _, ours, theirs in scale_recorded.training_steps() if name.endswith("step")
    }
    assert abs(steps["sparse-rl: step"]) < 0.04 and abs(steps["shadow: step"]) < 0.04


def test_the_page_shows_what_the_model_says():
    page = (ROOT / "docs/scale.md").read_text()
    assert scale_recorded.tables() in page
    for field in dataclasses.fields(H200):
        assert f"`{field.name}`" in page, field.name
    for field in dataclasses.fields(Links):
        assert f"`{field.name}`" in page, field.name


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 12))
def test_rows_drain_as_a_queue_does(lengths, rows):
    """Against a loop over decode steps: rows that are done take the next sequence."""
    waiting, running, counts = list(lengths), [], []
    while waiting or running:
        while waiting and len(running) < rows:
            running.append(waiting.pop(0))
        counts.append(len(running))
        running = [left - 1 for left in running if left > 1]
    live, steps = drain(np.array(lengths), rows)
    expanded = [count for count, duration in zip(live.tolist(), steps.astype(int).tolist()) for _ in range(duration)]
    assert expanded == counts


def test_a_rollout_takes_the_steps_that_the_engine_takes():
    stops = tuple(range(3, 90, 4))
    engine = Engine(tiny("llama"), "rkv", budget=16, interval=8, rows=4)
    done = engine.generate(prompts_of(11, 5, 3, 8, 9, 7), 2, Sampling(max_new_tokens=40, stop_ids=stops), seed=3)
    new = np.array([len(t.response_tokens) for t in done])
    assert len(set(new.tolist())) > 4
    _, steps = drain(new - 1, 4)  # the first token comes with the prompt
    assert steps.sum() == engine.steps


@pytest.mark.parametrize("name, prompt", [("rkv", 10), ("rkv", 40), ("dense", 10), ("prompt-only", 40)])
def test_slots_and_evictions_are_those_of_a_trace(name, prompt):
    rollout = {"compressor": name, "budget": 16, "interval": 8, "max_new_tokens": 61, "rows": 2}
    it = work("tiny", prompt, rollout=rollout)
    engine = Engine(load_model("tiny")[0], name, budget=16, interval=8, rows=2)
    t = engine.generate(prompts_of(prompt), 1, Sampling(max_new_tokens=61, stop_ids=()))[0]
    gone, total = t.trace.evicted_at[0, 0].long(), len(t.tokens)
    queries = torch.arange(prompt, total - 1)[:, None]  # tokens that were fed while decoding
    seen = ((torch.arange(total) <= queries) & (queries < gone)).sum().item()
    moments = {moment for moment in gone.tolist() if prompt < moment <= total}
    new = np.array([60])
    assert it.slots_read(new).item() == pytest.approx(seen, rel=0.03)
    assert it.evictions(new).item() == len(moments)


def test_beacons_take_more_steps_and_fewer_slots():
    more = {"learn": {"method": "shadow"}}
    beacons, dense = work(rollout={"compressor": "beacon:16"}, **more), work(rollout={"compressor": "dense"})
    new = np.array([2000])
    assert beacons.slots_read(new) < dense.slots_read(new) / 3
    assert dense.slots_read(new).item() == sum(256 + i + 0.5 for i in range(2000))
    assert beacons.step_seconds(H200, 4) == dense.step_seconds(H200, 4)


def test_lengths_are_drawn_within_bounds():
    drawn = Lengths(1000, 0.75).draw(4000, 8, 16000, seed=1)
    assert (drawn == Lengths(1000, 0.75).draw(4000, 8, 16000, seed=1)).all() and drawn.min() >= 1
    assert drawn.mean() == pytest.approx(1000, rel=0.03) and drawn.std() / drawn.mean() == pytest.approx(0.75, rel=0.1)
    assert (Lengths(1000, 0.75).draw(100, 8, 300, seed=1) <= 300).all()
    assert (Lengths(70, 0).draw(3, 2, 300, seed=1) == 70).all()


@pytest.mark.parametrize("by_rank", [False, True])
def test_completions_of_a_prompt_have_similar_lengths(by_rank):
    drawn = Lengths(1000, 0.75).draw(4000, 8, 16000, seed=1)
    if by_rank:
        given = tuple(drawn[:500].ravel().tolist())
        drawn = Lengths(1000, 0.75, given).draw(4000, 8, 16000, seed=2)
        assert drawn.mean() == pytest.approx(np.mean(given), rel=0.05)
    assert np.log(drawn).mean(1).var() > 3 * np.log(drawn).var() / 8


def test_lengths_of_a_run(tmp_path):
    train(recipe(run={"steps": 2, "samples": 8}, eval={"every": 0}), tmp_path / "run", show=False)
    found = lengths_of_run(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert found.mean == np.mean([line["rollout/length/mean"] for line in lines])
    assert len(found.given) == 16 and np.mean(found.given) == pytest.approx(found.mean, rel=0.02)
    assert set(found.draw(50, 4, 10**6, seed=0).ravel().tolist()) <= set(found.given)


def test_a_folder_without_a_run_has_no_lengths(tmp_path):
    with pytest.raises(SparseRLError, match="holds no steps"):
        lengths_of_run(tmp_path)


def test_lengths_of_a_torn_run(tmp_path):
    step = {"rollout/length/mean": 4.0}
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(s) + "\n" for s in (step, {"rollout/length/mean": None}))
    )
    path = tmp_path / "samples" / "step-000001" / "trajectories.jsonl"
    path.parent.mkdir(parents=True)
    whole = json.dumps({"tokens": [1, 2, 3, 4, 5], "num_prompt_tokens": 2}) + "\n"
    path.write_text(whole + whole[:20])
    assert lengths_of_run(tmp_path) == Lengths(4.0, 0.0, (4,))
    path.write_text(json.dumps({"tokens": [1], "num_prompt_tokens": 1}) + "\n")
    assert lengths_of_run(tmp_path).given == ()  # of empty responses nothing is learned
    for odd in ({}, {"tokens": 3, "num_prompt_tokens": 1}, {"tokens": [1], "num_prompt_tokens": 2}):
        path.write_text(whole + json.dumps(odd) + "\n")
        with pytest.raises(SparseRLError, match="has a line without tokens and num_prompt_tokens"):
            lengths_of_run(tmp_path)


@pytest.mark.parametrize("shares", [True, False])
def test_packed_tokens_are_those_that_the_learner_packs(shares):
    prompts, new = torch.randint(3, 90, (3, 20)), torch.randint(3, 90, (12, 30))
    tokens = torch.cat([prompts.repeat_interleave(4, 0), new], 1)
    tokens[:, 20] = torch.arange(12)  # completions differ from their first token on
    lengths = 20 + torch.randint(1, 31, (12,))
    it = dataclasses.replace(work(prompt=20), shares=shares)
    _, common = shared_prefixes(tokens, lengths)
    assert it.packed_tokens(lengths.numpy()) == lengths.sum() - (common.sum() if shares else 0)


def test_who_packs_and_shares():
    assert work().packs and work().shares and not work(learn={"packing": "never"}).packs
    assert not work(learn={"method": "shadow"}, student={"chunks": [4]}).packs
    padded = work(learn={"packing": "never"})
    alike, ragged = np.full(8, 100), np.array([100] * 4 + [50] * 4)
    assert padded.passes_of(H200, ragged)[0] > work().passes_of(H200, ragged)[0]
    assert padded.passes_of(H200, alike)[0] > work().passes_of(H200, alike)[0]  # the prompts


def test_equal_lengths_leave_nobody_idle():
    it = work()
    alone, even = (one_step(it, H200, Links(), gpus, np.full((16, 4), 500)) for gpus in (1, 4))
    assert alone.idle == even.idle == pytest.approx(0, abs=1e-12) and alone.communication == alone.exchange == 0
    optimizer = it.minibatches * 32 * it.trained / H200.bandwidth  # of all weights, on every process
    assert even.sample < alone.sample and even.update - optimizer == pytest.approx((alone.update - optimizer) / 4)


LATE = np.full((16, 4), 500)
LATE[5, 2] = 2000  # one response holds up everybody


def test_the_step_waits_for_the_slowest():
    it, owner = work(), np.array(deal([1.0] * 16, work().minibatches, 4))
    late = one_step(it, H200, Links(), 4, LATE)
    seconds = [it.rollout_seconds(H200, LATE[owner == rank].ravel(), 4) for rank in range(4)]
    assert late.rollout == max(seconds) == seconds[owner[5]] and late.idle_sampling > 0.3
    tokens, optimizer = LATE + it.prompt_tokens, 32 * it.trained / H200.bandwidth
    scores = [it.views * it.passes_of(H200, tokens[owner == rank].ravel())[0] for rank in range(4)]
    sampled = np.add(seconds, scores)
    waited = (sampled.max() - sampled).sum()
    for batch in np.array_split(np.arange(16), it.minibatches):
        own = [tokens[[i for i in batch if owner[i] == rank]].ravel() for rank in range(4)]
        learned = np.array([it.passes * it.passes_of(H200, part)[0] + optimizer for part in own])
        waited += (learned.max() - learned).sum()
    assert late.idle * late.step * 4 == pytest.approx(waited)


def test_expected_lengths_and_sampling_ahead_shorten_the_wait():
    it = work()
    late = one_step(it, H200, Links(), 4, LATE)
    expected = np.where(np.arange(16) == 5, 3000.0, 1000.0).tolist()  # known beforehand, the others go elsewhere
    assert one_step(it, H200, Links(), 4, LATE, expected).idle < late.idle
    ahead = one_step(dataclasses.replace(it, rollout=dataclasses.replace(it.rollout, ahead=1)), H200, Links(), 4, LATE)
    assert 0 < ahead.idle * ahead.step < late.idle * late.step  # part of it is hidden


def test_volumes_of_communication():
    links = Links(link=100e9, network=10e9, per_node=8, latency=1e-9)
    it, shards = work(), work(model={"shard": True})
    n = it.trained
    assert it.communication(links, 1, 3) == shards.communication(links, 1, 3) == 0
    assert it.communication(links, 8, 3) == pytest.approx(2 * 7 / 8 * 4 * n / 100e9, rel=1e-5)
    assert it.communication(links, 16, 3) == pytest.approx(2 * 15 / 16 * 4 * n / 10e9, rel=1e-5)
    assert shards.communication(links, 16, 3) == pytest.approx(3 * 15 / 16 * (2 * 2 + 4) * n / 10e9, rel=1e-5)
    assert shards.publish_seconds(links, H200, 8) == pytest.approx(7 / 8 * 2 * n / 100e9, rel=1e-4)
    assert it.publish_seconds(links, H200, 8) == 0 < work(rollout={"ahead": 1}).publish_seconds(links, H200, 1)
    adapters = work(model={"lora_rank": 8})
    assert (
        adapters.communication(links, 8, 3) < 0.02 * it.communication(links, 8, 3) and adapters.passes == it.passes - 1
    )


def test_rollouts_ahead_hide_the_shorter_part():
    turns, ahead = (forecast(work(rollout={"ahead": n}), H200, Links(), 4, Lengths(500, 0.5)) for n in (0, 1))
    assert turns.step == turns.step_at_worst
    assert turns.step == pytest.approx(turns.sample + turns.update + turns.communication + turns.exchange + turns.rest)
    hidden = H200.hidden * min(turns.sample, turns.update + turns.communication)
    assert turns.step - ahead.step == pytest.approx((hidden - ahead.publish) / (1 - H200.step_rest), rel=1e-3)
    assert ahead.step < turns.step <= ahead.step_at_worst


def test_records_are_as_large_as_counted():
    """What a process hands to the others, padding included, as World does it."""
    settings = recipe(loss={"beta": 0.01}, rollout={"prompts": 32, "group_size": 8, "rows": 64, "max_new_tokens": 72})
    model, tokenizer = load_model("tiny-sums")
    step = Sampler(settings, model, tokenizer, make("sums", count=8)).step(0, Clock())
    assert all(isinstance(t.trace, Trace) for t in step.trajectories)
    buffer = io.BytesIO()
    torch.save(without_full_traces(step), buffer)
    padded = len(step.trajectories) * max(len(t.tokens) for t in step.trajectories)
    assert buffer.tell() / padded == pytest.approx(RECORD_BYTES, rel=0.2)
