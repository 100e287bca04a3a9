"""`rollout.slots` through the commands: training, resuming, what later commands inherit, plans, benches."""

import json

import pytest

from sparse_rl import SparseRLError
from sparse_rl.cli import inherit
from sparse_rl.compressors import make
from sparse_rl.models import load_model, read_record
from sparse_rl.records import read_trajectories
from sparse_rl.rollout.text import generate
from sparse_rl.train.run import plan_run, train
from tests.helpers.runs import recipe, run

KEYS = {
    "rollout": {"slots": "fp8", "slots_kept": [-1], "max_new_tokens": 24, "prompts": 2, "rows": 8},
    "learn": {"method": "shadow", "minibatches": 1},
    "eval": {"every": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small-slots")
    trainer = train(recipe(**KEYS, run={"steps": 2}), folder / "parts", show=False)
    assert str(trainer.sampler.engine.cache.shape.slots) == "fp8, layers 2 as the model"
    assert plan_run(recipe(**KEYS), 40).rollout.cache_bytes == trainer.sampler.engine.cache.nbytes
    return folder


def test_a_run_is_replayed_and_resumes_to_the_byte(folder):
    train(recipe(**KEYS, run={"steps": 3}), folder / "parts", resume=True, show=False)
    train(recipe(**KEYS, run={"steps": 3}), folder / "whole", show=False)
    lines = (folder / "whole" / "metrics.jsonl").read_bytes()
    assert (folder / "parts" / "metrics.jsonl").read_bytes() == lines
    first = json.loads(lines.splitlines()[0])
    assert first["gap/abs/mean"] < 1e-4 and first["gap/alpha/mean"] < 1, first


def test_commands_inherit_it(folder):
    name = str(folder / "parts")
    trained = inherit.Trained.of(name)
    asked = {"compressor": None, "budget": None, "interval": None}
    cache, taken = inherit.cache_of(trained, asked, {}, "rkv", False)
    assert (
        cache.options
        == {"protect_prompt": True, "slots": "fp8", "slots_kept": [-1]}
        == {key: taken[key] for key in ("protect_prompt", "slots", "slots_kept")}
    )
    other, _ = inherit.cache_of(trained, {**asked, "compressor": "snapkv"}, {"slots": "int8"}, "rkv", False)
    assert other.options == {"protect_prompt": True, "slots": "int8", "slots_kept": [-1]}
    assert inherit.options_for("dense", trained.record) == {}
    caches, _ = inherit.caches_of([trained], None, None, None, {"slots": "int8"}, False)
    assert [c.make().slots and c.make().slots.kind for c in caches] == [None, "int8"]
    record = read_record(trained.model)
    assert record is not None and make(record.compressor, **record.options).slots == make("rkv", **cache.options).slots
    model, tokenizer = load_model(trained.model)
    text = generate(model, tokenizer, ["1+2="], max_new_tokens=4)
    assert text == generate(model, tokenizer, ["1+2="], max_new_tokens=4, compressor="rkv", budget=42, interval=4,
                            compressor_options=cache.options)  # fmt: skip


def test_rollouts_and_plans_take_it_as_an_option_of_the_compressor(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "3 5 2 ="}\n')
    done = run("rollout", "tiny-sums", "--prompts", prompts, "--out", tmp_path / "out", "--budget", 42, "--interval", 4,
               "--max-new-tokens", 8, "--compressor.slots", "int8")  # fmt: skip
    assert done.returncode == 0, done.stderr
    (trajectory,) = read_trajectories(tmp_path / "out")
    assert trajectory.trace.slots.kind == "int8"
    plans = [json.loads(run("plan", "--model", "qwen2.5-1.5b", "--json", *more).stdout)
             for more in ([], ["--compressor.slots", "fp8"],
                          ["--compressor.slots", "fp8", "--compressor.slots_kept", "[0]"])]  # fmt: skip
    plain, small, kept = (p["slot_bytes"] for p in plans)
    assert (plain, small, kept) == (28 * 2 * 516, 28 * 2 * 262, 27 * 2 * 262 + 2 * 516)
    assert (
        plans[1]["kv_bytes_per_token"] == plans[0]["kv_bytes_per_token"]
    )  # of a dense cache, which it is held against
    assert "640 slots of fp8)" in run("plan", "--model", "qwen2.5-1.5b", "--compressor.slots", "fp8").stdout
    result = json.loads(run("bench", "rollout", "--model-shape", "tiny", "--rows", 2, "--budget", 16, "--interval", 8,
                            "--prompt", 8, "--new", 20, "--repeats", 1, "--slots", "int8",
                            "--json").stdout)  # fmt: skip
    assert result["slots"] == "int8" and result["kv_bytes"] == result["kv_bytes_planned"]


def test_mistakes_get_a_sentence():
    with pytest.raises(SparseRLError, match="there is no slot format 'fp16'; did you mean 'fp8'"):
        recipe(rollout={"slots": "fp16"})
    with pytest.raises(SparseRLError, match="set slots to fp8 or int8"):
        recipe(rollout={"slots_kept": [0]})
    with pytest.raises(SparseRLError, match=r"write rollout\.slots instead"):
        recipe(rollout={"compressor_options": {"slots": "fp8"}})
