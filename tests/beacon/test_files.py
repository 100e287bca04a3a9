"""Beacons on disk, and what is refused: lost or foreign files, chunks without meaning, models without a beacon."""

import copy
import json

import pytest
import torch
from safetensors.torch import save_file

from sparse_rl import Engine, Sampling, SparseRLError
from sparse_rl.beacon import FILE, add_beacon, beacon_of
from sparse_rl.compressors import make
from sparse_rl.learn.score import token_logprobs
from sparse_rl.models import load_model, tiny_tokenizer
from sparse_rl.records import TrajectoryWriter, read_trajectories
from sparse_rl.train.checkpoint import save_model
from tests.helpers.decoding import FAMILY
from tests.helpers.models import VOCABULARY, prompts_of, tiny


def student(name: str = "llama", chunks=(), position="shared"):
    return add_beacon(copy.deepcopy(tiny(name)), chunks, position, seed=1)


def generate(model, chunk: int):
    engine = Engine(model, make("beacon", chunk=chunk), rows=4)
    return engine.generate(prompts_of(5, 11, 3), 2, Sampling(max_new_tokens=37, stop_ids=()), seed=3)


def test_trajectories_with_beacons_are_written_and_read_back(tmp_path):
    model = student()
    trajectories = generate(model, 4)
    with TrajectoryWriter(tmp_path / "out") as writer:
        for t in trajectories:
            writer.write(t)
    for ours, theirs in zip(trajectories, read_trajectories(tmp_path / "out"), strict=True):
        assert torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.positions, theirs.positions)
        assert ours.beacon_id == theirs.beacon_id and torch.equal(ours.trace.evicted_at, theirs.trace.evicted_at)


@pytest.mark.parametrize("name", FAMILY)
def test_a_student_is_an_ordinary_folder_and_a_beacon(tmp_path, name):
    from transformers import AutoModelForCausalLM

    model = student(name, (4,), "own")
    save_model(tmp_path / "m", model, tiny_tokenizer())
    loaded, _ = load_model(str(tmp_path / "m"))
    beacon = beacon_of(loaded)
    assert (beacon.chunks, beacon.position) == ((4,), "own") and torch.equal(beacon.beacon, beacon_of(model).beacon)
    ours, theirs = (generate(m, 4) for m in (model, loaded))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(ours, theirs, strict=True))
    plain, report = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    tokens = torch.tensor(prompts_of(9))
    with torch.no_grad():
        assert torch.equal(plain(tokens).logits, tiny(name)(tokens).logits)


@pytest.fixture
def folder(tmp_path):
    """A student of 8 tokens per beacon on disk."""
    save_model(tmp_path / "m", student(chunks=(8,)), tiny_tokenizer())
    assert json.loads((tmp_path / "m" / "config.json").read_text())["vocab_size"] == VOCABULARY
    return tmp_path / "m"


def test_a_lost_beacon_is_noticed(folder, tmp_path):
    (folder / FILE).unlink()
    with pytest.raises(
        SparseRLError, match=r"was saved with a beacon, but its beacon.safetensors is not there; copy it"
    ):
        load_model(str(folder))
    add_beacon(copy.deepcopy(tiny("llama"))).save_pretrained(tmp_path / "lost")  # by transformers alone
    tiny_tokenizer().save_pretrained(tmp_path / "lost")
    with pytest.raises(SparseRLError, match="was saved with a beacon, but its"):
        load_model(str(tmp_path / "lost"))


def test_a_damaged_beacon_is_refused(folder):
    (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-20])
    with pytest.raises(SparseRLError, match="is damaged"):
        load_model(str(folder))
    save_file({"beacon": torch.zeros(8)}, folder / FILE, metadata={"position": "own"})
    with pytest.raises(SparseRLError, match="is damaged"):
        load_model(str(folder))


def test_the_beacon_of_another_model_is_refused(folder, tmp_path):
    other = add_beacon(copy.deepcopy(tiny("llama", vocab_size=VOCABULARY + 3)))
    save_model(tmp_path / "other", other, tiny_tokenizer())
    (folder / FILE).write_bytes((tmp_path / "other" / FILE).read_bytes())
    with pytest.raises(SparseRLError, match="is the beacon of another model"):
        load_model(str(folder))


def test_tokens_with_beacons_need_a_model_with_a_beacon():
    folded, *_ = generate(student(), 4)
    with pytest.raises(SparseRLError, match=r"hold id 61, outside this model's vocabulary of 61: it is a beacon's"):
        token_logprobs(tiny("llama"), folded.tokens, folded.trace)


@pytest.mark.parametrize("name", ["beacon:²", "beacon:rkv"])
def test_an_argument_that_is_not_a_number_is_refused(name):
    with pytest.raises(SparseRLError, match="write beacon:16"):
        make(name)


@pytest.mark.parametrize("chunk", [1, 0, -4, True, 2.0])
def test_a_chunk_has_at_least_two_tokens(chunk):
    with pytest.raises(SparseRLError, match="must be a whole number from 2 on"):
        make("beacon", chunk=chunk)


def test_a_threshold_is_positive():
    with pytest.raises(SparseRLError, match="must be a positive number of nats"):
        make("beacon", threshold=0.0)


def test_an_engine_takes_the_chunks_its_student_was_trained_with():
    model = student(chunks=(8,))
    assert Engine(model, "beacon:8").compressor.chunk == 8
    with pytest.raises(SparseRLError, match="no budget that could be set"):
        Engine(model, "beacon:8").set_budget(4)
    message = "a beacon after every 16 tokens was requested, but this student was trained with one after every 8; use"
    with pytest.raises(SparseRLError, match=message):
        Engine(model, "beacon:16")
    message = r"a beacon after every 2 tokens was requested \(a threshold ends chunks early\), but"
    with pytest.raises(SparseRLError, match=message):
        Engine(model, make("beacon", chunk=8, threshold=1.0))
    with pytest.raises(SparseRLError, match="this model has no beacon"):
        Engine(tiny("llama"), "beacon:8")


def test_a_model_gets_one_beacon_of_a_known_position():
    with pytest.raises(SparseRLError, match="has a beacon already"):
        add_beacon(student())
    with pytest.raises(SparseRLError, match="must be shared"):
        add_beacon(copy.deepcopy(tiny("llama")), position="middle")
