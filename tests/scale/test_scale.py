"""The scale model: its parts against the engine, the dealing and real allocations; its constants against the rows they claim to explain."""

import dataclasses
import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from sparse_rl.cache import Trace
from sparse_rl.cli.main import app
from sparse_rl.config import load_recipe, make_recipe
from sparse_rl.errors import SparseRLError
from sparse_rl.models import load_model
from sparse_rl.rollout import Engine, Sampling
from sparse_rl.scale.lengths import Lengths, lengths_of_run
from sparse_rl.scale.model import H200, RECORD_BYTES, Links, Work, drain, forecast, one_step, work_of
from sparse_rl.tasks import make
from sparse_rl.train.deal import deal
from sparse_rl.train.log import Clock
from sparse_rl.train.loop import Trainer
from sparse_rl.train.merge import without_full_traces
from sparse_rl.train.run import plan_run, train
from sparse_rl.train.worker import Sampler
from tests.helpers.models import prompts_of, tiny
from tests.helpers.runs import recipe, run

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


# ------------------------------------------------------------------------------------------------------------ recorded figures


def test_the_constants_explain_the_recorded_rows():
    """Rows are read from docs/results.md; the widest error claimed for each table in docs/scale.md holds."""
    tables = (scale_recorded.decode_steps(), 0.09), (scale_recorded.rollouts(), 0.18), (scale_recorded.passes(), 0.22)
    for rows, widest in tables:
        assert len(rows) >= 6
        for name, _, ours, theirs in rows:
            assert abs(ours / theirs - 1) <= widest, (name, ours, theirs)
    assert len(scale_recorded.decode_steps()) == 16 and len(scale_recorded.rollouts()) == 17


def test_the_page_shows_what_the_model_says():
    page = (ROOT / "docs/scale.md").read_text()
    assert scale_recorded.tables() in page
    for field in dataclasses.fields(H200):
        assert f"`{field.name}`" in page, field.name
    for field in dataclasses.fields(Links):
        assert f"`{field.name}`" in page, field.name


# ------------------------------------------------------------------------------------------------------------ rows and responses


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


def test_lengths_are_drawn_within_bounds_and_from_a_run(tmp_path):
    drawn = Lengths(1000, 0.75).draw(4000, 8, 16000, seed=1)
    assert (drawn == Lengths(1000, 0.75).draw(4000, 8, 16000, seed=1)).all() and drawn.min() >= 1
    assert drawn.mean() == pytest.approx(1000, rel=0.03) and drawn.std() / drawn.mean() == pytest.approx(0.75, rel=0.1)
    means = np.log(drawn).mean(1)
    assert means.var() > 3 * np.log(drawn).var() / 8  # completions of a prompt are alike
    assert (Lengths(1000, 0.75).draw(100, 8, 300, seed=1) <= 300).all()
    assert (Lengths(70, 0).draw(3, 2, 300, seed=1) == 70).all()
    train(recipe(run={"steps": 2, "samples": 8}, eval={"every": 0}), tmp_path / "run", show=False)
    found = lengths_of_run(tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert found.mean == np.mean([line["rollout/length/mean"] for line in lines])
    assert len(found.given) == 16 and np.mean(found.given) == pytest.approx(found.mean, rel=0.02)
    assert set(found.draw(50, 4, 10**6, seed=0).ravel().tolist()) <= set(found.given)
    given = Lengths(1000, 0.75, tuple(drawn[:500].ravel().tolist())).draw(4000, 8, 16000, seed=2)
    assert given.mean() == pytest.approx(drawn[:500].mean(), rel=0.05)
    assert np.log(given).mean(1).var() > 3 * np.log(given).var() / 8  # as without a run
    with pytest.raises(SparseRLError, match="holds no steps"):
        lengths_of_run(tmp_path)


# ------------------------------------------------------------------------------------------------------------ several processes


def test_the_step_waits_for_the_slowest():
    it = work()
    new = np.full((16, 4), 500)
    alone, even = (one_step(it, H200, Links(), gpus, new) for gpus in (1, 4))
    assert alone.idle == even.idle == pytest.approx(0, abs=1e-12) and alone.communication == alone.exchange == 0
    optimizer = it.minibatches * 32 * it.trained / H200.bandwidth  # of all weights, on every process
    assert even.sample < alone.sample and even.update - optimizer == pytest.approx((alone.update - optimizer) / 4)
    new = new.copy()
    new[5, 2] = 2000  # one response holds up everybody
    late = one_step(it, H200, Links(), 4, new)
    owner = deal([1.0] * 16, it.minibatches, 4)
    seconds = [it.rollout_seconds(H200, new[np.array(owner) == rank].ravel(), 4) for rank in range(4)]
    assert late.rollout == max(seconds) == seconds[owner[5]] and late.idle_sampling > 0.3
    expected = np.where(np.arange(16) == 5, 3000.0, 1000.0).tolist()  # known beforehand, the others go elsewhere
    assert one_step(it, H200, Links(), 4, new, expected).idle < late.idle
    tokens, optimizer = new + it.prompt_tokens, optimizer / it.minibatches
    sampled = [
        s + it.views * it.passes_of(H200, tokens[np.array(owner) == r].ravel())[0] for r, s in enumerate(seconds)
    ]
    waited = sum(max(sampled) - s for s in sampled)
    for block in np.array_split(np.arange(16), it.minibatches):
        mine = [tokens[[i for i in block if owner[i] == rank]].ravel() for rank in range(4)]
        learned = [it.passes * it.passes_of(H200, part)[0] + optimizer for part in mine]
        waited += sum(max(learned) - s for s in learned)
    assert late.idle * late.step * 4 == pytest.approx(waited)
    ahead = one_step(dataclasses.replace(it, rollout=dataclasses.replace(it.rollout, ahead=1)), H200, Links(), 4, new)
    assert 0 < ahead.idle * ahead.step * 4 < waited  # part of it is hidden


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


# ------------------------------------------------------------------------------------------------------------ memory


def test_the_plan_counts_the_weights_of_rollouts_ahead():
    turns, ahead = recipe(), recipe(rollout={"ahead": 1})
    plan, other = plan_run(ahead, 40), plan_run(turns, 40)
    trainer = Trainer(ahead, Path("nowhere"), show=False)
    models = {id(m): m for m in (trainer.model, trainer.sampler.model)}
    held = sum(p.nbytes for m in models.values() for p in m.parameters())
    trainer.source.close()
    assert (
        held == plan.rollout.weight_bytes + plan.learner_bytes == 2 * other.rollout.weight_bytes
        and other.learner_bytes == 0
    )
    beside = min(plan.rollout.working_bytes, plan.update_bytes)  # both work at the same time
    assert plan.total_bytes - other.total_bytes == pytest.approx(
        plan.learner_bytes + beside, abs=max(0, other.eval_bytes)
    )
    assert "the learner's own weights" in plan.text() and "the learner's own weights" not in other.text()


SHARDS = """
import json, sys, torch
from tests.helpers.models import tiny
import copy
from sparse_rl.learn.optimizer import MasterAdamW, OptimizerSettings
from sparse_rl.learn.shards import shard
from sparse_rl.models import with_lora
from sparse_rl.distributed.world import join_world, leave_world
world = join_world()
found = []
for rank, dtype in ((0, torch.float32), (0, torch.bfloat16), (4, torch.float32)):
    model = copy.deepcopy(tiny("llama")).to(dtype)
    model = with_lora(model, rank, 16) if rank else model
    shard(model, world.size)
    optimizer = MasterAdamW(model.parameters(), OptimizerSettings())
    gradients = optimizer.gradients()
    bytes_of = lambda tensors: sum(t.to_local().nbytes for t in tensors)
    held = bytes_of(model.parameters()) + bytes_of(gradients)
    optimizer.step(1.0)
    state = [t for s in optimizer.adamw.state.values() for n, t in s.items() if n != "step"]
    found.append(held + bytes_of(state))
every = world.run_on_all(lambda: found)
if world.first:
    print("held", json.dumps(every))
leave_world(world)
"""


def test_the_plan_counts_a_part_of_what_is_divided(tmp_path):
    """Shards, gradients and moments of two processes, against the plan's; every process has whole weights besides."""
    from sparse_rl.compressors import make as compressor
    from sparse_rl.models import ModelShape
    from sparse_rl.planning.memory import make_plan
    from sparse_rl.planning.training import make_training_plan

    (tmp_path / "shards.py").write_text(SHARDS)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(tmp_path / "shards.py"),
    ]
    path = f"{ROOT}:{ROOT / 'tests'}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    every = json.loads(re.search("held (.*)", done.stdout)[1])
    model = tiny("llama")
    parameters = sum(p.numel() for p in model.parameters())
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.get_output_embeddings()]
    adapters = sum(4 * (m.in_features + m.out_features) for m in layers)
    settings = dict(
        micro_batch_tokens=64, checkpointing=False, reference=False, evaluates=False, processes=2, shard=True
    )
    for held, (dtype, trained) in zip(
        zip(*every), ((torch.float32, parameters), (torch.bfloat16, parameters), (torch.float32, adapters)), strict=True
    ):
        shape = ModelShape.of(model.config, dtype)
        weights = parameters * dtype.itemsize
        rollout = make_plan(
            shape, compressor("rkv").bind(16, 8), rows=2, prompt_tokens=9, new_tokens=9, weight_bytes=weights
        )
        plan = make_training_plan(rollout, shape, trained=trained, **settings)
        assert (
            max(held) == pytest.approx(plan.optimizer_bytes, rel=0.02)
            and plan.divided_by == 2
            and plan.learner_bytes == 0
        )
        alone = make_training_plan(rollout, shape, trained=trained, **(settings | {"processes": 1}))
        assert alone.divided_by == 1 and "one of 2 parts" in plan.text() and "parts" not in alone.text()


def test_more_processes_need_less_memory_each_when_divided():
    given = load_recipe("qwen2.5-7b-simplerl", [("model.lora_rank", "0"), ("model.shard", "true")])
    plans = [plan_run(given, 512, processes) for processes in (1, 2, 8, 64)]
    assert [p.optimizer_bytes for p in plans] == [plans[0].optimizer_bytes // n for n in (1, 2, 8, 64)]
    assert all(a.total_bytes > b.total_bytes for a, b in itertools.pairwise(plans))
    assert all(
        p.rollout.weight_bytes == plans[0].rollout.weight_bytes for p in plans
    )  # every process samples with all of it


# ------------------------------------------------------------------------------------------------------------ the command


def invoke(*arguments: object):
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def test_the_command_plans_many_gpus():
    command = ["plan", "--gpus", 64, "--model", "qwen2.5-7b", "--new", 16384, "--rollout.prompts", 256, "--price", 2]
    done = run(*command, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["gpu_hours"] == pytest.approx(64 * found["step"] * 100 / 3600) and found["cost"] == pytest.approx(
        2 * found["gpu_hours"]
    )
    assert found["tokens_per_s"] == pytest.approx(found["tokens"] / found["step"]) and 0 < found["idle"] < 1
    assert found["bytes_per_gpu"] < found["memory"] and found["plan"]["divided_by"] == 64
    shown = run(*command)
    for word in ("a step", "idle", "tokens/s", "memory per GPU", "GPU hours", "cost", "assumptions"):
        assert word in shown.stdout
    one = run("plan", "--recipe", "qwen2.5-1.5b-simplerl", "--gpus", 1, "--rollout.ahead", 1, "--steps", 7)
    assert (
        "7 steps" in one.stdout and "if sharing the device gained nothing" in one.stdout and "one process" in one.stdout
    )


def test_what_cannot_be_is_refused_in_a_sentence(tmp_path):
    seven, half = ["--model", "qwen2.5-7b"], ["--recipe", "qwen2.5-1.5b-simplerl"]
    for arguments, message in [
        ([*seven, "--gpus", 0], "--gpus is 0; it must be a whole number of at least 1"),
        ([*seven, "--gpus", 256], "rollout.prompts is 128 for 256 GPUs"),
        (
            [*seven, "--gpus", 8, "--model.shard", "false", "--gpu-memory", 80],
            "divide the learner among them with --model.shard true",
        ),
        ([*seven, "--gpus", 2, "--gpu-memory", 80], "with --model.shard true"),
        ([*half, "--gpus", 2, "--rows", 100000], "use at most --rows "),
        ([*seven, "--gpus", 4, "--gpu-memory", 8], "no number of GPUs helps"),
        ([*seven, "--gpus", 8, "--price", -1], "--price is -1"),
        ([*seven, "--gpus", 8, "--link", 0], "link is 0"),
        ([*seven, "--gpus", 8, "--per-node", 0], "GPUs per node is 0"),
        ([*seven, "--gpus", 8, "--mean", -5], "mean -5"),
        ([*seven, "--gpus", 8, "--lengths", tmp_path], "holds no steps"),
        ([*seven, "--gpus", 8, "--lengths", tmp_path, "--mean", 5], "--mean and --lengths both"),
        ([*seven, "--gpus", 8, "--rollout.bugdet", 5], "did you mean 'budget'"),
        ([*seven, "--price", 3], "--price is for a run on many GPUs"),
        ([*seven, "--rollout.prompts", 3], "--rollout.prompts is for a run on many GPUs"),
        (["--gpus", 8], "give --model"),
    ]:
        refused = invoke(*arguments).exception
        assert isinstance(refused, SparseRLError) and message in str(refused), (arguments, refused)
        assert len(str(refused).splitlines()) == 1 and str(refused).endswith(".")


def test_the_rows_it_names_fit():
    command = ["--recipe", "qwen2.5-1.5b-simplerl", "--gpus", 2, "--rows"]
    rows = int(re.search(r"--rows (\d+)", str(invoke(*command, 100000).exception))[1])
    assert invoke(*command, rows).exit_code == 0 != invoke(*command, rows + 1).exit_code
