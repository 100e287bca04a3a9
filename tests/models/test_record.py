"""The record of training in a checkpoint: what it holds, what it survives, and records that are refused."""

import json

import pytest
from transformers import AutoModelForCausalLM

from sparse_rl import SparseRLError, load_model
from sparse_rl.models import Record, find_model, read_record, record_of, set_record, stop_ids, with_lora
from sparse_rl.models.record import FILE
from sparse_rl.train.checkpoint import save_model
from sparse_rl.train.run import train
from sparse_rl.train.warmup import warmup
from tests.helpers.runs import recipe

FULL = Record(
    start="tiny", method="shadow", view="shadow", step=7, compressor="rkv", options={"protect_prompt": True}, budget=42,
    interval=4, task="sums", task_options={"count": 3}, template="chat", stop_ids=[1, 9], max_new_tokens=64,
    temperature=0.5, logits="model",
)  # fmt: skip


@pytest.mark.parametrize("adapters", [False, True])
def test_it_survives_saving_and_loading(tmp_path, adapters):
    model, tokenizer = load_model("tiny-sums")
    model = with_lora(model, 2, 4) if adapters else model
    set_record(model, FULL)
    save_model(tmp_path / "a", model, tokenizer)
    assert (tmp_path / "a" / FILE).exists() == adapters
    assert read_record(str(tmp_path / "a")) == FULL
    again, tokenizer = load_model(str(tmp_path / "a"))
    assert record_of(again) == FULL
    if not adapters:  # also through transformers alone
        AutoModelForCausalLM.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
        assert read_record(str(tmp_path / "b")) == FULL
    set_record(again, None)
    assert record_of(again) is None


def test_a_run_records_what_it_did(tmp_path):
    settings = recipe(
        run={"steps": 1}, eval={"every": 0, "temperature": 0.7}, learn={"method": "shadow"},
        task={"name": "sums", "count": 5}, rollout={"stop": ["="]}, model={"logits": "model"},
    )  # fmt: skip
    trainer = train(settings, tmp_path / "run", show=False)
    record = read_record(find_model(str(tmp_path / "run")))
    equals = trainer.tokenizer.convert_tokens_to_ids("=")
    assert record == Record(
        start="tiny-sums", start_seed=0, method="shadow", view="shadow", step=1, compressor="rkv",
        options={"protect_prompt": True}, budget=42, interval=4, task="sums", task_options={"count": 5},
        stop_ids=[equals, 1], max_new_tokens=64,
        temperature=0.7, logits="model",
    )  # fmt: skip
    model, tokenizer = load_model(str(tmp_path / "run"))  # the newest checkpoint
    assert record_of(model) == record and stop_ids(model, tokenizer) == tuple(sorted([1, equals]))


def test_an_adaptive_budget_is_recorded_as_it_is(tmp_path):
    budget = {"min": 38, "max": 60, "target": {"rejection": 0.5}}
    trainer = train(recipe(run={"steps": 2}, eval={"every": 0}, rollout={"budget": budget}), tmp_path / "r", show=False)
    record = read_record(str(tmp_path / "r" / "checkpoints" / "step-000002"))
    assert record.budget == trainer.sampler.engine.compressor.budget != 60


def test_students_record_their_beacon(tmp_path):
    settings = recipe(run={"steps": 1}, eval={"every": 0}, student={"chunks": [4, [2, 8]]})
    train(settings, tmp_path / "run", show=False)
    folders = sorted((tmp_path / "run" / "checkpoints" / "step-000001" / "students").iterdir())
    records = [read_record(str(folder)) for folder in folders]
    assert sorted(str(record.compressor) for record in records) == ["None", "beacon:4"]
    assert {(record.budget, record.interval, record.task) for record in records} == {(None, None, "sums")}


def test_warm_up_records_its_task_and_ends_but_no_cache(tmp_path):
    warmup(recipe(warmup={"steps": 1, "batch": 2}, eval={"prompts": 1}), tmp_path / "warm", show=False)
    record = read_record(str(tmp_path / "warm"))
    assert (record.method, record.task, record.stop_ids, record.compressor) == ("warmup", "sums", [1], None)


def test_earlier_versions_recorded_the_template_alone(tmp_path):
    model, tokenizer = load_model("tiny-sums")
    model.config.sparse_rl_template = "qwen-boxed"
    save_model(tmp_path / "whole", model, tokenizer)
    assert record_of(load_model(str(tmp_path / "whole"))[0]) == Record(template="qwen-boxed")
    save_model(tmp_path / "adapters", with_lora(model, 2, 4), tokenizer)
    (tmp_path / "adapters" / FILE).write_text('{"template": "abel"}\n')
    assert record_of(load_model(str(tmp_path / "adapters"))[0]) == Record(template="abel")


@pytest.mark.parametrize(
    "record, sentence",
    [
        ({"budget": "many"}, "budget = 'many', which is not a whole number"),
        ({"budget": True}, "budget = True, which is not a whole number"),
        ({"options": [1]}, r"options = \[1\], which is not keys"),
        ({"stop_ids": ["</s>"]}, "which is not a list of token ids"),
        ({"stop_ids": [-1, 1]}, "which is not a list of token ids"),
        ({"stop_ids": [1, 10**30]}, "which is not a list of token ids"),
        ({"template": "x" * 3_000_000}, "has template of 3,000,000 characters; at most 100,000 are read"),
        ({"logits": "int4"}, "it must be float32, or model"),
        ("rkv", "it must hold keys"),
    ],
)
def test_a_broken_record_gets_a_sentence(tmp_path, record, sentence):
    model, tokenizer = load_model("tiny-sums")
    save_model(tmp_path, model, tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "sparse_rl": record}))
    with pytest.raises(SparseRLError, match=sentence):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**config, "sparse_rl": {"of a later version": 1}}))
    assert read_record(str(tmp_path)) == Record()


def test_a_run_without_a_checkpoint_gets_a_sentence(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with pytest.raises(SparseRLError, match="a run without a checkpoint"):
        load_model(str(tmp_path / "run"))
